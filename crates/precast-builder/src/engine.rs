//! One build from plan to release.

use std::{collections::HashSet, sync::atomic::Ordering, thread, time::Instant};

use precast_store::{
    Digest, StoreError, check_release_name,
    record::{Release, Shim},
};

use super::{
    BuildError,
    checkpoint::Checkpoint,
    limits::{Limits, Stop},
    model::{LoadedModel, OPEN_LIMIT, in_spec, open},
    options::{Options, Summary},
    progress::{Event, Progress},
    protocol::{Request, SavedWeights},
    release::{Parts, summarise},
    scratch::{BUILD, Scratch, sweep},
    sharing::FromRemote,
    shims,
    weights::{self, FromFile},
    work::{self, Done, Starting},
    worker::Worker,
    workers::Workers,
};
use crate::plan::{self, Item, Known, Plan, Reason, State};

/// Builds the missing programs and publishes the release. Finished programs stay in the store, also after an error.
pub fn build(options: &Options<'_>, progress: &dyn Progress) -> Result<Summary, BuildError> {
    let (mut mended, mut again) = (false, false);
    loop {
        match build_all(options, progress, !again) {
            Err(error) if error.is_index() && !mended => {
                mended = true;
                options.store.audit().reindex()?;
                let message = "the index was damaged: it was made again from the files";
                progress.event(&Event::Note { message });
            }
            // What this build has made is in the store: the second time it makes the rest.
            Ok(None) if options.cancel.load(Ordering::Relaxed) => {
                return Err(BuildError::Interrupted);
            }
            Ok(None) => again = true,
            Ok(Some(summary)) => return Ok(summary),
            Err(error) => return Err(in_spec(options.spec, error)),
        }
    }
}

/// Returns none if programs are missing that other builds began to make. With `leave` it leaves them to others.
fn build_all(
    options: &Options<'_>,
    progress: &dyn Progress,
    leave: bool,
) -> Result<Option<Summary>, BuildError> {
    let started = Instant::now();
    let Options { spec, store, .. } = options;
    if let Some(name) = &options.release {
        check_release_name(name)?;
    }
    if let Some(file) = spec.model.weights.file() {
        Checkpoint::open(file)?;
    }
    store.audit().check_index()?;
    for seq in store.audit().set_damaged_releases_aside(&spec.model.name)? {
        let message = format!("the record of release {seq} was damaged: it is in `quarantine/`");
        progress.event(&Event::Note { message: &message });
    }
    let torch = options.launcher.torch.as_deref();
    let mut known = plan::known(spec, store, torch)?;
    let mut plan = plan::plan(spec, Some(store), known.clone(), &options.request)?;
    let lacks = plan.missing().next().is_some();
    let remote = options.remote.filter(|_| lacks);
    let remote = remote.map(|remote| FromRemote::ask(remote, spec, store, progress));
    if let Some(remote) = &remote {
        if known.is_none() {
            known = remote.known(spec, torch)?;
            plan = plan::plan(spec, Some(store), known.clone(), &options.request)?;
        }
        if remote.fetch_programs(&plan) {
            plan = plan::plan(spec, Some(store), known, &options.request)?;
        }
        remote.leave_out(&mut plan);
    }
    let remote = remote.as_ref();
    let missing = plan.missing().count();
    progress.event(&Event::Planned {
        programs: plan.wanted(),
        missing,
    });
    if missing == 0
        && let Some(parts) = without_python(options, &plan, remote)?
    {
        return summarise(options, &plan, Done::default(), parts, (remote, started)).map(Some);
    }
    if options.locked && missing > 0 {
        return Err(BuildError::Locked {
            missing,
            total: plan.wanted(),
        });
    }
    store.writable("build")?;
    sweep(&options.scratch, BUILD, false);
    let scratch = Scratch::new(&options.scratch, BUILD)?;
    let workers = Workers {
        options,
        scratch: scratch.path(),
        progress,
        remote,
        leave,
        limits: Limits::new(options.memory),
        stop: Stop::new(&options.cancel),
    };
    thread::scope(|scope| {
        let workers = &workers;
        let numbers = 1..=workers.at_once(&plan);
        let starting = numbers.map(|number| scope.spawn(move || workers.warm_up(number)));
        let result = with_model(workers, starting.collect(), started);
        workers.stop.set();
        result
    })
}

/// Returns the parts of the release when its programs are all there, and no worker is needed for its weights and shim.
fn without_python(
    options: &Options<'_>,
    plan: &Plan,
    remote: Option<&FromRemote<'_>>,
) -> Result<Option<Parts>, BuildError> {
    let Some(known) = &plan.known else {
        return Ok(None);
    };
    let Some(shim) = shim(options, known, remote)? else {
        return Ok(None);
    };
    let same = match (same_entry(options, plan, known)?, remote) {
        // Its weights are the model's, as nobody has opened it here.
        (None, Some(remote)) => remote.same_entry(plan, &known.entry)?,
        (own, _) => own,
    };
    let Some(same) = same else {
        return Ok(None);
    };
    if !weights::restored(options, &same)? {
        return Ok(None);
    }
    // Only the model shows whether a file with other tensors fits.
    let weights = weights::kept(options, plan, &same, &shim)?;
    Ok(weights.map(|weights| Parts {
        known: known.clone(),
        weights,
        shim,
    }))
}

/// Opens the model and builds the missing programs.
fn with_model(
    workers: &Workers<'_>,
    starting: Vec<Starting<'_>>,
    started: Instant,
) -> Result<Option<Summary>, BuildError> {
    let options = workers.options;
    let (worker, file) = thread::scope(|scope| {
        let worker = scope.spawn(|| workers.start(0));
        let file = FromFile::put(options);
        let worker = worker.join();
        let worker = worker.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (worker, file)
    });
    let file = file?;
    let built = worker.and_then(|worker| {
        let files = file.as_ref().map(FromFile::files).unwrap_or_default();
        let opened = open(workers, worker, files)?;
        with_weights(workers, opened, file.as_ref(), starting, started)
    });
    match (built, file) {
        (Err(error), Some(file)) => {
            file.discard(options)?;
            Err(error)
        }
        (built, _) => built,
    }
}

/// Builds the missing programs with an opened model.
fn with_weights(
    workers: &Workers<'_>,
    (mut worker, model): (Worker, LoadedModel),
    file: Option<&FromFile>,
    starting: Vec<Starting<'_>>,
    started: Instant,
) -> Result<Option<Summary>, BuildError> {
    let options = workers.options;
    let spec = options.spec;
    let known = &model.known;
    let plan = held_plan(workers, known)?;
    if let Some(remote) = workers.remote {
        remote.explain(spec, &plan);
    }
    for item in plan.missing() {
        if let State::Miss { reasons, .. } = &item.state {
            workers.progress.event(&Event::Missing {
                module: &spec.modules[item.module].name,
                bucket: &item.form.name(),
                reasons: &remote_too(workers, item, reasons),
            });
        }
    }
    let out = workers.scratch.join("weights");
    let saved: SavedWeights = worker.call(&Request::Weights { out }, OPEN_LIMIT, &mut |_| {})?;
    let shim = shim(options, known, workers.remote)?;
    if options.locked && shim.is_none() {
        return Err(BuildError::LockedShim {
            torch: known.target.torch.clone(),
        });
    }
    let same = same_entry(options, &plan, known)?;
    let try_file = |shim: Option<&Shim>| match file {
        Some(file) => {
            let aliases = &saved.aliases;
            weights::try_file(options, &plan, file, same.as_ref(), aliases, shim).map(drop)
        }
        None => Ok(()),
    };
    try_file(shim.as_ref())?;
    let compiled = shim.is_none();
    let first = (worker, &model);
    let weights = (&saved, file);
    let (mut done, weights, shim) = work::run(workers, &plan, first, starting, weights, shim)?;
    if compiled && !plan.hits().is_empty() {
        try_file(Some(&shim))?;
    }
    if let Some(remote) = workers.remote {
        // The stop of the workers is set by now: they have ended.
        match remote.wait(&done.taken, &|| options.cancel.load(Ordering::Relaxed)) {
            Some(came) => done.outcomes.extend(came),
            None => return Ok(None),
        }
    }
    let parts = Parts {
        known: model.known,
        weights,
        shim,
    };
    summarise(options, &plan, done, parts, (workers.remote, started)).map(Some)
}

/// Computes the plan, and holds the programs that it found: gc keeps them until the release has them. If gc has deleted
/// one before, the plan is computed again.
fn held_plan(workers: &Workers<'_>, known: &Known) -> Result<Plan, BuildError> {
    let options = workers.options;
    let Options { spec, store, .. } = options;
    let mut remote = workers.remote;
    loop {
        let mut plan = plan::plan(spec, Some(store), Some(known.clone()), &options.request)?;
        // Once: the keys may be others than those before the model was open.
        if remote
            .take()
            .is_some_and(|remote| remote.fetch_programs(&plan))
        {
            continue;
        }
        if let Some(remote) = workers.remote {
            remote.leave_out(&mut plan);
        }
        let found = plan.found();
        store.leases().keep(&found)?;
        let mut there = store.records().known(&found)?;
        let mut lost = false;
        for id in &found {
            lost |= store.records().lacks(id, &mut there)?.is_some();
        }
        if !lost {
            return Ok(plan);
        }
    }
}

/// Returns the last release of a model that the same sources made: its weights are the current ones.
fn same_entry(
    options: &Options<'_>,
    plan: &Plan,
    known: &Known,
) -> Result<Option<Release>, StoreError> {
    let Options { spec, store, .. } = options;
    // The key of every program has the fact that weights come from a file: no release of the other kind has such a
    // program.
    let hits: HashSet<Digest> = plan.hits().into_iter().collect();
    store.releases().find(&spec.model.name, |release| {
        release.entry == known.entry && release.programs.iter().any(|id| hits.contains(id))
    })
}

/// Returns the shim for a target that an earlier release of the model has, here or in the remote.
fn shim(
    options: &Options<'_>,
    known: &Known,
    remote: Option<&FromRemote<'_>>,
) -> Result<Option<Shim>, StoreError> {
    let Options { spec, store, .. } = options;
    match (
        shims::known(store, &spec.model.name, &known.target)?,
        remote,
    ) {
        (None, Some(remote)) => Ok(remote.shim(known)),
        (own, _) => Ok(own),
    }
}

/// Returns the reasons why a program is missing, with its difference from that of the remote.
fn remote_too(workers: &Workers<'_>, item: &Item, reasons: &[Reason]) -> Vec<Reason> {
    let spec = workers.options.spec;
    let more = workers
        .remote
        .and_then(|remote| remote.difference(spec, item));
    reasons.iter().cloned().chain(more).collect()
}
