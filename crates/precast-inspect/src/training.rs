//! Figures of training, beside eager's: the document of `precast train --format json`, and the file that Python's
//! `SmokeResult.training` saves. `precast report --training` reads both.

use precast_store::record::SCHEMA;
use serde::{Deserialize, Serialize};

/// The figures of one module that trains.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Training {
    /// Name of the model.
    pub model: String,
    /// Name of the module in the spec; empty for a module of Python.
    pub module: String,
    /// The bucket, as `batch=8`; empty in a file.
    #[serde(default)]
    pub bucket: String,
    /// `step`: the whole step is an artifact. `autograd`: forward and backward are, and Python trains.
    pub kind: String,
    /// The device that trained.
    pub device: String,
    /// Whether the build measured it, in the gate; else a process that trained.
    #[serde(default)]
    pub built: bool,
    /// With the artifacts.
    pub artifact: Figures,
    /// With the module itself; absent where it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eager: Option<Figures>,
}

/// The figures of one way to train.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Figures {
    /// Seconds from the start of the process, or from the module in Python, to the end of the first step.
    pub first_step_seconds: Option<f64>,
    /// Of the median step after the first.
    pub steps_per_second: Option<f64>,
    /// The most memory of a step, beyond what is kept from step to step.
    pub peak_bytes: Option<u64>,
}

/// Parses a file of figures; none for other text and for another schema.
pub fn parse(text: &[u8]) -> Option<Training> {
    let document: serde_json::Value = serde_json::from_slice(text).ok()?;
    let known = document["schema"].as_u64() == Some(SCHEMA.into());
    known.then(|| serde_json::from_value(document).ok())?
}
