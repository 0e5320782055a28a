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

#[cfg(test)]
mod tests {
    use precast_store::{Device, record::Dtype};

    use super::*;
    use crate::ffi::libtorch::aoti_torch_new_tensor_handle;

    fn impl_of(handle: &Handle) -> usize {
        // SAFETY: an `at::Tensor` is one pointer to its `TensorImpl`.
        unsafe { *handle.raw().cast::<usize>() }
    }

    unsafe extern "C" fn boxed(tensor: *const c_void) -> *mut c_void {
        let mut made = std::ptr::null_mut();
        // SAFETY: a live tensor, and a valid out pointer.
        unsafe { aoti_torch_new_tensor_handle(tensor.cast_mut(), &mut made) };
        made
    }

    /// Returns the tensor of an object that `boxed` makes.
    fn given(tensor: &Handle) -> Handle {
        // SAFETY: such a function.
        let object = tensor.borrow().wrapped(unsafe { Wrap::from_raw(boxed) });
        // SAFETY: a handle of `boxed`, which nobody else has.
        unsafe { Handle::from_raw(object.unwrap().as_ptr()) }.unwrap()
    }

    #[test]
    fn a_plain_tensor_passes_with_sizes_of_its_own() {
        let x = Handle::empty(&[2, 3], &[1, 2], Dtype::Int64, Device::Cpu).unwrap();
        let taken = x.borrow().plain().unwrap();
        assert_ne!(impl_of(&taken), impl_of(&x));
        let (own, meta) = (taken.meta(), x.meta());
        assert_eq!((own.address(), own.sizes()), (meta.address(), meta.sizes()));
        assert_eq!(own.strides(), [1, 2]);
        // A tensor that nobody else has is given itself.
        assert_eq!(impl_of(&given(&x)), impl_of(&x));
        let share = x.share();
        assert_ne!(impl_of(&given(&x)), impl_of(&x));
        assert_eq!(given(&share).meta().address(), x.meta().address());
    }

    #[cfg(feature = "tch")]
    #[test]
    fn other_tensors_do_not_pass() {
        use tch::{Kind, Tensor};

        let plain = |x: &Tensor| TensorRef::from(x).plain().is_some();
        let x = Tensor::ones([2, 3], (Kind::Float, tch::Device::Cpu));
        assert!(plain(&x) && plain(&x.transpose(0, 1)) && plain(&x.set_requires_grad(false)));
        let complex = Tensor::complex(&x, &x);
        for other in [
            Tensor::new(),
            x.to_sparse(None, None::<i64>, None::<i64>),
            x.quantize_per_tensor(0.1, 0, Kind::QInt8),
            complex.conj().imag(),
            complex,
            x.set_requires_grad(true),
        ] {
            assert!(!plain(&other), "{other:?}");
        }
    }
}
