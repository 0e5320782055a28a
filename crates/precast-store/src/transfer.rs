//! Transfers between a store and a remote: the words that `precast` and the program beside it, `precast-remote`, exchange.
//!
//! A request is a line of JSON on the program's stdin. Its events are lines on stdout, the last of which is `done` or
//! `error`. When stdin ends, the work stops. The words are here because `precast` has no network code, and these two
//! programs must agree.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{
    Digest, PartKind, Target,
    record::{Program, Release},
};

/// What `precast` asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// Push a release.
    Push {
        /// The folder of the store.
        store: PathBuf,
        /// The place.
        remote: String,
        /// The model.
        model: String,
        /// Number or name of the release; the newest without.
        which: Option<String>,
        /// Whether only to say what would move.
        dry_run: bool,
        /// Whether a whole group may write the store.
        shared: bool,
        /// Whether the store may belong to another user.
        trusted: bool,
    },
    /// Pull releases.
    Pull {
        /// The folder of the store, which is created.
        store: PathBuf,
        /// The place.
        remote: String,
        /// The models; all without.
        models: Vec<String>,
        /// Number or name of the release; the newest without.
        which: Option<String>,
        /// What this host is: a release must fit one of them. Any release without.
        hosts: Vec<Target>,
        /// The name of the target that a release must have, in place of `hosts`.
        target: Option<String>,
        /// Whether every release comes, also those for other hosts.
        all: bool,
        /// Whether only to say what would move.
        dry_run: bool,
        /// Whether a whole group may write the store.
        shared: bool,
        /// Whether the store may belong to another user.
        trusted: bool,
    },
    /// List the releases.
    List {
        /// The place.
        remote: String,
    },
    /// Say the newest releases of a model.
    Releases {
        /// The place.
        remote: String,
        /// The model.
        model: String,
    },
    /// Bring what is named by key, with everything that it needs, into a store. What is not there is no error.
    Fetch {
        /// The folder of the store.
        store: PathBuf,
        /// The place.
        remote: String,
        /// What the keys are of.
        kind: PartKind,
        /// The keys.
        ids: Vec<Digest>,
        /// Whether a whole group may write the store.
        shared: bool,
        /// Whether the store may belong to another user.
        trusted: bool,
    },
    /// Send what is named by key, with everything that it needs, to a remote. No release names it there: it is found by
    /// its key.
    Offer {
        /// The folder of the store.
        store: PathBuf,
        /// The place.
        remote: String,
        /// What the keys are of.
        kind: PartKind,
        /// The keys.
        ids: Vec<Digest>,
        /// Whether a whole group may write the store.
        shared: bool,
        /// Whether the store may belong to another user.
        trusted: bool,
    },
    /// Hold a lease until stdin ends.
    Lease {
        /// The place.
        remote: String,
        /// What the key is of.
        kind: PartKind,
        /// The key that the holder makes.
        id: Digest,
        /// Whether to wait while another one holds it.
        wait: bool,
        /// After how many seconds without a sign of its holder it is taken over: for tests.
        seconds: Option<u16>,
    },
    /// Look at a place that is to get a name.
    Look {
        /// The place.
        remote: String,
        /// Whether it is for pushes: its creates are then raced.
        write: bool,
    },
    /// Pull exactly one release.
    Locked {
        /// The folder of the store, which is created.
        store: PathBuf,
        /// The place.
        remote: String,
        /// The model.
        model: String,
        /// The number.
        seq: u64,
        /// The digest that it must have.
        identity: Digest,
        /// Whether only to say what would move.
        dry_run: bool,
        /// Whether a whole group may write the store.
        shared: bool,
        /// Whether the store may belong to another user.
        trusted: bool,
    },
    /// Bring the records of all releases, without the objects.
    Mirror {
        /// The place.
        remote: String,
        /// An empty folder, which becomes a store.
        folder: PathBuf,
    },
    /// Read and hash every file of all releases.
    Verify {
        /// The place.
        remote: String,
    },
    /// Delete files that no release needs.
    Gc {
        /// The place.
        remote: String,
        /// What is younger stays, in seconds.
        grace: i64,
        /// The number of releases of each model to keep; all without.
        keep: Option<usize>,
        /// Whether to delete, and not only to say what would be deleted.
        apply: bool,
    },
}

/// What `precast-remote` says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// What will move.
    Plan(Plan),
    /// The bytes that have moved of the present plan.
    Bytes(u64),
    /// A release has moved.
    Moved(Moved),
    /// A release that is there; of a pull, one that comes.
    Listed(Listed),
    /// A release that is there, whole.
    Release(Box<Release>),
    /// A program of the newest release.
    Program(Box<Program>),
    /// What was named by this key is in the store now, or in the remote.
    Has(Digest),
    /// What became of a lease.
    Lease(Leased),
    /// The end.
    Done,
    /// The end, with an error.
    Error {
        /// What was wrong.
        message: String,
        /// What to do.
        hint: String,
        /// Its causes, the nearest first.
        causes: Vec<String>,
        /// What kind of error.
        kind: Kind,
    },
    /// What a look found.
    Looked(Looked),
    /// The records of all releases are here.
    Mirrored(Mirrored),
    /// All files were read.
    Verified(RemoteVerified),
    /// What was, or would be, deleted.
    Collected(RemoteGc),
}

/// What became of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leased {
    /// It is held from now on.
    Held,
    /// Another one holds it.
    Taken,
    /// There is no need for one: what it is for is in the remote.
    There,
}

/// Kinds of errors, which have exit codes of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The work failed.
    Failed,
    /// The request is wrong.
    Usage,
    /// What was asked for is not there.
    Missing,
    /// It is for another host.
    Target,
    /// It was stopped.
    Interrupted,
}

/// A release of a remote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Listed {
    /// The model.
    pub model: String,
    /// The number.
    pub seq: u64,
    /// The name that it was given.
    pub name: Option<String>,
    /// The digest that equal releases have in common.
    pub identity: Digest,
    /// Names of the hosts that it is for.
    pub targets: Vec<String>,
    /// Number of programs.
    pub programs: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// When it was built, in seconds since 1970.
    pub created: Option<i64>,
}

/// What moves, before a byte does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Plan {
    /// Name of the model.
    pub model: String,
    /// Number of the release on the side that has it.
    pub seq: u64,
    /// Files that move.
    pub moves: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Files of the release that are on the other side already.
    pub there: usize,
    /// Their bytes.
    pub there_bytes: u64,
}

/// A release after a push or a pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Moved {
    /// What moved; with `dry_run` what would.
    pub plan: Plan,
    /// The number on the side that it came from.
    pub from: u64,
    /// The number on the side that it went to; none for a dry run that would publish a new one.
    pub to: Option<u64>,
    /// Whether it is new there.
    pub published: bool,
    /// The digest that equal releases have in common, on the side that it came from.
    pub identity: Digest,
    /// The same on the other side. It differs where that side has builds of its own for some keys.
    pub identity_there: Digest,
    /// Whether the storage refuses to create a file twice; none if it was not tried. Without it two pushes at once can
    /// take one number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refuses_twice: Option<bool>,
}

/// What is at a place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Looked {
    /// Number of releases.
    pub releases: usize,
    /// Whether the storage refuses to create a file twice; none if it was not tried.
    pub refuses_twice: Option<bool>,
}

/// What a mirror has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mirrored {
    /// Number of releases.
    pub releases: usize,
    /// Number of records.
    pub records: usize,
    /// Files that can't be read, each with the reason: the releases that need them are left out.
    pub left_out: Vec<Flaw>,
}

/// A file of a remote that is not what it has to be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Flaw {
    /// The path of the file in the remote.
    pub name: String,
    /// The reason, as a fragment of a sentence.
    pub why: String,
}

/// The result of a check of every file of a remote's releases.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RemoteVerified {
    /// Number of releases.
    pub releases: usize,
    /// Objects that were read.
    pub objects: usize,
    /// Records that were read.
    pub records: usize,
    /// Bytes that were read.
    pub bytes: u64,
    /// Files that are damaged or missing.
    pub flaws: Vec<Flaw>,
}

/// The plan of a collection of a remote, and what was done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RemoteGc {
    /// Whether files were deleted.
    pub applied: bool,
    /// The releases that go.
    pub releases: Vec<GoneRelease>,
    /// The paths of the files that go, those of the releases too.
    pub files: Vec<String>,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of all files of the remote before.
    pub before: u64,
    /// Number of files that no release needs, and that are too young to go.
    pub young: usize,
}

/// A release that goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GoneRelease {
    /// The model.
    pub model: String,
    /// The number.
    pub seq: u64,
}
