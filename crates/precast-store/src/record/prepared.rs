//! Prepacked constants: inputs of an artifact that are computed from its constants when weights are bound.

use serde::{Deserialize, Serialize};

use super::Dtype;

/// A prepacked constant, computed from an artifact's constants once for each weight set: a filter multiplied by the
/// following batch norm, or a matrix in the element order of a kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Prepared {
    /// Its name in the artifact.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Size of each axis.
    pub shape: Vec<i64>,
    /// Strides; absent for a layout that only torch's operators know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<Vec<i64>>,
    /// The operator call that computes it from the constants.
    pub call: Recipe,
}

impl Prepared {
    /// Returns the bytes of its elements.
    pub fn bytes(&self) -> u64 {
        let elements = self
            .shape
            .iter()
            .map(|&size| u64::try_from(size).unwrap_or(0));
        elements.fold(self.dtype.size() as u64, u64::saturating_mul)
    }
}

/// A call of an operator of torch on constants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Recipe {
    /// As `aten::mul.Tensor`.
    pub operator: String,
    /// All arguments, in the order of the operator's schema.
    pub arguments: Vec<(String, Operand)>,
}

impl Recipe {
    /// Returns the constants that it concatenates along their first axis; none for another recipe. On a device these
    /// are contiguous, so that the result needs no copy.
    pub fn joined(&self) -> Option<Vec<&str>> {
        let [(_, Operand::Tensors(parts)), (_, Operand::Int(0))] = &self.arguments[..] else {
            return None;
        };
        let names = parts.iter().map(|part| match part {
            Operand::Constant(name) if self.operator == "aten::cat" => Some(name.as_str()),
            _ => None,
        });
        names.collect()
    }
}

/// One argument of a [`Recipe`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Operand {
    /// The name of a constant.
    Constant(String),
    /// The result of another call.
    Call(Recipe),
    /// A list of tensors.
    Tensors(Vec<Operand>),
    /// Python's `None`.
    None(()),
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A list of whole numbers, as a shape or strides.
    Ints(Vec<i64>),
    /// A floating-point number.
    Float(f64),
    /// A scalar type, by its number in torch's export schema.
    ScalarType(i64),
    /// A memory format, by its number in torch's export schema.
    MemoryFormat(i64),
}
