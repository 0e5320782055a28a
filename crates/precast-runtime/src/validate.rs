//! The checks of inputs before any call of an artifact.
//!
//! An artifact checks nothing: a wrong dtype or stride gives wrong numbers, and a short tensor is read past its end. So
//! everything is checked here, in safe Rust, on metadata that the shim reads in one call per tensor. A good call
//! allocates nothing, except an alias of each input that has clones: another thread may resize those at the same time.
//! The same walk reads the request's sizes from the inputs and checks that they agree with each other.
//!
//! **Values.** Metadata comes first, and bounds the number of values. When a program is found for the sizes, the values
//! of inputs in host memory are compared with the program's own bounds ([`outside`](super::ffi::outside)), before
//! padding and copies. Values on a device are clamped and noted there ([`flags`](super::flags)). A program's own
//! kernels check the indices that it computes: their notes are read after each step
//! ([`RunError::Check`](super::ffi::RunError)).

use std::sync::Arc;

use precast_store::{
    Device,
    record::{Dtype, Input},
};
use smallvec::SmallVec;

use super::{ffi::Meta, problem::Problem};

/// The sizes of a request, in the order of [`Signature::dims`].
pub type Request = SmallVec<[i64; 4]>;

/// The inputs of one module, for all its buckets.
#[derive(Clone, Debug)]
pub struct Signature {
    pub inputs: Vec<Spec>,
    /// Names of the bucketed dimensions, in the order their sizes are kept.
    pub dims: Vec<String>,
}

/// One input.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: Arc<str>,
    pub dtype: Dtype,
    axes: Vec<Axis>,
    /// Axes in the order of memory, the fastest first.
    order: Vec<usize>,
    /// Strides no order of axes explains: taken as they are.
    fixed_strides: Option<Vec<i64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Axis {
    Fixed(i64),
    Dim(usize),
}

/// The fitness of an input for a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Kernels may read it.
    AsIs,
    /// Right but for strides, alignment or device.
    NeedsCopy,
}

/// Generated CUDA kernels load vectors of 16 bytes from inputs that were aligned when they were captured, and the
/// worker captures with fresh tensors, which are.
const CUDA_ALIGNMENT: usize = 16;

impl Signature {
    /// Creates the signature of a program's inputs. `dims` are the bucketed dimensions in their order.
    ///
    /// Fails, with a message, for a record whose input has different numbers of axes, strides and dims, or a dimension
    /// that is not among `dims`.
    pub fn new(inputs: &[Input], dims: &[String]) -> Result<Self, String> {
        let specs = inputs
            .iter()
            .map(|input| Spec::new(input, dims))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            inputs: specs,
            dims: dims.to_vec(),
        })
    }

    /// Returns whether an input has a dimension.
    pub fn shows(&self, dim: &str) -> bool {
        let at = self.dims.iter().position(|known| known == dim);
        at.is_some_and(|at| {
            self.inputs
                .iter()
                .any(|spec| spec.axes.contains(&Axis::Dim(at)))
        })
    }

    /// Returns whether two programs have the same signature, so that one table can serve both.
    pub fn agrees(&self, other: &Self) -> bool {
        self.dims == other.dims
            && self.inputs.len() == other.inputs.len()
            && self.inputs.iter().zip(&other.inputs).all(|(a, b)| {
                a.name == b.name
                    && a.dtype == b.dtype
                    && a.axes == b.axes
                    && a.order.len() == b.order.len()
            })
    }
}

impl Spec {
    fn new(input: &Input, dims: &[String]) -> Result<Self, String> {
        let (shape, stride) = (&input.layout.shape, &input.layout.stride);
        if stride.len() != shape.len() || input.dims.len() != shape.len() {
            return Err(format!(
                "input `{}` has {} sizes, {} strides and {} dims",
                input.name,
                shape.len(),
                stride.len(),
                input.dims.len()
            ));
        }
        let axes: Vec<Axis> = std::iter::zip(shape, &input.dims)
            .map(|(&size, dim)| match dim {
                None => Ok(Axis::Fixed(size)),
                Some(dim) => match dims.iter().position(|known| known == dim) {
                    Some(at) => Ok(Axis::Dim(at)),
                    None => Err(format!(
                        "input `{}` has the dimension `{dim}`, which no bucket names",
                        input.name
                    )),
                },
            })
            .collect::<Result<_, _>>()?;
        let order = memory_order(shape, stride);
        let explained = strides_of(shape, &order)
            .iter()
            .zip(stride)
            .zip(shape)
            .all(|((want, have), &size)| size == 1 || want == have);
        Ok(Self {
            name: input.name.as_str().into(),
            dtype: input.layout.dtype,
            axes,
            order,
            fixed_strides: (!explained).then(|| stride.clone()),
        })
    }

    /// Checks an input on `device` and notes the sizes it shows in `request` (0: not seen yet). `dims` are the
    /// signature's.
    pub fn check(
        &self,
        meta: &Meta<'_>,
        device: Device,
        dims: &[String],
        request: &mut [i64],
    ) -> Result<Fit, Problem> {
        if !meta.defined() {
            return Err(Problem::Undefined);
        }
        if !meta.dense() {
            return Err(Problem::NotDense);
        }
        if meta.dtype() != Some(self.dtype) {
            // A list without elements has the dtype that its library gives such a list.
            if meta.sizes().contains(&0) {
                self.check_rank(meta.sizes())?;
                self.note_sizes(meta.sizes(), dims, request)?;
            }
            return Err(Problem::Dtype {
                expected: self.dtype,
                got: meta.dtype_name(),
            });
        }
        let sizes = meta.sizes();
        self.check_rank(sizes)?;
        self.note_sizes(sizes, dims, request)?;
        if meta.lazy() {
            return Err(Problem::Lazy);
        }
        let strides = meta.strides();
        let needed = extent(sizes, strides).and_then(|n| n.checked_mul(self.dtype.size() as i64));
        match needed {
            Some(needed) if needed <= meta.room() => {}
            _ => {
                return Err(Problem::Storage {
                    needed: needed.unwrap_or(i64::MAX),
                    got: meta.room(),
                });
            }
        }
        if meta.device() != Some(device) {
            return match meta.device() {
                // It can be copied over, and a copy has the right strides.
                Some(_) => Ok(Fit::NeedsCopy),
                None => Err(Problem::Device {
                    expected: device,
                    got: "another kind of device".to_owned(),
                }),
            };
        }
        let fits = self.strided(sizes, strides) && aligned(meta, device, self.dtype);
        Ok(if fits { Fit::AsIs } else { Fit::NeedsCopy })
    }

    fn check_rank(&self, sizes: &[i64]) -> Result<(), Problem> {
        if sizes.len() == self.axes.len() {
            return Ok(());
        }
        Err(Problem::Rank {
            expected: self.axes.len(),
            got: sizes.len(),
        })
    }

    /// Compares sizes with those of the record, and notes those of bucketed dimensions in `request`.
    fn note_sizes(
        &self,
        sizes: &[i64],
        dims: &[String],
        request: &mut [i64],
    ) -> Result<(), Problem> {
        for (axis, (want, &got)) in self.axes.iter().zip(sizes).enumerate() {
            match *want {
                Axis::Fixed(expected) if expected != got => {
                    return Err(Problem::Size {
                        axis,
                        expected,
                        got,
                    });
                }
                Axis::Fixed(_) => {}
                Axis::Dim(dim) if got < 1 => {
                    return Err(Problem::Empty {
                        axis,
                        dim: dims[dim].clone(),
                    });
                }
                Axis::Dim(dim) => match request[dim] {
                    0 => request[dim] = got,
                    other if other != got => {
                        return Err(Problem::Disagrees {
                            axis,
                            dim: dims[dim].clone(),
                            size: got,
                            other,
                        });
                    }
                    _ => {}
                },
            }
        }
        Ok(())
    }

    /// Returns the problem of an input that needs a copy, for a caller that does not allow copies.
    pub fn misfit(&self, meta: &Meta<'_>, device: Device) -> Problem {
        if meta.device() != Some(device) {
            let got = meta.device().map_or_else(
                || "another kind of device".to_owned(),
                |device| device.to_string(),
            );
            return Problem::Device {
                expected: device,
                got,
            };
        }
        if !self.strided(meta.sizes(), meta.strides()) {
            let expected = self.strides(meta.sizes());
            return Problem::Strides {
                expected,
                got: meta.strides().to_vec(),
            };
        }
        Problem::Alignment {
            needed: alignment(device, self.dtype),
            address: meta.address(),
        }
    }

    /// Returns the strides that a kernel requires for a tensor of these sizes.
    pub fn strides(&self, sizes: &[i64]) -> Vec<i64> {
        self.fixed_strides
            .clone()
            .unwrap_or_else(|| strides_of(sizes, &self.order))
    }

    /// Returns whether a kernel supports the strides. An axis of size 1 may have any stride, and so may a tensor
    /// without elements.
    fn strided(&self, sizes: &[i64], strides: &[i64]) -> bool {
        if sizes.contains(&0) {
            return true;
        }
        if let Some(fixed) = &self.fixed_strides {
            return fixed == strides;
        }
        let mut expected = 1;
        for &axis in &self.order {
            if sizes[axis] != 1 {
                if strides[axis] != expected {
                    return false;
                }
                expected *= sizes[axis];
            }
        }
        true
    }
}

fn alignment(device: Device, dtype: Dtype) -> usize {
    match device {
        Device::Cpu => dtype.size(),
        Device::Cuda(_) => CUDA_ALIGNMENT,
    }
}

pub(super) fn aligned(meta: &Meta<'_>, device: Device, dtype: Dtype) -> bool {
    meta.address().is_multiple_of(alignment(device, dtype))
}

/// Returns the number of elements from the first one to the end of the last one; none if it overflows.
fn extent(sizes: &[i64], strides: &[i64]) -> Option<i64> {
    let mut last = 0i64;
    for (&size, &stride) in sizes.iter().zip(strides) {
        if size == 0 {
            return Some(0);
        }
        last = last.checked_add((size - 1).checked_mul(stride)?)?;
    }
    last.checked_add(1)
}

/// Returns the axes from the fastest to the slowest. Of axes with equal strides the later is the faster.
fn memory_order(shape: &[i64], stride: &[i64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..shape.len()).rev().collect();
    // The stride of an axis of size 1 has no meaning; the axis keeps its place of a contiguous tensor.
    let key = |axis: usize| match shape[axis] {
        1 => shape[axis + 1..]
            .iter()
            .zip(&stride[axis + 1..])
            .filter(|(size, _)| **size != 1)
            .map(|(_, s)| *s)
            .max()
            .unwrap_or(1),
        _ => stride[axis],
    };
    order.sort_by_key(|&axis| key(axis));
    order
}

/// Returns the strides of a dense tensor of `sizes` with its axes in `order`.
fn strides_of(sizes: &[i64], order: &[usize]) -> Vec<i64> {
    let mut strides = vec![1; sizes.len()];
    let mut next = 1i64;
    for &axis in order {
        strides[axis] = next;
        next = next.saturating_mul(sizes[axis].max(1));
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fake, ffi::Handle};
    use precast_store::record::Layout;

    #[test]
    fn an_input_without_elements_lies_any_way() {
        // The past of a decoder at its first step.
        let layout = Layout {
            dtype: Dtype::Float32,
            shape: vec![2, 4, 0, 8],
            stride: vec![32, 8, 8, 1],
        };
        let past = fake::input("past", layout, &[Some("batch"), None, None, None]);
        let signature = Signature::new(&[past], &["batch".to_owned()]).unwrap();
        let fit = |shape: [i64; 4], stride: [i64; 4]| {
            let tensor = Handle::empty(&shape, &stride, Dtype::Float32, Device::Cpu).unwrap();
            let mut request = [0];
            let (input, meta) = (&signature.inputs[0], tensor.meta());
            let fit = input.check(&meta, Device::Cpu, &signature.dims, &mut request);
            fit.map(|fit| (fit, request[0]))
        };
        assert_eq!(fit([2, 4, 0, 8], [32, 8, 8, 1]), Ok((Fit::AsIs, 2)));
        assert_eq!(fit([1, 4, 0, 8], [1, 1, 4, 4]), Ok((Fit::AsIs, 1)));
        let sized = fit([2, 4, 1, 8], [32, 8, 8, 1]);
        let axis = matches!(sized, Err(Problem::Size { axis: 2, .. }));
        assert!(axis, "{sized:?}");
    }
}
