//! Capsules of Python: objects that own a structure of DLPack until a consumer takes it.

#![allow(unsafe_code)]

use std::{ffi::CStr, ptr::NonNull};

use precast_runtime::{
    Tensor as Inner,
    dlpack::{self, Capsule, DLManagedTensor, DLManagedTensorVersioned},
};
use pyo3::{
    prelude::*,
    types::{PyCapsule, PyCapsuleMethods},
};

use crate::errors;

pub const UNUSED: &CStr = c"dltensor";
pub const UNUSED_VERSIONED: &CStr = c"dltensor_versioned";
/// A capsule that owns the memory of a NumPy array. No library takes one of this name.
pub const OWNER: &CStr = c"precast_array";
const USED: &CStr = c"used_dltensor";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// Takes the structure out of a capsule.
pub fn own(
    capsule: &Bound<'_, PyCapsule>,
) -> PyResult<Result<Inner, precast_runtime::errors::TorchError>> {
    let rename = |name: &'static CStr| -> PyResult<()> {
        // SAFETY: a live capsule and a name that lives for ever.
        match unsafe { pyo3::ffi::PyCapsule_SetName(capsule.as_ptr(), name.as_ptr()) } {
            0 => Ok(()),
            _ => Err(PyErr::fetch(capsule.py())),
        }
    };
    if capsule.is_valid_checked(Some(UNUSED)) {
        let raw = capsule.pointer_checked(Some(UNUSED))?;
        rename(USED)?;
        // SAFETY: a capsule of this name has such a structure; renamed, it does not free it.
        let raw = unsafe { Capsule::<DLManagedTensor>::from_raw(raw.cast()) };
        return Ok(Inner::from_dlpack(raw));
    }
    let raw = capsule.pointer_checked(Some(UNUSED_VERSIONED))?;
    rename(USED_VERSIONED)?;
    // SAFETY: as above.
    let raw = unsafe { Capsule::<DLManagedTensorVersioned>::from_raw(raw.cast()) };
    Ok(Inner::from_dlpack(raw))
}

/// Puts a structure into a capsule of Python, which frees it unless a consumer renames it.
pub fn capsule_of<'py, M: dlpack::Managed + 'static>(
    py: Python<'py>,
    capsule: Result<Capsule<M>, precast_runtime::errors::TorchError>,
    name: &'static CStr,
) -> PyResult<Bound<'py, PyCapsule>> {
    let capsule = capsule.map_err(|reason| errors::torch(&reason))?;
    let raw = capsule.into_raw().as_ptr();
    // SAFETY: a structure with this name; the destructor is called once, with the capsule.
    unsafe {
        let object = pyo3::ffi::PyCapsule_New(raw.cast(), name.as_ptr(), Some(free::<M>));
        if object.is_null() {
            drop(Capsule::from_raw(NonNull::new_unchecked(raw)));
            return Err(PyErr::fetch(py));
        }
        Ok(Bound::from_owned_ptr(py, object).cast_into_unchecked())
    }
}

/// Frees the structure of a capsule that no consumer took.
unsafe extern "C" fn free<M: dlpack::Managed>(object: *mut pyo3::ffi::PyObject) {
    for name in [OWNER, UNUSED, UNUSED_VERSIONED] {
        // SAFETY: a capsule at its end; it has the name of the structure unless a consumer renamed it.
        unsafe {
            if pyo3::ffi::PyCapsule_IsValid(object, name.as_ptr()) == 1 {
                let raw = pyo3::ffi::PyCapsule_GetPointer(object, name.as_ptr());
                if let Some(raw) = NonNull::new(raw.cast::<M>()) {
                    drop(Capsule::from_raw(raw));
                }
            }
        }
    }
}
