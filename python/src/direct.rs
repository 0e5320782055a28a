//! Tensors of torch as they are, in the way of torch's C++ extensions: an object of `torch.Tensor` contains an
//! `at::Tensor`, and `THPVariable_Wrap` makes an object of one. That takes a quarter of the time of DLPack's structures.
//!
//! torch's header `python_variable.h` has the place of the `at::Tensor` in the object. No function returns it in all
//! versions. So the first tensor is checked: the address in that place must be the object's `_cdata`, and
//! `THPVariable_Wrap` must return the same object for it. If a check fails, and for tensors that are not plain
//! ([`Tensor::from_plain`]), tensors pass by DLPack ([`crate::exchange`]).

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_void},
    ptr::NonNull,
};

use precast_runtime::{
    Tensor,
    dlpack::{TensorRef, Wrap},
};
use pyo3::{intern, prelude::*};

/// `THPVariable_Wrap(const at::TensorBase&)`: returns a new reference.
const WRAP: &CStr = c"_Z16THPVariable_WrapRKN2at10TensorBaseE";

type RawWrap = unsafe extern "C" fn(*const c_void) -> *mut c_void;

/// The way of this process's torch, which was checked.
pub struct Direct(Wrap);

impl Direct {
    /// Checks with a tensor whether it is a way; the object is exactly of the class `torch.Tensor`.
    pub fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        let py = object.py();
        let size = object.get_type().getattr(intern!(py, "__basicsize__"));
        if size.ok()?.extract::<usize>().ok()? < OFFSET + size_of::<*mut c_void>() {
            return None;
        }
        let said = object.getattr(intern!(py, "_cdata")).ok()?;
        let place = place(object);
        // SAFETY: the object has that many bytes, as its class says.
        let held = unsafe { place.cast::<usize>().read() };
        if held == 0 || held != said.extract::<usize>().ok()? {
            return None;
        }
        let wrap = wrap_of_process()?;
        // SAFETY: the place has the address of the object's own tensor, as an `at::Tensor` does. The function returns
        // the object that a tensor has already, and throws nothing then. The GIL is held.
        let same = unsafe { Bound::from_owned_ptr_or_opt(py, wrap(place.as_ptr()).cast()) }?;
        // SAFETY: it is that function.
        same.is(object)
            .then(|| Self(unsafe { Wrap::from_raw(wrap) }))
    }

    /// Takes a plain tensor; the object is exactly of the class `torch.Tensor`.
    pub fn take(&self, object: &Bound<'_, PyAny>) -> Option<Tensor> {
        // SAFETY: all objects of this class have their `at::Tensor` there, and the object lives.
        Tensor::from_plain(unsafe { TensorRef::from_raw(place(object)) })
    }

    /// Lends the tensor of an object of `torch.Tensor` or of a class derived from it.
    pub fn lend<'a>(&self, object: &'a Bound<'_, PyAny>) -> Option<TensorRef<'a>> {
        // SAFETY: objects of derived classes begin as those of the class do, and the object lives as long as it is lent.
        Some(unsafe { TensorRef::from_raw(place(object)) })
    }

    /// Gives a plain tensor as an object of the class.
    pub fn give(&self, py: Python<'_>, tensor: &Tensor) -> Option<Py<PyAny>> {
        let Some(object) = tensor.wrap(self.0) else {
            drop(PyErr::take(py));
            return None;
        };
        // SAFETY: a new reference to an object, made with the GIL.
        Some(unsafe { Bound::from_owned_ptr(py, object.as_ptr().cast()) }.unbind())
    }
}

/// The bytes before the `at::Tensor`.
const OFFSET: usize = size_of::<pyo3::ffi::PyObject>();

/// Returns the place of the `at::Tensor` in an object.
fn place(object: &Bound<'_, PyAny>) -> NonNull<c_void> {
    // SAFETY: no object is at the end of the address space.
    unsafe { NonNull::new_unchecked(object.as_ptr().cast::<u8>().add(OFFSET).cast()) }
}

/// Returns `THPVariable_Wrap` of the torch that the process has imported.
fn wrap_of_process() -> Option<RawWrap> {
    let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
    // SAFETY: names that are C strings; with these flags nothing is loaded or run.
    let found = unsafe {
        let library = NonNull::new(libc::dlopen(c"libtorch_python.so".as_ptr(), flags))?;
        NonNull::new(libc::dlsym(library.as_ptr(), WRAP.as_ptr()))?
    };
    // SAFETY: the name has the types of the parameters in it; the function returns a `PyObject*`.
    Some(unsafe { std::mem::transmute::<NonNull<c_void>, RawWrap>(found) })
}
