//! A smaller request inside a larger bucket: inputs filled up with their pad value, outputs cut back.

use half::{bf16, f16};
use precast_store::{
    Device,
    record::{Dtype, Input, Layout, Output, Pad},
};
use smallvec::SmallVec;

use super::{
    TorchError,
    ffi::{Handle, RawStream},
    layout,
};

/// Bucket-sized inputs for padded calls, made on first use. One caller has them at a time.
#[derive(Default)]
pub struct Buffers {
    /// One for each input.
    pub inputs: Vec<Option<Buffer>>,
    /// The stream that used them last.
    pub last: Option<RawStream>,
}

impl Buffers {
    /// Starts with none for so many inputs.
    pub fn new(inputs: usize) -> Self {
        Self {
            inputs: (0..inputs).map(|_| None).collect(),
            last: None,
        }
    }
}

/// A bucket's input and its pad value.
pub struct Buffer {
    pub tensor: Handle,
    /// The pad value, on the device; none for zero.
    pad: Option<Handle>,
}

impl Buffer {
    /// Creates a buffer that holds the pad value. It is filled on the CPU: the first fill on a device loads a kernel.
    pub fn new(input: &Input, device: Device) -> Result<Self, TorchError> {
        let layout = &input.layout;
        let make = |device| Handle::empty(&layout.shape, &layout.stride, layout.dtype, device);
        let bytes = bytes_of(input.pad, layout.dtype)?;
        let zero = bytes.iter().all(|&byte| byte == 0);
        let pad = if zero {
            None
        } else {
            Some(Handle::of(&bytes[..], &[], layout.dtype)?)
        };
        let here = Self {
            tensor: make(Device::Cpu)?,
            pad,
        };
        here.blank()?;
        if device == Device::Cpu {
            return Ok(here);
        }
        let tensor = make(device)?;
        tensor.copy_from(&here.tensor)?;
        let pad = here.pad.map(|here| {
            let there = Handle::empty(&[], &[], layout.dtype, device)?;
            there.copy_from(&here).map(|()| there)
        });
        Ok(Self {
            tensor,
            pad: pad.transpose()?,
        })
    }

    /// Returns a buffer over a tensor that is never padded.
    pub fn over(tensor: Handle) -> Self {
        Self { tensor, pad: None }
    }

    /// Writes the pad value everywhere.
    pub fn blank(&self) -> Result<(), TorchError> {
        match &self.pad {
            None => self.tensor.zero(),
            Some(pad) => self.tensor.copy_from(pad),
        }
    }

    /// Writes `source` into the low corner and the pad value everywhere else.
    ///
    /// The whole buffer is written each time, so nothing of an earlier call is left in it.
    pub fn fill(&self, source: &Handle) -> Result<(), TorchError> {
        let (meta, own) = (source.meta(), self.tensor.meta());
        if meta.sizes() == own.sizes() {
            return self.tensor.copy_from(source);
        }
        self.blank()?;
        let dtype = own.dtype().ok_or_else(|| own.dtype_name())?;
        let fits = std::iter::zip(meta.sizes(), own.sizes()).all(|(size, bucket)| size <= bucket);
        if !fits || meta.sizes().len() != own.sizes().len() {
            let (given, own) = (meta.sizes(), own.sizes());
            return Err(format!("{given:?} does not fit into {own:?}").into());
        }
        let corner = self.tensor.view(meta.sizes(), own.strides(), 0, dtype)?;
        corner.copy_from(source)
    }

    /// Pads a request one smaller in each bucketed dimension, so that a device has loaded the kernels of padding.
    /// Nothing changes.
    pub fn warm_up(&mut self, input: &Input) -> Result<(), TorchError> {
        if !matches!(self.tensor.meta().device(), Some(Device::Cuda(_)))
            || input.dims.iter().all(Option::is_none)
        {
            return Ok(());
        }
        let mut smaller: SmallVec<[i64; 8]> = SmallVec::from_slice(&input.layout.shape);
        for (size, dim) in smaller.iter_mut().zip(&input.dims) {
            if dim.is_some() && *size > 1 {
                *size -= 1;
            }
        }
        let (stride, dtype) = (&input.layout.stride, input.layout.dtype);
        let blank = self.tensor.view(&smaller, stride, 0, dtype)?.copied()?;
        self.fill(&blank)
    }
}

/// Returns a tensor of a layout in the host's memory, with one value everywhere.
pub fn filled(layout: &Layout, value: Pad) -> Result<Handle, TorchError> {
    let one = bytes_of(value, layout.dtype)?;
    let count = layout::bytes_of(&layout.shape, layout.dtype) / one.len();
    Handle::of(&one.repeat(count), &layout.shape, layout.dtype)
}

/// Returns the bytes of one element.
fn bytes_of(pad: Pad, dtype: Dtype) -> Result<SmallVec<[u8; 8]>, TorchError> {
    let (whole, number) = match pad {
        Pad::Bool(value) => (i64::from(value), f64::from(u8::from(value))),
        Pad::Int(value) => (value, value as f64),
        Pad::Float(value) => (value as i64, value),
    };
    let bad = |_| format!("the pad value {whole} is no {dtype}");
    Ok(match dtype {
        Dtype::Float64 => SmallVec::from_slice(&number.to_ne_bytes()),
        Dtype::Float32 => SmallVec::from_slice(&(number as f32).to_ne_bytes()),
        Dtype::Float16 => SmallVec::from_slice(&f16::from_f64(number).to_ne_bytes()),
        Dtype::Bfloat16 => SmallVec::from_slice(&bf16::from_f64(number).to_ne_bytes()),
        Dtype::Int64 => SmallVec::from_slice(&whole.to_ne_bytes()),
        Dtype::Int32 => SmallVec::from_slice(&i32::try_from(whole).map_err(bad)?.to_ne_bytes()),
        Dtype::Int16 => SmallVec::from_slice(&i16::try_from(whole).map_err(bad)?.to_ne_bytes()),
        Dtype::Int8 => SmallVec::from_slice(&i8::try_from(whole).map_err(bad)?.to_ne_bytes()),
        Dtype::Uint8 => SmallVec::from_slice(&u8::try_from(whole).map_err(bad)?.to_ne_bytes()),
        Dtype::Bool => SmallVec::from_slice(&[u8::from(number != 0.0)]),
    })
}

/// The dependence of one output axis on one of the request's sizes.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    axis: i64,
    dim: usize,
    scale: i64,
    offset: i64,
}

impl Cut {
    /// Returns the axis and its size for a request.
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
pub fn cut(tensor: Handle, cuts: &[Cut], request: &[i64]) -> Result<Handle, TorchError> {
    let meta = tensor.meta();
    let mut sizes: SmallVec<[i64; 8]> = SmallVec::from_slice(meta.sizes());
    for cut in cuts {
        let (axis, size) = cut.size(request);
        if size > sizes[axis] {
            return Err(format!("{:?} has no {size} on axis {axis}", meta.sizes()).into());
        }
        sizes[axis] = size;
    }
    if sizes[..] == *meta.sizes() {
        return Ok(tensor);
    }
    let dtype = meta.dtype().ok_or_else(|| meta.dtype_name())?;
    tensor.view(&sizes, meta.strides(), 0, dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    fn input(dtype: Dtype, pad: Pad) -> Input {
        let layout = fake::layout(dtype, &[2, 3]);
        Input {
            pad,
            ..fake::input("x", layout, &[Some("batch"), Some("seq")])
        }
    }

    fn row(values: &[f64], dtype: Dtype) -> Handle {
        let made = Handle::empty(&[1, 2], &[2, 1], dtype, Device::Cpu).unwrap();
        let row = Handle::of(values, &[1, 2], Dtype::Float64).unwrap();
        made.copy_from(&row).unwrap();
        made
    }

    #[test]
    fn every_dtype_is_filled_up_with_its_pad_value() {
        for dtype in Dtype::ALL {
            for (pad, value) in [
                (Pad::Int(0), 0.0),
                (Pad::Int(1), 1.0),
                (Pad::Bool(true), 1.0),
                (Pad::Float(1.0), 1.0),
            ] {
                let buffer = Buffer::new(&input(dtype, pad), Device::Cpu).unwrap();
                for _ in 0..2 {
                    buffer.fill(&row(&[1.0, 0.0], dtype)).unwrap();
                    let wide = Handle::empty(&[2, 3], &[3, 1], Dtype::Float64, Device::Cpu);
                    let wide = wide.unwrap();
                    wide.copy_from(&buffer.tensor).unwrap();
                    let want = [1.0, 0.0, value, value, value, value];
                    assert_eq!(wide.read::<f64>().unwrap(), want, "{dtype} {pad:?}");
                    // The next fill must overwrite all of it.
                    wide.copy_from(&Handle::of(&[1i64], &[], Dtype::Int64).unwrap())
                        .unwrap();
                    buffer.tensor.copy_from(&wide).unwrap();
                }
            }
        }
        let told = Buffer::new(&input(Dtype::Int8, Pad::Int(300)), Device::Cpu);
        assert_eq!(
            told.err().unwrap().to_string(),
            "the pad value 300 is no int8"
        );
    }

    #[test]
    fn what_is_larger_is_not_cut_off() {
        let buffer = Buffer::new(&input(Dtype::Int64, Pad::Int(0)), Device::Cpu).unwrap();
        let wide = Handle::of(&[1i64; 8], &[2, 4], Dtype::Int64).unwrap();
        assert!(buffer.fill(&wide).is_err());
    }
}
