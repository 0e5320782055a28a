//! How a file of weights differs from the weights before, by its header and by its bytes.

use precast_store::{Digest, Store, record::Release};
use safetensors::{
    Dtype, SafeTensors,
    tensor::{TensorInfo, TensorView},
};

use super::{
    BuildError,
    checkpoint::{Checkpoint, Layouts},
};
use crate::spec::{Spec, glob};

/// Returns the names of the tensors in the spec's file that the model may lack; none if the file is unreadable.
pub(super) fn unused(spec: &Spec) -> Vec<String> {
    let file = spec.model.weights.file().map(Checkpoint::open);
    let file = file.and_then(Result::ok);
    let names = file.iter().flat_map(|file| file.layouts().keys().cloned());
    let globs = &spec.model.unused_weights;
    names
        .filter(|name| globs.iter().any(|glob| glob::matches(glob, name)))
        .collect()
}

/// Returns whether files have the tensors of a release's weights: the same names, dtypes and shapes.
pub(super) fn same_tensors(
    store: &Store,
    file: &Checkpoint,
    last: &Release,
) -> Result<bool, BuildError> {
    let Some(last) = &last.weights else {
        return Ok(false);
    };
    let last = store.objects().map(last)?;
    let Ok((_, last)) = SafeTensors::read_metadata(&last) else {
        return Ok(false);
    };
    let layout = |(name, info): (String, &TensorInfo)| (name, (info.dtype, info.shape.clone()));
    let layouts: Layouts = last.tensors().into_iter().map(layout).collect();
    Ok(*file.layouts() == layouts)
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
