//! Arguments and result of a build.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use precast_store::{Digest, Store, record::Release};
use serde::Serialize;

use super::{GateCommand, Launcher, protocol::Finding};
use crate::{plan, spec::Spec};

/// The arguments of a build.
pub struct Options<'a> {
    /// The spec to build.
    pub spec: &'a Spec,
    /// The store for the result and for lookups of earlier programs.
    pub store: &'a Store,
    /// Starts the Python workers.
    pub launcher: Launcher,
    /// The command that checks a candidate: see [`gate`](super::gate).
    pub gate: GateCommand,
    /// Parent of the build's private folder, which is removed at the end.
    pub scratch: PathBuf,
    /// The part of the spec to build, and the settings of the command line.
    pub request: plan::PlanRequest,
    /// Maximum number of live workers.
    pub jobs: usize,
    /// Maximum bytes of each worker. Without it, the memory of the machine limits the sum of all workers.
    pub memory: Option<u64>,
    /// Time limit of one capture, compile or check; none for the default limits.
    pub timeout: Option<Duration>,
    /// Where to look for what the store lacks, before it is made.
    pub remote: Option<&'a dyn super::Remote>,
    /// Fail instead of compiling.
    pub locked: bool,
    /// Publishes the result under this name, or not at all.
    pub release: Option<String>,
    /// Modules that a release may be without, where nothing answers them.
    pub without: Vec<String>,
    /// Publish a release even if it lacks programs of the newest one.
    pub allow_lost: bool,
    /// Set from outside to end the build early.
    pub cancel: Arc<AtomicBool>,
}

/// The result of one program.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Outcome {
    /// It was in the store already.
    Hit {
        /// The request key.
        id: Digest,
        /// The remote that it came from in this build; none if the store had it before.
        from: Option<String>,
    },
    /// It was built.
    Built(Built),
    /// It could not be built; the store keeps the log under the key.
    Failed {
        /// The request key; absent where the entry could not be imported, so that it is not known.
        #[serde(rename = "id")]
        key: Option<Digest>,
        /// One line, without a hint.
        message: String,
        /// The user's file and line that caused it, as `model.py:12`.
        location: Option<String>,
        /// A hint for the user.
        hint: String,
        /// Whether the build fails: `fail_policy` is `raise`.
        raise: bool,
    },
    /// It can't be built, and the module works without it.
    Skipped {
        /// The error of the last attempt.
        why: String,
    },
}

impl Outcome {
    /// Returns the program, if it is in the store.
    pub fn id(&self) -> Option<Digest> {
        match self {
            Self::Hit { id, .. } => Some(*id),
            Self::Built(built) => Some(built.id),
            Self::Failed { .. } | Self::Skipped { .. } => None,
        }
    }
}

/// A program that this build made.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Built {
    /// The request key.
    pub id: Digest,
    /// Distinct artifacts it calls.
    pub artifacts: usize,
    /// Of these, compiled for it.
    pub compiled: usize,
    /// The program whose gate holds for it, where it was not gated again.
    pub gated_by: Option<Digest>,
    /// The dimensions in which no smaller request can be padded into its bucket, and why; none with states.
    pub padding_refused: Option<String>,
    /// The sizes that it answers, if the capture has fewer than the spec requests.
    pub narrowed: Option<String>,
}

/// The results of a build.
#[derive(Clone, Debug)]
pub struct Summary {
    /// `module batch=1 seq=32` and its result, in the order of the spec.
    pub programs: Vec<(String, Outcome)>,
    /// For each module that could not be captured, the findings of a check that stop its build.
    pub findings: Vec<(String, Vec<Finding>)>,
    /// Artifacts compiled in this build.
    pub compiled: usize,
    /// Artifacts that came from the remote in this build, in place of a compile.
    pub fetched: usize,
    /// The release that now holds the programs.
    pub release: Option<Release>,
    /// Whether that release was published by this build.
    pub published: bool,
    /// The number of the newest release before this build.
    pub before: Option<u64>,
    /// Programs that the newest release has and this one lacks. Where no release was published, they are the reason.
    pub lost: Vec<String>,
    /// Modules that nothing answers: no release was published, for it would be without them.
    pub unanswered: Vec<String>,
    /// The same, where the caller allows a release without them.
    pub without: Vec<String>,
    /// Modules that have eager for uncovered requests, although the spec does not request it.
    pub eager_unasked: Vec<String>,
    /// The weight sets of the newest release before and of the new one, if they differ.
    pub weights_changed: Option<(Digest, Digest)>,
    /// Number of tokens that `prefill` and `decode` generated as eager did; none if they were not compared.
    pub generated: Option<u64>,
    /// Seconds of the whole build.
    pub seconds: f64,
}

impl Summary {
    /// Returns the number of failed programs, and the number of those under `raise`.
    pub fn failed(&self) -> (usize, usize) {
        let failed = |raised: bool| {
            let is = |outcome: &Outcome| matches!(outcome, Outcome::Failed { raise, .. } if *raise || !raised);
            self.programs
                .iter()
                .filter(|(_, outcome)| is(outcome))
                .count()
        };
        (failed(false), failed(true))
    }
}
