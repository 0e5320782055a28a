//! Problems of one input of a call.

use std::fmt;

use precast_store::{
    Device,
    record::{Dtype, Input},
};

/// A problem of one input.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// No tensor at all.
    Undefined,
    /// Sparse, quantised, nested, or wrapped by a function transform.
    NotDense,
    /// A negation or conjugation that is not done yet.
    Lazy,
    /// On another device, and copies are not allowed.
    Device {
        /// The device that the model is on.
        expected: Device,
        /// The name of the tensor's device in torch.
        got: String,
    },
    /// Of another dtype. Nothing is converted.
    Dtype {
        /// The dtype that the module takes.
        expected: Dtype,
        /// The name of the tensor's dtype in torch.
        got: String,
    },
    /// Of another number of axes.
    Rank {
        /// Axes that the module takes.
        expected: usize,
        /// Axes of the tensor.
        got: usize,
    },
    /// An axis that no bucket changes has another size.
    Size {
        /// Position of the axis, from 0.
        axis: usize,
        /// Size that the module takes.
        expected: i64,
        /// Size in the call.
        got: i64,
    },
    /// A bucketed axis has size 0.
    Empty {
        /// Position of the axis, from 0.
        axis: usize,
        /// Name of the dimension.
        dim: String,
    },
    /// Two axes with the same dimension have different sizes.
    Disagrees {
        /// Position of the second axis, from 0.
        axis: usize,
        /// Name of the dimension.
        dim: String,
        /// Size of the second axis.
        size: i64,
        /// Size of the first axis.
        other: i64,
    },
    /// In another memory order, with gaps or overlaps, and copies are not allowed; in elements.
    Strides {
        /// Strides that the module takes.
        expected: Vec<i64>,
        /// Strides of the tensor.
        got: Vec<i64>,
    },
    /// At an address that its kernels can't read from, and copies are not allowed; in bytes.
    Alignment {
        /// Alignment that the kernels need.
        needed: usize,
        /// Address of the first element.
        address: usize,
    },
    /// The tensor reaches past the end of its storage; in bytes.
    Storage {
        /// Bytes that shape and strides reach to.
        needed: i64,
        /// Bytes of the storage.
        got: i64,
    },
    /// An element is not among the values that the module takes, as an index beyond a table.
    Value {
        /// The first such element: its index on each axis. Absent if only the device has the value.
        position: Option<Vec<i64>>,
        /// The value there; absent if only the device has it.
        value: Option<i64>,
        /// The lowest value that is taken, and one past the highest.
        bounds: [i64; 2],
    },
    /// A position beyond the states that the input is a place in, at their largest bucket.
    Full {
        /// Name of the states' dimension.
        dim: String,
        /// Positions that they have.
        size: i64,
        /// The position of the call.
        position: i64,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Undefined => f.write_str("expected a tensor, got an undefined one"),
            Self::NotDense => f.write_str(
                "expected a dense tensor, got a sparse, quantised, nested or wrapped one",
            ),
            Self::Lazy => f.write_str(
                "expected plain memory, got a tensor with a pending negation or conjugation",
            ),
            Self::Device { expected, got } => {
                write!(f, "expected a tensor on `{expected}`, got `{got}`")
            }
            Self::Dtype { expected, got } => write!(f, "expected dtype {expected}, got {got}"),
            Self::Rank { expected, got } => write!(f, "expected {expected} dimensions, got {got}"),
            Self::Size {
                axis,
                expected,
                got,
            } => write!(f, "expected size {expected} on axis {axis}, got {got}"),
            Self::Empty { axis, dim } => write!(f, "axis {axis} (`{dim}`) has size 0"),
            Self::Disagrees {
                axis,
                dim,
                size,
                other,
            } => {
                write!(
                    f,
                    "axis {axis} says `{dim}` is {size}, an earlier one says {other}"
                )
            }
            Self::Strides { expected, got } => {
                write!(f, "expected strides {expected:?}, got {got:?}")
            }
            Self::Alignment { needed, address } => {
                write!(
                    f,
                    "expected memory aligned to {needed} bytes, got address {address:#x}"
                )
            }
            Self::Storage { needed, got } => {
                write!(f, "the tensor covers {needed} bytes, its storage has {got}")
            }
            Self::Value {
                position,
                value,
                bounds: [low, past],
            } => {
                let highest = i128::from(*past) - 1;
                write!(f, "expected values from {low} to {highest}, got ")?;
                match value {
                    Some(value) => write!(f, "{value}")?,
                    None => f.write_str("another one")?,
                }
                match position {
                    Some(position) => write!(f, " at {position:?}"),
                    None => Ok(()),
                }
            }
            Self::Full {
                dim,
                size,
                position,
            } => write!(
                f,
                "the context is full: `{dim}` has positions 0 to {}, and the call has position {position}",
                size - 1
            ),
        }
    }
}

impl Problem {
    /// Returns the problem of a value outside the bounds of an input. `position` is its index on each axis; both are there
    /// if they are known.
    pub(super) fn value(
        input: &Input,
        bounds: [i64; 2],
        value: Option<i64>,
        position: Option<Vec<i64>>,
    ) -> Self {
        match (&input.within, value) {
            (Some(dim), Some(value)) if value >= bounds[1] => Self::Full {
                dim: dim.clone(),
                size: bounds[1],
                position: value,
            },
            _ => Self::Value {
                position,
                value,
                bounds,
            },
        }
    }

    /// Returns a remedy for the caller.
    pub(super) fn hint(&self) -> String {
        let text = match self {
            Self::Undefined => "pass a tensor that holds something",
            Self::NotDense => "pass `.to_dense()`, or `.dequantize()` of a quantised one",
            Self::Lazy => "pass `.resolve_neg().resolve_conj()`",
            Self::Device { expected, .. } => {
                return format!(
                    "move it to `{expected}`, or load the model so that it may copy inputs"
                );
            }
            Self::Dtype { expected, .. } => return format!("convert it to {expected}"),
            Self::Rank { .. } | Self::Size { .. } => {
                "`precast show ID` draws a program with the shapes of its inputs"
            }
            Self::Empty { .. } => "there is nothing to compute: leave the call out",
            Self::Disagrees { .. } => "axes of one name have one size: cut or pad the inputs to it",
            Self::Strides { .. } | Self::Alignment { .. } => {
                "pass `.contiguous()`, or load the model so that it may copy inputs"
            }
            Self::Storage { .. } => "its storage was resized under it: make the tensor again",
            Self::Full { dim, .. } => {
                return format!(
                    "`seek` back or `reset` the session; or give `{dim}` a larger size under [module.buckets], no larger than the model's own cache, and build again"
                );
            }
            Self::Value { .. } => {
                "the model has no row for another one, or the `range` of its spec leaves it out: check what makes the input"
            }
        };
        text.to_owned()
    }
}
