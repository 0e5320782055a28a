//! The store of built artifacts: objects by digest, records by key, and an index over both.
//!
//! The store handles bytes and records, not models: nothing here compiles or loads. The files are authoritative. The
//! index makes lookups fast and can be deleted at any time.
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
//! ├── cache/                    digests of sources, prepacked weights, and other results that are computed again if missing
//! ├── tmp/                      files that are being written
//! ├── locks/  leases/           locks and holds of live processes
//! └── quarantine/               damaged files, which are never used; gc removes the old ones
//! ```
//!
//! A file becomes visible in one step (`publish`): temp file → fsync → rename that never replaces → fsync of the
//! folder; then its row. A file is published after everything it refers to: objects, artifacts, programs, release.
//!
//! A [`Store`] hands out its owners. Each has the one above it in this table as a field:
//!
//! | owner | has | modules |
//! |---|---|---|
//! | [`Leases`] | the IDs that live processes hold; one compile per key | `leases`, `claim`; locks: `lock` |
//! | [`Objects`] | bytes by digest, and their unpacked files | `objects`, `object` (the format), `ready`, `chunks` |
//! | [`Prepacked`] | prepacked weights, which runtimes compute | `prepacked` |
//! | [`Records`] | artifacts, programs and failures by key | `records`, `find`, `checksum` (the format), `uses` |
//! | [`Releases`] | releases by number, their copies, and what travels between stores | `releases`, `manifest`, `listing`, `mirror` |
//! | [`Collector`] | garbage collection | `gc` (the plan), `sweep` (the deletion), `quarantine` |
//! | [`Audit`] | checks and repairs of a whole store | `verify`, `files`, `defect`, `repair` |
//!
//! What moves between stores of different machines is put into words in [`transfer`].
//!
//! The first one has the paths, the index and the locks (`base`). Protection against other users is in `permissions`;
//! records, digests and targets are in [`record`], [`digest`] and [`target`], their encoding in keys in [`canon`].
//!
//! A missing folder counts as empty: a copy of a store may lack it, or all of `ready/`. The next process that may write
//! creates it.
//!
//! Three things have a version: the layout (in `precast-store.json`), the index (`user_version`) and each record
//! (`schema`). A newer version is refused, and its files stay unchanged. gc refuses a store with a newer record,
//! because the references of that record are unknown. An older index is rebuilt from the files.
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
//! A module uses only modules of earlier lines. A test checks this.
//!
//! ```text
//! digest, elf, mapped, out_of_memory, reason, sync, target, tensors, time
//! chunks, defect, error, record
//! canon, pages, publish, rows
//! permissions
//! layout
//! checksum, lock, manifest, object
//! parts, reindex
//! index
//! base
//! leases, uses
//! claim, ready
//! objects, prepacked
//! graph
//! records
//! find
//! releases
//! listing, quarantine
//! gc, mirror, transfer
//! files, sweep, usage
//! verify
//! repair
//! ```

pub mod canon;
pub mod digest;
pub mod elf;
mod mapped;
pub mod out_of_memory;
pub mod record;
pub mod target;
pub mod transfer;

mod base;
mod checksum;
mod chunks;
mod claim;
mod defect;
mod error;
mod files;
mod find;
mod gc;
mod graph;
mod index;
mod layout;
mod leases;
mod listing;
mod lock;
mod manifest;
mod mirror;
mod object;
mod objects;
mod pages;
mod parts;
mod permissions;
mod prepacked;
mod publish;
mod quarantine;
mod ready;
mod reason;
mod records;
mod reindex;
mod releases;
mod repair;
mod rows;
mod sweep;
mod sync;
mod tensors;
mod time;
mod usage;
mod uses;
mod verify;

use std::{
    fmt, fs,
    path::Path,
    sync::{Arc, atomic::AtomicBool},
};

pub use claim::Claim;
pub use defect::{Defect, Needs};
pub use digest::Digest;
pub use error::StoreError;
pub use find::{Dated, Filter, Found, Known};
pub use gc::{Collector, GcPlan, OldRelease, Policy, Victim};
pub use layout::marker;
pub use leases::{Hold, Leases};
pub use listing::{
    ListedPart, Listing, PartKind, References, is_foreign_number, listing_path, release_at,
    release_path,
};
pub use lock::Waiting;
pub use manifest::{Manifest, Part};
pub use mapped::{Mapped, seal};
pub use objects::Objects;
pub use parts::CheckedParts;
pub use permissions::{Options, Unpacked, check_path};
pub use prepacked::Prepacked;
pub use quarantine::Damaged;
pub use ready::Checking;
pub use reason::Reason;
pub use records::Records;
pub use releases::{Releases, check_release_name};
pub use repair::Repaired;
pub use rows::{ArtifactRow, ObjectRow, ProgramRow};
pub use sweep::Collected;
pub use target::{Device, Target};
pub use tensors::TensorLayout;
pub use usage::{GroupBy, ObjectUsage};
pub use verify::{Audit, Verified};

use base::Base;
use index::Index;
use layout::StoreLayout;
use lock::Locks;

/// An open store. Cloning is cheap and shares everything.
#[derive(Clone)]
pub struct Store(Arc<Audit>);

impl Store {
    /// Opens the store at `path`. Creates it if the folder is empty or missing. Refuses a folder with other files.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::create_with(path, Options::default())
    }

    /// Like [`Self::create`], with options.
    pub fn create_with(path: impl AsRef<Path>, options: Options) -> Result<Self, StoreError> {
        let path = path.as_ref();
        StoreLayout::create(path, options)?;
        Self::open_with(path, options)
    }

    /// Opens the store at `path`, read-only if it can't be written.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_with(path, Options::default())
    }

    /// Opens the store at `path` and never writes to it.
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let options = Options {
            read_only: true,
            ..Options::default()
        };
        Self::open_with(path, options)
    }

    /// Like [`Self::open`], with options.
    pub fn open_with(path: impl AsRef<Path>, options: Options) -> Result<Self, StoreError> {
        let layout = StoreLayout::find(path.as_ref(), options)?;
        for folder in StoreLayout::FOLDERS {
            layout.look(&layout.root.join(folder))?;
        }
        Self::at(layout, options)
    }

    fn at(layout: StoreLayout, mut options: Options) -> Result<Self, StoreError> {
        options.read_only |= !layout.is_writable();
        if !options.read_only {
            layout.complete_folders()?;
        }
        let locks = Arc::new(Locks::new(&layout, options));
        let index = if !options.read_only {
            Index::open(&locks)?
        } else if !Index::may_be_read(&layout) {
            Index::in_memory(&locks)
        } else {
            match Index::open_read_only(&locks) {
                // Whatever is in the way of the index, the files can be read.
                Err(error) if error.is_index() || matches!(error, StoreError::Index { .. }) => {
                    Index::in_memory(&locks)
                }
                other => other?,
            }
        };
        Ok(Self::new(layout, index, options, locks))
    }

    /// Opens a store for checks and repairs, even with an unusable index or unsafe inner folders.
    pub fn open_for_repair(
        path: impl AsRef<Path>,
        mut options: Options,
    ) -> Result<Self, StoreError> {
        let layout = StoreLayout::find(path.as_ref(), options)?;
        match Self::at(layout.clone(), options) {
            Err(error) if error.is_index() || matches!(error, StoreError::Unsafe { .. }) => {
                options.read_only |= !layout.is_writable();
                let locks = Arc::new(Locks::new(&layout, options));
                let index = Index::until_rebuilt(&locks);
                Ok(Self::new(layout, index, options, locks))
            }
            other => other,
        }
    }

    /// Opens the store at `path` for reading, with an index in memory that is built from the files. Does not use the
    /// store's own index. Leaves out unreadable files; [`Audit::damaged`] names them.
    pub fn open_without_index(
        path: impl AsRef<Path>,
        mut options: Options,
    ) -> Result<Self, StoreError> {
        let layout = StoreLayout::find(path.as_ref(), options)?;
        options.read_only = true;
        let locks = Arc::new(Locks::new(&layout, options));
        let index = Index::in_memory(&locks);
        Ok(Self::new(layout, index, options, locks))
    }

    fn new(layout: StoreLayout, index: Index, options: Options, locks: Arc<Locks>) -> Self {
        let leases = Leases::new(Base {
            layout,
            index,
            options,
            locks,
        });
        let records = Records::new(Objects::new(leases));
        let releases = Releases { records };
        let collector = Collector { releases };
        Self(Arc::new(Audit { collector }))
    }

    /// Returns the checks and repairs of the whole store.
    pub fn audit(&self) -> &Audit {
        &self.0
    }

    /// Returns the garbage collector.
    pub fn collector(&self) -> &Collector {
        &self.0.collector
    }

    /// Returns the releases of all models.
    pub fn releases(&self) -> &Releases {
        &self.collector().releases
    }

    /// Returns the records of artifacts, programs and failures.
    pub fn records(&self) -> &Records {
        &self.releases().records
    }

    /// Returns the objects: bytes by their digest.
    pub fn objects(&self) -> &Objects {
        &self.records().objects
    }

    /// Returns the prepacked weights, which runtimes computed from weight sets.
    pub fn prepacked(&self) -> Prepacked<'_> {
        let leases = self.leases();
        Prepacked { leases }
    }

    /// Returns the leases, which protect things from gc, and the claims on keys.
    pub fn leases(&self) -> &Leases {
        self.objects().leases()
    }

    fn base(&self) -> &Base {
        &self.leases().base
    }

    /// Returns the store's folder.
    pub fn path(&self) -> &Path {
        self.base().path()
    }

    /// Returns the options of this store. `read_only` is also set if the store can't be written.
    pub fn options(&self) -> Options {
        self.base().options
    }

    /// Fails for a read-only store. `what` names the change, as `add to the store`.
    pub fn writable(&self, what: &'static str) -> Result<(), StoreError> {
        self.base().writable(what)
    }

    /// Calls `tell` whenever this store waits for another process. Only the first call of this method has an effect.
    pub fn on_wait(&self, tell: impl Fn(&Waiting) + Send + Sync + 'static) {
        self.base().locks.on_wait(tell);
    }

    /// Ends every wait for another process with an error once the flag is set. Only the first call of this method has
    /// an effect.
    pub fn stop_waiting_when(&self, stop: Arc<AtomicBool>) {
        self.base().locks.stop_waiting_when(stop);
    }

    /// Opens a file of the store for reading. Refuses a file that other users could have changed.
    pub fn open_file(&self, path: &Path) -> std::io::Result<fs::File> {
        self.base().layout.open(path)
    }

    #[cfg(test)]
    fn layout(&self) -> &StoreLayout {
        &self.base().layout
    }

    #[cfg(test)]
    fn index(&self) -> &Index {
        &self.base().index
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Store").field(&self.path()).finish()
    }
}

const _: () = {
    const fn shared_between_threads<T: Send + Sync + Clone>() {}
    shared_between_threads::<Store>();
    shared_between_threads::<crate::Mapped>();
};

#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, reason = "a test that fails panics")]
pub mod testing;
