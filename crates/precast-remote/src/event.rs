//! What a push or a pull says while it works.

use std::{
    io::{self, Read},
    sync::atomic::{AtomicBool, Ordering},
};

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

/// A file whose bytes are told as they move, and which ends where the caller stops.
pub(crate) struct Counted<'a, R> {
    pub read: R,
    pub tell: &'a Tell<'a>,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.tell.go_on().map_err(io::Error::other)?;
        let count = self.read.read(into)?;
        (self.tell.moved)(count as u64);
        Ok(count)
    }
}
