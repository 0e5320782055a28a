//! One program, loaded on one device: checked, its artifacts loaded, ready to run as execution contexts or as a CUDA graph.

use std::{collections::BTreeMap, sync::Arc};

use precast_store::{
    Device,
    record::{Artifact, Eager as Archive, Program},
};
use smallvec::SmallVec;

use super::{
    RuntimeError, Tensor,
    context::{ExecutionContexts, Plan, PlanStep, With},
    eager::Eager,
    ffi::{Handle, Handles, Library, Meta, RawStream, cuda},
    flags::{Flags, Watch},
    graphs::{Graphed, Session, Shared},
    identity, operators,
    pad::{self, Buffer, Buffers, Cut},
    pool::Wait,
    source::Source,
    weights::Weights,
    wiring::{check_layouts, last_uses},
};

/// A program that can run.
pub(super) struct Ready {
    pub plan: Plan,
    runner: Runner,
    graph: Option<Graphed>,
    /// What of its values only the device sees, where it is no graph.
    watch: Watch,
    /// Why there is no graph where one was wanted.
    pub refused: Option<String>,
    /// For each output, where a padded call cuts it.
    cuts: Vec<Vec<Cut>>,
    /// Whether eager runs it though its artifact would load, because it was faster when it was built.
    pub preferred: bool,
}

enum Runner {
    Artifacts(ExecutionContexts),
    Eager(Eager),
}

/// What a call gives to a program.
#[derive(Clone, Copy)]
pub(super) enum Sizes<'a> {
    /// The bucket's own.
    Exact,
    /// Smaller ones, in the order of the bucket's dimensions.
    Padded(&'a [i64]),
    /// Any within the bounds of a dynamic program, in the order of its dimensions.
    Dynamic(&'a [i64]),
}

impl Ready {
    /// Loads a program: checks its record and loads its artifacts. It has no execution context yet: [`Self::prepare`] makes one.
    pub fn load(
        source: &Arc<dyn Source>,
        program: Arc<Program>,
        with: With,
    ) -> Result<Self, RuntimeError> {
        let malformed = |reason: String| RuntimeError::Malformed {
            program: program.id,
            reason,
        };
        let last_use = last_uses(&program).map_err(malformed)?;
        let cuts = program
            .outputs
            .iter()
            .map(|output| pad::cuts(output, program.sizes.iter()));
        let cuts = cuts.collect::<Result<_, _>>().map_err(malformed)?;
        let mut steps = Vec::with_capacity(program.steps.len());
        let mut artifacts: BTreeMap<_, Arc<Artifact>> = BTreeMap::new();
        for (i, step) in program.steps.iter().enumerate() {
            let artifact = match artifacts.get(&step.artifact) {
                Some(artifact) => artifact.clone(),
                None => {
                    let host = (with.device, &*with.host);
                    let read = identity::artifact(&**source, &step.artifact, host)?;
                    artifacts
                        .entry(step.artifact)
                        .or_insert(Arc::new(read))
                        .clone()
                }
            };
            if let Some(trials) = &with.trials {
                trials.first(&**source, &artifact)?;
            }
            // Before the artifact, which may need their symbols.
            let operators = operators::prepare(source, &artifact, with.device)?;
            let library = Library::load(&artifact.object, &artifact.target.torch, || {
                let object = artifact.object;
                let unreadable = |source| RuntimeError::Unreadable { object, source };
                source.memfd(&object).map_err(unreadable)
            })?;
            if let Some(trials) = &with.trials {
                trials.loaded(artifact.object);
            }
            let inputs = step
                .inputs
                .iter()
                .map(|&value| (value, last_use[value] == Some(i)))
                .collect();
            steps.push(PlanStep {
                artifact,
                library,
                operators,
                inputs,
            });
        }
        check_layouts(&program, &steps).map_err(malformed)?;
        let plan = Plan {
            program: program.clone(),
            module: program.module.as_str().into(),
            device: with.device,
            steps,
            aliases: with.aliases,
            extras: with.extras,
        };
        let contexts = ExecutionContexts::new(with.weights, with.instances);
        Ok(Self::new(plan, Runner::Artifacts(contexts), cuts))
    }

    fn new(plan: Plan, runner: Runner, cuts: Vec<Vec<Cut>>) -> Self {
        let watch = Watch::new(&plan.program, &plan.module, plan.device, false);
        Self {
            plan,
            runner,
            graph: None,
            watch,
            refused: None,
            cuts,
            preferred: false,
        }
    }

    /// Makes and binds the first execution context where calls will take one, so that what can't be bound fails at load and not at a
    /// call. A program that runs as a graph needs none: its containers would load all code once more, for nobody.
    pub fn prepare(&self) -> Result<(), RuntimeError> {
        match (&self.runner, &self.graph) {
            (Runner::Artifacts(contexts), None) => {
                contexts.take(&self.plan, Wait::Forever).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Loads a program's exported graph in place of its artifacts.
    pub fn eager(
        source: &Arc<dyn Source>,
        program: Arc<Program>,
        archive: &Archive,
        with: With,
    ) -> Result<Self, RuntimeError> {
        let malformed = |reason: String| RuntimeError::Malformed {
            program: program.id,
            reason,
        };
        let cuts = program
            .outputs
            .iter()
            .map(|output| pad::cuts(output, program.sizes.iter()));
        let cuts = cuts.collect::<Result<_, _>>().map_err(malformed)?;
        let eager = Eager::new(source, &program, archive, &with)?;
        let plan = Plan {
            module: program.module.as_str().into(),
            program,
            device: with.device,
            steps: Vec::new(),
            aliases: with.aliases,
            extras: with.extras,
        };
        Ok(Self::new(plan, Runner::Eager(eager), cuts))
    }

    /// Captures the program into a graph; keeps the reason when that can't be done.
    pub fn capture(&mut self, weights: Arc<Weights>, shared: &Arc<Shared>) {
        if let Runner::Eager(..) = self.runner {
            self.refused = Some("it runs as its exported graph".to_owned());
            return;
        }
        if self.plan.program.dynamic.is_some() {
            // A graph is of one size: replayed for another it would answer the wrong thing.
            self.refused = Some("its sizes are not fixed".to_owned());
            return;
        }
        match Graphed::capture(&self.plan, &weights, shared) {
            Ok(graph) => (self.graph, self.refused) = (Some(graph), None),
            Err(reason) => {
                let bucket = self.plan.bucket();
                tracing::warn!(
                    module = &*self.plan.module,
                    bucket,
                    reason,
                    "no CUDA graph for a program"
                );
                (self.graph, self.refused) = (None, Some(reason));
            }
        }
    }

    /// Runs it once on padding, and waits until it is done.
    pub fn warm_up(&self) -> Result<(), RuntimeError> {
        let mut inputs = Handles::new();
        for input in &self.plan.program.inputs {
            let buffer = Buffer::new(input, self.plan.device).and_then(|mut buffer| {
                buffer.rehearse(input)?;
                Ok(buffer)
            });
            inputs.push(buffer.map_err(|error| self.tensor(error))?.tensor);
        }
        match self.run(inputs, Sizes::Exact, Wait::Forever) {
            // It ran; what padding alone makes a model compute need not be an index.
            Ok(_) | Err(RuntimeError::CheckFailed { .. }) => {}
            Err(error) => return Err(error),
        }
        if let Device::Cuda(ordinal) = self.plan.device {
            cuda()
                .and_then(|cuda| cuda.synchronize(ordinal))
                .map_err(|reason| self.plan.failed("warm-up", reason))?;
        }
        Ok(())
    }

    /// Returns what runs it.
    pub fn runner(&self) -> &'static str {
        match &self.graph {
            Some(_) => "graph",
            None if self.is_eager() => "eager",
            None => "artifact",
        }
    }

    /// Loads the interpreter of a program that runs as its exported graph, and says whether it can.
    pub fn interpret(&self) -> Result<(), RuntimeError> {
        match &self.runner {
            Runner::Eager(eager) => eager.take(Wait::Forever).map(drop),
            Runner::Artifacts(_) => Ok(()),
        }
    }

    /// Returns whether its exported graph runs, and not its artifacts.
    pub fn is_eager(&self) -> bool {
        matches!(self.runner, Runner::Eager(..))
    }

    /// Returns whether it runs as a graph.
    pub fn is_graph(&self) -> bool {
        self.graph.is_some()
    }

    /// Returns the graph's static tensors and its launch.
    pub fn session(&self) -> Option<Session<'_>> {
        self.graph.as_ref().map(Graphed::session)
    }

    /// Makes every call that begins after it returns use `weights`. Calls under way finish with what they began with.
    pub fn swap(&self, weights: &Arc<Weights>) -> Result<(), RuntimeError> {
        if let Some(graph) = &self.graph {
            let swapped = graph.swap(&self.plan, weights.clone());
            swapped.map_err(|reason| self.plan.failed("weights", reason))?;
        }
        match &self.runner {
            Runner::Artifacts(contexts) => contexts.swap(weights.clone()),
            Runner::Eager(eager) => eager.swap(weights.clone())?,
        }
        Ok(())
    }

    /// Finds out whether `weights` can be bound, on an execution context that is thrown away.
    pub fn accepts(&self, weights: &Arc<Weights>) -> Result<(), RuntimeError> {
        match &self.runner {
            Runner::Artifacts(_) => self.plan.shared_context(weights.clone()).map(drop),
            Runner::Eager(eager) => eager.accepts(weights.clone()),
        }
    }

    /// Runs it on inputs that were checked. What a device finds of their values comes back as flags.
    pub fn run(
        &self,
        mut inputs: Handles,
        sizes: Sizes<'_>,
        wait: Wait,
    ) -> Result<(SmallVec<[Tensor; 4]>, Option<Flags>), RuntimeError> {
        if let Some(graph) = &self.graph {
            let padded = matches!(sizes, Sizes::Padded(_));
            let (outputs, flags) = graph.run(&self.plan, &inputs, padded, wait)?;
            return Ok((self.finish(outputs, sizes, |_| false)?, flags));
        }
        let mut flags = self
            .watch
            .clamp(&mut inputs, self.plan.device)
            .map_err(|error| self.tensor(error))?;
        let outputs = match &self.runner {
            Runner::Artifacts(contexts) => {
                self.run_steps(contexts, inputs, sizes, wait, flags.as_mut())?
            }
            Runner::Eager(eager) => self.run_eager(eager, inputs, sizes, wait, flags.as_mut())?,
        };
        match (self.plan.device, flags) {
            // There is nothing to wait for.
            (Device::Cpu, Some(flags)) => flags.check().map(|()| (outputs, None)),
            (_, flags) => Ok((outputs, flags)),
        }
    }

    fn run_steps(
        &self,
        contexts: &ExecutionContexts,
        inputs: Handles,
        sizes: Sizes<'_>,
        wait: Wait,
        flags: Option<&mut Flags>,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        let mut taken = contexts.take(&self.plan, wait)?;
        let context = taken.context()?;
        let stream = self.stream()?;
        let inputs = match sizes {
            Sizes::Exact | Sizes::Dynamic(_) => inputs,
            Sizes::Padded(_) => self.padded(&mut context.buffers, inputs, stream)?,
        };
        // Outputs are the caller's: never the memory of an input, a padding buffer or a weight.
        let sources: SmallVec<[usize; 8]> = inputs
            .iter()
            .map(|handle| handle.meta().storage())
            .collect();
        let mut outputs = self.plan.execute(context, inputs, stream)?;
        self.watch.outcomes(&mut outputs, flags)?;
        self.finish(outputs, sizes, |storage| {
            self.plan.owns(&context.weights, storage)
                || context.made(storage)
                || sources.contains(&storage)
        })
    }

    fn run_eager(
        &self,
        eager: &Eager,
        inputs: Handles,
        sizes: Sizes<'_>,
        wait: Wait,
        flags: Option<&mut Flags>,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        let _span = tracing::trace_span!("eager", module = &*self.plan.module).entered();
        let mut taken = eager.take(wait)?;
        let (interpreter, buffers) = taken.parts()?;
        let inputs = match sizes {
            Sizes::Exact | Sizes::Dynamic(_) => inputs,
            Sizes::Padded(_) => self.padded(buffers, inputs, self.stream()?)?,
        };
        let sources: SmallVec<[usize; 8]> = inputs
            .iter()
            .map(|handle| handle.meta().storage())
            .collect();
        let (mut outputs, weights) = eager.run(interpreter, &inputs)?;
        self.watch.outcomes(&mut outputs, flags)?;
        self.finish(outputs, sizes, |storage| {
            self.plan.owns(&weights, storage) || sources.contains(&storage)
        })
    }

    fn padded(
        &self,
        buffers: &mut Buffers,
        inputs: Handles,
        stream: RawStream,
    ) -> Result<Handles, RuntimeError> {
        let last = buffers.last.filter(|&last| last != stream);
        if let (Device::Cuda(ordinal), Some(last)) = (self.plan.device, last) {
            // Another stream may still read the buffers.
            cuda()
                .and_then(|cuda| cuda.wait(stream, last, ordinal))
                .map_err(|reason| self.plan.failed("padding", reason))?;
        }
        buffers.last = Some(stream);
        self.fill(&mut buffers.inputs, inputs)
    }

    /// Puts inputs that are smaller than the bucket into buffers of its size.
    fn fill(
        &self,
        buffers: &mut [Option<Buffer>],
        mut inputs: Handles,
    ) -> Result<Handles, RuntimeError> {
        let _span = tracing::trace_span!("pad", module = &*self.plan.module).entered();
        for ((given, input), buffer) in inputs
            .iter_mut()
            .zip(&self.plan.program.inputs)
            .zip(buffers)
        {
            if given.meta().sizes() == input.layout.shape {
                continue;
            }
            let buffer = match buffer {
                Some(buffer) => buffer,
                none => none.insert(
                    Buffer::new(input, self.plan.device).map_err(|error| self.tensor(error))?,
                ),
            };
            buffer.fill(given).map_err(|error| self.tensor(error))?;
            *given = buffer.tensor.share();
        }
        Ok(inputs)
    }

    fn finish(
        &self,
        outputs: Handles,
        sizes: Sizes<'_>,
        foreign: impl Fn(usize) -> bool,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        let mut finished = SmallVec::new();
        for (i, handle) in outputs.into_iter().enumerate() {
            let meta = handle.meta();
            self.check_output(i, &meta, sizes)?;
            let storage = meta.storage();
            let own: Handle = match foreign(storage) {
                true => handle.copied().map_err(|error| self.tensor(error))?,
                false => handle,
            };
            finished.push(Tensor(match sizes {
                Sizes::Exact | Sizes::Dynamic(_) => own,
                Sizes::Padded(request) => {
                    pad::cut(own, &self.cuts[i], request).map_err(|error| self.tensor(error))?
                }
            }));
        }
        Ok(finished)
    }

    fn stream(&self) -> Result<RawStream, RuntimeError> {
        match self.plan.device {
            Device::Cpu => Ok(RawStream::NONE),
            Device::Cuda(ordinal) => cuda()
                .and_then(|cuda| cuda.current_stream(ordinal))
                .map_err(|reason| RuntimeError::NoDevice {
                    device: self.plan.device,
                    reason,
                }),
        }
    }

    fn check_output(
        &self,
        output: usize,
        meta: &Meta<'_>,
        sizes: Sizes<'_>,
    ) -> Result<(), RuntimeError> {
        let layout = &self.plan.program.outputs[output].layout;
        let shape = match sizes {
            Sizes::Exact | Sizes::Padded(_) => meta.sizes() == layout.shape.as_slice(),
            // Axes that follow a dynamic dimension are known; others may depend on it in ways no record says.
            Sizes::Dynamic(request) => {
                let follows = |cut: &Cut| {
                    let (axis, size) = cut.size(request);
                    meta.sizes().get(axis) == Some(&size)
                };
                meta.sizes().len() == layout.shape.len() && self.cuts[output].iter().all(follows)
            }
        };
        let right = meta.defined()
            && meta.dense()
            && meta.dtype() == Some(layout.dtype)
            && shape
            && meta.device() == Some(self.plan.device);
        if right {
            return Ok(());
        }
        let got = match (meta.defined() && meta.dense(), meta.dtype()) {
            (false, _) => "no dense tensor".to_owned(),
            (true, Some(dtype)) => format!("{dtype} {:?}", meta.sizes()),
            (true, None) => format!("of an unknown dtype, {:?}", meta.sizes()),
        };
        let expected = format!("{} {:?}", layout.dtype, layout.shape);
        let (module, bucket) = (self.plan.module.clone(), self.plan.bucket());
        Err(RuntimeError::BadOutput {
            module,
            bucket,
            output,
            expected,
            got,
        })
    }

    fn tensor(&self, message: String) -> RuntimeError {
        RuntimeError::Tensor {
            module: self.plan.module.clone(),
            message,
        }
    }
}
