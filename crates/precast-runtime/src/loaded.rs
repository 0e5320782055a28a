//! One program, loaded on one device: it is checked, and its artifacts are loaded.
//!
//! Calls and fixed programs have separate slots, so that a held slot does not delay calls. Slots of sessions belong to
//! the session. A program that runs as a CUDA graph has one slot for calls, captured when it is loaded: replays of a
//! device do not overlap.
//!
//! Calls of it are in `loaded/run.rs`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use precast_store::{
    Device,
    record::{Artifact, Eager as Exported, Program},
};

use super::{
    RuntimeError,
    eager::Eager,
    ffi::{Handle, Handles, Library, cuda},
    flags::Watch,
    graphs::{Capture, Lends, Shared},
    host, identity, operators,
    pad::{self, Buffer, Buffers, Cut},
    plan::{Plan, PlanStep, With},
    pool::{Place, Pool, Wait},
    slot::{Runner, Slot},
    source::Source,
    weights::Weights,
    wiring::{check_layouts, last_uses},
};

mod run;

pub(super) use run::{Answer, Sizes};

/// A program that can run.
pub(super) struct Loaded {
    pub plan: Plan,
    kind: Kind,
    calls: Pool<Slot>,
    fixed: Pool<Slot>,
    /// The weight set of the next callers.
    weights: Mutex<Arc<Weights>>,
    /// The number of swaps. A slot of an earlier number is bound again before its next caller has it.
    swaps: AtomicU64,
    /// The values that only the device sees, where it is no graph.
    watch: Option<Watch>,
    /// The reason that it is no graph, where one was wanted.
    pub refused: Option<String>,
    /// For each output, the cuts of a padded call.
    cuts: Vec<Vec<Cut>>,
    /// Whether eager runs it although its artifact would load, because eager was faster in the build.
    pub preferred: bool,
}

/// The kinds of programs.
enum Kind {
    Artifacts,
    Eager(Eager),
    Graph(Arc<Capture>),
}

impl Loaded {
    /// Loads a program: checks its record and loads its artifacts. It has no slot yet: [`Self::prepare`] creates one.
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
        let cuts = cuts(&program)?;
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
            // The artifact may need symbols of their libraries.
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
        Ok(Self::new(
            Kind::Artifacts,
            steps,
            cuts,
            program.clone(),
            with,
        ))
    }

    fn new(
        kind: Kind,
        steps: Vec<PlanStep>,
        cuts: Vec<Vec<Cut>>,
        program: Arc<Program>,
        with: With,
    ) -> Self {
        let plan = Plan {
            module: program.module.as_str().into(),
            program,
            device: with.device,
            steps,
            aliases: with.aliases,
            extras: with.extras,
            host: with.host,
        };
        Self {
            watch: Watch::new(&plan.program, &plan.module, plan.device, false),
            plan,
            kind,
            calls: Pool::new(with.instances),
            fixed: Pool::new(with.instances),
            weights: Mutex::new(with.weights),
            swaps: AtomicU64::new(0),
            refused: None,
            cuts,
            preferred: false,
        }
    }

    /// Loads a program's exported graph in place of its artifacts. The calls are read by the first slot.
    pub fn eager(
        source: &Arc<dyn Source>,
        program: Arc<Program>,
        exported: &Exported,
        with: With,
    ) -> Result<Self, RuntimeError> {
        let cuts = cuts(&program)?;
        let kind = Kind::Eager(Eager::new(source, exported, &with)?);
        let weights = with.weights.clone();
        let loaded = Self::new(kind, Vec::new(), cuts, program, with);
        loaded.accepts(&weights)?;
        Ok(loaded)
    }

    /// Creates the first slot for calls, so that a program that can't be bound fails at load and not at a call. A
    /// program with states has slots in sessions only.
    pub fn prepare(&self) -> Result<(), RuntimeError> {
        if self.keeps_states() {
            return self.trial_slot().map(drop);
        }
        if self.lends() {
            return Ok(());
        }
        if let Some(mut place) = self.calls.take(Wait::Forever) {
            place.item = Some(self.bind(place.item.take(), &[])?);
        }
        Ok(())
    }

    /// Captures the program into a graph; keeps the reason when that can't be done.
    pub fn capture(&mut self, shared: &Arc<Shared>, lends: Lends) {
        if self.is_eager() {
            self.refused = Some("it runs as its exported graph".to_owned());
            return;
        }
        if self.plan.program.dynamic.is_some() {
            // A graph has one size: its replay for another size would give a wrong answer.
            self.refused = Some("its sizes are not fixed".to_owned());
            return;
        }
        let lends = match self.keeps_states() {
            true => Lends::Nothing,
            false => lends,
        };
        self.kind = Kind::Graph(Capture::new(shared, lends));
        let captured = if self.keeps_states() {
            self.trial_slot().map(|_| None)
        } else if self.lends() {
            // The first call captures it once more, on inputs that another graph lends.
            let tried = self.bind(None, &[]).map(|_| None);
            host::release();
            tried
        } else {
            self.bind(None, &[]).map(Some)
        };
        match captured {
            Ok(None) => {}
            Ok(Some(slot)) => {
                self.calls = Pool::of(slot);
            }
            Err(error) => {
                let reason = match error {
                    RuntimeError::Failed { message, .. } => message,
                    other => other.into(),
                };
                let bucket = self.plan.bucket();
                tracing::warn!(
                    module = &*self.plan.module,
                    bucket,
                    %reason,
                    "no CUDA graph for a program"
                );
                self.refused = Some(reason.to_string());
                self.kind = Kind::Artifacts;
            }
        }
    }

    /// Returns a slot bound to the newest weights: the idle one, bound again if need be, or a new one. A new one of a
    /// graph has those of the inputs that another graph lends as its static inputs.
    fn bind(&self, idle: Option<Slot>, inputs: &[Handle]) -> Result<Slot, RuntimeError> {
        let (weights, swaps) = {
            let weights = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
            (weights.clone(), self.swaps.load(Ordering::Acquire))
        };
        let Some(mut slot) = idle else {
            let buffers = self.lent(inputs);
            let slot = self.slot_with(buffers, &weights, Handles::new(), &[])?;
            return Ok(Slot { swaps, ..slot });
        };
        if slot.swaps != swaps {
            self.bind_again(&mut slot, weights)?;
            slot.swaps = swaps;
        }
        Ok(slot)
    }

    /// Creates a slot with these states, bound permanently to these weights. Those that are not `written` may have other
    /// values afterwards, also after an error.
    pub fn slot(
        &self,
        weights: &Arc<Weights>,
        states: Handles,
        written: &[bool],
    ) -> Result<Slot, RuntimeError> {
        let buffers = Buffers::new(self.plan.program.inputs.len());
        self.slot_with(buffers, weights, states, written)
    }

    fn slot_with(
        &self,
        mut buffers: Buffers,
        weights: &Arc<Weights>,
        states: Handles,
        written: &[bool],
    ) -> Result<Slot, RuntimeError> {
        Ok(Slot {
            runner: self.runner(&mut buffers, (&states, written), weights)?,
            buffers,
            states,
            weights: weights.clone(),
            swaps: 0,
        })
    }

    /// Creates the runner of a slot.
    fn runner(
        &self,
        buffers: &mut Buffers,
        states: (&Handles, &[bool]),
        weights: &Arc<Weights>,
    ) -> Result<Runner, RuntimeError> {
        Ok(match &self.kind {
            Kind::Artifacts => {
                let mut containers = self.plan.containers()?;
                self.plan.bind(&mut containers, weights)?;
                Runner::Containers(containers)
            }
            Kind::Eager(eager) => Runner::Eager(eager.calls(&self.plan, weights)?),
            Kind::Graph(capture) => {
                self.fill_buffers(buffers)?;
                let graph = capture.capture(&self.plan, weights, &buffers.inputs, states);
                Runner::Graph(Box::new(
                    graph.map_err(|reason| self.plan.failed("graph", reason))?,
                ))
            }
        })
    }

    /// Binds a slot to other weights. A graph is captured again, because its kernels have the addresses of its weights.
    fn bind_again(&self, slot: &mut Slot, weights: Arc<Weights>) -> Result<(), RuntimeError> {
        match (&mut slot.runner, &self.kind) {
            (Runner::Containers(containers), _) => self.plan.bind(containers, &weights)?,
            (Runner::Eager(calls), Kind::Eager(eager)) => {
                eager.bind_again(calls, &self.plan, &weights)?;
            }
            (runner, _) => {
                // A slot of a session is never bound again, and no other one has states.
                *runner = self.runner(&mut slot.buffers, (&Handles::new(), &[]), &weights)?;
            }
        }
        slot.weights = weights;
        Ok(())
    }

    /// Returns buffers over the inputs that another graph lends, and none for the others.
    fn lent(&self, inputs: &[Handle]) -> Buffers {
        let mut buffers = Buffers::new(self.plan.program.inputs.len());
        if let Kind::Graph(capture) = &self.kind {
            for (buffer, input) in buffers.inputs.iter_mut().zip(inputs) {
                *buffer = capture.lent(input).map(Buffer::over);
            }
        }
        buffers
    }

    /// Creates the missing buffers of the inputs.
    fn fill_buffers(&self, buffers: &mut Buffers) -> Result<(), RuntimeError> {
        let inputs = buffers.inputs.iter_mut().zip(&self.plan.program.inputs);
        for (buffer, input) in inputs.filter(|(buffer, _)| buffer.is_none()) {
            let made = Buffer::new(input, self.plan.device);
            *buffer = Some(made.map_err(|error| self.plan.tensor(error))?);
        }
        Ok(())
    }

    /// Returns whether it has states, so that only a session runs it.
    pub fn keeps_states(&self) -> bool {
        !self.plan.program.states.is_empty()
    }

    /// Returns a slot with new states, all zero.
    fn trial_slot(&self) -> Result<Slot, RuntimeError> {
        let weights = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let weights = weights.clone();
        let states = self.plan.scratch();
        let states = states.map_err(|error| self.plan.tensor(error))?;
        let written = vec![false; states.len()];
        self.slot(&weights, states, &written)
    }

    /// Runs it once on padding, and waits until it is done.
    pub fn warm_up(&self) -> Result<(), RuntimeError> {
        let mut inputs = Handles::new();
        for input in &self.plan.program.inputs {
            let buffer = Buffer::new(input, self.plan.device).and_then(|mut buffer| {
                buffer.warm_up(input)?;
                Ok(buffer)
            });
            inputs.push(buffer.map_err(|error| self.plan.tensor(error))?.tensor);
        }
        let answer = if self.keeps_states() {
            let mut slot = self.trial_slot()?;
            self.run_slot(&mut slot, inputs, Sizes::Exact)
        } else {
            self.serve(inputs, Sizes::Exact, Wait::Forever)
        };
        match answer {
            // It ran. An index that a model computes only from padding may be out of bounds.
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

    /// Returns the name of its kind.
    pub fn kind(&self) -> &'static str {
        match &self.kind {
            Kind::Graph(_) => "graph",
            Kind::Eager(_) => "eager",
            Kind::Artifacts => "artifact",
        }
    }

    /// Returns whether its exported graph runs, and not its artifacts.
    pub fn is_eager(&self) -> bool {
        matches!(self.kind, Kind::Eager(_))
    }

    /// Returns whether it runs as a CUDA graph.
    pub fn is_graph(&self) -> bool {
        matches!(self.kind, Kind::Graph(_))
    }

    /// Returns whether it is a graph of a pair, which reads what another one lends.
    fn lends(&self) -> bool {
        matches!(&self.kind, Kind::Graph(capture) if capture.lends == Lends::Pairs)
    }

    /// Makes every later caller use `weights`. Callers with a slot finish with their weights.
    pub fn swap(&self, weights: &Arc<Weights>) -> Result<(), RuntimeError> {
        if !self.is_graph() || self.keeps_states() {
            self.set_weights(weights);
            return Ok(());
        }
        // The graph of calls is captured now, so that a failure is the swap's and changes nothing.
        let Some(mut place) = self.calls.take(Wait::Forever) else {
            return Ok(());
        };
        if self.lends() && place.item.is_none() {
            self.set_weights(weights);
            return Ok(());
        }
        let slot = self.bind(place.item.take(), &[])?;
        let slot = place.item.insert(slot);
        self.bind_again(slot, weights.clone())?;
        slot.swaps = self.set_weights(weights);
        Ok(())
    }

    /// Sets the weights of the next callers, and returns the number of swaps with this one.
    fn set_weights(&self, weights: &Arc<Weights>) -> u64 {
        let swaps = {
            let mut held = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
            *held = weights.clone();
            self.swaps.fetch_add(1, Ordering::Release) + 1
        };
        // The next holder may be far away; meanwhile idle slots would keep the old weights.
        self.fixed.drop_idle();
        swaps
    }

    /// Returns whether weights were swapped since the slot was bound.
    pub fn is_outdated(&self, slot: &Slot) -> bool {
        slot.swaps != self.swaps.load(Ordering::Acquire)
    }

    /// Fails if `weights` can't be bound.
    pub fn accepts(&self, weights: &Arc<Weights>) -> Result<(), RuntimeError> {
        if let Kind::Eager(eager) = &self.kind {
            return eager.bind(&self.plan, weights).map(drop);
        }
        let mut containers = self.plan.shared_containers()?;
        self.plan.bind(&mut containers, weights)
    }

    /// Returns a slot for a fixed program, its inputs blank. Fails with [`RuntimeError::Busy`] when all are held.
    pub fn hold(&self) -> Result<Place<'_, Slot>, RuntimeError> {
        let place = self.fixed.take(Wait::no());
        let mut place = place.ok_or_else(|| self.plan.busy(self.fixed.limit()))?;
        let slot = self.bind(place.item.take(), &[])?;
        let slot = place.item.insert(slot);
        self.fill_buffers(&mut slot.buffers)?;
        for buffer in slot.buffers.inputs.iter().flatten() {
            buffer.blank().map_err(|error| self.plan.tensor(error))?;
        }
        Ok(place)
    }
}

/// Returns the cuts of each output.
fn cuts(program: &Program) -> Result<Vec<Vec<Cut>>, RuntimeError> {
    let outputs = program.outputs.iter();
    let cuts = outputs.map(|output| pad::cuts(output, program.sizes.iter()));
    let cuts = cuts.collect::<Result<_, _>>();
    cuts.map_err(|reason| RuntimeError::Malformed {
        program: program.id,
        reason,
    })
}
