//! The element types of tensors.

use serde::{Deserialize, Serialize};

/// Element types, by torch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 64 bits, IEEE 754 double precision.
    Float64,
    /// 32 bits, IEEE 754 single precision.
    Float32,
    /// 16 bits, IEEE 754 half precision.
    Float16,
    /// 16 bits with the exponent of `float32`.
    Bfloat16,
    /// Signed, 64 bits.
    Int64,
    /// Signed, 32 bits.
    Int32,
    /// Signed, 16 bits.
    Int16,
    /// Signed, 8 bits.
    Int8,
    /// Unsigned, 8 bits.
    Uint8,
    /// One byte, 0 or 1.
    Bool,
}

impl Dtype {
    /// Every dtype a module's input may have, in the order errors list them.
    pub const ALL: [Self; 10] = [
        Self::Float32,
        Self::Float64,
        Self::Float16,
        Self::Bfloat16,
        Self::Int64,
        Self::Int32,
        Self::Int16,
        Self::Int8,
        Self::Uint8,
        Self::Bool,
    ];

    /// Returns torch's name without the `torch.` prefix.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float64 => "float64",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Int64 => "int64",
            Self::Int32 => "int32",
            Self::Int16 => "int16",
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Bool => "bool",
        }
    }

    /// Returns the dtype with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::Float64 | Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::Float16 | Self::Bfloat16 | Self::Int16 => 2,
            Self::Int8 | Self::Uint8 | Self::Bool => 1,
        }
    }

    /// Returns whether it is a floating-point type of 16 bits.
    pub fn is_half(self) -> bool {
        matches!(self, Self::Float16 | Self::Bfloat16)
    }

    /// Returns whether values are floating point.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            Self::Float64 | Self::Float32 | Self::Float16 | Self::Bfloat16
        )
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
