//! What can be wrong with a store, and what each thing needs.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::Digest;

/// What a defect needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Needs {
    /// Left by a crash and harmless: `--repair` removes it.
    Sweep,
    /// `--repair` or `--reindex` puts it right; nothing is lost.
    Repair,
    /// Something is lost: `--repair` sets aside what is damaged, the next build makes it again.
    Rebuild,
    /// A person has to look at it.
    Person,
}

/// One thing that is wrong. Paths are relative to the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Defect {
    /// Nothing that a store has.
    Foreign { path: PathBuf },
    /// A name that belongs into another folder.
    Misplaced { path: PathBuf },
    /// A symbolic link, folder or device where a file should be, or a file where a folder should be.
    NotPlain { path: PathBuf, what: String },
    /// A mode that lets the bytes be changed, or not be read.
    Mode { path: PathBuf, mode: u32 },
    /// A second name of the same file: who has it may change the bytes.
    Linked { path: PathBuf, links: u64 },
    /// A file that belongs to somebody else than the store.
    Owner { path: PathBuf, uid: u32 },
    /// `CACHEDIR.TAG` is missing or says something else.
    Tag { path: PathBuf },
    /// An object whose bytes are not what its name and checksum say.
    Object { path: PathBuf, why: String },
    /// An unpacked file that is not what its name says, or whose object is gone.
    Ready { path: PathBuf, why: String },
    /// A record that can't be read, or is not what its name and checksum say.
    Record { path: PathBuf, why: String },
    /// A record that a newer precast wrote.
    Newer { path: PathBuf },
    /// A record refers to an object that is not there or damaged.
    NoObject { by: PathBuf, digest: Digest },
    /// An artifact says another size than its object has.
    Size { by: PathBuf, says: u64, is: u64 },
    /// A program calls an artifact that is not there or damaged.
    NoArtifact { by: PathBuf, id: Digest },
    /// A release has a program that is not there or damaged.
    NoProgram { by: PathBuf, id: Digest },
    /// The index is missing, or SQLite finds it damaged.
    Index { why: String },
    /// A file without its row: a crash came between the two.
    Unindexed { row: String },
    /// A row without its file.
    Dangling { row: String },
    /// A row that says something else than its file.
    Row { row: String },
    /// A deletion that was begun and not finished.
    HalfDeleted { id: Digest },
    /// What a dead process was writing.
    Stale { path: PathBuf },
    /// The lease of a dead process.
    DeadLease { path: PathBuf },
}

impl Defect {
    /// Returns what it needs.
    pub fn needs(&self) -> Needs {
        match self {
            Self::HalfDeleted { .. }
            | Self::Stale { .. }
            | Self::DeadLease { .. }
            | Self::Unindexed { .. } => Needs::Sweep,
            Self::Object { .. }
            | Self::Record { .. }
            | Self::NoObject { .. }
            | Self::Size { .. }
            | Self::NoArtifact { .. }
            | Self::NoProgram { .. } => Needs::Rebuild,
            Self::Newer { .. } | Self::Owner { .. } => Needs::Person,
            _ => Needs::Repair,
        }
    }

    /// Returns the file it is about, relative to the store, if it is about one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Foreign { path }
            | Self::Misplaced { path }
            | Self::NotPlain { path, .. }
            | Self::Mode { path, .. }
            | Self::Linked { path, .. }
            | Self::Owner { path, .. }
            | Self::Tag { path }
            | Self::Object { path, .. }
            | Self::Ready { path, .. }
            | Self::Record { path, .. }
            | Self::Newer { path }
            | Self::Stale { path }
            | Self::DeadLease { path } => Some(path),
            Self::NoObject { by, .. }
            | Self::Size { by, .. }
            | Self::NoArtifact { by, .. }
            | Self::NoProgram { by, .. } => Some(by),
            _ => None,
        }
    }
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = self.path() {
            write!(f, "`{}` ", path.display())?;
        }
        match self {
            Self::Foreign { .. } => f.write_str("does not belong into a store"),
            Self::Misplaced { .. } => f.write_str("belongs into another folder"),
            Self::NotPlain { what, .. } => write!(f, "is a {what}"),
            Self::Mode { mode, .. } => write!(f, "has mode {mode:04o}"),
            Self::Linked { links, .. } => write!(f, "has {links} names"),
            Self::Owner { uid, .. } => write!(f, "belongs to user {uid}"),
            Self::Tag { .. } => f.write_str("does not say that this is a cache"),
            Self::Object { why, .. } | Self::Ready { why, .. } | Self::Record { why, .. } => {
                write!(f, "is damaged: {why}")
            }
            Self::Newer { .. } => f.write_str("was written by a newer precast"),
            Self::NoObject { digest, .. } => {
                write!(f, "needs object {}, which is not there", digest.short())
            }
            Self::Size { says, is, .. } => {
                write!(f, "says that its object has {says} bytes, it has {is}")
            }
            Self::NoArtifact { id, .. } => {
                write!(f, "calls artifact {}, which is not there", id.short())
            }
            Self::NoProgram { id, .. } => {
                write!(f, "has program {}, which is not there", id.short())
            }
            Self::Index { why } => write!(f, "the index is damaged: {why}"),
            Self::Unindexed { row } => write!(f, "the index has no row for {row}"),
            Self::Dangling { row } => {
                write!(f, "the index has a row for {row}, which is not there")
            }
            Self::Row { row } => write!(f, "the index has a wrong row for {row}"),
            Self::HalfDeleted { id } => write!(f, "{} is half deleted", id.short()),
            Self::Stale { .. } => f.write_str("was being written by a process that ended"),
            Self::DeadLease { .. } => f.write_str("is the lease of a process that ended"),
        }
    }
}
