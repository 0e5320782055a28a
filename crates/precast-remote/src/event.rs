//! What a push or a pull says while it works.

use std::sync::atomic::{AtomicBool, Ordering};

use precast_store::transfer::Plan;

use crate::error::RemoteError;

/// What a transfer tells its caller, and when it stops.
pub struct Tell<'a> {
    /// Called with the plan, before anything moves.
    pub plan: &'a (dyn Fn(&Plan) + Sync),
    /// Called with the bytes that have moved since the last call.
    pub moved: &'a (dyn Fn(u64) + Sync),
    /// Set to stop.
    pub stop: &'a AtomicBool,
}

impl Tell<'_> {
    pub(crate) fn go_on(&self) -> Result<(), RemoteError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(RemoteError::Interrupted);
        }
        Ok(())
    }
}
