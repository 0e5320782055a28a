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
    Store,
    error::{At, StoreError},
    lock::{Mode, private},
    publish::remove_all,
    records::dangling,
    rows::{artifacts_of, objects_of},
    sync,
};
use crate::{Digest, record::Release};

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

impl Store {
    /// Keeps everything with these IDs (programs, artifacts, objects) from being collected while the answer lives.
    ///
    /// Check *after* this call that they exist: gc may have deleted them before. In a read-only store nothing is recorded,
    /// and gc by another user does not know of its readers.
    pub fn hold(&self, ids: &[Digest]) -> Result<Hold, StoreError> {
        let lease = self.lease()?;
        sync::point("lease:before-hold");
        if let Some(lease) = &lease {
            let _using = self.lock(Mode::Use)?;
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
            let _using = self.lock(Mode::Use)?;
            lease.hold(ids)?;
        }
        Ok(())
    }

    /// Holds a release with all that it needs: its weights, programs, their artifacts and objects; checks that all of it
    /// is there.
    pub fn hold_release(&self, release: &Release) -> Result<Hold, StoreError> {
        match self.hold_found(release)? {
            (hold, None) => Ok(hold),
            (_, Some(missing)) => Err(missing),
        }
    }

    /// Holds the existing part of a release, and returns the error for the first missing part: a reader may not need it.
    pub fn hold_found(&self, release: &Release) -> Result<(Hold, Option<StoreError>), StoreError> {
        let mut ids = Vec::new();
        let mut objects = release.shim_objects();
        objects.extend(release.weights);
        let mut artifacts = HashSet::new();
        let what = format!("release {} of `{}`", release.seq, release.model);
        let mut missing = None;
        // What a record refers to is not collected while the record is held.
        let first = self.hold(&release.programs)?;
        for id in &release.programs {
            match self.program(id) {
                Ok(Some(program)) => artifacts.extend(artifacts_of(&program)),
                Ok(None) => missing = missing.or(Some(dangling(&what, "program", id))),
                Err(error) => missing = missing.or(Some(error)),
            }
        }
        for id in &artifacts {
            match self.artifact(id) {
                Ok(Some(artifact)) => objects.extend(objects_of(&artifact)),
                Ok(None) => missing = missing.or(Some(dangling(&what, "artifact", id))),
                Err(error) => missing = missing.or(Some(error)),
            }
        }
        ids.extend(&release.programs);
        ids.extend(artifacts);
        ids.extend(&objects);
        let all = self.hold(&ids)?;
        drop(first);
        let gone = objects.iter().find(|object| !self.has_object(object));
        let missing = missing.or(gone.map(|object| dangling(&what, "object", object)));
        Ok((all, missing))
    }

    /// Returns everything that live processes hold, and removes the leases of dead ones. Call with `Mode::Delete`.
    pub(crate) fn leased(&self) -> Result<HashSet<Digest>, StoreError> {
        self.each_lease(|path| self.bury(path))
    }

    /// Returns everything that live processes hold; changes nothing.
    pub(crate) fn peek_leases(&self) -> Result<HashSet<Digest>, StoreError> {
        self.each_lease(|_| Ok(()))
    }

    fn each_lease(
        &self,
        dead: impl Fn(&Path) -> Result<(), StoreError>,
    ) -> Result<HashSet<Digest>, StoreError> {
        let folder = self.path().join("leases");
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
                let file = match self.layout().open(&path) {
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
            remove_all(&self.path().join("tmp").join(name))?;
        }
        remove_all(lease)
    }

    /// Returns the lease of this process, made by the first call; none for a store that can't be written.
    pub(crate) fn lease(&self) -> Result<Option<Arc<Lease>>, StoreError> {
        if self.is_read_only() {
            return Ok(None);
        }
        let mut lease = self.0.lease.lock().unwrap_or_else(PoisonError::into_inner);
        if lease.is_none() {
            // What killed processes left goes when the next one comes.
            self.each_lease(|path| self.bury(path))?;
            *lease = Some(Arc::new(Lease::new(self.path())?));
        }
        Ok(lease.clone())
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

    #[test]
    fn what_is_held_is_seen_by_others_until_it_is_let_go() {
        let (_dir, store) = testing::store();
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let other = Store::open(store.path()).unwrap();
        let one = store.hold(&[a, b]).unwrap();
        let two = store.hold(&[a]).unwrap();
        drop(one);
        assert_eq!(other.leased().unwrap(), HashSet::from([a]));
        drop(two);
        assert_eq!(other.leased().unwrap(), HashSet::new());
    }

    #[test]
    fn a_lease_gets_no_longer_than_what_is_held_needs() {
        let (_dir, store) = testing::store();
        let other = Store::open(store.path()).unwrap();
        let kept: Vec<Digest> = (0..9u8).map(|n| Digest::of(&[n])).collect();
        let _hold = store.hold(&kept).unwrap();
        let lease = store.lease().unwrap().unwrap();
        let passing: Vec<Digest> = (0..=255u8).map(|n| Digest::of(&[n, n])).collect();
        let over = std::sync::atomic::AtomicBool::new(false);
        let longest = std::thread::scope(|scope| {
            // A reader meanwhile sees the held IDs, and takes no live process for dead.
            scope.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let held = other.leased().unwrap();
                    assert!(kept.iter().all(|id| held.contains(id)));
                }
            });
            let mut longest = 0;
            for _ in 0..200 {
                drop(store.hold(&passing).unwrap());
                longest = longest.max(fs::metadata(&lease.path).unwrap().len());
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            longest
        });
        assert!(longest < 2 * COMPACT, "{longest} bytes");
        assert_eq!(other.leased().unwrap(), kept.into_iter().collect());
        let last = store.hold(&passing).unwrap();
        assert_eq!(other.leased().unwrap().len(), 9 + 256);
        drop(last);
        assert!(other.leased().unwrap().len() == 9 && lease.tmp.exists());
    }

    #[test]
    fn what_a_dead_process_left_is_removed() {
        let (_dir, store) = testing::store();
        let lease = store.path().join("leases/1-dead.lease");
        fs::write(&lease, format!("+{}\n", Digest::of(b"a"))).unwrap();
        let tmp = store.path().join("tmp/1-dead");
        fs::create_dir(&tmp).unwrap();
        fs::write(tmp.join("half"), "x").unwrap();
        assert_eq!(store.leased().unwrap(), HashSet::new());
        assert!(!lease.exists() && !tmp.exists());
    }

    #[test]
    fn a_release_is_held_whole() {
        let (_dir, store, artifact, program) = testing::filled();
        let release = store
            .put_release(&testing::release("m", None, &[program.id]))
            .unwrap()
            .0;
        let path = store.path().to_owned();
        drop(store);
        let (reader, other) = (Store::open(&path).unwrap(), Store::open(&path).unwrap());
        let hold = reader.hold_release(&release).unwrap();
        let all = HashSet::from([program.id, artifact.id, artifact.object]);
        assert_eq!(other.leased().unwrap(), all);
        drop(hold);
        fs::remove_file(other.layout().object(&artifact.object)).unwrap();
        assert!(matches!(
            reader.hold_release(&release),
            Err(StoreError::Dangling { .. })
        ));
        assert_eq!(other.leased().unwrap(), HashSet::new());
    }
}
