//! A smaller request inside a larger bucket: inputs filled up with their pad value, outputs cut back.

use precast_store::{
    Device,
    record::{Input, Layout, Output, Pad},
};
use tch::{Scalar, TchError, Tensor};

use super::{
    ffi::{Meta, RawStream, kind_of},
    weights::tch_device,
};

/// Bucket-sized inputs for padded calls, made on first use. One caller has them at a time.
#[derive(Default)]
pub struct Buffers {
    /// One for each input.
    pub tensors: Vec<Option<Tensor>>,
    /// The stream that used them last.
    pub last: Option<RawStream>,
}

impl Buffers {
    /// Starts with none for so many inputs.
    pub fn new(inputs: usize) -> Self {
        Self {
            tensors: (0..inputs).map(|_| None).collect(),
            last: None,
        }
    }
}

/// Makes a buffer of a bucket's input.
pub fn buffer(layout: &Layout, device: Device) -> Result<Tensor, TchError> {
    Tensor::f_empty_strided(
        &layout.shape,
        &layout.stride,
        (kind_of(layout.dtype), tch_device(device)),
    )
}

/// Writes the pad value everywhere.
pub fn blank(buffer: &mut Tensor, input: &Input) -> Result<(), TchError> {
    buffer.f_fill_(scalar(input.pad)).map(drop)
}

/// Writes `source` into the low corner of `buffer` and the pad value everywhere else.
///
/// The whole buffer is written each time, so nothing of an earlier call is left in it.
pub fn fill(buffer: &mut Tensor, source: &Tensor, input: &Input) -> Result<(), TchError> {
    let sizes = Meta::of(source).sizes();
    if sizes == input.layout.shape {
        return buffer.f_copy_(source);
    }
    blank(buffer, input)?;
    let mut corner = buffer.shallow_clone();
    for (axis, (&bucket, &size)) in input.layout.shape.iter().zip(sizes).enumerate() {
        if size < bucket {
            corner = corner.f_narrow(axis as i64, 0, size)?;
        }
    }
    corner.f_copy_(source)
}

/// Pads what is one smaller in each bucketed dimension, so that a device has loaded what that takes. Nothing changes.
pub fn rehearse(buffer: &mut Tensor, input: &Input) -> Result<(), TchError> {
    if !buffer.device().is_cuda() || input.dims.iter().all(Option::is_none) {
        return Ok(());
    }
    let mut smaller = buffer.shallow_clone();
    for (axis, dim) in input.dims.iter().enumerate() {
        let size = input.layout.shape[axis];
        if dim.is_some() && size > 1 {
            smaller = smaller.f_narrow(axis as i64, 0, size - 1)?;
        }
    }
    let blank = copy(&smaller)?;
    fill(buffer, &blank, input)
}

/// How one axis of an output follows one of the request's sizes.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    axis: i64,
    dim: usize,
    scale: i64,
    offset: i64,
}

impl Cut {
    /// Returns the axis and how long it is for a request.
    pub fn size(&self, request: &[i64]) -> (usize, i64) {
        (
            self.axis as usize,
            (self.scale * request[self.dim] + self.offset).max(0),
        )
    }
}

/// Returns the cuts of an output. `dims` are the bucketed dimensions in the order of a request's sizes.
///
/// Fails on an output that follows a dimension no bucket names, or that would be longer than it is.
pub fn cuts<'a>(
    output: &Output,
    dims: impl Iterator<Item = (&'a String, &'a i64)> + Clone,
) -> Result<Vec<Cut>, String> {
    let mut cuts = Vec::new();
    for (axis, follow) in output.dims.iter().enumerate() {
        let Some(follow) = follow else { continue };
        let Some((dim, (_, &bucket))) = dims
            .clone()
            .enumerate()
            .find(|(_, (name, _))| **name == follow.dim)
        else {
            return Err(format!(
                "output `{}` follows `{}`, which no bucket names",
                output.name, follow.dim
            ));
        };
        let size = follow
            .scale
            .checked_mul(bucket)
            .and_then(|size| size.checked_add(follow.offset));
        if output.layout.shape.get(axis).copied() != size {
            return Err(format!(
                "output `{}` does not have the size it follows from on axis {axis}",
                output.name
            ));
        }
        cuts.push(Cut {
            axis: axis as i64,
            dim,
            scale: follow.scale,
            offset: follow.offset,
        });
    }
    Ok(cuts)
}

/// Returns the valid part of an output: a view, no copy.
pub fn cut(mut tensor: Tensor, cuts: &[Cut], request: &[i64]) -> Result<Tensor, TchError> {
    for cut in cuts {
        let (_, size) = cut.size(request);
        tensor = tensor.f_narrow(cut.axis, 0, size)?;
    }
    Ok(tensor)
}

/// Returns a copy with its own memory.
pub fn copy(tensor: &Tensor) -> Result<Tensor, TchError> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

fn scalar(pad: Pad) -> Scalar {
    match pad {
        Pad::Bool(value) => Scalar::from(i64::from(value)),
        Pad::Int(value) => Scalar::from(value),
        Pad::Float(value) => Scalar::from(value),
    }
}
