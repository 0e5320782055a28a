//! Prepacked weights: computed from a weight set by a runtime, and kept for the processes after it.
//!
//! ```text
//! cache/prepacked/3f9c…/a1b2…     digest of the weight set, and key of the computation
//! ```
//!
//! A key covers the computation and the kind of machine. A file has the form of an unpacked one ([`chunks`]), with the
//! key in place of a digest, and is checked like one before it is mapped. So processes share its pages, and a changed byte
//! only costs the computation. It is a cache: files are not synced, and may be deleted at any time.
//!
//! The files of a store take at most [`Options::prepacked`] bytes. A weight set that needs more room takes that of other
//! sets, the longest unused first. gc deletes the files of weight sets that are gone.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::{
    base::Base,
    chunks::{self, Summing},
    error::{At, StoreError},
    leases::Leases,
    permissions::Unpacked,
};
use crate::{Digest, Mapped};

/// The maximum of bytes, unless the options have another one.
const LIMIT: u64 = 64 << 30;

/// The prepacked weights of a store.
pub struct Prepacked<'a> {
    pub(super) leases: &'a Leases,
}

impl Prepacked<'_> {
    fn base(&self) -> &Base {
        &self.leases.base
    }

    fn limit(&self) -> u64 {
        match self.base().options.unpacked {
            // Nothing of a file may be used in place.
            Unpacked::Copy => 0,
            _ => self.base().options.prepacked.unwrap_or(LIMIT),
        }
    }

    fn path(&self, weights: &Digest, key: &Digest) -> PathBuf {
        folder(self.base(), weights).join(key.hex())
    }

    /// Returns the content under a key as a map. None without a sound file.
    pub fn get(&self, weights: &Digest, key: &Digest) -> Result<Option<Mapped>, StoreError> {
        let path = self.path(weights, key);
        if self.limit() == 0 {
            return Ok(None);
        }
        let file = match self.base().layout.open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).at("read", &path),
        };
        let size = match self.base().options.unpacked {
            Unpacked::Trust => chunks::size(&file, key),
            _ => chunks::check(&file, key, None),
        };
        let Some(size) = size.at("read", &path)? else {
            // It is computed again. A file that can't be deleted stays.
            if !self.base().is_read_only() {
                let _ = fs::remove_file(&path);
            }
            return Ok(None);
        };
        if !self.base().is_read_only() {
            // The time of the last use: only the order of removals depends on it.
            let _ = file.set_modified(SystemTime::now());
        }
        Mapped::new(&file, size).at("map", &path).map(Some)
    }

    /// Keeps a result under a key: the concatenated parts. Returns it as a map. Returns none for a read-only store, beyond
    /// the limit, and without room on the disk.
    pub fn put(
        &self,
        weights: &Digest,
        key: &Digest,
        parts: &[&[u8]],
    ) -> Result<Option<Mapped>, StoreError> {
        let size: usize = parts.iter().map(|part| part.len()).sum();
        if self.base().is_read_only() || !self.make_room(weights, size as u64) {
            return Ok(None);
        }
        match self.write(weights, key, parts) {
            Ok(()) => self.get(weights, key),
            Err(e) if super::ready::no_room(&e) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn write(&self, weights: &Digest, key: &Digest, parts: &[&[u8]]) -> Result<(), StoreError> {
        let mut pending = self.leases.pending_file()?;
        let mut to = Summing::new(pending.file());
        let written = parts.iter().try_for_each(|part| to.write_all(part));
        let written = written.and_then(|()| to.finish(key));
        written.at("write", &self.path(weights, key))?;
        pending.publish_unsynced(&self.path(weights, key))
    }

    /// Removes files of other weight sets until there is room for so many bytes. Returns whether there is.
    fn make_room(&self, weights: &Digest, size: u64) -> bool {
        let limit = self.limit();
        let mut files = files(self.base());
        let mut total: u64 = files.iter().map(|file| file.bytes).sum();
        if total + size <= limit {
            return true;
        }
        files.retain(|file| file.weights != *weights);
        files.sort_unstable_by_key(|file| file.used);
        for file in files {
            if total + size <= limit {
                break;
            }
            if fs::remove_file(&file.path).is_ok() {
                total -= file.bytes;
            }
        }
        total + size <= limit
    }

    /// Returns the bytes of all files.
    pub fn bytes(&self) -> u64 {
        files(self.base()).iter().map(|file| file.bytes).sum()
    }
}

/// One file.
struct Kept {
    path: PathBuf,
    weights: Digest,
    bytes: u64,
    used: SystemTime,
}

fn root(base: &Base) -> PathBuf {
    base.path().join("cache").join("prepacked")
}

fn folder(base: &Base, weights: &Digest) -> PathBuf {
    root(base).join(weights.hex())
}

/// Returns the names of a folder; none without the folder.
fn list(folder: &Path) -> impl Iterator<Item = fs::DirEntry> + use<> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
}

fn files(base: &Base) -> Vec<Kept> {
    let sets = list(&root(base)).filter_map(|set| {
        let weights: Digest = set.file_name().to_str()?.parse().ok()?;
        Some((set.path(), weights))
    });
    let files = sets.flat_map(|(set, weights)| {
        list(&set).filter_map(move |file| {
            let meta = file.metadata().ok()?;
            Some(Kept {
                path: file.path(),
                weights,
                bytes: meta.len(),
                used: meta.modified().ok()?,
            })
        })
    });
    files.collect()
}

/// Returns the bytes of the files of one weight set.
pub(crate) fn bytes_of(base: &Base, weights: &Digest) -> u64 {
    let files = list(&folder(base, weights)).filter_map(|file| file.metadata().ok());
    files.map(|meta| meta.len()).sum()
}

/// Deletes the files of weight sets that are not in the store.
pub(crate) fn sweep(base: &Base) {
    for set in list(&root(base)) {
        let weights = set.file_name().to_str().and_then(|name| name.parse().ok());
        if weights.is_none_or(|weights| !base.layout.object(&weights).exists()) {
            let _ = fs::remove_dir_all(set.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::{Options, Store, testing};

    fn keys() -> [Digest; 3] {
        ["a", "b", "c"].map(|name| Digest::of(name.as_bytes()))
    }

    #[test]
    fn what_was_computed_comes_back_until_a_byte_changes() {
        let (_dir, store) = testing::store();
        let [weights, key, other] = keys();
        assert!(store.prepacked().get(&weights, &key).unwrap().is_none());
        let put = store.prepacked().put(&weights, &key, &[b"one ", b"two"]);
        assert_eq!(&put.unwrap().unwrap()[..], b"one two");
        let found = |key| store.prepacked().get(&weights, key).unwrap();
        assert_eq!(&found(&key).unwrap()[..], b"one two");
        assert!(found(&other).is_none());
        // Under another key the footer does not fit.
        let path = |key: &Digest| folder(store.prepacked().base(), &weights).join(key.hex());
        fs::copy(path(&key), path(&other)).unwrap();
        assert!(found(&other).is_none() && !path(&other).exists());
        for at in [0, 6, 20] {
            testing::damage(&path(&key), |bytes| bytes[at] ^= 1);
            assert!(found(&key).is_none());
            let again = store.prepacked().put(&weights, &key, &[b"one two"]);
            again.unwrap();
        }
        assert_eq!(store.audit().verify().unwrap().defects, []);
    }

    #[test]
    fn files_stay_below_the_limit_and_go_with_their_weights() {
        let (_dir, store) = testing::store();
        let weights = [1u8, 2].map(|one| store.objects().put_bytes(&[one]).unwrap());
        let [a, b, c] = keys();
        let options = Options {
            prepacked: Some(3000),
            ..Options::default()
        };
        let small = Store::open_with(store.path(), options).unwrap();
        let put = |set: usize, key: &Digest| {
            let put = small.prepacked().put(&weights[set], key, &[&[7; 1000]]);
            put.unwrap().is_some()
        };
        assert!(put(0, &a) && put(0, &b));
        // A set does not take its own room.
        assert!(!put(0, &c));
        // The longest unused file is deleted.
        let long_ago = SystemTime::UNIX_EPOCH;
        let first = folder(small.prepacked().base(), &weights[0]).join(a.hex());
        let file = File::options().read(true).open(&first).unwrap();
        file.set_modified(long_ago).unwrap();
        assert!(put(1, &c));
        assert!(!first.exists());
        assert!(small.prepacked().get(&weights[0], &b).unwrap().is_some());
        assert!(small.prepacked().bytes() <= 3000);
        // gc deletes unused weights, with their prepacked ones.
        drop(small);
        let path = store.path().to_owned();
        drop(store);
        let store = Store::open(&path).unwrap();
        let plan = store.collector().plan(&Default::default()).unwrap();
        store.collector().collect(&plan).unwrap();
        assert_eq!(store.prepacked().bytes(), 0);
    }

    #[test]
    fn nothing_is_kept_where_files_are_not_used_in_place() {
        let (_dir, store) = testing::store();
        let [weights, key, another] = keys();
        store.prepacked().put(&weights, &key, &[b"one"]).unwrap();
        for (read_only, unpacked) in [(false, Unpacked::Copy), (true, Unpacked::Check)] {
            let options = Options {
                read_only,
                unpacked,
                ..Options::default()
            };
            let other = Store::open_with(store.path(), options).unwrap();
            let put = other.prepacked().put(&weights, &another, &[b"x"]);
            assert!(put.unwrap().is_none());
            let got = other.prepacked().get(&weights, &key).unwrap();
            assert_eq!(got.is_some(), read_only);
        }
    }
}
