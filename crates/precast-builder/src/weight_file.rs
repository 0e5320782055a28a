//! A file of weights, by its header and its bytes: whether it can be a weight set, and how two of them differ.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Read},
    path::Path,
};

use precast_store::{Digest, Store, record::Release};
use safetensors::{
    Dtype, SafeTensors,
    tensor::{Metadata, TensorInfo, TensorView},
};

use super::BuildError;
use crate::spec::{Spec, glob};

/// Checks that a file can be a weight set, by its header: that needs no model and no Python.
pub(super) fn check(path: &Path) -> Result<(), BuildError> {
    header(path).map(drop)
}

fn header(path: &Path) -> Result<Metadata, BuildError> {
    read_header(path).map_err(|message| BuildError::BadWeights {
        path: path.to_owned(),
        message,
    })
}

fn read_header(path: &Path) -> Result<Metadata, String> {
    /// The format's own limit.
    const HEADER_LIMIT: u64 = 100_000_000;
    const LENGTH: u64 = 8;
    let no_safetensors = || "it is no safetensors file".to_owned();
    let mut file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => "it is not there".to_owned(),
        _ => error.to_string(),
    })?;
    let meta = file.metadata().map_err(|error| error.to_string())?;
    if !meta.is_file() {
        return Err("it is a folder or another special file".to_owned());
    }
    let mut length = [0; LENGTH as usize];
    file.read_exact(&mut length).map_err(|_| no_safetensors())?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT || length > meta.len() - LENGTH {
        return Err(no_safetensors());
    }
    let mut header = Vec::new();
    (file.take(length).read_to_end(&mut header)).map_err(|error| error.to_string())?;
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| format!("{}: {error}", no_safetensors()))?;
    let ends = LENGTH + length + header.data_len() as u64;
    if ends != meta.len() {
        let has = meta.len();
        let cut = if has < ends { "it was cut off: " } else { "" };
        return Err(format!(
            "{cut}its tensors end at byte {ends}, the file at byte {has}"
        ));
    }
    use safetensors::Dtype as D;
    let known = [
        D::F64,
        D::F32,
        D::F16,
        D::BF16,
        D::I64,
        D::I32,
        D::I16,
        D::I8,
        D::U8,
        D::BOOL,
    ];
    let mut tensors: Vec<_> = header.tensors().into_iter().collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    match tensors
        .iter()
        .find(|(_, info)| !known.contains(&info.dtype))
    {
        Some((name, info)) => Err(format!(
            "tensor `{name}` is {}, which no weight set can hold",
            info.dtype
        )),
        None => Ok(header),
    }
}

/// Returns the names of the tensors in the spec's file that the model may lack; none if the file is unreadable.
pub(super) fn unused(spec: &Spec) -> Vec<String> {
    let file = spec.model.weights.file().map(read_header);
    let names = file.and_then(Result::ok).into_iter();
    let names = names.flat_map(|header| header.offset_keys());
    let globs = &spec.model.unused_weights;
    names
        .filter(|name| globs.iter().any(|glob| glob::matches(glob, name)))
        .collect()
}

/// Returns whether a file has the tensors of a release's weights: the same names, dtypes and shapes.
pub(super) fn same_tensors(store: &Store, path: &Path, last: &Release) -> Result<bool, BuildError> {
    let Some(last) = &last.weights else {
        return Ok(false);
    };
    let last = store.objects().map(last)?;
    let Ok((_, last)) = SafeTensors::read_metadata(&last) else {
        return Ok(false);
    };
    let layouts = |header: &Metadata| -> BTreeMap<String, (Dtype, Vec<usize>)> {
        let layout = |(name, info): (String, &TensorInfo)| (name, (info.dtype, info.shape.clone()));
        header.tensors().into_iter().map(layout).collect()
    };
    Ok(layouts(&header(path)?) == layouts(&last))
}

/// Returns an error with the name of a tensor that has NaN or infinity now and had only numbers before. A run with
/// sample inputs may not read that tensor.
pub(super) fn spoilt(
    store: &Store,
    before: &Digest,
    after: &Digest,
) -> Result<Option<String>, BuildError> {
    let (before, after) = (store.objects().map(before)?, store.objects().map(after)?);
    let (Ok(before), Ok(after)) = (
        SafeTensors::deserialize(&before),
        SafeTensors::deserialize(&after),
    ) else {
        return Ok(None);
    };
    let was_finite = |name: &str| before.tensor(name).is_ok_and(|before| finite(&before));
    let mut spoilt = after.iter();
    let spoilt = spoilt.find(|(name, after)| !finite(after) && was_finite(name));
    Ok(spoilt.map(|(name, _)| format!("tensor `{name}` has NaN or infinity, and had none before")))
}

/// Returns whether a tensor has only numbers: no exponent has all of its bits set.
fn finite(tensor: &TensorView<'_>) -> bool {
    fn all<const N: usize>(bytes: &[u8], exponent: u64) -> bool {
        bytes.as_chunks::<N>().0.iter().all(|chunk| {
            let mut bits = [0; 8];
            bits[..N].copy_from_slice(chunk);
            u64::from_le_bytes(bits) & exponent != exponent
        })
    }
    let bytes = tensor.data();
    match tensor.dtype() {
        Dtype::F16 => all::<2>(bytes, 0x7c00),
        Dtype::BF16 => all::<2>(bytes, 0x7f80),
        Dtype::F32 => all::<4>(bytes, 0x7f80_0000),
        Dtype::F64 => all::<8>(bytes, 0x7ff0_0000_0000_0000),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_found_in_every_dtype() {
        let is_finite = |dtype, bytes: &[u8]| {
            let size = bytes.len() / 2;
            let both = [&vec![0; size][..], &bytes[..size]].concat();
            finite(&TensorView::new(dtype, vec![2], &both).unwrap())
        };
        for value in [0.0, 1.0, -2.5, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let (single, double) = ((value as f32).to_le_bytes(), value.to_le_bytes());
            // The upper half of a float32 is a bfloat16.
            for (dtype, bytes) in [
                (Dtype::F64, &double[..]),
                (Dtype::F32, &single[..]),
                (Dtype::BF16, &single[2..]),
            ] {
                let twice = [bytes, bytes].concat();
                assert_eq!(
                    is_finite(dtype, &twice),
                    value.is_finite(),
                    "{dtype:?} {value}"
                );
            }
        }
        for (bits, is) in [
            (0x3c00_u16, true),
            (0xfbff, true),
            (0x7c00, false),
            (0xfe00, false),
        ] {
            let twice = [bits.to_le_bytes(), bits.to_le_bytes()].concat();
            assert_eq!(is_finite(Dtype::F16, &twice), is, "{bits:x}");
        }
        assert!(is_finite(Dtype::I64, &[255; 16]), "a number of integers");
    }
}
