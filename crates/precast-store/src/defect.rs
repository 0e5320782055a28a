//! The defects of a store, and the remedy of each.

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
    Foreign {
        /// The file or folder that the store does not know.
        path: PathBuf,
    },
    /// A name that belongs into another folder.
    Misplaced {
        /// Where the file lies now.
        path: PathBuf,
    },
    /// A symbolic link, folder or device where a file should be, or a file where a folder should be.
    NotPlain {
        /// What lies where a plain file or folder belongs.
        path: PathBuf,
        /// Its kind in words, as `symbolic link`.
        what: String,
    },
    /// A mode that lets the bytes be changed, or not be read.
    Mode {
        /// The file or folder with the mode.
        path: PathBuf,
        /// Permission bits, as in `0o644`.
        mode: u32,
    },
    /// A second name of the same file: who has it may change the bytes.
    Linked {
        /// The file, by the name that it has in the store.
        path: PathBuf,
        /// How many names the file has; a sound one has one.
        links: u64,
    },
    /// A file that belongs to somebody else than the store.
    Owner {
        /// The file or folder of the other user.
        path: PathBuf,
        /// ID of the user that owns it.
        uid: u32,
    },
    /// `CACHEDIR.TAG` is missing or says something else.
    Tag {
        /// The tag's own path.
        path: PathBuf,
    },
    /// An object whose bytes are not what its name and checksum say.
    Object {
        /// The object's file.
        path: PathBuf,
        /// The difference, as a fragment of a sentence.
        why: String,
    },
    /// An unpacked file that is not what its name says, or whose object is gone.
    Ready {
        /// The unpacked file.
        path: PathBuf,
        /// The difference, as a fragment of a sentence.
        why: String,
    },
    /// A record that can't be read, or is not what its name and checksum say.
    Record {
        /// The record's file.
        path: PathBuf,
        /// What is wrong with it, as a fragment of a sentence.
        why: String,
    },
    /// A record that a newer precast wrote.
    Newer {
        /// The record's file.
        path: PathBuf,
    },
    /// A record refers to an object that is not there or damaged.
    NoObject {
        /// The record that refers to the object.
        by: PathBuf,
        /// Digest of the object's content.
        digest: Digest,
    },
    /// An artifact says another size than its object has.
    Size {
        /// The artifact's record.
        by: PathBuf,
        /// Bytes that the artifact says.
        says: u64,
        /// Bytes of the object's content.
        is: u64,
    },
    /// A program calls an artifact that is not there or damaged.
    NoArtifact {
        /// The program's record.
        by: PathBuf,
        /// Key of the artifact.
        id: Digest,
    },
    /// A release has a program that is not there or damaged.
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
    /// A file without its row: a crash came between the two.
    Unindexed {
        /// Table and key of the row that is missing, as `objects 3f9c…`.
        row: String,
    },
    /// A row without its file: a crash came between the two. A file that is missed is a defect of what refers to it.
    Dangling {
        /// Table and key of the row.
        row: String,
    },
    /// A row that says something else than its file.
    Row {
        /// Table and key of the row.
        row: String,
    },
    /// A deletion that was begun and not finished.
    HalfDeleted {
        /// Digest or key of the thing whose deletion was begun.
        id: Digest,
    },
    /// What a dead process was writing.
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
    /// Returns what it needs.
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
