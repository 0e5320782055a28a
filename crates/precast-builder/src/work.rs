//! The threads of a build, one for each worker: each takes the next task that it can do, and keeps its result for the
//! tasks that wait for it.
//!
//! Captures, compiles and the shim run in the thread's worker process, which is started on first use. Gates run in
//! separate processes, and the thread itself stores weights.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    fs, io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, ScopedJoinHandle},
};

use precast_store::{Digest, PartKind, record::Shim};

use super::{
    BuildError,
    estimate::Estimate,
    executor::Executor,
    gate::{StoredWeights, candidates::Candidate},
    model::LoadedModel,
    options::Outcome,
    progress::Event,
    protocol::{Finding, SavedWeights},
    publish::{self, MissingArtifact},
    remote::Turn,
    schedule::{Able, Captures, Next, Schedule},
    sharing::FromRemote,
    slot::{Context, Slot},
    task::{Job, LARGE, Task, TaskFailure, jobs},
    tasks::{self, CaptureFailure, CapturedProgram},
    weights::{self, FromFile},
    worker::Worker,
    workers::Workers,
};
use crate::plan::Plan;

/// The results of a build's tasks.
#[derive(Default)]
pub(super) struct Done {
    /// By index into the plan's items.
    pub outcomes: HashMap<usize, Outcome>,
    pub compiled: usize,
    /// Programs that other builds make, by index into the plan's items.
    pub taken: Vec<(usize, Digest)>,
    /// The findings that stop the build of modules that can't be captured, by their place in the spec.
    pub findings: BTreeMap<usize, Vec<Finding>>,
}

/// A worker that was started before there was a task for it.
pub(super) type Starting<'s> = ScopedJoinHandle<'s, Result<Worker, BuildError>>;

struct Work<'a> {
    context: &'a Context<'a>,
    jobs: &'a [Job<'a>],
    /// Whether the weights have [`LARGE`] bytes.
    large: bool,
    /// The weights that the worker saved, and those of the spec's file.
    saved: (&'a SavedWeights, Option<&'a FromFile>),
    results: Mutex<Results>,
    /// The leases of programs that are being made, by job. Apart from the results: they are looked at while the schedule is
    /// locked, and the schedule is locked while the results are.
    leases: Mutex<HashMap<usize, Box<dyn Send>>>,
}

/// Results that other tasks wait for.
#[derive(Default)]
struct Results {
    weights: Option<StoredWeights>,
    shim: Option<Shim>,
    /// Captured programs that wait for their artifacts, by job.
    captured: HashMap<usize, CapturedProgram>,
    compiles: HashMap<Digest, MissingArtifact>,
    failures: HashMap<Digest, Arc<TaskFailure>>,
    /// Warnings of programs that were reported already.
    noted: BTreeSet<String>,
    done: Done,
}

/// Builds the missing programs of a plan, with a worker that holds the model and other started workers. Also returns
/// the weight set and the shim from the store.
pub(super) fn run(
    workers: &Workers<'_>,
    plan: &Plan,
    (first, model): (Worker, &LoadedModel),
    starting: Vec<Starting<'_>>,
    saved: (&SavedWeights, Option<&FromFile>),
    shim: Option<Shim>,
) -> Result<(Done, StoredWeights, Shim), BuildError> {
    let options = workers.options;
    let jobs = jobs(options.spec, plan);
    let files = model.weights.iter().chain(&saved.0.file);
    let bytes = files.map(|file| Ok(fs::metadata(file)?.len()));
    let bytes: Option<u64> = bytes.sum::<io::Result<u64>>().ok();
    let large = bytes.is_none_or(|bytes| bytes >= LARGE);
    let schedule = Schedule::of_build(jobs.len(), shim.is_none(), large);
    let models = bytes.map_or(0, |bytes| workers.more_models(bytes));
    let context = Context {
        workers,
        model,
        executor: Executor::new(schedule, models, starting.len(), &workers.stop),
        estimate: Mutex::new(Estimate::new(plan, options.store)),
    };
    let work = Work {
        context: &context,
        jobs: &jobs,
        large,
        saved,
        results: Mutex::new(Results {
            shim,
            ..Results::default()
        }),
        leases: Mutex::default(),
    };
    thread::scope(|scope| {
        let mut starting = starting.into_iter();
        let (work, mut first) = (&work, Some(first));
        for number in 0..options.jobs.max(1) {
            let first = first.take();
            let starting = first.is_none().then(|| starting.next()).flatten();
            scope.spawn(move || work.serve(number, first, starting));
        }
    });
    let results = work.results.into_inner();
    let results = results.unwrap_or_else(PoisonError::into_inner);
    context.executor.finish()?;
    match (results.weights, results.shim) {
        (Some(weights), Some(shim)) => Ok((results.done, weights, shim)),
        _ => Err(BuildError::Interrupted),
    }
}

impl Work<'_> {
    fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<usize, Box<dyn Send>>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the lease of a program back.
    fn release(&self, job: usize) {
        let lease = self.leases().remove(&job);
        // Its end takes a moment.
        drop(lease);
    }

    /// Runs tasks until none is left.
    fn serve(&self, number: usize, worker: Option<Worker>, starting: Option<Starting<'_>>) {
        let executor = &self.context.executor;
        let mut started = starting.is_some();
        // A worker that could not get ready is started again when there is a task for it.
        let ready = starting.and_then(|starting| starting.join().ok().and_then(Result::ok));
        let mut slot = Slot::new(self.context, number, worker.or(ready));
        let able = |slot: &Slot<'_>| Able {
            captures: if self.is_busy() {
                Captures::Never
            } else {
                slot.able().captures
            },
            ..slot.able()
        };
        while let Some(next) = executor.next(|| able(&slot), std::mem::take(&mut started)) {
            match next {
                Next::Run(task) => executor.ended(task, self.run_task(&mut slot, task)),
                Next::LoadModel => executor.loaded(slot.load_model()),
                _ => slot.end_worker(),
            }
        }
        // Nothing waits for a model that is still being loaded.
        self.context.workers.stop.set();
    }

    /// Returns the remote, if the programs are shared with other builds. Large weights are in memory for all gates at the
    /// end, so that such a build would have the leases of all programs until then.
    fn sharing(&self) -> Option<&FromRemote<'_>> {
        let workers = self.context.workers;
        workers.remote.filter(|_| workers.leave && !self.large)
    }

    /// Returns whether as many programs are being made as this build has workers for, and one more: further ones are left
    /// to other builds.
    fn is_busy(&self) -> bool {
        self.leases().len() > self.context.options().jobs.max(1)
    }

    /// Returns whether this build is to make a program; if not, another one makes or has made it.
    fn is_own(&self, number: usize) -> bool {
        let job = &self.jobs[number];
        // What eager runs costs a capture only, and may turn out to be impossible.
        let Some(remote) = self.sharing().filter(|_| job.item.form.compiled) else {
            return true;
        };
        let stop = || self.context.workers.stop.is_set();
        match (remote.remote).lease(PartKind::Program, &job.id, false, &stop) {
            Some(Turn::Own(lease)) => {
                self.leases().insert(number, lease);
                true
            }
            Some(Turn::Made) if remote.fetch_program(&job.id) => {
                let outcome = remote.outcome(job.id);
                self.results().done.outcomes.insert(job.index, outcome);
                false
            }
            Some(Turn::Other) => {
                self.results().done.taken.push((job.index, job.id));
                false
            }
            Some(Turn::Made) | None => true,
        }
    }

    /// Returns whether the task succeeded; an error ends the build.
    fn run_task(&self, slot: &mut Slot<'_>, task: Task) -> Result<bool, BuildError> {
        let Workers {
            options,
            progress,
            scratch,
            ..
        } = self.context.workers;
        match task {
            Task::StoreWeights => {
                let (saved, file) = self.saved;
                let stored = weights::put(options, saved, file, *progress, scratch)?;
                self.results().weights = Some(stored);
            }
            Task::Shim => {
                let shim = tasks::compile_shim(slot)?;
                self.results().shim = Some(shim);
            }
            Task::Capture(job) => return Ok(self.is_own(job) && self.capture(slot, job)?),
            Task::Compile(artifact) => return self.compile(slot, artifact),
            Task::Gate(job) => {
                let outcome = self.gate(slot, job)?;
                let index = self.jobs[job].index;
                if let (Some(remote), Some(id)) = (self.sharing(), outcome.id()) {
                    remote.offer(id);
                }
                self.results().done.outcomes.insert(index, outcome);
                self.release(job);
            }
        }
        Ok(true)
    }

    fn capture(&self, slot: &mut Slot<'_>, number: usize) -> Result<bool, BuildError> {
        let job = &self.jobs[number];
        match tasks::capture(slot, job) {
            Ok((program, compiles)) => {
                self.captured(number, program, compiles);
                Ok(true)
            }
            Err(CaptureFailure { failure, module }) => {
                if let Some(module) = module
                    && self.is_first_check(job)
                {
                    let findings = tasks::check(slot, job, *module);
                    let mut results = self.results();
                    results.done.findings.insert(job.item.module, findings);
                }
                let outcome = self.failed(job, *failure)?;
                self.results().done.outcomes.insert(job.index, outcome);
                self.release(number);
                Ok(false)
            }
        }
    }

    /// Returns whether no other bucket of the module has been checked.
    fn is_first_check(&self, job: &Job<'_>) -> bool {
        match self.results().done.findings.entry(job.item.module) {
            Entry::Vacant(entry) => entry.insert(vec![]).is_empty(),
            Entry::Occupied(_) => false,
        }
    }

    /// Keeps a captured program for its gate, and schedules the compiles that it needs.
    fn captured(&self, number: usize, program: CapturedProgram, compiles: Vec<MissingArtifact>) {
        let (context, job) = (self.context, &self.jobs[number]);
        let keys = program.candidates.iter().flat_map(|one| &one.keys);
        let artifacts: BTreeSet<&Digest> = keys.collect();
        let mut results = self.results();
        for message in &program.captured.notes {
            if results.noted.insert(message.clone()) {
                context.event(&Event::Note { message });
            }
        }
        context.event(&Event::Captured {
            module: &job.module.name,
            bucket: &job.bucket,
            steps: program.captured.steps.len(),
            artifacts: artifacts.len(),
            missing: compiles.len(),
        });
        context.estimate().lacked(compiles.len());
        results.captured.insert(number, program);
        for compile in compiles {
            let (key, size) = (compile.key, compile.segment.graph.len());
            let gates = match self.large {
                true => 0..self.jobs.len(),
                false => number..number + 1,
            };
            let lacks = |schedule: &mut Schedule<Task>| schedule.lacks(gates, key, size);
            if context.executor.with(lacks) {
                results.compiles.insert(key, compile);
            }
        }
    }

    /// Compiles an artifact. The reason of a failure is kept for the gates that wait for it.
    fn compile(&self, slot: &mut Slot<'_>, artifact: Digest) -> Result<bool, BuildError> {
        let Some(compile) = self.results().compiles.remove(&artifact) else {
            unreachable!("a compile is kept with its task, and runs once");
        };
        let compiled = tasks::compile(slot, compile);
        let mut results = self.results();
        match compiled {
            Ok(missing) => results.done.compiled += usize::from(missing),
            Err(failure) if failure.error.ends_build() => return Err(failure.error),
            Err(failure) => {
                results.failures.insert(artifact, Arc::new(failure));
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gates a program and publishes it.
    fn gate(&self, slot: &mut Slot<'_>, number: usize) -> Result<Outcome, BuildError> {
        let job = &self.jobs[number];
        let mut results = self.results();
        let captured = results.captured.remove(&number);
        let (Some(mut captured), Some(weights), Some(shim)) =
            (captured, results.weights.clone(), results.shim.clone())
        else {
            unreachable!("a gate waits for its capture, the weights and the shim");
        };
        let refused = refuse(&mut captured.candidates, &results.failures);
        drop(results);
        if let Some(failure) = refused {
            return publish::failure(self.context, job, &failure);
        }
        let compiled = captured.compiled;
        let gated = tasks::gate(slot, job, captured, &weights, &shim);
        gated
            .and_then(|program| publish::program(self.context, job, &program, compiled))
            .or_else(|failure| self.failed(job, failure))
    }

    /// Records a failure of a program. An error that ends the build is returned.
    fn failed(&self, job: &Job<'_>, failure: TaskFailure) -> Result<Outcome, BuildError> {
        if failure.error.ends_build() {
            return Err(failure.error);
        }
        publish::failure(self.context, job, &failure)
    }
}

/// Refuses candidates with an artifact that could not be compiled. Returns the reason where no candidate is left.
fn refuse(
    candidates: &mut [Candidate],
    failures: &HashMap<Digest, Arc<TaskFailure>>,
) -> Option<Arc<TaskFailure>> {
    let mut first = None;
    for candidate in candidates.iter_mut() {
        if let Some(failure) = candidate.keys.iter().find_map(|key| failures.get(key)) {
            candidate.refused = Some(failure.error.to_string());
            first.get_or_insert_with(|| failure.clone());
        }
    }
    first.filter(|_| candidates.iter().all(|one| one.refused.is_some()))
}
