//! The JSON records of a store: artifacts, programs and releases.
//!
//! Records are immutable files. An **artifact** is one shared object and its layout, named by its artifact key. A
//! **program** runs one module at one bucket, named by its request key: steps that call artifacts with bindings. A
//! **release** is a complete set of programs of one model with one weight set, visible as a whole. No record holds
//! weight values: a program has the names of its weights, and a release selects the weight set.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Digest, Target, target::DeviceKind};

mod counts;
mod dtype;
mod prepared;
pub mod receipt;

pub use counts::{Calls, Counts};
pub use dtype::Dtype;
pub use prepared::{Operand, Prepared, Recipe};
pub use receipt::{CompileReceipt, Faster, Provenance, Receipt, SignTest, Tried};

/// The version written as `"schema"` into every record.
pub const SCHEMA: u32 = 1;

/// The layout of one tensor. Sizes and strides are in elements.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Layout {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Size of each axis.
    pub shape: Vec<i64>,
    /// Distance between neighbours along each axis; 0 where all are the same element.
    pub stride: Vec<i64>,
}

/// The sizes a dynamic dimension may have, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    /// Smallest size.
    pub min: i64,
    /// Largest size; the largest `i64` where only the model limits it.
    pub max: i64,
}

impl Bounds {
    /// The upper bound of a dimension that only the model limits.
    pub const UNBOUNDED: i64 = i64::MAX;
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.max {
            Self::UNBOUNDED => write!(f, "from {}", self.min),
            max => write!(f, "{} to {max}", self.min),
        }
    }
}

/// Returns the sizes that a dynamic program accepts, as `batch from 1, seq 1 to 512`. Dimensions of `sizes` that are
/// not dynamic have one size.
pub fn bounds_name(dynamic: &Dynamic, sizes: &Sizes) -> String {
    let parts = sizes.iter().map(|(dim, size)| match dynamic.get(dim) {
        Some(bounds) => format!("{dim} {bounds}"),
        None => format!("{dim} {size}"),
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// The dynamic dimensions of a program, each with its bounds.
pub type Dynamic = BTreeMap<String, Bounds>;

/// One point of a module's shape grid: dimension name -> size.
pub type Sizes = BTreeMap<String, i64>;

/// Splits `model@release`.
pub fn split_model(model: &str) -> (&str, Option<&str>) {
    let parts = model.split_once('@');
    parts.map_or((model, None), |(name, release)| (name, Some(release)))
}

/// Returns `batch=8 seq=128`, or `fixed` for a module without bucketed dimensions.
pub fn bucket_name(sizes: &Sizes) -> String {
    if sizes.is_empty() {
        return "fixed".to_owned();
    }
    let parts: Vec<String> = sizes
        .iter()
        .map(|(name, size)| format!("{name}={size}"))
        .collect();
    parts.join(" ")
}

/// One input of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Input {
    /// Name of the argument, as the spec has it.
    pub name: String,
    /// Dtype, shape and strides at the bucket.
    #[serde(flatten)]
    pub layout: Layout,
    /// The bucketed dimension of each axis, if it has one.
    pub dims: Vec<Option<String>>,
    /// Padding value for a request that is smaller than the bucket.
    pub pad: Pad,
    /// Valid values, `range[0]..range[1]`, if the spec has them (token ids, positions). Samples are drawn from this
    /// range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<[i64; 2]>,
    /// The dimension of states whose size is `range[1]`: a call with a higher value moves its session into a larger
    /// bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<String>,
    /// Minimum of the elements, and one past their maximum, from the graph and `range`. A call with another value is
    /// refused. Absent for floats and for integers of any value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bounds: Option<[i64; 2]>,
    /// The value of all elements in a session's call that gives no input beside tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<Pad>,
}

/// A tensor that a program keeps from call to call: a session owns it, and steps write into it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct State {
    /// Name of the buffer in the model, or of the input in the spec. Modules of a model share states by name.
    pub name: String,
    /// Dtype, shape and strides at the bucket.
    #[serde(flatten)]
    pub layout: Layout,
    /// The bucketed dimension of each axis, if it has one.
    pub dims: Vec<Option<String>>,
    /// The value in a new session.
    pub first: First,
}

/// Returns the bytes of a session of these programs: all states, each at its largest bucket.
pub fn session_bytes<'p>(programs: impl IntoIterator<Item = &'p Program>) -> u64 {
    let mut largest: BTreeMap<&str, u64> = BTreeMap::new();
    for state in programs.into_iter().flat_map(|program| &program.states) {
        let sizes = state.layout.shape.iter().map(|size| size.unsigned_abs());
        let bytes = sizes.fold(state.layout.dtype.size() as u64, u64::saturating_mul);
        let known = largest.entry(&state.name).or_default();
        *known = bytes.max(*known);
    }
    largest.values().sum()
}

/// The value of a state in a new session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum First {
    /// Zero everywhere.
    Zeros,
    /// The values of this tensor of the weight set: the model's own buffer.
    Tensor(String),
    /// An output of a module, once a session has called it.
    Output {
        /// Name of the module.
        module: String,
        /// Position among its outputs, from 0.
        index: usize,
    },
}

/// A value for elements: exact for integers beyond 2^53 too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Pad {
    /// For an input of dtype `bool`.
    Bool(bool),
    /// For an input of an integer dtype.
    Int(i64),
    /// For an input of a floating-point dtype.
    Float(f64),
}

/// The size of an output axis, as a function of one bucketed dimension: `scale * size + offset`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Follow {
    /// Name of the bucketed dimension.
    pub dim: String,
    /// Elements of the axis per element of the dimension.
    pub scale: i64,
    /// Elements that are added to it; may be negative.
    pub offset: i64,
}

/// One output of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Output {
    /// Name that the runtime and its errors use for it.
    pub name: String,
    /// Dtype, shape and strides at the bucket.
    #[serde(flatten)]
    pub layout: Layout,
    /// The dependence of each axis on a bucketed dimension, if it has one.
    pub dims: Vec<Option<Follow>>,
}

/// One call of an artifact with one weight binding.
///
/// `inputs` and `outputs` are value numbers: first the program's inputs, then its states, then the results of earlier
/// steps. A step that has a state among its inputs may write into it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Step {
    /// Name of the region instance, as `layers.0`; `main` or `glue.N` for the code between regions.
    pub name: String,
    /// Key of the artifact.
    pub artifact: Digest,
    /// Value numbers of the arguments, in the order of the artifact's inputs.
    pub inputs: Vec<usize>,
    /// Value numbers of the results, in the order of the artifact's outputs.
    pub outputs: Vec<usize>,
    /// Constant name in the artifact -> tensor name in the weight set.
    pub binding: BTreeMap<String, String>,
}

/// A check of values during a run. Its outcome is returned after the program's results.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Check {
    /// Value number of the outcome: one number, not 0 if the check failed.
    pub value: usize,
    /// The condition in words, as `index in 0..30522 of aten.embedding`.
    pub text: String,
    /// The line of the model that requires it, as `model.py:12`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// The input whose values are checked, if it is one: the program clamps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<String>,
}

/// Whether a request smaller than the bucket may be padded into it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "padding", rename_all = "kebab-case")]
pub enum Padding {
    /// The bucket answers smaller requests too.
    Allowed,
    /// Some dimensions, or all, must have the bucket's sizes.
    Refused {
        /// The reason, in one line.
        why: String,
        /// The dimensions in which requests may still be smaller.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        padded: Vec<String>,
    },
}

impl Padding {
    /// Returns the padding of a bucket. `exact` has the dimensions in which a request can't be smaller, each with the
    /// reason.
    pub fn new(sizes: &Sizes, exact: &BTreeMap<String, String>) -> Self {
        let mut reasons: Vec<&str> = exact.values().map(String::as_str).collect();
        reasons.dedup();
        let padded = sizes.keys().filter(|dim| !exact.contains_key(*dim));
        if reasons.is_empty() {
            Self::Allowed
        } else {
            Self::Refused {
                why: reasons.join("; "),
                padded: padded.cloned().collect(),
            }
        }
    }

    /// Returns whether a request may be smaller than the bucket in a dimension.
    pub fn allows(&self, dim: &str) -> bool {
        match self {
            Self::Allowed => true,
            Self::Refused { padded, .. } => padded.iter().any(|one| one == dim),
        }
    }

    /// Returns the dimensions without padding and the reason; none if padding is allowed. For example
    /// `exact sizes only: …` or `exact in seq, padded in batch: …`.
    pub fn refusal(&self, sizes: &Sizes) -> Option<String> {
        let Self::Refused { why, padded } = self else {
            return None;
        };
        let exact = sizes.keys().filter(|dim| !padded.contains(dim));
        let exact: Vec<&str> = exact.map(String::as_str).collect();
        Some(if padded.is_empty() {
            format!("exact sizes only: {why}")
        } else {
            format!(
                "exact in {}, padded in {}: {why}",
                exact.join(" and "),
                padded.join(" and ")
            )
        })
    }
}

/// A part of a training step, with its optimizer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Train {
    /// The part.
    pub part: TrainPart,
    /// The optimizer, as the spec names it.
    pub optimizer: String,
}

/// The parts of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum TrainPart {
    /// Loss, gradients and update.
    Step,
    /// Loss and gradients, which are added to their sums.
    Gradients,
    /// The update with the mean gradients.
    Update,
    /// The loss alone.
    Eval,
}

impl TrainPart {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Gradients => "gradients",
            Self::Update => "update",
            Self::Eval => "eval",
        }
    }
}

/// The captured graph, which eager runs in place of the steps, without Python.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Eager {
    /// Key of the artifact that holds the graph. Its kind is the format of the graph.
    pub artifact: Digest,
    /// Tensor names in the weight set: the graph's flat inputs after the program's inputs.
    pub weights: Vec<String>,
}

/// The compiled form of one module at one bucket, or at every size within bounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Program {
    /// Version of the record's form: [`SCHEMA`].
    pub schema: u32,
    /// The request key.
    pub id: Digest,
    /// Name of the model that it was built for.
    pub model: String,
    /// Name of the module in the spec.
    pub module: String,
    /// The bucket; for a dynamic program the sizes of the samples, which are those in its layouts.
    pub sizes: Sizes,
    /// The bounds of a dynamic program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dynamic: Option<Dynamic>,
    /// Hosts that it runs on.
    pub target: Target,
    /// Inputs of a call, in the order of the module's parameters.
    pub inputs: Vec<Input>,
    /// States: tensors that it reads and writes, kept from call to call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<State>,
    /// Outputs of a call, in the order in which the module returns them.
    pub outputs: Vec<Output>,
    /// Value numbers of the outputs.
    pub results: Vec<usize>,
    /// Checks during a run, in addition to the inputs' bounds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<Check>,
    /// Number of values.
    pub values: usize,
    /// Empty in a program that only eager runs.
    pub steps: Vec<Step>,
    /// The captured graph as a list of operator calls, where the build kept it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eager: Option<Eager>,
    /// Key of the artifact with the tensors that the code itself creates. Bindings name them like those of the weight
    /// set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constants: Option<Digest>,
    /// Whether smaller requests are padded into the bucket.
    #[serde(flatten)]
    pub padding: Padding,
    /// The part of a training step that it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub train: Option<Train>,
    /// torch's pytree specs of the call (inputs, outputs) as it was captured.
    pub call_spec: Value,
    /// The explained request key.
    pub request: Value,
    /// Measurements of the build.
    pub receipt: Receipt,
    /// Version of precast, and time of creation.
    pub provenance: Provenance,
}

impl Program {
    /// Returns why requests can't be padded into its bucket, as [`Padding::refusal`] does; none with states, because a
    /// session sends its tokens through the buckets that they fill.
    pub fn padding_refused(&self) -> Option<String> {
        let stateless = self.states.is_empty();
        stateless.then(|| self.padding.refusal(&self.sizes))?
    }

    /// Returns every artifact that it calls, sorted.
    pub fn artifacts(&self) -> Vec<Digest> {
        let steps = self.steps.iter().map(|step| step.artifact);
        let eager = self.eager.iter().map(|eager| eager.artifact);
        sorted(steps.chain(eager).chain(self.constants))
    }

    /// Returns the module and the names of its inputs, which distinguish its variants: `answer(ids, image)`.
    pub fn title(&self) -> String {
        let names: Vec<&str> = self
            .inputs
            .iter()
            .map(|input| input.name.as_str())
            .collect();
        format!("{}({})", self.module, names.join(", "))
    }

    /// Returns the seconds of one call at the time of the build: of the artifacts, or of the exported graph without
    /// Python. The gate measures both in alternating calls.
    pub fn seconds(&self, eager: bool) -> Option<f64> {
        let gate = self.receipt.gate.as_ref()?;
        let micros = if eager {
            gate.eager_us
        } else {
            gate.artifact_us
        };
        let seconds = micros? / 1e6;
        (seconds.is_finite() && seconds > 0.0).then_some(seconds)
    }

    /// Returns whether its artifacts were slower than eager. Eager then answers in their place.
    pub fn slower_than_eager(&self) -> bool {
        let test = self.receipt.sign_test();
        test.is_some_and(|test| test.faster == Faster::Eager)
    }

    /// Returns whether it was built to run as a CUDA graph.
    pub fn has_graph_mode(&self) -> bool {
        let mode = self.request.get("mode").and_then(Value::as_str);
        matches!(mode, Some("reduce-overhead" | "max-autotune"))
    }

    /// Returns whether eager answers in place of its artifacts, as a model is loaded by default.
    pub fn is_answered_by_eager(&self) -> bool {
        let graph = self.target.device == DeviceKind::Cuda && self.has_graph_mode();
        self.slower_than_eager() && self.eager.is_some() && !graph
    }

    /// Returns the name of the program within its module: `batch=8 seq=128`, `dynamic`, `dynamic batch=1`, `eager`.
    pub fn bucket(&self) -> String {
        form_name(&self.sizes, self.dynamic.as_ref(), !self.steps.is_empty())
    }
}

/// Returns the name of a program of this form. The name of a dynamic program for size 1 of a dimension includes that
/// size.
pub fn form_name(sizes: &Sizes, dynamic: Option<&Dynamic>, compiled: bool) -> String {
    let Some(dynamic) = dynamic.filter(|_| compiled) else {
        return match dynamic {
            Some(_) => "eager".to_owned(),
            None => bucket_name(sizes),
        };
    };
    let ones = sizes.iter();
    let ones = ones.filter(|(dim, size)| !dynamic.contains_key(*dim) && **size == 1);
    ones.fold("dynamic".to_owned(), |name, (dim, _)| {
        format!("{name} {dim}=1")
    })
}

/// The kind of an artifact's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ArtifactKind {
    /// A shared object that AOTInductor made.
    Library,
    /// A safetensors object with tensors that a program's code makes itself.
    Constants,
    /// A captured graph as a list of operator calls, in JSON.
    Graph,
}

/// A constant that must be set before an artifact runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Constant {
    /// The name a binding uses.
    pub name: String,
    /// Dtype, shape and strides that the artifact expects.
    #[serde(flatten)]
    pub layout: Layout,
}

/// A stored unit that programs call: an AOTInductor shared object, or another [`ArtifactKind`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Artifact {
    /// Version of the record's form: [`SCHEMA`].
    pub schema: u32,
    /// The artifact key.
    pub id: Digest,
    /// Kind of the object.
    pub kind: ArtifactKind,
    /// Digest of the shared object, graph or safetensors object.
    pub object: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// Hosts that it runs on.
    pub target: Target,
    /// Layouts of its inputs, in the order of a call.
    pub inputs: Vec<Layout>,
    /// Layouts of its outputs, in the order of a call.
    pub outputs: Vec<Layout>,
    /// Constants to set before its first call.
    pub constants: Vec<Constant>,
    /// Prepacked constants, in addition to `constants` or in place of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prepared: Vec<Prepared>,
    /// Digest of the JSON for the proxy executor, for artifacts that call operators through it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy: Option<Digest>,
    /// Digests of shared libraries to load before it (custom operators).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub libraries: Vec<Digest>,
    /// Names of the functions that the object imports from libtorch, sorted. None for other kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imports: Option<Vec<String>>,
    /// Digest of the canonical graph it was compiled from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graph: Option<Digest>,
    /// Digest of the compile log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<Digest>,
    /// The explained artifact key.
    pub key: Value,
    /// Measurements of the compile.
    pub receipt: CompileReceipt,
    /// Version of precast, and time of creation.
    pub provenance: Provenance,
}

/// Returns these digests, sorted and without duplicates.
pub(crate) fn sorted(all: impl IntoIterator<Item = Digest>) -> Vec<Digest> {
    BTreeSet::from_iter(all).into_iter().collect()
}

impl Artifact {
    /// Returns every object that it needs, sorted.
    pub fn objects(&self) -> Vec<Digest> {
        let own = [Some(self.object), self.proxy, self.graph, self.log];
        let own = own.into_iter().flatten();
        sorted(own.chain(self.libraries.iter().copied()))
    }

    /// Returns the seconds that all phases of its compile took together.
    pub fn compile_seconds(&self) -> f64 {
        self.receipt.seconds.values().sum()
    }
}

/// One of the project's own files that the entry imports or reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SourceFile {
    /// Relative to the spec's folder, with `/`.
    pub path: String,
    /// Digest of the file's content.
    pub digest: Digest,
}

/// One installed package that the entry imports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Package {
    /// Name of the distribution, as `pip` lists it.
    pub name: String,
    /// Version that was installed when the entry was imported.
    pub version: String,
}

/// The result of importing the entry. It is stored so that an unchanged build starts no Python.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Entry {
    /// The spec's entry, as `model:build`.
    pub entry: String,
    /// The project's own files, sorted by path.
    pub sources: Vec<SourceFile>,
    /// Installed packages, sorted by name.
    pub packages: Vec<Package>,
    /// FQN -> method -> keys of `[compile]` that submodules declare.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub declared: BTreeMap<String, BTreeMap<String, Value>>,
    /// The folders of the packages, for the next search. Never part of a key.
    pub site_packages: Vec<String>,
}

/// The shim for one torch: the shared objects that the runtime needs in addition to that libtorch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Shim {
    /// Architecture that it was compiled for, as Rust names it: `x86_64`.
    pub arch: String,
    /// Full version of the torch that it was compiled with, as `2.11.0+cu130`.
    pub torch: String,
    /// Commit that this torch was built from.
    pub torch_git: String,
    /// Digest of its C++ sources.
    pub source: Digest,
    /// Digest of the shared object.
    pub object: Digest,
    /// Digest of the shared object for CUDA; none if it was compiled without CUDA's headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<Digest>,
}

impl Shim {
    /// Returns whether both are the same sources for the same torch and architecture.
    pub fn same_subject(&self, other: &Self) -> bool {
        let subject = |of: &Self| {
            (
                of.source,
                of.arch.clone(),
                of.torch.clone(),
                of.torch_git.clone(),
            )
        };
        subject(self) == subject(other)
    }

    /// Returns its objects.
    pub fn objects(&self) -> impl Iterator<Item = Digest> {
        std::iter::once(self.object).chain(self.cuda)
    }
}

/// A complete set of programs of one model with one weight set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Release {
    /// Version of the record's form: [`SCHEMA`].
    pub schema: u32,
    /// Name of the model.
    pub model: String,
    /// Number of the release within its model, from 1 on. A plain load gets the highest one.
    pub seq: u64,
    /// Name that the user gave it, unique within the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The number of the release that a rollback published again as this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<u64>,
    /// Request keys of the programs.
    pub programs: Vec<Digest>,
    /// Names of programs that the spec requests and a narrowed build left out. If there are any, the release is
    /// partial: only a load by its number gets it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacks: Vec<String>,
    /// Request keys of programs that can't be built, and that their modules work without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<Digest>,
    /// Digest of the weight set, a safetensors object; none for a model without parameters and buffers.
    pub weights: Option<Digest>,
    /// Names of tied tensors -> the name under which the weight set holds them.
    pub aliases: BTreeMap<String, String>,
    /// Further files that belong to it, by name: those that the spec lists under `assets`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub assets: BTreeMap<String, Digest>,
    /// The shims for the torch versions under which its gates passed. The first one is that of the build.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shims: Vec<Shim>,
    /// The result of importing the entry in the build of the release.
    pub entry: Entry,
    /// Version of precast, and time of creation.
    pub provenance: Provenance,
}

impl Release {
    /// Returns whether programs of the spec are missing.
    pub fn is_partial(&self) -> bool {
        !self.lacks.is_empty()
    }

    /// Returns the objects that it refers to directly, sorted: its weight set, its assets and its shims.
    pub fn objects(&self) -> Vec<Digest> {
        let own = self
            .weights
            .into_iter()
            .chain(self.assets.values().copied());
        sorted(self.shim_objects().into_iter().chain(own))
    }

    /// Returns the objects of its shims.
    pub fn shim_objects(&self) -> Vec<Digest> {
        self.shims.iter().flat_map(Shim::objects).collect()
    }

    /// Returns whether both have the same programs, weights, names of tied tensors, and assets.
    pub fn same_content(&self, other: &Self) -> bool {
        let programs = |of: &Self| of.programs.iter().copied().collect::<BTreeSet<_>>();
        self.weights == other.weights
            && self.aliases == other.aliases
            && self.assets == other.assets
            && programs(self) == programs(other)
    }
}

/// The error of a failed build. It is kept until the next attempt, for `precast log`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Failure {
    /// Version of the record's form: [`SCHEMA`].
    pub schema: u32,
    /// The request key or the artifact key of the failed build.
    pub id: Digest,
    /// Name of the model.
    pub model: String,
    /// Name of the module in the spec.
    pub module: String,
    /// As `batch=8 seq=128`, `dynamic` or `eager`.
    pub bucket: String,
    /// Sizes of the bucket; for a dynamic program those of its samples.
    pub sizes: Sizes,
    /// A stable word, as the code of a worker's error or a gate's name.
    pub code: String,
    /// One line, lower case, no final period.
    pub message: String,
    /// The user's file and line that caused it, as `model.py:12`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// A hint for the user, if the build has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Digest of the whole log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<Digest>,
    /// Version of precast, and time of creation.
    pub provenance: Provenance,
}
