//! Events of a build, for the caller to show. The library prints nothing.

use precast_store::{Digest, record::Tried};
use serde::Serialize;

use crate::plan::Reason;

/// Something that happened in a build. Serialises as one JSON document with an `event` tag.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event<'a> {
    /// The plan is known: how many programs there are and how many are missing.
    Planned { programs: usize, missing: usize },
    /// A program is missing, and why.
    Missing {
        module: &'a str,
        bucket: &'a str,
        reasons: &'a [Reason],
    },
    /// A worker has started; `seconds` is how long that took.
    Worker {
        worker: usize,
        python: &'a str,
        torch: &'a str,
        seconds: f64,
    },
    /// The entry was imported and the model made.
    Opened {
        sources: usize,
        packages: usize,
        seconds: f64,
    },
    /// A warning for the user, once for all programs that it concerns.
    Note { message: &'a str },
    /// The weight set is in the store.
    Weights { object: Digest, bytes: u64 },
    /// A worker began a job.
    Begin {
        worker: usize,
        job: &'a str,
        what: &'a str,
    },
    /// The job a worker is at has reached a phase.
    Phase { worker: usize, phase: &'a str },
    /// A worker ended its job.
    End {
        worker: usize,
        job: &'a str,
        what: &'a str,
        seconds: f64,
    },
    /// About how long the build will still take; only where there is anything to go by.
    #[serde(rename = "left")]
    Remaining { seconds: f64 },
    /// It is done once more with no other task running: memory was short, or eager seemed to be the faster one.
    Again {
        worker: usize,
        job: &'a str,
        what: &'a str,
        message: &'a str,
    },
    /// A program was captured into steps that call this many distinct artifacts, of which `missing` must be compiled.
    Captured {
        module: &'a str,
        bucket: &'a str,
        steps: usize,
        artifacts: usize,
        missing: usize,
    },
    /// A program was compiled with several option sets: a row for each candidate, as in receipts.
    Tuned {
        module: &'a str,
        bucket: &'a str,
        tried: &'a [Tried],
    },
    /// A program is not gated again: an earlier gate, of the program `by`, looked at the same things.
    GatedBefore {
        module: &'a str,
        bucket: &'a str,
        by: Digest,
    },
    /// A program passed its gate and is in the store.
    Published {
        module: &'a str,
        bucket: &'a str,
        id: Digest,
        /// Whether eager was faster by more than noise, and is to answer in its place.
        slower: bool,
    },
    /// A program can't be built, and its model does without it.
    LeftOut {
        module: &'a str,
        bucket: &'a str,
        message: &'a str,
    },
    /// A program failed.
    Failed {
        module: &'a str,
        bucket: &'a str,
        id: Digest,
        message: &'a str,
        location: Option<&'a str>,
    },
}

/// Hears what a build does. Called from several threads.
pub trait Progress: Sync {
    fn event(&self, event: &Event<'_>);
}

/// Hears nothing.
pub struct Silent;

impl Progress for Silent {
    fn event(&self, _: &Event<'_>) {}
}
