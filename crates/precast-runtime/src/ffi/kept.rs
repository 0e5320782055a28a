//! Tensors as bytes of a file: prepacked constants that are kept for later processes.
//!
//! ```text
//! ┌──────────────────────┬───────────────────────┬───────────────────────┬──────────────────────────────┐
//! │ the tensor's memory  │ description of oneDNN │ bytes of the memory   │ bytes of the description     │
//! │                      │ (none where strided)  │ (64 bits)             │ (64 bits)                    │
//! └──────────────────────┴───────────────────────┴───────────────────────┴──────────────────────────────┘
//! ```
//!
//! A tensor in an order that only oneDNN knows is made from its memory and that description, as AOTInductor makes
//! constants of this kind (`mkldnn_tensor_from_data_ptr` in torch's sources).

use precast_store::{Device, Mapped, record::Dtype};

use super::{CallsBuilder, Given, Handle, Item, Kept, Weight};
use crate::TorchError;

/// The parts of a file for one tensor, which it borrows.
pub struct Parts<'a> {
    memory: &'a [u8],
    description: Vec<u8>,
    sizes: [u8; 16],
}

impl<'a> Parts<'a> {
    /// Returns the parts for a tensor on the CPU, without gaps.
    pub fn of(tensor: &'a Handle) -> Result<Self, TorchError> {
        let meta = tensor.meta();
        let (bytes, description) = if meta.dense() {
            if meta.address() != meta.storage() {
                return Err("it is a part of other memory".into());
            }
            (usize::try_from(meta.room())?, Vec::new())
        } else {
            described(tensor)?
        };
        // SAFETY: the storage begins with element 0 and has so many bytes, or oneDNN says that it needs so many.
        let memory = unsafe { tensor.memory(bytes) }?;
        let mut sizes = [0; 16];
        sizes[..8].copy_from_slice(&(memory.len() as u64).to_le_bytes());
        sizes[8..].copy_from_slice(&(description.len() as u64).to_le_bytes());
        Ok(Self {
            memory,
            description,
            sizes,
        })
    }

    /// Returns the parts in the order of the file.
    pub fn in_order(&self) -> [&[u8]; 3] {
        [self.memory, &self.description, &self.sizes]
    }
}

/// Returns the size of a tensor's memory and its description, from oneDNN.
fn described(tensor: &Handle) -> Result<(usize, Vec<u8>), TorchError> {
    /// Torch's number of int64 in its export schema.
    const INT64: i64 = 5;
    let given = |name: &str, item| Given {
        name: name.to_owned(),
        is_list: false,
        items: vec![item],
    };
    let one = |number| [Kept::One(Some(number))];
    let mut calls = CallsBuilder::new(Device::Cpu, 1)?;
    let tensor_of = || [given("mkldnn_tensor", Item::Value(0))];
    calls.add("mkldnn::_nbytes", &tensor_of(), &one(1))?;
    let scalar = [
        given("s", Item::Value(1)),
        given("dtype", Item::ScalarType(INT64)),
        given("layout", Item::None),
        given("device", Item::None),
        given("pin_memory", Item::None),
    ];
    calls.add("aten::scalar_tensor", &scalar, &one(2))?;
    calls.add("mkldnn::_get_mkldnn_serialized_md", &tensor_of(), &one(3))?;
    let made = calls.finish(&[2, 3])?.invoke(&[tensor], 2)?;
    let bytes = made[0].read::<i64>()?;
    let bytes = bytes.first().copied().unwrap_or(0);
    Ok((usize::try_from(bytes)?, made[1].read()?))
}

/// Makes the tensor of a file. Without strides it is in an order that only oneDNN knows.
pub fn restored(
    file: &Mapped,
    dtype: Dtype,
    shape: &[i64],
    stride: Option<&[i64]>,
) -> Result<Weight, TorchError> {
    let bad = || TorchError::from("the file has no tensor");
    let (rest, sizes) = file.split_last_chunk::<16>().ok_or_else(bad)?;
    let size = |at: usize| {
        let bytes = sizes[at..].first_chunk::<8>().copied();
        usize::try_from(u64::from_le_bytes(bytes.unwrap_or_default()))
    };
    let (memory, description) = (size(0)?, size(8)?);
    if memory.checked_add(description) != Some(rest.len()) {
        return Err(bad());
    }
    match stride {
        Some(stride) => Weight::over(file, 0..memory, shape, stride, dtype),
        None => {
            // SAFETY: `Parts` of a tensor of this dtype and shape, made by the same version of oneDNN for the same kind of
            // machine: the key of the file covers all of these, and its bytes were checked.
            unsafe { Weight::over_opaque(file, memory, shape, dtype, &rest[memory..]) }
        }
    }
}
