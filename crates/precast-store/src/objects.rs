//! Objects: publishing bytes, and reading them back with their digest checked.

use std::{
    fs::{self, File},
    io::{self, Read, Seek},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    base::Base,
    checksum::created,
    chunks,
    error::{At, StoreError},
    leases::Leases,
    lock::Mode,
    object::{self, Written},
    pages::{PAGE, pages},
    parts::CheckedParts,
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

    pub(crate) fn base(&self) -> &Arc<Base> {
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

    /// Stores content that will be mapped, such as weights. `write` writes it to an empty file; `from` is its source, for
    /// errors. Returns its digest and its size in bytes.
    ///
    /// Large content that does not compress gets a plain object file. Other content is compressed, and also unpacked for
    /// its next map. A copy that the file system makes by reference, as btrfs and XFS do for `copy_file_range`, takes no space.
    /// A hard link would not do: its owner could change the object through the other name.
    pub fn put_unpacked(
        &self,
        from: &Path,
        write: &mut dyn FnMut(&mut File) -> io::Result<()>,
    ) -> Result<(Digest, u64), StoreError> {
        let mut pending = self.leases().pending_file()?;
        write(pending.file()).at("copy", from)?;
        let size = pending.file().metadata().at("copy", from)?.len();
        let plain = object::is_plain(pending.file(), size).at("copy", from)?;
        let (digest, size) = chunks::finish(pending.file(), plain).at("copy", from)?;
        let known = self.present(&digest)?;
        if known && self.ready.is_plain(&digest) {
            return Ok((digest, size));
        }
        if plain && !known {
            let stored = pending.file().metadata().at("copy", from)?.len();
            let _adding = self.leases().adding(&[digest])?;
            let written = Written {
                digest,
                size,
                stored,
            };
            self.publish_written(pending, &written)?;
            return Ok((digest, size));
        }
        if !known {
            pending.file().rewind().at("read", from)?;
            let mut content = pending.file().try_clone().at("read", from)?.take(size);
            self.publish_object(&mut content, size, from)?;
        }
        let path = self.base().layout.ready(&digest);
        match self.ready.publish(pending, &digest, &path) {
            Err(e) if !no_room(&e) => Err(e),
            _ => Ok((digest, size)),
        }
    }

    /// Returns the file with the unpacked content of an object and a footer. None if the object is compressed and was never
    /// mapped.
    pub fn unpacked_file(&self, digest: &Digest) -> Option<PathBuf> {
        let path = self.ready.place(digest);
        path.is_file().then_some(path)
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
        let copied = io::copy(&mut file, pending.file());
        copied.at("write an object into", self.base().path())?;
        // An error names the file that was copied.
        self.publish_copy(pending, digest, None, None, &path)
    }

    /// Publishes a copy of an object's file, after a check of every byte. `most` is the size of the content where it is
    /// known, and `arrived` the digest of as many first bytes of the file: a plain file is then not read again. `from` is
    /// the file's origin, for errors.
    pub(super) fn publish_copy(
        &self,
        mut pending: PendingFile,
        digest: &Digest,
        most: Option<u64>,
        arrived: Option<Digest>,
        from: &Path,
    ) -> Result<(), StoreError> {
        pending.file().rewind().at("read", pending.path())?;
        let mut checked = None;
        if let Some(most) = most {
            let object::Head { size, plain, .. } = object::head(pending.file(), digest, from)?;
            if plain && size == most && arrived == Some(*digest) {
                checked = Some(size);
            }
            if size > most {
                return Err(StoreError::Corrupt {
                    digest: *digest,
                    path: from.to_owned(),
                    why: format!("it declares {size} bytes of content, and has at most {most}"),
                });
            }
            pending.file().rewind().at("read", pending.path())?;
        }
        let size = match checked {
            Some(size) => size,
            None => object::decode(pending.file(), digest, from, &mut io::sink())?,
        };
        let file = pending.file().metadata().at("look at", pending.path())?;
        let _adding = self.leases().adding(&[*digest])?;
        pending.publish(&self.base().layout.object(digest))?;
        self.index_object(digest, size, file.len())
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

    /// Like [`Self::map`], but of a plain object nothing is hashed yet: the bytes of a range may be used once
    /// [`CheckedParts::check`] has passed it. Without parts all bytes were checked.
    pub fn map_in_parts(
        &self,
        digest: &Digest,
    ) -> Result<(Mapped, Option<CheckedParts>), StoreError> {
        self.ready.map_in_parts(digest)
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
    pub(super) fn present(&self, digest: &Digest) -> Result<bool, StoreError> {
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
    use std::{os::unix::fs::MetadataExt, thread};

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
        assert_eq!((rows.len(), rows.iter().any(wrong)), (100, false));
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

    /// Puts bytes as weights.
    fn put(store: &crate::Store, content: &[u8]) -> (Digest, u64) {
        let write = &mut |file: &mut File| io::Write::write_all(file, content);
        let put = store.objects().put_unpacked(Path::new("weights"), write);
        put.unwrap()
    }

    #[test]
    fn small_content_is_put_and_unpacked_at_once() {
        let (_dir, store) = testing::store();
        let content = b"weights".repeat(1000);
        let (digest, size) = put(&store, &content);
        assert_eq!((digest, size), (Digest::of(&content), 7000));
        assert_eq!(store.objects().read(&digest).unwrap(), content);
        let ready = store.layout().ready(&digest);
        let meta = fs::metadata(&ready).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.len()), (0o444, 7088));
        assert_eq!(&store.objects().map(&digest).unwrap()[..], content);
        assert_eq!(fs::metadata(&ready).unwrap().ino(), meta.ino());
        assert_eq!(store.objects().unpacked_file(&digest), Some(ready.clone()));
        // Again, without one of the two files.
        fs::remove_file(&ready).unwrap();
        assert_eq!(put(&store, &content), (digest, 7000));
        assert!(ready.exists());
        let tmp = store.layout().tmp();
        drop(store);
        assert_eq!(fs::read_dir(tmp).unwrap().count(), 0);
    }

    #[test]
    fn large_content_that_does_not_compress_lies_there_once() {
        let (_dir, store) = testing::store();
        let content = testing::noise(33 << 20, 1);
        let (digest, size) = put(&store, &content);
        assert_eq!((digest, size), (Digest::of(&content), content.len() as u64));
        let object = store.layout().object(&digest);
        let ready = store.layout().ready(&digest);
        let stored = fs::metadata(&object).unwrap().len();
        // The hashes of 33 parts, and the footer.
        assert_eq!(stored, size + 33 * 16 + 88);
        let row = store.objects().row(&digest).unwrap().unwrap();
        assert_eq!(row.stored, stored);
        assert_eq!(put(&store, &content), (digest, size));
        assert!(store.objects().map(&digest).unwrap()[..] == content);
        assert!(store.objects().read(&digest).unwrap() == content);
        let (map, checking) = store.objects().map_checking(&digest).unwrap();
        assert!(checking.wait() && map[..] == content);
        assert!(!ready.exists());
        assert_eq!(store.objects().unpacked_file(&digest), Some(object.clone()));
        assert_eq!(store.audit().verify().unwrap().defects, []);
        store.audit().reindex().unwrap();
        assert!(store.objects().has_sound(&digest).unwrap());
        // Another store gets the same file.
        let (_dir, other) = testing::store();
        other.objects().copy(store.objects(), &digest).unwrap();
        assert!(other.objects().map(&digest).unwrap()[..] == content);
        // A changed byte, in the content or in the footer, is an error and no other content.
        drop(map);
        for at in [5, content.len() / 2, content.len() + 40] {
            testing::damage(&object, |bytes| bytes[at] ^= 1);
            let map = store.objects().map(&digest);
            assert_eq!(testing::refused(map), "Corrupt", "{at}");
            assert!(store.objects().read(&digest).is_err());
            assert!(!store.audit().verify().unwrap().defects.is_empty(), "{at}");
            let mapped = store.objects().map_in_parts(&digest);
            let Ok((map, Some(parts))) = mapped else {
                assert!(at > content.len() && mapped.is_err(), "{at}");
                testing::damage(&object, |bytes| bytes[at] ^= 1);
                continue;
            };
            // Only the part with the byte is damaged.
            let others = [0..at >> 20 << 20, ((at >> 20) + 1) << 20..map.len()];
            for range in others {
                parts.check(range.clone()).unwrap();
                assert!(map[range.clone()] == content[range]);
            }
            for _ in 0..2 {
                let checked = parts.check(at..at + 1);
                assert_eq!(testing::refused(checked), "Corrupt", "{at}");
            }
            assert!(parts.check(0..map.len() + 1).is_err());
            testing::damage(&object, |bytes| bytes[at] ^= 1);
        }
        testing::damage(&object, |bytes| bytes.truncate(1 << 20));
        assert!(store.objects().map(&digest).is_err());
        // A new one takes the place of the damaged one.
        assert_eq!(put(&store, &content), (digest, size));
        assert!(store.objects().map(&digest).unwrap()[..] == content);
        // Zeros are compressed, however many.
        let (zeros, _) = put(&store, &vec![0; 33 << 20]);
        assert!(fs::metadata(store.layout().object(&zeros)).unwrap().len() < 1 << 20);
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
        assert_eq!(store.objects().read(&digest).unwrap(), b"compiled");
        assert_eq!(&map[..], b"compiled");
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        assert_ne!(inode(&store.layout().object(&digest)), inode(&source));
        // The source changes before it is copied: the object has the digest of the stored content, or is refused.
        let (now, size) = store.objects().put_file(&source).unwrap();
        assert_eq!((now, size), (Digest::of(b"swapped!!"), 9));
        let publish = |length| {
            let content = &mut &b"other"[..];
            store.objects().publish_object(content, length, &source)
        };
        let written = publish(5).unwrap();
        assert_eq!(store.objects().read(&written.digest).unwrap(), b"other");
        for length in [4, 6] {
            assert_eq!(testing::refused(publish(length)), "Changed");
        }
    }

    #[test]
    fn what_is_not_there_is_missing() {
        let (_dir, store) = testing::store();
        let digest = Digest::of(b"nothing");
        assert!(!store.objects().has(&digest));
        assert_eq!(testing::refused(store.objects().read(&digest)), "Missing");
        let path = testing::shard(&store.layout().object(&digest));
        std::os::unix::fs::symlink("/etc/passwd", path).unwrap();
        assert!(!store.objects().has(&digest));
        assert!(store.objects().read(&digest).is_err());
    }
}
