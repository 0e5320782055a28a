//! The defects of a store, and the remedy of each.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::Digest;

/// The remedy of a defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Needs {
    /// A harmless leftover of a crash: `--repair` removes it.
    Sweep,
    /// `--repair` or `--reindex` fixes it; nothing is lost.
    Repair,
    /// Something is lost: `--repair` sets damaged files aside, and the next build creates them again.
    Rebuild,
    /// A person must inspect it.
    Person,
}

/// One defect of a store. Paths are relative to the store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Defect {
    /// An unknown file or folder.
    Foreign {
        /// The file or folder.
        path: PathBuf,
    },
    /// A file in the wrong folder.
    Misplaced {
        /// The current path of the file.
        path: PathBuf,
    },
    /// A symbolic link, folder or device where a file should be, or a file where a folder should be.
    NotPlain {
        /// The path that should be a plain file or folder.
        path: PathBuf,
        /// Its kind in words, as `symbolic link`.
        what: String,
    },
    /// A mode that allows changes of the bytes, or no reading.
    Mode {
        /// The file or folder with the mode.
        path: PathBuf,
        /// Permission bits, as in `0o644`.
        mode: u32,
    },
    /// A file with another hard link, through which its bytes can be changed.
    Linked {
        /// The file, by the name that it has in the store.
        path: PathBuf,
        /// Number of hard links; 1 for a sound file.
        links: u64,
    },
    /// A file with another owner than the store.
    Owner {
        /// The file or folder.
        path: PathBuf,
        /// User ID of the owner.
        uid: u32,
    },
    /// `CACHEDIR.TAG` is missing or has other content.
    Tag {
        /// Path of the tag.
        path: PathBuf,
    },
    /// An object with other bytes than its name and checksum promise.
    Object {
        /// The object's file.
        path: PathBuf,
        /// The difference, as a fragment of a sentence.
        why: String,
    },
    /// An unpacked file whose bytes do not match its name, or whose object is missing.
    Ready {
        /// The unpacked file.
        path: PathBuf,
        /// The difference, as a fragment of a sentence.
        why: String,
    },
    /// A record that is unreadable, or does not match its name and checksum.
    Record {
        /// The record's file.
        path: PathBuf,
        /// The reason, as a fragment of a sentence.
        why: String,
    },
    /// A record that a newer precast wrote.
    Newer {
        /// The record's file.
        path: PathBuf,
    },
    /// A record refers to a missing or damaged object.
    NoObject {
        /// The record that refers to the object.
        by: PathBuf,
        /// Digest of the object's content.
        digest: Digest,
    },
    /// The size in an artifact's record differs from the size of its object.
    Size {
        /// The artifact's record.
        by: PathBuf,
        /// Size in the record, in bytes.
        says: u64,
        /// Size of the object's content, in bytes.
        is: u64,
    },
    /// A program calls a missing or damaged artifact.
    NoArtifact {
        /// The program's record.
        by: PathBuf,
        /// Key of the artifact.
        id: Digest,
    },
    /// A release has a missing or damaged program.
    NoProgram {
        /// The release's record.
        by: PathBuf,
        /// Request key of the program.
        id: Digest,
    },
    /// The index is missing, or SQLite finds it damaged.
    Index {
        /// The message of SQLite, or that the index is missing.
        why: String,
    },
    /// A file without its row: a crash happened before the row was written.
    Unindexed {
        /// Table and key of the missing row, as `objects 3f9c…`.
        row: String,
    },
    /// A row without its file: a crash happened before the row was deleted. A missing file is a defect of the records
    /// that refer to it.
    Dangling {
        /// Table and key of the row.
        row: String,
    },
    /// A row that differs from its file.
    Row {
        /// Table and key of the row.
        row: String,
    },
    /// An unfinished deletion.
    HalfDeleted {
        /// Digest or key of the thing to delete.
        id: Digest,
    },
    /// A temporary file of a dead process.
    Stale {
        /// The file or folder in `tmp/`.
        path: PathBuf,
    },
    /// The lease of a dead process.
    DeadLease {
        /// The lease's file.
        path: PathBuf,
    },
}

impl Defect {
    /// Returns the remedy.
    pub fn needs(&self) -> Needs {
        match self {
            Self::HalfDeleted { .. }
            | Self::Stale { .. }
            | Self::DeadLease { .. }
            | Self::Unindexed { .. }
            | Self::Dangling { .. } => Needs::Sweep,
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

    /// Returns the path of the file with the defect, relative to the store; none for a defect without a path.
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
