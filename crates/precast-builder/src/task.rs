//! The data of tasks of the [schedule](super::schedule).

use precast_store::Digest;
use serde_json::Value;

use super::{
    gate::candidates::{Candidate, OptionSet},
    protocol::{Captured, Segment},
};

/// An artifact to compile.
pub(super) struct Compile {
    pub key: Digest,
    pub explained: Value,
    pub segment: Segment,
    pub set: OptionSet,
    /// What progress calls it.
    pub name: String,
}

/// A captured program that waits for its artifacts.
pub(super) struct CapturedProgram {
    pub captured: Captured,
    /// The first candidate is kept unless another is faster.
    pub candidates: Vec<Candidate>,
    /// The earlier program whose choice of a candidate was taken over, if any.
    pub chosen_by: Option<Digest>,
    /// How many artifacts the store lacked.
    pub compiled: usize,
}
