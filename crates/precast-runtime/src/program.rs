//! One program of a model: its record, its counters and its load state.
//!
//! | from | to | by |
//! |---|---|---|
//! | not loaded | loaded | a load: artifacts, a CUDA graph or eager |
//! | | failed | a load: nothing runs it, and the ladder answers for the life of the model |
//! | | resting | a load during which the host had a temporary error (no file handle, no memory, a failed read) |
//! | resting | loaded, failed, resting | the first call after the pause; each pause is twice as long as the previous one |
//!
//! A load that fails for any other reason is the caller's error and does not change the state.

use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use precast_store::record;

use super::{
    RuntimeError,
    host::make_room,
    loaded::Loaded,
    loader::{Loader, Outcome},
    pool::{self, Wait},
    stats::Counters,
};

/// The first and the longest pause of a resting program.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

/// One program of a model, loaded or not.
pub(super) struct Program {
    pub record: Arc<record::Program>,
    pub counters: Counters,
    /// Set once, by the load that settles the program; none if it failed. Calls read it without a lock.
    settled: OnceLock<Option<Loaded>>,
    /// Eager, which answers while the program rests.
    instead: OnceLock<Loaded>,
    pause: Mutex<Option<Pause>>,
    loading: Mutex<()>,
}

/// The load states of a program.
enum LoadState<'a> {
    NotLoaded,
    /// Eager may answer meanwhile.
    Resting(Pause, Option<&'a Loaded>),
    Loaded,
    Failed,
}

#[derive(Clone, Copy)]
struct Pause {
    until: Instant,
    length: Duration,
}

impl Program {
    pub fn new(record: Arc<record::Program>) -> Self {
        Self {
            record,
            counters: Counters::default(),
            settled: OnceLock::new(),
            instead: OnceLock::new(),
            pause: Mutex::default(),
            loading: Mutex::default(),
        }
    }

    fn state(&self) -> LoadState<'_> {
        match self.settled.get() {
            Some(Some(_)) => LoadState::Loaded,
            Some(None) => LoadState::Failed,
            None => match *self.pause() {
                Some(pause) => LoadState::Resting(pause, self.instead.get()),
                None => LoadState::NotLoaded,
            },
        }
    }

    fn pause(&self) -> MutexGuard<'_, Option<Pause>> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state after a load.
    fn set(&self, outcome: Outcome) {
        match outcome {
            Outcome::Loaded(loaded) => drop(self.settled.set(Some(loaded))),
            Outcome::Failed => drop(self.settled.set(None)),
            Outcome::Postponed(instead) => {
                if let Some(instead) = instead {
                    drop(self.instead.set(instead));
                }
                self.rest();
            }
        }
    }

    /// Begins a pause, twice as long as the one before.
    fn rest(&self) {
        let mut pause = self.pause();
        let length = pause.map_or(PAUSES[0], |pause| pause.length * 2);
        let length = length.min(PAUSES[1]);
        let until = Instant::now() + length;
        *pause = Some(Pause { until, length });
    }

    /// Returns the loaded program that answers calls; none if it is not loaded.
    pub fn loaded(&self) -> Option<&Loaded> {
        match self.settled.get() {
            Some(loaded) => loaded.as_ref(),
            None => self.instead.get(),
        }
    }

    /// Returns whether it was loaded or failed, so that it is not loaded again.
    pub fn settled(&self) -> bool {
        self.settled.get().is_some()
    }

    /// Returns whether nothing runs it now: it failed, or it rests without eager.
    pub fn lost(&self) -> bool {
        matches!(
            self.state(),
            LoadState::Failed | LoadState::Resting(_, None)
        )
    }

    pub fn rests(&self) -> bool {
        matches!(self.state(), LoadState::Resting(..))
    }

    /// Returns whether it rests and its pause is over.
    pub fn rested(&self) -> bool {
        matches!(self.state(), LoadState::Resting(pause, _) if pause.until <= Instant::now())
    }

    /// Returns whether eager runs it because its artifacts don't load.
    pub fn substituted(&self) -> bool {
        let eager = |loaded: &Loaded| loaded.is_eager() && !loaded.preferred;
        self.loaded().is_some_and(eager) && !self.record.steps.is_empty()
    }

    /// Returns whether eager runs it, or will.
    pub fn is_eager(&self) -> bool {
        let never_compiled = || self.record.steps.is_empty();
        self.loaded().map_or_else(never_compiled, Loaded::is_eager)
    }

    /// Loads it unless it is settled or rests. Waits for another caller that loads it.
    pub fn load(&self, loader: &Loader) -> Result<(), RuntimeError> {
        self.load_in(loader, Wait::Forever)
    }

    /// Loads it as [`Self::load`] does, with a limit for the wait.
    pub fn load_in(&self, loader: &Loader, wait: Wait) -> Result<(), RuntimeError> {
        if self.settled() {
            return Ok(());
        }
        let _loading = pool::lock(&self.loading, wait).ok_or_else(|| RuntimeError::Busy {
            module: self.record.module.as_str().into(),
            bucket: self.record.bucket(),
            slots: 1,
        })?;
        if self.settled() || (self.rests() && !self.rested()) {
            return Ok(());
        }
        // Held until the state is set: a swap finds the program loaded, or it is loaded with the new weights.
        let weights = loader
            .weights
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let outcome = loader.load(&self.record, &weights).inspect_err(|error| {
            make_room(loader.device, error);
            if self.rests() {
                self.rest();
            }
        })?;
        self.set(outcome);
        Ok(())
    }
}
