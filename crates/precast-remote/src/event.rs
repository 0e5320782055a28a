//! What a push or a pull says while it works.

use std::{
    fs::File,
    io::{self, Read, Seek},
    sync::atomic::{AtomicBool, Ordering},
};

use precast_store::{Digest, transfer::Plan};

use crate::{carrier::Source, error::RemoteError};

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

/// A file whose bytes are told as they move, each once, and which ends where the caller stops.
pub(crate) struct Counted<'a, R> {
    read: R,
    tell: &'a Tell<'a>,
    at: u64,
    told: u64,
}

impl<'a, R> Counted<'a, R> {
    pub fn new(read: R, tell: &'a Tell<'a>) -> Self {
        Self {
            read,
            tell,
            at: 0,
            told: 0,
        }
    }
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.tell.go_on().map_err(io::Error::other)?;
        let count = self.read.read(into)?;
        self.at += count as u64;
        if self.at > self.told {
            (self.tell.moved)(self.at - self.told);
            self.told = self.at;
        }
        Ok(count)
    }
}

impl Source for Counted<'_, File> {
    fn digest(&mut self) -> io::Result<Digest> {
        Source::rewind(self)?;
        let (digest, _) = Digest::of_reader(&mut self.read)?;
        Source::rewind(self)?;
        Ok(digest)
    }

    fn rewind(&mut self) -> io::Result<()> {
        self.at = 0;
        Seek::rewind(&mut self.read)
    }
}
