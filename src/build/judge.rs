//! The processes that judge the next programs, started before there are any: they have libtorch and the device ready then.

use std::sync::PoisonError;

use super::{gate, jobs::Shared};

/// Workers for each process that waits, and how many of those there are at most: each holds a context of the device, some
/// hundred MB of it.
const WORKERS: usize = 4;
const MOST: usize = 3;

impl Shared<'_> {
    /// Starts processes that judge the next programs, where there will be some; unless there are enough already, or somebody
    /// is to be alone.
    pub(super) fn start_judges(&self) {
        let beside = self.crew.quiet.try_read();
        if beside.is_err() || self.options.jobs == 1 {
            return;
        }
        let most = (self.options.jobs / WORKERS).clamp(1, MOST);
        // Held while the queue is asked: else who has the last program to judge could start one meanwhile.
        let mut judges = self.judges.lock().unwrap_or_else(PoisonError::into_inner);
        while judges.len() < self.lock().to_gate().min(most) {
            let device = self.options.spec.target.device;
            match gate::Child::start(&self.options.gate, self.options.store.path(), device) {
                Ok(judge) => judges.push(judge),
                // Who needs one and can't start it says so.
                Err(_) => break,
            }
        }
    }

    /// Ends the processes that wait to judge a program.
    pub(super) fn end_judges(&self) {
        let mut judges = self.judges.lock().unwrap_or_else(PoisonError::into_inner);
        judges.clear();
    }

    /// Takes a process that was started to judge a program, the first of them that is there.
    pub(super) fn take_judge(&self) -> Option<gate::Child> {
        let mut judges = self.judges.lock().unwrap_or_else(PoisonError::into_inner);
        while !judges.is_empty() {
            let mut judge = judges.remove(0);
            if judge.waits() {
                return Some(judge);
            }
        }
        None
    }
}
