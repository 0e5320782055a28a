//! Tensors of tch, in and out without a copy: like a [`Handle`], a `C_tensor*` is an `at::Tensor*` from `new`.

use std::ptr::NonNull;

use super::{Handle, TensorRef};

impl From<tch::Tensor> for Handle {
    fn from(tensor: tch::Tensor) -> Self {
        let tensor = std::mem::ManuallyDrop::new(tensor);
        // SAFETY: ownership moves here. A tch tensor always has a C_tensor; an undefined one points to an undefined
        // `at::Tensor`.
        unsafe { Self::from_raw(tensor.as_ptr().cast_mut().cast()) }
            .expect("a tch tensor has a handle")
    }
}

impl From<Handle> for tch::Tensor {
    fn from(handle: Handle) -> Self {
        // SAFETY: a `C_tensor*`, and ownership moves to the `Tensor`.
        unsafe { Self::from_ptr(handle.into_raw().cast()) }
    }
}

impl From<TensorRef<'_>> for tch::Tensor {
    fn from(tensor: TensorRef<'_>) -> Self {
        tensor.share().into()
    }
}

impl<'a> From<&'a tch::Tensor> for TensorRef<'a> {
    fn from(tensor: &'a tch::Tensor) -> Self {
        let raw =
            NonNull::new(tensor.as_ptr().cast_mut().cast()).expect("a tch tensor has a handle");
        // SAFETY: it lives as long as `tensor` is borrowed.
        unsafe { Self::from_raw(raw) }
    }
}
