//! A folder that runs releases on a machine that has neither Python nor torch.
//!
//! ```text
//! DIR/
//! ├── bin/precast            this program
//! ├── store/                 only the releases
//! ├── torch/version.py       the runtime reads the version of libtorch there
//! ├── torch/lib/*.so         the libraries that `precast deps` lists
//! └── nvidia/*/lib/*.so.*    in the layout of the wheels: their search paths are relative
//! ```
//!
//! The folder is written under a temporary name in the same parent, checked, and renamed: it appears whole or not at
//! all. The next export into that parent removes the folder of a killed one. The check searches for the libraries
//! again, in the copy only.

use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use precast_builder::{BuildError, scratch};
use precast_store::{Digest, Store, StoreError, record::Release};
use serde::Serialize;

use crate::libraries::{Deps, Library, LibraryError};

/// The reason why a folder is not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The operating system refused a call.
    #[error("{action}")]
    Io {
        /// As ``can't copy `a` to `b` ``.
        action: String,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A library would not find another one in the folder.
    #[error("`{}` is not found by a relative path", .0.path.display())]
    NotRelative(Library),
    /// The caller cancelled it, or its temporary folder can't be made.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A store can't be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The copies of the libraries can't be read.
    #[error(transparent)]
    Library(#[from] LibraryError),
}

/// One file that is copied.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Copied {
    /// Relative to the folder.
    pub path: PathBuf,
    /// Its path on this machine.
    pub from: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
}

/// The content of an exported folder.
pub struct Export<'a> {
    store: &'a Store,
    releases: &'a [Release],
    deps: &'a Deps,
    /// Objects of the releases.
    pub objects: BTreeSet<Digest>,
    /// Their bytes on disk.
    pub object_bytes: u64,
    /// Files besides the store.
    pub files: Vec<Copied>,
}

impl<'a> Export<'a> {
    /// Lists the content of a folder for `releases`. `program` is the file of this program.
    pub fn new(
        store: &'a Store,
        releases: &'a [Release],
        deps: &'a Deps,
        program: PathBuf,
    ) -> Result<Self, ExportError> {
        let mut objects = BTreeSet::new();
        for release in releases {
            objects.extend(store.releases().manifest(release)?.objects());
        }
        let mut object_bytes = 0;
        for object in &objects {
            object_bytes += store.objects().row(object)?.map_or(0, |row| row.stored);
        }
        let mut files = vec![(PathBuf::from("bin/precast"), program)];
        let version = deps.folder.parent().map(|torch| torch.join("version.py"));
        let version = version.filter(|file| file.is_file());
        files.extend(version.map(|file| (PathBuf::from("torch/version.py"), file)));
        let library = |library: &Library| (deps.place(library), library.path.clone());
        files.extend(deps.needs.files.iter().map(library));
        let copied = |(path, from): (PathBuf, PathBuf)| {
            let meta = fs::metadata(&from);
            let bytes = done(meta, || format!("can't read `{}`", from.display()))?.len();
            Ok(Copied { path, from, bytes })
        };
        let files = files
            .into_iter()
            .map(copied)
            .collect::<Result<_, ExportError>>()?;
        Ok(Self {
            store,
            releases,
            deps,
            objects,
            object_bytes,
            files,
        })
    }

    /// Returns the bytes of all files and objects. Records and the store's index come on top.
    pub fn bytes(&self) -> u64 {
        self.object_bytes + self.files.iter().map(|file| file.bytes).sum::<u64>()
    }

    /// Removes the folders of killed exports next to `folder`, and returns their paths.
    pub fn sweep(folder: &Path) -> Vec<PathBuf> {
        let parent = folder.parent().unwrap_or(Path::new("/"));
        scratch::sweep(parent, scratch::EXPORT, false)
    }

    /// Writes the folder, whose path is absolute. `cancel` ends it between two files.
    pub fn write(&self, folder: &Path, cancel: &AtomicBool) -> Result<(), ExportError> {
        let parent = folder.parent().unwrap_or(Path::new("/"));
        done(fs::create_dir_all(parent), || {
            format!("can't make `{}`", parent.display())
        })?;
        // Removed again where anything fails.
        let temporary = scratch::Scratch::new(parent, scratch::EXPORT)?;
        let root = temporary.path();
        self.write_store(&root.join("store"), cancel)?;
        for file in &self.files {
            cancelled(cancel)?;
            copy(&file.from, &root.join(&file.path))?;
        }
        if let Some(lost) = self.deps.lost_in(root)? {
            return Err(ExportError::NotRelative(lost.clone()));
        }
        let mode = fs::set_permissions(root, Permissions::from_mode(0o755));
        done(mode, || {
            format!("can't set the mode of `{}`", root.display())
        })?;
        // An empty folder is replaced. A folder with new files is not.
        done(temporary.publish(folder), || {
            format!("can't make `{}`", folder.display())
        })
    }

    fn write_store(&self, path: &Path, cancel: &AtomicBool) -> Result<(), ExportError> {
        let store = Store::create(path)?;
        for object in &self.objects {
            cancelled(cancel)?;
            store.objects().copy(self.store.objects(), object)?;
        }
        for release in self.releases {
            cancelled(cancel)?;
            store.releases().copy(self.store.releases(), release)?;
        }
        Ok(())
    }
}

fn cancelled(cancel: &AtomicBool) -> Result<(), ExportError> {
    if cancel.load(Ordering::Relaxed) {
        return Err(BuildError::Interrupted.into());
    }
    Ok(())
}

/// Copies a file with its mode, and makes the copy durable.
fn copy(from: &Path, to: &Path) -> Result<(), ExportError> {
    let parent = to.parent().unwrap_or(Path::new("/"));
    let copied = fs::create_dir_all(parent)
        .and_then(|()| fs::copy(from, to))
        .and_then(|_| File::open(to)?.sync_all());
    done(copied, || {
        format!("can't copy `{}` to `{}`", from.display(), to.display())
    })
}

fn done<T>(result: io::Result<T>, action: impl FnOnce() -> String) -> Result<T, ExportError> {
    result.map_err(|source| ExportError::Io {
        action: action(),
        source,
    })
}
