//! The format of an object file, and the checks when it is written and read.
//!
//! ```text
//! ┌──────────────────────────────┬────────────────────────────────────────────────┐
//! │ one zstd frame               │ checksum: a skippable zstd frame, 8 + 32 bytes │
//! │ (content size in its header) │ (SHA-256 of the bytes before it)               │
//! └──────────────────────────────┴────────────────────────────────────────────────┘
//! ```
//!
//! Large content that zstd does not halve, such as weights, is plain: its object file is mapped, and the disk has it once.
//! A plain file has the format of an unpacked one: the content, and the footer of [`chunks`]. The footer contains the
//! digest of the object, so that no zstd frame can be taken for a plain file.
//!
//! The file's name is the SHA-256 of the *content*, so content can't be swapped. The checksum covers the *stored*
//! bytes, so that a flipped bit is detected even where zstd would ignore it. `zstd -d` can unpack such a file.
//! Decoding stops at the size that the frame declares, so that a decompression bomb has a known cost.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek, Write},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
};

use super::{
    chunks,
    error::{At, StoreError},
    layout::StoreLayout,
    rows::ObjectRow,
};
use crate::{Digest, digest::Hasher};

/// The compression level of zstd. 3 is its default. Higher levels save too few bytes for their time.
const LEVEL: i32 = 3;
/// Bytes from which an object, such as weights, is compressed by several threads, and the maximum number of threads.
/// With four, hashing is slower than compression.
const LARGE: u64 = 32 << 20;
const THREADS: u32 = 4;
/// The first bytes of a zstd frame.
const FRAME: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
const CHECKSUM_SIZE: usize = 40;
const CHECKSUM_HEAD: [u8; 8] = [0x5A, 0x2A, 0x4D, 0x18, 32, 0, 0, 0];

/// The result of writing an object file.
pub(crate) struct Written {
    pub digest: Digest,
    /// Size of the content.
    pub size: u64,
    /// Size of the file.
    pub stored: u64,
}

/// Writes `content` as an object file. Returns none if `content` does not have exactly `size` bytes.
pub(crate) fn encode(
    content: &mut impl Read,
    size: u64,
    out: &mut File,
) -> io::Result<Option<Written>> {
    let mut tee = Tee::new(content);
    let mut encoder = zstd::Encoder::new(Tee::new(&mut *out), LEVEL)?;
    encoder.set_pledged_src_size(Some(size))?;
    encoder.include_contentsize(true)?;
    if size >= LARGE {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        encoder.multithread(u32::try_from(cores).map_or(THREADS, |cores| cores.min(THREADS)))?;
    }
    let copied = io::copy(&mut tee.by_ref().take(size), &mut encoder)?;
    let more = tee.inner.read(&mut [0])?;
    if copied != size || more != 0 {
        return Ok(None);
    }
    let Tee { hasher, count, .. } = encoder.finish()?;
    out.write_all(&CHECKSUM_HEAD)?;
    out.write_all(hasher.finish().as_bytes())?;
    Ok(Some(Written {
        digest: tee.hasher.finish(),
        size,
        stored: count + CHECKSUM_SIZE as u64,
    }))
}

/// Returns whether the object file of some content is plain: large content, whose samples zstd does not halve.
pub(crate) fn is_plain(content: &File, size: u64) -> io::Result<bool> {
    const SAMPLES: u64 = 16;
    const SAMPLE: usize = 64 << 10;
    if size < LARGE {
        return Ok(false);
    }
    let mut samples = vec![0; SAMPLES as usize * SAMPLE];
    let step = (size - SAMPLE as u64) / (SAMPLES - 1);
    for (sample, start) in samples.chunks_mut(SAMPLE).zip((0..).step_by(step as usize)) {
        content.read_exact_at(sample, start)?;
    }
    Ok(zstd::bulk::compress(&samples, LEVEL)?.len() > samples.len() / 2)
}

/// The sizes of an object file, read without decoding it.
pub(crate) struct Head {
    /// The declared size of the content.
    pub size: u64,
    /// The size of the file.
    pub stored: u64,
    /// Whether the file is plain: not compressed.
    pub plain: bool,
}

/// Reads the declared size of an object file.
pub(crate) fn head(file: &mut File, digest: &Digest, path: &Path) -> Result<Head, StoreError> {
    let stored = file.metadata().at("look at", path)?.len();
    if let Some(size) = chunks::size(file, digest).at("read", path)? {
        return Ok(Head {
            size,
            stored,
            plain: true,
        });
    }
    let mut start = Vec::with_capacity(18);
    file.rewind().at("read", path)?;
    file.take(18).read_to_end(&mut start).at("read", path)?;
    file.rewind().at("read", path)?;
    let size = frame_size(&start, stored).map_err(|why| damaged(digest, path, why))?;
    Ok(Head {
        size,
        stored,
        plain: false,
    })
}

/// Returns the size that a compressed file of `stored` bytes declares in its first bytes.
fn frame_size(start: &[u8], stored: u64) -> Result<u64, &'static str> {
    if stored <= CHECKSUM_SIZE as u64 || !start.starts_with(&FRAME) {
        return Err("it does not begin with a zstd frame");
    }
    match zstd::zstd_safe::get_frame_content_size(start) {
        Ok(Some(size)) => Ok(size),
        _ => Err("it does not declare its size"),
    }
}

/// Decodes the object in `file` into `sink` and checks every byte of it. Returns the size of the content.
///
/// On an error, the bytes in `sink` must not be used.
pub(crate) fn decode(
    file: &mut File,
    digest: &Digest,
    path: &Path,
    sink: &mut impl Write,
) -> Result<u64, StoreError> {
    let corrupt = |why: &str| Err(damaged(digest, path, why));
    let head = head(file, digest, path)?;
    if head.plain {
        file.rewind().at("read", path)?;
        let mut content = Tee::new(BufReader::with_capacity(1 << 16, file).take(head.size));
        let read = io::copy(&mut content, sink).at("unpack", path)?;
        return if read == head.size && content.digest() == *digest {
            Ok(head.size)
        } else {
            corrupt("its content has another digest")
        };
    }
    let from = BufReader::with_capacity(1 << 16, &mut *file);
    decode_frame(from, &head, digest, path, sink)
}

/// Decodes a compressed object file, as [`decode`] does.
fn decode_frame(
    from: impl BufRead,
    head: &Head,
    digest: &Digest,
    path: &Path,
    sink: &mut impl Write,
) -> Result<u64, StoreError> {
    let corrupt = |why: &str| Err(damaged(digest, path, why));
    let mut stored = Tee::new(from.take(head.stored - CHECKSUM_SIZE as u64));
    let mut hasher = Hasher::default();
    {
        let mut frame = match zstd::Decoder::new(&mut stored) {
            Ok(decoder) => decoder.single_frame(),
            Err(e) => return Err(e).at("decode", path),
        };
        let mut remaining = head.size;
        let mut buffer = vec![0; 1 << 17];
        loop {
            let got = match frame.read(&mut buffer) {
                Ok(0) => break,
                Ok(got) => got,
                Err(e) if e.raw_os_error().is_some() => return Err(e).at("read", path),
                Err(e) => return corrupt(&e.to_string()),
            };
            if got as u64 > remaining {
                return corrupt("it decodes to more than it declares");
            }
            remaining -= got as u64;
            hasher.update(&buffer[..got]);
            sink.write_all(&buffer[..got]).at("unpack", path)?;
        }
        if remaining != 0 {
            return corrupt("it is cut short");
        }
    }
    // The checksum also covers stored bytes that the decoder did not read.
    io::copy(&mut stored, &mut io::sink()).at("read", path)?;
    let Tee {
        inner,
        hasher: stored_hasher,
        ..
    } = stored;
    let mut checksum = Vec::with_capacity(CHECKSUM_SIZE);
    inner
        .into_inner()
        .take(CHECKSUM_SIZE as u64 + 1)
        .read_to_end(&mut checksum)
        .at("read", path)?;
    let sum = stored_hasher.finish();
    if checksum.len() != CHECKSUM_SIZE
        || checksum[..8] != CHECKSUM_HEAD
        || checksum[8..] != sum.as_bytes()[..]
    {
        return corrupt("its checksum does not match the stored bytes");
    }
    if hasher.finish() != *digest {
        return corrupt("its content has another digest");
    }
    Ok(head.size)
}

/// Checks every byte of an object file that comes from elsewhere and is `stored` bytes long, without keeping it.
/// `content` is the size of its content, where it is known. Returns the size.
pub(crate) fn check_stream(
    from: &mut dyn Read,
    stored: u64,
    content: Option<u64>,
    digest: &Digest,
    path: &Path,
) -> Result<u64, StoreError> {
    let corrupt = |why: &str| Err(damaged(digest, path, why));
    let mut start = Vec::with_capacity(18);
    (from.take(18).read_to_end(&mut start)).at("read", path)?;
    // A plain file says what it is in its last bytes, so its size has to do.
    let is_plain = match content {
        Some(content) => chunks::file_size(content) == Some(stored),
        None => !start.starts_with(&FRAME),
    };
    let from = &mut start.chain(from);
    if !is_plain {
        let size = frame_size(&start, stored);
        let size = size.map_err(|why| damaged(digest, path, why))?;
        if content.is_some_and(|content| content != size) {
            return corrupt("it declares another size of its content than was listed");
        }
        let head = Head {
            size,
            stored,
            plain: false,
        };
        let from = BufReader::with_capacity(1 << 16, from);
        return decode_frame(from, &head, digest, path, &mut io::sink());
    }
    let Some(size) = content.or_else(|| chunks::content_size(stored)) else {
        return corrupt("it is too short");
    };
    let mut content = Tee::new(from.take(size));
    let footer = chunks::footer(&mut content, digest).at("read", path)?;
    if content.count != size || content.digest() != *digest {
        return corrupt("its content has another digest");
    }
    let mut found = Vec::with_capacity(footer.len());
    let rest = from.take(footer.len() as u64 + 1).read_to_end(&mut found);
    rest.at("read", path)?;
    match found == footer {
        true => Ok(size),
        false => corrupt("its footer is that of another file"),
    }
}

/// Opens the file of an object.
pub(crate) fn open(layout: &StoreLayout, digest: &Digest) -> Result<(File, PathBuf), StoreError> {
    let path = layout.object(digest);
    match layout.open(&path) {
        Ok(file) => Ok((file, path)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(StoreError::Missing {
            digest: *digest,
            path,
        }),
        Err(e) => Err(e).at("read", &path),
    }
}

/// Writes the content of an object to `sink` and returns its size. On an error, the bytes in `sink` must not be used.
pub(crate) fn read_into(
    layout: &StoreLayout,
    digest: &Digest,
    sink: &mut impl Write,
) -> Result<u64, StoreError> {
    let (mut file, path) = open(layout, digest)?;
    decode(&mut file, digest, &path, sink)
}

/// Returns the row of an object, computed from its file.
pub(crate) fn row(
    layout: &StoreLayout,
    path: &Path,
    digest: &Digest,
) -> Result<ObjectRow, StoreError> {
    let mut file = layout.open(path).at("read", path)?;
    let head = head(&mut file, digest, path)?;
    Ok(ObjectRow {
        digest: *digest,
        size: head.size,
        stored: head.stored,
        created: file.metadata().at("look at", path)?.mtime(),
    })
}

pub(crate) fn damaged(digest: &Digest, path: &Path, why: &str) -> StoreError {
    StoreError::Corrupt {
        digest: *digest,
        path: path.to_owned(),
        why: why.to_owned(),
    }
}

/// Passes bytes through and hashes them.
pub(super) struct Tee<T> {
    inner: T,
    hasher: Hasher,
    count: u64,
}

impl<T> Tee<T> {
    pub(super) fn new(inner: T) -> Self {
        Self {
            inner,
            hasher: Hasher::default(),
            count: 0,
        }
    }

    /// Returns the digest of all bytes that passed through.
    pub(super) fn digest(self) -> Digest {
        self.hasher.finish()
    }
}

impl<T: Read> Read for Tee<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..got]);
        self.count += got as u64;
        Ok(got)
    }
}

impl<T: Write> Write for Tee<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let took = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..took]);
        self.count += took as u64;
        Ok(took)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::refused;

    fn stored(content: &[u8]) -> Vec<u8> {
        let mut file = tempfile::tempfile().unwrap();
        let written = encode(&mut &*content, content.len() as u64, &mut file)
            .unwrap()
            .unwrap();
        assert_eq!(written.digest, Digest::of(content));
        let mut bytes = Vec::new();
        file.rewind().unwrap();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(written.stored, bytes.len() as u64);
        bytes
    }

    fn read(bytes: &[u8], digest: &Digest) -> Result<Vec<u8>, StoreError> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let (mut out, path) = (Vec::new(), Path::new("object"));
        let found = decode(&mut file, digest, path, &mut out);
        // As a stream, with or without the size.
        for content in [None, Some(out.len() as u64)] {
            let size = bytes.len() as u64;
            let streamed = check_stream(&mut &*bytes, size, content, digest, path);
            let size = |found: &Result<u64, StoreError>| found.as_ref().ok().copied();
            assert_eq!(size(&streamed), size(&found));
        }
        found.map(|_| out)
    }

    #[test]
    fn a_plain_file_is_checked_as_a_stream() {
        for size in [0, 1, 1 << 20, (2 << 20) + 7] {
            let content: Vec<u8> = (0..size as u32)
                .map(|i| (i.wrapping_mul(i) >> 7) as u8)
                .collect();
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&content).unwrap();
            let (digest, _) = chunks::finish(&file, true).unwrap();
            let mut good = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut good).unwrap();
            assert_eq!(read(&good, &digest).unwrap(), content);
            for at in [0, size / 2, size, good.len() - 88, good.len() - 1] {
                let mut bad = good.clone();
                bad[at.min(good.len() - 1)] ^= 1;
                let stored = bad.len() as u64;
                let path = Path::new("object");
                let checked = check_stream(&mut &bad[..], stored, Some(size as u64), &digest, path);
                assert_eq!(refused(checked), "Corrupt", "{at} of {size}");
            }
        }
    }

    #[test]
    fn every_flip_cut_and_extension_is_caught() {
        let content: Vec<u8> = (0..600u32).flat_map(|i| (i * i).to_le_bytes()).collect();
        for content in [&content[..], b"", b"x"] {
            let good = stored(content);
            let digest = Digest::of(content);
            assert_eq!(read(&good, &digest).unwrap(), content);
            assert_eq!(zstd::decode_all(&good[..]).unwrap(), content, "without us");
            for at in 0..good.len() {
                for bit in [1, 0x80] {
                    let mut bad = good.clone();
                    bad[at] ^= bit;
                    assert_eq!(refused(read(&bad, &digest)), "Corrupt", "{at}");
                }
                assert!(read(&good[..at], &digest).is_err(), "cut at {at}");
            }
            assert!(read(&[&good[..], b"x"].concat(), &digest).is_err());
            assert!(read(&[&good[..], &good[..]].concat(), &digest).is_err());
            assert!(read(&good, &Digest::of(b"other")).is_err());
        }
    }

    #[test]
    fn what_several_threads_compressed_is_an_object_like_any_other() {
        let count = u32::try_from(LARGE / 4).unwrap() + 1;
        let content: Vec<u8> = (0..count)
            .flat_map(|i| (i / 3).wrapping_mul(i).to_le_bytes())
            .collect();
        let mut good = stored(&content);
        assert!(zstd::decode_all(&good[..]).unwrap() == content);
        let digest = Digest::of(&content);
        assert!(read(&good, &digest).unwrap() == content);
        let middle = good.len() / 2;
        good[middle] ^= 1;
        assert!(read(&good, &digest).is_err());
    }

    #[test]
    fn a_bomb_stops_at_its_declared_size() {
        // A frame that declares 4 bytes and decodes to a megabyte.
        let big = stored(&vec![0u8; 1 << 20]);
        let mut bad = Vec::from(&big[..4]);
        bad.extend([0x20, 4]); // single segment, content size 4
        bad.extend(&big[9..]);
        assert_eq!(refused(read(&bad, &Digest::of(&[0; 4]))), "Corrupt");
    }
}
