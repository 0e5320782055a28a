//! Runs a [schedule](super::schedule) with several threads: which one takes a task, and which one waits.
//!
//! When no task that needs a worker remains, workers end, which frees memory for the others.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::{
    BuildError,
    limits::Stop,
    schedule::{Able, Next, Node, Schedule},
};

pub(super) struct Executor<T> {
    shared: Mutex<Shared<T>>,
    changed: Condvar,
    /// Ends all tasks.
    stop: Stop,
    /// Ends the loads of further models.
    pub loads: Stop,
}

struct Shared<T> {
    schedule: Schedule<T>,
    /// The number of further workers that may load the model.
    more_models: usize,
    /// Workers that wait for a task, or are being started: compiles are left to them before others are started.
    idle: usize,
    fatal: Option<BuildError>,
}

impl<T: Node> Executor<T> {
    /// `starting` workers are being started.
    pub fn new(schedule: Schedule<T>, more_models: usize, starting: usize, stop: &Stop) -> Self {
        Self {
            shared: Mutex::new(Shared {
                schedule,
                more_models,
                idle: starting,
                fatal: None,
            }),
            changed: Condvar::new(),
            stop: stop.clone(),
            loads: stop.of_part(),
        }
    }

    /// Runs `body` on the schedule.
    pub fn with<R>(&self, body: impl FnOnce(&mut Schedule<T>) -> R) -> R {
        body(&mut self.lock().schedule)
    }

    /// Waits for the next task; none when all tasks have ended. `able` is asked under the lock of the schedule, again
    /// after each wait. `started`: whether the thread's worker counted as starting.
    pub fn next(&self, able: impl Fn() -> Able, started: bool) -> Option<Next<T>> {
        let mut shared = self.lock();
        // Under the lock of its first choice: otherwise another thread could start a worker for a task that this one
        // can do.
        shared.idle -= usize::from(started);
        loop {
            if self.stop.is_set() && !shared.schedule.over() {
                shared.fatal.get_or_insert(BuildError::Interrupted);
            }
            if shared.fatal.is_some() {
                return None;
            }
            let (may_load, idle) = (shared.more_models > 0, shared.idle);
            let able = able();
            match shared.schedule.next(able, may_load, idle) {
                Next::Over => return None,
                Next::Wait => {
                    shared.idle += usize::from(able.worker);
                    shared = self.wait(shared);
                    shared.idle -= usize::from(able.worker);
                }
                next => {
                    shared.more_models -= usize::from(matches!(next, Next::LoadModel));
                    return Some(next);
                }
            }
        }
    }

    /// Notes the end of a task, and whether it succeeded. An error ends all tasks.
    pub fn ended(&self, task: T, result: Result<bool, BuildError>) {
        let mut shared = self.lock();
        let done = matches!(result, Ok(true));
        shared.schedule.ended(task, done);
        if let Err(error) = result {
            shared.fatal.get_or_insert(error);
            self.stop.set();
        }
        self.changed.notify_all();
    }

    /// Notes the end of a load of the model. If it is not the same model, no other worker loads it.
    pub fn loaded(&self, same: bool) {
        let mut shared = self.lock();
        shared.schedule.loaded();
        if !same {
            shared.more_models = 0;
        }
        self.changed.notify_all();
    }

    /// Runs `body`, which is part of a task, while no other task runs.
    pub fn exclusive<R>(&self, body: impl FnOnce() -> R) -> R {
        let mut shared = self.lock();
        shared.schedule.wait_exclusive();
        // Others may wait for this one, too.
        self.changed.notify_all();
        while !shared.schedule.begin_exclusive() {
            shared = self.wait(shared);
        }
        drop(shared);
        let result = body();
        self.lock().schedule.end_exclusive();
        self.changed.notify_all();
        result
    }

    /// Cancels the loads of further models, because they take memory. Returns when they have ended. No other load
    /// begins.
    pub fn end_loads(&self) {
        self.loads.set();
        let mut shared = self.lock();
        shared.more_models = 0;
        while shared.schedule.loads_model() {
            shared = self.wait(shared);
        }
    }

    /// Returns the error that ended all tasks, if one did.
    pub fn finish(self) -> Result<(), BuildError> {
        let shared = self.shared.into_inner();
        let fatal = shared.unwrap_or_else(PoisonError::into_inner).fatal;
        fatal.map_or(Ok(()), Err)
    }

    fn lock(&self) -> MutexGuard<'_, Shared<T>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, shared: MutexGuard<'s, Shared<T>>) -> MutexGuard<'s, Shared<T>> {
        let changed = self.changed.wait(shared);
        changed.unwrap_or_else(PoisonError::into_inner)
    }
}
