//! Prepacked constants: inputs of an artifact that are computed from its constants when weights are bound.

use serde::{Deserialize, Serialize};

use super::Dtype;

/// A constant that an artifact takes in a form of its own, made of its constants once for each weight set: a filter with
/// the batch norm after it multiplied in, a matrix in the order that a kernel reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Prepared {
    /// What the artifact calls it.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Size of each axis.
    pub shape: Vec<i64>,
    /// None for an order that only torch's operators know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<Vec<i64>>,
    /// The operator that makes it of the constants.
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
    /// All of them, in the order of the operator's schema.
    pub arguments: Vec<(String, Operand)>,
}

impl Recipe {
    /// Returns the constants that it joins along their first axis; none where it is another. On a device they lie one behind
    /// the other, so that what is made of them is there already.
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
    /// What another call gives.
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
    /// By the number in torch's export schema, as the next.
    ScalarType(i64),
    /// By the number in torch's export schema.
    MemoryFormat(i64),
}
