//! One build from plan to release.

use std::{collections::HashSet, thread, time::Instant};

use precast_store::{
    Digest, StoreError, check_release_name,
    record::{Release, Shim},
};

use super::{
    BuildError,
    limits::{Limits, Stop},
    model::{OPEN_LIMIT, in_spec, open},
    options::{Options, Summary},
    progress::{Event, Progress},
    protocol::{Request, SavedWeights},
    release::summarise,
    scratch::{BUILD, Scratch, sweep},
    shims, weights,
    work::{self, Job, Starting},
    workers::Workers,
};
use crate::plan::{self, Plan, State};

/// Makes whatever is missing. Finished programs stay in the store whatever happens after.
pub fn build(options: &Options<'_>, progress: &dyn Progress) -> Result<Summary, BuildError> {
    let built = match build_all(options, progress) {
        Err(error) if error.is_index() => {
            options.store.audit().reindex()?;
            let message = "the index was damaged: it was made again from the files";
            progress.event(&Event::Note { message });
            build_all(options, progress)
        }
        built => built,
    };
    built.map_err(|error| in_spec(options.spec, error))
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
    store.audit().check_index()?;
    for seq in store.audit().set_damaged_releases_aside(&spec.model.name)? {
        let message = format!("the record of release {seq} was damaged: it is in `quarantine/`");
        progress.event(&Event::Note { message: &message });
    }
    let known = plan::known(spec, store, options.launcher.torch.as_deref())?;
    let plan = plan::plan(spec, Some(store), known, &options.request)?;
    let missing = plan.missing().count();
    progress.event(&Event::Planned {
        programs: plan.wanted(),
        missing,
    });
    let shim = match &plan.known {
        Some(known) => shims::known(store, &spec.model.name, &known.target)?,
        None => None,
    };
    if missing == 0
        && let Some(same) = same_entry(options, &plan)?
        && let Some(shim) = shim
        && weights::restored(options, &same)?
    {
        // Only the model can say whether a file with other tensors fits.
        if let Some(weights) = weights::kept(options, &plan, &same, &shim)? {
            let done = work::Done::default();
            return summarise(options, &plan, done, Some((weights, shim)), started);
        }
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
    store.leases().keep(&planned()?.hits())?;
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
    let weights: SavedWeights =
        first
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
    let shim = shims::known(store, &spec.model.name, &known.target)?;
    if options.locked && shim.is_none() {
        return Err(BuildError::LockedShim {
            torch: known.target.torch,
        });
    }
    let (same, aliases) = (same_entry(options, &plan)?, weights.aliases.clone());
    let try_file = |shim: Option<&Shim>| {
        let same = same.as_ref();
        weights::try_file(options, &plan, same, &aliases, shim)
    };
    let (tried, compiled) = (try_file(shim.as_ref())?, shim.is_none());
    let (done, weights, shim) = work::run(workers, &plan, &jobs, first, starting, weights, shim)?;
    if compiled && !plan.hits().is_empty() {
        try_file(Some(&shim))?;
    }
    if let (Some(path), Some(_)) = (spec.model.weights.file(), tried)
        && tried != weights.object
    {
        let path = path.display().to_string();
        return Err(BuildError::SourceChanged { path });
    }
    summarise(options, &plan, done, Some((weights, shim)), started)
}

/// Returns the last release of a model that was made by what makes it now: its weights are those of now.
fn same_entry(options: &Options<'_>, plan: &Plan) -> Result<Option<Release>, StoreError> {
    let Some(known) = &plan.known else {
        return Ok(None);
    };
    let Options { spec, store, .. } = options;
    // Whether weights come from a file is in the key of every program: none is in a release of the other kind.
    let hits: HashSet<Digest> = plan.hits().into_iter().collect();
    store.releases().find(&spec.model.name, |release| {
        release.entry == known.entry && release.programs.iter().any(|id| hits.contains(id))
    })
}
