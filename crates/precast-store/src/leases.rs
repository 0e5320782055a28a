//! Leases: gc never deletes what a live process reads or builds.
//!
//! A process that uses a store has one file under `leases/`, locked while the process lives. It has a line `+ID` for each
//! ID that the process takes and `-ID` for each that it releases. The process writes a line under `Mode::Use`; gc reads the
//! leases and deletes under `Mode::Delete`. So either gc sees the line, or the process sees that the file is gone.
//!
//! An unlocked lease belongs to a dead process: it is removed with that process's temporary files. A long lease is
//! compacted into a new locked file, which replaces it.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, TryLockError},
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    base::Base,
    error::{At, StoreError},
    lock::{Guard, Mode, private},
    publish::{PendingFile, remove_all},
    sync,
};
use crate::Digest;

/// When a lease's file gets so much longer than what is held needs it is written anew.
const COMPACT: u64 = 1 << 20;

/// A sign, a digest and the end of the line.
const LINE: u64 = 66;

/// No lease gets this long: what a process holds is written anew before.
const LONGEST: u64 = 64 << 20;

/// The lease of this process on one store.
#[derive(Debug)]
pub(crate) struct Lease {
    path: PathBuf,
    /// Where this process writes what it will publish.
    tmp: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    held: HashMap<Digest, u64>,
    length: u64,
}

impl Lease {
    fn new(root: &Path) -> Result<Self, StoreError> {
        let folder = root.join("leases");
        loop {
            let made = tempfile::Builder::new()
                .prefix(&format!("{}-", std::process::id()))
                .suffix(".lease")
                .tempfile_in(&folder)
                .at("make a lease in", &folder)?;
            let (file, path) = made
                .keep()
                .map_err(|e| e.error)
                .at("make a lease in", &folder)?;
            readable(&file, &folder).at("make a lease in", &folder)?;
            sync::point("lease:made");
            file.lock().at("lock", &path)?;
            // Between the two steps it looked like the lease of a dead process.
            if path.exists() {
                let tmp = root.join("tmp").join(path.file_stem().unwrap_or_default());
                fs::create_dir(&tmp).at("make the folder", &tmp)?;
                let state = State {
                    file,
                    held: HashMap::new(),
                    length: 0,
                };
                return Ok(Self {
                    path,
                    tmp,
                    state: Mutex::new(state),
                });
            }
        }
    }

    pub fn tmp(&self) -> &Path {
        &self.tmp
    }

    /// Adds to what is held. The caller has `Mode::Use` or `Mode::Add`.
    pub fn hold(&self, ids: &[Digest]) -> Result<(), StoreError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        for id in ids {
            if !state.held.contains_key(id) {
                text.push_str(&format!("+{id}\n"));
            }
        }
        state.write(&text).at("write the lease", &self.path)?;
        for id in ids {
            *state.held.entry(*id).or_default() += 1;
        }
        Ok(())
    }

    /// Releases these IDs. If the line can't be written, they stay held, which is harmless.
    fn release(&self, ids: &[Digest]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        for id in ids {
            if let Some(count) = state.held.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    state.held.remove(id);
                    text.push_str(&format!("-{id}\n"));
                }
            }
        }
        let _ = state.write(&text);
        let needed = state.held.len() as u64 * LINE;
        if state.length > needed + COMPACT
            && let Ok(file) = self.renew(&state.held)
        {
            (state.file, state.length) = (file, needed);
        }
    }

    /// Replaces the lease by one with only the held IDs. The old file stays locked until then; a process that has it open
    /// sees that it lost its name.
    fn renew(&self, held: &HashMap<Digest, u64>) -> io::Result<File> {
        let (mut file, path) = tempfile::NamedTempFile::new_in(&self.tmp)?.into_parts();
        readable(&file, self.path.parent().unwrap_or(Path::new(".")))?;
        file.lock()?;
        let text: String = held.keys().map(|id| format!("+{id}\n")).collect();
        file.write_all(text.as_bytes())?;
        path.persist(&self.path).map_err(|e| e.error)?;
        Ok(file)
    }
}

impl State {
    fn write(&mut self, text: &str) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        self.file.write_all_at(text.as_bytes(), self.length)?;
        self.length += text.len() as u64;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.tmp);
        let _ = fs::remove_file(&self.path);
    }
}

/// Keeps things from being collected until it is dropped.
#[derive(Debug)]
pub struct Hold {
    lease: Option<Arc<Lease>>,
    ids: Vec<Digest>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(lease) = &self.lease {
            lease.release(&self.ids);
        }
    }
}

/// The leases on a store, and the one that this process takes when it first needs one.
pub struct Leases {
    pub(crate) base: Arc<Base>,
    own: Mutex<Option<Arc<Lease>>>,
}

impl Leases {
    pub(crate) fn new(base: &Arc<Base>) -> Self {
        Self {
            base: base.clone(),
            own: Mutex::default(),
        }
    }

    /// Keeps everything with these IDs (programs, artifacts, objects) from being collected while the answer lives.
    ///
    /// Check *after* this call that they exist: gc may have deleted them before. In a read-only store nothing is recorded,
    /// and gc by another user does not know of its readers.
    pub fn hold(&self, ids: &[Digest]) -> Result<Hold, StoreError> {
        let lease = self.lease()?;
        sync::point("lease:before-hold");
        if let Some(lease) = &lease {
            let _using = self.base.lock(Mode::Use)?;
            lease.hold(ids)?;
        }
        Ok(Hold {
            lease,
            ids: ids.to_vec(),
        })
    }

    /// Keeps everything with these IDs from being collected for as long as this store is open.
    pub fn keep(&self, ids: &[Digest]) -> Result<(), StoreError> {
        if let Some(lease) = self.lease()? {
            let _using = self.base.lock(Mode::Use)?;
            lease.hold(ids)?;
        }
        Ok(())
    }

    /// Returns everything that live processes hold, and removes the leases of dead ones. Call with `Mode::Delete`.
    pub(crate) fn held_by_live(&self) -> Result<HashSet<Digest>, StoreError> {
        self.each_lease(|path| self.bury(path))
    }

    /// Returns everything that live processes hold; changes nothing. A read-only store can't know of its readers.
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
            loop {
                let file = match self.base.layout.open(&path) {
                    Ok(file) => file,
                    Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                    Err(e) => return Err(e).at("read", &path),
                };
                match file.try_lock() {
                    // Its process may have put another one in its place meanwhile.
                    Ok(()) if !is_named(&file, &path).at("look at", &path)? => continue,
                    Ok(()) => dead(&path)?,
                    Err(TryLockError::WouldBlock) => read(&file, &mut held).at("read", &path)?,
                    Err(TryLockError::Error(e)) => return Err(e).at("lock", &path),
                }
                break;
            }
        }
        Ok(held)
    }

    /// Removes what a dead process left. The caller has its lock.
    fn bury(&self, lease: &Path) -> Result<(), StoreError> {
        if let Some(name) = lease.file_stem() {
            remove_all(&self.base.path().join("tmp").join(name))?;
        }
        remove_all(lease)
    }

    /// Returns the lease of this process, made by the first call; none for a store that can't be written.
    pub(crate) fn lease(&self) -> Result<Option<Arc<Lease>>, StoreError> {
        if self.base.is_read_only() {
            return Ok(None);
        }
        let mut lease = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if lease.is_none() {
            // What killed processes left goes when the next one comes.
            self.each_lease(|path| self.bury(path))?;
            *lease = Some(Arc::new(Lease::new(self.base.path())?));
        }
        Ok(lease.clone())
    }

    /// Begins a file that will be published.
    pub(crate) fn pending_file(&self) -> Result<PendingFile, StoreError> {
        match self.lease()? {
            Some(lease) => PendingFile::new(lease.tmp()),
            None => self
                .base
                .writable("add to the store")
                .and_then(|()| PendingFile::new(&self.base.layout.tmp())),
        }
    }

    /// Waits until things may be added, and holds `ids` for as long as this store is open.
    pub(crate) fn adding(&self, ids: &[Digest]) -> Result<Guard, StoreError> {
        self.base.writable("add to the store")?;
        let lease = self.lease()?;
        let guard = self.base.lock(Mode::Add)?;
        if let Some(lease) = lease {
            lease.hold(ids)?;
        }
        Ok(guard)
    }
}

/// Returns whether a file has a name that this code gives to leases: others name no folder in `tmp` that may be removed.
pub(crate) fn is_lease(path: &Path) -> bool {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default();
    let stem = name.strip_suffix(".lease").unwrap_or_default();
    !stem.is_empty() && stem.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// Sets the mode of a lease: only users who may write the store can read or lock it.
fn readable(file: &File, folder: &Path) -> io::Result<()> {
    let mode = private(&fs::metadata(folder)?);
    file.set_permissions(fs::Permissions::from_mode(mode))
}

/// Returns whether a path names this file.
fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?.ino();
    Ok(fs::symlink_metadata(path).is_ok_and(|now| now.ino() == ours))
}

/// Reads the lines of one lease. A line that is cut is of a process that died while writing it.
fn read(file: &File, held: &mut HashSet<Digest>) -> io::Result<()> {
    let mut counts: HashMap<Digest, i64> = HashMap::new();
    if file.metadata()?.len() > LONGEST {
        return Err(io::Error::other("it is longer than any lease"));
    }
    for line in BufReader::new(file.take(LONGEST)).split(b'\n') {
        let line = line?;
        let Some((sign, id)) = line.split_first() else {
            continue;
        };
        let id = std::str::from_utf8(id).ok().and_then(|id| id.parse().ok());
        match (sign, id) {
            (b'+', Some(id)) => *counts.entry(id).or_default() += 1,
            (b'-', Some(id)) => *counts.entry(id).or_default() -= 1,
            _ => {}
        }
    }
    held.extend(
        counts
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .map(|(id, _)| id),
    );
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
    fn a_lease_gets_no_longer_than_what_is_held_needs() {
        let (_dir, store) = testing::store();
        let other = Store::open(store.path()).unwrap();
        let kept: Vec<Digest> = (0..9u8).map(|n| Digest::of(&[n])).collect();
        let _hold = store.leases().hold(&kept).unwrap();
        let lease = store.leases().lease().unwrap().unwrap();
        let passing: Vec<Digest> = (0..=255u8).map(|n| Digest::of(&[n, n])).collect();
        let over = std::sync::atomic::AtomicBool::new(false);
        let longest = std::thread::scope(|scope| {
            // A reader meanwhile sees the held IDs, and takes no live process for dead.
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let held = other.leases().held_by_live().unwrap();
                    assert!(kept.iter().all(|id| held.contains(id)));
                }
            });
            let mut longest = 0;
            for _ in 0..200 {
                drop(store.leases().hold(&passing).unwrap());
                longest = longest.max(fs::metadata(&lease.path).unwrap().len());
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            longest
        });
        assert!(longest < 2 * COMPACT, "{longest} bytes");
        assert_eq!(
            other.leases().held_by_live().unwrap(),
            kept.into_iter().collect()
        );
        let last = store.leases().hold(&passing).unwrap();
        assert_eq!(other.leases().held_by_live().unwrap().len(), 9 + 256);
        drop(last);
        assert!(other.leases().held_by_live().unwrap().len() == 9 && lease.tmp.exists());
    }

    #[test]
    fn what_a_dead_process_left_is_removed() {
        let (_dir, store) = testing::store();
        let lease = store.path().join("leases/1-dead.lease");
        fs::write(&lease, format!("+{}\n", Digest::of(b"a"))).unwrap();
        let tmp = store.path().join("tmp/1-dead");
        fs::create_dir(&tmp).unwrap();
        fs::write(tmp.join("half"), "x").unwrap();
        assert_eq!(store.leases().held_by_live().unwrap(), HashSet::new());
        assert!(!lease.exists() && !tmp.exists());
    }

    #[test]
    fn a_release_is_held_whole() {
        let (_dir, store, artifact, program) = testing::filled();
        let release = store
            .releases()
            .put(&testing::release("m", None, &[program.id]))
            .unwrap()
            .0;
        let path = store.path().to_owned();
        drop(store);
        let (reader, other) = (Store::open(&path).unwrap(), Store::open(&path).unwrap());
        let hold = reader.releases().hold(&release).unwrap();
        let all = HashSet::from([program.id, artifact.id, artifact.object]);
        assert_eq!(other.leases().held_by_live().unwrap(), all);
        drop(hold);
        fs::remove_file(other.layout().object(&artifact.object)).unwrap();
        assert!(matches!(
            reader.releases().hold(&release),
            Err(StoreError::Dangling { .. })
        ));
        assert_eq!(other.leases().held_by_live().unwrap(), HashSet::new());
    }
}
