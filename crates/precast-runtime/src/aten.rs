//! Tensors of other C++ code on the same libtorch, in and out: the same tensor, without a structure of DLPack between.
//!
//! It is for extensions of PyTorch, whose objects have an `at::Tensor`. Only plain tensors pass, whose memory on the CPU is
//! all that they are. Both functions return none for the others, which pass over [`dlpack`](super::dlpack) or not at all.

use std::{ffi::c_void, ptr::NonNull};

use super::{
    Tensor,
    ffi::{TensorRef, Wrap},
};

impl Tensor {
    /// Takes a plain tensor on the CPU without a copy of its memory.
    ///
    /// The new tensor has the memory, sizes and strides that the other one has now: another memory (`set_`, `.data`) and
    /// other sizes (`resize_`) that the other one gets later are not seen. While a call uses the memory, nobody may
    /// enlarge it: torch frees memory that becomes too small.
    ///
    /// Returns none
    /// - for a tensor that is undefined, sparse, quantised, nested, on another device, or wrapped by a transform, one
    ///   with a pending negation or conjugation, and one whose memory is copied at its first write;
    /// - for one that requires a gradient, and for a dtype that no module takes;
    /// - while a mode of Python sees all operations of this thread (`TorchDispatchMode`);
    /// - before a model is loaded.
    pub fn from_plain(tensor: TensorRef<'_>) -> Option<Self> {
        tensor.plain().map(Self)
    }

    /// Gives a plain tensor on the CPU to a function that makes an object of it, without a copy of its memory.
    ///
    /// Returns none for the tensors that [`Self::from_plain`] does not take, other than those with another dtype, and
    /// where the function fails.
    pub fn wrap(&self, wrap: Wrap) -> Option<NonNull<c_void>> {
        TensorRef::from(self).wrapped(wrap)
    }
}
