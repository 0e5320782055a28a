//! The tasks of a build: functions from an input to an output. They decide nothing about other tasks.

mod capture;
mod compile;
mod gate;

use precast_store::{Digest, record::Shim};

pub(super) use self::{
    capture::{CaptureFailure, capture, check, inputs_request},
    compile::compile,
    gate::gate,
};
use super::{
    BuildError,
    gate::candidates::Candidate,
    progress::Event,
    protocol::Captured,
    shims::{self, CompiledShim},
    slot::Slot,
    task::Action,
};

/// A captured program that waits for its artifacts.
pub(super) struct CapturedProgram {
    pub captured: Captured,
    /// The first candidate is kept unless another is faster.
    pub candidates: Vec<Candidate>,
    /// The earlier program whose choice of a candidate was reused, if any.
    pub chosen_by: Option<Digest>,
    /// The number of artifacts that the store lacked.
    pub compiled: usize,
}

/// Compiles the shim and puts it into the store. Without it nothing can run: an error ends the build.
pub(super) fn compile_shim(slot: &mut Slot<'_>) -> Result<Shim, BuildError> {
    let context = slot.context;
    let target = &context.model.known.target;
    let request = shims::request(target, context.workers.scratch);
    let what = format!("torch {}", target.torch);
    let answer = slot.ask::<CompiledShim>(Action::Shim, &what, &request, shims::LIMIT);
    let (compiled, _) = answer.map_err(|failure| failure.error)?;
    if let Some(why) = &compiled.why {
        let message = format!("no CUDA graphs: {why}");
        context.event(&Event::Note { message: &message });
    }
    shims::put(context.options().store, target, &compiled)
}
