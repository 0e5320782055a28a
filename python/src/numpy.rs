//! NumPy's class and functions, looked up once: a look-up takes as long as the conversion itself.
//!
//! Two functions of NumPy's C API make an array of an output. Where they are not found, `numpy.from_dlpack` makes it,
//! which calls the tensor's `__dlpack__` and takes 0.5 µs longer.

#![allow(unsafe_code)]

use std::{
    ffi::{c_int, c_uint, c_void},
    mem, ptr, slice,
};

use precast_runtime::{Tensor as Inner, dlpack::Capsule};
use precast_store::record::Dtype;
use pyo3::{
    ffi::{PyObject, PyTypeObject},
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyCapsule, PyCapsuleMethods, PyModule, PyType},
};
use smallvec::SmallVec;

use crate::{capsules, errors, exchange};

pub struct Numpy {
    array: Py<PyType>,
    /// `numpy.ndarray.__dlpack__`.
    dlpack: Py<PyAny>,
    from_dlpack: Py<PyAny>,
    functions: Option<Functions>,
}

static NUMPY: PyOnceLock<Numpy> = PyOnceLock::new();

impl Numpy {
    /// Returns NumPy, if the process has imported it.
    pub fn imported(py: Python<'_>) -> Option<&Self> {
        NUMPY
            .get(py)
            .or_else(|| Self::of(&exchange::imported(intern!(py, "numpy"))?).ok())
    }

    /// Returns NumPy, imported now if need be.
    pub fn get(py: Python<'_>) -> PyResult<&Self> {
        match NUMPY.get(py) {
            Some(numpy) => Ok(numpy),
            None => Self::of(&py.import(intern!(py, "numpy"))?),
        }
    }

    fn of<'py>(module: &Bound<'py, PyModule>) -> PyResult<&'py Self> {
        let py = module.py();
        NUMPY.get_or_try_init(py, || {
            let array = module.getattr(intern!(py, "ndarray"))?;
            Ok(Self {
                dlpack: array.getattr(intern!(py, "__dlpack__"))?.unbind(),
                array: array.cast_into::<PyType>()?.unbind(),
                from_dlpack: module.getattr(intern!(py, "from_dlpack"))?.unbind(),
                functions: Functions::of(py).ok().flatten(),
            })
        })
    }

    /// Returns whether an object is an array, and none of a class derived from it.
    pub fn is_array(&self, object: &Bound<'_, PyAny>) -> bool {
        object.is_exact_instance(self.array.bind(object.py()))
    }

    /// Returns the capsule of an array, of DLPack before 1.0: a call without names is shorter.
    pub fn capsule<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.dlpack.bind(array.py()).call1((array,))
    }

    /// Returns an array over the memory of a tensor on the CPU; the tensor itself where the C API can't make one.
    pub fn give(&self, py: Python<'_>, tensor: Inner) -> Result<PyResult<Py<PyAny>>, Inner> {
        let dtype = tensor.dtype();
        match (&self.functions, dtype, dtype.and_then(type_number)) {
            (Some(functions), Some(dtype), Some(number)) => {
                let size = dtype.size() as isize;
                Ok(functions.array(self.array.bind(py), tensor, number, size))
            }
            _ => Err(tensor),
        }
    }

    /// Returns an array over the memory of an object with `__dlpack__`.
    pub fn over(&self, object: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        self.from_dlpack.call1(object.py(), (object,))
    }
}

/// `PyArray_New`: the class, the number of axes, the sizes, the number of the dtype, the strides in bytes, the memory,
/// the size of an element (for texts alone), the flags, and an object for `__array_finalize__`.
type New = unsafe extern "C" fn(
    *mut PyTypeObject,
    c_int,
    *const i64,
    c_int,
    *const isize,
    *mut c_void,
    c_int,
    c_int,
    *mut PyObject,
) -> *mut PyObject;

/// `PyArray_SetBaseObject`: gives an array the owner of its memory.
type SetBase = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> c_int;

/// Functions of NumPy's C API, from its table `_ARRAY_API`.
struct Functions {
    new: New,
    set_base: SetBase,
}

// Places in the table: NumPy's `numpy/_core/code_generators/numpy_api.py`. They are the same in NumPy 1 and 2.
const GET_VERSION: usize = 0;
const NEW: usize = 93;
const SET_BASE: usize = 282;

/// `NPY_ARRAY_WRITEABLE` of NumPy's `ndarraytypes.h`.
const WRITEABLE: c_int = 0x400;

/// Returns NumPy's number of a dtype, from `NPY_TYPES` of `ndarraytypes.h`.
fn type_number(dtype: Dtype) -> Option<c_int> {
    Some(match dtype {
        Dtype::Bool => 0,
        Dtype::Int8 => 1,
        Dtype::Uint8 => 2,
        Dtype::Int16 => 3,
        Dtype::Int32 => 5,
        // `NPY_LONG`, which has 64 bits on all systems but Windows.
        Dtype::Int64 => 7,
        Dtype::Float32 => 11,
        Dtype::Float64 => 12,
        Dtype::Float16 => 23,
        Dtype::Bfloat16 => return None,
    })
}

impl Functions {
    /// Returns the functions; none for a version of NumPy whose table is not known here.
    fn of(py: Python<'_>) -> PyResult<Option<Self>> {
        let module = py
            .import("numpy._core.multiarray")
            .or_else(|_| py.import("numpy.core.multiarray"))?;
        let capsule = module.getattr("_ARRAY_API")?.cast_into::<PyCapsule>()?;
        let table = capsule.pointer_checked(None)?.cast::<*const c_void>();
        // SAFETY: NumPy's table of functions, which lives as long as the process. The first one, which returns the
        // version of the table, has its place in every version, the others in those of NumPy 1 and 2.
        unsafe {
            let version: unsafe extern "C" fn() -> c_uint =
                mem::transmute(table.add(GET_VERSION).read());
            if !matches!(version() >> 24, 1 | 2) {
                return Ok(None);
            }
            Ok(Some(Self {
                new: mem::transmute::<*const c_void, New>(table.add(NEW).read()),
                set_base: mem::transmute::<*const c_void, SetBase>(table.add(SET_BASE).read()),
            }))
        }
    }

    /// Returns an array over the memory of a tensor, of elements with this number and size.
    fn array(
        &self,
        class: &Bound<'_, PyType>,
        tensor: Inner,
        number: c_int,
        size: isize,
    ) -> PyResult<Py<PyAny>> {
        let py = class.py();
        let capsule = tensor.into_dlpack(None);
        let capsule: Capsule = capsule.map_err(|reason| errors::torch(&reason))?;
        // SAFETY: the structure lives as long as the capsule.
        let described = unsafe { capsule.as_ptr().as_ref() }.dl_tensor;
        let owner = capsules::capsule_of(py, Ok(capsule), capsules::OWNER)?;
        // SAFETY: the structure, which `owner` has, contains `ndim` sizes and strides; NumPy copies them. The memory
        // lives as long as `owner`, and the array keeps `owner`. `set_base` takes its reference, also if it fails.
        unsafe {
            let strides = slice::from_raw_parts(described.strides, described.ndim as usize);
            let strides: SmallVec<[isize; 8]> = strides
                .iter()
                .map(|&stride| stride as isize * size)
                .collect();
            let array = (self.new)(
                class.as_type_ptr(),
                described.ndim,
                described.shape,
                number,
                strides.as_ptr(),
                described.data,
                0,
                WRITEABLE,
                ptr::null_mut(),
            );
            let array = Bound::from_owned_ptr_or_err(py, array)?;
            match (self.set_base)(array.as_ptr(), owner.into_ptr()) {
                0 => Ok(array.unbind()),
                _ => Err(PyErr::fetch(py)),
            }
        }
    }
}
