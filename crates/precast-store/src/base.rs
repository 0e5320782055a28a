//! The part that all owners of a store share: its paths, its index, its locks and its options.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    error::{At, StoreError},
    index::Index,
    layout::StoreLayout,
    lock::{Guard, Locks, Mode},
    permissions::Options,
    time::now,
};

pub(crate) struct Base {
    pub layout: StoreLayout,
    pub index: Index,
    /// Options of the caller. `read_only` is also set if the store can't be written.
    pub options: Options,
    pub locks: Arc<Locks>,
}

impl Base {
    /// Returns the store's folder.
    pub fn path(&self) -> &Path {
        &self.layout.root
    }

    pub fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    /// Fails for a read-only store. `what` names the change, as `add to the store`.
    pub fn writable(&self, what: &'static str) -> Result<(), StoreError> {
        if self.is_read_only() {
            return Err(StoreError::ReadOnly {
                what,
                path: self.path().to_owned(),
            });
        }
        Ok(())
    }

    /// Waits for the lock `mode`. For a read-only store, returns at once and without a lock.
    pub fn lock(&self, mode: Mode) -> Result<Guard, StoreError> {
        if self.is_read_only() {
            return Ok(Guard::default());
        }
        self.locks.lock(mode)
    }

    /// Moves a damaged file into `quarantine/`, under a new name.
    pub fn set_aside(&self, path: &Path) -> Result<(), StoreError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let folder = self.path().join("quarantine");
        let to = |n: u32| -> PathBuf { folder.join(format!("{name}.{}.{n}", now())) };
        let free = (0..)
            .map(to)
            .find(|to| fs::symlink_metadata(to).is_err())
            .unwrap_or_else(|| to(0));
        match fs::rename(path, free) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.at("set aside", path),
        }
    }
}
