//! Tensors: handles of libtorch, with copies, views and conversions. They have no operators: those belong to models.
//!
//! [`Tensor::share`], [`Tensor::view`] and [`Tensor::narrow`] return other handles of the same memory, as in torch: a
//! write through one is read through all of them. The types do not prevent two threads from reading and writing one
//! memory at the same time: that is a data race, which the caller must prevent.

use half::{bf16, f16};
use precast_store::{Device, record::Dtype};

use super::{
    TorchError,
    ffi::{Handle, TensorRef, contiguous},
};

/// A tensor of libtorch's: shape, strides and dtype over memory that it shares with other handles.
///
/// ```
/// use precast_runtime::{Tensor, errors::TorchError};
/// # let torch = std::env::var_os("LIBTORCH").map(std::path::PathBuf::from);
/// # precast_runtime::Runtime::libtorch(torch.as_deref(), false).unwrap();
///
/// let table = Tensor::from_slice(&[1_i64, 2, 3, 4, 5, 6], &[2, 3])?;
/// let right = table.narrow(1, 1, 2)?;
/// assert_eq!((right.shape(), right.to_vec::<i64>()?), (vec![2, 2], vec![2, 3, 5, 6]));
/// # Ok::<(), TorchError>(())
/// ```
pub struct Tensor(pub(super) Handle);

/// An element of a tensor or an array: `f32`, `f64`, `half::f16`, `half::bf16`, `i64`, `i32`, `i16`, `i8`, `u8` and
/// `bool`.
pub trait Element: sealed::Plain + Copy + 'static {
    /// The dtype of its tensors.
    const DTYPE: Dtype;
}

impl Tensor {
    /// Creates a tensor with undefined elements.
    pub fn empty(shape: &[i64], dtype: Dtype, device: Device) -> Result<Self, TorchError> {
        Self::empty_strided(shape, &contiguous(shape), dtype, device)
    }

    /// As [`Self::empty`], with strides in elements.
    pub fn empty_strided(
        shape: &[i64],
        stride: &[i64],
        dtype: Dtype,
        device: Device,
    ) -> Result<Self, TorchError> {
        Ok(Self(Handle::empty(shape, stride, dtype, device)?))
    }

    /// Creates a tensor of zeros.
    pub fn zeros(shape: &[i64], dtype: Dtype, device: Device) -> Result<Self, TorchError> {
        let made = Self::empty(shape, dtype, device)?;
        made.0.zero()?;
        Ok(made)
    }

    /// Copies elements, the last axis moving fastest, into a tensor on the CPU. Fails where the shape has more or
    /// fewer.
    pub fn from_slice<T: Element>(data: &[T], shape: &[i64]) -> Result<Self, TorchError> {
        Ok(Self(T::tensor(data, shape)?))
    }

    /// As [`Self::from_slice`], for elements as their bytes.
    pub fn from_bytes(bytes: &[u8], shape: &[i64], dtype: Dtype) -> Result<Self, TorchError> {
        Ok(Self(Handle::of(bytes, shape, dtype)?))
    }

    /// Returns the sizes of its axes; none unless it is dense.
    pub fn shape(&self) -> Vec<i64> {
        self.0.meta().sizes().to_vec()
    }

    /// Returns the strides of its axes, in elements.
    pub fn stride(&self) -> Vec<i64> {
        self.0.meta().strides().to_vec()
    }

    /// Returns the number of elements; 0 unless it is dense.
    pub fn numel(&self) -> usize {
        let meta = self.0.meta();
        if !meta.dense() {
            return 0;
        }
        let sizes = meta.sizes().iter();
        sizes
            .map(|&size| usize::try_from(size).unwrap_or(0))
            .product()
    }

    /// Returns the dtype; none unless modules take it.
    pub fn dtype(&self) -> Option<Dtype> {
        self.0.meta().dtype()
    }

    /// Returns the dtype's name, also for dtypes that no module takes.
    pub fn dtype_name(&self) -> String {
        self.0.meta().dtype_name()
    }

    /// Returns the device; none unless it is the CPU or CUDA.
    pub fn device(&self) -> Option<Device> {
        self.0.meta().device()
    }

    /// Returns the address of element 0.
    pub fn address(&self) -> usize {
        self.0.meta().address()
    }

    /// Returns another handle of the same tensor.
    pub fn share(&self) -> Self {
        Self(self.0.share())
    }

    /// Returns a tensor over this one's memory: `offset` elements after its first one, with these sizes and strides.
    /// Fails if it would exceed the memory.
    pub fn view(&self, shape: &[i64], stride: &[i64], offset: usize) -> Result<Self, TorchError> {
        let dtype = self.dtype().ok_or_else(|| self.dtype_name())?;
        let offset = offset
            .checked_mul(dtype.size())
            .ok_or("it is out of range")?;
        Ok(Self(self.0.view(shape, stride, offset, dtype)?))
    }

    /// Returns the part of an axis from `start` on, `length` long: a view.
    pub fn narrow(&self, axis: usize, start: i64, length: i64) -> Result<Self, TorchError> {
        let (mut shape, stride) = (self.shape(), self.stride());
        let size = shape.get(axis).copied().unwrap_or(-1);
        let end = start.checked_add(length);
        if start < 0 || length < 0 || end.is_none_or(|end| end > size) {
            return Err(format!("{shape:?} has no {length} from {start} on axis {axis}").into());
        }
        shape[axis] = length;
        let offset = if length == 0 { 0 } else { start * stride[axis] };
        self.view(&shape, &stride, offset.unsigned_abs() as usize)
    }

    /// Returns the tensor with two axes swapped: a view.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Self, TorchError> {
        let (mut shape, mut stride) = (self.shape(), self.stride());
        if a.max(b) >= shape.len() {
            return Err(format!("{shape:?} has no axes {a} and {b}").into());
        }
        shape.swap(a, b);
        stride.swap(a, b);
        self.view(&shape, &stride, 0)
    }

    /// Returns a copy on a device, or another handle if the tensor is on that device. On CUDA it does not wait.
    pub fn to_device(&self, device: Device) -> Result<Self, TorchError> {
        match (self.device() == Some(device), self.dtype()) {
            (true, _) => Ok(self.share()),
            (_, Some(dtype)) => self.converted(dtype, device),
            _ => Err(self.dtype_name().into()),
        }
    }

    /// Returns a copy with another dtype, or another handle if the tensor has that dtype.
    pub fn to_dtype(&self, dtype: Dtype) -> Result<Self, TorchError> {
        match (self.dtype() == Some(dtype), self.device()) {
            (true, _) => Ok(self.share()),
            (_, Some(device)) => self.converted(dtype, device),
            _ => Err("it is neither on the CPU nor on CUDA".into()),
        }
    }

    /// Returns a copy in new memory without gaps, in row-major order.
    pub fn contiguous(&self) -> Result<Self, TorchError> {
        match (self.dtype(), self.device()) {
            (Some(dtype), Some(device)) => self.converted(dtype, device),
            _ => Err(self.dtype_name().into()),
        }
    }

    /// Returns a copy in new memory without gaps.
    pub(super) fn converted(&self, dtype: Dtype, device: Device) -> Result<Self, TorchError> {
        let copy = Self::empty(self.0.meta().sizes(), dtype, device)?;
        copy.0.copy_from(&self.0)?;
        Ok(copy)
    }

    /// Writes another tensor's elements into this one's memory, from any device and dtype. Smaller sizes are broadcast.
    pub fn copy_from(&mut self, from: &Self) -> Result<(), TorchError> {
        self.0.copy_from(&from.0)
    }

    /// Writes zeros into its memory.
    pub fn zero(&mut self) -> Result<(), TorchError> {
        self.0.zero()
    }

    /// Copies its elements into the host's memory, the last axis moving fastest; on CUDA it waits for them. Fails where
    /// they are of another type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, TorchError> {
        match self.dtype() {
            Some(dtype) if dtype == T::DTYPE => Ok(T::data(&self.0)?),
            _ => Err(format!("it is {}, not {}", self.dtype_name(), T::DTYPE).into()),
        }
    }

    /// As [`Self::to_vec`], the bytes of its elements.
    pub fn to_bytes(&self) -> Result<Vec<u8>, TorchError> {
        self.0.read()
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let device = self.device();
        f.debug_struct("Tensor")
            .field("dtype", &self.dtype_name())
            .field("shape", &self.shape())
            .field("stride", &self.stride())
            .field("device", &device.map(|device| device.to_string()))
            .finish()
    }
}

impl<'a> From<&'a Tensor> for TensorRef<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        tensor.0.borrow()
    }
}

/// Takes a tensor of tch without a copy.
#[cfg(feature = "tch")]
impl From<tch::Tensor> for Tensor {
    fn from(tensor: tch::Tensor) -> Self {
        Self(tensor.into())
    }
}

/// Gives a tensor to tch without a copy.
#[cfg(feature = "tch")]
impl From<Tensor> for tch::Tensor {
    fn from(tensor: Tensor) -> Self {
        tensor.0.into()
    }
}

/// Gives tch another handle of the same tensor.
#[cfg(feature = "tch")]
impl From<&Tensor> for tch::Tensor {
    fn from(tensor: &Tensor) -> Self {
        tensor.0.share().into()
    }
}

mod sealed {
    use super::{Handle, TorchError};

    /// Conversion of elements to and from a tensor.
    pub trait Plain: Sized {
        fn tensor(data: &[Self], shape: &[i64]) -> Result<Handle, TorchError>;
        fn data(tensor: &Handle) -> Result<Vec<Self>, TorchError>;
    }
}

macro_rules! elements {
    ($($type:ty: $dtype:ident,)*) => {$(
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        }

        impl sealed::Plain for $type {
            fn tensor(data: &[Self], shape: &[i64]) -> Result<Handle, TorchError> {
                Handle::of(data, shape, Self::DTYPE)
            }

            fn data(tensor: &Handle) -> Result<Vec<Self>, TorchError> {
                tensor.read()
            }
        }
    )*};
}

elements! {
    f32: Float32,
    f64: Float64,
    f16: Float16,
    bf16: Bfloat16,
    i64: Int64,
    i32: Int32,
    i16: Int16,
    i8: Int8,
    u8: Uint8,
}

impl Element for bool {
    const DTYPE: Dtype = Dtype::Bool;
}

/// A kernel may have written any byte for true; a Rust `bool` must be 0 or 1.
impl sealed::Plain for bool {
    fn tensor(data: &[Self], shape: &[i64]) -> Result<Handle, TorchError> {
        let bytes: Vec<u8> = data.iter().map(|&bit| bit.into()).collect();
        Handle::of(&bytes, shape, Dtype::Bool)
    }

    fn data(tensor: &Handle) -> Result<Vec<Self>, TorchError> {
        let bytes: Vec<u8> = tensor.read()?;
        Ok(bytes.into_iter().map(|byte| byte != 0).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_of_the_same_memory_and_copies_are_not() {
        let mut table = Tensor::from_slice(&[0i32, 1, 2, 3, 4, 5], &[2, 3]).unwrap();
        let copy = table.contiguous().unwrap();
        let turned = table.transpose(0, 1).unwrap();
        assert_eq!(turned.stride(), [1, 3]);
        assert_eq!(turned.to_vec::<i32>().unwrap(), [0, 3, 1, 4, 2, 5]);
        let corner = table.narrow(0, 1, 1).unwrap().narrow(1, 1, 2).unwrap();
        assert_eq!(corner.to_vec::<i32>().unwrap(), [4, 5]);
        assert_eq!(corner.address(), table.address() + 16);
        table.zero().unwrap();
        assert_eq!(turned.to_vec::<i32>().unwrap(), [0; 6]);
        assert_eq!(copy.to_vec::<i32>().unwrap(), [0, 1, 2, 3, 4, 5]);
        table.copy_from(&copy).unwrap();
        let floats = corner.to_dtype(Dtype::Float32).unwrap();
        assert_eq!(floats.to_vec::<f32>().unwrap(), [4.0, 5.0]);
        let error = table.narrow(1, 2, 2).unwrap_err().to_string();
        assert_eq!(error, "[2, 3] has no 2 from 2 on axis 1");
        let error = table.to_vec::<f32>().unwrap_err().to_string();
        assert_eq!(error, "it is int32, not float32");
        assert!(table.narrow(2, 0, 0).is_err() && table.transpose(0, 2).is_err());
    }

    #[test]
    fn bytes_go_in_and_come_out() {
        let bytes: Vec<u8> = (0..8).collect();
        let made = Tensor::from_bytes(&bytes, &[2, 2], Dtype::Int16).unwrap();
        assert_eq!(made.to_vec::<i16>().unwrap()[1], 0x0302);
        assert_eq!(made.to_bytes().unwrap(), bytes);
        assert!(Tensor::from_bytes(&bytes, &[3], Dtype::Int16).is_err());
    }
}
