//! The header of a safetensors file.

use std::collections::BTreeMap;

use safetensors::tensor::Metadata;
use serde::Serialize;

use super::{Parsed, object::number, window::Window};

const LENGTH: u64 = 8;
/// Maximum bytes of the header. The format allows 100 MB; a value in memory takes up to 32 times its text.
const HEADER: u64 = 16 << 20;

/// A safetensors file.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Tensors {
    /// Bytes of the header, its length field included.
    pub header: u64,
    /// Free text that the writer left.
    pub metadata: BTreeMap<String, String>,
    /// dtype -> elements of it.
    pub elements: BTreeMap<String, u64>,
    /// Sorted by name.
    pub tensors: Vec<Tensor>,
}

/// One tensor of a safetensors file.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Tensor {
    /// Name of the tensor in the header.
    pub name: String,
    /// As the format spells it: `F32`, `BF16`, …
    pub dtype: String,
    /// Size of each axis.
    pub shape: Vec<usize>,
    /// Bytes of its elements.
    pub bytes: u64,
}

/// Returns whether a file that begins so can be safetensors.
pub(super) fn looks_like(magic: &[u8]) -> bool {
    magic.len() == 9 && magic[8] == b'{' && magic[4..8] == [0; 4]
}

pub(super) fn tensors(file: Window<'_>) -> Parsed<Tensors> {
    let (length, size) = (number(&file.bytes(0, LENGTH)?, 0, 8), file.size);
    if length > size - LENGTH {
        return Err(format!(
            "its header would have {length} bytes, the whole file has {size}"
        ));
    }
    if length > HEADER {
        return Err(file.limit.refuse(format!(
            "its header has {length} bytes, at most {HEADER} are read"
        )));
    }
    let header = file.bytes(LENGTH, length)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| error.to_string())?;
    let needs = LENGTH + length + metadata.data_len() as u64;
    if needs != size {
        return Err(format!(
            "its tensors end at byte {needs}, the file at byte {size}"
        ));
    }
    let mut elements = BTreeMap::new();
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let dtype = info.dtype.to_string();
        let count: usize = info.shape.iter().product();
        *elements.entry(dtype.clone()).or_default() += count as u64;
        tensors.push(Tensor {
            name,
            dtype,
            shape: info.shape.clone(),
            bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
        });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let metadata = metadata.metadata().clone().unwrap_or_default();
    Ok(Tensors {
        header: LENGTH + length,
        metadata: metadata.into_iter().collect(),
        elements,
        tensors,
    })
}
