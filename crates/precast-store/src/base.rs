//! What all owners of a store share: its paths, its index, its locks and how it was opened.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use super::{
    error::{At, StoreError},
    index::Index,
    layout::Layout,
    lock::{Guard, Locks, Mode},
    permissions::Options,
    time::now,
};

pub(crate) struct Base {
    pub layout: Layout,
    pub index: Index,
    /// As it was opened; `read_only` also where the store can't be written.
    pub options: Options,
    pub locks: Locks,
}

impl Base {
    pub fn new(layout: Layout, index: Index, options: Options) -> Self {
        Self {
            locks: Locks::new(&layout, options),
            layout,
            index,
            options,
        }
    }

    /// Returns the store's folder.
    pub fn path(&self) -> &Path {
        &self.layout.root
    }

    pub fn is_read_only(&self) -> bool {
        self.options.read_only
    }

    /// Fails for a store that can't be written; `what` is to be done, as `add to the store`.
    pub fn writable(&self, what: &'static str) -> Result<(), StoreError> {
        if self.is_read_only() {
            return Err(StoreError::ReadOnly {
                what,
                path: self.path().to_owned(),
            });
        }
        Ok(())
    }

    /// Waits until `mode` is free. Returns at once, with nothing held, for a store that can't be written.
    pub fn lock(&self, mode: Mode) -> Result<Guard, StoreError> {
        if self.is_read_only() {
            return Ok(Guard::default());
        }
        self.locks.lock(mode)
    }

    pub fn stop_waiting_when(&self, stop: Arc<AtomicBool>) {
        self.index.stop_waiting_when(stop.clone());
        self.locks.stop_waiting_when(stop);
    }

    /// Moves a damaged file into `quarantine/`, under a name that was not used before.
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
