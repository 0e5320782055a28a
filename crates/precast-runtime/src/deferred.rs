//! The device's notes of calls that nobody has waited for.
//!
//! A call returns before the device has looked at its values. Whoever reads the outputs through the runtime waits for
//! the notes; others go on, and learn of a bad value by the next call of the model that finds the notes there, or by
//! [`Model::check`](super::Model::check). A call whose outputs somebody still has is theirs to read: in a service one
//! request with a bad value is no error of the others. So that no more than [`LIMIT`] of the other calls are unknown, a
//! call beyond that waits for the oldest.

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

type Waiting = VecDeque<(u64, Arc<Flags>)>;

/// The unread notes of a model's calls, in order.
#[derive(Default)]
pub(super) struct DeferredChecks {
    waiting: Mutex<Waiting>,
    /// Calls with notes so far.
    calls: AtomicU64,
}

impl DeferredChecks {
    /// Takes the notes of a call.
    pub fn add(&self, flags: &Arc<Flags>) {
        let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push_back((number, flags.clone()));
    }

    /// Reads the notes that are there. Fails with the value of an earlier call that was out of bounds, once.
    pub fn poll(&self) -> Result<(), RuntimeError> {
        while let Some((number, flags)) = self.next(|waiting| {
            let mut given_up = (waiting.iter().enumerate())
                .filter(|(_, (_, flags))| !flags.is_unread() || Arc::strong_count(flags) == 1);
            let Some((oldest, (_, flags))) = given_up.next() else {
                return Ok(None);
            };
            let mut more_than_limit = || given_up.nth(LIMIT - 1).is_some();
            let wanted = !flags.is_unread() || more_than_limit() || flags.ready()?;
            Ok(wanted.then_some(oldest))
        })? {
            judge(number, &flags)?;
        }
        Ok(())
    }

    /// Waits for all notes, and reads them.
    pub fn settle(&self) -> Result<(), RuntimeError> {
        while let Some((number, flags)) = self.next(|_| Ok(Some(0)))? {
            judge(number, &flags)?;
        }
        Ok(())
    }

    /// Takes the notes at the place that `choose` returns.
    fn next(
        &self,
        choose: impl FnOnce(&Waiting) -> Result<Option<usize>, RuntimeError>,
    ) -> Result<Option<(u64, Arc<Flags>)>, RuntimeError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(choose(&waiting)?.and_then(|at| waiting.remove(at)))
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
