//! One build from plan to release.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};

use super::{
    BuildError, Launcher, TORCH,
    crew::Crew,
    gate,
    jobs::{self, Ahead, Job},
    limits::{Limits, Stop},
    progress::{Event, Progress},
    protocol::{Opened, Request, Weights},
    scratch::{Scratch, sweep},
    task::Role,
    weights::{self, StoredWeights},
    worker::Worker,
};
use crate::{
    Digest, Target,
    plan::{self, Item, Known, Plan, State},
    record::{Entry, Release, SCHEMA},
    spec::Spec,
    store::{Store, StoreError},
    target::Torch,
};

/// How long importing the entry and making the model may take.
const OPEN_LIMIT: Duration = Duration::from_secs(1800);

/// What a build is given.
pub struct Options<'a> {
    pub spec: &'a Spec,
    pub store: &'a Store,
    pub launcher: Launcher,
    /// The command that checks a candidate: see [`gate`].
    pub gate: gate::Launcher,
    /// Where the build's private folder is made; it is removed at the end.
    pub scratch: PathBuf,
    pub request: plan::Request,
    /// How many workers may be alive at once.
    pub jobs: usize,
    /// Bytes that each worker may take; none: as much as the machine has, for all of them together.
    pub memory: Option<u64>,
    /// How long one capture, compile or check may take; none: what no sound one takes.
    pub timeout: Option<Duration>,
    /// Fail instead of compiling.
    pub locked: bool,
    /// Publish the result under this name, or not at all.
    pub release: Option<String>,
    /// Set from outside to end the build early.
    pub cancel: Arc<AtomicBool>,
}

/// What became of one program.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It was in the store already.
    Hit(Digest),
    /// It was built.
    Built(Built),
    /// It could not be built; the store keeps the log under the key.
    Failed {
        key: Option<Digest>,
        message: String,
        location: Option<String>,
        /// What to do about it.
        hint: String,
        raise: bool,
        /// What is there all the same, where it could not be measured again.
        kept: Option<Digest>,
    },
    /// It can't be built, and the module can do without it.
    Skipped { why: String },
}

/// A program that this build made.
#[derive(Clone, Debug)]
pub struct Built {
    pub id: Digest,
    /// Distinct artifacts it calls.
    pub artifacts: usize,
    /// Of these, compiled for it.
    pub compiled: usize,
}

/// What a build did.
#[derive(Clone, Debug)]
pub struct Summary {
    /// `module batch=1 seq=32` and what became of it, in the order of the spec.
    pub programs: Vec<(String, Outcome)>,
    /// Artifacts compiled in this build.
    pub compiled: usize,
    /// The release that now holds the programs.
    pub release: Option<Release>,
    /// Whether that release was published by this build.
    pub published: bool,
    pub seconds: f64,
}

impl Summary {
    /// Returns how many programs failed, and how many of them under `raise`.
    pub fn failed(&self) -> (usize, usize) {
        let failed = |raised: bool| {
            let is = |outcome: &Outcome| matches!(outcome, Outcome::Failed { raise, .. } if *raise || !raised);
            self.programs
                .iter()
                .filter(|(_, outcome)| is(outcome))
                .count()
        };
        (failed(false), failed(true))
    }
}

/// Makes whatever is missing. Finished programs stay in the store whatever happens after.
pub fn build(options: &Options<'_>, progress: &dyn Progress) -> Result<Summary, BuildError> {
    let started = Instant::now();
    let Options { spec, store, .. } = options;
    let known = plan::known(spec, store)?;
    let plan = plan::plan(spec, Some(store), known, &options.request)?;
    let missing = plan.missing().count();
    progress.event(&Event::Planned {
        programs: plan.wanted(),
        missing,
    });
    if missing == 0
        && let Some(same) = same_entry(store, &plan)?
    {
        let weights = weights::kept(options, &same)?;
        let done = jobs::Done::default();
        return summarise(options, &plan, done, Some(weights), started);
    }
    if options.locked && missing > 0 {
        return Err(BuildError::Locked {
            missing,
            total: plan.wanted(),
        });
    }
    sweep(&options.scratch, false);
    let scratch = Scratch::new(&options.scratch)?;

    let crew = Crew {
        options,
        scratch: scratch.path(),
        progress,
        limits: Limits::new(options.memory),
        stop: Stop::new(&options.cancel),
        quiet: RwLock::default(),
        late: Arc::default(),
    };
    thread::scope(|scope| {
        let ahead = crew.start_ahead(&crew.ahead(&plan), scope);
        let result = make(&crew, ahead, started);
        crew.stop.set();
        result
    })
}

/// Makes what is missing once the model says what that is.
fn make(
    crew: &Crew<'_>,
    mut ahead: Vec<Ahead<'_>>,
    started: Instant,
) -> Result<Summary, BuildError> {
    let Crew {
        options, progress, ..
    } = crew;
    let Options { spec, store, .. } = options;
    let (mut first, known) = match open(crew) {
        Err(error) if in_the_way(crew, &error, &mut ahead, started.elapsed()) => open(crew)?,
        opened => opened?,
    };
    let planned = || plan::plan(spec, Some(store), Some(known.clone()), &options.request);
    // gc leaves what is held until the release has it; what went before that is missing in the second plan.
    store.keep(&planned()?.hits())?;
    let plan = planned()?;
    for item in plan.missing() {
        if let State::Miss { reasons, .. } = &item.state {
            let module = &spec.modules[item.module].name;
            progress.event(&Event::Missing {
                module,
                bucket: &item.form.name(),
                reasons,
            });
        }
    }
    let out = crew.scratch.join("weights");
    let weights: Weights = first
        .worker
        .call(&Request::Weights { out }, OPEN_LIMIT, &mut |_| {})?;
    let queue: Vec<Job> = plan
        .items
        .iter()
        .enumerate()
        .filter_map(|(index, item)| match &item.state {
            State::Miss {
                key: Some((id, request)),
                ..
            } => Some(Job {
                index,
                item,
                id: *id,
                request,
            }),
            _ => None,
        })
        .collect();
    let (done, weights) = jobs::run(crew, &plan, &queue, first, ahead, weights)?;
    summarise(options, &plan, done, Some(weights), started)
}

/// The worker that holds the model.
pub(super) struct First {
    pub worker: Worker,
    /// Seconds that making the model took.
    pub seconds: f64,
    pub fingerprint: Option<String>,
}

/// Returns whether a model could not be made in the first worker because others made it at the same time: one of them could,
/// or memory was short, or it failed otherwise, or takes longer than the first one `took` to fail. They are gone then.
fn in_the_way(
    crew: &Crew<'_>,
    error: &BuildError,
    ahead: &mut Vec<Ahead<'_>>,
    took: Duration,
) -> bool {
    /// How much longer the other may take at least.
    const PATIENCE: Duration = Duration::from_secs(3);
    const POLL: Duration = Duration::from_millis(20);
    let failed = matches!(
        error,
        BuildError::Model { .. }
            | BuildError::Worker(_)
            | BuildError::WorkerDied { .. }
            | BuildError::WorkerGreedy { .. }
    );
    if !failed {
        return false;
    }
    let (others, rest): (Vec<_>, Vec<_>) = std::mem::take(ahead)
        .into_iter()
        .partition(|one| one.role == Role::Open);
    *ahead = rest;
    let asked = Instant::now();
    let made = || others.iter().all(|other| other.handle.is_finished());
    // Where memory was short, what becomes of them says no more.
    while !made() && !error.short_of_memory() && asked.elapsed() < took.max(PATIENCE) {
        thread::sleep(POLL);
    }
    // Nobody else makes the model yet.
    crew.late.store(true, Ordering::Relaxed);
    let others: Vec<_> = (others.into_iter())
        .map(|other| other.handle.join())
        .collect();
    crew.late.store(false, Ordering::Relaxed);
    let same = |other: &_| matches!(other, Ok(Err(same)) if BuildError::code(same) == error.code());
    !others.is_empty() && (error.short_of_memory() || !others.iter().all(same))
}

/// Starts the worker that holds the model, and learns from it what keys are made of.
fn open(crew: &Crew<'_>) -> Result<(First, Known), BuildError> {
    let options = crew.options;
    let (mut worker, hello) = crew.start(0)?;
    if hello.torch.split('+').next() != Some(TORCH) {
        return Err(BuildError::WrongTorch {
            program: options.launcher.program.clone(),
            found: hello.torch,
            expected: TORCH,
        });
    }
    let started = Instant::now();
    let opened = match reopen(options, &mut worker, None) {
        Err(BuildError::Worker(error)) if !error.trace.is_empty() => {
            let log = format!("{error}\n\n{}", error.trace);
            let log = options.store.put_bytes(log.as_bytes())?;
            return Err(BuildError::Model { error, log });
        }
        opened => opened?,
    };
    let seconds = started.elapsed().as_secs_f64();
    crew.progress.event(&Event::Opened {
        sources: opened.sources.len(),
        packages: opened.packages.len(),
        seconds,
    });
    let spec = options.spec;
    let entry = Entry {
        entry: spec.model.entry.clone(),
        sources: opened.sources,
        packages: opened.packages,
        declared: opened.declared,
        site_packages: hello.site_packages.clone(),
    };
    let torch = Torch {
        version: hello.torch,
        git: hello.torch_git,
        cuda: hello.cuda,
        cxx11_abi: hello.cxx11_abi,
    };
    let target = Target::on_host(spec.target.device, &spec.target.isa, &torch, &hello.sm);
    let first = First {
        worker,
        seconds,
        fingerprint: opened.fingerprint,
    };
    Ok((first, Known { entry, target }))
}

/// Every callable beside the entry that captures will use: graph passes, and what gives sample inputs.
fn callables(options: &Options<'_>) -> Vec<String> {
    let spec = options.spec;
    let modules = spec.modules.iter().map(|module| &module.compile);
    let layers = modules
        .chain([&spec.compile])
        .chain(options.request.command_line.layers());
    let passes = layers.flat_map(|layer| layer.passes.iter().flatten());
    passes
        .chain(&spec.model.samples)
        .cloned()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

/// Imports the entry in `worker`, so that it can capture; the model may have at `most` so many bytes of weights.
pub(super) fn reopen(
    options: &Options<'_>,
    worker: &mut Worker,
    most: Option<u64>,
) -> Result<Opened, BuildError> {
    let request = Request::Open {
        root: options.spec.root.clone(),
        entry: options.spec.model.entry.clone(),
        device: options.spec.target.device.to_string(),
        also: callables(options),
        weights: options.spec.model.weights.file().map(Path::to_owned),
        most,
    };
    let opened = worker.call(&request, OPEN_LIMIT, &mut |_| {})?;
    worker.opened = true;
    Ok(opened)
}

/// Returns the newest release of a model that was made by what makes it now: its weights are those of now.
fn same_entry(store: &Store, plan: &Plan) -> Result<Option<Release>, StoreError> {
    let (Some(known), Some(last)) = (&plan.known, &plan.release) else {
        return Ok(None);
    };
    if last.entry == known.entry {
        return Ok(Some(last.clone()));
    }
    for seq in (1..last.seq).rev() {
        let older = store.release_at(&last.model, seq)?;
        if let Some(older) = older.filter(|older| older.entry == known.entry) {
            return Ok(Some(older));
        }
    }
    Ok(None)
}

/// Publishes the release, where there is something new to publish, and says what became of every item.
fn summarise(
    options: &Options<'_>,
    plan: &Plan,
    mut done: jobs::Done,
    weights: Option<StoredWeights>,
    started: Instant,
) -> Result<Summary, BuildError> {
    let mut programs = Vec::new();
    for (index, item) in plan.items.iter().enumerate() {
        let outcome = match (&item.state, done.outcomes.remove(&index)) {
            (State::Hit { id }, _) => Outcome::Hit(*id),
            (State::Skipped { why, .. }, _) => Outcome::Skipped { why: why.clone() },
            (State::Miss { .. }, Some(outcome)) => outcome,
            (State::Miss { .. }, None) => return Err(BuildError::Interrupted),
        };
        programs.push((item.name(options.spec), outcome));
    }
    let mut summary = Summary {
        programs,
        compiled: done.compiled,
        release: plan.release.clone(),
        published: false,
        seconds: started.elapsed().as_secs_f64(),
    };
    if let (Some(weights), Some(known)) = (weights, &plan.known) {
        publish(options, plan, known, weights, &mut summary)?;
    }
    Ok(summary)
}

fn publish(
    options: &Options<'_>,
    plan: &Plan,
    known: &Known,
    weights: StoredWeights,
    summary: &mut Summary,
) -> Result<(), BuildError> {
    let id = |(_, outcome): &(String, Outcome)| match outcome {
        Outcome::Hit(id) | Outcome::Failed { kept: Some(id), .. } => Some(*id),
        Outcome::Built(built) => Some(built.id),
        _ => None,
    };
    let mut programs: Vec<Digest> = summary.programs.iter().filter_map(id).collect();
    let (mut missing, _) = summary.failed();
    let mut wanted = plan.wanted();
    if options.request.only.is_some() {
        // A narrowed build keeps what the spec asks for beyond it and the store has.
        let whole = plan::plan(
            options.spec,
            Some(options.store),
            Some(known.clone()),
            &plan::Request {
                only: None,
                // What is not tuned yet is kept as it is.
                tune: false,
                remeasure: false,
                ..options.request.clone()
            },
        )?;
        let own: BTreeMap<&String, Digest> = (summary.programs.iter())
            .filter_map(|program| Some((&program.0, id(program)?)))
            .collect();
        let kept = |item: &Item| match item.state {
            State::Hit { id } => Some(id),
            _ => None,
        };
        let ids = whole.items.iter().map(|item| {
            let own = own.get(&item.name(options.spec)).copied();
            (item, own.or_else(|| kept(item)))
        });
        let (there, not): (Vec<_>, Vec<_>) = ids.partition(|(_, id)| id.is_some());
        programs = there.into_iter().filter_map(|(_, id)| id).collect();
        let lacks = |(item, _): &&(&Item, _)| {
            matches!(item.state, State::Miss { .. }) && !item.form.optional()
        };
        missing = not.iter().filter(lacks).count();
        wanted = whole.wanted();
    }
    if let Some(name) = &options.release
        && missing > 0
    {
        return Err(BuildError::Incomplete {
            name: name.clone(),
            missing,
            total: wanted,
        });
    }
    if programs.is_empty() {
        return Ok(());
    }
    let release = Release {
        schema: SCHEMA,
        model: options.spec.model.name.clone(),
        seq: 0,
        name: options.release.clone(),
        programs,
        weights: weights.object,
        aliases: weights.aliases,
        entry: known.entry.clone(),
        provenance: provenance(),
    };
    // A build that asks for no name is content with a release that has one.
    let same = plan.release.as_ref().is_some_and(|last| {
        Release {
            seq: 0,
            name: options.release.as_ref().and(last.name.clone()),
            provenance: Value::Null,
            ..last.clone()
        } == Release {
            provenance: Value::Null,
            ..release.clone()
        }
    });
    if !same {
        summary.release = Some(options.store.put_release(&release)?);
        summary.published = true;
    }
    Ok(())
}

/// Returns what a record says of its making; never part of a key.
pub(super) fn provenance() -> Value {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    json!({ "precast": env!("CARGO_PKG_VERSION"), "created": now })
}
