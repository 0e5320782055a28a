//! Tensors of torch through the functions that torch offers for them, `__dlpack_c_exchange_api__` (DLPack 1.3), which
//! take a tenth of the time of its Python method `__dlpack__`.
//!
//! The functions order nothing: producer and consumer use the stream that is current on this thread, which is one stream
//! for torch and the runtime, because they are on the same libtorch.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_int, c_void},
    ptr::{self, NonNull},
};

use precast_runtime::{
    Tensor,
    dlpack::{Capsule, DLManagedTensorVersioned, DLPackVersion, TensorRef},
    errors::TorchError,
};
use pyo3::{
    exceptions::PyBufferError,
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyCapsule, PyCapsuleMethods, PyModule, PyString, PyType},
};

use crate::{direct::Direct, errors};

/// DLPack's structure of functions, up to the functions that are used here.
#[repr(C)]
pub struct Exchange {
    version: DLPackVersion,
    _previous: usize,
    _allocate: usize,
    from_object: unsafe extern "C" fn(*mut c_void, *mut *mut DLManagedTensorVersioned) -> c_int,
    to_object: unsafe extern "C" fn(*mut DLManagedTensorVersioned, *mut *mut c_void) -> c_int,
}

const NAME: &CStr = c"dlpack_exchange_api";

/// `torch.Tensor` and its functions.
pub struct Torch {
    pub tensor: Py<PyType>,
    pub exchange: Option<&'static Exchange>,
    /// None where torch is not as it is known here. Checked with the first tensor.
    direct: PyOnceLock<Option<Direct>>,
}

/// Set with the first tensor of torch. `import precast` imports no torch.
static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Returns torch, if the process has imported it.
pub fn torch(py: Python<'_>) -> Option<&Torch> {
    if let Some(torch) = TORCH.get(py) {
        return Some(torch);
    }
    let tensor = imported(intern!(py, "torch"))?
        .getattr(intern!(py, "Tensor"))
        .ok()?;
    let tensor = tensor.cast_into::<PyType>().ok()?;
    let exchange = Exchange::of(&tensor);
    let _ = TORCH.set(
        py,
        Torch {
            tensor: tensor.unbind(),
            exchange,
            direct: PyOnceLock::new(),
        },
    );
    TORCH.get(py)
}

/// Returns a module that the process has imported.
pub fn imported<'py>(name: &Bound<'py, PyString>) -> Option<Bound<'py, PyModule>> {
    // SAFETY: with the GIL, a name; a new reference, or null without an exception for a module that was not imported.
    let module = unsafe { pyo3::ffi::PyImport_GetModule(name.as_ptr()) };
    // SAFETY: as above.
    let module = unsafe { Bound::from_owned_ptr_or_opt(name.py(), module) };
    if module.is_none() {
        drop(PyErr::take(name.py()));
    }
    module?.cast_into().ok()
}

impl Torch {
    /// Returns whether an object is a tensor, and none of a class derived from it.
    pub fn is_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        object.is_exact_instance(self.tensor.bind(object.py()))
    }

    /// Takes a plain tensor as it is; none for any other object.
    pub fn take(&self, object: &Bound<'_, PyAny>) -> Option<Tensor> {
        if !self.is_tensor(object) {
            return None;
        }
        let py = object.py();
        let direct = self.direct.get_or_init(py, || Direct::of(object));
        direct.as_ref()?.take(object)
    }

    /// Lends the tensor of an object, also of a class derived from `torch.Tensor`; none for any other object, and where
    /// torch is not as it is known here.
    pub fn lend<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<TensorRef<'a>> {
        let py = object.py();
        let class = self.tensor.bind(py);
        let direct = self.direct.get_or_init(py, || {
            let plain = object.call_method0(intern!(py, "detach")).ok()?;
            Direct::of(&plain)
        });
        let is_tensor = self.is_tensor(object) || object.is_instance(class).unwrap_or(false);
        direct.as_ref().filter(|_| is_tensor)?.lend(object)
    }

    /// Lends the tensor of an object that was lent before: a tenth of the time.
    pub fn lend_again<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<TensorRef<'a>> {
        self.direct.get(object.py())?.as_ref()?.lend(object)
    }

    /// Gives a plain tensor as it is; none for another one.
    pub fn give(&self, py: Python<'_>, tensor: &Tensor) -> Option<Py<PyAny>> {
        self.direct.get(py)?.as_ref()?.give(py, tensor)
    }
}

impl Exchange {
    /// Returns the functions of a class of tensors, in a version that is known here.
    fn of(class: &Bound<'_, PyType>) -> Option<&'static Self> {
        let name = intern!(class.py(), "__dlpack_c_exchange_api__");
        let capsule = class.getattr(name).ok()?.cast_into::<PyCapsule>().ok()?;
        let found = capsule.pointer_checked(Some(NAME)).ok()?;
        // SAFETY: a capsule of this name points to DLPack's structure, which lives as long as the process. The header is
        // the same in every version, and the structure behind it in every version 1.
        let exchange = unsafe { found.cast::<Self>().as_ref() };
        (exchange.version.major == 1).then_some(exchange)
    }

    /// Takes a tensor. The object is one of the class.
    pub fn take(&'static self, object: &Bound<'_, PyAny>) -> PyResult<Result<Tensor, TorchError>> {
        let mut out = ptr::null_mut();
        // SAFETY: the functions of this object's class, called with the GIL.
        let code = unsafe { (self.from_object)(object.as_ptr().cast(), &mut out) };
        match NonNull::new(out) {
            Some(out) if code == 0 => {
                // SAFETY: a new structure, which nobody else has. Its memory lives as long as it does.
                Ok(Tensor::from_dlpack(unsafe { Capsule::from_raw(out) }))
            }
            _ => Err(PyErr::take(object.py())
                .unwrap_or_else(|| PyBufferError::new_err("it has no memory for DLPack"))),
        }
    }

    /// Gives a tensor, as an object of the class.
    pub fn give(&'static self, py: Python<'_>, tensor: Tensor) -> PyResult<Py<PyAny>> {
        let capsule: Capsule<DLManagedTensorVersioned> = tensor
            .into_dlpack(None)
            .map_err(|reason| errors::torch(&reason))?;
        let raw = capsule.into_raw();
        let mut out = ptr::null_mut();
        // SAFETY: a structure that nobody else has; torch owns it from here on, also if it fails.
        let code = unsafe { (self.to_object)(raw.as_ptr(), &mut out) };
        if code != 0 || out.is_null() {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: a new reference to an object.
        Ok(unsafe { Bound::from_owned_ptr(py, out.cast()) }.unbind())
    }
}
