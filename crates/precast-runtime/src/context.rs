//! What runs a program's steps: one container per step, bound to one weight set, for one caller at a time.
//!
//! Each container loads the GPU code of its artifact for itself. What is captured into a graph needs its containers only
//! while it is captured, so there one per artifact serves all its steps, bound anew for each of them: 24 equal blocks load
//! their code once. Where a graph answers, no other containers are made.
//!
//! A call has an execution context to itself until it is over, so no container ever has two callers. A program makes contexts
//! on first use, up to a limit, and keeps them; further callers wait. A context with an earlier weight set is bound to the new
//! one before its next call, so a call sees one weight set, whole.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use precast_store::{
    Device, Digest, Target,
    record::{Artifact, Program, Step},
};
use smallvec::SmallVec;

use super::{
    RuntimeError, TorchError,
    ffi::{
        Container, Handle, Handles, Library, Meta, Operators, RawStream, RunError, Stolen, Weight,
    },
    layout::bytes_of,
    pad::Buffers,
    pool::{Pool, Wait},
    prepacked::Bound,
    trial::Trials,
    weights::Weights,
};

/// What a program is loaded with.
#[derive(Clone)]
pub(super) struct With {
    pub device: Device,
    pub weights: Arc<Weights>,
    pub aliases: Arc<BTreeMap<String, String>>,
    /// Tensors that its code makes itself.
    pub extras: Option<Arc<Weights>>,
    /// How many callers it may have at once.
    pub instances: usize,
    /// What this host is.
    pub host: Arc<Target>,
    /// How its artifacts' first load is tried.
    pub trials: Option<Arc<Trials>>,
}

/// What the execution contexts of one program on one device are made of.
pub(super) struct Plan {
    pub program: Arc<Program>,
    pub module: Arc<str>,
    pub device: Device,
    pub steps: Vec<PlanStep>,
    pub aliases: Arc<BTreeMap<String, String>>,
    /// Tensors that the program's code makes itself: bindings may name them beside the weight set's.
    pub extras: Option<Arc<Weights>>,
}

/// One step, loaded.
pub(super) struct PlanStep {
    pub artifact: Arc<Artifact>,
    pub library: Arc<Library>,
    /// What it calls custom operators through.
    pub operators: Option<Arc<Operators>>,
    /// For each input of the step: its value number, and whether nobody reads it afterwards.
    pub inputs: Vec<(usize, bool)>,
}

/// One caller's containers.
pub(super) struct ExecutionContext {
    // Before the weights, which the containers point to.
    containers: Vec<Container>,
    /// For each step its container and what that is bound to before the step, where steps share containers.
    turns: Option<Vec<Turn>>,
    pub weights: Arc<Weights>,
    /// Where what was made of them lies, sorted.
    made: Vec<usize>,
    /// Which of [`ExecutionContexts`]' swaps they came with.
    swaps: u64,
    pub buffers: Buffers,
}

/// A step's turn with a container that it shares.
struct Turn {
    container: usize,
    weights: Vec<Arc<Weight>>,
}

impl Plan {
    /// Makes an execution context bound to `weights`.
    pub fn context(&self, weights: Arc<Weights>) -> Result<ExecutionContext, RuntimeError> {
        let containers = self.steps.iter().map(|step| self.container(step));
        let mut context = self.empty(weights.clone());
        context.containers = containers.collect::<Result<_, _>>()?;
        self.bind(&mut context, weights)?;
        Ok(context)
    }

    /// Makes an execution context whose steps share one container per artifact, for what runs it a few times only.
    pub fn shared_context(&self, weights: Arc<Weights>) -> Result<ExecutionContext, RuntimeError> {
        let mut context = self.empty(weights);
        let mut known: BTreeMap<Digest, usize> = BTreeMap::new();
        let mut turns = Vec::with_capacity(self.steps.len());
        for (step, record) in self.steps.iter().zip(&self.program.steps) {
            let container = match known.get(&record.artifact) {
                Some(&container) => container,
                None => {
                    context.containers.push(self.container(step)?);
                    known.insert(record.artifact, context.containers.len() - 1);
                    context.containers.len() - 1
                }
            };
            let weights = self.constants(
                &step.artifact,
                record,
                &context.containers[container],
                &context.weights,
            )?;
            turns.push(Turn { container, weights });
        }
        context.turns = Some(turns);
        Ok(context)
    }

    fn empty(&self, weights: Arc<Weights>) -> ExecutionContext {
        ExecutionContext {
            containers: Vec::new(),
            turns: None,
            weights,
            made: Vec::new(),
            swaps: 0,
            buffers: Buffers::new(self.program.inputs.len()),
        }
    }

    fn container(&self, step: &PlanStep) -> Result<Container, RuntimeError> {
        let artifact = &step.artifact;
        let _span = tracing::info_span!("container", object = %artifact.object.short()).entered();
        let container = Container::new(&step.library, step.operators.clone(), self.device);
        let container = container.map_err(|reason| self.no_container(artifact, reason))?;
        let count = |what, expected, got| match expected == got {
            true => Ok(()),
            false => Err(RuntimeError::WrongCount {
                artifact: artifact.id,
                what,
                expected,
                got,
            }),
        };
        count("inputs", artifact.inputs.len(), container.inputs())?;
        count("outputs", artifact.outputs.len(), container.outputs())?;
        Ok(container)
    }

    /// Binds an execution context of [`Self::context`] to a weight set. On failure the execution context must not be used.
    pub fn bind(
        &self,
        context: &mut ExecutionContext,
        weights: Arc<Weights>,
    ) -> Result<(), RuntimeError> {
        context.made.clear();
        for ((step, record), container) in self
            .steps
            .iter()
            .zip(&self.program.steps)
            .zip(&mut context.containers)
        {
            let bound = self.constants(&step.artifact, record, container, &weights)?;
            let dense = bound.iter().map(|weight| weight.handle().meta());
            let places = dense.filter(Meta::dense).map(|meta| meta.storage());
            context
                .made
                .extend(places.filter(|&place| !self.owns(&weights, place)));
            container
                .bind(bound)
                .map_err(|reason| self.no_container(&step.artifact, reason))?;
        }
        context.made.sort_unstable();
        context.made.dedup();
        context.weights = weights;
        Ok(())
    }

    /// Returns the weight of each constant of a container; every one must be there with equal dtype and shape.
    fn constants(
        &self,
        artifact: &Artifact,
        step: &Step,
        container: &Container,
        weights: &Weights,
    ) -> Result<Vec<Arc<Weight>>, RuntimeError> {
        let _span = tracing::info_span!("bind", object = %artifact.object.short()).entered();
        let bound = Bound {
            weights,
            extras: self.extras.as_deref(),
            aliases: &self.aliases,
            artifact,
            binding: &step.binding,
        };
        let find = |constant: &super::ffi::Constant| {
            let layout = bound.layout(&constant.fqn)?;
            let bytes = bytes_of(&layout.shape, layout.dtype);
            // An artifact of the CPU says how much room it would make: the next multiple of 64 (torch's
            // codegen/cpp_wrapper_cpu.py, `_align(data_size)`). What it reads is the tensor's own bytes.
            let fits = [Some(bytes), bytes.checked_next_multiple_of(64)];
            if constant.dtype != Some(layout.dtype) || !fits.contains(&Some(constant.bytes)) {
                return Err(format!(
                    "the record says {} {:?}, the artifact has {} bytes of {}",
                    layout.dtype,
                    layout.shape,
                    constant.bytes,
                    constant
                        .dtype
                        .map_or("an unknown dtype", |dtype| dtype.name())
                )
                .into());
            }
            bound.weight(&constant.fqn, true)
        };
        let unbound = |constant: &super::ffi::Constant, reason| RuntimeError::Unbound {
            artifact: artifact.id,
            constant: constant.fqn.clone(),
            reason,
        };
        let unprepared = |constant: &super::ffi::Constant, reason| RuntimeError::Unprepared {
            artifact: artifact.id,
            constant: constant.fqn.clone(),
            reason,
        };
        let constants = container.constants().iter();
        constants
            .map(|constant| {
                let mut made = artifact.prepared.iter();
                match made.find(|made| made.name == constant.fqn) {
                    Some(made) => bound
                        .prepared(made)
                        .map_err(|reason| unprepared(constant, reason)),
                    None => find(constant).map_err(|reason| unbound(constant, reason)),
                }
            })
            .collect()
    }

    /// Runs the steps on one execution context and returns the program's results in order, and behind them the outcomes of its checks.
    ///
    /// Every value is dropped after the last step that reads it.
    pub fn execute(
        &self,
        context: &mut ExecutionContext,
        inputs: Handles,
        stream: RawStream,
    ) -> Result<Handles, RuntimeError> {
        let mut values: SmallVec<[Option<Handle>; 16]> = SmallVec::new();
        values.resize_with(self.program.values, || None);
        for (value, input) in values.iter_mut().zip(inputs) {
            *value = Some(input);
        }
        for (i, (step, record)) in self.steps.iter().zip(&self.program.steps).enumerate() {
            let container = context
                .container(i)
                .map_err(|reason| self.no_container(&step.artifact, reason))?;
            let mut stolen = Stolen::default();
            for &(value, last) in &step.inputs {
                let handle = match last {
                    true => values[value].take(),
                    false => values[value].as_ref().map(Handle::share),
                };
                stolen.push(handle.ok_or_else(|| {
                    self.malformed(format!("value {value} is read before it is written"))
                })?);
            }
            let mut made = Handles::new();
            container
                .run(stolen, stream, &mut made)
                .map_err(|error| match error {
                    RunError::Failed(message) => self.failed(&record.name, message),
                    RunError::Check(check) => self.check_failed(check),
                })?;
            for (&value, handle) in record.outputs.iter().zip(made) {
                values[value] = Some(handle);
            }
        }
        let mut results = Handles::new();
        let checks = self.program.checks.iter().map(|check| check.value);
        let wanted: SmallVec<[usize; 8]> =
            self.program.results.iter().copied().chain(checks).collect();
        for (i, &value) in wanted.iter().enumerate() {
            // A value may be given back twice; then both are handles of one tensor, as in eager.
            let handle = match wanted[i + 1..].contains(&value) {
                true => values[value].as_ref().map(Handle::share),
                false => values[value].take(),
            };
            results.push(
                handle.ok_or_else(|| self.malformed(format!("result {value} is never written")))?,
            );
        }
        Ok(results)
    }

    /// Returns whether an address lies in memory that is not the caller's: weights or the program's own constants.
    pub fn owns(&self, weights: &Weights, address: usize) -> bool {
        weights.contains(address)
            || self
                .extras
                .as_ref()
                .is_some_and(|extras| extras.contains(address))
    }

    /// Returns what tells the program from others of its module.
    pub fn bucket(&self) -> String {
        self.program.bucket()
    }

    fn no_container(&self, artifact: &Artifact, reason: TorchError) -> RuntimeError {
        RuntimeError::NoContainer {
            artifact: artifact.id,
            reason,
        }
    }

    fn malformed(&self, reason: String) -> RuntimeError {
        RuntimeError::Malformed {
            program: self.program.id,
            reason,
        }
    }

    /// Returns what is answered when all `contexts` are taken for longer than the caller waits.
    pub fn busy(&self, contexts: usize) -> RuntimeError {
        RuntimeError::Busy {
            module: self.module.clone(),
            bucket: self.bucket(),
            contexts,
        }
    }

    pub fn check_failed(&self, check: String) -> RuntimeError {
        RuntimeError::CheckFailed {
            module: self.module.clone(),
            bucket: self.bucket(),
            check,
        }
    }

    pub fn failed(&self, step: &str, message: TorchError) -> RuntimeError {
        RuntimeError::Failed {
            module: self.module.clone(),
            bucket: self.bucket(),
            step: step.to_owned(),
            message,
        }
    }
}

impl ExecutionContext {
    /// Returns whether an address is that of something made of the weights.
    pub fn made(&self, address: usize) -> bool {
        self.made.binary_search(&address).is_ok()
    }

    /// Returns the container of a step, bound to what the step needs.
    fn container(&mut self, step: usize) -> Result<&mut Container, TorchError> {
        let Some(turns) = &self.turns else {
            return Ok(&mut self.containers[step]);
        };
        let turn = &turns[step];
        let container = &mut self.containers[turn.container];
        container.bind(turn.weights.clone())?;
        Ok(container)
    }
}

/// The execution contexts of one program.
pub(super) struct ExecutionContexts {
    pool: Pool<ExecutionContext>,
    weights: Mutex<Arc<Weights>>,
    /// Counts swaps: an execution context of an earlier count is bound again before it is handed out.
    swaps: AtomicU64,
}

impl ExecutionContexts {
    /// Starts with none.
    pub fn new(weights: Arc<Weights>, limit: usize) -> Self {
        Self {
            weights: Mutex::new(weights),
            swaps: AtomicU64::new(0),
            pool: Pool::new(limit),
        }
    }

    /// Runs `work` on an execution context that it has alone, bound to the newest weights; waits while all are taken.
    pub fn with<R>(
        &self,
        plan: &Plan,
        wait: Wait,
        work: impl FnOnce(&mut ExecutionContext) -> Result<R, RuntimeError>,
    ) -> Result<R, RuntimeError> {
        let newest = |context: Option<ExecutionContext>| {
            // Read after the execution context is the caller's: a swap that was over before the call is seen.
            let swaps = self.swaps.load(Ordering::Acquire);
            match context {
                Some(context) if context.swaps == swaps => Ok(context),
                other => self.bound(plan, other),
            }
        };
        let done = self.pool.with(wait, newest, work);
        done.unwrap_or_else(|| Err(plan.busy(self.pool.limit())))
    }

    /// Makes an execution context, or binds an earlier one, to the newest weights.
    fn bound(
        &self,
        plan: &Plan,
        context: Option<ExecutionContext>,
    ) -> Result<ExecutionContext, RuntimeError> {
        let (weights, swaps) = {
            let weights = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
            (weights.clone(), self.swaps.load(Ordering::Acquire))
        };
        let mut context = match context {
            Some(mut context) => {
                plan.bind(&mut context, weights)?;
                context
            }
            None => plan.context(weights)?,
        };
        context.swaps = swaps;
        Ok(context)
    }

    /// Makes every call that begins from now on use `weights`. Those under way finish with what they have.
    pub fn swap(&self, weights: Arc<Weights>) {
        let mut held = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        *held = weights;
        self.swaps.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests;
