//! Unpacked files: content, then a footer with a checksum of the content.
//!
//! Objects are named by SHA-256, which only one core can compute for a file. The checksum is XXH3 over the XXH3 of each part,
//! so several threads compute it for one file. The footer is written in the same pass that checked the content against its
//! digest:
//!
//! ```text
//! ┌─────────┬───────────────────────────────────────────────────────────────────────────────────────────┐
//! │ content │ name, size of the content, its SHA-256, its checksum, XXH3 of the footer so far: 88 bytes  │
//! └─────────┴───────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! The footer has the digest of the content, so that a file under a wrong name is detected. A file without a valid
//! footer is damaged.
//!
//! A plain object ([`object`](super::object)) has the hashes of its parts between content and footer, 16 bytes for each,
//! and another name in the footer. The checksum is the hash of these hashes. So a process can check single parts
//! ([`CheckedParts`](super::CheckedParts)).
//!
//! The checksum detects errors of disks, cables and copies. It does not protect against a user who may write the store, and
//! no hash in the file could: they can write other bytes with a footer that matches. So the hash is the fastest of 128 bits:
//! one core computes XXH3 at 17 to 20 GB/s, where BLAKE3 has 2 to 4 GB/s (an AMD EPYC, buffers of 128 KiB).
//!
//! Files are read for this, not mapped: a disk error is then an error and not a signal, and a page fault costs more
//! than the copy of a page.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    ops::Range,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use crate::{Digest, digest};

/// Bytes of the content that one thread hashes at a time.
const PART: usize = 1 << 20;
/// Bytes that are read at a time; they stay in the cache of a core.
const BUFFER: usize = 1 << 17;
/// Maximum threads. So many hash faster than the widest bus transfers bytes.
const THREADS: usize = 32;
const NAME: &[u8; 16] = b"precast unpacked";
const NAME_IN_PARTS: &[u8; 16] = b"precast in parts";
const FOOTER: usize = 88;
/// Bytes of the hash of a part.
const HASH: u64 = 16;

/// The checksum of content that is written from front to back.
struct Checksum {
    size: u64,
    part: Xxh3,
    parts: Xxh3,
}

impl Checksum {
    fn new() -> Self {
        Self {
            size: 0,
            part: Xxh3::new(),
            parts: Xxh3::new(),
        }
    }

    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let left = PART - self.size as usize % PART;
            let (now, later) = bytes.split_at(left.min(bytes.len()));
            self.part.update(now);
            self.size += now.len() as u64;
            if now.len() == left {
                self.end_part();
            }
            bytes = later;
        }
    }

    fn end_part(&mut self) {
        self.parts.update(&self.part.digest128().to_le_bytes());
        self.part.reset();
    }

    fn finish(mut self) -> u128 {
        if !self.size.is_multiple_of(PART as u64) {
            self.end_part();
        }
        self.parts.digest128()
    }
}

/// Writes content, and hashes it for the footer.
pub(super) struct Summing<W> {
    inner: W,
    checksum: Checksum,
}

impl<W: Write> Summing<W> {
    pub fn new(inner: W) -> Self {
        let checksum = Checksum::new();
        Self { inner, checksum }
    }

    /// Writes the footer. All of the content must have been written, and must have this digest.
    pub fn finish(mut self, digest: &Digest) -> io::Result<()> {
        let footer = Footer {
            size: self.checksum.size,
            checksum: self.checksum.finish(),
            hashes: None,
        };
        self.inner.write_all(&footer.encode(digest))
    }
}

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.checksum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The size and the checksum of the content of an unpacked file.
struct Footer {
    size: u64,
    checksum: u128,
    /// The hashes of the parts, if they lie before it.
    hashes: Option<Vec<u8>>,
}

impl Footer {
    fn encode(&self, digest: &Digest) -> Vec<u8> {
        let mut bytes = match self.hashes {
            Some(_) => NAME_IN_PARTS.to_vec(),
            None => NAME.to_vec(),
        };
        bytes.extend(self.size.to_le_bytes());
        bytes.extend(digest.as_bytes());
        bytes.extend(self.checksum.to_le_bytes());
        bytes.extend(xxh3_128(&bytes).to_le_bytes());
        bytes
    }

    /// Returns the footer of an object's unpacked file, or none if it has no valid one.
    fn read(file: &File, digest: &Digest) -> io::Result<Option<Self>> {
        let Some(start) = file.metadata()?.len().checked_sub(FOOTER as u64) else {
            return Ok(None);
        };
        let (mut bytes, mut size, mut checksum) = ([0; FOOTER], [0; 8], [0; 16]);
        file.read_exact_at(&mut bytes, start)?;
        size.copy_from_slice(&bytes[16..24]);
        checksum.copy_from_slice(&bytes[56..72]);
        let (size, checksum) = (u64::from_le_bytes(size), u128::from_le_bytes(checksum));
        let in_parts = bytes.starts_with(NAME_IN_PARTS);
        let hashes = match in_parts {
            true => size.div_ceil(PART as u64) * HASH,
            false => 0,
        };
        if size.checked_add(hashes) != Some(start) {
            return Ok(None);
        }
        let mut footer = Self {
            size,
            checksum,
            hashes: None,
        };
        if in_parts {
            let mut hashes = vec![0; usize::try_from(hashes).map_err(io::Error::other)?];
            file.read_exact_at(&mut hashes, size)?;
            if xxh3_128(&hashes) != checksum {
                return Ok(None);
            }
            footer.hashes = Some(hashes);
        }
        Ok((footer.encode(digest) == bytes).then_some(footer))
    }
}

/// Returns the content size of an unpacked file, without reading the content. Returns none without a valid footer.
pub(super) fn size(file: &File, digest: &Digest) -> io::Result<Option<u64>> {
    Ok(Footer::read(file, digest)?.map(|footer| footer.size))
}

/// Returns the size of the file of a plain object with so much content.
pub(super) fn file_size(content: u64) -> Option<u64> {
    let hashes = content.div_ceil(PART as u64).checked_mul(HASH)?;
    content.checked_add(hashes)?.checked_add(FOOTER as u64)
}

/// Returns the size of the content in the file of a plain object, by the file's size.
pub(super) fn content_size(file: u64) -> Option<u64> {
    let rest = file.checked_sub(FOOTER as u64)?;
    let parts = rest.div_ceil(PART as u64 + HASH);
    let size = rest.checked_sub(parts * HASH)?;
    (file_size(size) == Some(file)).then_some(size)
}

/// Reads content to its end; returns what follows it in the file of a plain object.
pub(super) fn footer(from: &mut impl Read, digest: &Digest) -> io::Result<Vec<u8>> {
    let (mut part, mut hashes, mut size) = (Vec::with_capacity(PART), Vec::new(), 0);
    loop {
        part.clear();
        let read = from.by_ref().take(PART as u64).read_to_end(&mut part)?;
        if read == 0 {
            break;
        }
        size += read as u64;
        hashes.extend(xxh3_128(&part).to_le_bytes());
    }
    let footer = Footer {
        size,
        checksum: xxh3_128(&hashes),
        hashes: Some(Vec::new()),
    };
    hashes.extend(footer.encode(digest));
    Ok(hashes)
}

/// Hashes a whole unpacked file in several threads. Returns the size of its content, or none if a byte has changed.
/// Also writes the content to `copy`, which is valid only if a size is returned.
pub(super) fn check(file: &File, digest: &Digest, copy: Option<&File>) -> io::Result<Option<u64>> {
    check_on(cores(), file, digest, copy)
}

/// Like [`check`], beside an upload of the same file, whose readers have the other half of the cores. 604 MB reach an
/// H200 at 27.6 GB/s so, and at 23.7 GB/s if the check has all 16 cores.
pub(super) fn check_beside_upload(file: &File, digest: &Digest) -> io::Result<Option<u64>> {
    check_on(cores().div_ceil(2), file, digest, None)
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

fn check_on(
    cores: usize,
    file: &File,
    digest: &Digest,
    copy: Option<&File>,
) -> io::Result<Option<u64>> {
    let Some(footer) = Footer::read(file, digest)? else {
        return Ok(None);
    };
    match hashes_of(cores, file, footer.size, copy) {
        Ok(hashes) => Ok((xxh3_128(&hashes) == footer.checksum).then_some(footer.size)),
        // The file got shorter meanwhile.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(e) => Err(e),
    }
}

/// Appends a footer to a file of content, which it reads whole, and before it the hashes of the parts, if it is to be
/// checked in parts. Returns the digest and the size of the content.
///
/// One thread computes the digest, and the others compute the checksum.
pub(super) fn finish(mut file: &File, in_parts: bool) -> io::Result<(Digest, u64)> {
    let size = file.metadata()?.len();
    let digest = || {
        let mut hasher = digest::Hasher::default();
        let whole = &mut vec![0; BUFFER];
        read(file, 0..size, whole, None, |bytes| hasher.update(bytes))?;
        io::Result::Ok(hasher.finish())
    };
    let (digest, hashes) = thread::scope(|scope| {
        let digest = scope.spawn(digest);
        let hashes = hashes_of(cores().saturating_sub(1).max(1), file, size, None);
        let digest = digest.join();
        (
            digest.unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            hashes,
        )
    });
    let (digest, hashes) = (digest?, hashes?);
    let footer = Footer {
        size,
        checksum: xxh3_128(&hashes),
        hashes: in_parts.then_some(hashes),
    };
    file.seek(SeekFrom::End(0))?;
    if let Some(hashes) = &footer.hashes {
        file.write_all(hashes)?;
    }
    file.write_all(&footer.encode(&digest))?;
    Ok((digest, size))
}

/// Like [`check`], and also compares the SHA-256 of the content with `digest`.
pub(super) fn check_whole(file: &File, digest: &Digest) -> io::Result<bool> {
    let Some(size) = check(file, digest, None)? else {
        return Ok(false);
    };
    let mut hasher = digest::Hasher::default();
    let whole = &mut vec![0; BUFFER];
    read(file, 0..size, whole, None, |bytes| hasher.update(bytes))?;
    Ok(hasher.finish() == *digest)
}

/// Returns the size of a file's content and the hashes of its parts, without reading the content. Returns none without
/// hashes.
pub(super) fn parts(file: &File, digest: &Digest) -> io::Result<Option<(u64, Vec<u8>)>> {
    let footer = Footer::read(file, digest)?;
    Ok(footer.and_then(|footer| Some((footer.size, footer.hashes?))))
}

/// Returns the parts in which a range of the content lies.
pub(super) fn parts_of(range: Range<usize>) -> Range<usize> {
    range.start / PART..range.end.div_ceil(PART)
}

/// Returns whether parts of a file's content have these hashes, which are those of all its parts.
pub(super) fn same(file: &File, size: u64, hashes: &[u8], wanted: &[usize]) -> io::Result<bool> {
    let found = match hashed(cores(), file, size, wanted, None) {
        Ok(found) => found,
        // The file got shorter meanwhile.
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        Err(e) => return Err(e),
    };
    let mut found = found.into_iter();
    Ok(found.all(|(part, hash)| {
        hashes.chunks(HASH as usize).nth(part) == Some(&hash.to_le_bytes()[..])
    }))
}

/// Returns the hashes of all parts of the first `size` bytes of a file, one after the other.
fn hashes_of(cores: usize, file: &File, size: u64, copy: Option<&File>) -> io::Result<Vec<u8>> {
    let count = usize::try_from(size.div_ceil(PART as u64)).map_err(io::Error::other)?;
    let all: Vec<usize> = (0..count).collect();
    let parts = hashed(cores, file, size, &all, copy)?;
    let hashes = parts.iter().flat_map(|(_, hash)| hash.to_le_bytes());
    Ok(hashes.collect())
}

/// Hashes parts of the first `size` bytes of a file in several threads. Returns them in their order.
fn hashed(
    cores: usize,
    file: &File,
    size: u64,
    wanted: &[usize],
    copy: Option<&File>,
) -> io::Result<Vec<(usize, u128)>> {
    let next = AtomicUsize::new(0);
    let work = || -> io::Result<Vec<(usize, u128)>> {
        let (mut buffer, mut hasher) = (vec![0; BUFFER], Xxh3::new());
        let mut parts = Vec::new();
        while let Some(&part) = wanted.get(next.fetch_add(1, Relaxed)) {
            let start = part as u64 * PART as u64;
            let range = start..size.min(start + PART as u64);
            hasher.reset();
            read(file, range, &mut buffer, copy, |bytes| hasher.update(bytes))?;
            parts.push((part, hasher.digest128()));
        }
        Ok(parts)
    };
    let threads = wanted.len().min(cores).min(THREADS);
    let mut parts = thread::scope(|scope| {
        // The calling thread is one of the threads. It also does the work of threads that fail to start.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads).map_while(spawn).collect();
        let mut parts = work()?;
        for helper in helpers {
            let joined = helper.join();
            parts.extend(joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        io::Result::Ok(parts)
    })?;
    parts.sort_unstable_by_key(|(part, _)| *part);
    Ok(parts)
}

/// Passes a range of a file to `to`, and writes it to the same range of `copy`.
fn read(
    file: &File,
    range: Range<u64>,
    buffer: &mut [u8],
    copy: Option<&File>,
    mut to: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut at = range.start;
    while at < range.end {
        let most = usize::try_from(range.end - at).unwrap_or(usize::MAX);
        let most = most.min(buffer.len());
        let part = &mut buffer[..most];
        file.read_exact_at(part, at)?;
        to(part);
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
        let parts = [1, 2, 3, 9].map(|n| n * PART as u64);
        let parts = parts.map(|n| [n - 1, n, n + 1025]);
        for length in parts.into_iter().flatten().chain([0, 1]) {
            let content = content(length);
            let digest = Digest::of(&content);
            let file = unpacked(&content, &digest);
            assert_eq!(size(&file, &digest).unwrap(), Some(length));
            assert_eq!(file.metadata().unwrap().len(), length + FOOTER as u64);
            let hashes: Vec<u8> = (content.chunks(PART))
                .flat_map(|part| xxh3_128(part).to_le_bytes())
                .collect();
            assert_eq!(hashes_of(2, &file, length, None).unwrap(), hashes);
            let copy = tempfile::tempfile().unwrap();
            assert_eq!(check(&file, &digest, Some(&copy)).unwrap(), Some(length));
            let mut copied = vec![0; content.len()];
            copy.read_exact_at(&mut copied, 0).unwrap();
            assert!(copied == content && copy.metadata().unwrap().len() == length);
            assert_eq!(check(&file, &Digest::of(b"other"), None).unwrap(), None);
        }
    }

    /// Returns a file that can be checked in parts.
    fn in_parts(content: &[u8], digest: &Digest) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        assert_eq!(
            finish(&file, true).unwrap(),
            (*digest, content.len() as u64)
        );
        file
    }

    #[test]
    fn every_kind_of_change_is_detected() {
        for form in [unpacked, in_parts] {
            each_change_is_detected(form);
        }
    }

    fn each_change_is_detected(unpacked: fn(&[u8], &Digest) -> File) {
        let part = PART as u64;
        let content = content(2 * part + 100);
        let digest = Digest::of(&content);
        let whole = content.len() as u64;
        let file = unpacked(&content, &digest);
        let length = file.metadata().unwrap().len();
        let some = [0, 5, part - 1, part, 2 * part, whole - 1];
        for at in some.into_iter().chain(whole..length) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            assert_eq!(check(&file, &digest, None).unwrap(), None, "{at}");
            file.write_all_at(&byte, at).unwrap();
        }
        assert_eq!(check(&file, &digest, None).unwrap(), Some(whole));
        for cut in [0, 1, part, whole - 1, whole, whole + 1, length - 1] {
            let file = unpacked(&content, &digest);
            file.set_len(cut).unwrap();
            assert_eq!(check(&file, &digest, None).unwrap(), None, "{cut}");
        }
    }
}
