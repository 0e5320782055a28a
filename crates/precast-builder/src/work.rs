//! Runs the tasks of a build: one thread per worker takes the next task that it can do from the
//! [schedule](super::schedule).
//!
//! Captures, compiles and the shim run in the thread's worker process, which is started on first use. Gates run in processes of their
//! own, and the thread itself stores weights. When no capture and no compile remains, workers end, which frees memory for
//! gates.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use precast_store::{
    Digest,
    record::{Shim, SourceFile},
};
use serde_json::Value;

use super::{
    BuildError,
    estimate::Estimate,
    gate::StoredWeights,
    limits::Stop,
    model::{First, open_model},
    options::{Options, Outcome},
    progress::{Event, Progress},
    protocol::{Finding, Request, SavedWeights},
    schedule::{Captures, Kind, Next, Schedule, Task},
    task::{CapturedProgram, Compile},
    weights,
    worker::Worker,
    workers::Workers,
};
use crate::plan::{Item, Plan};

/// One program to make.
pub(super) struct Job<'a> {
    /// Index into the plan's items.
    pub index: usize,
    pub item: &'a Item,
    pub id: Digest,
    pub request: &'a Value,
}

/// What was done.
#[derive(Default)]
pub(super) struct Done {
    /// By index into the plan's items.
    pub outcomes: HashMap<usize, Outcome>,
    pub compiled: usize,
    /// What stops the build of modules that can't be captured, by their place in the spec.
    pub findings: BTreeMap<usize, Vec<Finding>>,
}

/// What a thread does, as progress names it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    LoadModel,
    Inputs,
    Capture,
    Check,
    Compile,
    Shim,
    Gate,
    Measure,
}

impl Action {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::LoadModel => "open",
            Self::Inputs => "inputs",
            Self::Capture => "capture",
            Self::Check => "check",
            Self::Compile => "compile",
            Self::Shim => "shim",
            Self::Gate => "gate",
            Self::Measure => "measure",
        }
    }

    /// Returns the kind of task whose time this is.
    fn kind(self) -> Option<Kind> {
        match self {
            Self::Capture => Some(Kind::Capture),
            Self::Compile => Some(Kind::Compile),
            Self::Gate => Some(Kind::Gate),
            Self::Shim => Some(Kind::Shim),
            Self::LoadModel | Self::Inputs | Self::Check | Self::Measure => None,
        }
    }
}

/// A worker that was started before there was a task for it.
pub(super) type Starting<'s> = ScopedJoinHandle<'s, Result<Worker, BuildError>>;

/// A thread's place for a worker process.
pub(super) struct Slot {
    number: usize,
    worker: Option<Box<Worker>>,
    /// Whether its worker still counts as one that is being started.
    starting: bool,
    /// Whether its worker failed to make the same model as the first one: then it captures nothing.
    other_model: bool,
}

impl Slot {
    fn captures(&self) -> Captures {
        let loaded = self.worker.as_ref().is_some_and(|worker| worker.opened);
        match (self.number, self.other_model) {
            (0, _) => Captures::Holds,
            (_, true) => Captures::Never,
            _ if loaded => Captures::Holds,
            _ => Captures::MayLoad,
        }
    }
}

/// Why an artifact could not be compiled, with the worker's log.
pub(super) type CompileFailure = Arc<(BuildError, Vec<u8>)>;

pub(super) struct Work<'a> {
    pub workers: &'a Workers<'a>,
    pub options: &'a Options<'a>,
    pub progress: &'a dyn Progress,
    pub plan: &'a Plan,
    pub jobs: &'a [Job<'a>],
    given: SavedWeights,
    /// Tells the model's weights from others.
    fingerprint: Option<String>,
    pub weights: OnceLock<StoredWeights>,
    pub shim: OnceLock<Shim>,
    state: Mutex<State>,
    changed: Condvar,
    /// Ends the loads of further models.
    loads: Stop,
    /// Warnings of programs that were reported already.
    pub noted: Mutex<BTreeSet<String>>,
}

/// What the threads share.
pub(super) struct State {
    pub schedule: Schedule,
    pub estimate: Estimate,
    /// Captured programs that wait for their artifacts, by job.
    pub captured: HashMap<usize, CapturedProgram>,
    pub compiles: HashMap<Digest, Compile>,
    pub failures: HashMap<Digest, CompileFailure>,
    /// How many more workers may load the model.
    more_models: usize,
    /// Workers that wait for a task, or are being started: compiles are left to them before others are started.
    idle: usize,
    pub done: Done,
    fatal: Option<BuildError>,
}

/// Does `jobs`, starting with a worker that holds the model and those that were started. Returns the weight set and the
/// shim too, as the store has them.
pub(super) fn run(
    workers: &Workers<'_>,
    plan: &Plan,
    jobs: &[Job<'_>],
    first: First,
    starting: Vec<Starting<'_>>,
    weights: SavedWeights,
    shim: Option<Shim>,
) -> Result<(Done, StoredWeights, Shim), BuildError> {
    let named = workers.options.spec.model.weights.file();
    let work = Work {
        workers,
        options: workers.options,
        progress: workers.progress,
        plan,
        jobs,
        weights: OnceLock::new(),
        shim: shim.clone().map_or_else(OnceLock::new, OnceLock::from),
        fingerprint: first.fingerprint,
        state: Mutex::new(State {
            schedule: Schedule::new(jobs.len(), shim.is_none()),
            estimate: Estimate::new(plan, workers.options.store),
            captured: HashMap::new(),
            compiles: HashMap::new(),
            failures: HashMap::new(),
            more_models: workers.more_models(named.or(weights.file.as_deref())),
            idle: starting.len(),
            done: Done::default(),
            fatal: None,
        }),
        given: weights,
        changed: Condvar::new(),
        loads: workers.stop.of_part(),
        noted: Mutex::default(),
    };
    thread::scope(|scope| {
        let mut starting = starting.into_iter();
        let mut first = Some(Box::new(first.worker));
        for number in 0..workers.options.jobs.max(1) {
            let (worker, starting) = match first.take() {
                Some(worker) => (Some(worker), None),
                None => (None, starting.next()),
            };
            let slot = Slot {
                number,
                worker,
                starting: false,
                other_model: false,
            };
            let work = &work;
            scope.spawn(move || work.serve(slot, starting));
        }
    });
    let state = work.state.into_inner();
    let state = state.unwrap_or_else(PoisonError::into_inner);
    match (
        state.fatal,
        work.weights.into_inner(),
        work.shim.into_inner(),
    ) {
        (Some(error), ..) => Err(error),
        (None, Some(weights), Some(shim)) => Ok((state.done, weights, shim)),
        (None, ..) => Err(BuildError::Interrupted),
    }
}

impl Work<'_> {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does tasks until nothing is left that could bring more.
    fn serve(&self, mut slot: Slot, starting: Option<Starting<'_>>) {
        if let Some(starting) = starting {
            // One that could not get ready is started again when there is a task for it.
            slot.worker = starting.join().ok().and_then(Result::ok).map(Box::new);
            slot.starting = true;
        }
        while let Some(next) = self.next(&mut slot) {
            match next {
                Next::Run(task) => {
                    let result = self.run_task(&mut slot, task);
                    let mut state = self.lock();
                    let done = matches!(result, Ok(true));
                    state.schedule.ended(task, done);
                    if let Err(error) = result {
                        state.fatal.get_or_insert(error);
                        // Nothing waits for the other tasks.
                        self.workers.stop.set();
                    }
                }
                _ => self.load_model(&mut slot),
            }
            self.changed.notify_all();
        }
        // Nor for a model that is still being loaded.
        self.workers.stop.set();
    }

    /// Returns whether the task succeeded; an error ends the build.
    fn run_task(&self, slot: &mut Slot, task: Task) -> Result<bool, BuildError> {
        match task {
            Task::StoreWeights => self.store_weights().map(|()| true),
            Task::Shim => self.compile_shim(slot).map(|()| true),
            Task::Capture(job) => self.capture(slot, job),
            Task::Compile(artifact) => self.compile(slot, artifact),
            Task::Gate(job) => self.gate(slot.number, job).map(|()| true),
        }
    }

    fn next(&self, slot: &mut Slot) -> Option<Next> {
        let mut state = self.lock();
        // Under the lock of its first choice: between two, another thread would start a worker for what this one can do.
        state.idle -= usize::from(std::mem::take(&mut slot.starting));
        loop {
            if self.workers.stop.is_set() && !state.schedule.over() {
                state.fatal.get_or_insert(BuildError::Interrupted);
            }
            if state.fatal.is_some() {
                return None;
            }
            let may_load = state.more_models > 0;
            if !state.schedule.needs_workers() && slot.worker.is_some() {
                // Ended without the lock: that takes a while where it holds memory of a device.
                drop(state);
                slot.worker = None;
                state = self.lock();
                continue;
            }
            let reserved = if slot.worker.is_some() { 0 } else { state.idle };
            let next = state.schedule.next(slot.captures(), may_load, reserved);
            state.more_models -= usize::from(next == Next::LoadModel);
            match next {
                Next::Over => return None,
                Next::Wait => {
                    let idle = usize::from(slot.worker.is_some());
                    state.idle += idle;
                    let changed = self.changed.wait(state);
                    state = changed.unwrap_or_else(PoisonError::into_inner);
                    state.idle -= idle;
                }
                next => return Some(next),
            }
        }
    }

    fn store_weights(&self) -> Result<(), BuildError> {
        let stored = weights::put(self.options, &self.given, self.progress)?;
        let written = self.given.file.as_ref();
        if let Some(written) = written.filter(|file| file.starts_with(self.workers.scratch)) {
            // The store has it; if this fails, it goes with the folder that it is in.
            let _ = fs::remove_file(written);
        }
        self.weights.get_or_init(|| stored);
        Ok(())
    }

    /// Loads the model in this thread's worker too. Why it could not is of no matter: the first worker has it.
    fn load_model(&self, slot: &mut Slot) {
        let number = slot.number;
        let loaded = match self.worker(slot) {
            Ok(worker) => {
                let load = || self.load_same_model(worker);
                self.timed(number, Action::LoadModel, "the model", load).0
            }
            Err(error) => Err(error),
        };
        let kept = matches!(
            loaded,
            Ok(_) | Err(BuildError::Worker(_) | BuildError::SourceChanged { .. })
        );
        if !kept {
            // It is in an unknown state, or gone.
            slot.worker = None;
        }
        let mut state = self.lock();
        state.schedule.loaded();
        if !matches!(loaded, Ok(true)) {
            slot.other_model = true;
            // The entry does not make the same model twice.
            state.more_models = 0;
        }
    }

    /// Loads the model in a worker beside the first. Returns whether it is the same one; else the worker captures nothing.
    fn load_same_model(&self, worker: &mut Worker) -> Result<bool, BuildError> {
        worker.stop = self.loads.clone();
        let opened = open_model(
            self.options.spec,
            &self.options.request.command_line,
            worker,
        );
        worker.stop = self.workers.stop.clone();
        let opened = opened?;
        let known = self.plan.known.as_ref().map(|known| &known.entry.sources);
        let changed = |source: &&SourceFile| known.is_some_and(|known| !known.contains(source));
        if let Some(source) = opened.sources.iter().find(changed) {
            worker.opened = false;
            return Err(BuildError::SourceChanged {
                path: source.path.clone(),
            });
        }
        worker.opened = opened.fingerprint == self.fingerprint;
        Ok(worker.opened)
    }

    /// Runs `body` between the two events of an action, and returns its result with the seconds it took.
    pub(super) fn timed<T>(
        &self,
        worker: usize,
        action: Action,
        what: &str,
        body: impl FnOnce() -> T,
    ) -> (T, f64) {
        let job = action.name();
        self.progress.event(&Event::Begin { worker, job, what });
        let remaining = {
            let state = self.lock();
            state.estimate.remaining(&state.schedule, self.options.jobs)
        };
        if let Some(seconds) = remaining {
            self.progress.event(&Event::Remaining { seconds });
        }
        let started = Instant::now();
        let result = body();
        let seconds = started.elapsed().as_secs_f64();
        if let Some(kind) = action.kind() {
            self.lock().estimate.took(kind, seconds);
        }
        self.progress.event(&Event::End {
            worker,
            job,
            what,
            seconds,
        });
        (result, seconds)
    }

    /// Runs `body`, which is part of a task, while no other task runs.
    pub(super) fn exclusive<T>(&self, body: impl FnOnce() -> T) -> T {
        let mut state = self.lock();
        state.schedule.wait_exclusive();
        // Others may wait as well, and for this one.
        self.changed.notify_all();
        while !state.schedule.begin_exclusive() {
            let changed = self.changed.wait(state);
            state = changed.unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        let result = body();
        self.lock().schedule.end_exclusive();
        self.changed.notify_all();
        result
    }

    /// Ends the loads of further models, for they take memory, and returns when they have ended. No other one begins.
    fn end_loads(&self) {
        self.loads.set();
        let mut state = self.lock();
        state.more_models = 0;
        while state.schedule.loads_model() {
            let changed = self.changed.wait(state);
            state = changed.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Runs `body` as [`Self::timed`] does, and once more with no other task running when memory was short: another
    /// task, the worker itself or another process on the device may have had it. `failed` returns the error.
    pub(super) fn retried<T>(
        &self,
        worker: usize,
        action: Action,
        what: &str,
        mut body: impl FnMut() -> T,
        failed: impl Fn(&T) -> Option<&BuildError>,
    ) -> (T, f64) {
        let first = self.timed(worker, action, what, &mut body);
        // A worker that exceeded a limit of its own, or had no company, exceeds it again.
        let again = |error: &&BuildError| match error {
            BuildError::WorkerGreedy { .. } => {
                self.options.memory.is_none() && self.options.jobs > 1
            }
            _ => error.short_of_memory(),
        };
        let Some(error) = failed(&first.0).filter(again) else {
            return first;
        };
        self.progress.event(&Event::Again {
            worker,
            job: action.name(),
            what,
            message: &error.to_string(),
        });
        self.end_loads();
        self.exclusive(|| self.timed(worker, action, what, body))
    }

    /// Asks this thread's worker, as [`Self::retried`] does, and returns the answer with the worker's log of it.
    pub(super) fn ask<T: serde::de::DeserializeOwned>(
        &self,
        slot: &mut Slot,
        (action, what): (Action, &str),
        request: &Request,
        limit: Duration,
    ) -> (Result<T, BuildError>, Vec<u8>) {
        let limit = self.limit(limit);
        let number = slot.number;
        let ask = || self.ask_once(slot, request, limit);
        self.retried(number, action, what, ask, |(answer, _)| {
            answer.as_ref().err()
        })
        .0
    }

    fn ask_once<T: serde::de::DeserializeOwned>(
        &self,
        slot: &mut Slot,
        request: &Request,
        limit: Duration,
    ) -> (Result<T, BuildError>, Vec<u8>) {
        let number = slot.number;
        let worker = match self.worker(slot) {
            Ok(worker) => worker,
            Err(error) => return (Err(error), vec![]),
        };
        // A worker that was started again has no model yet.
        let needs_model = matches!(
            request,
            Request::Capture { .. } | Request::Inputs { .. } | Request::Check { .. }
        );
        if needs_model && !worker.opened {
            let loaded = self.load_same_model(worker);
            worker.opened |= matches!(loaded, Ok(false));
            if let Err(error) = loaded {
                if !matches!(error, BuildError::Worker(_)) {
                    slot.worker = None;
                }
                return (Err(error), vec![]);
            }
        }
        let start = worker.log_len();
        let mut on_event = |phase: &str| {
            let worker = number;
            self.progress.event(&Event::Phase { worker, phase });
        };
        let answer = worker.call(request, limit, &mut on_event);
        let log = worker.log_since(start);
        if !matches!(answer, Ok(_) | Err(BuildError::Worker(_))) {
            // It is in an unknown state, or gone: the next task gets a fresh one.
            slot.worker = None;
        }
        (answer, log)
    }

    /// Returns how long something may take.
    pub(super) fn limit(&self, usual: Duration) -> Duration {
        self.options.timeout.unwrap_or(usual)
    }

    /// Returns the worker of a slot, starting one where there is none.
    fn worker<'w>(&self, slot: &'w mut Slot) -> Result<&'w mut Worker, BuildError> {
        let worker = match slot.worker.take() {
            Some(worker) => worker,
            None => Box::new(self.workers.start(slot.number)?.0),
        };
        Ok(slot.worker.insert(worker))
    }
}
