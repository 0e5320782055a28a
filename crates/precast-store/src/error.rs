//! What can go wrong in a store, each with the path or the digest it is about.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::Digest;

/// Why the store could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    #[error("`{}` is not a store: {why}", path.display())]
    NotAStore { path: PathBuf, why: &'static str },
    #[error("`{}` is not a store and not empty: it holds `{}`", path.display(), found.display())]
    NotEmpty { path: PathBuf, found: PathBuf },
    #[error("`{}` has store version {found}, this precast knows up to {known}", path.display())]
    Newer {
        path: PathBuf,
        found: i64,
        known: i64,
    },
    #[error("`{}` is not safe: {why}", path.display())]
    Unsafe { path: PathBuf, why: String },
    /// The store is another user's, and was not named as trusted.
    #[error("`{}` belongs to user {uid}, who decides what is run from it", path.display())]
    Stranger { path: PathBuf, uid: u32 },
    /// A wait for another process took too long.
    #[error("can't {to}: {owner} has had a lock on `{}` for {seconds} s", path.display())]
    Busy {
        to: &'static str,
        path: PathBuf,
        owner: String,
        seconds: u64,
    },
    /// The caller wants to wait no longer.
    #[error("interrupted while waiting to {to}")]
    Interrupted { to: &'static str },
    #[error("can't {what} `{}`", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("can't {what}: the store `{}` is read-only", path.display())]
    ReadOnly { what: &'static str, path: PathBuf },
    #[error("object {digest} is not in the store (`{}`)", path.display())]
    Missing { digest: Digest, path: PathBuf },
    #[error("object {digest} is damaged (`{}`): {why}", path.display())]
    Corrupt {
        digest: Digest,
        path: PathBuf,
        why: String,
    },
    #[error("record `{}` is damaged: {why}", path.display())]
    Record { path: PathBuf, why: String },
    #[error("index `{}` failed", path.display())]
    Index {
        path: PathBuf,
        #[source]
        source: rusqlite::Error,
    },
    #[error("index `{}` has version {found}, this precast uses {known}", path.display())]
    Older {
        path: PathBuf,
        found: i64,
        known: i64,
    },
    #[error("index `{}` has other tables than this precast makes", path.display())]
    Schema { path: PathBuf },
    #[error("index `{}` is damaged: a row of `{table}` has a wrong check sum", path.display())]
    Row { path: PathBuf, table: &'static str },
    #[error("SQLite {found} is older than {needed}, which is the first one that is safe to use")]
    OldSqlite { found: String, needed: &'static str },
    #[error("`{0}` is not an ID: expected 4 to 64 lower-case hex digits")]
    BadPrefix(String),
    #[error("nothing in the store has an ID that begins with `{0}`")]
    Unknown(String),
    #[error("`{prefix}` is ambiguous: {}", candidates.join(", "))]
    Ambiguous {
        prefix: String,
        candidates: Vec<String>,
    },
    #[error("{what} refers to {kind} {id}, which is not in the store")]
    Dangling {
        what: String,
        kind: &'static str,
        id: Digest,
    },
    #[error("`{model}` has no {}", if *seq == 0 { "earlier release".to_owned() } else { format!("release {seq}") })]
    NoRelease { model: String, seq: u64 },
    #[error(
        "release {seq} of `{model}` is a partial one: it lacks {lacks} of the programs that the spec asked for"
    )]
    Partial {
        model: String,
        seq: u64,
        lacks: usize,
    },
    #[error("`{0}` can't name a release: releases have numbers already")]
    NumberName(String),
    #[error("`{0}` can't name a model or a release: expected 1 to 100 printable characters")]
    BadName(String),
    #[error("`{}` changed while it was read", path.display())]
    Changed { path: PathBuf },
}

impl StoreError {
    /// Returns what to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotAStore { .. } => "`precast build` makes one; `--store` says where it is",
            Self::NotEmpty { .. } => "choose a new folder with `--store`",
            Self::Newer { .. } => "update precast; the store was left as it is",
            Self::Corrupt { .. } | Self::Record { .. } => {
                "`precast verify --repair` sets it aside, and the next build makes it again"
            }
            Self::Index { .. } | Self::Row { .. } | Self::Older { .. } | Self::Schema { .. } => {
                "`precast verify --reindex` rebuilds the index from the files"
            }
            Self::Missing { .. } | Self::Dangling { .. } => {
                "`precast verify --repair` sets aside what can't work, and the next build makes it again"
            }
            Self::Unsafe { why, .. } if why.contains("link") => "name the folder itself",
            Self::Unsafe { .. } => {
                "what is in a store is executed: `chmod go-w` it, or say `--shared` for a group you trust"
            }
            Self::Busy { .. } => "end that process if it hangs, or run the command again later",
            Self::Interrupted { .. } => "nothing was changed meanwhile: run the command again",
            Self::Stranger { .. } => "open it with `Options::trusted` if you trust that user",
            Self::Io { source, .. } => io_hint(source),
            Self::ReadOnly { .. } => "mount it writable, or name another store with `--store`",
            Self::OldSqlite { .. } => "build precast with the SQLite that comes with it",
            Self::BadPrefix(_) => "`precast ls` lists the IDs; `precast du` the models",
            Self::Unknown(_) => "`precast ls` lists programs, `precast ls --artifacts` artifacts",
            Self::Ambiguous { .. } => "give more digits",
            Self::NoRelease { .. } => "`precast release ls` lists the releases",
            Self::Partial { .. } => {
                "`precast release ls` shows which ones are whole; `MODEL@NUMBER` loads a partial one"
            }
            Self::NumberName(_) => "put a letter in it, as `v7`",
            Self::BadName(_) => "letters, digits, `-`, `_` and `.` always do",
            Self::Changed { .. } => "something else writes to it: run the command again",
        }
    }

    /// Returns whether only the index is at fault: it can be made again from the files.
    pub fn is_index(&self) -> bool {
        matches!(
            self,
            Self::Index { .. } | Self::Row { .. } | Self::Older { .. } | Self::Schema { .. }
        )
    }

    /// Returns whether the thing asked for is just not there.
    pub fn is_missing(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. } | Self::Unknown(_) | Self::NoRelease { .. }
        )
    }
}

/// Returns what to do about an error of the operating system in a store.
fn io_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space, or `precast gc --max-size`; what is finished is kept"
        }
        io::ErrorKind::PermissionDenied => "check who owns the store",
        io::ErrorKind::ReadOnlyFilesystem => "mount it writable",
        _ if error.raw_os_error() == Some(libc::EMFILE) => "raise the limit with `ulimit -n`",
        _ => "`precast verify` says whether the store is whole",
    }
}

/// Says what was being done to which path when an I/O error came.
pub(crate) trait At<T> {
    fn at(self, what: &'static str, path: &Path) -> Result<T, StoreError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, what: &'static str, path: &Path) -> Result<T, StoreError> {
        // What is refused while a file is opened comes as an I/O error.
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
