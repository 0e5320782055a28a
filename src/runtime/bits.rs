//! Tensors' bits, written and compared before a program serves: a NaN is as good as any other number, and -0 is not 0.
//!
//! For the first of each kind of operation on a device, libtorch loads a kernel, which takes tens of milliseconds, and
//! for the first larger one on the CPU it starts a thread for each core. A program that is one graph may need neither, so
//! what is done once here takes plain copies and this thread.

use tch::{Device, Kind, TchError, Tensor};

use super::ffi::{Handle, overwrite};

/// Returns whether two lists of tensors of the same dtypes and sizes hold the same.
pub(super) fn same(a: &[Handle], b: &[Handle]) -> Result<bool, TchError> {
    if a.len() != b.len() {
        return Ok(false);
    }
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (a.share().into_tensor(), b.share().into_tensor());
        let alike = match is_small(&a) {
            true => bytes(&a)? == bytes(&b)?,
            false => whole(&a)?.f_equal(&whole(&b)?)?,
        };
        if !alike {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes `row`, which lies on the CPU, to all rows of a tensor on a device.
pub(super) fn spread(tensor: &mut Tensor, row: &Tensor) -> Result<(), TchError> {
    if !is_small(tensor) {
        return tensor.f_copy_(&row.f_to_device(tensor.device())?);
    }
    if !tensor.is_contiguous() {
        // The same gaps and order here, so that it is a plain copy too.
        let (size, stride) = (tensor.size(), tensor.stride());
        let mut here = Tensor::f_empty_strided(&size, &stride, (tensor.kind(), Device::Cpu))?;
        here.f_copy_(row)?;
        return tensor.f_copy_(&here);
    }
    let row = bytes(row)?;
    let whole = tensor.numel() * tensor.kind().elt_size_in_bytes();
    overwrite(
        tensor,
        &row.repeat(whole.checked_div(row.len()).unwrap_or(0)),
    )
}

/// Returns whether what is done once with a tensor is better done on the CPU.
fn is_small(tensor: &Tensor) -> bool {
    /// Copied in a few milliseconds.
    const MOST: usize = 16 << 20;
    tensor.numel() * tensor.kind().elt_size_in_bytes() <= MOST
}

/// Returns a tensor's elements, row by row.
fn bytes(tensor: &Tensor) -> Result<Vec<u8>, TchError> {
    let here = tensor.f_to_device(Device::Cpu)?;
    let elements = here.numel();
    let mut bytes = vec![0; elements * here.kind().elt_size_in_bytes()];
    // Of its kind's size whatever the name says.
    here.f_copy_data_u8(&mut bytes, elements)?;
    Ok(bytes)
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

    #[test]
    fn a_row_is_written_to_all_rows() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Int64, Kind::Bool] {
            let row = Tensor::from_slice(&[1_i64, 0, 2]).to_kind(kind);
            let mut whole = Tensor::zeros([4, 3], (kind, Device::Cpu));
            spread(&mut whole, &row).unwrap();
            assert!(is_same(&whole, &row.expand([4, 3], false)), "{kind:?}");
            let mut columns = Tensor::zeros([3, 4], (kind, Device::Cpu)).transpose(0, 1);
            spread(&mut columns, &row).unwrap();
            assert!(is_same(&columns, &whole), "{kind:?}");
            let one = Tensor::full([], 1, (kind, Device::Cpu));
            spread(&mut whole, &one).unwrap();
            assert!(is_same(&whole, &whole.ones_like()), "{kind:?}");
            spread(&mut Tensor::empty([0, 3], (kind, Device::Cpu)), &row).unwrap();
        }
    }
}
