//! Publishing a file: it appears whole and durable, and never replaces another file.
//!
//! temp file in the same file system → write → mode 0444 → fsync → rename that refuses to replace → fsync of the
//! folder. A crash before the rename leaves a temp file; a crash after it leaves the whole file.
//!
//! A published file has a modification time of whole seconds. A later write sets a time with a fraction, so one `stat`
//! detects a changed file ([`as_published`]), and a build checks hundreds of files in milliseconds. A copy of a store
//! has other times. Such a file is read and checked once, and gets whole seconds again ([`settle_time`]).
//!
//! Times are in `benches/results/store-cpu.json` (`make bench-store`). Compression with zstd dominates for large files.
//! The syncs dominate for small ones, above all the commit of the row (20 of 32 ms for 3 KB on the disk of that run).

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use tempfile::{NamedTempFile, TempPath};

use super::error::{At, StoreError};

/// A file that is being written and not visible yet.
pub(crate) struct PendingFile {
    file: File,
    path: TempPath,
}

impl PendingFile {
    /// Creates a file in `tmp`.
    pub fn new(tmp: &Path) -> Result<Self, StoreError> {
        let (file, path) = NamedTempFile::new_in(tmp)
            .at("write a file in", tmp)?
            .into_parts();
        Ok(Self { file, path })
    }

    /// Returns the file to write to.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Returns the path of the temporary file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the bytes durable, then visible at `path`. Returns false, and changes nothing, if `path` exists.
    pub fn publish(self, path: &Path) -> Result<bool, StoreError> {
        self.settle()?;
        let folder = make_folder(path)?;
        match rename_new(&self.path, path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
            Err(e) => return Err(e).at("publish", path),
        }
        // The name is gone from `tmp`: there is nothing left to remove.
        let _ = self.path.keep();
        sync_folder(folder)?;
        Ok(true)
    }

    /// Makes a file of a cache visible at `path`, unless that exists. After a crash it may have any content.
    pub fn publish_unsynced(self, path: &Path) -> Result<(), StoreError> {
        folder_unsynced(above(path))?;
        let mode = Permissions::from_mode(0o444);
        (self.file.set_permissions(mode)).at("set the mode of", &self.path)?;
        match rename_new(&self.path, path) {
            Ok(()) => {
                let _ = self.path.keep();
                Ok(())
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(e).at("publish", path),
        }
    }

    /// Makes the bytes durable, then visible at `path`, and replaces an existing file. For mutable records only.
    pub fn replace(self, path: &Path) -> Result<(), StoreError> {
        self.settle()?;
        let folder = make_folder(path)?;
        fs::rename(&self.path, path).at("publish", path)?;
        let _ = self.path.keep();
        sync_folder(folder)
    }

    fn settle(&self) -> Result<(), StoreError> {
        let mode = Permissions::from_mode(0o444);
        self.file
            .set_permissions(mode)
            .at("set the mode of", &self.path)?;
        settle_time(&self.file);
        self.file.sync_all().at("write", &self.path)
    }
}

/// Returns whether a file exists and has not changed since its publication. Also false for a sound file of a copied
/// store.
pub(crate) fn as_published(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file() && meta.mtime_nsec() == 0)
}

/// Rounds the modification time of a sound file down to a second. Ignores errors: the next build then reads the file
/// again.
pub(crate) fn settle_time(file: &File) {
    let Ok(meta) = file.metadata() else { return };
    let seconds = Duration::from_secs(meta.mtime().try_into().unwrap_or(0));
    let _ = file.set_modified(UNIX_EPOCH + seconds);
}

/// Publishes `bytes` as `pending` at `path`. Returns false if `path` exists.
pub(crate) fn bytes(
    mut pending: PendingFile,
    path: &Path,
    bytes: &[u8],
) -> Result<bool, StoreError> {
    let wrote = pending.file.write_all(bytes);
    wrote.at("write", &pending.path)?;
    pending.publish(path)
}

/// Makes the names in a folder durable, after one was added or removed.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), StoreError> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .at("write the folder", folder)
}

/// Creates the parent folder of `path`, and returns it.
fn make_folder(path: &Path) -> Result<&Path, StoreError> {
    folder(above(path))?;
    Ok(above(path))
}

/// Creates a folder durably, if it is missing. Its write permissions are those of its parent, whatever the umask allows.
pub(crate) fn folder(path: &Path) -> Result<(), StoreError> {
    match new_folder(path)? {
        true => sync_folder(above(path)),
        false => Ok(()),
    }
}

/// Creates a folder as [`folder`] does, with those above it. After a crash it may be missing.
pub(crate) fn folder_unsynced(path: &Path) -> Result<(), StoreError> {
    if !above(path).exists() {
        folder_unsynced(above(path))?;
    }
    new_folder(path).map(drop)
}

/// Creates a folder. Returns false if it is there.
fn new_folder(path: &Path) -> Result<bool, StoreError> {
    let mode = fs::metadata(above(path)).map_or(0o755, |meta| meta.mode() & 0o775);
    match fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => plain_folder(path).map(|()| false),
        Err(e) => Err(e).at("make the folder", path),
    }
}

fn above(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("."))
}

/// Refuses a symbolic link in the place of a folder of the store: writes and removals would happen elsewhere.
pub(crate) fn plain_folder(path: &Path) -> Result<(), StoreError> {
    if fs::symlink_metadata(path).at("look at", path)?.is_dir() {
        Ok(())
    } else {
        Err(StoreError::Unsafe {
            path: path.to_owned(),
            why: "it is not a plain folder, or a symbolic link to one".to_owned(),
        })
    }
}

/// Renames without replacing. Uses a hard link on a file system without such a rename.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        Err(e) => Err(e.into()),
    }
}

/// Opens a file for reading. Refuses a symbolic link, a folder or a device.
pub(crate) fn open_plain(path: &Path) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is not a plain file"))
    }
}

/// Removes a file or a folder. Its owner may be removing it as well.
pub(crate) fn remove_all(path: &Path) -> Result<(), StoreError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).at("remove", path),
        _ => Ok(()),
    }
}
