//! Tensor handles as types: owned, borrowed, or to be stolen by a run; and their metadata.

use std::{ffi::c_void, marker::PhantomData, ptr::NonNull};

use precast_store::{Device, record::Dtype};
use smallvec::SmallVec;

use super::{
    abi::{RawMeta, RawTensor},
    libtorch::{self, aoti_torch_delete_tensor_object, aoti_torch_new_tensor_handle},
    shim::{self, precast_tensor_meta, precast_tensor_own},
};

/// One owned `at::Tensor*`.
#[derive(Debug)]
pub struct Handle(NonNull<c_void>);

// SAFETY: an `at::Tensor` is an atomically counted pointer; c10's `intrusive_ptr` may be moved and dropped on any
// thread.
unsafe impl Send for Handle {}
// SAFETY: through `&Handle` the runtime only reads metadata and makes new handles, which are const operations on
// `at::Tensor`; c10 documents const methods of `TensorImpl` as safe to call concurrently ("thread safety" in
// c10/core/TensorImpl.h: const methods do not mutate).
unsafe impl Sync for Handle {}

impl Handle {
    /// Takes ownership of a handle that an artifact returned; none for null.
    ///
    /// # Safety
    /// `raw` is null or a live `at::Tensor*` that no other code deletes.
    pub(super) unsafe fn from_raw(raw: RawTensor) -> Option<Self> {
        NonNull::new(raw).map(Self)
    }

    /// Returns a new handle of the same tensor.
    pub fn share(&self) -> Self {
        self.borrow().share()
    }

    /// Returns its metadata.
    pub fn meta(&self) -> Meta<'_> {
        self.borrow().meta()
    }

    /// Lends it.
    pub fn borrow(&self) -> TensorRef<'_> {
        TensorRef(self.0, PhantomData)
    }

    pub(super) fn raw(&self) -> RawTensor {
        self.0.as_ptr()
    }

    /// Gives the handle away; the caller deletes it.
    #[cfg(feature = "tch")]
    pub(super) fn into_raw(self) -> RawTensor {
        std::mem::ManuallyDrop::new(self).raw()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: `self` owns the handle, which was made by `new at::Tensor`.
        unsafe { aoti_torch_delete_tensor_object(self.0.as_ptr()) };
    }
}

/// A tensor that is lent: a [`Tensor`](crate::Tensor), a [`Value`](crate::Value), one of other C++ code, or one of tch with
/// the feature `tch`.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a>(NonNull<c_void>, PhantomData<&'a Handle>);

impl<'a> TensorRef<'a> {
    /// Lends a tensor of tch or of other C++ code.
    ///
    /// # Safety
    /// `raw` is a live `at::Tensor*`, of the libtorch of this process, for `'a`.
    pub unsafe fn from_raw(raw: NonNull<c_void>) -> Self {
        Self(raw, PhantomData)
    }

    pub(super) fn raw(self) -> RawTensor {
        self.0.as_ptr()
    }

    /// Returns a new handle of the same tensor.
    pub(crate) fn share(self) -> Handle {
        let mut made = std::ptr::null_mut();
        // SAFETY: a live `at::Tensor*` and a valid out pointer.
        unsafe { aoti_torch_new_tensor_handle(self.raw(), &mut made) };
        made_of(made)
    }

    /// Returns a handle of a caller's tensor that protects its sizes, strides and storage from changes by other
    /// threads.
    ///
    /// Several handles can refer to one `TensorImpl`: a `resize_` through one of them changes all, also while a call
    /// checks it. So a tensor with other handles gets a new alias over the same memory, and the call checks and uses
    /// only that. A tensor without other handles is borrowed for the call, so no thread can change it, and it needs no
    /// alias.
    ///
    /// The alias keeps the storage, not its size: torch frees a storage's memory when another thread enlarges it, and
    /// nothing can prevent that. During the creation of the alias, the sizes of the tensor must not move: torch moves
    /// them when there are more than five. See "Inputs that change" in the documentation of
    /// [`Model::run`](crate::Model::run).
    pub(crate) fn own(self) -> Handle {
        // SAFETY: a live `at::Tensor*`.
        made_of(unsafe { precast_tensor_own(self.raw()) })
    }

    /// Returns its metadata.
    pub(crate) fn meta(self) -> Meta<'a> {
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
        // SAFETY: a live `at::Tensor*`, and `meta` is a valid out pointer. On failure the flags stay as they were, and
        // an undefined or not dense tensor has rank 0.
        unsafe {
            if shim::is_open() {
                precast_tensor_meta(self.raw(), &mut meta);
            } else {
                let _ = plain_meta(self.raw(), &mut meta);
            }
        }
        Meta {
            raw: meta,
            tensor: PhantomData,
        }
    }
}

/// Does the same as the shim with libtorch's C ABI, for tensors that are read before a shim is open. It does not detect
/// a nested, quantised or lazily negated tensor; the later call does.
///
/// # Safety
/// `tensor` is a live `at::Tensor*`.
unsafe fn plain_meta(tensor: RawTensor, meta: &mut RawMeta) -> Result<(), i32> {
    let ok = |code: i32| match code {
        0 => Ok(()),
        code => Err(code),
    };
    let (mut defined, mut dtype, mut device_type, mut layout) = (false, 0, 0, 0);
    // SAFETY: a live tensor, and valid out pointers.
    unsafe {
        ok(libtorch::aoti_torch_is_defined(tensor, &mut defined))?;
        if !defined {
            return Ok(());
        }
        meta.flags = 1;
        ok(libtorch::aoti_torch_get_dtype(tensor, &mut dtype))?;
        ok(libtorch::aoti_torch_get_device_type(
            tensor,
            &mut device_type,
        ))?;
        ok(libtorch::aoti_torch_get_device_index(
            tensor,
            &mut meta.device_index,
        ))?;
        ok(libtorch::aoti_torch_get_layout(tensor, &mut layout))?;
    }
    meta.dtype = i8::try_from(dtype).unwrap_or(-1);
    meta.device_type = i8::try_from(device_type).unwrap_or(-1);
    let Some(dtype) = dtype_of(meta.dtype).filter(|_| layout == 0) else {
        return Ok(());
    };
    let (mut rank, mut offset) = (0, 0);
    // SAFETY: as above; sizes and strides are the tensor's own, of `rank` numbers each.
    unsafe {
        ok(libtorch::aoti_torch_get_sizes(tensor, &mut meta.sizes))?;
        ok(libtorch::aoti_torch_get_strides(tensor, &mut meta.strides))?;
        ok(libtorch::aoti_torch_get_storage_size(
            tensor,
            &mut meta.storage_bytes,
        ))?;
        ok(libtorch::aoti_torch_get_storage_offset(tensor, &mut offset))?;
        ok(libtorch::aoti_torch_get_data_ptr(tensor, &mut meta.data))?;
        ok(libtorch::aoti_torch_get_dim(tensor, &mut rank))?;
    }
    let before = offset * dtype.size() as i64;
    meta.rank = u32::try_from(rank).unwrap_or(0);
    meta.storage = meta.data.wrapping_sub(usize::try_from(before).unwrap_or(0));
    meta.flags = 1 | 2 | 8;
    Ok(())
}

fn made_of(raw: RawTensor) -> Handle {
    // `new at::Tensor` fails only without memory, where Rust's own allocator aborts too.
    let Some(raw) = NonNull::new(raw) else {
        std::alloc::handle_alloc_error(std::alloc::Layout::new::<usize>());
    };
    Handle(raw)
}

/// A tensor's metadata, read in one C++ call and without an allocation.
pub struct Meta<'a> {
    raw: RawMeta,
    tensor: PhantomData<&'a Handle>,
}

impl<'a> Meta<'a> {
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

    /// Returns the dtype's name, also for dtypes that no artifact takes.
    pub fn dtype_name(&self) -> String {
        match self.dtype() {
            Some(dtype) => dtype.to_string(),
            None => format!(
                "a dtype no artifact takes (torch's number {})",
                self.raw.dtype
            ),
        }
    }

    /// Returns the device; none unless it is the CPU or CUDA.
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
        if start.is_null() || self.raw.rank == 0 {
            return &[];
        }
        // SAFETY: the shim gives `rank` sizes and strides that the tensor owns, and the tensor is borrowed for 'a.
        // Nothing in the runtime resizes a caller's tensor.
        unsafe { std::slice::from_raw_parts(start, self.raw.rank as usize) }
    }

    /// Returns the address of element 0.
    pub fn address(&self) -> usize {
        self.raw.data as usize
    }

    /// Returns the address of the storage it views; 0 without one.
    pub fn storage(&self) -> usize {
        self.raw.storage as usize
    }

    /// Returns the number of bytes from element 0 to the end of the storage.
    pub fn room(&self) -> i64 {
        self.raw.storage_bytes - (self.raw.data as i64 - self.raw.storage as i64)
    }
}

/// Where the memory of a tensor is, and how a kernel reads it, kept from one moment: [`TensorRef::is_at`] tells whether
/// both are the same later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    address: usize,
    sizes: Box<[i64]>,
    strides: Box<[i64]>,
    dtype: i8,
    device: (i8, i32),
    flags: u8,
}

impl TensorRef<'_> {
    /// Returns the placement of a tensor.
    pub fn placement(self) -> Placement {
        let meta = self.meta();
        Placement {
            address: meta.address(),
            sizes: meta.sizes().into(),
            strides: meta.strides().into(),
            dtype: meta.raw.dtype,
            device: (meta.raw.device_type, meta.raw.device_index),
            flags: meta.raw.flags,
        }
    }

    /// Returns whether a tensor has this placement.
    pub fn is_at(self, placement: &Placement) -> bool {
        let meta = self.meta();
        meta.address() == placement.address
            && meta.sizes() == &*placement.sizes
            && meta.strides() == &*placement.strides
            && meta.raw.dtype == placement.dtype
            && (meta.raw.device_type, meta.raw.device_index) == placement.device
            && meta.raw.flags == placement.flags
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

/// Maps to c10's `ScalarType`.
pub(super) fn number_of(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::Uint8 => 0,
        Dtype::Int8 => 1,
        Dtype::Int16 => 2,
        Dtype::Int32 => 3,
        Dtype::Int64 => 4,
        Dtype::Float16 => 5,
        Dtype::Float32 => 6,
        Dtype::Float64 => 7,
        Dtype::Bool => 11,
        Dtype::Bfloat16 => 15,
    }
}

/// Tensor handles of one call.
pub type Handles = SmallVec<[Handle; 8]>;

/// Handles to pass to a run: the callee steals them, and the rest is freed on drop.
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
                // SAFETY: the list owns its handles; a callee nulls every stolen one, so this one is still owned.
                unsafe { aoti_torch_delete_tensor_object(raw) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn impl_of(handle: &Handle) -> usize {
        // SAFETY: an `at::Tensor` is one pointer to its `TensorImpl`.
        unsafe { *handle.raw().cast::<usize>() }
    }

    #[test]
    fn numbers_are_those_of_c10() {
        for dtype in Dtype::ALL {
            let number = i8::try_from(number_of(dtype)).unwrap();
            assert_eq!(dtype_of(number), Some(dtype));
            let made = Handle::empty(&[2, 3], &[3, 1], dtype, Device::Cpu).unwrap();
            let meta = made.meta();
            assert_eq!(meta.dtype(), Some(dtype));
            assert_eq!(meta.device(), Some(Device::Cpu));
            assert_eq!(meta.room(), 6 * dtype.size() as i64);
        }
    }

    #[test]
    fn the_c_abi_says_of_a_plain_tensor_what_the_shim_says() {
        let x = Handle::empty(&[4, 3], &[3, 1], Dtype::Float16, Device::Cpu).unwrap();
        let part = x.view(&[2, 2], &[3, 1], 8, Dtype::Float16).unwrap();
        for tensor in [&x, &part] {
            let by_shim = tensor.meta();
            let mut raw = RawMeta {
                sizes: std::ptr::null(),
                strides: std::ptr::null(),
                ..by_shim.raw
            };
            // SAFETY: a live tensor.
            unsafe { plain_meta(tensor.raw(), &mut raw) }.unwrap();
            let plain = Meta {
                raw,
                tensor: PhantomData,
            };
            assert_eq!(plain.sizes(), by_shim.sizes());
            assert_eq!(plain.strides(), by_shim.strides());
            assert_eq!(plain.room(), by_shim.room());
            let facts = |meta: &Meta<'_>| {
                let places = (meta.address(), meta.storage());
                let kind = (meta.dtype(), meta.device(), meta.dense());
                (places, kind, meta.raw.flags)
            };
            assert_eq!(facts(&plain), facts(&by_shim));
        }
    }

    #[test]
    fn a_tensor_that_nobody_else_has_needs_no_alias() {
        let x = Handle::empty(&[2, 3], &[3, 1], Dtype::Float32, Device::Cpu).unwrap();
        let same = |x: &Handle| impl_of(&x.borrow().own()) == impl_of(&x.share());
        assert!(same(&x));
        let clone = x.share();
        assert!(!same(&x));
        let (own, meta) = (x.borrow().own(), x.meta());
        assert_eq!(own.meta().address(), meta.address());
        assert_eq!(own.meta().sizes(), meta.sizes());
        drop(clone);
        assert!(same(&x));
    }

    #[cfg(feature = "tch")]
    #[test]
    fn a_tensor_that_has_clones_is_used_through_an_alias_that_they_can_not_change() {
        use tch::{Kind, Tensor};

        let x = Tensor::arange(6, (Kind::Float, tch::Device::Cpu)).view([2, 3]);
        let mut clone = x.shallow_clone();
        let own = TensorRef::from(&x).own();
        let memory = (own.meta().storage(), own.meta().address());
        let _ = clone.resize_([1, 6]);
        assert_eq!(x.size(), [1, 6], "both are one tensor");
        let meta = own.meta();
        assert_eq!((meta.sizes(), meta.strides()), (&[2, 3][..], &[3, 1][..]));
        // Another storage instead of its own.
        let mut other = Tensor::zeros([64], (Kind::Float, tch::Device::Cpu));
        let _ = clone.set_source_tensor(&other);
        let _ = other.fill_(7.0);
        let meta = own.meta();
        assert_eq!((meta.storage(), meta.address()), memory);
        assert_eq!(own.read::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        // Refused inputs are unchanged.
        let same = |x: &Tensor| {
            let x = TensorRef::from(x);
            impl_of(&x.own()) == impl_of(&x.share())
        };
        let sparse = x.to_sparse(None, None::<i64>, None::<i64>);
        let _clone = sparse.shallow_clone();
        assert!(same(&sparse));
        let none = Tensor::new();
        assert!(!TensorRef::from(&none).own().meta().defined());
    }
}
