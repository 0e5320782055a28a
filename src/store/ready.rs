//! Objects as files that can be mapped: unpacked once under `ready/`, checked whole once, then known by their identity.
//!
//! A load asks for the inode, size and time stamps that the file had when every byte of it was hashed; the kernel moves
//! `ctime` whenever bytes or metadata change. When they differ, or the store was copied, the file is hashed again. What
//! an identity can't see: a change within the clock tick of the check, by the store's own user. `verify` hashes it all.
//!
//! What a load costs, for 7.6 MB kept as 3.1 MB (`make bench-store`, one run on 4 cores of an AMD EPYC, on disk):
//!
//! | way | ms |
//! |---|---|
//! | unpack without a check: what a store that trusts its disk would do | 7.4 |
//! | `read`: unpack, and check the content's digest and the seal of the stored bytes meanwhile | 14.2 |
//! | first `map`: the same into a file, which is synced and published (and, in that run, hashed once more) | 60.1 |
//! | later `map`: open, and compare the identity | 0.016 |
//! | hash the unpacked file instead: what each load would cost without an identity | 5.2 |
//! | `memfd`: `read` into sealed memory, for a store that can't be written | 18.1 |

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

use rusqlite::{OptionalExtension, params};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{
    Store, bytes,
    error::{At, StoreError},
    object::Tee,
    publish::Draft,
};
use crate::{Digest, Mapped};

impl Store {
    /// Returns the content of an object, checked, as a read-only map.
    ///
    /// The first call unpacks it under `ready/`; the next ones cost an `open` and a look at the index. On a read-only
    /// store, or when there is no room for the file, the bytes are in memory that this process alone has.
    pub fn map(&self, digest: &Digest) -> Result<Mapped, StoreError> {
        let path = self.layout().ready(digest);
        if let Some(file) = self.ready(digest, &path)? {
            return Mapped::new(&file).at("map", &path);
        }
        if !self.is_read_only() {
            match self.unpack(digest, &path) {
                Ok(file) => return Mapped::new(&file).at("map", &path),
                Err(e) if no_room(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Mapped::new(&self.memfd(digest)?).at("map", &path)
    }

    /// Returns the checked content of an object as a file in memory that nobody can change any more.
    pub fn memfd(&self, digest: &Digest) -> Result<File, StoreError> {
        let path = self.layout().object(digest);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file =
            File::from(memfd_create(digest.short(), flags).at("make memory for", &path)?);
        self.read_into(digest, &mut file)?;
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).at("seal the memory of", &path)?;
        Ok(file)
    }

    /// Opens the unpacked file if there is one and it is sound.
    fn ready(&self, digest: &Digest, path: &Path) -> Result<Option<File>, StoreError> {
        let mut file = match bytes::open_plain(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).at("read", path),
        };
        let identity = identity(&file).at("look at", path)?;
        let known: Option<Vec<u8>> = self.index().with(|index| {
            index
                .prepare_cached("SELECT identity FROM ready WHERE digest=?")?
                .query_row([digest.as_bytes()], |row| row.get(0))
                .optional()
        })?;
        if known.is_some_and(|known| known == identity) {
            return Ok(Some(file));
        }
        if Digest::of_reader(&mut file).at("read", path)?.0 == *digest {
            self.remember(digest, &file, path)?;
            return Ok(Some(file));
        }
        if !self.is_read_only() {
            self.set_aside(path)?;
        }
        Ok(None)
    }

    /// Returns what will be the unpacked file of an object, as a copy of what the object is made from; none where there is
    /// one already, or no room for it.
    pub(super) fn copy_for_ready(
        &self,
        digest: &Digest,
        from: &Path,
    ) -> Result<Option<Draft>, StoreError> {
        let path = self.layout().ready(digest);
        if self.ready(digest, &path)?.is_some() {
            return Ok(None);
        }
        let copy = || {
            let mut draft = self.draft()?;
            let mut source = Tee::new(File::open(from).at("read", from)?);
            io::copy(&mut source, draft.file()).at("unpack", &path)?;
            if source.digest() != *digest {
                return Err(StoreError::Changed {
                    path: from.to_owned(),
                });
            }
            Ok(Some(draft))
        };
        match copy() {
            Err(e) if no_room(&e) => Ok(None),
            copied => copied,
        }
    }

    /// Unpacks an object to `path`.
    fn unpack(&self, digest: &Digest, path: &Path) -> Result<File, StoreError> {
        let mut draft = self.draft()?;
        self.read_into(digest, draft.file())?;
        self.publish_unpacked(draft, digest, path)
    }

    /// Puts in its place what has every byte of an object.
    pub(super) fn publish_unpacked(
        &self,
        draft: Draft,
        digest: &Digest,
        path: &Path,
    ) -> Result<File, StoreError> {
        if draft.publish(path)? {
            // Every byte of it was checked as it was written.
            let file = bytes::open_plain(path).at("read", path)?;
            self.remember(digest, &file, path)?;
            return Ok(file);
        }
        // Another process was faster: what lies there is opened and hashed.
        match self.ready(digest, path)? {
            Some(file) => Ok(file),
            None => self.memfd(digest),
        }
    }

    /// Records the identity of a file that was hashed whole.
    fn remember(&self, digest: &Digest, file: &File, path: &Path) -> Result<(), StoreError> {
        if self.is_read_only() {
            return Ok(());
        }
        let identity = identity(file).at("look at", path)?;
        self.index().write(|tx| {
            tx.prepare_cached("INSERT OR REPLACE INTO ready VALUES (?,?)")?
                .execute(params![digest.as_bytes(), identity])
                .map(drop)
        })
    }
}

/// Returns what changes when a file's bytes or metadata change.
fn identity(file: &File) -> io::Result<Vec<u8>> {
    let meta: fs::Metadata = file.metadata()?;
    let fields = [
        meta.ino() as i64,
        meta.size() as i64,
        meta.mode().into(),
        meta.mtime(),
        meta.mtime_nsec(),
        meta.ctime(),
        meta.ctime_nsec(),
    ];
    Ok(fields
        .iter()
        .flat_map(|field| field.to_le_bytes())
        .collect())
}

pub(super) fn no_room(error: &StoreError) -> bool {
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    matches!(error, StoreError::Io { source, .. } if full.contains(&source.kind()))
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};

    #[test]
    fn a_map_is_unpacked_once_and_checked_again_when_touched() {
        let (_dir, store) = testing::store();
        let content = vec![7u8; 10_000];
        let digest = store.put_bytes(&content).unwrap();
        let first = store.map(&digest).unwrap();
        assert_eq!(&first[..], &content[..]);
        assert_eq!(first.as_ptr() as usize % 4096, 0);
        let path = store.layout().ready(&digest);
        let inode = fs::metadata(&path).unwrap().ino();
        drop(store.map(&digest).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        testing::damage(&path, |bytes| bytes[0] = 8);
        assert_eq!(&store.map(&digest).unwrap()[..], &content[..]);
        assert_eq!(&first[1..], &content[1..]);
        let empty = store.put_bytes(b"").unwrap();
        assert_eq!(store.map(&empty).unwrap().len(), 0);
    }

    #[test]
    fn memory_that_was_handed_out_is_sealed() {
        use std::io::Write;
        let (_dir, store) = testing::store();
        let digest = store.put_bytes(b"code").unwrap();
        let mut file = store.memfd(&digest).unwrap();
        assert!(file.write(b"x").is_err() && file.set_len(0).is_err());
    }
}
