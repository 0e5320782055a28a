//! What tasks of the [schedule](super::schedule) work on.

use precast_store::Digest;
use serde_json::Value;

use super::{
    protocol::{Captured, Segment},
    ways::{Set, Way},
};

/// An artifact to compile.
pub(super) struct Compile {
    pub key: Digest,
    pub explained: Value,
    pub segment: Segment,
    pub set: Set,
    /// What progress calls it.
    pub name: String,
}

/// A captured program that waits for its artifacts.
pub(super) struct CapturedProgram {
    pub captured: Captured,
    /// How it is compiled: the first way is kept unless another is faster.
    pub ways: Vec<Way>,
    /// The program whose choice of a way this is, where it was made before.
    pub chosen_by: Option<Digest>,
    /// How many artifacts the store lacked.
    pub compiled: usize,
}
