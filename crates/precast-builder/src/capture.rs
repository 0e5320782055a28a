//! Captures programs, and schedules the compiles that they need.

use std::{
    collections::{BTreeSet, btree_map::Entry},
    sync::PoisonError,
    time::Duration,
};

use precast_store::{Digest, record::Sizes};

use super::{
    BuildError,
    gate::candidates::{Candidate, candidates},
    progress::Event,
    protocol::{
        Captured, CapturedStep, Checked, ModuleRequest, Request, Sampled, Segment, Severity,
    },
    task::{CapturedProgram, Compile},
    work::{Action, Job, Slot, Work},
};
use crate::{
    plan::{Item, Known, State},
    spec::{Module, Spec},
};

/// How long a capture may take.
const CAPTURE_LIMIT: Duration = Duration::from_secs(1800);

impl Work<'_> {
    /// Captures a program. Returns whether it can be gated.
    pub(super) fn capture(&self, slot: &mut Slot, job: usize) -> Result<bool, BuildError> {
        let Job { item, id, .. } = &self.jobs[job];
        let module = &self.options.spec.modules[item.module];
        let name = item.name(self.options.spec);
        let (inputs, structure) = match module.sized_inputs(&item.form.sizes) {
            Some(inputs) => (inputs, None),
            None => {
                let request = inputs_request(self.options.spec, module, &item.form.sizes);
                let action = (Action::Inputs, &*name);
                let (answer, log) = self.ask::<Sampled>(slot, action, &request, CAPTURE_LIMIT);
                match answer {
                    Ok(sampled) => (sampled.inputs, Some(sampled.structure)),
                    Err(error) => return self.fail(job, error, &log).map(|()| false),
                }
            }
        };
        let request = Request::Capture {
            module: ModuleRequest {
                name: module.name.clone(),
                path: module.path.clone(),
                method: module.method.clone(),
                inputs,
                compiled: item.form.compiled,
                regions: match item.form.compiled {
                    true => module.regions.clone(),
                    false => vec![],
                },
                passes: item.settings.compile.passes.clone(),
                dynamic: item.form.dynamic.clone(),
                structure,
                padding: module.padding,
            },
            sizes: item.form.sizes.clone(),
            out: self.workers.scratch.join(format!("capture-{}", id.short())),
        };
        let action = (Action::Capture, &*name);
        let (answer, log) = self.ask::<Captured>(slot, action, &request, CAPTURE_LIMIT);
        match answer {
            Ok(captured) => self.captured(job, captured).map(|()| true),
            Err(error) => {
                let left_out = item.form.left_out(error.code(), &item.settings.compile);
                if let (Request::Capture { module, sizes, .. }, "capture", false) =
                    (request, error.code(), left_out)
                {
                    self.check(slot, item, module, sizes);
                }
                self.fail(job, error, &log).map(|()| false)
            }
        }
    }

    /// Checks a module whose capture failed, and keeps the findings that stop a build: once for all of its buckets. If the check
    /// fails too, the error of the capture is all that is reported.
    fn check(&self, slot: &mut Slot, item: &Item, module: ModuleRequest, sizes: Sizes) {
        let own = &self.options.spec.modules[item.module];
        match self.lock().done.findings.entry(item.module) {
            Entry::Vacant(entry) => drop(entry.insert_entry(vec![])),
            Entry::Occupied(_) => return,
        }
        let request = Request::Check {
            module,
            sizes,
            buckets: own.buckets.clone(),
            samples: self.options.spec.model.samples.clone(),
            recompiles: false,
            cost: false,
        };
        let name = item.name(self.options.spec);
        let action = (Action::Check, &*name);
        if let (Ok(checked), _) = self.ask::<Checked>(slot, action, &request, CAPTURE_LIMIT) {
            let findings = checked.findings.into_iter();
            let stop = findings.filter(|one| one.severity == Severity::High);
            (self.lock().done.findings).insert(item.module, stop.collect());
        }
    }

    /// Returns the candidate that was chosen for the program before this one, and the ID of that program. None unless every candidate
    /// would have the same artifacts as then, and those of the chosen one are in the store.
    fn chosen_before(
        &self,
        job: &Job<'_>,
        captured: &Captured,
        known: &Known,
    ) -> Result<Option<(Digest, Candidate)>, BuildError> {
        let store = self.options.store;
        let before = match &job.item.state {
            State::Miss {
                before: Some(before),
                ..
            } => store.records().program(before)?,
            _ => None,
        };
        let Some(before) = before else {
            return Ok(None);
        };
        let rows = before.receipt.tried();
        // A plain build takes over what `--tune` chose too.
        let mut tried = [true, false].into_iter();
        let candidates = tried.find_map(|all| {
            let candidates = candidates(job.item, &captured.segments, &captured.passes, known, all);
            let names = candidates.iter().map(|candidate| &candidate.set.name);
            let same = names.eq(rows.iter().map(|row| &row.options));
            (same && (all || job.request["tuned"] != true)).then_some(candidates)
        });
        let chosen = rows.iter().position(|row| row.chosen);
        let Some(candidate) = candidates
            .zip(chosen)
            .and_then(|(candidates, row)| candidates.into_iter().nth(row))
        else {
            return Ok(None);
        };
        let called = before.steps.iter().map(|step| Some(step.artifact));
        let calls = captured.steps.iter();
        if !called.eq(calls.map(|step| candidate.keys.get(step.segment).copied())) {
            return Ok(None);
        }
        for key in &candidate.keys {
            if !store.records().keep_artifact(key)? {
                return Ok(None);
            }
        }
        Ok(Some((before.id, candidate)))
    }

    /// Schedules what must be compiled for a captured program.
    fn captured(&self, job: usize, captured: Captured) -> Result<(), BuildError> {
        let Job { item, request, .. } = &self.jobs[job];
        let Some(known) = &self.plan.known else {
            return Err(BuildError::Protocol {
                message: "captured before the target was known".to_owned(),
            });
        };
        let segments = match item.form.compiled {
            true => &captured.segments[..],
            false => &[],
        };
        let tuned = request["tuned"] == true;
        let mut candidates = candidates(item, segments, &captured.passes, known, tuned);
        let mut chosen_by = None;
        if let Some((before, candidate)) = self.chosen_before(&self.jobs[job], &captured, known)? {
            (candidates, chosen_by) = (vec![candidate], Some(before));
        }
        let compiles = self.compiles(item, &candidates, segments, &captured.steps, known)?;
        let module = &self.options.spec.modules[item.module].name;
        let artifacts: BTreeSet<&Digest> = candidates
            .iter()
            .flat_map(|candidate| &candidate.keys)
            .collect();
        for message in &captured.notes {
            let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
            if noted.insert(message.clone()) {
                self.progress.event(&Event::Note { message });
            }
        }
        self.progress.event(&Event::Captured {
            module,
            bucket: &item.form.name(),
            steps: captured.steps.len(),
            artifacts: artifacts.len(),
            missing: compiles.len(),
        });
        let program = CapturedProgram {
            captured,
            compiled: compiles.len(),
            candidates,
            chosen_by,
        };
        let mut state = self.lock();
        state.estimate.lacked(compiles.len());
        state.captured.insert(job, program);
        for compile in compiles {
            let size = compile.segment.graph.len();
            if state.schedule.lacks(job, compile.key, size) {
                state.compiles.insert(compile.key, compile);
            }
        }
        Ok(())
    }

    /// Returns what the store lacks of a program's artifacts.
    fn compiles(
        &self,
        item: &Item,
        candidates: &[Candidate],
        segments: &[Segment],
        steps: &[CapturedStep],
        known: &Known,
    ) -> Result<Vec<Compile>, BuildError> {
        let name = item.name(self.options.spec);
        let mut compiles: Vec<Compile> = Vec::new();
        // Of equally large artifacts the one that is scheduled last is compiled first.
        for candidate in candidates
            .iter()
            .rev()
            .filter(|candidate| candidate.refused.is_none())
        {
            for (index, (key, segment)) in candidate.keys.iter().zip(segments).enumerate() {
                if self.options.store.records().keep_artifact(key)?
                    || compiles.iter().any(|c| c.key == *key)
                {
                    continue;
                }
                let step = steps.iter().find(|step| step.segment == index);
                let step = step.map_or("", |step| &step.name);
                compiles.push(Compile {
                    key: *key,
                    explained: candidate.set.key(item, segment, known).1,
                    segment: segment.clone(),
                    set: candidate.set.clone(),
                    name: candidate.of(format!("{name} {step}").trim_end(), candidates.len()),
                });
            }
        }
        Ok(compiles)
    }
}

/// Asks for inputs that the spec leaves out: from the samples it names, or from the model's own inputs where another
/// module of it has them.
pub(super) fn inputs_request(spec: &Spec, module: &Module, sizes: &Sizes) -> Request {
    let whole = spec
        .modules
        .iter()
        .find(|other| other.path.is_empty() && other.method == "forward" && other.inputs.is_some());
    // The model's inputs at the smallest bucket, where the module has no sizes of its own.
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
