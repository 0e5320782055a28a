//! Tensor handles as types: who owns one, who may steal it, and what it says about itself.

use std::{ffi::c_void, marker::PhantomData, ptr::NonNull};

use precast_store::{Device, record::Dtype};
use smallvec::SmallVec;
use tch::Tensor;

use super::shim::{
    RawMeta, RawTensor, precast_tensor_delete, precast_tensor_meta, precast_tensor_own,
    precast_tensor_share,
};
use crate::error::first_line;

/// One owned `at::Tensor*`.
#[derive(Debug)]
pub struct Handle(NonNull<c_void>);

// SAFETY: an `at::Tensor` is an atomically counted pointer; c10's `intrusive_ptr` may be moved and dropped on any
// thread. tch relies on the same for its `Tensor: Send`.
unsafe impl Send for Handle {}
// SAFETY: through `&Handle` the runtime only reads metadata and makes new handles, which are const operations on
// `at::Tensor`; c10 documents const methods of `TensorImpl` as safe to call concurrently ("thread safety" in
// c10/core/TensorImpl.h: const methods do not mutate).
unsafe impl Sync for Handle {}

impl Handle {
    /// Takes ownership of a handle an artifact returned; none for null.
    ///
    /// # Safety
    /// `raw` is null or a live `at::Tensor*` that nobody else will delete.
    pub(super) unsafe fn from_raw(raw: RawTensor) -> Option<Self> {
        NonNull::new(raw).map(Self)
    }

    /// Returns a new handle of the same tensor.
    pub fn share(&self) -> Self {
        // SAFETY: `self` is a live `at::Tensor*`.
        share_raw(unsafe { precast_tensor_share(self.0.as_ptr()) })
    }

    /// Makes a tch tensor of this handle.
    pub fn into_tensor(self) -> Tensor {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        // SAFETY: a tch `C_tensor*` is an `at::Tensor*` made by `new`, and ownership moves to the `Tensor`.
        unsafe { Tensor::from_ptr(raw.cast()) }
    }

    /// Returns what the tensor says about itself.
    pub fn meta(&self) -> Meta<'_> {
        Meta::read(self.0.as_ptr())
    }

    pub(super) fn raw(&self) -> RawTensor {
        self.0.as_ptr()
    }
}

impl From<Tensor> for Handle {
    fn from(tensor: Tensor) -> Self {
        let tensor = std::mem::ManuallyDrop::new(tensor);
        // A tch tensor always has a C_tensor; an undefined one points to an undefined `at::Tensor`.
        Self(NonNull::new(tensor.as_ptr().cast_mut().cast()).expect("a tch tensor has a handle"))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: `self` owns the handle, which was made by `new at::Tensor`.
        unsafe { precast_tensor_delete(self.0.as_ptr()) }
    }
}

fn share_raw(raw: RawTensor) -> Handle {
    // `new at::Tensor` fails only when the process has no memory left; Rust's own allocator aborts there too.
    let Some(raw) = NonNull::new(raw) else {
        std::alloc::handle_alloc_error(std::alloc::Layout::new::<usize>());
    };
    Handle(raw)
}

/// Returns a new handle of a tch tensor's tensor.
pub fn share(tensor: &Tensor) -> Handle {
    // SAFETY: `as_ptr` is a live `at::Tensor*` for as long as `tensor` is borrowed.
    share_raw(unsafe { precast_tensor_share(tensor.as_ptr().cast()) })
}

/// Returns a handle of a caller's tensor whose sizes, strides and storage no other thread can change.
///
/// Clones of a `Tensor` are handles of one `TensorImpl`: a `resize_` through one of them changes all, also while a call
/// checks it. So a tensor that has clones gets an alias of its own over the same memory, and the call checks and uses only
/// that. A tensor without clones is borrowed for the call, so nobody can change it, and it costs no alias.
///
/// The alias keeps the storage, not its size: torch frees a storage's memory when another thread makes it larger, and nothing
/// can prevent that. See "Inputs that change" in the documentation of [`Model::run`](crate::Model::run).
pub fn own(tensor: &Tensor) -> Handle {
    // SAFETY: `as_ptr` is a live `at::Tensor*` for as long as `tensor` is borrowed.
    share_raw(unsafe { precast_tensor_own(tensor.as_ptr().cast()) })
}

/// What a tensor says about itself, read in one foreign call and without an allocation.
pub struct Meta<'a> {
    raw: RawMeta,
    tensor: PhantomData<&'a Tensor>,
}

impl<'a> Meta<'a> {
    /// Reads a tensor's metadata.
    pub fn of(tensor: &'a Tensor) -> Self {
        Self::read(tensor.as_ptr().cast())
    }

    fn read(raw: *const c_void) -> Self {
        let mut meta = RawMeta {
            sizes: std::ptr::null(),
            strides: std::ptr::null(),
            data: std::ptr::null_mut(),
            storage: std::ptr::null_mut(),
            storage_bytes: 0,
            rank: 0,
            device_index: 0,
            dtype: -1,
            device_type: -1,
            flags: 0,
        };
        // SAFETY: `raw` is a live `at::Tensor*` (both callers hold a borrow), and `meta` is a valid out pointer. On
        // failure the shim leaves the flags it had, and an undefined or not dense tensor has rank 0.
        unsafe { precast_tensor_meta(raw, &mut meta) };
        Self {
            raw: meta,
            tensor: PhantomData,
        }
    }

    pub fn defined(&self) -> bool {
        self.raw.flags & 1 != 0
    }

    /// Returns whether it is a plain strided tensor: not sparse, quantised, nested, or wrapped by a transform.
    pub fn dense(&self) -> bool {
        self.raw.flags & 2 != 0
    }

    /// Returns whether a lazy negation or conjugation is pending: its memory is not its value.
    pub fn lazy(&self) -> bool {
        self.raw.flags & 4 != 0
    }

    /// Returns the dtype; none for those no artifact takes.
    pub fn dtype(&self) -> Option<Dtype> {
        dtype_of(self.raw.dtype)
    }

    /// Returns torch's number for the dtype.
    pub fn scalar_type(&self) -> i8 {
        self.raw.dtype
    }

    /// Returns the device; none for what is neither CPU nor CUDA.
    pub fn device(&self) -> Option<Device> {
        match self.raw.device_type {
            0 => Some(Device::Cpu),
            1 => usize::try_from(self.raw.device_index)
                .ok()
                .map(Device::Cuda),
            _ => None,
        }
    }

    pub fn sizes(&self) -> &'a [i64] {
        self.slice(self.raw.sizes)
    }

    pub fn strides(&self) -> &'a [i64] {
        self.slice(self.raw.strides)
    }

    fn slice(&self, start: *const i64) -> &'a [i64] {
        match start.is_null() || self.raw.rank == 0 {
            true => &[],
            // SAFETY: the shim gives `rank` sizes and strides that the tensor owns, and the tensor is borrowed for 'a.
            // Nothing in the runtime resizes a caller's tensor.
            false => unsafe { std::slice::from_raw_parts(start, self.raw.rank as usize) },
        }
    }

    /// Returns the address of element 0.
    pub fn address(&self) -> usize {
        self.raw.data as usize
    }

    /// Returns the address of the storage it views; 0 without one.
    pub fn storage(&self) -> usize {
        self.raw.storage as usize
    }

    /// Returns how many bytes lie between element 0 and the end of the storage.
    pub fn room(&self) -> i64 {
        self.raw.storage_bytes - (self.raw.data as i64 - self.raw.storage as i64)
    }
}

/// Maps c10's `ScalarType`.
pub(super) fn dtype_of(scalar_type: i8) -> Option<Dtype> {
    Some(match scalar_type {
        0 => Dtype::Uint8,
        1 => Dtype::Int8,
        2 => Dtype::Int16,
        3 => Dtype::Int32,
        4 => Dtype::Int64,
        5 => Dtype::Float16,
        6 => Dtype::Float32,
        7 => Dtype::Float64,
        11 => Dtype::Bool,
        15 => Dtype::Bfloat16,
        _ => return None,
    })
}

/// Handles to give to a run: the callee steals them, and what it left is freed on drop.
#[derive(Default)]
pub struct Stolen(SmallVec<[RawTensor; 16]>);

impl Stolen {
    /// Adds a handle; ownership moves into the list.
    pub fn push(&mut self, handle: Handle) {
        self.0.push(handle.raw());
        std::mem::forget(handle);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut RawTensor {
        self.0.as_mut_ptr()
    }
}

impl Drop for Stolen {
    fn drop(&mut self) {
        for &raw in &self.0 {
            if !raw.is_null() {
                // SAFETY: the list owns what it was given; a callee nulls what it stole, so this is owned still.
                unsafe { precast_tensor_delete(raw) }
            }
        }
    }
}

/// Makes a tensor over memory it does not own.
///
/// # Safety
/// `data` points to as many bytes as shape, strides and dtype cover, on `device`, and outlives every handle of the
/// tensor; nobody writes to it while a kernel reads it.
pub(super) unsafe fn from_blob(
    data: *const u8,
    shape: &[i64],
    stride: &[i64],
    dtype: Dtype,
    device: Device,
) -> Result<Handle, String> {
    let kind = kind_of(dtype);
    let device = match device {
        Device::Cpu => tch::Device::Cpu,
        Device::Cuda(ordinal) => tch::Device::Cuda(ordinal),
    };
    // SAFETY: the caller upholds what tch asks for.
    let made = unsafe { Tensor::f_from_blob(data, shape, stride, kind, device) };
    made.map(Handle::from).map_err(|error| first_line(&error))
}

/// Maps to tch's kind.
pub fn kind_of(dtype: Dtype) -> tch::Kind {
    match dtype {
        Dtype::Float64 => tch::Kind::Double,
        Dtype::Float32 => tch::Kind::Float,
        Dtype::Float16 => tch::Kind::Half,
        Dtype::Bfloat16 => tch::Kind::BFloat16,
        Dtype::Int64 => tch::Kind::Int64,
        Dtype::Int32 => tch::Kind::Int,
        Dtype::Int16 => tch::Kind::Int16,
        Dtype::Int8 => tch::Kind::Int8,
        Dtype::Uint8 => tch::Kind::Uint8,
        Dtype::Bool => tch::Kind::Bool,
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn impl_of(handle: &Handle) -> usize {
        // SAFETY: an `at::Tensor` is one pointer to its `TensorImpl`.
        unsafe { *handle.raw().cast::<usize>() }
    }

    #[test]
    fn a_tensor_that_has_clones_is_used_through_an_alias_that_they_can_not_change() {
        let x = Tensor::arange(6, (Kind::Float, Device::Cpu)).view([2, 3]);
        let mut clone = x.shallow_clone();
        let own = own(&x);
        let memory = (own.meta().storage(), own.meta().address());
        let _ = clone.resize_([1, 6]);
        assert_eq!(x.size(), [1, 6], "both are one tensor");
        let meta = own.meta();
        assert_eq!((meta.sizes(), meta.strides()), (&[2, 3][..], &[3, 1][..]));
        // Another storage in place of its own.
        let mut other = Tensor::zeros([64], (Kind::Float, Device::Cpu));
        let _ = clone.set_source_tensor(&other);
        let _ = other.fill_(7.0);
        let meta = own.meta();
        assert_eq!((meta.storage(), meta.address()), memory);
        let alias = own.into_tensor();
        assert_eq!((alias.numel(), alias.is_contiguous()), (6, true));
        assert_eq!(
            Vec::<f32>::try_from(alias.view(-1)).unwrap(),
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        );
    }

    #[test]
    fn a_tensor_that_nobody_else_has_needs_no_alias() {
        let x = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
        let same = |x: &Tensor| impl_of(&own(x)) == impl_of(&share(x));
        assert!(same(&x));
        let clone = x.shallow_clone();
        assert!(!same(&x));
        drop(clone);
        assert!(same(&x));
        // What the checks refuse is left as it is.
        let sparse = x.to_sparse(None, None::<i64>, None::<i64>);
        let _clone = sparse.shallow_clone();
        assert!(same(&sparse));
        let none = Tensor::new();
        assert!(!own(&none).meta().defined());
    }
}
