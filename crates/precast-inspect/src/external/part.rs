//! A reader of one part of an open file.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileExt,
};

/// Bytes `start..start + size` of a file, with a position of its own.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    file: &'a File,
    start: u64,
    size: u64,
    at: u64,
}

impl<'a> Part<'a> {
    pub fn new(file: &'a File, start: u64, size: u64) -> Self {
        Self {
            file,
            start,
            size,
            at: 0,
        }
    }
}

impl Read for Part<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.size.saturating_sub(self.at);
        let want = into.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let Some(from) = self.start.checked_add(self.at) else {
            return Ok(0);
        };
        let got = self.file.read_at(&mut into[..want], from)?;
        self.at += got as u64;
        Ok(got)
    }
}

impl Seek for Part<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.size.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
