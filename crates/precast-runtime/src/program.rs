//! One program, loaded on one device: checked, its artifacts loaded, ready to run as execution contexts or as a CUDA graph.
//!
//! Calls of it are in `program/run.rs`.

use std::{collections::BTreeMap, sync::Arc};

use precast_store::{
    Device,
    record::{Artifact, Eager as Exported, Program},
};

use super::{
    RuntimeError,
    context::{ExecutionContexts, Plan, PlanStep, With},
    eager::Eager,
    ffi::{Handles, Library, cuda},
    flags::Watch,
    graphs::{Graphed, Session, Shared},
    identity, operators,
    pad::{self, Buffer, Cut},
    pool::Wait,
    source::Source,
    weights::Weights,
    wiring::{check_layouts, last_uses},
};

mod run;

pub(super) use run::Sizes;

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
                let mut objects = artifact.libraries.clone();
                objects.push(artifact.object);
                trials.first(&**source, &objects, with.device)?;
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
                contexts.with(&self.plan, Wait::Forever, |_| Ok(()))
            }
            _ => Ok(()),
        }
    }

    /// Loads a program's exported graph in place of its artifacts.
    pub fn eager(
        source: &Arc<dyn Source>,
        program: Arc<Program>,
        exported: &Exported,
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
        let eager = Eager::new(source, &program, exported, &with)?;
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
                    %reason,
                    "no CUDA graph for a program"
                );
                (self.graph, self.refused) = (None, Some(reason.to_string()));
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

    /// Loads the exported graph of a program that runs as one. Fails when it does not load.
    pub fn interpret(&self) -> Result<(), RuntimeError> {
        match &self.runner {
            Runner::Eager(eager) => eager.with(Wait::Forever, |_| Ok(())),
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
}
