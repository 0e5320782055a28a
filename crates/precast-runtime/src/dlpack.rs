//! DLPack: exchange of tensors with other libraries, over the same memory and without a copy.
//!
//! NumPy, PyTorch, JAX, CuPy and others exchange tensors as a structure with a deleter, which a [`Capsule`] owns.
//! [`Tensor::from_dlpack`] consumes one, [`Tensor::into_dlpack`] creates one. The memory is freed when neither side
//! uses it: the deleter is called once, by the thread that drops the last handle.
//!
//! **Streams.** On CUDA the producer of a tensor makes the stream of the consumer wait for its own. In Python a
//! consumer passes the number of its stream to `__dlpack__`:
//!
//! | number | stream | argument of [`Tensor::into_dlpack`] |
//! |---|---|---|
//! | 1 or `None` | CUDA's default stream | [`Stream::from_raw`] of null |
//! | 2 | the default stream of the thread | [`Stream::from_raw`] of 2 |
//! | -1 | the consumer needs no order | `None` |
//! | another | a `cudaStream_t` | [`Stream::from_raw`] of it |
//!
//! In the other direction [`stream`] returns the number to pass to the producer.
//!
//! **C++ extensions of PyTorch** need no structure for a plain tensor: [`Tensor::from_plain`] takes an `at::Tensor` as a
//! [`TensorRef`], and [`Tensor::wrap`] gives one to a [`Wrap`]. The stream that is current on the thread is one for torch
//! and the runtime.

use std::{ffi::c_void, ptr::NonNull};

use precast_store::Device;

pub use super::ffi::{
    Capsule, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
    DLTensor, Managed, Placement, TensorRef, Wrap,
};
use super::{
    Tensor, TorchError,
    ffi::{Stream, cuda, stream_number},
};

/// Returns the number of this thread's current stream, for a producer's `__dlpack__`; none for the CPU, which has no
/// streams.
///
/// A call with the tensor on this stream runs after the writes of the producer.
pub fn stream(device: Device) -> Result<Option<isize>, TorchError> {
    match device {
        Device::Cpu => Ok(None),
        Device::Cuda(ordinal) => Ok(Some(stream_number(ordinal)?)),
    }
}

impl Tensor {
    /// Takes a tensor of another library without a copy: the same memory, dtype, sizes and strides.
    ///
    /// The deleter is called once, when the last handle of the memory is dropped, on that thread. A tensor without
    /// elements has no memory: its deleter is called at once. Pinned memory of the host is a tensor on the CPU.
    ///
    /// On CUDA the current stream of this thread must run after the writes of the producer. It does if the producer
    /// received the number of [`stream`].
    ///
    /// Fails, and calls the deleter, for
    /// - DLPack 2 or later, and memory that is read-only;
    /// - a dtype that no module takes, and vector types;
    /// - a device that is neither the CPU nor a CUDA device of this process;
    /// - numbers that are no tensor's: `ndim` out of range, a size or stride below 0, elements beyond any memory;
    /// - a null pointer where there are elements, and an element 0 that is not aligned.
    pub fn from_dlpack<M: Managed>(capsule: Capsule<M>) -> Result<Self, TorchError> {
        Ok(Self(capsule.into_handle()?))
    }

    /// Gives a tensor to another library without a copy. The memory is freed with the last handle on either side.
    ///
    /// On CUDA the stream of the consumer waits for the stream that is current on this thread, and the memory is not
    /// used again before the consumer's stream is done with it. Without a consumer there is no order. On the CPU it
    /// does not matter.
    ///
    /// Fails for a tensor that is not dense or of a dtype that no module takes.
    ///
    /// ```
    /// use precast_runtime::{Tensor, dlpack::Capsule, errors::TorchError};
    /// # let torch = std::env::var_os("LIBTORCH").map(std::path::PathBuf::from);
    /// # precast_runtime::Runtime::libtorch(torch.as_deref(), false).unwrap();
    ///
    /// let table = Tensor::from_slice(&[1_i64, 2, 3, 4, 5, 6], &[2, 3])?;
    /// let right: Capsule = table.narrow(1, 1, 2)?.into_dlpack(None)?;
    ///
    /// let right = Tensor::from_dlpack(right)?;
    /// assert_eq!((right.shape(), right.stride()), (vec![2, 2], vec![3, 1]));
    /// assert_eq!(right.address(), table.address() + 8);
    /// # Ok::<(), TorchError>(())
    /// ```
    pub fn into_dlpack<M: Managed>(
        self,
        consumer: Option<&Stream>,
    ) -> Result<Capsule<M>, TorchError> {
        if let (Some(Device::Cuda(device)), Some(consumer)) = (self.device(), consumer) {
            let cuda = cuda()?;
            cuda.wait(consumer.raw(), cuda.current_stream(device)?, device)?;
            consumer.uses(&self)?;
        }
        Capsule::of(self.0)
    }

    /// Takes a plain tensor on the CPU or a CUDA device without a copy of its memory.
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

    /// Gives a plain tensor to a function that makes an object of it, without a copy of its memory.
    ///
    /// Returns none for the tensors that [`Self::from_plain`] does not take, other than those with another dtype, and
    /// where the function fails.
    pub fn wrap(&self, wrap: Wrap) -> Option<NonNull<c_void>> {
        TensorRef::from(self).wrapped(wrap)
    }
}
