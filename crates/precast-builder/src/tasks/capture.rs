//! Captures a program, and finds the artifacts that it lacks.

use std::{collections::BTreeSet, time::Duration};

use precast_store::{
    Digest, StoreError,
    record::{Program, Sizes},
};

use super::CapturedProgram;
use crate::{
    BuildError,
    gate::candidates::{Candidate, candidates},
    plan::Known,
    protocol::{Captured, Checked, Finding, ModuleRequest, Request, Sampled, Segment, Severity},
    publish::MissingArtifact,
    slot::{Context, Slot},
    spec::{Module, Spec},
    task::{Action, Job, TaskFailure},
};

/// Maximum time of a capture.
pub(super) const LIMIT: Duration = Duration::from_secs(1800);

/// A failed capture, and the module for a check that may find the reason.
pub(crate) struct CaptureFailure {
    pub failure: Box<TaskFailure>,
    pub module: Option<Box<ModuleRequest>>,
}

impl<E: Into<TaskFailure>> From<E> for CaptureFailure {
    fn from(failure: E) -> Self {
        Self {
            failure: Box::new(failure.into()),
            module: None,
        }
    }
}

/// Captures a program. Returns it, and its artifacts that the store lacks.
pub(crate) fn capture(
    slot: &mut Slot<'_>,
    job: &Job<'_>,
) -> Result<(CapturedProgram, Vec<MissingArtifact>), CaptureFailure> {
    let module = module_request(slot, job)?;
    let request = Request::Capture {
        module: module.clone(),
        sizes: job.item.form.sizes.clone(),
        out: (slot.context.workers.scratch).join(format!("capture-{}", job.id.short())),
    };
    let answer = slot.ask::<Captured>(Action::Capture, &job.name, &request, LIMIT);
    let (captured, _) = answer.map_err(|failure| {
        let code = failure.error.code();
        let left_out = (job.item.form).left_out(code, &job.item.settings.compile);
        CaptureFailure {
            module: (code == "capture" && !left_out).then(|| Box::new(module)),
            failure: Box::new(failure),
        }
    })?;
    Ok(with_artifacts(slot.context, job, captured)?)
}

/// Checks a module whose capture failed. Returns the findings that stop a build; if the check fails too, there are
/// none, and the error of the capture is all that is reported.
pub(crate) fn check(slot: &mut Slot<'_>, job: &Job<'_>, module: ModuleRequest) -> Vec<Finding> {
    let request = Request::Check {
        module,
        sizes: job.item.form.sizes.clone(),
        buckets: job.module.buckets.clone(),
        samples: slot.context.options().spec.model.samples.clone(),
        recompiles: false,
        cost: false,
    };
    let checked = slot.ask::<Checked>(Action::Check, &job.name, &request, LIMIT);
    let findings = checked.map_or_else(|_| vec![], |(checked, _)| checked.findings);
    let stops = |one: &Finding| one.severity == Severity::High;
    findings.into_iter().filter(stops).collect()
}

/// Returns the module of a program as the worker captures it, with its inputs.
pub(super) fn module_request(
    slot: &mut Slot<'_>,
    job: &Job<'_>,
) -> Result<ModuleRequest, TaskFailure> {
    let Job { item, module, .. } = job;
    let (inputs, structure) = match module.sized_inputs(&item.form.sizes) {
        Some(inputs) => (inputs, None),
        None => {
            let request = inputs_request(slot.context.options().spec, module, &item.form.sizes);
            let (sampled, _) = slot.ask::<Sampled>(Action::Inputs, &job.name, &request, LIMIT)?;
            (sampled.inputs, Some(sampled.structure))
        }
    };
    let regions = if item.form.compiled {
        module.regions.clone()
    } else {
        vec![]
    };
    Ok(ModuleRequest {
        name: module.name.clone(),
        path: module.path.clone(),
        method: module.method.clone(),
        inputs,
        state: module.sized_state(&item.form.sizes, &slot.context.options().spec.modules),
        compiled: item.form.compiled,
        regions,
        passes: item.settings.compile.passes.clone(),
        dynamic: item.form.dynamic.clone(),
        structure,
        padding: module.padding,
        train: module.train.clone(),
        pair: module.pair.clone(),
    })
}

/// Returns a captured program with its candidates, and the artifacts that the store lacks.
fn with_artifacts(
    context: &Context<'_>,
    job: &Job<'_>,
    captured: Captured,
) -> Result<(CapturedProgram, Vec<MissingArtifact>), BuildError> {
    let known = &context.model.known;
    let segments = if job.item.form.compiled {
        &captured.segments[..]
    } else {
        &[]
    };
    let tuned = job.request["tuned"] == true;
    let (candidates, chosen_by) = match chosen_before(context, job, &captured)? {
        Some((before, candidate)) => (vec![candidate], Some(before)),
        None => {
            let all = candidates(job.item, segments, &captured.passes, known, tuned);
            (all, None)
        }
    };
    let compiles = missing(context, job, &candidates, segments, &captured)?;
    let program = CapturedProgram {
        compiled: compiles.len(),
        captured,
        candidates,
        chosen_by,
    };
    Ok((program, compiles))
}

/// Returns the candidate that was chosen for the previous program, and the ID of that program. None unless every
/// candidate would have the same artifacts again, and the store has those of the chosen one.
fn chosen_before(
    context: &Context<'_>,
    job: &Job<'_>,
    captured: &Captured,
) -> Result<Option<(Digest, Candidate)>, StoreError> {
    let store = context.options().store;
    let Some(before) = job
        .before
        .map(|before| store.records().program(&before))
        .transpose()?
        .flatten()
    else {
        return Ok(None);
    };
    let Some(candidate) = same_choice(job, captured, &context.model.known, &before) else {
        return Ok(None);
    };
    for key in &candidate.keys {
        if !store.records().keep_artifact(key)? {
            return Ok(None);
        }
    }
    Ok(Some((before.id, candidate)))
}

/// Returns the chosen candidate of the previous program, if the candidates and the artifacts are the same as before.
fn same_choice(
    job: &Job<'_>,
    captured: &Captured,
    known: &Known,
    before: &Program,
) -> Option<Candidate> {
    let rows = before.receipt.tried();
    // A plain build reuses a choice of `--tune`, too.
    let candidates = [true, false].into_iter().find_map(|all| {
        let candidates = candidates(job.item, &captured.segments, &captured.passes, known, all);
        let names = candidates.iter().map(|candidate| &candidate.set.name);
        let same = names.eq(rows.iter().map(|row| &row.options));
        (same && (all || job.request["tuned"] != true)).then_some(candidates)
    })?;
    let chosen = rows.iter().position(|row| row.chosen)?;
    let candidate = candidates.into_iter().nth(chosen)?;
    let called = before.steps.iter().map(|step| Some(step.artifact));
    let calls = captured.steps.iter();
    called
        .eq(calls.map(|step| candidate.keys.get(step.segment).copied()))
        .then_some(candidate)
}

/// Returns the artifacts of a program that the store lacks.
fn missing(
    context: &Context<'_>,
    job: &Job<'_>,
    candidates: &[Candidate],
    segments: &[Segment],
    captured: &Captured,
) -> Result<Vec<MissingArtifact>, StoreError> {
    let store = context.options().store;
    let mut lacked = BTreeSet::new();
    for key in candidates.iter().flat_map(|candidate| &candidate.keys) {
        if !store.records().keep_artifact(key)? {
            lacked.insert(*key);
        }
    }
    if let Some(remote) = context.workers.remote {
        for key in remote.fetch_artifacts(&Vec::from_iter(lacked.iter().copied())) {
            if store.records().keep_artifact(&key)? {
                lacked.remove(&key);
            }
        }
    }
    let mut compiles: Vec<MissingArtifact> = Vec::new();
    // Of equally large artifacts, the last one in the schedule is compiled first.
    for candidate in candidates.iter().rev() {
        for (index, (key, segment)) in candidate.keys.iter().zip(segments).enumerate() {
            // Each once.
            if !lacked.remove(key) {
                continue;
            }
            let step = captured.steps.iter().find(|step| step.segment == index);
            let step = step.map_or("", |step| &step.name);
            let name = format!("{} {step}", job.name);
            compiles.push(MissingArtifact {
                key: *key,
                explained: candidate.set.key(job.item, segment, &context.model.known).1,
                segment: segment.clone(),
                set: candidate.set.clone(),
                name: candidate.of(name.trim_end(), candidates.len()),
            });
        }
    }
    Ok(compiles)
}

/// Returns the request for inputs that the spec leaves out: from the samples that it names, or from the model's own
/// inputs if another module has them.
pub(crate) fn inputs_request(spec: &Spec, module: &Module, sizes: &Sizes) -> Request {
    let whole = spec
        .modules
        .iter()
        .find(|other| other.path.is_empty() && other.method == "forward" && other.inputs.is_some());
    // The model's inputs at the smallest bucket, if the module has no separate sizes.
    let inputs = whole.and_then(|whole| {
        let own = whole.buckets.first().cloned().unwrap_or_default();
        let mut at = own;
        at.extend(sizes.clone());
        whole.sized_inputs(&at)
    });
    Request::Inputs {
        path: module.path.clone(),
        method: module.method.clone(),
        samples: spec.model.samples.clone(),
        inputs: inputs.unwrap_or_default(),
        sizes: sizes.clone(),
    }
}
