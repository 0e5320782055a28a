//! Tensors of other C++ code on the same libtorch, as its `at::Tensor`, in and out without a copy.
//!
//! Only plain tensors pass: their memory on the CPU is all that they are. The shim reads that from the tensor's set of
//! dispatch keys. A tensor that passes gets a `TensorImpl` of its own, so that neither side changes sizes, strides or
//! storage of the other's.

use std::{ffi::c_void, ptr::NonNull};

use super::{
    Handle, TensorRef,
    abi::RawWrap,
    shim::{self, precast_tensor_give, precast_tensor_take},
};

/// A C++ function that makes an object of a tensor, as `THPVariable_Wrap` makes one of Python.
#[derive(Clone, Copy, Debug)]
pub struct Wrap(RawWrap);

impl Wrap {
    /// Takes the function by its address.
    ///
    /// # Safety
    /// It is a function of C++ in this process that takes one `const at::TensorBase&` and returns one pointer, which is
    /// null or an object that the caller owns. It may throw.
    pub unsafe fn from_raw(raw: unsafe extern "C" fn(*const c_void) -> *mut c_void) -> Self {
        Self(raw)
    }
}

impl TensorRef<'_> {
    /// Returns a handle of a plain tensor that requires no gradient and has a dtype that modules take; none for another
    /// tensor, and before a load has opened the shim.
    pub(crate) fn plain(self) -> Option<Handle> {
        if !shim::is_open() {
            return None;
        }
        // SAFETY: a live `at::Tensor*`. It returns null, or a new handle that nobody else has.
        let taken = unsafe { Handle::from_raw(precast_tensor_take(self.raw())) }?;
        taken.meta().dtype().is_some().then_some(taken)
    }

    /// Returns the object that `wrap` makes of a plain tensor; none for another tensor, where `wrap` throws, and before a
    /// load.
    pub(crate) fn wrapped(self, wrap: Wrap) -> Option<NonNull<c_void>> {
        if !shim::is_open() {
            return None;
        }
        // SAFETY: a live `at::Tensor*`, and a function as `from_raw` requires; the shim catches what it throws.
        NonNull::new(unsafe { precast_tensor_give(self.raw(), wrap.0) })
    }
}
