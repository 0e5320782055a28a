//! The last rung of the ladder: a program's exported graph, run without Python.
//!
//! It serves a program whose artifact does not load or was never made. The graph holds no weights: they are passed
//! as inputs, so they are those every other program uses. It is a list of operator calls, which the shim makes. It is read
//! and loaded when the first call needs it.

use std::sync::{Arc, Mutex, PoisonError};

use precast_store::{
    Device, Digest,
    record::{Eager as Exported, Program},
};
use smallvec::SmallVec;

use super::{
    RuntimeError, TorchError, calls,
    context::With,
    ffi::{Calls, Handle, Handles, Weight},
    identity, operators,
    pad::Buffers,
    pool::{Pool, Wait},
    source::Source,
    weights::Weights,
};

type Aliases = std::collections::BTreeMap<String, String>;

pub(super) struct Eager {
    program: Arc<Program>,
    module: Arc<str>,
    exported: Exported,
    aliases: Arc<Aliases>,
    extras: Option<Arc<Weights>>,
    object: Digest,
    device: Device,
    source: Arc<dyn Source>,
    /// Loaded on first use. A caller has one alone.
    pool: Pool<EagerContext>,
    bound: Mutex<Arc<Bound>>,
}

/// A loaded list of calls, and the buffers of padded calls.
pub(super) struct EagerContext {
    pub calls: Calls,
    pub buffers: Buffers,
}

struct Bound {
    weights: Arc<Weights>,
    tensors: Vec<Arc<Weight>>,
}

impl Eager {
    /// Reads the graph's record and binds its weights; the graph itself is left for the first call.
    pub fn new(
        source: &Arc<dyn Source>,
        program: &Arc<Program>,
        exported: &Exported,
        with: &With,
    ) -> Result<Self, RuntimeError> {
        let With {
            weights,
            aliases,
            extras,
            ..
        } = with.clone();
        let key = exported.artifact;
        let record = identity::artifact(&**source, &key, (with.device, &*with.host))?;
        operators::prepare(source, &record, with.device)?;
        let module = program.module.as_str().into();
        let bound = bind(exported, weights, &aliases, extras.as_deref())?;
        Ok(Self {
            program: program.clone(),
            module,
            exported: exported.clone(),
            object: record.object,
            device: with.device,
            aliases,
            extras,
            source: source.clone(),
            pool: Pool::new(with.instances),
            bound: Mutex::new(bound),
        })
    }

    /// Makes every call that begins from now on use `weights`.
    pub fn swap(&self, weights: Arc<Weights>) -> Result<(), RuntimeError> {
        *self.bound.lock().unwrap_or_else(PoisonError::into_inner) = bind(
            &self.exported,
            weights,
            &self.aliases,
            self.extras.as_deref(),
        )?;
        Ok(())
    }

    /// Finds out whether `weights` can be bound.
    pub fn accepts(&self, weights: Arc<Weights>) -> Result<(), RuntimeError> {
        bind(
            &self.exported,
            weights,
            &self.aliases,
            self.extras.as_deref(),
        )
        .map(drop)
    }

    /// Runs `work` on a list of calls that it has alone, loading one if none is idle; waits while all are taken.
    pub fn with<R>(
        &self,
        wait: Wait,
        work: impl FnOnce(&mut EagerContext) -> Result<R, RuntimeError>,
    ) -> Result<R, RuntimeError> {
        let loaded = |idle: Option<EagerContext>| idle.map_or_else(|| self.load(), Ok);
        self.pool.with(wait, loaded, work).unwrap_or_else(|| {
            Err(RuntimeError::Busy {
                module: self.module.clone(),
                bucket: self.program.bucket(),
                contexts: self.pool.limit(),
            })
        })
    }

    fn load(&self) -> Result<EagerContext, RuntimeError> {
        let bytes = operators::read(&self.source, &self.object)?;
        let calls = calls::read(&bytes, self.device);
        Ok(EagerContext {
            calls: calls.map_err(|message| self.failed(message))?,
            buffers: Buffers::new(self.program.inputs.len()),
        })
    }

    /// Runs it on inputs of the bucket's sizes. Returns the outputs, behind them the outcomes of the checks, and the weights
    /// they were made with.
    pub fn run(
        &self,
        calls: &mut Calls,
        inputs: &Handles,
    ) -> Result<(Handles, Arc<Weights>), RuntimeError> {
        let bound = self
            .bound
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let weights = bound.tensors.iter().map(|weight| weight.handle());
        let flat: SmallVec<[&Handle; 32]> = inputs.iter().chain(weights).collect();
        let outputs = calls
            .run(
                &flat,
                self.program.outputs.len() + self.program.checks.len(),
            )
            .map_err(|message| self.failed(message))?;
        Ok((outputs, bound.weights.clone()))
    }

    fn failed(&self, message: TorchError) -> RuntimeError {
        RuntimeError::Failed {
            module: self.module.clone(),
            bucket: self.program.bucket(),
            step: "eager".to_owned(),
            message,
        }
    }
}

fn bind(
    exported: &Exported,
    weights: Arc<Weights>,
    aliases: &Aliases,
    extras: Option<&Weights>,
) -> Result<Arc<Bound>, RuntimeError> {
    let find = |name: &String| {
        let found = weights
            .any(name, aliases)
            .or_else(|| extras?.any(name, aliases));
        found.ok_or_else(|| RuntimeError::Unbound {
            artifact: exported.artifact,
            constant: name.clone(),
            reason: format!("the weight set has no tensor `{name}`").into(),
        })
    };
    let tensors = exported
        .weights
        .iter()
        .map(find)
        .collect::<Result<_, _>>()?;
    Ok(Arc::new(Bound { weights, tensors }))
}
