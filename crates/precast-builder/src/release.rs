//! The release of a build: its programs, those it lacks, and the outcome of every item of the plan.

use std::{collections::BTreeMap, path::PathBuf, time::Instant};

use precast_store::{
    Digest, Store, StoreError,
    record::{Program, Provenance, Release, SCHEMA, Shim},
};

use super::{
    BuildError, chain,
    gate::StoredWeights,
    options::{Options, Outcome, Summary},
    sharing::FromRemote,
    shims,
    work::Done,
};
use crate::{
    plan::{Item, Known, Plan, Reason, State},
    spec::{Origin, Spec},
};

/// The parts of a release that all of its programs share.
pub(super) struct Parts {
    pub known: Known,
    pub weights: StoredWeights,
    pub shim: Shim,
}

/// Publishes the release, if it differs from the newest one, and returns the outcome of every item.
pub(super) fn summarise(
    options: &Options<'_>,
    plan: &Plan,
    mut done: Done,
    parts: Parts,
    (remote, started): (Option<&FromRemote<'_>>, Instant),
) -> Result<Summary, BuildError> {
    let spec = options.spec;
    let came = remote.map(FromRemote::came).unwrap_or_default();
    let from = |id: &Digest| {
        let remote = remote.filter(|_| came.programs.contains(id))?;
        Some(remote.remote.name().to_owned())
    };
    let (mut programs, mut eager_unasked) = (Vec::new(), Vec::new());
    for (index, item) in plan.items.iter().enumerate() {
        let outcome = match (&item.state, done.outcomes.remove(&index)) {
            (State::Hit { id }, _) => Outcome::Hit {
                id: *id,
                from: from(id),
            },
            (State::Skipped { why, .. }, _) => Outcome::Skipped { why: why.clone() },
            (State::Miss { .. }, Some(outcome)) => outcome,
            (State::Miss { .. }, None) => return Err(BuildError::Interrupted),
        };
        if matches!(outcome, Outcome::Built(_)) && item.eager_unasked() {
            eager_unasked.push(spec.title(item.module));
        }
        programs.push((item.name(spec), outcome));
    }
    let findings = done.findings.into_iter();
    let mut summary = Summary {
        programs,
        findings: findings
            .filter(|(_, findings)| !findings.is_empty())
            .map(|(module, findings)| (spec.title(module), findings))
            .collect(),
        compiled: done.compiled,
        fetched: came.artifacts.len(),
        release: plan.release.clone(),
        published: false,
        before: None,
        lost: vec![],
        unanswered: vec![],
        without: vec![],
        eager_unasked,
        weights_changed: None,
        generated: None,
        seconds: started.elapsed().as_secs_f64(),
    };
    publish(options, plan, parts, &mut summary)?;
    Ok(summary)
}

/// A program of the spec, and its state in a release.
struct Wanted<'a> {
    item: &'a Item,
    id: Option<Digest>,
    /// Whether a narrowed build left it out: it is missing, and no build with its key was tried.
    left_out: bool,
    /// Whether the module works without it.
    skipped: bool,
}

/// Returns every program of the spec, in its order, including those outside of a narrowed build.
fn wanted<'a>(plan: &'a Plan, summary: &Summary) -> Vec<Wanted<'a>> {
    let outcomes = summary.programs.iter().map(|(_, outcome)| outcome);
    let own = plan.items.iter().zip(outcomes);
    let own = own.map(|(item, outcome)| Wanted {
        item,
        id: outcome.id(),
        left_out: false,
        skipped: matches!(outcome, Outcome::Skipped { .. }),
    });
    let beyond = plan.beyond.iter().map(|item| Wanted {
        item,
        id: item.hit(),
        left_out: match &item.state {
            State::Miss {
                reasons, before, ..
            } => {
                let failed = matches!(reasons[..], [Reason::FailedBefore { .. }]);
                let needless = item.form.optional && before.is_none();
                !failed && !needless
            }
            _ => false,
        },
        skipped: matches!(item.state, State::Skipped { .. }),
    });
    let mut all: Vec<Wanted<'_>> = own.chain(beyond).collect();
    all.sort_by_key(|wanted| wanted.item.place);
    all
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

/// Returns the programs with these keys, each with its module in the spec. Programs of other modules and other devices
/// are left out: they left the spec.
fn in_spec<'a>(
    store: &Store,
    ids: impl IntoIterator<Item = &'a Digest>,
    spec: &Spec,
) -> Result<Vec<(usize, Program)>, StoreError> {
    let mut found = Vec::new();
    for id in ids {
        let Some(program) = store.records().program(id)? else {
            continue;
        };
        let module = (0..spec.modules.len()).find(|&index| {
            let (name, title) = (&spec.modules[index].name, spec.title(index));
            program.module == *name && (title == *name || title == program.title())
        });
        if program.target.device == spec.target.device
            && let Some(module) = module
        {
            found.push((module, program));
        }
    }
    Ok(found)
}

/// Returns the names of the programs of the newest release that the new one would lose without the user's consent.
/// `gone` are the programs that only the newest one has.
///
/// A bucket that was removed from the spec is the user's change. It counts only if another program of its module could
/// not be built, because that program may be its replacement. The consent is `allow_lost`, `without`, or a
/// `fail_policy` of `fallback_eager` in the spec, if eager exists.
fn lost(
    options: &Options<'_>,
    wanted: &[Wanted<'_>],
    gone: &[(usize, Program)],
    without: &[String],
) -> Vec<String> {
    let spec = options.spec;
    if options.allow_lost {
        return vec![];
    }
    let lost = gone.iter().filter(|(module, program)| {
        let own = || wanted.iter().filter(|one| one.item.module == *module);
        let there = |one: &Wanted<'_>| one.id.is_some() || one.left_out;
        let same = own().find(|one| one.item.form.name() == program.bucket());
        let failed = own().any(|one| !there(one) && !one.item.form.optional);
        let eager_instead = own().any(|one| {
            let settings = &one.item.settings;
            one.id.is_some()
                && one.item.form.is_eager()
                && settings.origin("fail_policy") != Origin::BuiltIn
        });
        let is_lost = match same {
            Some(same) => !there(same),
            None => failed,
        };
        is_lost && !eager_instead && !without.contains(&spec.title(*module))
    });
    lost.map(|(module, program)| format!("{} {}", spec.title(*module), program.bucket()))
        .collect()
}

/// Publishes the release, unless it would lack programs without the user's consent. The summary then names them.
fn publish(
    options: &Options<'_>,
    plan: &Plan,
    parts: Parts,
    summary: &mut Summary,
) -> Result<(), BuildError> {
    let (spec, store) = (options.spec, options.store);
    let wanted = wanted(plan, summary);
    let newest = store.releases().get(&spec.model.name, None)?;
    let served = newest.as_ref().map_or(&[][..], |newest| &newest.programs);
    sort_unanswered(options, &wanted, served, summary)?;
    if let Some(name) = &options.release {
        complete(name, options, &wanted, summary)?;
    }
    let programs: Vec<Digest> = wanted.iter().filter_map(|program| program.id).collect();
    if programs.is_empty() || !summary.unanswered.is_empty() {
        return Ok(());
    }
    let lacks = wanted.iter().filter(|program| program.left_out);
    let lacks: Vec<String> = lacks.map(|program| program.item.name(spec)).collect();
    if lacks.is_empty() {
        let gone = served.iter().filter(|id| !programs.contains(id));
        let gone = in_spec(store, gone, spec)?;
        summary.lost = lost(options, &wanted, &gone, &summary.without);
        if !summary.lost.is_empty() {
            return Ok(());
        }
    }
    let left_out = wanted.iter().filter(|program| program.skipped);
    let left_out = left_out.filter_map(|program| match &program.item.state {
        State::Miss { key, .. } => key.as_ref().map(|(id, _)| *id),
        State::Skipped { key, .. } => Some(*key),
        State::Hit { .. } => None,
    });
    let mut release = Release {
        schema: SCHEMA,
        model: spec.model.name.clone(),
        seq: 0,
        name: options.release.clone(),
        rollback: None,
        programs,
        lacks,
        left_out: left_out.collect(),
        weights: parts.weights.object,
        aliases: parts.weights.aliases.clone(),
        assets: assets(options)?,
        shims: vec![],
        entry: parts.known.entry,
        provenance: Provenance::now(),
    };
    let same =
        |newest: &Release| newest.programs == release.programs && newest.weights == release.weights;
    if !newest.as_ref().is_some_and(same) {
        summary.generated = chain::check(options, plan, &release, &parts.weights, &parts.shim)?;
    }
    release.shims = shims::of_release(parts.shim, &release, plan.release.as_ref());
    let (release, new) = store.releases().put(&release)?;
    if let (true, false, Some(before)) = (new, release.is_partial(), &newest) {
        summary.lost = store.releases().lost(before, &release)?;
    }
    summary.before = newest.as_ref().map(|before| before.seq);
    let before = newest.and_then(|before| before.weights);
    summary.weights_changed = before.zip(release.weights).filter(|(old, new)| old != new);
    summary.release = Some(release);
    summary.published = new;
    Ok(())
}

/// Puts the assets of the spec into the store, and returns their digests.
fn assets(options: &Options<'_>) -> Result<BTreeMap<String, Digest>, StoreError> {
    let put = |(name, path): (&String, &PathBuf)| {
        let (digest, _) = options.store.objects().put_file(path)?;
        Ok((name.clone(), digest))
    };
    options.spec.model.assets.iter().map(put).collect()
}

/// Sorts the unanswered modules into permitted ones (`without`) and the others. `served` are the programs of
/// the newest release.
fn sort_unanswered(
    options: &Options<'_>,
    wanted: &[Wanted<'_>],
    served: &[Digest],
    summary: &mut Summary,
) -> Result<(), StoreError> {
    let spec = options.spec;
    for module in unanswered(wanted, spec) {
        let title = spec.title(module);
        if leaves_out(wanted, module)
            && !(in_spec(options.store, served, spec)?.iter()).any(|(index, _)| *index == module)
        {
            continue;
        }
        let named = |name: &String| *name == title || *name == spec.modules[module].name;
        if options.without.iter().any(named) {
            summary.without.push(title);
        } else {
            summary.unanswered.push(title);
        }
    }
    Ok(())
}

/// Refuses a named release that lacks programs.
fn complete(
    name: &str,
    options: &Options<'_>,
    wanted: &[Wanted<'_>],
    summary: &Summary,
) -> Result<(), BuildError> {
    let missing = if options.request.only.is_none() {
        summary.failed().0
    } else {
        let missing = |program: &&Wanted<'_>| {
            let item = program.item;
            program.id.is_none()
                && matches!(item.state, State::Miss { .. })
                && (program.left_out || !item.form.optional)
        };
        wanted.iter().filter(missing).count()
    };
    if missing == 0 {
        return Ok(());
    }
    Err(BuildError::Incomplete {
        name: name.to_owned(),
        missing,
        total: wanted.iter().filter(|one| one.item.wanted()).count(),
    })
}
