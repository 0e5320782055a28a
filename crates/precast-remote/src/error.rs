//! Errors of remotes, each with what it is about and what to do.

use std::io;

use precast_store::{Digest, StoreError};

/// An error of a remote.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The text is no place that a remote can have.
    #[error("`{url}` is no remote: {why}")]
    Url {
        /// As it was given.
        url: String,
        /// The reason, as a fragment of a sentence.
        why: String,
    },
    /// The storage refused who asks.
    #[error("no access to `{name}`: {why}")]
    Denied {
        /// The file.
        name: String,
        /// What the storage said.
        why: String,
    },
    /// A Hub has no such repository or revision, or hides it from who asks.
    #[error("`{url}` has no {what} for you")]
    NoRepository {
        /// The Hub.
        url: String,
        /// As "repository `org/models`".
        what: String,
    },
    /// Somebody else changed it meanwhile.
    #[error("`{name}` was changed meanwhile")]
    Moved {
        /// The file.
        name: String,
    },
    /// The storage failed, or did not answer.
    #[error("can't {what} `{name}`: {why}")]
    Storage {
        /// The operation, as `list`.
        what: &'static str,
        /// The file or folder.
        name: String,
        /// What the storage said.
        why: String,
    },
    /// A transfer broke off.
    #[error("can't read `{name}`")]
    Read {
        /// The file.
        name: String,
        /// The error of the connection.
        #[source]
        source: io::Error,
    },
    /// There is nothing of precast at this place.
    #[error("`{url}` has no `precast-store.json`")]
    NotARemote {
        /// The place.
        url: String,
    },
    /// A newer precast wrote it. Nothing is changed.
    #[error("`{url}` has store version {found}, this precast knows up to {known}")]
    Newer {
        /// The place.
        url: String,
        /// Version there.
        found: i64,
        /// Latest version that this precast reads.
        known: i64,
    },
    /// A change of a remote that is only read.
    #[error("can't write to `{url}`: {why}")]
    ReadOnly {
        /// The place.
        url: String,
        /// The reason, as a fragment of a sentence.
        why: &'static str,
    },
    /// The remote has no release of this model, or not this one.
    #[error("`{url}` has no {what}")]
    NoRelease {
        /// The place.
        url: String,
        /// As "release 7 of `minilm`".
        what: String,
    },
    /// No release can run on this host.
    #[error("no release of `{model}` fits this host: {why}")]
    Unfit {
        /// The model.
        model: String,
        /// The newest release and what it needs.
        why: String,
    },
    /// A file of the remote is not what it has to be.
    #[error("`{name}` of the remote is damaged: {why}")]
    Damaged {
        /// The file.
        name: String,
        /// The reason, as a fragment of a sentence.
        why: String,
    },
    /// A file that something needs is on neither side.
    #[error("`{name}` is missing on both sides")]
    Lost {
        /// The file.
        name: String,
    },
    /// A locked release is another one now.
    #[error("release {seq} of `{model}` in `{url}` is {found}, and {locked} is locked")]
    Unlocked {
        /// The place.
        url: String,
        /// The model.
        model: String,
        /// The number.
        seq: u64,
        /// The digest that is locked.
        locked: Digest,
        /// The digest of what is there.
        found: Digest,
    },
    /// A plan is out of date, or can't be made.
    #[error("nothing more is deleted in `{url}`: {why}")]
    NoGc {
        /// The place.
        url: String,
        /// The reason, as a fragment of a sentence.
        why: String,
        /// What to do.
        hint: &'static str,
    },
    /// The caller stopped it.
    #[error("interrupted: what has arrived is kept, and the next try moves the rest")]
    Interrupted,
    /// An error of the store on this side.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Returns a reason that quotes what somebody else wrote: without control characters, which a terminal would obey, and
/// not longer than a reader wants.
fn shown(why: &str) -> String {
    const MOST: usize = 500;
    let mut text: String = (why.chars().take(MOST))
        .map(|one| if one.is_control() { '\u{fffd}' } else { one })
        .collect();
    if why.chars().nth(MOST).is_some() {
        text.push('…');
    }
    text
}

impl RemoteError {
    pub(crate) fn damaged(name: &str, why: impl Into<String>) -> Self {
        Self::Damaged {
            name: name.to_owned(),
            why: shown(&why.into()),
        }
    }

    /// Returns what to do.
    pub fn hint(&self) -> &str {
        match self {
            Self::Url { .. } => {
                "a remote is `file:///PATH`, `https://HOST/PATH`, `s3://BUCKET/PATH`, `gs://BUCKET/PATH`, \
                 `az://CONTAINER/PATH`, `oci://HOST/REPOSITORY` or `hf://OWNER/REPO`"
            }
            Self::Denied { .. } => {
                "credentials come from the storage's own tools: AWS_ACCESS_KEY_ID or a role of the machine, \
                 GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, `docker login`, HF_TOKEN or `hf auth login`"
            }
            Self::NoRepository { .. } => {
                "log in to an account that may see it (`hf auth login`, HF_TOKEN), or create it: \
                 `hf repos create OWNER/REPO`, `hf repos branch create OWNER/REPO BRANCH`"
            }
            Self::Moved { .. } => "run it again",
            Self::Storage { .. } | Self::Read { .. } => {
                "what has arrived is kept: the same command goes on where it stopped"
            }
            Self::NotARemote { .. } => "name a place that `precast push` wrote to",
            Self::Newer { .. } => "use the precast that wrote it, or a newer one",
            Self::ReadOnly { .. } => "push to the storage behind it, such as `s3://` or `file://`",
            Self::NoRelease { .. } => {
                "`precast ls REMOTE` lists what is there, `precast release ls` what this store has"
            }
            Self::Unfit { .. } => {
                "build a release for this host, or take one for another with `--for TARGET` or `--all`"
            }
            Self::Damaged { .. } | Self::Lost { .. } => {
                "delete this file there, then push the release again from a store that has it"
            }
            Self::Unlocked { .. } => {
                "somebody has replaced it: find out who; `precast pull REMOTE MODEL --lock` locks what is there now"
            }
            Self::NoGc { hint, .. } => hint,
            Self::Interrupted => "run it again",
            Self::Store(error) => error.hint(),
        }
    }
}
