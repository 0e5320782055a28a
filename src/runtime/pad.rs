//! A smaller request inside a larger bucket: inputs filled up with their pad value, outputs cut back.

use tch::{Scalar, TchError, Tensor};

use super::{ffi::kind_of, weights::tch_device};
use crate::{
    Device,
    record::{Input, Layout, Output, Pad, Sizes},
};

/// Makes a buffer of a bucket's input.
pub fn buffer(layout: &Layout, device: Device) -> Result<Tensor, TchError> {
    Tensor::f_empty_strided(
        &layout.shape,
        &layout.stride,
        (kind_of(layout.dtype), tch_device(device)),
    )
}

/// Writes `source` into the low corner of `buffer` and the pad value everywhere else.
///
/// The whole buffer is written each time, so nothing of an earlier call is left in it.
pub fn fill(buffer: &mut Tensor, source: &Tensor, input: &Input) -> Result<(), TchError> {
    let _ = buffer.f_fill_(scalar(input.pad))?;
    let mut corner = buffer.shallow_clone();
    for (axis, (&bucket, dim)) in input.layout.shape.iter().zip(&input.dims).enumerate() {
        let size = source.size().get(axis).copied().unwrap_or(bucket);
        if dim.is_some() && size < bucket {
            corner = corner.f_narrow(axis as i64, 0, size)?;
        }
    }
    corner.f_copy_(source)
}

/// Returns the valid part of an output: a view, no copy.
pub fn cut(
    tensor: Tensor,
    output: &Output,
    bucket: &Sizes,
    request: &Sizes,
) -> Result<Tensor, TchError> {
    let mut tensor = tensor;
    for (axis, follow) in output.dims.iter().enumerate() {
        let Some(follow) = follow else { continue };
        let (Some(&have), Some(&want)) = (bucket.get(&follow.dim), request.get(&follow.dim)) else {
            continue;
        };
        if have != want {
            tensor = tensor.f_narrow(axis as i64, 0, follow.scale * want + follow.offset)?;
        }
    }
    Ok(tensor)
}

fn scalar(pad: Pad) -> Scalar {
    match pad {
        Pad::Bool(value) => Scalar::from(i64::from(value)),
        Pad::Int(value) => Scalar::from(value),
        Pad::Float(value) => Scalar::from(value),
    }
}
