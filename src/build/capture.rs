//! Capturing programs, and queueing what must be compiled for them.
//!
//! The first worker captures, since it holds the model. Another one may make it at the same time; others that got ready
//! for it meanwhile, or have nothing to compile where much is to be captured, make it later; one whose weights came out
//! differently, as those of an entry that draws them from nowhere, captures nothing.

use std::{collections::BTreeSet, sync::PoisonError, time::Duration};

use super::{
    BuildError,
    jobs::{Job, Seat, Shared, Work},
    progress::Event,
    protocol::{Captured, CapturedStep, Cut, ModuleRequest, Request, Sampled, Segment},
    task::{Compile, Role, Waiting},
    ways::Way,
};
use crate::{
    Digest,
    plan::{Item, Known, State},
    record::Sizes,
    spec::Module,
};

/// How long a capture may take.
const CAPTURE_LIMIT: Duration = Duration::from_secs(1800);

impl Shared<'_> {
    /// Makes the model in a worker beside the first.
    pub(super) fn open_beside(&self, number: usize, seat: &mut Seat<'_>) -> Result<(), BuildError> {
        if let Seat::Starting(ahead) = seat
            && ahead.role == Role::Open
            && !self.made_ahead(seat)
        {
            self.let_go(number, seat);
            self.lock().opened(None);
            return Ok(());
        }
        let opened = match self.take_seat(number, seat) {
            Ok(live) => {
                live.role = Role::Capture;
                let opened = match live.made.is_some() {
                    true => self.reopen(live),
                    false => self.crew.while_wanted(live, |live| {
                        let made = || self.reopen(live);
                        self.told(number, Work::Open, "the model", false, made).0
                    }),
                };
                let kept = matches!(
                    opened,
                    Ok(()) | Err(BuildError::Worker(_) | BuildError::SourceChanged { .. })
                );
                let opened = opened.map(|()| live.same_weights);
                if !kept {
                    self.let_go(number, seat);
                }
                opened
            }
            Err(error) => Err(error),
        };
        let mut queue = self.lock();
        queue.opened(Some(matches!(opened, Ok(true))));
        match opened {
            // Else it came too late to be of use.
            Err(BuildError::Interrupted) if self.crew.stop.is_set() && !queue.over() => {
                Err(BuildError::Interrupted)
            }
            _ => Ok(()),
        }
    }

    /// Seats a worker that makes the model already, and returns whether it could. Why not is of no matter: what ails the
    /// entry the first worker says, and one that was too large for another worker leaves the captures to the first.
    fn made_ahead(&self, seat: &mut Seat<'_>) -> bool {
        if let Seat::Starting(ahead) = std::mem::replace(seat, Seat::Empty)
            && let Some(worker) = ahead.worker()
        {
            *seat = Seat::Taken(worker);
        }
        matches!(seat, Seat::Taken(_))
    }

    pub(super) fn capture(
        &self,
        number: usize,
        seat: &mut Seat<'_>,
        job: usize,
    ) -> Result<(), BuildError> {
        let done = self.capture_one(number, seat, job);
        // Where it failed: what was queued for it alone is not made.
        self.lock().capture_over(job);
        done
    }

    fn capture_one(
        &self,
        number: usize,
        seat: &mut Seat<'_>,
        job: usize,
    ) -> Result<(), BuildError> {
        let Job { item, id, .. } = &self.jobs[job];
        let module = &self.options.spec.modules[item.module];
        let name = item.name(self.options.spec);
        let (inputs, structure) = match module.sized_inputs(&item.form.sizes) {
            Some(inputs) => (inputs, None),
            None => {
                let request = self.watch(module, &item.form.sizes);
                let task = (Work::Inputs, &*name);
                let ((answer, log), _) =
                    self.asked::<Sampled>(number, seat, task, &request, CAPTURE_LIMIT, &|_| ());
                match answer {
                    Ok(sampled) => (sampled.inputs, Some(sampled.structure)),
                    Err(error) => return self.fail(job, error, &log),
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
            },
            sizes: item.form.sizes.clone(),
            out: self.crew.scratch.join(format!("capture-{}", id.short())),
        };
        let task = (Work::Capture, &*name);
        let cut = |cut| self.cut(job, cut);
        let ((answer, log), seconds) =
            self.asked::<Captured>(number, seat, task, &request, CAPTURE_LIMIT, &cut);
        self.lock().captured_in(seconds);
        match answer {
            Ok(captured) => self.captured(job, captured),
            Err(error) => self.fail(job, error, &log),
        }
    }

    /// Queues what must be compiled for a program that is still being captured: that takes longer than the rest of it.
    fn cut(&self, job: usize, cut: Cut) {
        let Job { item, request, .. } = &self.jobs[job];
        // Whether an earlier choice holds is known at the end.
        let (Some(known), State::Miss { before: None, .. }, true) =
            (&self.plan.known, &item.state, item.form.compiled)
        else {
            return;
        };
        let tuned = request["tuned"] == true;
        let ways = self.ways(item, &cut.segments, &cut.passes, known, tuned);
        // What can't be read or written now can't be later either, and is said then.
        if let Ok(compiles) = self.compiles(item, &ways, &cut.segments, &cut.steps, known) {
            self.lock().cut(job, compiles);
            self.tell_others();
        }
    }

    /// Asks for inputs that the spec leaves out: from the samples it names, or from the model's own inputs where
    /// another module of it has them.
    fn watch(&self, module: &Module, sizes: &Sizes) -> Request {
        let model = &self.options.spec.model;
        let whole = self.options.spec.modules.iter().find(|other| {
            other.path.is_empty() && other.method == "forward" && other.inputs.is_some()
        });
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
            samples: model.samples.clone(),
            inputs: inputs.unwrap_or_default(),
            sizes: sizes.clone(),
        }
    }

    /// Queues what must be compiled for a captured program.
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
        let mut ways = self.ways(item, segments, &captured.passes, known, tuned);
        let mut chosen_by = None;
        if let Some((before, way)) = self.chosen_before(&self.jobs[job], &captured, known)? {
            (ways, chosen_by) = (vec![way], Some(before));
        }
        // First what is known to be under way: it may be over before the store is asked for it.
        let mut lacked = self.lock().cut_for(job);
        let compiles = self.compiles(item, &ways, segments, &captured.steps, known)?;
        let missing = compiles.iter().map(|compile| compile.key).collect();
        lacked.extend(&missing);
        let module = &self.options.spec.modules[item.module].name;
        let artifacts: BTreeSet<&Digest> = ways.iter().flat_map(|way| &way.keys).collect();
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
            missing: lacked.len(),
        });
        let waiting = Waiting {
            captured,
            missing,
            compiled: lacked.len(),
            ways,
            chosen_by,
        };
        // Then an earlier gate may hold. One that does not can start its own process.
        let as_before = waiting.compiled == 0
            && matches!(
                item.state,
                State::Miss {
                    before: Some(_),
                    ..
                }
            )
            && item.measured_before().is_none();
        self.lock().captured(job, waiting, compiles);
        if item.settings.compile.healthcheck && !as_before {
            self.start_judges();
        }
        Ok(())
    }

    /// Returns what the store lacks of a program's artifacts.
    fn compiles(
        &self,
        item: &Item,
        ways: &[Way],
        segments: &[Segment],
        steps: &[CapturedStep],
        known: &Known,
    ) -> Result<Vec<Compile>, BuildError> {
        let name = item.name(self.options.spec);
        let mut compiles: Vec<Compile> = Vec::new();
        // What is queued last is compiled first.
        for way in ways.iter().rev().filter(|way| way.refused.is_none()) {
            for (index, (key, segment)) in way.keys.iter().zip(segments).enumerate() {
                if self.options.store.keep_artifact(key)? || compiles.iter().any(|c| c.key == *key)
                {
                    continue;
                }
                let step = steps.iter().find(|step| step.segment == index);
                let step = step.map_or("", |step| &step.name);
                compiles.push(Compile {
                    key: *key,
                    explained: way.set.key(item, segment, known).1,
                    segment: segment.clone(),
                    set: way.set.clone(),
                    name: way.of(format!("{name} {step}").trim_end(), ways.len()),
                });
            }
        }
        Ok(compiles)
    }
}
