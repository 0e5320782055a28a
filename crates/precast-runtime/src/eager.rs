//! The last rung of the ladder: a program's exported graph, run without Python.
//!
//! It serves a program whose artifact does not load or was never built. The graph holds no weights: they are passed as
//! inputs, so they are shared with every other program. It is a list of operator calls, which the shim runs. It is read
//! when a slot needs it.

use std::sync::Arc;

use precast_store::{Digest, record::Eager as Exported};
use smallvec::SmallVec;

use super::{
    RuntimeError, calls,
    ffi::{Calls, Handle, Handles, Weight},
    identity, operators,
    plan::{Plan, With},
    source::Source,
    weights::Weights,
};

/// A program's exported graph.
pub(super) struct Eager {
    exported: Exported,
    object: Digest,
    source: Arc<dyn Source>,
}

/// One caller's list of calls, bound to one weight set.
pub(super) struct EagerCalls {
    calls: Calls,
    bound: Vec<Arc<Weight>>,
}

impl Eager {
    /// Reads the record of the graph.
    pub fn new(
        source: &Arc<dyn Source>,
        exported: &Exported,
        with: &With,
    ) -> Result<Self, RuntimeError> {
        let record = identity::artifact(&**source, &exported.artifact, (with.device, &*with.host))?;
        operators::prepare(source, &record, with.device)?;
        Ok(Self {
            exported: exported.clone(),
            object: record.object,
            source: source.clone(),
        })
    }

    /// Loads the calls.
    pub fn calls(&self, plan: &Plan, weights: &Weights) -> Result<EagerCalls, RuntimeError> {
        let bytes = operators::read(&self.source, &self.object)?;
        let calls =
            calls::read(&bytes, plan.device).map_err(|error| plan.failed("eager", error))?;
        let bound = self.bind(plan, weights)?;
        Ok(EagerCalls { calls, bound })
    }

    /// Binds loaded calls to another weight set.
    pub fn bind_again(
        &self,
        calls: &mut EagerCalls,
        plan: &Plan,
        weights: &Weights,
    ) -> Result<(), RuntimeError> {
        calls.bound = self.bind(plan, weights)?;
        Ok(())
    }

    /// Returns the weights that the graph needs. Fails if one is missing.
    pub fn bind(&self, plan: &Plan, weights: &Weights) -> Result<Vec<Arc<Weight>>, RuntimeError> {
        let find = |name: &String| {
            let any = |set: &Weights| set.any(name, &plan.aliases);
            let found = any(weights).and_then(|found| match (found, &plan.extras) {
                (None, Some(extras)) => any(extras),
                (found, _) => Ok(found),
            });
            let found = found.and_then(|found| {
                found.ok_or_else(|| format!("the weight set has no tensor `{name}`").into())
            });
            found.map_err(|reason| RuntimeError::Unbound {
                artifact: self.exported.artifact,
                constant: name.clone(),
                reason,
            })
        };
        self.exported.weights.iter().map(find).collect()
    }
}

impl EagerCalls {
    /// Runs the calls on inputs of the bucket's sizes. Returns the outputs, then the outcomes of the checks.
    pub fn evaluate(&mut self, plan: &Plan, inputs: &Handles) -> Result<Handles, RuntimeError> {
        let _span = tracing::trace_span!("eager", module = &*plan.module).entered();
        let weights = self.bound.iter().map(|weight| weight.handle());
        let flat: SmallVec<[&Handle; 32]> = inputs.iter().chain(weights).collect();
        let outputs = plan.program.outputs.len() + plan.program.checks.len();
        let outputs = self.calls.invoke(&flat, outputs);
        outputs.map_err(|error| plan.failed("eager", error))
    }
}
