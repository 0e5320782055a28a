//! The ground a store stands on: who could change it behind our back.
//!
//! What is in a store is executed. So a store is refused when its folder, one of its inner folders or a folder above can
//! be written by others, belongs to a stranger, or is a symbolic link that leads elsewhere. Trusted are root, this user,
//! and the owner of the store (a service may read what a deploy user built). A sticky folder such as `/tmp` is fine:
//! nobody can replace what is not theirs in it. A group that shares a store says so ([`Options::shared`]).

use std::{
    fs::{self, Metadata},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{
    error::{At, StoreError},
    ready::Unpacked,
};

/// How to open a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Never write, not even stamps.
    pub read_only: bool,
    /// The store belongs to a group whose members trust each other: what the group can write is accepted.
    pub shared: bool,
    /// What is done with unpacked files before they are used.
    pub unpacked: Unpacked,
}

/// The user that stands for every user a container does not know; nobody can act as it.
const UNMAPPED: u32 = 65534;

const STICKY: u32 = 0o1000;

/// Checks the folder of a store and all above it.
pub(crate) fn check(root: &Path, options: Options) -> Result<(), StoreError> {
    let meta = fs::symlink_metadata(root).at("look at", root)?;
    if meta.is_symlink() {
        let to = fs::read_link(root).unwrap_or_default();
        return Err(refuse(
            root,
            format!("it is a symbolic link to `{}`", to.display()),
        ));
    }
    let judge = Judge {
        me: rustix::process::geteuid().as_raw(),
        owner: meta.uid(),
        shared: options.shared,
    };
    let absolute = std::path::absolute(root).at("find", root)?;
    for link in absolute.ancestors() {
        let meta = fs::symlink_metadata(link).at("look at", link)?;
        if meta.is_symlink() && !judge.trusts(meta.uid()) {
            return Err(refuse(
                link,
                format!("the link belongs to user {}", meta.uid()),
            ));
        }
    }
    for folder in fs::canonicalize(root).at("find", root)?.ancestors() {
        judge.folder(folder, &fs::symlink_metadata(folder).at("look at", folder)?)?;
    }
    Ok(())
}

/// Checks one folder inside of a store.
pub(crate) fn inner(root: &Path, name: &str, options: Options) -> Result<(), StoreError> {
    let owner = fs::metadata(root).at("look at", root)?.uid();
    let me = rustix::process::geteuid().as_raw();
    let path = root.join(name);
    let Ok(meta) = fs::symlink_metadata(&path) else {
        return Ok(());
    };
    if meta.is_symlink() {
        let to = fs::read_link(&path).unwrap_or_default();
        return Err(refuse(
            &path,
            format!("it is a symbolic link to `{}`", to.display()),
        ));
    }
    Judge {
        me,
        owner,
        shared: options.shared,
    }
    .folder(&path, &meta)
}

struct Judge {
    me: u32,
    owner: u32,
    shared: bool,
}

impl Judge {
    fn trusts(&self, uid: u32) -> bool {
        [0, self.me, self.owner, UNMAPPED].contains(&uid)
    }

    fn folder(&self, path: &Path, meta: &Metadata) -> Result<(), StoreError> {
        let mode = meta.mode();
        if !self.trusts(meta.uid()) {
            return Err(refuse(path, format!("it belongs to user {}", meta.uid())));
        }
        if mode & STICKY != 0 {
            return Ok(());
        }
        if mode & 0o002 != 0 {
            return Err(refuse(path, "everybody can write it".to_owned()));
        }
        // Many systems give each user a group of their own, with the same number.
        let own_group = meta.gid() == meta.uid();
        if mode & 0o020 != 0 && !self.shared && !own_group {
            return Err(refuse(path, format!("group {} can write it", meta.gid())));
        }
        Ok(())
    }
}

fn refuse(path: &Path, why: String) -> StoreError {
    StoreError::Unsafe {
        path: PathBuf::from(path),
        why,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::Permissions, os::unix::fs::PermissionsExt};

    use super::{super::testing, *};
    use crate::Store;

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn refused(path: &Path) -> String {
        let told = Store::open(path).unwrap_err();
        assert!(matches!(told, StoreError::Unsafe { .. }), "{told}");
        told.to_string()
    }

    #[test]
    fn what_others_can_write_is_refused() {
        let (dir, store) = testing::store();
        let path = store.path().to_owned();
        mode(&path, 0o777);
        assert!(refused(&path).contains("everybody can write it"));
        mode(&path, 0o755);
        for folder in ["objects", "ready", "locks"] {
            mode(&path.join(folder), 0o777);
            assert!(refused(&path).contains(folder));
            mode(&path.join(folder), 0o755);
        }
        mode(dir.path(), 0o777);
        refused(&path);
        mode(dir.path(), 0o1777);
        Store::open(&path).unwrap();
    }

    #[test]
    fn a_group_that_shares_a_store_says_so() {
        let (_dir, store) = testing::store();
        // A group whose number is not the user's.
        let gid = fs::metadata(store.path()).unwrap().uid() + 1;
        if std::os::unix::fs::chown(store.path(), None, Some(gid)).is_err() {
            eprintln!("skipped: this user can't give a folder to another group");
            return;
        }
        mode(store.path(), 0o775);
        assert!(refused(store.path()).contains("group"));
        let shared = Options {
            shared: true,
            ..Options::default()
        };
        Store::open_with(store.path(), shared).unwrap();
        mode(store.path(), 0o777);
        assert!(Store::open_with(store.path(), shared).is_err());
    }

    #[test]
    fn a_link_is_refused_and_a_trusted_link_above_is_followed() {
        let (dir, store) = testing::store();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(store.path(), &link).unwrap();
        assert!(refused(&link).contains("symbolic link"));
        let above = dir.path().join("above");
        std::os::unix::fs::symlink(dir.path(), &above).unwrap();
        Store::open(above.join("store")).unwrap();
        let objects = store.path().join("objects");
        fs::rename(&objects, dir.path().join("away")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("away"), &objects).unwrap();
        assert!(refused(store.path()).contains("symbolic link"));
    }

    #[test]
    fn a_store_below_a_strangers_folder_is_refused() {
        let (dir, store) = testing::store();
        if std::os::unix::fs::chown(dir.path(), Some(12345), None).is_err() {
            eprintln!("skipped: this user can't give a folder to another user");
            return;
        }
        assert!(refused(store.path()).contains("user 12345"));
        // The store of a deploy user in the folder of that user.
        std::os::unix::fs::chown(store.path(), Some(12345), None).unwrap();
        Store::open(store.path()).unwrap();
    }
}
