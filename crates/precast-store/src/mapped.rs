//! Read-only memory maps of files that do not change.
//!
//! One of the few modules outside the runtime's `ffi` with `unsafe`: a map is sound only while the bytes of the file
//! stay the same.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    ops::{Deref, Range},
    sync::Arc,
};

use memmap2::{Mmap, MmapOptions, UncheckedAdvice};
use rustix::{
    fs::{SealFlags, fcntl_add_seals, fcntl_get_seals},
    io::Errno,
};

/// A multiple of every page size of Linux.
const PAGE: usize = 64 << 10;

/// Maximum attempts to seal a file in memory while the kernel uses its pages.
const ATTEMPTS: usize = 20;

/// Seals a file in memory against every change.
///
/// The kernel refuses while it uses a page of the file itself, for example to compact memory: it waits about 150 ms,
/// then returns EBUSY. So the call is repeated.
pub fn seal(file: &File) -> io::Result<()> {
    again(ATTEMPTS, || {
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(file, seals)
    })
}

/// Repeats a call that returns EBUSY, up to `attempts` times.
fn again(attempts: usize, mut work: impl FnMut() -> Result<(), Errno>) -> io::Result<()> {
    for _ in 1..attempts {
        match work() {
            Err(Errno::BUSY) => {}
            other => return Ok(other?),
        }
    }
    Ok(work()?)
}

/// The bytes of a verified object, page-aligned, and its open file. Cloning shares them.
#[derive(Clone)]
pub struct Mapped(Arc<Inner>);

struct Inner {
    map: Mmap,
    /// Uploads to a device read the file.
    file: File,
}

impl Mapped {
    /// Maps the first `size` bytes of `file`, which must have at least as many.
    ///
    /// The store passes two kinds of files only: published under `ready/` or `objects/` with mode 0444 and never opened
    /// for writing again, or a sealed memfd.
    pub(crate) fn new(file: &File, size: u64) -> io::Result<Self> {
        let size = usize::try_from(size).map_err(io::Error::other)?;
        if file.metadata()?.len() < size as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: the bytes must not change while they are mapped. The store upholds it: a published file has mode
        // 0444, is only ever unlinked (which leaves the pages of a map alone) and lies in a folder that others can't
        // write (`permissions`); a memfd is sealed against writing, growing and shrinking before it comes here.
        let map = unsafe { MmapOptions::new().len(size).map(file) }?;
        Ok(Self(Arc::new(Inner {
            map,
            file: file.try_clone()?,
        })))
    }

    /// Maps a file in memory that is sealed against every change. Fails if it is not sealed.
    pub fn sealed(file: &File) -> io::Result<Self> {
        let seals = fcntl_get_seals(file)?;
        if seals.contains(SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK) {
            Self::new(file, file.metadata()?.len())
        } else {
            Err(io::Error::other(
                "the file is not sealed against writing, growing and shrinking",
            ))
        }
    }

    /// Returns the mapped file, for reads without the map.
    pub fn file(&self) -> &File {
        &self.0.file
    }

    /// Gives back the memory of the whole pages in a range. A later access reads them again.
    pub fn release(&self, range: Range<usize>) {
        let start = range.start.next_multiple_of(PAGE);
        let end = range.end.min(self.len()) / PAGE * PAGE;
        if start < end {
            // SAFETY: the map is shared and read-only, and its file does not change: a page that is read again has the
            // same bytes.
            let released = unsafe {
                (self.0.map).unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start)
            };
            // Only a hint: without it, the pages stay.
            let _ = released;
        }
    }

    /// Asks the system to read pages that are not in memory yet, in large pieces. Returns before they are read.
    pub fn read_ahead(&self) {
        // Only a hint: without it, each first access to a page reads a small piece.
        let _ = self.0.map.advise(memmap2::Advice::WillNeed);
    }
}

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.map
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapped({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_pages_have_the_same_bytes() {
        let file = File::from(
            rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap(),
        );
        let bytes: Vec<u8> = (0..5 * PAGE + 7).map(|i| (i / 3) as u8).collect();
        io::Write::write_all(&mut &file, &bytes).unwrap();
        seal(&file).unwrap();
        let map = Mapped::sealed(&file).unwrap();
        for range in [0..bytes.len(), 5..7, 1..PAGE * 3, PAGE * 5..PAGE * 99] {
            assert!(map[..] == bytes);
            map.release(range);
        }
        assert!(map[..] == bytes);
    }

    #[test]
    fn a_busy_page_is_waited_for_and_no_other_error_is() {
        let count = |busy: usize, then: Result<(), Errno>| {
            let mut asked = 0;
            let done = again(3, || {
                asked += 1;
                if asked > busy { then } else { Err(Errno::BUSY) }
            });
            (done.map_err(|error| error.raw_os_error()), asked)
        };
        assert_eq!(count(0, Ok(())), (Ok(()), 1));
        assert_eq!(count(2, Ok(())), (Ok(()), 3));
        let refused = |errno: Errno| Err(Some(errno.raw_os_error()));
        assert_eq!(count(9, Ok(())), (refused(Errno::BUSY), 3));
        assert_eq!(count(1, Err(Errno::PERM)), (refused(Errno::PERM), 2));
    }
}
