//! What there is to do in a build, and what a thread has to do it with.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{
    protocol::{Captured, Segment},
    publish::Draft,
    ways::{Set, Way},
};
use crate::Digest;

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
pub(super) struct Waiting {
    pub captured: Captured,
    /// How it is compiled: the first way is kept unless another is faster.
    pub ways: Vec<Way>,
    /// The program whose choice of a way this is, where it was made before.
    pub chosen_by: Option<Digest>,
    pub missing: BTreeSet<Digest>,
    pub compiled: usize,
}

pub(super) enum Task {
    /// Put the weight set into the store.
    Weights,
    Capture(usize),
    Compile(Box<Compile>),
    Gate(usize),
    /// Make the model in one more worker, which then captures too. The build does not wait for it: one that is still at it
    /// when nothing is left to capture is ended by what is measured, or by the end.
    Open,
    /// Measure a program that passed its gate once more, while nothing else is done, and publish it.
    Measure(usize, Box<Draft>),
    /// Start a worker: there will be compiles for it.
    Start,
}

/// What a worker has got ready for, and can do at once.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Role {
    #[default]
    Nothing,
    /// To capture: it has made the model already, or tried to.
    Open,
    Capture,
    Compile,
}

/// What a thread has to work with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hands {
    /// No worker.
    Empty,
    /// A worker that is not ready yet: only what needs none can be done meanwhile.
    Starting(Role),
    /// A worker; whether it holds the model, and the same one as the first worker.
    Ready { role: Role, opened: bool },
}

impl Hands {
    /// Returns whether the worker holds the model, or is about to.
    pub fn may_hold_model(self) -> bool {
        use Role::Open;
        matches!(
            self,
            Self::Starting(Open)
                | Self::Ready { role: Open, .. }
                | Self::Ready { opened: true, .. }
        )
    }

    /// Returns whether the worker has the compiler at hand, or will have.
    pub fn compile(self) -> bool {
        use Role::Compile;
        matches!(
            self,
            Self::Starting(Compile) | Self::Ready { role: Compile, .. }
        )
    }
}
