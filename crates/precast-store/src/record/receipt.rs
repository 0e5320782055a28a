//! Receipts, the measurements of a build; and provenance, the version and the time of a record.
//!
//! A program has a [`Receipt`], an artifact a [`CompileReceipt`], and every record a [`Provenance`].
//!
//! | record | field | meaning |
//! |---|---|---|
//! | program | `seconds` | phase -> seconds (`capture`, `gate`, `measure`) |
//! | program | `eager_us`, `eager_runs`, `threads` | median microseconds of a call of eager in Python, measured while other tasks of the build run |
//! | program | `eager_peak_bytes` | peak memory of that call, on CUDA |
//! | program | `flops` | floating-point operations of a part of a training step, by the dtype of the operands |
//! | program | `padding` | the module's own error on padded requests, in eager: `points`, `max_abs`, `sensitive` |
//! | program | `gate_given` | the inputs of the gate in addition to the program: samples, weights, tolerances, host, … |
//! | program | `gate` | the [gate's report](Gate) |
//! | program | `gated_by` | the program whose gate had the same inputs, so that this one was not run |
//! | program | `tuned` | the [option sets](Tried) it was compiled with, the baseline first |
//! | program | `tuned_by` | the tuned program whose choice was reused |
//! | artifact | `seconds` | phase -> seconds (`lower`, `cpp`, `link`, …) |
//! | any | `provenance.precast`, `provenance.created` | the version that wrote it, and when, in seconds since 1970 |
//! | artifact | `provenance.metadata` | AOTInductor's own metadata |

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Dtype, Padding, Sizes};
use crate::Digest;

/// Measurements of the build of a program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Receipt {
    /// Seconds of each phase (`capture`, `gate`, `measure`).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub seconds: BTreeMap<String, f64>,
    /// Microseconds of a call of eager in Python, measured while other tasks of the build run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_us: Option<f64>,
    /// Number of calls of that median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_runs: Option<u64>,
    /// Number of threads that torch used for these calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u64>,
    /// Peak memory of eager in Python, on CUDA.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_peak_bytes: Option<u64>,
    /// Floating-point operations of a part of a training step, by the dtype of the operands: those of matrix products,
    /// convolutions and attention, as torch counts them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub flops: BTreeMap<Dtype, u64>,
    /// The module's own answers to padded requests; absent if padding was not tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding: Option<ModulePadding>,
    /// The inputs of the gate, in addition to the program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_given: Option<Given>,
    /// The gate's report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate: Option<Gate>,
    /// Request key of the program whose gate had the same inputs; this program's gate was not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gated_by: Option<Digest>,
    /// Option sets that it was compiled with, the module's own first; absent if there was only one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tuned: Option<Vec<Tried>>,
    /// Request key of the tuned program whose choice was reused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tuned_by: Option<Digest>,
}

impl Receipt {
    /// Returns the option sets that it was compiled with; empty if there was only one.
    pub fn tried(&self) -> &[Tried] {
        self.tuned.as_deref().unwrap_or_default()
    }

    /// Returns the comparison of the artifacts' speed with eager's, if the gate measured both.
    pub fn sign_test(&self) -> Option<&SignTest> {
        self.gate.as_ref()?.sign_test.as_ref()
    }

    /// Records the seconds of a phase.
    pub fn took(&mut self, phase: &str, seconds: f64) {
        self.seconds.insert(phase.to_owned(), seconds);
    }
}

/// Measurements of the compile of an artifact.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CompileReceipt {
    /// Seconds of each phase (`lower`, `cpp`, `link`, …).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub seconds: BTreeMap<String, f64>,
}

/// The answers of the module itself, in Python, to requests that were padded into the bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModulePadding {
    /// The sizes that were tried.
    pub points: Vec<PaddedPoint>,
    /// The largest difference from its answer to the same request without padding.
    pub max_abs: f64,
    /// Whether other values in the padding than the spec's change the answer.
    pub sensitive: bool,
}

/// A size at which padding was tried.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PaddedPoint {
    /// The request's sizes before padding.
    pub sizes: Sizes,
    /// The module's error at this size, without padding: there is nothing to compare with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// The inputs of a gate, in addition to the program. The result of a gate holds for every equal program with the same
/// inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Given {
    /// Version of precast.
    pub precast: String,
    /// The machine that the gate ran on.
    pub host: Host,
    /// Digest of the file with inputs and eager's outputs.
    pub samples: Digest,
    /// Digest of the weight set; none for a model without parameters and buffers.
    pub weights: Option<Digest>,
    /// Names of tied tensors -> the name under which the weight set holds them.
    pub aliases: BTreeMap<String, String>,
    /// Number of runs of the program.
    pub steps: u32,
    /// Relative tolerance of the spec; none for that of the dtype.
    pub rtol: Option<f64>,
    /// Absolute tolerance of the spec; none for that of the dtype.
    pub atol: Option<f64>,
    /// For each output, and then for each state, the coarsest dtype of its computation, if it differs from its own.
    pub compute_dtypes: Vec<Option<Dtype>>,
    /// The padding that the capture found.
    pub padding: Padding,
}

/// The properties of a host that affect answers and speed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Digest of the machine's ID. The ID itself is private.
    pub machine: String,
    /// Model name of the CPU.
    pub cpu: Option<String>,
    /// Number of cores that the build may use.
    pub cores: usize,
    /// Version of the GPU's driver.
    pub driver: Option<String>,
}

/// The report of a gate: the comparison of a program's artifacts with eager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Gate {
    /// The error of each output, in the order of the program's outputs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outputs: Option<Vec<Compared>>,
    /// Whether all runs gave the same bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deterministic: Option<bool>,
    /// Number of runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Mean seconds of these runs, with the copies of their outputs to the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_per_run: Option<f64>,
    /// Peak memory of a call of the artifacts, beyond the memory of the process before it; null if it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifact_peak_bytes: Option<u64>,
    /// The runtime's answers to padded requests; null where padding was not tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding: Option<GatePadding>,
    /// Peak memory of a call of the exported graph, measured in the same way; null if it did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_peak_bytes: Option<u64>,
    /// Median microseconds of a call of the artifacts, alternating with calls of the exported graph.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifact_us: Option<f64>,
    /// Number of calls of that median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub artifact_runs: Option<u64>,
    /// Median microseconds of a call of the exported graph, without Python.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_us: Option<f64>,
    /// Number of calls of that median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_runs: Option<u64>,
    /// Number of rounds in which the exported graph took less time than the artifacts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eager_wins: Option<u64>,
    /// That of the sign test, as the process of the gate tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_us: Option<[f64; 2]>,
    /// The same number for each of the other option sets in the measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others_eager_wins: Option<Vec<u64>>,
    /// Median microseconds of a call of each other option set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others_us: Option<Vec<f64>>,
    /// For each other option set, the number of rounds in which it took less time than this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others_wins: Option<Vec<u64>>,
    /// The comparison of the artifacts' speed with eager's; absent if only one of them was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sign_test: Option<SignTest>,
}

impl Gate {
    /// Returns the dimensions in which padded requests differed from eager, each with the reason.
    pub fn exact(&self) -> BTreeMap<String, String> {
        let padding = self.padding.as_ref();
        padding
            .map(|padding| padding.exact.clone())
            .unwrap_or_default()
    }
}

/// The difference between one output and eager's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Compared {
    /// Name of the output.
    pub name: String,
    /// Whether integers are equal, as they must be; the numbers are then absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub equal: Option<bool>,
    /// Largest absolute difference of an element.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_abs: Option<f64>,
    /// Largest difference of an element relative to eager's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rel: Option<f64>,
    /// Cosine of the angle between the output and eager's, both as vectors; 1 where one of them is zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// Relative tolerance that was applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtol: Option<f64>,
    /// Absolute tolerance that was applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub atol: Option<f64>,
    /// Distances from the truth, where these decided and no tolerance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truth: Option<Truth>,
}

/// Distances of a value from the same with more digits, as the root of the mean square over its elements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Truth {
    /// Float32 for a program in half precision, else float64.
    pub dtype: Dtype,
    /// Of the artifact's.
    pub artifact: f64,
    /// Of eager's.
    pub eager: f64,
    /// Of the artifact's worst element. None in training, where it does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_worst: Option<f64>,
    /// Of eager's worst element.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eager_worst: Option<f64>,
    /// Whether eager is so far that only the size of the value could be compared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub size_alone: bool,
}

/// The runtime's answers to requests that it padded into the bucket.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GatePadding {
    /// The sizes that were tried.
    pub points: Vec<Sizes>,
    /// The largest difference from eager at its own size.
    pub max_abs: f64,
    /// The reason why smaller requests may not be padded into the bucket, if they may not.
    pub refused: Option<String>,
    /// The dimensions without padding, each with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exact: BTreeMap<String, String>,
}

/// A sign test of alternating calls of a program's artifacts and of eager.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SignTest {
    /// Number of calls of each of them.
    pub rounds: u64,
    /// Number of rounds in which eager took less time.
    pub eager_faster: u64,
    /// Whether no other task of the build was running.
    pub exclusive: bool,
    /// Median microseconds beside busy threads, one for each core: of the artifacts and of eager. On a CPU, where eager
    /// was faster with nothing beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_us: Option<[f64; 2]>,
    /// The faster one, which answers calls.
    pub faster: Faster,
}

/// The faster one of the two, if there is a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Faster {
    /// The compiled artifacts.
    Artifact,
    /// The exported graph, run without Python.
    Eager,
    /// No decision: the artifact answers.
    Neither,
}

/// One option set that a program was compiled with, to keep the fastest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Tried {
    /// The difference to the module's own settings.
    pub options: String,
    /// Seconds of the compiles of its artifacts.
    pub seconds: Option<f64>,
    /// Seconds of a call, alternating with calls of the other sets.
    pub latency: Option<f64>,
    /// The largest absolute error of an output.
    pub max_abs: Option<f64>,
    /// Whether the program kept it.
    pub chosen: bool,
    /// The reason why it could not be chosen.
    pub refused: Option<String>,
}

/// The version of precast that wrote a record, and the time. Never part of a key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Provenance {
    /// Version of precast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precast: Option<String>,
    /// Seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<i64>,
    /// AOTInductor's own metadata, for an artifact.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
}

impl Provenance {
    /// Returns the provenance of a record that is written now.
    pub fn now() -> Self {
        Self {
            precast: Some(env!("CARGO_PKG_VERSION").to_owned()),
            created: Some(crate::time::now()),
            metadata: None,
        }
    }
}
