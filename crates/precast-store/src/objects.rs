//! Objects: publishing bytes, and reading them back with their digest checked.

use std::{
    fs::{self, File},
    io::{self, Read, Seek},
    path::Path,
    sync::Arc,
    thread,
};

use super::{
    base::Base,
    checksum::created,
    error::{At, StoreError},
    leases::Leases,
    lock::Mode,
    object::{self, Written},
    pages::{PAGE, pages},
    publish::{PendingFile, as_published, settle_time},
    ready::{Checking, Ready, no_room},
    reindex::files,
    rows::ObjectRow,
    sync,
};
use crate::{Digest, Mapped};

/// The objects of a store, and their unpacked files.
pub struct Objects {
    ready: Ready,
}

impl Objects {
    pub(crate) fn new(leases: Leases) -> Self {
        Self {
            ready: Ready { leases },
        }
    }

    pub(crate) fn leases(&self) -> &Leases {
        &self.ready.leases
    }

    fn base(&self) -> &Arc<Base> {
        &self.leases().base
    }

    /// Stores `bytes` and returns their digest, which is the name of the object.
    pub fn put_bytes(&self, bytes: &[u8]) -> Result<Digest, StoreError> {
        let digest = Digest::of(bytes);
        if !self.present(&digest)? {
            self.publish_object(&mut &*bytes, bytes.len() as u64, Path::new("bytes"))?;
        }
        Ok(digest)
    }

    /// Stores a copy of the file at `path`. Returns its digest and its size in bytes. Later changes of `path` have no
    /// effect on the copy.
    pub fn put_file(&self, path: &Path) -> Result<(Digest, u64), StoreError> {
        let mut file = File::open(path).at("read", path)?;
        let (digest, size) = Digest::of_reader(&mut file).at("read", path)?;
        self.put_hashed(&mut file, digest, size, path)
    }

    /// Like [`Self::put_file`], and also unpacks the object for its next map.
    pub fn put_file_unpacked(&self, path: &Path) -> Result<(Digest, u64), StoreError> {
        let mut file = File::open(path).at("read", path)?;
        let (digest, size) = Digest::of_reader(&mut file).at("read", path)?;
        let (put, unpacked) = thread::scope(|scope| {
            let unpacked = scope.spawn(|| self.ready.copy_of(&digest, path));
            let put = self.put_hashed(&mut file, digest, size, path);
            match unpacked.join() {
                Ok(unpacked) => (put, unpacked),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        });
        let put = put?;
        // An unpacked file without its object is a defect, also after a crash.
        if let Some(unpacked) = unpacked? {
            let path = self.base().layout.ready(&digest);
            match self.ready.publish(unpacked, &digest, &path) {
                Err(e) if !no_room(&e) => return Err(e),
                _ => {}
            }
        }
        Ok(put)
    }

    /// Stores the open file at `path`, whose digest and size were computed before.
    fn put_hashed(
        &self,
        file: &mut File,
        digest: Digest,
        size: u64,
        path: &Path,
    ) -> Result<(Digest, u64), StoreError> {
        if self.present(&digest)? {
            return Ok((digest, size));
        }
        file.rewind().at("read", path)?;
        let written = self.publish_object(file, size, path)?;
        Ok((written.digest, written.size))
    }

    /// Stores a copy of an object of another store. The compressed file is copied unchanged, and the copy is checked.
    pub fn copy(&self, from: &Self, digest: &Digest) -> Result<(), StoreError> {
        if self.present(digest)? {
            return Ok(());
        }
        let (mut file, path) = object::open(&from.base().layout, digest)?;
        let mut pending = self.leases().pending_file()?;
        let stored = io::copy(&mut file, pending.file());
        let stored = stored.at("write an object into", self.base().path())?;
        pending.file().rewind().at("read", pending.path())?;
        // An error names the file that was copied.
        let size = object::decode(pending.file(), digest, &path, &mut io::sink())?;
        let _adding = self.leases().adding(&[*digest])?;
        pending.publish(&self.base().layout.object(digest))?;
        self.index_object(digest, size, stored)
    }

    /// Returns whether the object has a file in the store. Does not check its bytes.
    pub fn has(&self, digest: &Digest) -> bool {
        fs::symlink_metadata(self.base().layout.object(digest)).is_ok_and(|meta| meta.is_file())
    }

    /// Returns whether the object is in the store and undamaged. Costs a `stat`; a file that has changed is read whole,
    /// once.
    pub fn has_sound(&self, digest: &Digest) -> Result<bool, StoreError> {
        Ok(as_published(&self.base().layout.object(digest)) || self.sound_size(digest)?.is_some())
    }

    /// Reads all of an object. Returns the size of its content if it exists and is sound.
    fn sound_size(&self, digest: &Digest) -> Result<Option<u64>, StoreError> {
        let read = object::open(&self.base().layout, digest).and_then(|(mut file, path)| {
            let size = object::decode(&mut file, digest, &path, &mut io::sink())?;
            settle_time(&file);
            Ok(size)
        });
        match read {
            Ok(size) => Ok(Some(size)),
            Err(StoreError::Missing { .. } | StoreError::Corrupt { .. }) => Ok(None),
            // A link or a folder is in its place.
            Err(_) if !self.has(digest) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Returns whether the object is in the store and undamaged. Restores a missing or damaged object from its unpacked
    /// file. Sets a damaged file aside.
    pub fn restore(&self, digest: &Digest) -> Result<bool, StoreError> {
        if self.has_sound(digest)? || self.present(digest)? {
            return Ok(true);
        }
        let Some((pending, written)) = self.encode_unpacked(digest)? else {
            return Ok(false);
        };
        let _adding = self.leases().adding(&[*digest])?;
        self.publish_written(pending, &written)?;
        Ok(true)
    }

    /// Compresses the unpacked file of an object. Returns none without a sound unpacked file.
    pub(super) fn encode_unpacked(
        &self,
        digest: &Digest,
    ) -> Result<Option<(PendingFile, Written)>, StoreError> {
        let Some((file, size)) = self.ready.sound(digest)? else {
            return Ok(None);
        };
        let mut pending = self.leases().pending_file()?;
        let written = object::encode(&mut (&file).take(size), size, pending.file());
        let written = written.at("write an object into", self.base().path())?;
        let same = written.filter(|written| written.digest == *digest);
        Ok(same.map(|written| (pending, written)))
    }

    /// Returns the content of an object. Checks every byte.
    pub fn read(&self, digest: &Digest) -> Result<Vec<u8>, StoreError> {
        let mut bytes = Vec::new();
        self.read_into(digest, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes the content of an object to `sink` and returns its size. On an error, the bytes in `sink` must not be
    /// used.
    pub fn read_into(&self, digest: &Digest, sink: &mut impl io::Write) -> Result<u64, StoreError> {
        object::read_into(&self.base().layout, digest, sink)
    }

    /// Returns the checked content of an object as a read-only map.
    ///
    /// The first call unpacks the object under `ready/`. Later calls hash that file. In a read-only store, or without
    /// room for the file, the bytes are in private memory of this process.
    pub fn map(&self, digest: &Digest) -> Result<Mapped, StoreError> {
        self.ready.map(digest)
    }

    /// Like [`Self::map`], but returns while other threads hash the bytes. The bytes may be used once
    /// [`Checking::wait`] has returned true. After false, [`Self::map`] returns the right ones.
    pub fn map_checking(&self, digest: &Digest) -> Result<(Mapped, Checking), StoreError> {
        self.ready.map_checking(digest)
    }

    /// Returns the checked content of an object as a sealed file in memory, which can't change any more.
    pub fn memfd(&self, digest: &Digest) -> Result<File, StoreError> {
        self.ready.memfd(digest)
    }

    /// Returns the size of all unpacked files in bytes.
    pub fn unpacked_bytes(&self) -> u64 {
        files(&self.base().path().join("ready"), "")
            .filter_map(|path| fs::symlink_metadata(path).ok())
            .map(|meta| meta.len())
            .sum()
    }

    /// Lists objects by digest. Rows are read lazily.
    pub fn rows(&self) -> impl Iterator<Item = Result<ObjectRow, StoreError>> + use<> {
        let query = format!("SELECT * FROM objects WHERE digest>? ORDER BY digest LIMIT {PAGE}");
        let base = self.base().clone();
        pages(move |last: Option<&ObjectRow>| {
            let after = last.map_or(&[][..], |row| row.digest.as_bytes());
            base.index.query(&query, [after], ObjectRow::read)
        })
    }

    /// Returns the row of an object, if the index has one.
    pub fn row(&self, digest: &Digest) -> Result<Option<ObjectRow>, StoreError> {
        let index = &self.base().index;
        index.with(|index| ObjectRow::find(index, digest))
    }

    /// Returns whether the object exists and needs no writing. Indexes a file without a row, after a crash. Sets a
    /// damaged file aside and removes a row without a file. No other process adds to the store during this, because it
    /// could be publishing the same object.
    fn present(&self, digest: &Digest) -> Result<bool, StoreError> {
        let path = self.base().layout.object(digest);
        let adding = self.leases().adding(&[*digest])?;
        let row = self.row(digest)?;
        let stored = fs::symlink_metadata(&path).ok().map(|meta| meta.len());
        if stored.is_none() && row.is_none() {
            return Ok(false);
        }
        let known = stored.is_some() && row.map(|row| row.stored) == stored;
        if known && as_published(&path) || self.index_sound(digest)? {
            return Ok(true);
        }
        drop(adding);
        let _lock = self.base().lock(Mode::Delete)?;
        if self.index_sound(digest)? {
            return Ok(true);
        }
        self.base().set_aside(&path)?;
        let forget = "DELETE FROM objects WHERE digest=?";
        (self.base().index).write(|tx| tx.prepare_cached(forget)?.execute([digest]))?;
        Ok(false)
    }

    /// Inserts the row of an object if its file is sound. Returns whether it is.
    fn index_sound(&self, digest: &Digest) -> Result<bool, StoreError> {
        let Some(size) = self.sound_size(digest)? else {
            return Ok(false);
        };
        let path = self.base().layout.object(digest);
        let stored = fs::symlink_metadata(&path).at("look at", &path)?.len();
        self.index_object(digest, size, stored).map(|()| true)
    }

    /// Compresses `content` into a new object file and its row.
    fn publish_object(
        &self,
        content: &mut impl Read,
        size: u64,
        from: &Path,
    ) -> Result<Written, StoreError> {
        let mut pending = self.leases().pending_file()?;
        let written = object::encode(content, size, pending.file());
        let changed = || StoreError::Changed {
            path: from.to_owned(),
        };
        let written = written.at("write an object into", self.base().path())?;
        let written = written.ok_or_else(changed)?;
        let _adding = self.leases().adding(&[written.digest])?;
        self.publish_written(pending, &written)?;
        Ok(written)
    }

    /// Publishes an object file, and its row. The caller has `Mode::Add` or `Mode::Delete`.
    pub(super) fn publish_written(
        &self,
        pending: PendingFile,
        written: &Written,
    ) -> Result<(), StoreError> {
        pending.publish(&self.base().layout.object(&written.digest))?;
        sync::point("put:object-published");
        self.index_object(&written.digest, written.size, written.stored)
    }

    /// Inserts the row of an object whose file is published.
    fn index_object(&self, digest: &Digest, size: u64, stored: u64) -> Result<(), StoreError> {
        let created = created(&self.base().layout.object(digest))?;
        let row = ObjectRow {
            digest: *digest,
            size,
            stored,
            created,
        };
        self.base().index.write(|tx| row.insert(tx))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::{super::testing, *};

    #[test]
    fn builders_that_publish_one_object_leave_it_in_its_place() {
        let (_dir, store) = testing::store();
        let path = store.path();
        let start = std::sync::Barrier::new(4);
        let builder = || {
            let store = crate::Store::open(path).unwrap();
            let put = |content: u32| {
                start.wait();
                store.objects().put_bytes(&content.to_le_bytes())
            };
            (0..100).map(put).filter_map(Result::err).collect()
        };
        let failed: Vec<Vec<StoreError>> = thread::scope(|scope| {
            let started: Vec<_> = (0..4).map(|_| scope.spawn(builder)).collect();
            started.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(failed.iter().all(Vec::is_empty), "{failed:?}");
        assert_eq!(fs::read_dir(path.join("quarantine")).unwrap().count(), 0);
        let wrong = |row: &ObjectRow| {
            let file = fs::metadata(store.layout().object(&row.digest)).unwrap();
            file.len() != row.stored || row.size != 4
        };
        let rows: Vec<ObjectRow> = store.objects().rows().map(Result::unwrap).collect();
        assert_eq!(
            (rows.len(), rows.iter().filter(|row| wrong(row)).count()),
            (100, 0)
        );
    }

    #[test]
    fn bytes_come_back_and_are_kept_once() {
        let (dir, store) = testing::store();
        let content = b"kernel".repeat(1000);
        let digest = store.objects().put_bytes(&content).unwrap();
        assert_eq!(digest, Digest::of(&content));
        assert_eq!(store.objects().put_bytes(&content).unwrap(), digest);
        assert_eq!(store.objects().read(&digest).unwrap(), content);
        let source = dir.path().join("lib.so");
        fs::write(&source, &content).unwrap();
        assert_eq!(store.objects().put_file(&source).unwrap(), (digest, 6000));
        let row = store.objects().row(&digest).unwrap().unwrap();
        assert!(row.size == 6000 && row.stored < 200, "{row:?}");
        let meta = fs::metadata(store.layout().object(&digest)).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.len()), (0o444, row.stored));
        let tmp = store.layout().tmp();
        drop(store);
        assert_eq!(fs::read_dir(tmp).unwrap().count(), 0);
    }

    #[test]
    fn a_file_is_put_and_unpacked_at_once() {
        let (dir, store) = testing::store();
        let source = dir.path().join("weights");
        fs::write(&source, b"weights".repeat(1000)).unwrap();
        let (digest, size) = store.objects().put_file_unpacked(&source).unwrap();
        assert_eq!((digest, size), (Digest::of(&b"weights".repeat(1000)), 7000));
        assert_eq!(
            store.objects().read(&digest).unwrap(),
            b"weights".repeat(1000)
        );
        let ready = store.layout().ready(&digest);
        let meta = fs::metadata(&ready).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.len()), (0o444, 7088));
        assert_eq!(
            &store.objects().map(&digest).unwrap()[..],
            b"weights".repeat(1000)
        );
        assert_eq!(fs::metadata(&ready).unwrap().ino(), meta.ino());
        // Again, without one of the two files.
        fs::remove_file(&ready).unwrap();
        assert_eq!(
            store.objects().put_file_unpacked(&source).unwrap(),
            (digest, 7000)
        );
        assert!(ready.exists());
        // The unpacked file has the content that the digest names.
        fs::remove_file(&ready).unwrap();
        fs::write(&source, b"others").unwrap();
        let result = store.objects().ready.copy_of(&digest, &source);
        assert!(matches!(result, Err(StoreError::Changed { .. })));
        assert!(!ready.exists());
        let tmp = store.layout().tmp();
        drop(store);
        assert_eq!(fs::read_dir(tmp).unwrap().count(), 0);
    }

    #[test]
    fn what_a_worker_writes_after_the_handover_has_no_effect() {
        let (dir, store) = testing::store();
        let source = dir.path().join("lib.so");
        fs::write(&source, b"compiled").unwrap();
        let mut late = File::options().write(true).open(&source).unwrap();
        let (digest, _) = store.objects().put_file(&source).unwrap();
        let map = store.objects().map(&digest).unwrap();
        io::Write::write_all(&mut late, b"swapped!!").unwrap();
        assert_eq!(
            (store.objects().read(&digest).unwrap(), &map[..]),
            (b"compiled".to_vec(), &b"compiled"[..])
        );
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        assert_ne!(inode(&store.layout().object(&digest)), inode(&source));
        // The source changes before it is copied: the object has the digest of the stored content, or is refused.
        let (now, size) = store.objects().put_file(&source).unwrap();
        assert_eq!((now, size), (Digest::of(b"swapped!!"), 9));
        let written = store
            .objects()
            .publish_object(&mut &b"other"[..], 5, &source)
            .unwrap();
        assert_eq!(store.objects().read(&written.digest).unwrap(), b"other");
        for length in [4, 6] {
            let result = store
                .objects()
                .publish_object(&mut &b"other"[..], length, &source);
            assert!(matches!(result, Err(StoreError::Changed { .. })));
        }
    }

    #[test]
    fn a_flipped_byte_is_named_and_put_again() {
        let (_dir, store) = testing::store();
        let digest = store.objects().put_bytes(b"some content").unwrap();
        let path = store.layout().object(&digest);
        testing::damage(&path, |bytes| bytes[12] ^= 1);
        let error = store.objects().read(&digest).unwrap_err();
        assert!(error.to_string().contains(&digest.hex()) && error.to_string().contains(".zst"));
        assert!(store.objects().map(&digest).is_err());
        testing::damage(&path, |bytes| bytes.truncate(20));
        assert_eq!(store.objects().put_bytes(b"some content").unwrap(), digest);
        assert_eq!(store.objects().read(&digest).unwrap(), b"some content");
    }

    #[test]
    fn what_is_not_there_is_missing() {
        let (_dir, store) = testing::store();
        let digest = Digest::of(b"nothing");
        assert!(!store.objects().has(&digest));
        assert!(matches!(
            store.objects().read(&digest),
            Err(StoreError::Missing { .. })
        ));
        std::os::unix::fs::symlink(
            "/etc/passwd",
            testing::shard(&store.layout().object(&digest)),
        )
        .unwrap();
        assert!(!store.objects().has(&digest));
        assert!(store.objects().read(&digest).is_err());
    }
}
