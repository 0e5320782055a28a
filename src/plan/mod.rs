//! What must exist: the programs a spec asks for, their keys, and why each one is or is not there yet.

mod canon;
mod diff;
mod history;
mod key;
mod reason;
mod sources;

use std::path::PathBuf;

pub use self::{
    canon::{Canon, Shared, Sink},
    diff::{Field, diff},
    history::History,
    key::{ArtifactKey, Common, Pass, RequestKey},
    reason::{Reason, reasons},
    sources::{StatCache, bystanders, changed_source, known, refresh},
};
use crate::{Target, record::Entry, store::StoreError};

/// Why a plan can't be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("can't read `{}`", path.display())]
    Source {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What must be known of the outside before keys can be computed.
#[derive(Clone, Debug)]
pub struct Known {
    pub entry: Entry,
    pub target: Target,
}
