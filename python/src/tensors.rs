//! Tensors from Python and to Python, without a copy.
//!
//! | object | way |
//! |---|---|
//! | a plain tensor of torch, on the CPU or a CUDA device | as it is: [`crate::direct`] |
//! | another tensor of torch | DLPack, through functions of torch: [`crate::exchange`] |
//! | an output as a NumPy array | NumPy's C API: [`crate::numpy`] |
//! | any other object | DLPack, through its method `__dlpack__` |

#![allow(unsafe_code)]

use std::ptr;

use precast_runtime::{
    Tensor as Inner,
    cuda::Stream,
    dlpack::{self, DLManagedTensor, DLManagedTensorVersioned},
};
use precast_store::{Device, record::Dtype};
use pyo3::{
    exceptions::{PyAttributeError, PyBufferError},
    intern,
    prelude::*,
    types::{PyCapsule, PyTuple},
};

use crate::{
    capsules::{UNUSED, UNUSED_VERSIONED, capsule_of, own},
    errors,
    exchange::{Torch, torch},
    numpy::Numpy,
};

/// The library of a tensor: outputs are tensors of the library of the inputs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Library {
    Torch,
    Numpy,
    Jax,
    Cupy,
    /// Outputs are [`Tensor`]s.
    Other,
}

/// Returns whether an object is a tensor.
pub fn is_tensor(object: &Bound<'_, PyAny>) -> bool {
    let py = object.py();
    torch(py).is_some_and(|torch| torch.is_tensor(object))
        || Numpy::imported(py).is_some_and(|numpy| numpy.is_array(object))
        || object.is_instance_of::<Tensor>()
        || object
            .get_type()
            .hasattr(intern!(py, "__dlpack__"))
            .unwrap_or(false)
}

/// Takes a tensor without a copy.
pub fn take(object: &Bound<'_, PyAny>, name: &str) -> PyResult<(Inner, Library)> {
    let py = object.py();
    if let Some(tensor) = torch(py).and_then(|torch| torch.take(object)) {
        return Ok((tensor, Library::Torch));
    }
    // An exact class first: `isinstance` takes a tenth of the conversion.
    let array = Numpy::imported(py).filter(|numpy| numpy.is_array(object));
    if let Some(torch) = torch(py)
        && array.is_none()
        && (torch.is_tensor(object) || object.is_instance(torch.tensor.bind(py))?)
    {
        return Ok((take_from_torch(object, torch, name)?, Library::Torch));
    }
    if array.is_some() {
        return Ok((
            take_by_method(object, name, Library::Numpy)?,
            Library::Numpy,
        ));
    }
    if let Ok(own) = object.cast::<Tensor>() {
        return Ok((own.get().0.share(), Library::Other));
    }
    let library = library_of(object);
    Ok((take_by_method(object, name, library)?, library))
}

/// Takes a parameter: its memory alone, without its gradient.
pub fn take_weight(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Inner> {
    let py = object.py();
    if let Some(torch) = torch(py)
        && object.is_instance(torch.tensor.bind(py))?
    {
        let detached = object.call_method0(intern!(py, "detach"))?;
        return take_from_torch(&detached, torch, name);
    }
    Ok(take(object, name)?.0)
}

fn take_from_torch(object: &Bound<'_, PyAny>, torch: &Torch, name: &str) -> PyResult<Inner> {
    let py = object.py();
    let is = |object: &Bound<'_, PyAny>, method| object.call_method0(method)?.is_truthy();
    let mut object = object.clone();
    if object.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
        let module = py.import(intern!(py, "torch"))?;
        if is(&module, intern!(py, "is_grad_enabled"))? {
            return Err(errors::bad_input(
                format!("`{name}` requires a gradient, and the answer of an artifact has none"),
                "call it under `torch.no_grad()`, or give `x.detach()`",
            ));
        }
        object = object.call_method0(intern!(py, "detach"))?;
    }
    let (Some(exchange), true) = (torch.exchange, torch.is_tensor(&object)) else {
        return take_by_method(&object, name, Library::Torch);
    };
    // The functions know no pending negation (`z.conj().imag`), which is in no byte of the memory.
    if is(&object, intern!(py, "is_neg"))? {
        object = object.call_method0(intern!(py, "resolve_neg"))?;
    }
    let taken = exchange
        .take(&object)
        .map_err(|error| refused(py, name, &error))?;
    taken.map_err(|reason| errors::tensor(name, &reason))
}

/// Returns the library of outputs without inputs: torch if the process has imported it, else NumPy.
pub fn imported(py: Python<'_>) -> Library {
    torch(py).map_or(Library::Numpy, |_| Library::Torch)
}

fn library_of(object: &Bound<'_, PyAny>) -> Library {
    let py = object.py();
    let module = object.get_type().getattr(intern!(py, "__module__"));
    let module: String = module
        .and_then(|module| module.extract())
        .unwrap_or_default();
    match module.split('.').next() {
        Some("numpy") => Library::Numpy,
        Some("jax" | "jaxlib") => Library::Jax,
        Some("cupy") => Library::Cupy,
        _ => Library::Other,
    }
}

/// Returns the error about an object that its own library does not give.
fn refused(py: Python<'_>, name: &str, error: &PyErr) -> PyErr {
    let reason = error.value(py).to_string();
    // torch adds the stack of its C++ code.
    let reason = reason.lines().next().unwrap_or_default();
    let hint = "inputs are dense tensors with strides and memory of their own";
    errors::bad_input(format!("`{name}` can't be used: {reason}"), hint)
}

/// Takes a tensor by its method `__dlpack__`, and makes the current stream wait for its writes.
fn take_by_method(object: &Bound<'_, PyAny>, name: &str, library: Library) -> PyResult<Inner> {
    let py = object.py();
    let failed = |error: PyErr| refused(py, name, &error);
    if library != Library::Numpy && !object.hasattr(intern!(py, "__dlpack__"))? {
        return Err(no_tensor(object, name));
    }
    let mut taken = take_capsule(object);
    // NumPy gives no array that may not be written to. Inputs are only read, but a tensor does not know that.
    let read_only = match &taken {
        Ok(tensor) => matches!(tensor, Err(reason) if reason.to_string().contains("read-only")),
        Err(error) => error.is_instance_of::<PyBufferError>(py),
    };
    if read_only && library == Library::Numpy {
        let copy = object.call_method0(intern!(py, "copy")).map_err(failed)?;
        taken = take_capsule(&copy);
    }
    taken
        .map_err(failed)?
        .map_err(|reason| errors::tensor(name, &reason))
}

/// Takes the tensor of the capsule that an object gives.
fn take_capsule(
    object: &Bound<'_, PyAny>,
) -> PyResult<Result<Inner, precast_runtime::errors::TorchError>> {
    // NumPy has no other device than the CPU.
    if let Some(numpy) = Numpy::imported(object.py())
        && numpy.is_array(object)
    {
        return own(&numpy.capsule(object)?.cast_into::<PyCapsule>()?);
    }
    let method = object.getattr(intern!(object.py(), "__dlpack__"))?;
    let capsule = call_method(&method, stream_for(object)?)?;
    own(&capsule.cast_into::<PyCapsule>()?)
}

fn no_tensor(object: &Bound<'_, PyAny>, name: &str) -> PyErr {
    let class = object.get_type();
    let class = class
        .name()
        .map_or_else(|_| "object".to_owned(), |name| name.to_string());
    errors::bad_input(
        format!("`{name}` is no tensor but a {class}"),
        "give a torch tensor, a NumPy array, or any object with `__dlpack__`",
    )
}

/// Returns the number of the current stream, for a producer on a CUDA device.
fn stream_for(object: &Bound<'_, PyAny>) -> PyResult<Option<isize>> {
    const CUDA: i32 = 2;
    let device = object.call_method0(intern!(object.py(), "__dlpack_device__"))?;
    let (kind, ordinal): (i32, i32) = device.extract()?;
    let device = match usize::try_from(ordinal) {
        Ok(ordinal) if kind == CUDA => Device::Cuda(ordinal),
        _ => return Ok(None),
    };
    dlpack::stream(device).map_err(|reason| errors::torch(&reason))
}

fn call_method<'py>(
    method: &Bound<'py, PyAny>,
    stream: Option<isize>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = method.py();
    let options = pyo3::types::PyDict::new(py);
    if let Some(stream) = stream {
        options.set_item(intern!(py, "stream"), stream)?;
    }
    options.set_item(intern!(py, "max_version"), (1, 0))?;
    let new = method.call((), Some(&options));
    new.or_else(|error| {
        // A producer of DLPack before 1.0 has no such argument.
        if !error.is_instance_of::<pyo3::exceptions::PyTypeError>(py) {
            return Err(error);
        }
        options.del_item(intern!(py, "max_version"))?;
        method.call((), Some(&options))
    })
}

/// Gives a tensor to a library.
pub fn give(py: Python<'_>, tensor: &Inner, library: Library) -> PyResult<Py<PyAny>> {
    match library {
        Library::Torch => {
            let torch = torch(py);
            if let Some(object) = torch.and_then(|torch| torch.give(py, tensor)) {
                return Ok(object);
            }
            match torch.and_then(|torch| torch.exchange) {
                Some(exchange) => exchange.give(py, tensor.share()),
                None => import_to(py, "torch", tensor.share()),
            }
        }
        Library::Numpy => {
            let tensor = match tensor.device() {
                Some(Device::Cpu) | None => tensor.share(),
                Some(_) => tensor
                    .to_device(Device::Cpu)
                    .map_err(|reason| errors::torch(&reason))?,
            };
            // NumPy has no bfloat16.
            match tensor.dtype() {
                Some(Dtype::Bfloat16) => Ok(Tensor(tensor).into_pyobject(py)?.into_any().unbind()),
                _ => {
                    let numpy = Numpy::get(py)?;
                    numpy.give(py, tensor).unwrap_or_else(|tensor| {
                        numpy.over(Tensor(tensor).into_pyobject(py)?.as_any())
                    })
                }
            }
        }
        Library::Jax => import_to(py, "jax.dlpack", tensor.share()),
        Library::Cupy => import_to(py, "cupy", tensor.share()),
        Library::Other => {
            let tensor = Tensor(tensor.share()).into_pyobject(py)?;
            Ok(tensor.into_any().unbind())
        }
    }
}

fn import_to(py: Python<'_>, module: &str, tensor: Inner) -> PyResult<Py<PyAny>> {
    let tensor = Tensor(tensor).into_pyobject(py)?;
    let module = py.import(module)?;
    Ok(module
        .call_method1(intern!(py, "from_dlpack"), (tensor,))?
        .unbind())
}

/// A tensor of the runtime, for libraries that the package does not know. It has memory of its own, which any library
/// with DLPack takes without a copy: `numpy.from_dlpack(tensor)`, `torch.from_dlpack(tensor)`.
#[pyclass(frozen, module = "precast")]
pub struct Tensor(pub Inner);

#[pymethods]
impl Tensor {
    /// Takes a tensor of any library with DLPack, without a copy.
    #[staticmethod]
    fn from_dlpack(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self(take(tensor, "tensor")?.0))
    }

    /// The address of its first element.
    #[getter]
    fn data_ptr(&self) -> usize {
        self.0.address()
    }

    /// The sizes.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    /// The name of the dtype, as `float32`.
    #[getter]
    fn dtype(&self) -> String {
        self.0.dtype_name()
    }

    /// The device, as `cpu` or `cuda:0`.
    #[getter]
    fn device(&self) -> Option<String> {
        self.0.device().map(|device| device.to_string())
    }

    /// A NumPy array over the same memory; a copy of a tensor on a CUDA device.
    fn numpy(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        give(py, &self.0, Library::Numpy)
    }

    /// A DLPack capsule over the same memory.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<isize>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if copy == Some(true) || dl_device.is_some_and(|device| device != self.__dlpack_device__())
        {
            return Err(PyBufferError::new_err(
                "the tensor is given without a copy, on its own device",
            ));
        }
        let consumer = self.consumer(stream)?;
        let tensor = self.0.share();
        if max_version.is_some_and(|(major, _)| major >= 1) {
            let capsule = tensor.into_dlpack(consumer.as_ref());
            capsule_of::<DLManagedTensorVersioned>(py, capsule, UNUSED_VERSIONED)
        } else {
            let capsule = tensor.into_dlpack(consumer.as_ref());
            capsule_of::<DLManagedTensor>(py, capsule, UNUSED)
        }
    }

    /// DLPack's numbers of the device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        match self.0.device() {
            Some(Device::Cuda(ordinal)) => (2, i32::try_from(ordinal).unwrap_or(i32::MAX)),
            _ => (1, 0),
        }
    }

    fn __repr__(&self) -> String {
        let device = self.device().unwrap_or_default();
        format!(
            "precast.Tensor(shape={:?}, dtype={}, device={device})",
            self.0.shape(),
            self.0.dtype_name()
        )
    }
}

impl Tensor {
    /// Returns the consumer's stream, by its number in DLPack.
    fn consumer(&self, stream: Option<isize>) -> PyResult<Option<Stream>> {
        let (Some(Device::Cuda(device)), number) = (self.0.device(), stream.unwrap_or(1)) else {
            return Ok(None);
        };
        let raw = match number {
            -1 => return Ok(None),
            0 | 1 => ptr::null_mut(),
            number => ptr::with_exposed_provenance_mut(number.cast_unsigned()),
        };
        // SAFETY: DLPack's protocol: the number of a stream that the consumer uses.
        let stream = unsafe { Stream::from_raw(raw, device) };
        stream.map(Some).map_err(|reason| errors::torch(&reason))
    }
}

/// Returns the error of an attribute that does not exist.
pub fn no_attribute(message: String) -> PyErr {
    PyAttributeError::new_err(message)
}
