//! Objects as files that can be mapped: unpacked once under `ready/`, and hashed by every process that maps them.
//!
//! A changed bit, or a file that was truncated, swapped or replaced, is detected when it is mapped, and the object is
//! unpacked again. Several threads hash one file ([`chunks`]). [`Unpacked`] has two other modes: trust the file without
//! a hash, or copy it.
//!
//! The hash before mapping does not detect a later change, by the store's own user, root or the disk. A byte that
//! changes while it is mapped gives a wrong answer, and a file that gets shorter ends the process with SIGBUS. A copy
//! ([`Unpacked::Copy`]) is safe from both. `verify` hashes every file.
//!
//! A core checks 91 MB of the page cache in 17 ms, 5.5 GB/s, and most of that is the copy out of the page cache
//! ([`chunks`] has the figures of hashes). `make bench-store` measures a map in each mode.
//!
//! The first map unpacks. A plain object file ([`object`]) is mapped itself, and can be checked in parts
//! ([`CheckedParts`]). On a device the file is hashed while it is uploaded.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    thread::{self, JoinHandle},
};

use rustix::fs::{MemfdFlags, memfd_create};

use super::{
    base::Base,
    chunks::{self, Summing},
    error::{At, StoreError},
    leases::Leases,
    mapped::seal,
    object,
    parts::CheckedParts,
    permissions::Unpacked,
    publish::PendingFile,
};
use crate::{Digest, Mapped};

/// A check of mapped bytes that may still be running.
pub struct Checking(Option<JoinHandle<bool>>);

impl Checking {
    /// Returns a finished check of sound bytes.
    pub fn done() -> Self {
        Self(None)
    }

    /// Waits for the result. The bytes must not be used if it is false.
    #[must_use]
    pub fn wait(self) -> bool {
        self.0.is_none_or(|thread| thread.join().unwrap_or(false))
    }
}

/// The unpacked files of a store.
pub(crate) struct Ready {
    pub leases: Leases,
}

impl Ready {
    fn base(&self) -> &Base {
        &self.leases.base
    }

    /// Returns whether the object file is plain, so that it needs no unpacked file.
    pub fn is_plain(&self, digest: &Digest) -> bool {
        let object = self.base().layout.open(&self.base().layout.object(digest));
        object.is_ok_and(|file| matches!(chunks::size(&file, digest), Ok(Some(_))))
    }

    /// Returns the path of the file to map: the object file if it is plain, otherwise the unpacked file.
    pub fn place(&self, digest: &Digest) -> PathBuf {
        let layout = &self.base().layout;
        if self.is_plain(digest) {
            layout.object(digest)
        } else {
            layout.ready(digest)
        }
    }

    /// Like [`Objects::map`](super::Objects::map).
    pub fn map(&self, digest: &Digest) -> Result<Mapped, StoreError> {
        let path = self.place(digest);
        if self.base().options.unpacked == Unpacked::Copy {
            return self.copied(digest, &path);
        }
        if let Some((file, size)) = self.checked(digest, &path)? {
            return Mapped::new(&file, size).at("map", &path);
        }
        if !self.base().is_read_only() {
            match self.unpack(digest, &path) {
                Ok((file, size)) => return Mapped::new(&file, size).at("map", &path),
                Err(e) if no_room(&e) => {}
                Err(e) => return Err(e),
            }
        }
        self.in_memory(digest, &path)
    }

    /// Like [`Objects::map_checking`](super::Objects::map_checking).
    pub fn map_checking(&self, digest: &Digest) -> Result<(Mapped, Checking), StoreError> {
        let path = self.place(digest);
        let there = match self.base().options.unpacked {
            Unpacked::Check => self.open(&path)?,
            _ => None,
        };
        if let Some(file) = there
            && let Some(size) = chunks::size(&file, digest).at("read", &path)?
        {
            let map = Mapped::new(&file, size).at("map", &path)?;
            let digest = *digest;
            let check = move || {
                chunks::check_beside_upload(&file, &digest).is_ok_and(|found| found == Some(size))
            };
            if let Ok(thread) = thread::Builder::new()
                .name("precast-check".to_owned())
                .spawn(check)
            {
                return Ok((map, Checking(Some(thread))));
            }
        }
        Ok((self.map(digest)?, Checking::done()))
    }

    /// Like [`Objects::map_in_parts`](super::Objects::map_in_parts).
    pub fn map_in_parts(
        &self,
        digest: &Digest,
    ) -> Result<(Mapped, Option<CheckedParts>), StoreError> {
        let path = self.base().layout.object(digest);
        if self.base().options.unpacked == Unpacked::Check
            && let Some(file) = self.open(&path)?
            && let Some(parts) = CheckedParts::of(&file, digest, &path)?
        {
            let map = Mapped::new(&file, parts.size()).at("map", &path)?;
            return Ok((map, Some(parts)));
        }
        Ok((self.map(digest)?, None))
    }

    /// Like [`Objects::memfd`](super::Objects::memfd).
    pub fn memfd(&self, digest: &Digest) -> Result<File, StoreError> {
        let path = self.base().layout.object(digest);
        let mut file = memory(digest, &path)?;
        object::read_into(&self.base().layout, digest, &mut file)?;
        seal(&file).at("seal the memory of", &path)?;
        Ok(file)
    }

    fn in_memory(&self, digest: &Digest, path: &Path) -> Result<Mapped, StoreError> {
        let file = self.memfd(digest)?;
        let size = file.metadata().at("map", path)?.len();
        Mapped::new(&file, size).at("map", path)
    }

    /// Returns the content in private memory of this process.
    fn copied(&self, digest: &Digest, path: &Path) -> Result<Mapped, StoreError> {
        if let Some(file) = self.open(path)? {
            let copy = memory(digest, path)?;
            if let Some(size) = chunks::check(&file, digest, Some(&copy)).at("copy", path)? {
                seal(&copy).at("seal the memory of", path)?;
                return Mapped::new(&copy, size).at("map", path);
            }
            self.set_aside(digest, path)?;
        }
        self.in_memory(digest, path)
    }

    /// Opens the unpacked file if there is one.
    fn open(&self, path: &Path) -> Result<Option<File>, StoreError> {
        match self.base().layout.open(path) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).at("read", path),
        }
    }

    /// Returns the unpacked file of an object and the size of its content. Checks every byte.
    pub fn sound(&self, digest: &Digest) -> Result<Option<(File, u64)>, StoreError> {
        let path = self.base().layout.ready(digest);
        let Ok(Some(file)) = self.open(&path) else {
            return Ok(None);
        };
        let size = chunks::check(&file, digest, None).at("read", &path)?;
        Ok(size.map(|size| (file, size)))
    }

    /// Like [`Self::sound`], with the check that the options select. Sets a damaged file aside.
    fn checked(&self, digest: &Digest, path: &Path) -> Result<Option<(File, u64)>, StoreError> {
        let Some(file) = self.open(path)? else {
            return Ok(None);
        };
        let size = match self.base().options.unpacked {
            Unpacked::Trust => chunks::size(&file, digest).at("read", path)?,
            _ => chunks::check(&file, digest, None).at("read", path)?,
        };
        if size.is_none() {
            self.set_aside(digest, path)?;
        }
        Ok(size.map(|size| (file, size)))
    }

    /// Sets a damaged unpacked file aside. A damaged object is an error: nothing can replace it here.
    fn set_aside(&self, digest: &Digest, path: &Path) -> Result<(), StoreError> {
        if path == self.base().layout.object(digest) {
            let why = "its checksum does not match its content";
            return Err(object::damaged(digest, path, why));
        }
        if self.base().is_read_only() {
            return Ok(());
        }
        self.base().set_aside(path)
    }

    /// Unpacks an object to `path`.
    fn unpack(&self, digest: &Digest, path: &Path) -> Result<(File, u64), StoreError> {
        let mut pending = self.leases.pending_file()?;
        let mut to = Summing::new(pending.file());
        object::read_into(&self.base().layout, digest, &mut to)?;
        to.finish(digest).at("unpack", path)?;
        self.publish(pending, digest, path)
    }

    /// Publishes an unpacked file whose content was checked.
    pub fn publish(
        &self,
        pending: PendingFile,
        digest: &Digest,
        path: &Path,
    ) -> Result<(File, u64), StoreError> {
        let opened = if pending.publish(path)? {
            // Every byte was checked when it was written.
            let file = self.base().layout.open(path).at("read", path)?;
            let size = chunks::size(&file, digest).at("read", path)?;
            size.map(|size| (file, size))
        } else {
            // Another process published the file first: that file is opened and hashed.
            self.checked(digest, path)?
        };
        if let Some(opened) = opened {
            return Ok(opened);
        }
        let file = self.memfd(digest)?;
        let size = file.metadata().at("read", path)?.len();
        Ok((file, size))
    }
}

/// Creates a file in memory.
fn memory(digest: &Digest, path: &Path) -> Result<File, StoreError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create(digest.short(), flags).at("make memory for", path)?;
    Ok(File::from(file))
}

pub(super) fn no_room(error: &StoreError) -> bool {
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    matches!(error, StoreError::Io { source, .. } if full.contains(&source.kind()))
}

#[cfg(test)]
mod tests {
    use crate::Store;
    use std::{fs, os::unix::fs::MetadataExt};

    use super::{
        super::{Options, testing},
        *,
    };

    /// Opens a store again, with a mode for unpacked files.
    fn opened(store: &Store, unpacked: Unpacked) -> Store {
        let options = Options {
            unpacked,
            ..Options::default()
        };
        Store::open_with(store.path(), options).unwrap()
    }

    /// Contents of one part and of several parts.
    fn contents() -> [Vec<u8>; 2] {
        [
            vec![7u8; 10_000],
            (0..700_000u32).flat_map(u32::to_le_bytes).collect(),
        ]
    }

    #[test]
    fn a_map_is_unpacked_once_and_again_when_it_changed() {
        let (_dir, store) = testing::store();
        for content in contents() {
            let digest = store.objects().put_bytes(&content).unwrap();
            let first = store.objects().map(&digest).unwrap();
            assert_eq!(&first[..], &content[..]);
            assert_eq!(first.as_ptr() as usize % 4096, 0);
            let path = store.layout().ready(&digest);
            let inode = fs::metadata(&path).unwrap().ino();
            drop(store.objects().map(&digest).unwrap());
            assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
            testing::damage(&path, |bytes| bytes[0] ^= 8);
            assert!(store.objects().map(&digest).unwrap()[..] == content[..]);
            assert_eq!(&first[1..], &content[1..]);
            assert_ne!(fs::metadata(&path).unwrap().ino(), inode);
            assert_eq!(store.audit().verify().unwrap().defects, []);
        }
        let empty = store.objects().put_bytes(b"").unwrap();
        assert_eq!(store.objects().map(&empty).unwrap().len(), 0);
    }

    #[test]
    fn a_copy_stays_when_its_file_is_cut() {
        let (_dir, store) = testing::store();
        for content in contents() {
            let digest = store.objects().put_bytes(&content).unwrap();
            drop(store.objects().map(&digest).unwrap());
            let copying = opened(&store, Unpacked::Copy);
            let copy = copying.objects().map(&digest).unwrap();
            let path = store.layout().ready(&digest);
            testing::damage(&path, |bytes| bytes.truncate(1));
            assert!(copy[..] == content[..]);
            // A file without a footer is not trusted either.
            let trusting = opened(&store, Unpacked::Trust);
            assert!(trusting.objects().map(&digest).unwrap()[..] == content[..]);
        }
    }

    #[test]
    fn memory_that_was_handed_out_is_sealed() {
        use std::io::Write;
        let (_dir, store) = testing::store();
        let digest = store.objects().put_bytes(b"code").unwrap();
        let mut file = store.objects().memfd(&digest).unwrap();
        assert!(file.write(b"x").is_err() && file.set_len(0).is_err());
    }
}
