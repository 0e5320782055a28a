//! The store of built artifacts: objects by digest, records by key, and an index over both.
//!
//! The store handles bytes and records, not models: nothing here compiles or loads. The files are authoritative. The index
//! makes lookups fast and can be deleted at any time.
//!
//! ```text
//! artifacts/
//! ├── CACHEDIR.TAG              backup tools skip this folder: all of it can be built again
//! ├── precast-store.json        marks a store, with the version of its layout
//! ├── index.sqlite              one row per file below; rebuilt from them when it is missing
//! ├── objects/3f/3f9c….zst      bytes, named by the SHA-256 of their content          ┐ mode 0444,
//! ├── artifacts/a1/a1b2….json   one shared object and its layout, named by its key     │ never replaced,
//! ├── programs/07/07de….json    the steps of one module at one bucket, by request key  │ never opened for
//! ├── releases/NAME/00000007.json  a complete set of programs with one weight set       ┘ writing again
//! ├── failures/5c/5c01….json    the error of the last attempt; removed after the next success
//! ├── ready/3f/3f9c…            unpacked objects, which can be mapped; a cache of `objects/`
//! ├── cache/                    a cache of the plan: digests of sources by their file status
//! ├── tmp/                      files that are being written
//! ├── locks/  leases/           locks and holds of live processes
//! └── quarantine/               damaged files, which are never used; gc removes the old ones
//! ```
//!
//! A file becomes visible in one step (`publish`): temp file → fsync → rename that never replaces → fsync of the
//! folder; then its row. A file is published after everything it refers to: objects, artifacts, programs, release.
//!
//! | topic | module |
//! |---|---|
//! | file formats and their checks | `object`; `checksum` for records |
//! | mapping an object, and the check before | `ready`; by several threads: `chunks` |
//! | locks between processes | `lock`; one compile per key: `claim` |
//! | garbage collection | `lease` (in use), `gc` (the plan), `sweep` (the deletion) |
//! | copies of releases | `copy` |
//! | damage | `defect`, `verify`, `repair`; the end of damaged files: `quarantine` |
//! | protection against other users | `permissions` |
//! | versions | below; `index` |
//! | records, digests, targets | [`record`], [`digest`], [`target`]; their encoding in keys: [`canon`] |
//!
//! A missing folder counts as empty: a copy of a store may lack it, or all of `ready/`. The next process that may write
//! creates it.
//!
//! Three things have a version: the layout (in `precast-store.json`), the index (`user_version`) and each record
//! (`schema`). A newer version is refused, and its files stay unchanged. gc refuses a store with a newer record, because
//! the references of that record are unknown. An older index is migrated, or rebuilt from the files.
//!
//! **Promised**, and tested by `make torture`:
//!
//! - A published file survives a crash bit for bit.
//! - A changed byte is an error, not a wrong answer.
//! - gc deletes nothing that a live process holds.
//! - There is one live compile per key.
//! - A read-only store can be read, and nothing tries to write it.
//! - A newer store is refused.
//!
//! **Not promised**:
//!
//! - Safety against the store's own user or root.
//! - Leases across machines whose file system does not support `flock`, or for readers that may not write.
//! - Last-use stamps after the loss of the index. Without a stamp, age counts from the creation.
//! - Equal bytes in two stores that were built from one spec.
//!
//! ## Layers
//!
//! A module uses those of earlier lines only; a test holds it.
//!
//! ```text
//! digest, imports, mapped, reason, segments, out_of_memory, sync, target
//! chunks, defect, error, record, sum
//! canon, object, publish, rows
//! graph, quarantine, ready
//! permissions
//! layout
//! lock, checksum
//! claim, records
//! bytes, find, lease, releases
//! copy, reindex
//! files, gc, index
//! listing, repair, sweep, usage, verify
//! ```

pub mod canon;
pub mod digest;
pub mod imports;
mod mapped;
pub mod out_of_memory;
pub mod record;
pub mod segments;
pub mod target;

mod bytes;
mod checksum;
mod chunks;
mod claim;
mod copy;
mod defect;
mod error;
mod files;
mod find;
mod gc;
mod graph;
mod index;
mod layout;
mod lease;
mod listing;
mod lock;
mod object;
mod permissions;
mod publish;
mod quarantine;
mod ready;
mod reason;
mod records;
mod reindex;
mod releases;
mod repair;
mod rows;
mod sum;
mod sweep;
mod sync;
mod usage;
mod verify;

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError, atomic::AtomicBool},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

pub use claim::Claim;
pub use defect::{Defect, Needs};
pub use digest::Digest;
pub use error::StoreError;
pub use find::{Filter, Found, Known};
pub use gc::{GcPlan, OldRelease, Policy, Victim};
pub use lease::Hold;
pub use listing::Dated;
pub use lock::Waiting;
pub use mapped::{Mapped, seal};
pub use permissions::{Options, judge_path};
pub use quarantine::Damaged;
pub use ready::{Checking, Unpacked};
pub use reason::Reason;
pub use releases::check_release_name;
pub use repair::Repaired;
pub use rows::{ArtifactRow, ObjectRow, ProgramRow};
pub use sweep::Collected;
pub use target::{Device, Target};
pub use usage::{GroupBy, Need, ObjectUsage};
pub use verify::Verified;

use error::At;
use index::Index;
use layout::Layout;
use lease::Lease;
use lock::{Guard, Mode};
use publish::PendingFile;

/// An open store. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    layout: Layout,
    index: Index,
    /// As it was opened; `read_only` also where it can't be written.
    options: Options,
    /// When things were used, in seconds since 1970: written once, at the end.
    uses: Mutex<BTreeMap<Digest, i64>>,
    /// The lease of this process, once it needs one.
    lease: Mutex<Option<Arc<Lease>>>,
    /// Called when a lock is not free.
    waiting: OnceLock<OnWait>,
    /// Set when the caller wants to wait no longer.
    stop: OnceLock<Arc<AtomicBool>>,
}

type OnWait = Box<dyn Fn(&Waiting) + Send + Sync>;

impl Store {
    /// Opens the store at `path`; makes it when `path` is empty or missing. Refuses a folder that holds other things.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::create_with(path, Options::default())
    }

    /// Opens the store at `path`; makes it when `path` is empty or missing.
    pub fn create_with(path: impl AsRef<Path>, options: Options) -> Result<Self, StoreError> {
        let path = path.as_ref();
        Layout::create(path, options)?;
        Self::open_with(path, options)
    }

    /// Opens the store at `path`, for reading only when it can't be written.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_with(path, Options::default())
    }

    /// Opens the store at `path` and never writes to it.
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_with(
            path,
            Options {
                read_only: true,
                ..Options::default()
            },
        )
    }

    /// Opens the store at `path`.
    pub fn open_with(path: impl AsRef<Path>, options: Options) -> Result<Self, StoreError> {
        let layout = Layout::find(path.as_ref(), options)?;
        for folder in Layout::FOLDERS {
            layout.look(&layout.root.join(folder))?;
        }
        Self::at(layout, options)
    }

    /// Opens the same store once more, with a lease of its own.
    pub fn reopened(&self) -> Result<Self, StoreError> {
        Self::open_with(self.path(), self.0.options)
    }

    fn at(layout: Layout, mut options: Options) -> Result<Self, StoreError> {
        options.read_only |= !layout.is_writable();
        if !options.read_only {
            layout.complete_folders()?;
        }
        let mut index = match options.read_only {
            false => Index::open(&layout)?,
            // Who may write the store keeps it to themselves.
            true if !Index::may_be_read(&layout) => Index::when_needed(&layout),
            true => match Index::open_read_only(&layout) {
                // What can't be read and can't be repaired is made again in memory.
                Err(error) if error.is_index() => Index::in_memory(&layout)?,
                other => other?,
            },
        };
        index.patience = options.patience;
        Ok(Self::with_index(layout, index, options))
    }

    /// Opens a store whose index or inner folders may be unusable, to look at it and to repair it.
    pub fn open_for_repair(
        path: impl AsRef<Path>,
        mut options: Options,
    ) -> Result<Self, StoreError> {
        let layout = Layout::find(path.as_ref(), options)?;
        match Self::at(layout.clone(), options) {
            Err(error) if error.is_index() || matches!(error, StoreError::Unsafe { .. }) => {
                // In memory, until its own is made again.
                let index = Index::until_rebuilt(&layout)?;
                options.read_only |= !layout.is_writable();
                Ok(Self::with_index(layout, index, options))
            }
            other => other,
        }
    }

    fn with_index(layout: Layout, index: Index, options: Options) -> Self {
        Self(Arc::new(Inner {
            layout,
            index,
            options,
            uses: Mutex::default(),
            lease: Mutex::default(),
            waiting: OnceLock::new(),
            stop: OnceLock::new(),
        }))
    }

    /// Returns the store's folder.
    pub fn path(&self) -> &Path {
        &self.0.layout.root
    }

    /// Returns how this store was opened; `read_only` also where it can't be written.
    pub fn options(&self) -> Options {
        self.0.options
    }

    /// Returns whether nothing can be added to this store.
    pub fn is_read_only(&self) -> bool {
        self.0.options.read_only
    }

    /// Has `tell` called whenever this store waits for another process. The first call counts.
    pub fn on_wait(&self, tell: impl Fn(&Waiting) + Send + Sync + 'static) {
        let _ = self.0.waiting.set(Box::new(tell));
    }

    fn tell(&self, waiting: &Waiting) {
        if let Some(tell) = self.0.waiting.get() {
            tell(waiting);
        }
    }

    /// Begins a file that will be published.
    fn pending_file(&self) -> Result<PendingFile, StoreError> {
        match self.lease()? {
            Some(lease) => PendingFile::new(lease.tmp()),
            None => self
                .writable("add to the store")
                .and_then(|()| PendingFile::new(&self.layout().tmp())),
        }
    }

    /// Waits until things may be added, and holds `ids` for as long as this store is open.
    fn adding(&self, ids: &[Digest]) -> Result<Guard, StoreError> {
        self.writable("add to the store")?;
        let lease = self.lease()?;
        let guard = self.lock(Mode::Add)?;
        if let Some(lease) = lease {
            lease.hold(ids)?;
        }
        Ok(guard)
    }

    /// Opens a file of the store for reading, unless others could have changed it.
    pub fn open_file(&self, path: &Path) -> std::io::Result<fs::File> {
        self.layout().open(path)
    }

    fn layout(&self) -> &Layout {
        &self.0.layout
    }

    fn index(&self) -> &Index {
        &self.0.index
    }

    /// Fails for a store that can't be written; `what` is to be done, as `add to the store`.
    pub fn writable(&self, what: &'static str) -> Result<(), StoreError> {
        match self.0.options.read_only {
            false => Ok(()),
            true => Err(StoreError::ReadOnly {
                what,
                path: self.path().to_owned(),
            }),
        }
    }

    /// Moves a damaged file into `quarantine/`, under a name that was not used before.
    fn set_aside(&self, path: &Path) -> Result<(), StoreError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let to = |n: u32| -> PathBuf {
            self.path()
                .join("quarantine")
                .join(format!("{name}.{}.{n}", now()))
        };
        let free = (0..)
            .map(to)
            .find(|to| fs::symlink_metadata(to).is_err())
            .unwrap_or_else(|| to(0));
        match fs::rename(path, free) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            other => other.at("set aside", path),
        }
    }

    /// Remembers that `id` was used now.
    fn used(&self, id: &Digest) {
        if !self.0.options.read_only {
            let mut uses = self.0.uses.lock().unwrap_or_else(PoisonError::into_inner);
            uses.insert(*id, now());
        }
    }

    /// Writes the last-use stamps. Happens by itself when the last clone of the store goes.
    pub fn save_uses(&self) -> Result<(), StoreError> {
        self.0.save_uses(None)
    }
}

impl Inner {
    fn save_uses(&self, patience: Option<Duration>) -> Result<(), StoreError> {
        let uses = std::mem::take(&mut *self.uses.lock().unwrap_or_else(PoisonError::into_inner));
        if uses.is_empty() {
            return Ok(());
        }
        self.index.write_within(patience, |tx| {
            for (id, at) in &uses {
                rows::insert_use(tx, id, *at)?;
            }
            Ok(())
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A stamp that can't be kept costs a later rebuild at most: less than a wait would.
        let _ = self.save_uses(Some(Duration::from_secs(1)));
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.path()).finish()
    }
}

/// Returns the time in seconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs() as i64)
}

const _: () = {
    const fn shared_between_threads<T: Send + Sync + Clone>() {}
    shared_between_threads::<Store>();
    shared_between_threads::<crate::Mapped>();
};

#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, reason = "a test that fails panics")]
pub mod testing;
