//! Unpacked files: content, then a footer with the BLAKE3 hash of the content.
//!
//! Objects are named by SHA-256, which only one core can compute for a file. BLAKE3 hashes a tree, so several threads
//! hash the parts of one file. The footer is written in the same pass that checked the content against its digest:
//!
//! ```text
//! ┌─────────┬────────────────────────────────────────────────────────────────────────────────────────────┐
//! │ content │ name, size of the content, its SHA-256, its BLAKE3, BLAKE3 of the footer so far: 120 bytes  │
//! └─────────┴────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The footer has the digest of the content, so that a file under a wrong name is detected. A file without a valid
//! footer is damaged.
//!
//! The footer detects errors of disks, cables and copies. It does not protect against users with write access to the
//! store: they can write other bytes with a matching footer.
//!
//! Files are read for this, not mapped: a disk error is then an error and not a signal, and a page fault costs more
//! than the copy of a page.

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
};

use blake3::{
    Hash,
    hazmat::{
        ChainingValue, HasherExt, Mode, left_subtree_len, merge_subtrees_non_root,
        merge_subtrees_root,
    },
};

use crate::{Digest, digest};

/// Bytes that one thread hashes at a time: a subtree of the hash tree.
const PART: u64 = 1 << 20;
/// Bytes that are read at a time; they stay in the cache of a core.
const BUFFER: usize = 1 << 17;
/// Maximum threads. So many hash faster than the widest bus transfers bytes.
const THREADS: usize = 32;
const NAME: &[u8; 16] = b"precast unpacked";
const FOOTER: usize = 120;

/// Writes content, and hashes it for the footer.
pub(super) struct Summing<W> {
    inner: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Summing<W> {
    pub fn new(inner: W) -> Self {
        let hasher = blake3::Hasher::new();
        Self { inner, hasher }
    }

    /// Writes the footer. All of the content must have been written, and must have this digest.
    pub fn finish(mut self, digest: &Digest) -> io::Result<()> {
        let footer = Footer {
            size: self.hasher.count(),
            hash: self.hasher.finalize(),
        };
        self.inner.write_all(&footer.encode(digest))
    }
}

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The size and the hash of the content of an unpacked file.
struct Footer {
    size: u64,
    hash: Hash,
}

impl Footer {
    fn encode(&self, digest: &Digest) -> Vec<u8> {
        let mut bytes = NAME.to_vec();
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(digest.as_bytes());
        bytes.extend(self.hash.as_bytes());
        let hash = blake3::hash(&bytes);
        bytes.extend(hash.as_bytes());
        bytes
    }

    /// Returns the footer of an object's unpacked file, or none if it has no valid one.
    fn read(file: &File, digest: &Digest) -> io::Result<Option<Self>> {
        let Some(size) = file.metadata()?.len().checked_sub(FOOTER as u64) else {
            return Ok(None);
        };
        let (mut bytes, mut hash) = ([0; FOOTER], [0; 32]);
        file.read_exact_at(&mut bytes, size)?;
        hash.copy_from_slice(&bytes[56..88]);
        let footer = Self {
            size,
            hash: hash.into(),
        };
        Ok((footer.encode(digest) == bytes).then_some(footer))
    }
}

/// Returns the content size of an unpacked file, without reading the content. Returns none without a valid footer.
pub(super) fn size(file: &File, digest: &Digest) -> io::Result<Option<u64>> {
    Ok(Footer::read(file, digest)?.map(|footer| footer.size))
}

/// Hashes a whole unpacked file in several threads. Returns the size of its content, or none if a byte has changed.
/// Also writes the content to `copy`, which is valid only if a size is returned.
pub(super) fn check(file: &File, digest: &Digest, copy: Option<&File>) -> io::Result<Option<u64>> {
    let Some(Footer { size, hash }) = Footer::read(file, digest)? else {
        return Ok(None);
    };
    match hash_of(file, size, copy) {
        Ok(found) => Ok((found == hash).then_some(size)),
        // The file was truncated during the read.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(e) => Err(e),
    }
}

/// Like [`check`], and also compares the SHA-256 of the content with `digest`.
pub(super) fn check_whole(file: &File, digest: &Digest) -> io::Result<bool> {
    let Some(size) = check(file, digest, None)? else {
        return Ok(false);
    };
    let mut hasher = digest::Hasher::default();
    read(file, 0..size, &mut vec![0; BUFFER], None, &mut hasher)?;
    Ok(hasher.finish() == *digest)
}

/// Returns the BLAKE3 hash of the first `size` bytes of a file.
fn hash_of(file: &File, size: u64, copy: Option<&File>) -> io::Result<Hash> {
    let count = size.div_ceil(PART);
    let next = AtomicU64::new(0);
    let work = || -> io::Result<Vec<(u64, ChainingValue)>> {
        let (mut buffer, mut parts) = (vec![0; BUFFER], Vec::new());
        loop {
            let index = next.fetch_add(1, Relaxed);
            if index >= count {
                return Ok(parts);
            }
            let start = index * PART;
            let range = start..size.min(start + PART);
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(start);
            read(file, range, &mut buffer, copy, &mut hasher)?;
            parts.push((index, hasher.finalize_non_root()));
        }
    };
    if count < 2 {
        let mut hasher = blake3::Hasher::new();
        read(file, 0..size, &mut vec![0; BUFFER], copy, &mut hasher)?;
        return Ok(hasher.finalize());
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = cores
        .min(THREADS)
        .min(usize::try_from(count).unwrap_or(THREADS));
    let mut parts = thread::scope(|scope| {
        // The calling thread is one of the threads. It also does the work of threads that fail to start.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads).map_while(spawn).collect();
        let mut parts = work()?;
        for helper in helpers {
            parts.extend(
                helper
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?,
            );
        }
        io::Result::Ok(parts)
    })?;
    parts.sort_unstable_by_key(|(index, _)| *index);
    let parts: Vec<ChainingValue> = parts.into_iter().map(|(_, value)| value).collect();
    let (left, right) = halves(&parts, size);
    Ok(merge_subtrees_root(&left, &right, Mode::Hash))
}

/// Returns the values of both children of a tree node. The node covers `parts`, which are `size` bytes.
fn halves(parts: &[ChainingValue], size: u64) -> (ChainingValue, ChainingValue) {
    let of = |parts: &[ChainingValue], size| match parts {
        [one] => *one,
        _ => {
            let (left, right) = halves(parts, size);
            merge_subtrees_non_root(&left, &right, Mode::Hash)
        }
    };
    let left = left_subtree_len(size);
    let at = parts.len().next_power_of_two() / 2;
    (of(&parts[..at], left), of(&parts[at..], size - left))
}

/// Passes a range of a file to `to`, and writes it to the same range of `copy`.
fn read(
    file: &File,
    range: std::ops::Range<u64>,
    buffer: &mut [u8],
    copy: Option<&File>,
    to: &mut impl Write,
) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let most = usize::try_from(range.end - at).unwrap_or(usize::MAX);
        let most = most.min(buffer.len());
        let part = &mut buffer[..most];
        file.read_exact_at(part, at)?;
        to.write_all(part)?;
        if let Some(copy) = copy {
            copy.write_all_at(part, at)?;
        }
        at += part.len() as u64;
    }
    Ok(())
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
        let parts = [1, 2, 3, 5, 8, 9].map(|n| [n * PART - 1, n * PART, n * PART + 1025]);
        for length in parts.into_iter().flatten().chain([0, 1]) {
            let content = content(length);
            let digest = Digest::of(&content);
            let file = unpacked(&content, &digest);
            assert_eq!(size(&file, &digest).unwrap(), Some(length));
            assert_eq!(file.metadata().unwrap().len(), length + FOOTER as u64);
            assert_eq!(
                hash_of(&file, length, None).unwrap(),
                blake3::hash(&content)
            );
            let copy = tempfile::tempfile().unwrap();
            assert_eq!(check(&file, &digest, Some(&copy)).unwrap(), Some(length));
            let mut copied = vec![0; content.len()];
            copy.read_exact_at(&mut copied, 0).unwrap();
            assert!(copied == content && copy.metadata().unwrap().len() == length);
            assert_eq!(check(&file, &Digest::of(b"other"), None).unwrap(), None);
        }
    }

    #[test]
    fn every_kind_of_change_is_detected() {
        let content = content(2 * PART + 100);
        let digest = Digest::of(&content);
        let whole = content.len() as u64;
        let file = unpacked(&content, &digest);
        let length = file.metadata().unwrap().len();
        let some = [0, 5, PART - 1, PART, 2 * PART, whole - 1];
        for at in some.into_iter().chain(whole..length) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            assert_eq!(check(&file, &digest, None).unwrap(), None, "{at}");
            file.write_all_at(&byte, at).unwrap();
        }
        assert_eq!(check(&file, &digest, None).unwrap(), Some(whole));
        for cut in [0, 1, PART, whole - 1, whole, whole + 1, length - 1] {
            let file = unpacked(&content, &digest);
            file.set_len(cut).unwrap();
            assert_eq!(check(&file, &digest, None).unwrap(), None, "{cut}");
        }
    }
}
