//! Permissions: which users could change a store, or place one where precast looks for it.
//!
//! The content of a store is executed. So every folder between `/` and a file of the store is checked, from the top
//! down: the store's folder, its parents and its folders when the store is opened; the folders of a path, and then the
//! open file, when a file is read. Nothing in the store may be a symbolic link.
//!
//! | | folders above | the store's own folders and files |
//! |---|---|---|
//! | owner | root, this user, the trusted owner | the same |
//! | everybody may write | refused, unless sticky as `/tmp` is | refused |
//! | a group may write | refused, unless it is the owner's own, or sticky | refused, unless it is the owner's own or the store is [`Options::shared`] with it |
//!
//! In a sticky folder no user can replace another user's files, so a sticky parent is accepted. A sticky folder of the
//! store is refused: any user could add a release there.
//!
//! A store of another user (neither root nor this one) is refused until it is listed as trusted ([`Options::trusted`];
//! the command reads a list of the user's own). Without this rule, a command would execute the content of any folder
//! called `artifacts` in the working folder. The rule holds for root too.
//!
//! A group that shares a store trusts all of its members: files of any member are accepted.
//!
//! [`check_path`] has the same rules for other files that the command executes: a Python and its libtorch.
//!
//! Access control lists are not read. The mode shows the maximum that they grant to a group or a user.

use std::{
    ffi::OsString,
    fs::{self, File, Metadata},
    io,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::fs::{CWD, Mode, OFlags, openat};

use super::error::{At, StoreError};

/// The check of a file under `ready/` before it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unpacked {
    /// It is mapped, and hashed once by each process that maps it.
    #[default]
    Check,
    /// It is mapped without a hash, if it has a valid footer. A start costs nothing, but a byte that changed on the
    /// disk gives a wrong answer.
    Trust,
    /// It is hashed and copied to memory of this process. Later changes of the file have no effect. Processes share
    /// nothing.
    Copy,
}

/// The options of an open store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Never write, not even stamps.
    pub read_only: bool,
    /// The store belongs to a group whose members trust each other: files that the group can write are accepted.
    pub shared: bool,
    /// The store may belong to another user. Everything that it contains is then trusted.
    pub trusted: bool,
    /// The check of unpacked files before they are used.
    pub unpacked: Unpacked,
    /// Maximum bytes of prepacked weights that are kept. The default is 64 GiB; 0 keeps none.
    pub prepacked: Option<u64>,
    /// Maximum wait for a lock of another process. The default is a minute for short operations, such as taking a lease
    /// and writing the index, and ten minutes for long ones.
    pub patience: Option<Duration>,
}

/// The user ID of every user that a container does not know.
const UNMAPPED: u32 = 65534;

const STICKY: u32 = 0o1000;

/// Maximum symbolic links in a path, as in the kernel.
const LINKS: u32 = 40;

/// The accepted owners and the accepted group of one store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trust {
    users: [u32; 3],
    /// The group that shares the store.
    group: Option<u32>,
}

/// The reason why something is not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Distrust {
    Owner(u32),
    Everybody,
    Group(u32),
}

impl std::fmt::Display for Distrust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Owner(uid) => write!(f, "it belongs to user {uid}"),
            Self::Everybody => f.write_str("everybody can write it"),
            Self::Group(gid) => write!(f, "group {gid} can write it"),
        }
    }
}

impl Trust {
    /// Trusts root and this user.
    fn new(group: Option<u32>) -> Self {
        let me = rustix::process::geteuid().as_raw();
        Self {
            users: [0, me, unmapped().unwrap_or(0)],
            group,
        }
    }

    /// Checks the folder of a store and all folders above it.
    pub fn of(root: &Path, options: Options) -> Result<Self, StoreError> {
        let meta = fs::symlink_metadata(root).at("look at", root)?;
        if meta.is_symlink() {
            let to = fs::read_link(root).unwrap_or_default();
            return Err(refuse(
                root,
                format!("it is a symbolic link to `{}`", to.display()),
            ));
        }
        let mut trust = Self::new(options.shared.then(|| meta.gid()));
        if !trust.trusts(meta.uid()) {
            // An unmapped user is trusted ([`unmapped`]): no process can have that ID, so no other user could have
            // created the store.
            if !options.trusted {
                return Err(StoreError::Stranger {
                    path: fs::canonicalize(root).unwrap_or_else(|_| root.to_owned()),
                    uid: meta.uid(),
                });
            }
            trust.users[2] = meta.uid();
        }
        trust.walk(root, options.shared)?;
        trust
            .check_trust(&meta)
            .map_err(|why| refuse(root, why.to_string()))?;
        Ok(trust)
    }

    fn trusts(&self, uid: u32) -> bool {
        self.users.contains(&uid)
    }

    /// Checks every folder and link of a path. Returns the path without links.
    fn walk(&self, path: &Path, shared: bool) -> Result<PathBuf, StoreError> {
        let absolute = std::path::absolute(path).at("find", path)?;
        let mut left = names(&absolute);
        let (mut at, mut links) = (PathBuf::new(), 0);
        while let Some(name) = left.pop() {
            if name == ".." {
                at.pop();
                continue;
            }
            let next = at.join(name);
            let meta = fs::symlink_metadata(&next).at("look at", &next)?;
            if !meta.is_symlink() {
                let checked = self.check_parent(&meta, shared);
                checked.map_err(|why| refuse(&next, why.to_string()))?;
                at = next;
            } else if !self.trusts(meta.uid()) {
                let why = format!("the link belongs to user {}", meta.uid());
                return Err(refuse(&next, why));
            } else if links == LINKS {
                let looped = Err(io::Error::from(rustix::io::Errno::LOOP));
                return looped.at("follow the links of", path);
            } else {
                links += 1;
                left.extend(names(&fs::read_link(&next).at("read", &next)?));
            }
        }
        Ok(at)
    }

    /// Checks a folder above the store.
    fn check_parent(&self, meta: &Metadata, shared: bool) -> Result<(), Distrust> {
        let any_group = Self {
            group: shared.then(|| meta.gid()),
            ..*self
        };
        if !self.trusts(meta.uid()) {
            Err(Distrust::Owner(meta.uid()))
        } else if meta.mode() & STICKY != 0 {
            Ok(())
        } else {
            any_group.check_trust(meta)
        }
    }

    /// Checks the owner and the mode of the store, or of something in it.
    pub fn check_trust(&self, meta: &Metadata) -> Result<(), Distrust> {
        let (mode, uid, gid) = (meta.mode(), meta.uid(), meta.gid());
        // A shared store is trusted by its group: other users could not have written the file.
        if self.group.is_none() && !self.trusts(uid) {
            return Err(Distrust::Owner(uid));
        }
        if mode & 0o002 != 0 {
            return Err(Distrust::Everybody);
        }
        // Many systems have a private group for each user, with the same number.
        if mode & 0o020 != 0 && self.group != Some(gid) && gid != uid {
            return Err(Distrust::Group(gid));
        }
        Ok(())
    }

    /// Opens a file of the store at `root` for reading. Refuses a symbolic link, a folder, a device, and anything that
    /// other users could have written, also in the folders of the path.
    pub fn open(&self, root: &Path, path: &Path) -> io::Result<File> {
        let folder = self.folders(root, path)?;
        let name = path.file_name().unwrap_or_default();
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&folder, name, flags, Mode::empty())?);
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::other("it is not a plain file"));
        }
        self.accept(path, &meta)?;
        Ok(file)
    }

    /// Opens the parent folder of `path`, one component at a time, from the store's folder on.
    pub fn folders(&self, root: &Path, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut at = root.to_owned();
        let mut folder = openat(CWD, root, flags, Mode::empty())?;
        self.accept_folder(&at, &folder)?;
        let inside = path
            .parent()
            .and_then(|folder| folder.strip_prefix(root).ok());
        for name in inside.unwrap_or(Path::new("")) {
            at.push(name);
            folder = match openat(&folder, name, flags, Mode::empty()) {
                Err(rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR) => {
                    let why = "it is not a plain folder, or a symbolic link to one".to_owned();
                    return Err(io::Error::other(refuse(&at, why)));
                }
                opened => opened?,
            };
            self.accept_folder(&at, &folder)?;
        }
        Ok(folder)
    }

    fn accept_folder(&self, path: &Path, folder: &OwnedFd) -> io::Result<()> {
        let meta = File::from(folder.try_clone()?).metadata()?;
        self.accept(path, &meta)
    }

    /// Checks an open file.
    pub fn accept(&self, path: &Path, meta: &Metadata) -> io::Result<()> {
        let checked = self.check_trust(meta);
        checked.map_err(|why| io::Error::other(refuse(path, why.to_string())))
    }

    /// Checks one folder of the store. Accepts a missing one.
    pub fn inner(&self, path: &Path) -> Result<(), StoreError> {
        let Ok(meta) = fs::symlink_metadata(path) else {
            return Ok(());
        };
        if meta.is_symlink() {
            let to = fs::read_link(path).unwrap_or_default();
            let why = format!("it is a symbolic link to `{}`", to.display());
            return Err(refuse(path, why));
        }
        self.check_trust(&meta)
            .map_err(|why| refuse(path, why.to_string()))
    }
}

/// Refuses a file or folder that another user could change or replace. Checks its owner and mode, and those of the
/// folders and links of its path.
pub fn check_path(path: &Path) -> Result<(), StoreError> {
    let trust = Trust::new(None);
    let real = trust.walk(path, false)?;
    let meta = fs::symlink_metadata(&real).at("look at", &real)?;
    trust
        .check_trust(&meta)
        .map_err(|why| refuse(&real, why.to_string()))
}

/// Returns the components of a path, last one first.
fn names(path: &Path) -> Vec<OsString> {
    path.iter().rev().map(OsString::from).collect()
}

/// Returns [`UNMAPPED`], if no process of this container can have that user ID.
fn unmapped() -> Option<u32> {
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    let mapped = map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        match (numbers.next(), numbers.nth(1)) {
            (Some(Ok(first)), Some(Ok(count))) => {
                (first..first.saturating_add(count)).contains(&u64::from(UNMAPPED))
            }
            _ => true,
        }
    });
    (!mapped).then_some(UNMAPPED)
}

fn refuse(path: &Path, why: String) -> StoreError {
    StoreError::Unsafe {
        path: PathBuf::from(path),
        why,
    }
}

#[cfg(test)]
mod tests;
