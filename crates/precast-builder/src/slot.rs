//! A thread's slot for a worker process: the worker's start, its requests and its end, and the time of each action.
//!
//! The first worker holds the model. Another one loads it too when captures wait, if that gives the same model.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use precast_store::record::SourceFile;
use serde::de::DeserializeOwned;

use super::{
    BuildError,
    estimate::Estimate,
    executor::Executor,
    model::{LoadedModel, open_model},
    options::Options,
    progress::Event,
    protocol::Request,
    schedule::{Able, Captures},
    task::{Action, Task, TaskFailure},
    worker::Worker,
    workers::Workers,
};

/// Everything that the threads of a build share.
pub(super) struct Context<'a> {
    pub workers: &'a Workers<'a>,
    pub model: &'a LoadedModel,
    pub executor: Executor<Task>,
    pub estimate: Mutex<Estimate>,
}

impl<'a> Context<'a> {
    pub fn options(&self) -> &'a Options<'a> {
        self.workers.options
    }

    pub fn event(&self, event: &Event<'_>) {
        self.workers.progress.event(event);
    }

    pub fn estimate(&self) -> MutexGuard<'_, Estimate> {
        self.estimate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Slot<'a> {
    pub context: &'a Context<'a>,
    number: usize,
    worker: Option<Box<Worker>>,
    /// Whether its worker has not loaded the same model as the first worker: then it captures nothing.
    other_model: bool,
}

impl<'a> Slot<'a> {
    pub fn new(context: &'a Context<'a>, number: usize, worker: Option<Worker>) -> Self {
        Self {
            context,
            number,
            worker: worker.map(Box::new),
            other_model: false,
        }
    }

    pub fn able(&self) -> Able {
        let loaded = self.worker.as_ref().is_some_and(|worker| worker.opened);
        let captures = if self.number == 0 {
            Captures::Holds
        } else if self.other_model {
            Captures::Never
        } else if loaded {
            Captures::Holds
        } else {
            Captures::MayLoad
        };
        let worker = self.worker.is_some();
        Able { captures, worker }
    }

    pub fn end_worker(&mut self) {
        self.worker = None;
    }

    /// Loads the model in this slot's worker too. Returns whether it is the same one. The reason of a failure does not
    /// matter: the first worker has the model.
    pub fn load_model(&mut self) -> bool {
        let (context, number) = (self.context, self.number);
        let loaded = self.worker().and_then(|worker| {
            let load = || load_same_model(context, worker);
            timed(context, number, Action::LoadModel, "the model", load)
        });
        if !matches!(
            loaded,
            Ok(_) | Err(BuildError::Worker(_) | BuildError::SourceChanged { .. })
        ) {
            // The worker is in an unknown state, or has ended.
            self.worker = None;
        }
        let same = matches!(loaded, Ok(true));
        self.other_model |= !same;
        same
    }

    /// Sends a request to the worker, as [`retried`] does. Returns the answer with the worker's log of it.
    pub fn ask<T: DeserializeOwned>(
        &mut self,
        action: Action,
        what: &str,
        request: &Request,
        limit: Duration,
    ) -> Result<(T, Vec<u8>), TaskFailure> {
        let (context, number) = (self.context, self.number);
        let limit = context.options().timeout.unwrap_or(limit);
        let ask = || self.ask_once(request, limit);
        retried(context, number, action, what, ask, |failure| &failure.error)
    }

    fn ask_once<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        limit: Duration,
    ) -> Result<(T, Vec<u8>), TaskFailure> {
        let (context, number) = (self.context, self.number);
        let worker = self.worker()?;
        // A worker that was started again has no model yet.
        let needs_model = matches!(
            request,
            Request::Capture { .. }
                | Request::Truth { .. }
                | Request::Inputs { .. }
                | Request::Check { .. }
        );
        if needs_model && !worker.opened {
            let loaded = load_same_model(context, worker);
            worker.opened |= matches!(loaded, Ok(false));
            if let Err(error) = loaded {
                if !matches!(error, BuildError::Worker(_)) {
                    self.worker = None;
                }
                return Err(error.into());
            }
        }
        let start = worker.log_len();
        let mut on_event = |phase: &str| {
            let worker = number;
            context.event(&Event::Phase { worker, phase });
        };
        let answer = worker.call(request, limit, &mut on_event);
        let log = worker.log_since(start);
        if !matches!(answer, Ok(_) | Err(BuildError::Worker(_))) {
            // The worker is in an unknown state, or has ended: the next task gets a new one.
            self.worker = None;
        }
        match answer {
            Ok(answer) => Ok((answer, log)),
            Err(error) => Err(TaskFailure { error, log }),
        }
    }

    /// Runs `body` as an action of this slot. If it ran out of memory, runs it again with no other task running.
    pub fn retried<T>(
        &self,
        action: Action,
        what: &str,
        body: impl FnMut() -> Result<T, BuildError>,
    ) -> Result<T, BuildError> {
        retried(self.context, self.number, action, what, body, |error| error)
    }

    /// Runs `body` as an action of this slot, while no other task runs.
    pub fn exclusive<T>(&self, action: Action, what: &str, body: impl FnOnce() -> T) -> T {
        let run = || timed(self.context, self.number, action, what, body);
        self.context.executor.exclusive(run)
    }

    /// Reports that an action is repeated, with the reason.
    pub fn again(&self, action: Action, what: &str, message: &str) {
        self.context.event(&Event::Again {
            worker: self.number,
            job: action.name(),
            what,
            message,
        });
    }

    /// Returns the slot's worker. Starts one if there is none.
    fn worker(&mut self) -> Result<&mut Worker, BuildError> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => Box::new(self.context.workers.start(self.number)?.0),
        };
        Ok(self.worker.insert(worker))
    }
}

/// Runs `body` between the two events of an action. Returns its result.
fn timed<T>(
    context: &Context<'_>,
    worker: usize,
    action: Action,
    what: &str,
    body: impl FnOnce() -> T,
) -> T {
    let job = action.name();
    context.event(&Event::Begin { worker, job, what });
    let jobs = context.options().jobs;
    let remaining =
        (context.executor).with(|schedule| context.estimate().remaining(schedule, jobs));
    if let Some(seconds) = remaining {
        context.event(&Event::Remaining { seconds });
    }
    let started = Instant::now();
    let result = body();
    let seconds = started.elapsed().as_secs_f64();
    if let Some(kind) = action.kind() {
        context.estimate().took(kind, seconds);
    }
    context.event(&Event::End {
        worker,
        job,
        what,
        seconds,
    });
    result
}

/// Runs `body` as [`timed`] does. If it ran out of memory, runs it again with no other task running: another task, the
/// worker itself or another process on the device may have used the memory.
fn retried<T, E>(
    context: &Context<'_>,
    worker: usize,
    action: Action,
    what: &str,
    mut body: impl FnMut() -> Result<T, E>,
    error_of: impl Fn(&E) -> &BuildError,
) -> Result<T, E> {
    let options = context.options();
    let failure = match timed(context, worker, action, what, &mut body) {
        Ok(value) => return Ok(value),
        Err(failure) => failure,
    };
    let error = error_of(&failure);
    let again = match error {
        // A worker that exceeded its own limit, or ran without other tasks, would exceed it again.
        BuildError::WorkerGreedy { .. } => options.memory.is_none() && options.jobs > 1,
        _ => error.short_of_memory(),
    };
    if !again {
        return Err(failure);
    }
    context.event(&Event::Again {
        worker,
        job: action.name(),
        what,
        message: &error.to_string(),
    });
    context.executor.end_loads();
    let retry = || timed(context, worker, action, what, body);
    context.executor.exclusive(retry)
}

/// Loads the model in a worker other than the first. Returns whether it is the same model. Otherwise the worker
/// captures nothing.
fn load_same_model(context: &Context<'_>, worker: &mut Worker) -> Result<bool, BuildError> {
    let options = context.options();
    worker.stop = context.executor.loads.clone();
    let (command_line, weights) = (&options.request.command_line, &context.model.weights);
    let opened = open_model(options.spec, command_line, weights, worker);
    worker.stop = context.workers.stop.clone();
    let opened = opened?;
    let model = context.model;
    let changed = |source: &&SourceFile| !model.known.entry.sources.contains(source);
    if let Some(source) = opened.sources.iter().find(changed) {
        worker.opened = false;
        return Err(BuildError::SourceChanged {
            path: source.path.clone(),
        });
    }
    worker.opened = opened.fingerprint == model.fingerprint;
    Ok(worker.opened)
}
