//! Leases: gc does not delete things that a live process reads or builds.
//!
//! A lease is a file under `leases/`, locked while its process lives, with one ID a line. A process has one for
//! everything that it keeps while the store is open, and one for each [`Hold`]. It writes IDs under `Mode::Use`; gc
//! reads the leases and deletes under `Mode::Delete`. So either gc sees the ID, or the process sees that the file is
//! gone.
//!
//! An unlocked lease belongs to a dead process: it is removed with that process's temporary files.

use std::{
    collections::{BTreeSet, HashSet},
    fs::{self, File, Permissions, TryLockError},
    io::{self, Read},
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    base::Base,
    error::{At, StoreError},
    lock::{Guard, Mode, private},
    publish::{PendingFile, folder_unsynced, remove_all},
    sync,
};
use crate::Digest;

/// Bytes of a line: a digest and a line feed.
const LINE: u64 = 65;

/// Maximum bytes of a lease: a store has fewer things.
const LONGEST: u64 = 64 << 20;

/// A list of IDs that gc does not delete.
#[derive(Debug)]
struct Lease {
    path: PathBuf,
    /// Folder of this process for files to publish. It is created with the first of them.
    tmp: PathBuf,
    file: File,
    held: Mutex<HashSet<Digest>>,
}

impl Lease {
    fn new(root: &Path) -> Result<Self, StoreError> {
        let folder = root.join("leases");
        let mode = private(&fs::metadata(&folder).at("look at", &folder)?);
        loop {
            let made = tempfile::Builder::new()
                .prefix(&format!("{}-", std::process::id()))
                .suffix(".lease")
                .tempfile_in(&folder)
                .at("make a lease in", &folder)?;
            let kept = made.keep().map_err(|e| e.error);
            let (file, path) = kept.at("make a lease in", &folder)?;
            let mode = file.set_permissions(Permissions::from_mode(mode));
            mode.at("set the mode of", &path)?;
            sync::point("lease:made");
            file.lock().at("lock", &path)?;
            // Before the lock, another process may have removed it as the lease of a dead process.
            if path.exists() {
                return Ok(Self {
                    tmp: root.join("tmp").join(path.file_stem().unwrap_or_default()),
                    path,
                    file,
                    held: Mutex::default(),
                });
            }
        }
    }

    /// Adds IDs. The caller has `Mode::Use` or `Mode::Add`.
    fn add(&self, ids: &[Digest]) -> Result<(), StoreError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let new = ids.iter().filter(|id| !held.contains(id));
        let new: BTreeSet<Digest> = new.copied().collect();
        let text: String = new.iter().map(|id| format!("{id}\n")).collect();
        let end = held.len() as u64 * LINE;
        let written = self.file.write_all_at(text.as_bytes(), end);
        written.at("write the lease", &self.path)?;
        held.extend(new);
        Ok(())
    }

    /// Creates a temporary file, to be published later.
    fn pending_file(&self) -> Result<PendingFile, StoreError> {
        folder_unsynced(&self.tmp)?;
        PendingFile::new(&self.tmp)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.tmp);
        let _ = fs::remove_file(&self.path);
    }
}

/// Protects things from gc until it is dropped. It has no lease in a read-only store.
#[derive(Debug)]
pub struct Hold {
    _lease: Option<Lease>,
}

/// The leases on a store.
pub struct Leases {
    pub(crate) base: Arc<Base>,
    /// The lease of this process, created on first use.
    own: Mutex<Option<Arc<Lease>>>,
}

impl Leases {
    pub(crate) fn new(base: Base) -> Self {
        Self {
            base: Arc::new(base),
            own: Mutex::default(),
        }
    }

    /// Protects everything with these IDs (programs, artifacts, objects) from gc until the returned [`Hold`] is
    /// dropped.
    ///
    /// Check *after* this call that they exist: gc may have deleted them before. A read-only store records nothing, and
    /// gc by another user does not know its readers.
    pub fn hold(&self, ids: &[Digest]) -> Result<Hold, StoreError> {
        if self.base.is_read_only() {
            return Ok(Hold { _lease: None });
        }
        self.lease()?;
        let lease = Lease::new(self.base.path())?;
        sync::point("lease:before-hold");
        let _using = self.base.lock(Mode::Use)?;
        lease.add(ids)?;
        Ok(Hold {
            _lease: Some(lease),
        })
    }

    /// Protects everything with these IDs from gc while this store is open.
    pub fn keep(&self, ids: &[Digest]) -> Result<(), StoreError> {
        if self.base.is_read_only() {
            return Ok(());
        }
        let lease = self.lease()?;
        let _using = self.base.lock(Mode::Use)?;
        lease.add(ids)
    }

    /// Returns the IDs that live processes hold, and removes the leases of dead ones. The caller has `Mode::Delete`.
    pub(crate) fn held_by_live(&self) -> Result<HashSet<Digest>, StoreError> {
        self.each_lease(|path| self.bury(path))
    }

    /// Returns the IDs that live processes hold. Changes nothing. A read-only store does not know its readers.
    pub(crate) fn all_held(&self) -> Result<HashSet<Digest>, StoreError> {
        if self.base.is_read_only() {
            return Ok(HashSet::new());
        }
        self.each_lease(|_| Ok(()))
    }

    fn each_lease(
        &self,
        dead: impl Fn(&Path) -> Result<(), StoreError>,
    ) -> Result<HashSet<Digest>, StoreError> {
        let folder = self.base.path().join("leases");
        let mut held = HashSet::new();
        let entries = match fs::read_dir(&folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(held),
            entries => entries.at("list", &folder)?,
        };
        for entry in entries {
            let path = entry.at("list", &folder)?.path();
            if !is_lease(&path) {
                continue;
            }
            let file = match self.base.layout.open(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                file => file.at("read", &path)?,
            };
            match file.try_lock() {
                Ok(()) => dead(&path)?,
                Err(TryLockError::WouldBlock) => read(file, &mut held).at("read", &path)?,
                Err(TryLockError::Error(e)) => return Err(e).at("lock", &path),
            }
        }
        Ok(held)
    }

    /// Removes the lease and the temporary files of a dead process. The caller has locked the lease.
    fn bury(&self, lease: &Path) -> Result<(), StoreError> {
        if let Some(name) = lease.file_stem() {
            remove_all(&self.base.path().join("tmp").join(name))?;
        }
        remove_all(lease)
    }

    /// Returns the lease of this process. The first call creates it, and removes the leases of dead processes.
    fn lease(&self) -> Result<Arc<Lease>, StoreError> {
        self.base.writable("add to the store")?;
        let mut lease = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lease) = &*lease {
            return Ok(lease.clone());
        }
        self.each_lease(|path| self.bury(path))?;
        Ok(lease
            .insert(Arc::new(Lease::new(self.base.path())?))
            .clone())
    }

    /// Creates a temporary file, to be published later.
    pub(crate) fn pending_file(&self) -> Result<PendingFile, StoreError> {
        self.lease()?.pending_file()
    }

    /// Waits for `Mode::Add`, and holds `ids` while this store is open.
    pub(crate) fn adding(&self, ids: &[Digest]) -> Result<Guard, StoreError> {
        let lease = self.lease()?;
        let guard = self.base.lock(Mode::Add)?;
        lease.add(ids)?;
        Ok(guard)
    }
}

/// Returns whether a file has the name of a lease. Other names must not select a folder of `tmp` for removal.
pub(crate) fn is_lease(path: &Path) -> bool {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let stem = name.strip_suffix(".lease").unwrap_or_default();
    !stem.is_empty() && stem.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// Reads the IDs of a lease. Skips a truncated line: it is being written, or its process was killed.
fn read(file: File, held: &mut HashSet<Digest>) -> io::Result<()> {
    let mut text = Vec::new();
    if file.take(LONGEST + 1).read_to_end(&mut text)? as u64 > LONGEST {
        return Err(io::Error::other("it is longer than any lease"));
    }
    let text = String::from_utf8_lossy(&text);
    held.extend(text.lines().filter_map(|line| line.parse::<Digest>().ok()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};
    use crate::Store;

    #[test]
    fn what_is_held_is_seen_by_others_until_it_is_let_go() {
        let (_dir, store) = testing::store();
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let other = Store::open(store.path()).unwrap();
        let one = store.leases().hold(&[a, b]).unwrap();
        let two = store.leases().hold(&[a]).unwrap();
        drop(one);
        assert_eq!(other.leases().held_by_live().unwrap(), HashSet::from([a]));
        drop(two);
        assert_eq!(other.leases().held_by_live().unwrap(), HashSet::new());
    }

    #[test]
    fn a_release_is_held_whole() {
        let (_dir, store, artifact, program) = testing::filled();
        let release = testing::put_release(&store, None, &[program.id]);
        let path = store.path().to_owned();
        drop(store);
        let (reader, other) = (Store::open(&path).unwrap(), Store::open(&path).unwrap());
        let hold = reader.releases().hold(&release).unwrap();
        let all = HashSet::from([program.id, artifact.id, artifact.object]);
        assert_eq!(other.leases().held_by_live().unwrap(), all);
        drop(hold);
        fs::remove_file(other.layout().object(&artifact.object)).unwrap();
        let held = reader.releases().hold(&release);
        assert_eq!(testing::refused(held), "Dangling");
        assert_eq!(other.leases().held_by_live().unwrap(), HashSet::new());
    }
}
