//! One build from plan to release.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use precast_store::{
    Digest, Store, StoreError, Target, check_release_name,
    record::{Entry, Provenance, Release, SCHEMA},
    target::Torch,
};

use super::{
    BuildError, Launcher, TORCH, gate,
    limits::{Limits, Stop},
    progress::{Event, Progress},
    protocol::{Opened, Request, Weights},
    scratch::{Scratch, sweep},
    weights::{self, StoredWeights},
    work::{self, Job, Starting},
    worker::Worker,
    workers::Workers,
};
use crate::{
    plan::{self, Item, Known, Plan, Reason, State},
    spec::{CommandLine, Spec},
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
    /// Modules that a release may be without, where nothing answers them.
    pub without: Vec<String>,
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
    },
    /// It can't be built, and the module can do without it.
    Skipped { why: String },
}

impl Outcome {
    /// Returns the program that is there, if one is.
    pub fn id(&self) -> Option<Digest> {
        match self {
            Self::Hit(id) => Some(*id),
            Self::Built(built) => Some(built.id),
            Self::Failed { .. } | Self::Skipped { .. } => None,
        }
    }
}

/// A program that this build made.
#[derive(Clone, Debug)]
pub struct Built {
    pub id: Digest,
    /// Distinct artifacts it calls.
    pub artifacts: usize,
    /// Of these, compiled for it.
    pub compiled: usize,
    /// The program whose gate holds for it, where it was not gated again.
    pub gated_by: Option<Digest>,
    /// Why no smaller request can be padded into its bucket, if none can.
    pub padding_refused: Option<String>,
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
    /// The number of the newest release before this build.
    pub before: Option<u64>,
    /// What that one answers and the one that was published does not.
    pub lost: Vec<String>,
    /// Modules that nothing answers: no release was published, for it would be without them.
    pub unanswered: Vec<String>,
    /// The same, where the caller has said that the release may be without them.
    pub without: Vec<String>,
    /// Modules that got eager for what no bucket covers, though the spec does not ask for it.
    pub eager_unasked: Vec<String>,
    /// The weight sets of the newest release before and of the one that was published, where they differ.
    pub weights_changed: Option<(Digest, Digest)>,
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
    build_all(options, progress).map_err(|error| in_spec(options.spec, error))
}

/// Points at the place in the spec where what a worker refused is written, if it is written there.
pub(super) fn in_spec(spec: &Spec, error: BuildError) -> BuildError {
    let (BuildError::Worker(said) | BuildError::Model { error: said, .. }) = &error else {
        return error;
    };
    let mark = |value: &String| spec.mark(value, said.message.clone(), said.hint());
    match said.spec.as_ref().and_then(mark) {
        Some(marked) => BuildError::Spec(Box::new(marked)),
        None => error,
    }
}

fn build_all(options: &Options<'_>, progress: &dyn Progress) -> Result<Summary, BuildError> {
    let started = Instant::now();
    let Options { spec, store, .. } = options;
    if let Some(name) = &options.release {
        check_release_name(name)?;
    }
    if let Some(file) = spec.model.weights.file() {
        weights::check(file)?;
    }
    let known = plan::known(spec, store)?;
    let plan = plan::plan(spec, Some(store), known, &options.request)?;
    let missing = plan.missing().count();
    progress.event(&Event::Planned {
        programs: plan.wanted(),
        missing,
    });
    if missing == 0
        && let Some(same) = same_entry(options, &plan)?
    {
        let weights = weights::kept(options, &same)?;
        let done = work::Done::default();
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

    let workers = Workers {
        options,
        scratch: scratch.path(),
        progress,
        limits: Limits::new(options.memory),
        stop: Stop::new(&options.cancel),
    };
    thread::scope(|scope| {
        let workers = &workers;
        let numbers = 1..=workers.at_once(&plan);
        let starting = numbers.map(|number| scope.spawn(move || workers.warm_up(number)));
        let result = make(workers, starting.collect(), started);
        workers.stop.set();
        result
    })
}

/// Makes what is missing once the model says what that is.
fn make(
    workers: &Workers<'_>,
    starting: Vec<Starting<'_>>,
    started: Instant,
) -> Result<Summary, BuildError> {
    let Workers {
        options, progress, ..
    } = workers;
    let Options { spec, store, .. } = options;
    let (mut first, known) = open(workers)?;
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
    let out = workers.scratch.join("weights");
    let weights: Weights = first
        .worker
        .call(&Request::Weights { out }, OPEN_LIMIT, &mut |_| {})?;
    let jobs: Vec<Job> = plan
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
    let (done, weights) = work::run(workers, &plan, &jobs, first, starting, weights)?;
    summarise(options, &plan, done, Some(weights), started)
}

/// The worker that holds the model.
pub(super) struct First {
    pub worker: Worker,
    pub fingerprint: Option<String>,
}

/// Starts the worker that holds the model, and learns from it what keys are made of.
fn open(workers: &Workers<'_>) -> Result<(First, Known), BuildError> {
    let options = workers.options;
    let (mut worker, hello) = workers.start(0)?;
    if hello.torch.split('+').next() != Some(TORCH) {
        return Err(BuildError::WrongTorch {
            program: options.launcher.program.clone(),
            found: hello.torch,
            expected: TORCH,
        });
    }
    let started = Instant::now();
    let opened = match open_model(options.spec, &options.request.command_line, &mut worker) {
        Err(BuildError::Worker(error)) if !error.trace.is_empty() => {
            let log = format!("{error}\n\n{}", error.trace);
            let log = options.store.put_bytes(log.as_bytes())?;
            return Err(BuildError::Model { error, log });
        }
        opened => opened?,
    };
    let seconds = started.elapsed().as_secs_f64();
    workers.progress.event(&Event::Opened {
        sources: opened.sources.len(),
        packages: opened.packages.len(),
        seconds,
    });
    for message in &opened.notes {
        workers.progress.event(&Event::Note { message });
    }
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
        fingerprint: opened.fingerprint,
    };
    Ok((first, Known { entry, target }))
}

/// Every callable beside the entry that captures will use: graph passes, and what gives sample inputs.
fn callables(spec: &Spec, command_line: &CommandLine) -> Vec<String> {
    let modules = spec.modules.iter().map(|module| &module.compile);
    let layers = modules.chain([&spec.compile]).chain(command_line.layers());
    let passes = layers.flat_map(|layer| layer.passes.iter().flatten());
    passes
        .chain(&spec.model.samples)
        .cloned()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

/// Imports the entry in `worker` and makes the model, so that the worker can capture.
pub(super) fn open_model(
    spec: &Spec,
    command_line: &CommandLine,
    worker: &mut Worker,
) -> Result<Opened, BuildError> {
    let request = Request::Open {
        root: spec.root.clone(),
        entry: spec.model.entry.clone(),
        device: spec.target.device.to_string(),
        also: callables(spec, command_line),
        weights: spec.model.weights.file().map(Path::to_owned),
    };
    let opened = worker.call(&request, OPEN_LIMIT, &mut |_| {})?;
    worker.opened = true;
    Ok(opened)
}

/// Returns the last release of a model that was made by what makes it now: its weights are those of now.
fn same_entry(options: &Options<'_>, plan: &Plan) -> Result<Option<Release>, StoreError> {
    let Some(known) = &plan.known else {
        return Ok(None);
    };
    let Options { spec, store, .. } = options;
    let from_file = spec.model.weights.file().is_some();
    store.find_release(&spec.model.name, |release| {
        let mut programs = release.programs.iter();
        let program = programs.find_map(|id| store.program(id).ok().flatten());
        let file = program.is_some_and(|one| one.request["common"]["weights"] == "file");
        release.entry == known.entry && file == from_file
    })
}

/// Publishes the release, where there is something new to publish, and says what became of every item.
fn summarise(
    options: &Options<'_>,
    plan: &Plan,
    mut done: work::Done,
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
        before: None,
        lost: vec![],
        unanswered: vec![],
        without: vec![],
        eager_unasked: vec![],
        weights_changed: None,
        seconds: started.elapsed().as_secs_f64(),
    };
    for (item, (_, outcome)) in plan.items.iter().zip(&summary.programs) {
        let title = options.spec.title(item.module);
        if matches!(outcome, Outcome::Built(_)) && item.eager_unasked() {
            summary.eager_unasked.push(title);
        }
    }
    if let (Some(weights), Some(known)) = (weights, &plan.known) {
        publish(options, plan, known, weights, &mut summary)?;
    }
    Ok(summary)
}

/// A program that the spec asks for, and what a release would have of it.
struct Wanted<'a> {
    item: &'a Item,
    id: Option<Digest>,
    /// Whether a narrowed build left it out: it is not there, and nobody tried to make it as it is now.
    left_out: bool,
    /// Whether the module can do without it.
    skipped: bool,
}

/// Returns every program that the spec asks for, also those beyond a narrowed build.
fn wanted<'a>(narrowed: bool, whole: &'a Plan, spec: &Spec, summary: &Summary) -> Vec<Wanted<'a>> {
    let own: BTreeMap<&String, &Outcome> = (summary.programs.iter())
        .map(|(name, outcome)| (name, outcome))
        .collect();
    let all = whole.items.iter().map(|item| {
        let outcome = own.get(&item.name(spec)).copied();
        let (id, left_out) = match (outcome, &item.state) {
            (Some(outcome), _) => (outcome.id(), false),
            (None, State::Hit { id }) => (Some(*id), false),
            (
                None,
                State::Miss {
                    reasons, before, ..
                },
            ) => {
                let failed = matches!(reasons[..], [Reason::FailedBefore { .. }]);
                let needless = item.form.optional() && before.is_none();
                (None, narrowed && !failed && !needless)
            }
            (None, State::Skipped { .. }) => (None, false),
        };
        let skipped = match outcome {
            Some(outcome) => matches!(outcome, Outcome::Skipped { .. }),
            None => matches!(item.state, State::Skipped { .. }),
        };
        Wanted {
            item,
            id,
            left_out,
            skipped,
        }
    });
    all.collect()
}

/// Returns the modules that nothing of a release would answer, though everything was tried.
fn unanswered(wanted: &[Wanted<'_>], spec: &Spec) -> Vec<usize> {
    let none = |module: &usize| {
        let own = wanted
            .iter()
            .filter(|program| program.item.module == *module);
        own.clone().all(|program| program.id.is_none())
            && !own.clone().any(|program| program.left_out)
    };
    (0..spec.modules.len()).filter(none).collect()
}

/// Returns whether the spec leaves a module out that can't be captured, and that is all that went wrong.
fn leaves_out(wanted: &[Wanted<'_>], module: usize) -> bool {
    let mut own = wanted
        .iter()
        .filter(|program| program.item.module == module);
    own.all(|program| program.skipped && !program.item.settings.compile.fullgraph)
}

/// Returns whether the newest release answers a module.
fn had(store: &Store, plan: &Plan, spec: &Spec, module: usize) -> Result<bool, StoreError> {
    let (name, title) = (&spec.modules[module].name, spec.title(module));
    for id in plan.release.iter().flat_map(|release| &release.programs) {
        if let Some(program) = store.program(id)?
            && program.module == *name
            && (title == *name || title == program.title())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn publish(
    options: &Options<'_>,
    plan: &Plan,
    known: &Known,
    weights: StoredWeights,
    summary: &mut Summary,
) -> Result<(), BuildError> {
    let (spec, store) = (options.spec, options.store);
    let narrowed = options.request.only.is_some();
    let beyond;
    let whole = match narrowed {
        false => plan,
        // A narrowed build keeps what the spec asks for beyond it and the store has.
        true => {
            let request = plan::Request {
                only: None,
                // What is not tuned yet is kept as it is.
                tune: false,
                ..options.request.clone()
            };
            beyond = plan::plan(spec, Some(store), Some(known.clone()), &request)?;
            &beyond
        }
    };
    let wanted = wanted(narrowed, whole, spec, summary);
    let lacks = wanted.iter().filter(|program| program.left_out);
    let lacks: Vec<String> = lacks.map(|program| program.item.name(spec)).collect();
    for module in unanswered(&wanted, spec) {
        let title = spec.title(module);
        if leaves_out(&wanted, module) && !had(store, plan, spec, module)? {
            continue;
        }
        let told = |name: &String| *name == title || *name == spec.modules[module].name;
        match options.without.iter().any(told) {
            true => summary.without.push(title),
            false => summary.unanswered.push(title),
        }
    }
    if let Some(name) = &options.release {
        let missing = match narrowed {
            false => summary.failed().0,
            true => {
                let missing = |program: &&Wanted<'_>| {
                    let item = program.item;
                    program.id.is_none()
                        && matches!(item.state, State::Miss { .. })
                        && (program.left_out || !item.form.optional())
                };
                wanted.iter().filter(missing).count()
            }
        };
        if missing > 0 {
            return Err(BuildError::Incomplete {
                name: name.clone(),
                missing,
                total: whole.wanted(),
            });
        }
    }
    let programs: Vec<Digest> = wanted.iter().filter_map(|program| program.id).collect();
    if programs.is_empty() || !summary.unanswered.is_empty() {
        return Ok(());
    }
    let (release, new) = store.put_release(&Release {
        schema: SCHEMA,
        model: spec.model.name.clone(),
        seq: 0,
        name: options.release.clone(),
        programs,
        lacks,
        weights: weights.object,
        aliases: weights.aliases,
        entry: known.entry.clone(),
        provenance: provenance(),
    })?;
    if let (true, false, Some(before)) = (new, release.is_partial(), &plan.release) {
        summary.lost = store.lost(before, &release)?;
    }
    summary.before = plan.release.as_ref().map(|before| before.seq);
    let before = plan.release.as_ref().and_then(|before| before.weights);
    summary.weights_changed = before.zip(release.weights).filter(|(old, new)| old != new);
    summary.release = Some(release);
    summary.published = new;
    Ok(())
}

/// Returns what a record says of its making; never part of a key.
pub(super) fn provenance() -> Provenance {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    Provenance {
        precast: env!("CARGO_PKG_VERSION").to_owned().into(),
        created: i64::try_from(now).unwrap_or(i64::MAX).into(),
        ..Provenance::default()
    }
}
