//! Errors of the store, each with its path or digest.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::Digest;

/// An error of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The folder has no marker of a store, or an unreadable one.
    #[error("`{}` is not a store: {why}", path.display())]
    NotAStore {
        /// The folder.
        path: PathBuf,
        /// The fault of the marker, as a fragment of a sentence.
        why: &'static str,
    },
    /// A new store can't be created in a folder with other files.
    #[error("`{}` is not a store and not empty: it holds `{}`", path.display(), found.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
        /// Name of one file or folder in it.
        found: PathBuf,
    },
    /// A newer precast wrote the layout or the index. Nothing is changed.
    #[error("`{}` has store version {found}, this precast knows up to {known}", path.display())]
    Newer {
        /// The marker or the index.
        path: PathBuf,
        /// Version in the file.
        found: i64,
        /// Latest version that this precast reads.
        known: i64,
    },
    /// Other users than the store's owner could change the file, or its path has a symbolic link.
    #[error("`{}` is not safe: {why}", path.display())]
    Unsafe {
        /// The refused file or folder.
        path: PathBuf,
        /// The reason, as a fragment of a sentence.
        why: String,
    },
    /// The store belongs to another user, and is not listed as trusted.
    #[error("`{}` belongs to user {uid}, who decides what is run from it", path.display())]
    Stranger {
        /// The store's folder, without symbolic links.
        path: PathBuf,
        /// User ID of the owner.
        uid: u32,
    },
    /// A wait for another process took too long.
    #[error("can't {to}: {owner} has had a lock on `{}` for {seconds} s", path.display())]
    Busy {
        /// The purpose of the wait, as `add to the store`.
        to: &'static str,
        /// The lock's file.
        path: PathBuf,
        /// The processes that hold the lock, or `another process` where the kernel doesn't list them.
        owner: String,
        /// Duration of the wait.
        seconds: u64,
    },
    /// The caller stopped the wait.
    #[error("interrupted while waiting to {to}")]
    Interrupted {
        /// The purpose of the wait, as `add to the store`.
        to: &'static str,
    },
    /// The operating system refused something.
    #[error("can't {what} `{}`", path.display())]
    Io {
        /// The operation, as `read` or `set aside`.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// A change of a read-only store.
    #[error("can't {what}: the store `{}` is read-only", path.display())]
    ReadOnly {
        /// The change, as `add to the store`.
        what: &'static str,
        /// The store's folder.
        path: PathBuf,
    },
    /// The file of a requested object is missing.
    #[error("object {digest} is not in the store (`{}`)", path.display())]
    Missing {
        /// Digest of the object's content.
        digest: Digest,
        /// The expected path of the file.
        path: PathBuf,
    },
    /// The bytes of an object do not match its name and checksum.
    #[error("object {digest} is damaged (`{}`): {why}", path.display())]
    Corrupt {
        /// Digest of the object's content.
        digest: Digest,
        /// The damaged file.
        path: PathBuf,
        /// The difference, as a fragment of a sentence.
        why: String,
    },
    /// A record is unreadable, or does not match its name and checksum.
    #[error("record `{}` is damaged: {why}", path.display())]
    Record {
        /// The record's file.
        path: PathBuf,
        /// The reason, as a fragment of a sentence.
        why: String,
    },
    /// SQLite refused a read or write of the index.
    #[error("index `{}` failed", path.display())]
    Index {
        /// The index's file.
        path: PathBuf,
        /// The error of SQLite.
        #[source]
        source: rusqlite::Error,
    },
    /// The index has an earlier version.
    #[error("index `{}` has version {found}, this precast uses {known}", path.display())]
    Older {
        /// The index's file.
        path: PathBuf,
        /// Version in the file.
        found: i64,
        /// Version that this precast uses.
        known: i64,
    },
    /// The index has the right version and the wrong tables.
    #[error("index `{}` has other tables than this precast makes", path.display())]
    Schema {
        /// The index's file.
        path: PathBuf,
    },
    /// Another program than precast changed a row of the index.
    #[error("index `{}` is damaged: a row of `{table}` has a wrong check sum", path.display())]
    Row {
        /// The index's file.
        path: PathBuf,
        /// Table of the row.
        table: &'static str,
    },
    /// SQLite has a bug that can damage an index.
    #[error("SQLite {found} is older than {needed}, which is the first one that is safe to use")]
    OldSqlite {
        /// Version of the linked SQLite.
        found: String,
        /// The first version without the bug.
        needed: &'static str,
    },
    /// The text can't be the beginning of an ID.
    #[error("`{0}` is not an ID: expected 4 to 64 lower-case hex digits")]
    BadPrefix(String),
    /// No program, artifact, object or failure has an ID with this prefix.
    #[error("nothing in the store has an ID that begins with `{0}`")]
    Unknown(String),
    /// Another release has the number of a copied release.
    #[error("`{model}` has another release {seq} already")]
    TakenNumber {
        /// Name of the model.
        model: String,
        /// Number of the release.
        seq: u64,
    },
    /// Several things have an ID with this prefix.
    #[error("`{prefix}` is ambiguous: {}", candidates.join(", "))]
    Ambiguous {
        /// The prefix as the caller gave it.
        prefix: String,
        /// The matches, each with its kind and its short ID.
        candidates: Vec<String>,
    },
    /// A record to add, or a release to load, refers to a missing thing.
    #[error("{what} refers to {kind} {id}, which is not in the store")]
    Dangling {
        /// The record with the reference, in words.
        what: String,
        /// Kind of the missing thing: `object`, `artifact` or `program`.
        kind: &'static str,
        /// Digest or key of the missing thing.
        id: Digest,
    },
    /// The model has no release of this number.
    #[error("`{model}` has no {}", if *seq == 0 { "earlier release".to_owned() } else { format!("release {seq}") })]
    NoRelease {
        /// Name of the model.
        model: String,
        /// The number; 0 for a request of the release before the latest.
        seq: u64,
    },
    /// A rollback to a release that lacks programs.
    #[error(
        "release {seq} of `{model}` is a partial one: it lacks {lacks} of the programs that the spec asked for"
    )]
    Partial {
        /// Name of the model.
        model: String,
        /// Number of the release.
        seq: u64,
        /// Number of missing programs.
        lacks: usize,
    },
    /// The requested name of a release has only digits.
    #[error("`{0}` can't name a release: releases have numbers already")]
    NumberName(String),
    /// A name of a model or release is empty, too long, or has unprintable characters.
    #[error("`{0}` can't name a model or a release: expected 1 to 100 printable characters")]
    BadName(String),
    /// The file changed after its digest and size were computed: another program writes to it.
    #[error("`{}` changed while it was read", path.display())]
    Changed {
        /// The file that was read.
        path: PathBuf,
    },
}

impl StoreError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotAStore { .. } => "`precast build` makes one; `--store` says where it is",
            Self::NotEmpty { .. } => "choose a new folder with `--store`",
            Self::Newer { .. } => "update precast; the store was left as it is",
            Self::Corrupt { .. } | Self::Record { .. } => {
                "`precast verify --repair` sets it aside, and the next build makes it again"
            }
            Self::Index { source, .. } if is_full(source) => FULL,
            Self::Index { source, path } if is_of_host(source, path) => {
                "the system refused a file of the index: its rights, `ulimit -n` and the disk say why"
            }
            Self::Index { .. } | Self::Row { .. } | Self::Older { .. } | Self::Schema { .. } => {
                "`precast verify --reindex` rebuilds the index from the files"
            }
            Self::Missing { .. } | Self::Dangling { .. } => "`precast build` makes it again",
            Self::Unsafe { why, .. } if why.contains("link") => "name the folder itself",
            Self::Unsafe { .. } => {
                "what is in a store is executed: `chmod go-w` it, or say `--shared` for a group you trust"
            }
            Self::Busy { .. } => "end that process if it hangs, or run the command again later",
            Self::Interrupted { .. } => "nothing was changed meanwhile: run the command again",
            Self::Stranger { .. } => "open it as trusted, by its path, if you trust that user",
            Self::Io { source, .. } => io_hint(source),
            Self::ReadOnly { .. } => "mount it writable, or name another store with `--store`",
            Self::OldSqlite { .. } => "build precast with the SQLite that comes with it",
            Self::BadPrefix(_) => "`precast ls` lists the IDs; `precast du` the models",
            Self::Unknown(_) => "`precast ls` lists programs, `precast ls --artifacts` artifacts",
            Self::Ambiguous { .. } => "give more digits",
            Self::TakenNumber { .. } => "copy into another store",
            Self::NoRelease { .. } => "`precast release ls` lists the releases",
            Self::Partial { .. } => {
                "`precast release ls` shows which ones are whole; `MODEL@NUMBER` loads a partial one"
            }
            Self::NumberName(_) => "put a letter in it, as `v7`",
            Self::BadName(_) => "letters, digits, `-`, `_` and `.` always do",
            Self::Changed { .. } => "something else writes to it: run the command again",
        }
    }

    /// Returns whether only the index is damaged. It can be rebuilt from the files. An index that the system does not
    /// let be written or opened is not damaged.
    pub fn is_index(&self) -> bool {
        match self {
            Self::Index { source, path } => !is_of_host(source, path),
            Self::Row { .. } | Self::Older { .. } | Self::Schema { .. } => true,
            _ => false,
        }
    }

    /// Returns whether the requested thing does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. } | Self::Unknown(_) | Self::NoRelease { .. }
        )
    }
}

/// Returns whether an error of SQLite says nothing about the index: no space, no memory, no file handle, no right.
fn is_of_host(error: &rusqlite::Error, index: &Path) -> bool {
    use rusqlite::{ErrorCode as Code, ffi};
    let Some(error) = error.sqlite_error() else {
        return false;
    };
    let reads = [ffi::SQLITE_IOERR_READ, ffi::SQLITE_IOERR_SHORT_READ];
    match error.code {
        Code::DiskFull | Code::OutOfMemory => true,
        Code::CannotOpen => index.exists(),
        Code::ReadOnly | Code::PermissionDenied => true,
        Code::SystemIoFailure => !reads.contains(&error.extended_code),
        _ => false,
    }
}

fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
}

const FULL: &str = "free some space, or `precast gc --max-size`; what is finished is kept";

/// Returns a hint for an error of the operating system.
fn io_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FULL,
        io::ErrorKind::PermissionDenied => "check who owns the store",
        io::ErrorKind::ReadOnlyFilesystem => "mount it writable",
        _ if error.raw_os_error() == Some(libc::EMFILE) => "raise the limit with `ulimit -n`",
        _ => "`precast verify` says whether the store is whole",
    }
}

/// Adds the operation and the path to an I/O error.
pub(crate) trait At<T> {
    fn at(self, what: &'static str, path: &Path) -> Result<T, StoreError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, what: &'static str, path: &Path) -> Result<T, StoreError> {
        // A refusal while a file is opened comes as an I/O error.
        self.map_err(|source| match source.into().downcast::<StoreError>() {
            Ok(refused) => refused,
            Err(source) => StoreError::Io {
                what,
                path: path.to_owned(),
                source,
            },
        })
    }
}
