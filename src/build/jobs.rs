//! The work of a build, spread over its workers.
//!
//! Each worker has a thread that takes the next task it may do from the [queue](super::queue): the first worker captures
//! programs (it holds the model), every worker compiles and gates, and others capture too where that is the sooner end.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError, atomic::Ordering},
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    BuildError, Options, Outcome,
    crew::{Crew, more_models},
    engine::{First, reopen},
    gate,
    pace::Pace,
    progress::{Event, Progress},
    protocol::{Cut, Request, Said, Weights},
    queue::{Next, Queue},
    task::{Hands, Role, Task},
    weights::{self, StoredWeights},
    worker::Worker,
};
use crate::{
    Digest,
    plan::{Item, Plan},
    record::Source,
};

/// One program to make.
pub(super) struct Job<'a> {
    /// Index into the plan's items.
    pub index: usize,
    pub item: &'a Item,
    pub id: Digest,
    pub request: &'a Value,
}

/// What was done.
#[derive(Default)]
pub(super) struct Done {
    /// By index into the plan's items.
    pub outcomes: HashMap<usize, Outcome>,
    pub compiled: usize,
}

/// What a thread is at, as progress tells it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Open,
    Inputs,
    Capture,
    Compile,
    Gate,
    Measure,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Inputs => "inputs",
            Self::Capture => "capture",
            Self::Compile => "compile",
            Self::Gate => "gate",
            Self::Measure => "measure",
        }
    }
}

/// A worker that is getting ready, and for what.
pub(super) struct Ahead<'s> {
    pub role: Role,
    pub handle: ScopedJoinHandle<'s, Result<Worker, BuildError>>,
}

impl Ahead<'_> {
    /// Waits until it is ready, and returns the worker if it could get ready.
    pub fn worker(self) -> Option<Box<Worker>> {
        let ready = self.handle.join().ok().and_then(Result::ok);
        ready.map(Box::new)
    }
}

/// The worker of one thread.
pub(super) enum Seat<'s> {
    Empty,
    Starting(Ahead<'s>),
    Taken(Box<Worker>),
    /// A worker that nothing is left for.
    Ending {
        _worker: Box<Worker>,
    },
}

impl Seat<'_> {
    /// Has the worker end, and does not wait until it has: that takes a while where it holds memory of a device.
    fn dismiss(&mut self) {
        let worker = match std::mem::replace(self, Self::Empty) {
            Self::Taken(worker) => Some(worker),
            Self::Starting(ahead) if ahead.handle.is_finished() => ahead.worker(),
            other => {
                *self = other;
                return;
            }
        };
        if let Some(mut worker) = worker {
            worker.kill();
            *self = Self::Ending { _worker: worker };
        }
    }

    fn hands(&self) -> Hands {
        match self {
            Self::Empty | Self::Ending { .. } => Hands::Empty,
            Self::Starting(ahead) if !ahead.handle.is_finished() => Hands::Starting(ahead.role),
            Self::Starting(ahead) => Hands::Ready {
                role: ahead.role,
                opened: false,
            },
            Self::Taken(worker) => Hands::Ready {
                role: worker.role,
                opened: worker.opened && worker.same_weights,
            },
        }
    }
}

pub(super) struct Shared<'a> {
    pub crew: &'a Crew<'a>,
    pub options: &'a Options<'a>,
    pub progress: &'a dyn Progress,
    pub plan: &'a Plan,
    pub jobs: &'a [Job<'a>],
    given: Weights,
    pace: Mutex<Pace>,
    /// Tells the model's weights from others.
    fingerprint: Option<String>,
    pub weights: OnceLock<StoredWeights>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// The processes that judge the next programs, the one that was started first in front.
    pub judges: Mutex<Vec<gate::Child>>,
    /// What was said of programs already.
    pub noted: Mutex<BTreeSet<String>>,
}

/// Does `jobs`, starting with a worker that holds the model and those that are getting ready. Returns the weight set
/// too, as the store has it.
pub(super) fn run(
    crew: &Crew<'_>,
    plan: &Plan,
    jobs: &[Job<'_>],
    first: First,
    ahead: Vec<Ahead<'_>>,
    weights: Weights,
) -> Result<(Done, StoredWeights), BuildError> {
    let threads = crew.options.jobs.max(1);
    let compiled = jobs.iter().map(|job| job.item.form.compiled);
    let captures = compiled.enumerate();
    let named = crew.options.spec.model.weights.file();
    let more = more_models(crew, named.or(weights.file.as_deref()));
    let opening = (more > 0).then_some((first.seconds, more));
    let roles: Vec<Role> = ahead.iter().map(|ahead| ahead.role).collect();
    let queue = Queue::new(captures, threads, &roles, opening);
    let shared = Shared {
        crew,
        options: crew.options,
        progress: crew.progress,
        plan,
        jobs,
        given: weights,
        weights: OnceLock::new(),
        pace: Mutex::new(Pace::new(plan, crew.options.spec, crew.options.store)?),
        fingerprint: first.fingerprint,
        queue: Mutex::new(queue),
        changed: Condvar::new(),
        judges: Mutex::default(),
        noted: Mutex::default(),
    };
    thread::scope(|scope| {
        let mut seats = std::iter::once(Seat::Taken(Box::new(first.worker)))
            .chain(ahead.into_iter().map(Seat::Starting));
        for number in 0..threads {
            let shared = &shared;
            let seat = seats.next().unwrap_or(Seat::Empty);
            scope.spawn(move || shared.serve(number, seat));
        }
    });
    let queue = shared
        .queue
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    match (queue.fatal, shared.weights.into_inner()) {
        (Some(error), _) => Err(error),
        (None, Some(weights)) => Ok((queue.done, weights)),
        (None, None) => Err(BuildError::Interrupted),
    }
}

impl<'s> Shared<'s> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes tasks until nothing is left that could bring more.
    fn serve(&self, number: usize, mut seat: Seat<'_>) {
        while let Some(task) = self.next(number, &mut seat) {
            let opening = matches!(task, Task::Open);
            let result = match task {
                Task::Weights => self.put_weights(),
                Task::Capture(job) => self.capture(number, &mut seat, job),
                Task::Compile(compile) => self.compile(number, &mut seat, *compile),
                Task::Gate(job) => self.gate(number, job),
                Task::Open => self.open_beside(number, &mut seat),
                Task::Measure(job, draft) => self.decide(number, job, *draft),
                Task::Start => self.hire(number, &mut seat),
            };
            let failed = result.is_err();
            self.lock().ended(opening, seat.hands(), result);
            if failed {
                // Nobody waits for what the others are at.
                self.crew.stop.set();
            }
            self.changed.notify_all();
        }
        // Nor for a model that is still being made.
        self.crew.stop.set();
    }

    fn next(&self, number: usize, seat: &mut Seat<'_>) -> Option<Task> {
        const POLL: Duration = Duration::from_millis(20);
        let mut queue = self.lock();
        loop {
            if self.crew.stop.is_set() && !queue.over() {
                queue.fatal.get_or_insert(BuildError::Interrupted);
            }
            let hands = seat.hands();
            match queue.next(number == 0, hands) {
                Next::Do(task) => {
                    let judged = matches!(task, Task::Gate(_) | Task::Measure(..));
                    if judged && queue.only_gates() {
                        drop(queue);
                        seat.dismiss();
                    }
                    return Some(task);
                }
                Next::Done => return None,
                Next::Wait if queue.only_gates() && matches!(hands, Hands::Ready { .. }) => {
                    drop(queue);
                    seat.dismiss();
                    queue = self.lock();
                }
                Next::Wait if !matches!(hands, Hands::Starting(_)) => {
                    queue = self.changed(queue);
                }
                Next::Wait => {
                    let waited = self.changed.wait_timeout(queue, POLL);
                    queue = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Starts a worker for work that is there or will be; without it the others do that work.
    fn hire(&self, number: usize, seat: &mut Seat<'_>) -> Result<(), BuildError> {
        let needed_now = self.lock().waits();
        let worker = match needed_now {
            true => {
                let _quiet = self.crew.beside();
                self.crew.start(number).map(|(worker, _)| worker)
            }
            false => self.crew.prepare(number, None),
        };
        match worker {
            Ok(worker) => *seat = Seat::Taken(Box::new(worker)),
            Err(BuildError::Interrupted) => return Err(BuildError::Interrupted),
            Err(_) => self.lock().not_hired(),
        }
        Ok(())
    }

    fn put_weights(&self) -> Result<(), BuildError> {
        let stored = weights::put(self.options, &self.given, self.progress)?;
        let written = self.given.file.as_ref();
        if let Some(written) = written.filter(|file| file.starts_with(self.crew.scratch)) {
            // The store has it; if this fails, it goes with the folder that it is in.
            let _ = fs::remove_file(written);
        }
        self.weights.get_or_init(|| stored);
        self.lock().weights_are_there();
        Ok(())
    }

    /// Has those that have nothing to do look at the queue again.
    pub(super) fn tell_others(&self) {
        self.changed.notify_all();
    }

    /// Waits until something in the queue has changed.
    pub(super) fn changed<'q>(&self, queue: MutexGuard<'q, Queue>) -> MutexGuard<'q, Queue> {
        let changed = self.changed.wait(queue);
        changed.unwrap_or_else(PoisonError::into_inner)
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says how long it will still take.
    fn tell_left(&self) {
        let name = |(job, compiled): (usize, bool)| {
            (self.jobs[job].item.name(self.options.spec), compiled)
        };
        let (left, workers) = self.lock().left_to_do(name);
        if let Some(seconds) = self.pace().left(&left, workers) {
            self.progress.event(&Event::Left { seconds });
        }
    }

    /// Runs `body` between the two events of a task, and returns its result with the seconds it took. What is to be alone
    /// waits until nothing else is done, and has the others wait; a model that nobody will need it ends.
    pub(super) fn told<T>(
        &self,
        worker: usize,
        work: Work,
        what: &str,
        alone: bool,
        body: impl FnOnce() -> T,
    ) -> (T, f64) {
        let job = work.name();
        if alone && self.lock().all_captured() {
            self.crew.late.store(true, Ordering::Relaxed);
        }
        let (_others, _alone) = match alone {
            true => {
                let alone = self.crew.quiet.write();
                (None, Some(alone.unwrap_or_else(PoisonError::into_inner)))
            }
            false => (Some(self.crew.beside()), None),
        };
        self.progress.event(&Event::Begin { worker, job, what });
        self.pace().begin(worker, job, what);
        self.tell_left();
        let started = Instant::now();
        let result = body();
        let seconds = started.elapsed().as_secs_f64();
        self.pace().end(worker, job, seconds);
        self.progress.event(&Event::End {
            worker,
            job,
            what,
            seconds,
        });
        (result, seconds)
    }

    /// Does what [`Self::told`] does, and once more and alone where memory was short that others may have had: those of
    /// this build, what the worker kept, or another process on the device. `failed` says how it failed.
    pub(super) fn tried<T>(
        &self,
        worker: usize,
        work: Work,
        what: &str,
        mut body: impl FnMut() -> T,
        failed: impl Fn(&T) -> Option<&BuildError>,
    ) -> (T, f64) {
        let first = self.told(worker, work, what, false, &mut body);
        // What may take so much in any company, or had none, does not do with less.
        let more = |error: &&BuildError| match error {
            BuildError::WorkerGreedy { .. } => {
                self.options.memory.is_none() && self.options.jobs > 1
            }
            _ => error.short_of_memory(),
        };
        let Some(error) = failed(&first.0).filter(more) else {
            return first;
        };
        self.progress.event(&Event::Again {
            worker,
            job: work.name(),
            what,
            message: &error.to_string(),
        });
        self.told(worker, work, what, true, || {
            if work != Work::Gate {
                self.end_judges();
            }
            body()
        })
    }

    /// Does a task by asking this thread's worker, as [`Self::tried`] does, and returns the answer with what it logged.
    /// `cut` gets to know what is to be compiled as soon as a capture says so.
    pub(super) fn asked<T: serde::de::DeserializeOwned>(
        &self,
        number: usize,
        seat: &mut Seat<'_>,
        (work, what): (Work, &str),
        request: &Request,
        limit: Duration,
        cut: &dyn Fn(Cut),
    ) -> ((Result<T, BuildError>, Vec<u8>), f64) {
        let limit = self.limit(limit);
        let ask = || self.ask(number, seat, request, limit, cut);
        self.tried(number, work, what, ask, |(answer, _)| answer.as_ref().err())
    }

    /// Asks this thread's worker, starting it where it isn't there, and returns the answer with what it logged.
    fn ask<T: serde::de::DeserializeOwned>(
        &self,
        number: usize,
        seat: &mut Seat<'_>,
        request: &Request,
        limit: Duration,
        cut: &dyn Fn(Cut),
    ) -> (Result<T, BuildError>, Vec<u8>) {
        let live = match self.take_seat(number, seat) {
            Ok(live) => live,
            Err(error) => return (Err(error), vec![]),
        };
        let captures = matches!(request, Request::Capture { .. });
        if captures
            && !live.opened
            && let Err(error) = self.reopen(live)
        {
            // What it has imported stays imported: only a fresh one can make another model.
            if !matches!(error, BuildError::Worker(_)) {
                self.let_go(number, seat);
            }
            return (Err(error), vec![]);
        }
        let start = live.log_len();
        let mut heard = |said| match said {
            Said::Cut(found) => cut(found),
            Said::Phase(phase) => {
                let (worker, phase) = (number, &*phase);
                self.progress.event(&Event::Phase { worker, phase });
            }
        };
        let answer = live.call(request, limit, &mut heard);
        if matches!(request, Request::Compile { .. }) {
            live.role = Role::Compile;
        }
        let log = live.log_since(start);
        if !matches!(answer, Ok(_) | Err(BuildError::Worker(_))) {
            // It is in an unknown state, or gone: the next task gets a fresh one.
            self.let_go(number, seat);
        }
        (answer, log)
    }

    /// Ends the worker of a thread.
    pub(super) fn let_go(&self, number: usize, seat: &mut Seat<'_>) {
        *seat = Seat::Empty;
        if number != 0 {
            self.lock().left();
        }
    }

    /// Makes the model again in another worker, which must be made from what the first one was made from: else it doesn't
    /// count as open, and captures nothing.
    pub(super) fn reopen(&self, worker: &mut Worker) -> Result<(), BuildError> {
        let opened = match worker.made.take() {
            Some(opened) => opened,
            None => reopen(self.options, worker, None)?,
        };
        worker.same_weights = opened.fingerprint == self.fingerprint;
        let known = self.plan.known.as_ref().map(|known| &known.entry.sources);
        let changed = |source: &&Source| known.is_some_and(|known| !known.contains(source));
        match opened.sources.iter().find(changed) {
            Some(source) => {
                worker.opened = false;
                Err(BuildError::SourceChanged {
                    path: source.path.clone(),
                })
            }
            None => Ok(()),
        }
    }

    /// Returns how long something may take.
    pub(super) fn limit(&self, usual: Duration) -> Duration {
        self.options.timeout.unwrap_or(usual)
    }

    /// Returns the worker of a thread, starting one where there is none.
    pub(super) fn take_seat<'w>(
        &self,
        number: usize,
        seat: &'w mut Seat<'_>,
    ) -> Result<&'w mut Worker, BuildError> {
        let started = match std::mem::replace(seat, Seat::Empty) {
            Seat::Taken(worker) => Some(worker),
            // One that could not get ready is replaced.
            Seat::Starting(ahead) => ahead.worker(),
            Seat::Empty | Seat::Ending { .. } => None,
        };
        let worker = match started {
            Some(worker) => worker,
            None => match self.crew.start(number) {
                Ok((worker, _)) => Box::new(worker),
                Err(error) => {
                    self.let_go(number, seat);
                    return Err(error);
                }
            },
        };
        *seat = Seat::Taken(worker);
        match seat {
            Seat::Taken(worker) => Ok(worker),
            _ => unreachable!("it was taken a line above"),
        }
    }
}
