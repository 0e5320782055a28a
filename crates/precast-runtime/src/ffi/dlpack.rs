//! DLPack: its structures, their ownership, and conversion from and to libtorch's tensors, without a copy.
//!
//! The structures are those of `dlpack.h`: [`DLManagedTensorVersioned`] since version 1.0, [`DLManagedTensor`] before
//! it. A [`Capsule`] owns one of them and calls its deleter once.
//!
//! | direction | owner of the memory |
//! |---|---|
//! | in | the tensor's storage has the capsule; the last handle of the memory calls the deleter |
//! | out | the capsule has a [`Handle`]; the deleter drops it |
//!
//! Every number of a received capsule is checked before it is passed to libtorch. Its pointers can't be checked.

use std::{
    ffi::c_void,
    ptr::{self, NonNull},
    slice,
    sync::Arc,
};

use precast_store::{Device, record::Dtype};
use smallvec::SmallVec;

use super::{
    Handle, contiguous, cuda,
    libtorch::torch_from_blob,
    memory::{place, span},
    shim::{self, precast_tensor_over},
    tensor::number_of,
};
use crate::TorchError;

/// The number of axes that libtorch's kernels take.
const MAX_RANK: i32 = 64;

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;

const READ_ONLY: u64 = 1;

/// The device of a tensor's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// A `DLDeviceType`: 1 for the CPU, 2 for CUDA, 3 for pinned memory of the host.
    pub device_type: i32,
    /// Ordinal of the device.
    pub device_id: i32,
}

/// The type of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// A `DLDataTypeCode`: 0 for int, 1 for uint, 2 for float, 4 for bfloat, 6 for bool.
    pub code: u8,
    /// Bits of one number.
    pub bits: u8,
    /// Numbers in one element; 1 unless it is a vector type.
    pub lanes: u16,
}

/// Memory with a shape.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// The memory. Element 0 is at `byte_offset` bytes from here.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DLDevice,
    /// The number of axes.
    pub ndim: i32,
    /// The type of its elements.
    pub dtype: DLDataType,
    /// `ndim` sizes.
    pub shape: *mut i64,
    /// `ndim` strides in elements; null for elements without gaps, the last axis moving fastest.
    pub strides: *mut i64,
    /// Bytes between `data` and element 0.
    pub byte_offset: u64,
}

/// A tensor and its owner, before DLPack 1.0: a capsule with the name `dltensor`.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// The version of DLPack that a structure is of.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Another major version has another structure after the deleter.
    pub major: u32,
    /// A later one defines more numbers.
    pub minor: u32,
}

/// A tensor and its owner: a capsule with the name `dltensor_versioned`.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// Its version.
    pub version: DLPackVersion,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor and this structure.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// Bit 0 for memory that may not be written to.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

/// One of the two structures that DLPack hands over.
pub trait Managed: sealed::Managed {}

impl Managed for DLManagedTensor {}
impl Managed for DLManagedTensorVersioned {}

mod sealed {
    use super::{DLTensor, TorchError};

    pub type Deleter<M> = unsafe extern "C" fn(*mut M);

    pub trait Managed: Sized {
        fn made(tensor: DLTensor, deleter: Deleter<Self>) -> Self;

        /// Returns the tensor, or why it can't be taken.
        ///
        /// # Safety
        /// `raw` is such a structure, of any version.
        unsafe fn tensor(raw: *const Self) -> Result<DLTensor, TorchError>;

        /// # Safety
        /// As for [`Self::tensor`].
        unsafe fn deleter(raw: *const Self) -> Option<Deleter<Self>>;
    }
}

impl sealed::Managed for DLManagedTensor {
    fn made(tensor: DLTensor, deleter: sealed::Deleter<Self>) -> Self {
        Self {
            dl_tensor: tensor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(deleter),
        }
    }

    unsafe fn tensor(raw: *const Self) -> Result<DLTensor, TorchError> {
        // SAFETY: as the caller vouches.
        Ok(unsafe { (*raw).dl_tensor })
    }

    unsafe fn deleter(raw: *const Self) -> Option<sealed::Deleter<Self>> {
        // SAFETY: as the caller vouches.
        unsafe { (*raw).deleter }
    }
}

impl sealed::Managed for DLManagedTensorVersioned {
    fn made(tensor: DLTensor, deleter: sealed::Deleter<Self>) -> Self {
        Self {
            version: DLPackVersion { major: 1, minor: 0 },
            manager_ctx: ptr::null_mut(),
            deleter: Some(deleter),
            flags: 0,
            dl_tensor: tensor,
        }
    }

    unsafe fn tensor(raw: *const Self) -> Result<DLTensor, TorchError> {
        // SAFETY: as the caller vouches. The version has the same place in every version; the fields after the deleter
        // are read only where the version is known.
        unsafe {
            let DLPackVersion { major, minor } = (*raw).version;
            if major != 1 {
                return Err(
                    format!("it is of DLPack {major}.{minor}: only 1.x is supported").into(),
                );
            }
            if (*raw).flags & READ_ONLY != 0 {
                return Err("it is read-only, and a tensor's memory may be written to".into());
            }
            Ok((*raw).dl_tensor)
        }
    }

    unsafe fn deleter(raw: *const Self) -> Option<sealed::Deleter<Self>> {
        // SAFETY: as the caller vouches. The deleter has its place in every version.
        unsafe { (*raw).deleter }
    }
}

/// A tensor in the form in which libraries exchange tensors. It owns the structure: a drop calls the deleter.
///
/// `Capsule` without a parameter is of DLPack 1.x. A `Capsule<DLManagedTensor>` is for libraries that only support
/// earlier versions.
#[derive(Debug)]
pub struct Capsule<M: Managed = DLManagedTensorVersioned>(NonNull<M>);

impl<M: Managed> Capsule<M> {
    /// Takes ownership of a producer's structure: in Python the pointer of a capsule that the caller renames to
    /// `used_dltensor` or `used_dltensor_versioned`.
    ///
    /// # Safety
    /// - `raw` is a structure that a producer made, and nobody else calls its deleter or reads it from now on. Any thread
    ///   may call the deleter.
    /// - `shape` has `ndim` sizes; `strides` has `ndim` strides or is null.
    /// - From `byte_offset` bytes behind `data` on there is memory for all the elements that shape, strides and dtype
    ///   say, on that device, until the deleter is called. Nobody writes to it while a call or a copy uses it.
    ///
    /// The numbers may have any value: they are checked when the capsule becomes a tensor.
    pub unsafe fn from_raw(raw: NonNull<M>) -> Self {
        Self(raw)
    }

    /// Returns the structure, which lives as long as the capsule.
    pub fn as_ptr(&self) -> NonNull<M> {
        self.0
    }

    /// Gives it away. The owner of the pointer calls the deleter once.
    pub fn into_raw(self) -> NonNull<M> {
        std::mem::ManuallyDrop::new(self).0
    }

    /// Creates a capsule of a tensor.
    pub(crate) fn of(tensor: Handle) -> Result<Self, TorchError> {
        let meta = tensor.meta();
        if !meta.dense() {
            return Err("it is no dense tensor".into());
        }
        if meta.lazy() {
            return Err("a negation or conjugation of it is pending".into());
        }
        let dtype = meta.dtype().ok_or_else(|| meta.dtype_name())?;
        let (device_type, device_id) = match meta.device() {
            Some(Device::Cpu) => (CPU, 0),
            Some(Device::Cuda(ordinal)) => (CUDA, super::cuda::ordinal(ordinal)?),
            None => return Err("it is neither on the CPU nor on CUDA".into()),
        };
        let ndim = i32::try_from(meta.sizes().len())?;
        let mut layout = [meta.sizes(), meta.strides()].concat();
        let data = match span(meta.sizes(), meta.strides())? {
            0 => ptr::null_mut(),
            _ => ptr::with_exposed_provenance_mut(meta.address()),
        };
        let (shape, strides) = layout.split_at_mut(meta.sizes().len());
        let described = DLTensor {
            data,
            device: DLDevice {
                device_type,
                device_id,
            },
            ndim,
            dtype: dtype.into(),
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let exported = Box::new(Exported {
            managed: M::made(described, Exported::free),
            _tensor: tensor,
            _layout: layout,
        });
        // The structure is its first field.
        Ok(Self(NonNull::from(Box::leak(exported)).cast()))
    }

    /// Creates a tensor over the memory, which keeps the capsule. Fails if the numbers do not describe a tensor; the
    /// deleter has then been called.
    pub(crate) fn into_handle(self) -> Result<Handle, TorchError> {
        let lent = self.read()?;
        // libtorch looks up where the memory is, and a CPU has no index there.
        let (device_type, index) = match lent.device {
            Device::Cpu => (0, -1),
            device => place(device)?,
        };
        if lent.data.is_null() {
            // There is no memory to share.
            return Handle::empty(&lent.shape, &lent.stride, lent.dtype, lent.device);
        }
        #[allow(
            clippy::arc_with_non_send_sync,
            reason = "any thread may call the deleter: `from_raw`"
        )]
        let owner = Arc::new(self);
        let given = Arc::into_raw(owner.clone());
        let owner_of_memory = given.cast_mut().cast();
        let (rank, dtype) = (lent.shape.len() as i64, number_of(lent.dtype));
        let (shape, stride) = (lent.shape.as_ptr(), lent.stride.as_ptr());
        let made = if lent.device == Device::Cpu && shim::is_open() {
            // SAFETY: both arrays have `rank` numbers; the memory lives as long as the capsule, as `from_raw` requires,
            // and `free` drops `given`; the new tensor has no other owner.
            let made = unsafe {
                Handle::from_raw(precast_tensor_over(
                    lent.data,
                    lent.bytes,
                    rank,
                    shape,
                    stride,
                    dtype,
                    owner_of_memory,
                    free::<M>,
                ))
            };
            made.ok_or_else(|| "libtorch makes no tensor over its memory".into())
        } else {
            // SAFETY: as above, with `release`; it writes a new tensor.
            unsafe {
                Handle::made(|out| {
                    torch_from_blob(
                        lent.data,
                        rank,
                        shape,
                        stride,
                        0,
                        dtype,
                        device_type,
                        index,
                        out,
                        0, // strided
                        ptr::null(),
                        0,
                        release::<M>,
                        owner_of_memory,
                    )
                })
            }
        };
        if made.is_err() && Arc::strong_count(&owner) > 1 {
            // It failed before it took the deleter.
            // SAFETY: `given` has no other owner.
            drop(unsafe { Arc::from_raw(given) });
        }
        made
    }

    /// Returns the checked tensor.
    fn read(&self) -> Result<Lent, TorchError> {
        // SAFETY: `from_raw` requires such a structure.
        let tensor = unsafe { M::tensor(self.0.as_ptr()) }?;
        let DLTensor { ndim, dtype, .. } = tensor;
        if !(0..=MAX_RANK).contains(&ndim) {
            return Err(format!("its `ndim` is {ndim}, not one of 0 to {MAX_RANK}").into());
        }
        let dtype = dtype_of(dtype)
            .ok_or_else(|| format!("its dtype is {}, which no module takes", name_of(dtype)))?;
        let device = device_of(tensor.device)?;
        if ndim > 0 && tensor.shape.is_null() {
            return Err(format!("its `shape` is null, and its `ndim` is {ndim}").into());
        }
        // SAFETY: `from_raw` requires that both have `ndim` numbers.
        let numbers = |start: *mut i64| unsafe { slice::from_raw_parts(start, ndim as usize) };
        let shape: SmallVec<[i64; 8]> = match ndim {
            0 => SmallVec::new(),
            _ => SmallVec::from_slice(numbers(tensor.shape)),
        };
        let stride = if ndim == 0 || tensor.strides.is_null() {
            contiguous(&shape)
        } else {
            SmallVec::from_slice(numbers(tensor.strides))
        };
        for (name, numbers) in [("shape", &shape), ("strides", &stride)] {
            if numbers.iter().any(|&number| number < 0) {
                return Err(
                    format!("its `{name}` is {numbers:?}, and no number may be below 0").into(),
                );
            }
        }
        let bytes = span(&shape, &stride)?.checked_mul(dtype.size() as i64);
        let start = bytes.and_then(|bytes| start(&tensor, bytes));
        let (Some(bytes), Some(start)) = (bytes, start) else {
            let offset = tensor.byte_offset;
            return Err(format!(
                "{dtype} {shape:?} with strides {stride:?} at byte {offset} lies in no memory"
            )
            .into());
        };
        let data = match bytes {
            0 => ptr::null_mut(),
            _ if tensor.data.is_null() => {
                return Err(format!("its `data` is null, and its `shape` is {shape:?}").into());
            }
            _ if !start.is_multiple_of(dtype.size()) => {
                return Err(format!("its element 0 is not aligned for {dtype}").into());
            }
            _ => tensor.data.with_addr(start),
        };
        Ok(Lent {
            data,
            bytes,
            shape,
            stride,
            dtype,
            device,
        })
    }
}

impl<M: Managed> Drop for Capsule<M> {
    fn drop(&mut self) {
        let raw = self.0.as_ptr();
        // SAFETY: it is such a structure, and it is owned: no other code calls the deleter.
        unsafe {
            if let Some(deleter) = M::deleter(raw) {
                deleter(raw);
            }
        }
    }
}

/// Memory of a capsule: null without elements.
struct Lent {
    data: *mut c_void,
    bytes: i64,
    shape: SmallVec<[i64; 8]>,
    stride: SmallVec<[i64; 8]>,
    dtype: Dtype,
    device: Device,
}

/// Drops the capsule of a tensor whose memory is unused.
unsafe extern "C" fn free<M: Managed>(owner: *mut c_void) {
    // SAFETY: the pointer of `into_handle`; libtorch calls this once.
    drop(unsafe { Arc::from_raw(owner.cast::<Capsule<M>>()) });
}

/// As [`free`], for `torch_from_blob`.
unsafe extern "C" fn release<M: Managed>(_data: *mut c_void, owner: *mut c_void) {
    // SAFETY: as there.
    unsafe { free::<M>(owner) };
}

/// Returns the address of element 0; none if `bytes` from that address exceed the address space.
fn start(tensor: &DLTensor, bytes: i64) -> Option<usize> {
    let start = tensor.data.addr();
    let start = start.checked_add(usize::try_from(tensor.byte_offset).ok()?)?;
    let end = start.checked_add(usize::try_from(bytes).ok()?)?;
    isize::try_from(end).is_ok().then_some(start)
}

/// A structure for a consumer, and the memory that it points to.
#[repr(C)]
struct Exported<M> {
    managed: M,
    _tensor: Handle,
    /// Sizes, then strides.
    _layout: Vec<i64>,
}

impl<M> Exported<M> {
    unsafe extern "C" fn free(managed: *mut M) {
        // SAFETY: the deleter of a structure of `Capsule::of`, its first field; it is called once.
        drop(unsafe { Box::from_raw(managed.cast::<Self>()) });
    }
}

/// Every dtype as DLPack has it.
const TYPES: [(Dtype, u8, u8); 10] = [
    (Dtype::Int8, 0, 8),
    (Dtype::Int16, 0, 16),
    (Dtype::Int32, 0, 32),
    (Dtype::Int64, 0, 64),
    (Dtype::Uint8, 1, 8),
    (Dtype::Float16, 2, 16),
    (Dtype::Float32, 2, 32),
    (Dtype::Float64, 2, 64),
    (Dtype::Bfloat16, 4, 16),
    (Dtype::Bool, 6, 8),
];

impl From<Dtype> for DLDataType {
    fn from(dtype: Dtype) -> Self {
        let found = TYPES.iter().find(|(own, ..)| *own == dtype);
        let (code, bits) = found.map_or((1, 8), |&(_, code, bits)| (code, bits));
        let lanes = 1;
        Self { code, bits, lanes }
    }
}

fn dtype_of(found: DLDataType) -> Option<Dtype> {
    let same = |&&(_, code, bits): &&(Dtype, u8, u8)| {
        (code, bits, 1) == (found.code, found.bits, found.lanes)
    };
    TYPES.iter().find(same).map(|(dtype, ..)| *dtype)
}

/// Returns the name of a type, as `complex64`, or `float32x4` for a vector.
fn name_of(found: DLDataType) -> String {
    const NAMES: [&str; 7] = [
        "int", "uint", "float", "opaque", "bfloat", "complex", "bool",
    ];
    let DLDataType { code, bits, lanes } = found;
    let name = NAMES.get(usize::from(code));
    let name = name.map_or(format!("code {code}, bits "), |name| (*name).to_owned());
    let lanes = match lanes {
        1 => String::new(),
        _ => format!("x{lanes}"),
    };
    format!("`{name}{bits}{lanes}`")
}

/// Returns the device; pinned memory of the host is the CPU's.
fn device_of(found: DLDevice) -> Result<Device, TorchError> {
    let DLDevice {
        device_type,
        device_id,
    } = found;
    match (device_type, usize::try_from(device_id)) {
        (CPU | CUDA_HOST, _) => Ok(Device::Cpu),
        (CUDA, Ok(ordinal)) => {
            let count = cuda()
                .map_err(|error| error.at(&format!("it is on `cuda:{ordinal}`")))?
                .devices();
            if ordinal >= count {
                let reason =
                    format!("it is on `cuda:{ordinal}`, and the process has {count} CUDA devices");
                return Err(reason.into());
            }
            Ok(Device::Cuda(ordinal))
        }
        _ => Err(format!(
            "it is on device {device_id} of type {device_type}, which is neither the CPU nor CUDA"
        )
        .into()),
    }
}

/// Returns the stream that is current on this thread, by its number in Python's protocol.
pub fn stream_number(device: usize) -> Result<isize, TorchError> {
    match cuda()?.current_stream(device)?.0.addr() {
        // 0 is ambiguous, and no producer takes it.
        0 => Ok(1),
        address => Ok(isize::try_from(address)?),
    }
}

#[cfg(test)]
mod tests;
