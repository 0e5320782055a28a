//! One caller's exclusive part of a program: containers, eager's calls or a captured graph, and buffers of the bucket's
//! sizes.
//!
//! A call takes a slot for its time, a [`Fixed`](super::fixed::Fixed) program holds one, and a
//! [`Session`](super::session::Session) one of each program that it uses. No other caller uses it during this time, so
//! no container ever has two callers, and a failure of one caller does not affect another. Slots are created on first
//! use, up to a limit, and kept. A slot with an earlier weight set is bound to the new one before its next caller
//! receives it, so a caller sees one weight set, whole.
//!
//! `loaded.rs` makes and binds slots. `loaded/run.rs` runs them: `run_slot` is for a call, a session and a warm-up,
//! `run_static` for a fixed program. `run_static` calls `run_slot`, except for a graph.

use std::sync::Arc;

use super::{
    eager::EagerCalls,
    ffi::Handles,
    graphs::Captured,
    pad::Buffers,
    plan::{Containers, Plan},
    weights::Weights,
};

/// One caller's hold of a program.
pub(super) struct Slot {
    // Before the weights and the buffers, which it points to.
    pub runner: Runner,
    pub buffers: Buffers,
    /// The states of the session that has it, in the program's order.
    pub states: Handles,
    pub weights: Arc<Weights>,
    /// The number of swaps before it was bound.
    pub swaps: u64,
}

/// The part of a slot that runs.
pub(super) enum Runner {
    Containers(Containers),
    Eager(EagerCalls),
    Graph(Box<Captured>),
}

impl Slot {
    /// Returns the buffers as inputs. Leaves out missing ones.
    pub fn static_inputs(&self) -> Handles {
        let buffers = self.buffers.inputs.iter().flatten();
        buffers.map(|buffer| buffer.tensor.share()).collect()
    }

    /// Returns whether a storage belongs to the slot or the model, so that it can't be returned to a caller.
    pub fn owns(&self, plan: &Plan, storage: usize) -> bool {
        let prepared = match &self.runner {
            Runner::Containers(containers) => containers.prepared(storage),
            Runner::Eager(_) | Runner::Graph(_) => false,
        };
        prepared || plan.owns(&self.weights, storage)
    }
}
