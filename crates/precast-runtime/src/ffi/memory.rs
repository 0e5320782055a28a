//! A tensor's memory: made, viewed, copied, read.

use std::{ffi::c_void, ptr};

use half::{bf16, f16};
use precast_store::{Device, record::Dtype};
use smallvec::SmallVec;

use super::{
    Handle, Handles,
    abi::RawTensor,
    libtorch,
    shim::{checked, precast_tensor_is_sole, precast_tensor_uses, precast_tensors_copy},
    tensor::number_of,
    torch::call,
};
use crate::TorchError;

/// Torch's numbers of layouts: with strides, and oneDNN's own.
const STRIDED: i32 = 0;
const MKLDNN: i32 = 3;

/// A type of which every pattern of bits is a value.
///
/// # Safety
/// The type has no padding, and any bytes of its size are a value of it.
pub unsafe trait Bits: Copy {}

macro_rules! bits {
    ($($type:ty),*) => {$(
        // SAFETY: a number of fixed size.
        unsafe impl Bits for $type {}
    )*};
}

bits!(f64, f32, f16, bf16, i64, i32, i16, i8, u8);

/// Torch's numbers for a device: its type, and which one.
pub(super) fn place(device: Device) -> Result<(i32, i32), TorchError> {
    match device {
        Device::Cpu => Ok((0, 0)),
        Device::Cuda(ordinal) => Ok((1, super::cuda::ordinal(ordinal)?)),
    }
}

/// Returns row-major strides.
pub fn contiguous(shape: &[i64]) -> SmallVec<[i64; 8]> {
    let mut strides = SmallVec::from_elem(1, shape.len());
    for axis in (1..shape.len()).rev() {
        // A tensor without elements may have sizes whose product no number holds.
        strides[axis - 1] = i64::saturating_mul(strides[axis], shape[axis].max(1));
    }
    strides
}

/// Returns the number of elements from the first one of a tensor to the end of its last one. Fails for sizes or strides
/// that no tensor can have.
pub(super) fn span(shape: &[i64], stride: &[i64]) -> Result<i64, TorchError> {
    let bad = || format!("no tensor has sizes {shape:?} and strides {stride:?}").into();
    if shape.len() != stride.len() || shape.iter().chain(stride).any(|&n| n < 0) {
        return Err(bad());
    }
    if shape.contains(&0) {
        return Ok(0);
    }
    let mut axes = std::iter::zip(shape, stride);
    let last = axes.try_fold(0i64, |sum, (size, stride)| {
        sum.checked_add((size - 1).checked_mul(*stride)?)
    });
    last.and_then(|last| last.checked_add(1)).ok_or_else(bad)
}

impl Handle {
    /// Creates a tensor with undefined elements.
    pub fn empty(
        shape: &[i64],
        stride: &[i64],
        dtype: Dtype,
        device: Device,
    ) -> Result<Self, TorchError> {
        span(shape, stride)?;
        let (device_type, index) = place(device)?;
        // SAFETY: both arrays have `rank` numbers; it writes a new tensor.
        unsafe {
            Self::made(|out| {
                libtorch::aoti_torch_empty_strided(
                    shape.len() as i64,
                    shape.as_ptr(),
                    stride.as_ptr(),
                    number_of(dtype),
                    device_type,
                    index,
                    out,
                )
            })
        }
    }

    /// Returns the tensor that one call of libtorch's C ABI creates.
    ///
    /// # Safety
    /// `f` gets a valid out pointer. It writes a new tensor there, which the caller then owns, or nothing.
    pub(super) unsafe fn made(f: impl FnOnce(*mut RawTensor) -> i32) -> Result<Self, TorchError> {
        let mut made = ptr::null_mut();
        call(|| f(&mut made))?;
        // SAFETY: the caller guarantees it.
        unsafe { Self::from_raw(made) }.ok_or_else(|| "libtorch made no tensor".into())
    }

    /// Creates a tensor over memory that it does not own.
    ///
    /// # Safety
    /// `data` points to as many bytes as shape, strides and dtype cover, on `device`, and outlives every handle of the
    /// tensor; no code writes to it while a kernel reads it.
    pub(super) unsafe fn over(
        data: *const u8,
        shape: &[i64],
        stride: &[i64],
        dtype: Dtype,
        device: Device,
    ) -> Result<Self, TorchError> {
        let (place, layout) = (place(device)?, (STRIDED, &[][..]));
        // SAFETY: the caller guarantees it.
        unsafe { Self::of_blob(data, shape, stride, dtype, place, layout) }
    }

    /// Creates a tensor in an order that only oneDNN knows, over memory that it does not own. `description` is
    /// oneDNN's.
    ///
    /// # Safety
    /// `data` points to the bytes of a tensor of this shape, dtype and description. It outlives every handle of the
    /// tensor, and no code writes to it.
    pub(super) unsafe fn over_opaque(
        data: *const u8,
        shape: &[i64],
        dtype: Dtype,
        description: &[u8],
    ) -> Result<Self, TorchError> {
        let (place, layout) = (place(Device::Cpu)?, (MKLDNN, description));
        // SAFETY: the caller guarantees it.
        unsafe { Self::of_blob(data, shape, &contiguous(shape), dtype, place, layout) }
    }

    /// Creates a tensor over memory: on a device, in a layout with its description.
    ///
    /// # Safety
    /// `data` points to the bytes of such a tensor. It outlives every handle of the tensor, and no code writes to it while
    /// a kernel reads it.
    unsafe fn of_blob(
        data: *const u8,
        shape: &[i64],
        stride: &[i64],
        dtype: Dtype,
        (device_type, index): (i32, i32),
        (layout, description): (i32, &[u8]),
    ) -> Result<Self, TorchError> {
        // SAFETY: both arrays have `rank` numbers; the description has its length; it writes a new tensor; the caller
        // vouches for the memory.
        unsafe {
            Self::made(|out| {
                libtorch::aoti_torch_create_tensor_from_blob_v2(
                    data.cast_mut().cast::<c_void>(),
                    shape.len() as i64,
                    shape.as_ptr(),
                    stride.as_ptr(),
                    0,
                    number_of(dtype),
                    device_type,
                    index,
                    out,
                    layout,
                    description.as_ptr(),
                    description.len() as i64,
                )
            })
        }
    }

    /// Returns the memory of a tensor on the CPU, from its first element on.
    ///
    /// # Safety
    /// The memory has so many bytes.
    pub(super) unsafe fn memory(&self, bytes: usize) -> Result<&[u8], TorchError> {
        let mut data = ptr::null_mut();
        // SAFETY: a live tensor, and a valid out pointer.
        call(|| unsafe { libtorch::aoti_torch_get_data_ptr(self.raw(), &mut data) })?;
        if data.is_null() {
            return Err("it has no memory".into());
        }
        // SAFETY: the tensor lives as long as the slice, and has so many bytes (the caller guarantees it).
        Ok(unsafe { std::slice::from_raw_parts(data, bytes) })
    }

    /// Copies elements into a new tensor on the CPU; the last axis moves fastest.
    pub fn of<T: Bits>(data: &[T], shape: &[i64], dtype: Dtype) -> Result<Self, TorchError> {
        let stride = contiguous(shape);
        if span(shape, &stride)?.checked_mul(dtype.size() as i64)
            != i64::try_from(size_of_val(data)).ok()
        {
            let bytes = size_of_val(data);
            return Err(format!("{dtype} {shape:?} does not take {bytes} bytes").into());
        }
        let made = Self::empty(shape, &stride, dtype, Device::Cpu)?;
        if !data.is_empty() {
            // SAFETY: the slice has the tensor's bytes (checked above), is borrowed, and `source` is dropped before
            // this returns; nobody reads or writes through it but the copy.
            let source =
                unsafe { Self::over(data.as_ptr().cast(), shape, &stride, dtype, Device::Cpu) }?;
            made.copy_from(&source)?;
        }
        Ok(made)
    }

    /// Copies the elements, from wherever they are; the last axis moves fastest.
    pub fn read<T: Bits>(&self) -> Result<Vec<T>, TorchError> {
        let meta = self.meta();
        let dtype = meta.dtype().filter(|_| meta.dense());
        let dtype = dtype.ok_or_else(|| format!("it is {}", meta.dtype_name()))?;
        let shape: SmallVec<[i64; 8]> = SmallVec::from_slice(meta.sizes());
        let stride = contiguous(&shape);
        let bytes = span(&shape, &stride)?.checked_mul(dtype.size() as i64);
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let Some(bytes) = bytes.filter(|bytes| bytes.is_multiple_of(size_of::<T>())) else {
            return Err(format!("{dtype} {shape:?} can't be copied").into());
        };
        let length = bytes / size_of::<T>();
        let mut data: Vec<T> = Vec::new();
        data.try_reserve_exact(length)
            .map_err(|error| TorchError::Memory(error.to_string().into()))?;
        if length > 0 {
            // SAFETY: the vector has room for the tensor's bytes, `to` is dropped before it moves, and only the copy
            // writes.
            let to = unsafe {
                Self::over(
                    data.as_mut_ptr().cast(),
                    &shape,
                    &stride,
                    dtype,
                    Device::Cpu,
                )
            }?;
            to.copy_from(self)?;
        }
        // SAFETY: the copy wrote all of them, and any bits are a value (`Bits`).
        unsafe { data.set_len(length) };
        Ok(data)
    }

    /// Returns a tensor over a part of this one's memory, `offset` bytes after its first element.
    pub fn view(
        &self,
        shape: &[i64],
        stride: &[i64],
        offset: usize,
        dtype: Dtype,
    ) -> Result<Self, TorchError> {
        let meta = self.meta();
        let size = dtype.size() as i64;
        let offset = i64::try_from(offset)?;
        let end = span(shape, stride)?
            .checked_mul(size)
            .and_then(|n| n.checked_add(offset));
        let inside = end.is_some_and(|end| end <= meta.room()) && offset % size == 0;
        if !inside || !meta.dense() || meta.lazy() {
            let reason = format!("{dtype} {shape:?} does not lie in the tensor's memory");
            return Err(reason.into());
        }
        let rank = shape.len() as i64;
        // SAFETY: a live tensor; the new one shares its storage; both arrays have `rank` numbers; the part lies in the
        // storage (checked above); each call writes a new tensor.
        unsafe {
            Self::made(|out| {
                if meta.dtype() == Some(dtype) {
                    libtorch::aoti_torch__reinterpret_tensor(
                        self.raw(),
                        rank,
                        shape.as_ptr(),
                        stride.as_ptr(),
                        offset / size,
                        out,
                    )
                } else {
                    libtorch::aoti_torch__alloc_from_pool(
                        self.raw(),
                        offset,
                        number_of(dtype),
                        rank,
                        shape.as_ptr(),
                        stride.as_ptr(),
                        out,
                    )
                }
            })
        }
    }

    /// Writes another tensor's elements into this one's memory, from any device and dtype. Sizes are broadcast.
    pub fn copy_from(&self, from: &Self) -> Result<(), TorchError> {
        // SAFETY: two live tensors.
        call(|| unsafe { libtorch::aoti_torch_copy_(self.raw(), from.raw(), 0) })
    }

    /// Writes zeros.
    pub fn zero(&self) -> Result<(), TorchError> {
        // SAFETY: a live tensor.
        call(|| unsafe { libtorch::aoti_torch_zero_(self.raw()) })
    }

    /// Writes each second tensor's elements into the first one's memory. The sizes of each pair are equal. Many small
    /// tensors on a device take a few launches.
    pub fn copy_all<'a>(
        pairs: impl Iterator<Item = (&'a Self, &'a Self)>,
    ) -> Result<(), TorchError> {
        let (to, from): (SmallVec<[RawTensor; 16]>, SmallVec<[RawTensor; 16]>) =
            pairs.map(|(to, from)| (to.raw(), from.raw())).unzip();
        // SAFETY: two arrays of so many live tensors.
        checked(unsafe { precast_tensors_copy(to.as_ptr(), from.as_ptr(), to.len()) })
    }

    /// Returns whether another tensor has this one's memory. Handles of one tensor count as one.
    pub fn is_held(&self) -> bool {
        // SAFETY: a live tensor.
        unsafe { precast_tensor_uses(self.raw()) > 1 }
    }

    /// Returns whether no other handle and no other tensor has its memory.
    pub fn is_sole(&self) -> bool {
        // SAFETY: a live tensor.
        unsafe { precast_tensor_is_sole(self.raw()) }
    }

    /// Returns whether another tensor has the same memory, sizes, strides and dtype.
    pub fn is_like(&self, other: &Self) -> bool {
        let (own, other) = (self.meta(), other.meta());
        own.address() == other.address()
            && own.dtype_name() == other.dtype_name()
            && own.sizes() == other.sizes()
            && own.strides() == other.strides()
    }

    /// Returns another tensor with this one's memory.
    pub fn alias(&self) -> Result<Self, TorchError> {
        let meta = self.meta();
        let dtype = meta.dtype().ok_or_else(|| meta.dtype_name())?;
        self.view(meta.sizes(), meta.strides(), 0, dtype)
    }

    /// Returns copies as [`Self::copied`] does, in a few launches.
    pub fn copied_all(all: &[Self]) -> Result<Handles, TorchError> {
        let copies = all.iter().map(Self::empty_like);
        let copies: Handles = copies.collect::<Result<_, _>>()?;
        Self::copy_all(copies.iter().zip(all))?;
        Ok(copies)
    }

    /// Returns a copy in new memory, with the same strides if this tensor has no gaps.
    pub fn copied(&self) -> Result<Self, TorchError> {
        let copy = self.empty_like()?;
        copy.copy_from(self)?;
        Ok(copy)
    }

    /// Returns new memory for a copy.
    pub fn empty_like(&self) -> Result<Self, TorchError> {
        let meta = self.meta();
        let dtype = meta.dtype().ok_or_else(|| meta.dtype_name())?;
        let device = meta
            .device()
            .ok_or("it is neither on the CPU nor on CUDA")?;
        let strides = dense(meta.sizes(), meta.strides());
        Self::empty(meta.sizes(), &strides, dtype, device)
    }
}

/// Returns strides in the same order without gaps.
fn dense(shape: &[i64], stride: &[i64]) -> SmallVec<[i64; 8]> {
    let mut order: SmallVec<[usize; 8]> = (0..shape.len()).collect();
    // Stable: of equal strides the later axis moves faster.
    order.sort_by_key(|&axis| std::cmp::Reverse((stride[axis], shape[axis])));
    let mut strides = SmallVec::from_elem(1, shape.len());
    let mut next = 1i64;
    for &axis in order.iter().rev() {
        strides[axis] = next;
        next = next.saturating_mul(shape[axis].max(1));
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(n: i64) -> Handle {
        let data: Vec<i32> = (0..n as i32).collect();
        Handle::of(&data, &[n], Dtype::Int32).unwrap()
    }

    #[test]
    fn a_view_is_of_the_same_memory_from_where_its_tensor_begins() {
        let row = row(24);
        let table = row.view(&[2, 3], &[6, 2], 4 * 4, Dtype::Int32).unwrap();
        assert_eq!(table.read::<i32>().unwrap(), [4, 6, 8, 10, 12, 14]);
        let inner = table.view(&[2], &[1], 6 * 4, Dtype::Int32).unwrap();
        assert_eq!(inner.read::<i32>().unwrap(), [10, 11]);
        inner.zero().unwrap();
        assert_eq!(row.read::<i32>().unwrap()[9..13], [9, 0, 0, 12]);
        let bytes = row.view(&[4], &[1], 4, Dtype::Uint8).unwrap();
        assert_eq!(bytes.read::<u8>().unwrap(), [1, 0, 0, 0]);
        assert_eq!(bytes.meta().storage(), row.meta().storage());
    }

    #[test]
    fn a_view_lies_inside() {
        let row = row(8);
        let part = row.view(&[4], &[1], 16, Dtype::Int32).unwrap();
        for (shape, stride, offset) in [
            (&[9][..], &[1][..], 0),
            (&[8], &[1], 4),
            (&[2, 2], &[7, 1], 0),
            (&[1], &[1], 2),
            (&[2], &[-1], 8),
            (&[-1], &[1], 0),
            (&[1], &[], 0),
            (&[2, 1 << 62], &[1, i64::MAX], 0),
        ] {
            assert!(row.view(shape, stride, offset, Dtype::Int32).is_err());
        }
        assert!(part.view(&[5], &[1], 0, Dtype::Int32).is_err());
        assert!(row.view(&[1 << 40, 0], &[1, 1], 0, Dtype::Int32).is_ok());
    }

    #[test]
    fn a_copy_is_laid_out_alike_without_gaps() {
        let row = row(24);
        let turned = row.view(&[3, 2], &[1, 6], 0, Dtype::Int32).unwrap();
        let copy = turned.copied().unwrap();
        assert_eq!(copy.meta().strides(), [1, 3]);
        assert_eq!(copy.read::<i32>().unwrap(), [0, 6, 1, 7, 2, 8]);
        assert_eq!(dense(&[2, 1, 3], &[3, 3, 1])[..], [3, 3, 1]);
        assert_eq!(dense(&[4, 5], &[0, 1])[..], [1, 4]);
        assert_eq!(dense(&[0, 2], &[2, 1])[..], [2, 1]);
    }

    #[test]
    fn many_are_copied_at_once_whatever_their_dtypes_and_strides() {
        let long = Handle::of(&[1i64, 2, 3, 4, 5, 6], &[2, 3], Dtype::Int64).unwrap();
        let made = |stride: &[i64], dtype| {
            let made = Handle::empty(&[2, 3], stride, dtype, Device::Cpu).unwrap();
            made.copy_from(&long).unwrap();
            made
        };
        let strides = [[3, 1], [1, 2], [7, 2]];
        let each = Dtype::ALL.into_iter();
        let all = each.flat_map(|dtype| strides.each_ref().map(|stride| made(stride, dtype)));
        let all: Vec<_> = all.collect();
        let values = |tensor: &Handle| {
            let wide = Handle::empty(&[2, 3], &[3, 1], Dtype::Float64, Device::Cpu).unwrap();
            wide.copy_from(tensor).unwrap();
            wide.read::<f64>().unwrap()
        };
        let copies = Handle::copied_all(&all).unwrap();
        for (copy, of) in copies.iter().zip(&all) {
            assert_eq!(values(copy), values(of));
            assert_eq!(copy.meta().dtype(), of.meta().dtype());
            assert_ne!(copy.meta().address(), of.meta().address());
            copy.zero().unwrap();
        }
        // Into another dtype, and into other strides.
        Handle::copy_all(copies.iter().rev().zip(&all)).unwrap();
        for (copy, of) in copies.iter().rev().zip(&all) {
            let bools = copy.meta().dtype() == Some(Dtype::Bool);
            let wanted = values(of).into_iter();
            let wanted = wanted.map(|value| match bools {
                true => f64::from(value != 0.0),
                false => value,
            });
            assert_eq!(values(copy), wanted.collect::<Vec<_>>());
        }
        Handle::copy_all(std::iter::empty()).unwrap();
    }

    #[test]
    fn dtypes_are_converted_and_sizes_broadcast() {
        let to = Handle::empty(&[2, 3], &[3, 1], Dtype::Float32, Device::Cpu).unwrap();
        to.copy_from(&row(3)).unwrap();
        assert_eq!(to.read::<f32>().unwrap(), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
        let error = to.copy_from(&row(4)).unwrap_err().to_string();
        assert!(error.contains("size"), "{error}");
        assert!(!error.contains("Exception"), "{error}");
        assert!(Handle::of(&[1.0f32; 5], &[2, 3], Dtype::Float32).is_err());
    }

    #[test]
    fn what_takes_too_much_is_refused() {
        let error = Handle::empty(&[1 << 50], &[1], Dtype::Int64, Device::Cpu).unwrap_err();
        assert!(matches!(error, TorchError::Memory(_)), "{error}");
        assert!(Handle::empty(&[1 << 62], &[1], Dtype::Int64, Device::Cpu).is_err());
    }
}
