//! The private folder of a build or an export, and the removal of folders of killed processes.
//!
//! ```text
//! $TMPDIR/
//! └── precast-build-a1B2c3/     mode 0700
//!     ├── owner                 locked while the build lives; has the machine and its boot ID
//!     └── worker-1/ …
//! ```
//!
//! A build removes its folder at its end. A killed build can't: the next build, `precast gc` and `precast verify
//! --repair` remove every folder of this user with an unlocked `owner`. An export writes into such a folder next to its
//! destination, and the next export there removes it. Locks of another machine (or of an earlier boot) are not visible:
//! such a folder is removed a week after its last change. A folder without `owner` is new, or of an older version: it
//! is removed after a day.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use tempfile::TempDir;

use super::BuildError;

/// Prefix of the folders of builds.
pub const BUILD: &str = "precast-build-";
/// Prefix of the folders of exports.
pub const EXPORT: &str = ".precast-export-";
const OWNER: &str = "owner";
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A private folder, removed when this is dropped.
pub struct Scratch {
    folder: TempDir,
    _owner: File,
}

impl Scratch {
    /// Creates a folder in `parent` whose name begins with `prefix`: [`BUILD`] or [`EXPORT`].
    pub fn new(parent: &Path, prefix: &str) -> Result<Self, BuildError> {
        let make = || -> io::Result<Self> {
            let folder = tempfile::Builder::new()
                .prefix(prefix)
                .permissions(Permissions::from_mode(0o700))
                .tempdir_in(parent)?;
            // Locked before it has its final name: other processes never find it unlocked.
            let unnamed = folder.path().join("owner.new");
            let mut owner = File::create_new(&unnamed)?;
            owner.lock()?;
            owner.write_all(boot().as_bytes())?;
            fs::rename(&unnamed, folder.path().join(OWNER))?;
            Ok(Self {
                folder,
                _owner: owner,
            })
        };
        make().map_err(|source| BuildError::Scratch {
            path: parent.to_owned(),
            source,
        })
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Renames the folder to its final name, without the file `owner`. Replaces an empty folder.
    pub fn publish(self, to: &Path) -> io::Result<()> {
        fs::remove_file(self.path().join(OWNER))?;
        fs::rename(self.path(), to)?;
        // The folder has another name: there is nothing to remove.
        let _ = self.folder.keep();
        Ok(())
    }
}

/// Removes the folders in `parent` of killed processes whose names begin with `prefix`, and returns their paths. With
/// `dry_run`, removes nothing. Skips folders that can't be read or removed.
pub fn sweep(parent: &Path, prefix: &str, dry_run: bool) -> Vec<PathBuf> {
    let mut gone = Vec::new();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        let named = entry.file_name().to_string_lossy().starts_with(prefix);
        if !named || !abandoned(&path).unwrap_or(false) {
            continue;
        }
        if dry_run || fs::remove_dir_all(&path).is_ok() {
            gone.push(path);
        }
    }
    gone.sort();
    gone
}

/// Returns whether no live build has this folder.
fn abandoned(folder: &Path) -> io::Result<bool> {
    let meta = fs::symlink_metadata(folder)?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() {
        return Ok(false);
    }
    let age = meta.modified()?.elapsed().unwrap_or_default();
    let mut options = File::options();
    options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let owner = match options.open(folder.join(OWNER)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(age > DAY),
        other => other?,
    };
    let mut place = String::new();
    (&owner).take(1024).read_to_string(&mut place)?;
    if place != boot() {
        return Ok(age > 7 * DAY);
    }
    Ok(owner.try_lock().is_ok())
}

/// Returns the ID of this boot of this machine.
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn age(path: &Path, age: Duration) {
        let then = SystemTime::now() - age;
        File::open(path).unwrap().set_modified(then).unwrap();
    }

    #[test]
    fn what_no_live_build_owns_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let live = Scratch::new(parent.path(), BUILD).unwrap();
        let mode = fs::metadata(live.path()).unwrap().mode() & 0o777;
        assert_eq!(mode, 0o700);
        let left = |name: &str, owner: Option<&str>, days: u32| {
            let folder = parent.path().join(name);
            fs::create_dir_all(folder.join("worker-1")).unwrap();
            if let Some(owner) = owner {
                fs::write(folder.join(OWNER), owner).unwrap();
            }
            age(&folder, days * DAY);
            folder
        };
        let killed = left("precast-build-1", Some(&boot()), 0);
        left("precast-build-2", Some("another boot"), 3);
        let elsewhere = left("precast-build-3", Some("another boot"), 8);
        left("precast-build-4", None, 0);
        let old = left("precast-build-5", None, 2);
        left("another", Some(&boot()), 99);
        std::os::unix::fs::symlink("another", parent.path().join("precast-build-6")).unwrap();

        let all = [killed, elsewhere, old];
        assert_eq!(sweep(parent.path(), BUILD, true), all);
        assert_eq!(sweep(parent.path(), BUILD, false), all);
        assert!(sweep(parent.path(), BUILD, false).is_empty());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 5);
        drop(live);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 4);
    }
}
