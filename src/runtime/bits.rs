//! Whether tensors hold the same bits: a NaN is as good as any other number, and -0 is not 0.
//!
//! On a device the first comparison loads libtorch's kernels for it, which takes tens of milliseconds: more than bringing
//! tensors of usual sizes here.

use tch::{Device, Kind, TchError, Tensor};

use super::ffi::Handle;

/// Returns whether two lists of tensors of the same dtypes and sizes hold the same.
pub(super) fn same(a: &[Handle], b: &[Handle]) -> Result<bool, TchError> {
    if a.len() != b.len() {
        return Ok(false);
    }
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (
            near(&a.share().into_tensor())?,
            near(&b.share().into_tensor())?,
        );
        if !whole(&a)?.f_equal(&whole(&b)?)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether what is done once with a tensor is better done on the CPU.
pub(super) fn is_small(tensor: &Tensor) -> bool {
    /// Copied in a few milliseconds.
    const MOST: usize = 16 << 20;
    tensor.numel() * tensor.kind().elt_size_in_bytes() <= MOST
}

/// Returns a tensor, brought to the CPU if it is small.
fn near(tensor: &Tensor) -> Result<Tensor, TchError> {
    match is_small(tensor) {
        true => tensor.f_to_device(Device::Cpu),
        false => Ok(tensor.shallow_clone()),
    }
}

/// Returns a view of a tensor as whole numbers.
fn whole(tensor: &Tensor) -> Result<Tensor, TchError> {
    tensor.f_view_dtype(match tensor.kind().elt_size_in_bytes() {
        8 => Kind::Int64,
        4 => Kind::Int,
        2 => Kind::Int16,
        _ => Kind::Uint8,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_same(a: &Tensor, b: &Tensor) -> bool {
        let handle = |tensor: &Tensor| [tensor.shallow_clone().into()];
        same(&handle(a), &handle(b)).unwrap()
    }

    /// Returns float32 tensors of these bits.
    fn floats(bits: [i32; 2]) -> Tensor {
        Tensor::from_slice(&bits).view_dtype(Kind::Float)
    }

    #[test]
    fn a_nan_is_its_bits_and_a_zero_has_a_sign() {
        let (nan, other, zero, less) = (0x7fc0_0000, 0x7fc0_0001, 0, i32::MIN);
        assert!(is_same(&floats([nan, zero]), &floats([nan, zero])));
        assert!(!is_same(&floats([nan, zero]), &floats([other, zero])));
        assert!(!is_same(&floats([nan, zero]), &floats([nan, less])));
        for kind in [
            Kind::Double,
            Kind::Float,
            Kind::Half,
            Kind::BFloat16,
            Kind::Int64,
            Kind::Int16,
            Kind::Uint8,
            Kind::Bool,
        ] {
            let one = Tensor::from_slice(&[0_i64, 1, 0]).to_kind(kind);
            assert!(is_same(&one, &one.copy()), "{kind:?}");
            assert!(!is_same(&one, &one.zeros_like()), "{kind:?}");
        }
    }

    #[test]
    fn how_they_lie_does_not_matter() {
        let rows = Tensor::arange(6, (Kind::Float, tch::Device::Cpu)).reshape([2, 3]);
        let columns = rows.transpose(0, 1).contiguous().transpose(0, 1);
        assert!(is_same(&rows, &columns));
        assert!(is_same(
            &rows.select(0, 1).select(0, 2),
            &Tensor::from(5_f32)
        ));
        assert!(!is_same(&rows, &(columns + 1)));
    }
}
