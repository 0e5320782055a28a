//! The questions to a gate's process, and its answer.

use std::{collections::BTreeMap, path::PathBuf};

use precast_store::{
    Digest,
    record::{Dtype, Program, Shim, Sizes, Step, receipt::Gate},
};
use serde::{Deserialize, Serialize};

/// The question to a gate's process.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Question {
    /// Whether a candidate agrees with eager.
    Compare(Box<GateRequest>),
    /// Whether programs run with other weights.
    Smoke(Box<SmokeRequest>),
    /// Whether the programs of sessions agree with eager from call to call.
    Chain(Box<ChainRequest>),
}

/// A program that is not published yet, the samples to compare it with, and the tolerances.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GateRequest {
    /// Path of the store that has the artifacts.
    pub store: PathBuf,
    /// The record of the candidate, which is not in the store yet.
    pub program: Program,
    /// The steps of other candidates, to be measured in rounds with the program's.
    #[serde(default)]
    pub others: Vec<Vec<Step>>,
    /// Whether no other task of the build runs at the same time. The measurement then takes longer, and its result
    /// decides.
    #[serde(default)]
    pub exclusive: bool,
    /// The shim for this torch, whose objects are in the store.
    pub shim: Shim,
    /// Digest of the weight set in the store; none for a model without parameters and buffers.
    pub weights: Option<Digest>,
    /// Names of tied tensors -> the name under which the weight set holds them.
    pub aliases: BTreeMap<String, String>,
    /// Inputs, and eager's outputs for them.
    pub samples: Samples,
    /// The values of the samples with more digits, under their names in the file of samples, and eager's distances from
    /// them, `eager.out.N`. None where tolerances decide, or did not fail yet.
    #[serde(default)]
    pub truth: Option<PathBuf>,
    /// Number of runs.
    pub steps: u32,
    /// Relative tolerance of the spec; none for that of the dtype.
    pub rtol: Option<f64>,
    /// Absolute tolerance of the spec; none for that of the dtype.
    pub atol: Option<f64>,
    /// The coarsest dtype in the computation of each output and each state, if below float32.
    #[serde(default)]
    pub compute_dtypes: Vec<Option<Dtype>>,
}

/// The source of a gate's inputs and of eager's outputs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Samples {
    /// A file: inputs `in.N` and eager's outputs `out.N`, as safetensors; `smaller.K.in.N` and `smaller.K.out.N` are
    /// the same at sizes inside the bucket.
    File(PathBuf),
    /// Inputs are drawn from the program's record, and its own graph gives eager's outputs.
    Drawn {
        /// The program whose graph takes the smaller sizes.
        any_size: Option<Box<Program>>,
        /// Sizes inside the bucket.
        smaller: Vec<Sizes>,
    },
}

/// Programs of a release, to be run with the current weights and with new ones: each output that was finite must be
/// finite again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SmokeRequest {
    /// Path of the store that has all of it.
    pub store: PathBuf,
    /// The programs.
    pub programs: Vec<Program>,
    /// The shim for this torch.
    pub shim: Shim,
    /// The current weights; none if no release has the programs. Then only NaN is an error.
    pub before: Option<StoredWeights>,
    /// The weights that are to be published.
    pub after: StoredWeights,
}

/// The programs of the modules `prefill` and `decode`, to be called in one session and compared with eager.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChainRequest {
    /// Path of the store that has all of it.
    pub store: PathBuf,
    /// The programs.
    pub chain: Vec<ChainProgram>,
    /// The shim for this torch.
    pub shim: Shim,
    /// The weights.
    pub weights: StoredWeights,
    /// Maximum number of generated tokens.
    pub tokens: u32,
}

/// A program of a chain, and the tolerances of its outputs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ChainProgram {
    /// The record.
    pub program: Program,
    /// Relative tolerance of the spec; none for that of the dtype.
    pub rtol: Option<f64>,
    /// Absolute tolerance of the spec; none for that of the dtype.
    pub atol: Option<f64>,
    /// The coarsest dtype in the computation of each output and each state, if below float32.
    pub compute_dtypes: Vec<Option<Dtype>>,
}

/// A weight set in the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StoredWeights {
    /// Its digest; none for a model without parameters and buffers.
    pub object: Option<Digest>,
    /// Names of tied tensors -> the name under which the weight set holds them.
    pub aliases: BTreeMap<String, String>,
}

/// The answer of a gate's process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    /// The candidate may be published.
    Passed {
        /// The measurements, for the program's receipt.
        report: Box<Gate>,
    },
    /// The candidate is refused because floats are beyond their tolerances. The truth may accept them.
    Differs {
        /// The first difference, or the largest, in one line.
        message: String,
    },
    /// The candidate is refused.
    Failed {
        /// The reason in one line.
        message: String,
    },
}
