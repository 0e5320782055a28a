//! The device's notes of calls that nobody has waited for.
//!
//! A call returns before the device has looked at its values. Whoever reads the outputs through the runtime waits for
//! the notes; others go on, and learn of a bad value by the next call of the model that finds the notes there, or by
//! [`Model::check`](super::Model::check). So that no more than [`LIMIT`] calls are unknown, a call beyond that waits for
//! the oldest.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{RuntimeError, flags::Flags};

/// Calls whose notes may be under way.
const LIMIT: usize = 256;

/// The unread notes of a model's calls, in order.
#[derive(Default)]
pub(super) struct Late {
    waiting: Mutex<VecDeque<(u64, Arc<Flags>)>>,
    /// Calls with notes so far.
    calls: AtomicU64,
}

impl Late {
    /// Takes the notes of a call.
    pub fn add(&self, flags: &Arc<Flags>) {
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push_back((number, flags.clone()));
    }

    /// Reads the notes that are there. Fails with the value of an earlier call that was out of bounds, once.
    pub fn poll(&self) -> Result<(), RuntimeError> {
        while let Some((number, flags)) =
            self.next(|count, flags| Ok(count > LIMIT || !flags.is_unread() || flags.ready()?))?
        {
            judge(number, &flags)?;
        }
        Ok(())
    }

    /// Waits for all notes, and reads them.
    pub fn settle(&self) -> Result<(), RuntimeError> {
        while let Some((number, flags)) = self.next(|_, _| Ok(true))? {
            judge(number, &flags)?;
        }
        Ok(())
    }

    /// Takes the oldest notes, if they are `wanted`.
    fn next(
        &self,
        wanted: impl FnOnce(usize, &Flags) -> Result<bool, RuntimeError>,
    ) -> Result<Option<(u64, Arc<Flags>)>, RuntimeError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let count = waiting.len();
        match waiting.front() {
            Some((_, flags)) if wanted(count, flags)? => Ok(waiting.pop_front()),
            _ => Ok(None),
        }
    }
}

fn judge(number: u64, flags: &Flags) -> Result<(), RuntimeError> {
    if !flags.is_unread() {
        return Ok(());
    }
    flags.check().map_err(|error| match error {
        error @ (RuntimeError::BadInput { .. } | RuntimeError::CheckFailed { .. }) => {
            RuntimeError::EarlierCall {
                number,
                error: Box::new(error),
            }
        }
        other => other,
    })
}
