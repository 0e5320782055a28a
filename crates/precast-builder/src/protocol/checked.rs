//! The findings of a worker in a module, before a build.

use std::collections::BTreeMap;

use precast_store::record::Sizes;
use serde::{Deserialize, Serialize};

use crate::spec::check::Allow;

/// The problems of a module, and the open questions.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Checked {
    /// By severity, then by place.
    pub findings: Vec<Finding>,
    /// Open questions, each a sentence without its final period.
    pub unknown: Vec<String>,
    /// Whether a build can capture it; null if it was not checked.
    pub captured: Option<bool>,
    /// Number of artifact calls at one bucket.
    pub steps: Option<u64>,
    /// Number of distinct artifacts of these calls.
    pub artifacts: Option<u64>,
    /// Bucketed dimension -> the sizes that a dynamic artifact holds for; null where the code fixes it.
    pub dynamic: Option<BTreeMap<String, Option<Free>>>,
    /// Lists of submodules, each with the number of artifacts that it needs.
    #[serde(default)]
    pub lists: Vec<Repeated>,
    /// The reasons against a CUDA graph.
    #[serde(default)]
    pub graph: Vec<KeptOut>,
    /// The behaviour of torch.compile, if requested.
    #[serde(default)]
    pub recompiles: Option<Recompiles>,
    /// The cost of its buckets, if requested.
    #[serde(default)]
    pub cost: Option<Cost>,
    /// Seconds that the check took.
    pub seconds: f64,
}

/// Submodules of one class whose names differ in numbers only.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Repeated {
    /// Their names, as a region is written.
    pub glob: String,
    /// Their class, as Python names it.
    pub class: String,
    /// Number of members that the module calls.
    pub count: u64,
    /// Number of artifacts that they need as a region.
    pub artifacts: u64,
    /// Whether they are a region of the spec.
    pub region: bool,
}

/// One reason why a program can't be one CUDA graph.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KeptOut {
    /// The reason in one line.
    pub why: String,
    /// `file:line` of the user's code.
    pub location: Option<String>,
}

/// The behaviour of torch.compile with a module at several sizes.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Recompiles {
    /// In the order in which they were made; the first two have the same sizes.
    pub calls: Vec<TorchCall>,
    /// Maximum number of compiles of a function before torch.compile leaves it to eager.
    pub limit: u64,
}

/// One call through torch.compile.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TorchCall {
    /// Sizes of the bucketed dimensions in this call.
    pub sizes: Sizes,
    /// Graphs that were made for it; 0 where those of earlier calls did.
    pub graphs: u64,
    /// Places where a graph ended before the function did.
    pub breaks: u64,
    /// The guards that did not hold, one for each function that was compiled again.
    pub guards: Vec<String>,
}

/// The minimum cost of calls.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cost {
    /// In the order of the spec.
    pub buckets: Vec<BucketCost>,
    /// Bytes of parameters and buffers, without tables of embeddings.
    pub weights: u64,
    /// Floating-point operations that this machine does in a second.
    pub flops_per_second: f64,
    /// Bytes that this machine reads from memory in a second.
    pub bytes_per_second: f64,
    /// The measurement of the machine's rates.
    pub measured: String,
}

/// The minimum cost of a call of one bucket.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BucketCost {
    /// Sizes of the bucketed dimensions.
    pub sizes: Sizes,
    /// Of matrix products, convolutions and attention.
    pub flops: u64,
    /// Of weights, inputs and outputs.
    pub bytes: u64,
    /// The time that this machine needs for them.
    pub seconds: f64,
}

/// The sizes of a dynamic dimension.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Free {
    /// Smallest size; torch.export can't go below 2.
    pub min: u64,
    /// Absent for no bound.
    pub max: Option<u64>,
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing.
    Low,
    /// On the path of every call: a compiled module does otherwise than eager, or torch.compile breaks its graph there.
    Medium,
    /// Stops the build.
    High,
}

impl Severity {
    /// Returns the printed word.
    pub fn word(self) -> &'static str {
        ["low", "medium", "high"][self as usize]
    }
}

/// A construct that prevents the compilation of a module, or that has another effect in a compiled module.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Finding {
    /// The category, a stable name.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = crate::spec::check::CATEGORIES)))]
    pub category: String,
    /// Its severity.
    pub severity: Severity,
    /// Its consequence, in one sentence.
    pub why: String,
    /// The replacement.
    pub fix: Fix,
    /// `file:line` of the user's code, or of an installed package where none of it is involved.
    pub location: Option<String>,
    /// The qualified name of the function around it.
    pub function: Option<String>,
    /// The line itself.
    pub source: Option<String>,
    /// The reason in `[[check.allow]]` why it is intended, where the spec has one.
    #[serde(default)]
    pub allowed: Option<String>,
}

impl Finding {
    /// Returns whether an entry of `[[check.allow]]` is about this finding, of any severity.
    pub fn is_of(&self, allow: &Allow) -> bool {
        allow.matches(&self.category, self.function.as_deref())
    }
}

/// The replacement.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Fix {
    /// The change in words.
    pub text: String,
    /// The user's own line, fixed, where that follows from it.
    pub lines: Vec<String>,
}
