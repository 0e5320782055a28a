//! Digests of chunks, so that several threads can hash one unpacked file.
//!
//! SHA-256 is sequential: only one core can hash a file. So an unpacked file of more than one chunk has a tail after its
//! content, written in the same pass that checked the content against its digest:
//!
//! ```text
//! ┌─────────┬──────────────────────────┬──────────────────────────────────────────────────────────────┐
//! │ content │ SHA-256 of each chunk    │ name, size of the content, size of a chunk, digest of the     │
//! │         │                          │ content, SHA-256 of all of the tail before it: 96 bytes       │
//! └─────────┴──────────────────────────┴──────────────────────────────────────────────────────────────┘
//! ```
//!
//! The tail has the digest of its content, so that a file under a wrong name is detected. A file without a valid tail (one
//! of a single chunk, or of an older precast) is hashed whole.
//!
//! The tail detects errors of disks, cables and copies. It does not protect against a user who may write the store: they
//! can write other bytes with a tail that matches.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
};

use crate::{Digest, digest::Hasher};

/// Bytes of one chunk.
const CHUNK: u64 = 1 << 20;
const NAME: &[u8; 16] = b"precast chunks 1";
const FOOTER: usize = 96;
/// More threads than this read no faster.
const THREADS: usize = 16;

/// Passes content on, and takes the digests of its chunks.
pub(super) struct Summing<W> {
    inner: W,
    hasher: Hasher,
    size: u64,
    sums: Vec<Digest>,
}

impl<W: Write> Summing<W> {
    pub fn new(inner: W) -> Self {
        Self {
            inner,
            hasher: Hasher::default(),
            size: 0,
            sums: Vec::new(),
        }
    }

    /// Writes the tail, once all of the content was written and is known to have this digest.
    pub fn finish(mut self, digest: &Digest) -> io::Result<()> {
        if !self.size.is_multiple_of(CHUNK) {
            self.sums.push(self.hasher.finish());
        }
        if self.sums.len() < 2 {
            return Ok(());
        }
        let mut tail: Vec<u8> = self.sums.iter().flat_map(|sum| *sum.as_bytes()).collect();
        tail.extend(NAME);
        tail.extend(self.size.to_le_bytes());
        tail.extend(CHUNK.to_le_bytes());
        tail.extend(digest.as_bytes());
        let checksum = Digest::of(&tail);
        tail.extend(checksum.as_bytes());
        self.inner.write_all(&tail)
    }
}

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = CHUNK - self.size % CHUNK;
        let most = bytes.len().min(usize::try_from(room).unwrap_or(usize::MAX));
        let took = self.inner.write(&bytes[..most])?;
        self.hasher.update(&bytes[..took]);
        self.size += took as u64;
        if took as u64 == room {
            self.sums.push(std::mem::take(&mut self.hasher).finish());
        }
        Ok(took)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// What the bytes of a file must be.
struct Sums {
    size: u64,
    chunk: u64,
    sums: Vec<Digest>,
}

/// Returns what a sound tail says.
fn tail(file: &File, digest: &Digest) -> io::Result<Option<Sums>> {
    let length = file.metadata()?.len();
    let Some(start) = length.checked_sub(FOOTER as u64) else {
        return Ok(None);
    };
    let mut footer = [0; FOOTER];
    file.read_exact_at(&mut footer, start)?;
    let number = |at: usize| {
        let bytes = footer[at..at + 8].try_into();
        bytes.map_or(0, u64::from_le_bytes)
    };
    let (size, chunk) = (number(16), number(24));
    if footer[..16] != NAME[..] || footer[32..64] != digest.as_bytes()[..] || chunk == 0 {
        return Ok(None);
    }
    let count = size.div_ceil(chunk);
    if Some(start)
        != count
            .checked_mul(32)
            .and_then(|sums| sums.checked_add(size))
    {
        return Ok(None);
    }
    // No longer than the file is.
    let mut bytes = vec![0; usize::try_from(start - size).unwrap_or(0)];
    file.read_exact_at(&mut bytes, size)?;
    bytes.extend(&footer[..64]);
    if Digest::of(&bytes).as_bytes()[..] != footer[64..] {
        return Ok(None);
    }
    bytes.truncate(bytes.len() - 64);
    let sums = bytes.chunks_exact(32).filter_map(|sum| sum.try_into().ok());
    let sums = sums.map(Digest::from_bytes).collect();
    Ok(Some(Sums { size, chunk, sums }))
}

/// Returns the size of the content of an unpacked file; it and the digests in the tail are looked at, the content is not.
pub(super) fn size(file: &File, digest: &Digest) -> io::Result<u64> {
    match tail(file, digest)? {
        Some(sums) => Ok(sums.size),
        None => Ok(file.metadata()?.len()),
    }
}

/// Reads all of an unpacked file in several threads; returns the size of its content, none where a byte is not what it
/// was. The content goes to `copy` too, which must not be used unless there is a size.
pub(super) fn check(file: &File, digest: &Digest, copy: Option<&File>) -> io::Result<Option<u64>> {
    let length = file.metadata()?.len();
    let sums = tail(file, digest)?.unwrap_or_else(|| Sums {
        size: length,
        chunk: length.max(1),
        sums: vec![*digest],
    });
    let next = AtomicU64::new(0);
    let wrong = AtomicBool::new(false);
    let work = || -> io::Result<()> {
        let mut buffer = vec![0; 1 << 18];
        while !wrong.load(Relaxed) {
            let index = next.fetch_add(1, Relaxed);
            let Some(sum) = usize::try_from(index).ok().and_then(|i| sums.sums.get(i)) else {
                break;
            };
            let start = index * sums.chunk;
            let end = (start + sums.chunk).min(sums.size);
            match chunk(file, start..end, &mut buffer, copy) {
                Ok(found) if found == *sum => {}
                Err(e) if e.kind() != io::ErrorKind::UnexpectedEof => {
                    wrong.store(true, Relaxed);
                    return Err(e);
                }
                // Also where it got shorter meanwhile.
                _ => wrong.store(true, Relaxed),
            }
        }
        Ok(())
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let helpers = cores.min(THREADS).min(sums.sums.len()) - 1;
    thread::scope(|scope| {
        // A thread that can't be had is one fewer.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let helping: Vec<_> = (0..helpers).map_while(spawn).collect();
        let own = work();
        let all = helping.into_iter().map(|helper| match helper.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        all.fold(own, |first, next| first.and(next))
    })?;
    Ok((!wrong.into_inner()).then_some(sums.size))
}

/// As [`check`], and compares the content with its own digest too.
pub(super) fn check_whole(file: &File, digest: &Digest) -> io::Result<bool> {
    let Some(size) = check(file, digest, None)? else {
        return Ok(false);
    };
    let whole = chunk(file, 0..size, &mut vec![0; 1 << 18], None);
    Ok(whole? == *digest)
}

fn chunk(
    file: &File,
    range: std::ops::Range<u64>,
    buffer: &mut [u8],
    copy: Option<&File>,
) -> io::Result<Digest> {
    let mut hasher = Hasher::default();
    let mut at = range.start;
    while at < range.end {
        let most = buffer
            .len()
            .min(usize::try_from(range.end - at).unwrap_or(usize::MAX));
        let part = &mut buffer[..most];
        file.read_exact_at(part, at)?;
        hasher.update(part);
        if let Some(copy) = copy {
            copy.write_all_at(part, at)?;
        }
        at += most as u64;
    }
    Ok(hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(content: &[u8], digest: &Digest) -> File {
        let mut file = tempfile::tempfile().unwrap();
        let mut to = Summing::new(&mut file);
        to.write_all(content).unwrap();
        to.finish(digest).unwrap();
        file
    }

    fn content(length: u64) -> Vec<u8> {
        let words = 0..=u32::try_from(length / 4).unwrap();
        let mut all: Vec<u8> = words
            .flat_map(|n| n.wrapping_mul(n).to_le_bytes())
            .collect();
        all.truncate(usize::try_from(length).unwrap());
        all
    }

    #[test]
    fn content_of_any_length_comes_back() {
        for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7] {
            let content = content(length);
            let digest = Digest::of(&content);
            let file = unpacked(&content, &digest);
            assert_eq!(size(&file, &digest).unwrap(), length);
            assert_eq!(file.metadata().unwrap().len() > length, length > CHUNK);
            let copy = tempfile::tempfile().unwrap();
            assert_eq!(check(&file, &digest, Some(&copy)).unwrap(), Some(length));
            let mut copied = vec![0; content.len()];
            copy.read_exact_at(&mut copied, 0).unwrap();
            assert!(copied == content && copy.metadata().unwrap().len() == length);
            assert_eq!(check(&file, &Digest::of(b"other"), None).unwrap(), None);
        }
    }

    #[test]
    fn every_kind_of_change_is_noticed() {
        let content = content(2 * CHUNK + 100);
        let digest = Digest::of(&content);
        let whole = content.len() as u64;
        let file = unpacked(&content, &digest);
        let length = file.metadata().unwrap().len();
        let tail = whole..length;
        for at in [0, 5, CHUNK - 1, CHUNK, 2 * CHUNK, whole - 1]
            .into_iter()
            .chain(tail)
        {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            assert_eq!(check(&file, &digest, None).unwrap(), None, "{at}");
            file.write_all_at(&byte, at).unwrap();
        }
        assert_eq!(check(&file, &digest, None).unwrap(), Some(whole));
        for cut in [0, 1, CHUNK, whole - 1, whole + 1, length - 1] {
            let file = unpacked(&content, &digest);
            file.set_len(cut).unwrap();
            assert_eq!(check(&file, &digest, None).unwrap(), None, "{cut}");
        }
        // What an older precast wrote has no tail.
        file.set_len(whole).unwrap();
        assert_eq!(check(&file, &digest, None).unwrap(), Some(whole));
    }
}
