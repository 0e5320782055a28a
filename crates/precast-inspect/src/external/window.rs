//! Limited reading of one file.

use std::{
    cell::{Cell, OnceCell},
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileExt,
};

use super::Parsed;

/// Bytes that may be read of any file, and the multiple of its size that is added.
const BYTES: u64 = 256 << 20;
const TIMES: u64 = 8;

/// The bytes that may still be read or unpacked of a file, by all its windows.
///
/// A small file can refer to the same bytes many times, or unpack to a large size, while each part of it looks sound.
/// The limit covers the sum. After it is exceeded, every read fails.
pub(super) struct Limit {
    left: Cell<u64>,
    refused: OnceCell<String>,
}

impl Limit {
    /// Returns the limit of a file with `size` bytes.
    pub fn of(size: u64) -> Self {
        Self {
            left: Cell::new(BYTES.saturating_add(size.saturating_mul(TIMES))),
            refused: OnceCell::new(),
        }
    }

    /// Subtracts bytes that were read.
    pub fn take(&self, bytes: usize) -> io::Result<()> {
        let left = self.left.get().checked_sub(bytes as u64);
        self.left.set(left.unwrap_or(0));
        if left.is_none() {
            let why = "its parts overlap or unpack to many times its size";
            return Err(io::Error::other(self.refuse(why.to_owned())));
        }
        Ok(())
    }

    /// Runs `parse` with a smaller limit.
    pub fn within<T>(&self, bytes: u64, parse: impl FnOnce() -> T) -> T {
        let before = self.left.get();
        let inner = before.min(bytes);
        self.left.set(inner);
        let parsed = parse();
        self.left.set(before - (inner - self.left.get()));
        parsed
    }

    /// Refuses the file, and returns the reason.
    pub fn refuse(&self, why: String) -> String {
        self.refused.get_or_init(|| why).clone()
    }

    /// Returns the reason if the file was refused. A parser may ignore the error of a read.
    pub fn refused(&self) -> Option<String> {
        self.refused.get().cloned()
    }
}

/// A part of a file, with a separate position.
#[derive(Clone, Copy)]
pub(super) struct Window<'a> {
    pub limit: &'a Limit,
    file: &'a File,
    start: u64,
    pub size: u64,
    at: u64,
}

impl<'a> Window<'a> {
    /// Returns the window of the first `size` bytes of a file.
    pub fn new(file: &'a File, size: u64, limit: &'a Limit) -> Self {
        Self {
            limit,
            file,
            start: 0,
            size,
            at: 0,
        }
    }

    /// Returns the window of `start..start + size` of the file.
    pub fn part(self, start: u64, size: u64) -> Self {
        Self {
            start,
            size,
            at: 0,
            ..self
        }
    }

    /// Returns up to `size` bytes from `at`: fewer at the end of the window.
    pub fn bytes(mut self, at: u64, size: u64) -> Parsed<Vec<u8>> {
        self.at = at;
        let mut bytes = Vec::new();
        let read = self.take(size).read_to_end(&mut bytes);
        read.map_err(|error| error.to_string())?;
        Ok(bytes)
    }
}

impl Read for Window<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.size.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let want = left.min(into.len());
        let place = self.start.saturating_add(self.at);
        let got = self.file.read_at(&mut into[..want], place)?;
        self.limit.take(got)?;
        self.at += got as u64;
        Ok(got)
    }
}

impl Seek for Window<'_> {
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
