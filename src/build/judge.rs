//! The process that judges the next program, started before there is one: it has libtorch and the device ready then.

use std::sync::PoisonError;

use super::{gate, jobs::Shared};

impl Shared<'_> {
    /// Starts the process that judges the next program, where there will be one; unless there is one already, or somebody
    /// is to be alone.
    pub(super) fn start_judge(&self) {
        let beside = self.crew.quiet.try_read();
        if beside.is_err() || self.options.jobs == 1 {
            return;
        }
        // Held while the queue is asked: else who has the last program to judge could start one meanwhile.
        let mut judge = self.judge.lock().unwrap_or_else(PoisonError::into_inner);
        if judge.is_none() && self.lock().will_gate() {
            let device = self.options.spec.target.device;
            // Who needs one and can't start it says so.
            *judge = gate::Child::start(&self.options.gate, self.options.store.path(), device).ok();
        }
    }

    /// Ends the process that waits to judge a program: it holds a context of the device, some hundred MB of it.
    pub(super) fn end_judge(&self) {
        drop((self.judge.lock().unwrap_or_else(PoisonError::into_inner)).take());
    }

    /// Takes the process that was started to judge a program, if it is there.
    pub(super) fn take_judge(&self) -> Option<gate::Child> {
        let mut judge = (self.judge.lock().unwrap_or_else(PoisonError::into_inner)).take()?;
        judge.waits().then_some(judge)
    }
}
