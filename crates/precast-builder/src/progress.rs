//! Events of a build, for the caller to show. The library prints nothing.

use precast_store::{Digest, record::Tried};
use serde::Serialize;

use crate::plan::Reason;

/// Something that happened in a build. Serialises as one JSON document with an `event` tag.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event<'a> {
    /// The plan is known.
    Planned {
        /// Number of programs that the spec requests.
        programs: usize,
        /// Number of those that are not in the store.
        missing: usize,
    },
    /// Something came from the remote, so that it is not built.
    Fetched {
        /// Name of the remote.
        remote: &'a str,
        /// `program` or `artifact`.
        what: &'a str,
        /// Number of those.
        count: usize,
    },
    /// A program is missing, and why.
    Missing {
        /// Title of the module.
        module: &'a str,
        /// As `batch=8 seq=128`, `dynamic` or `eager`.
        bucket: &'a str,
        /// The strongest reason first.
        reasons: &'a [Reason],
    },
    /// A worker has started, within `seconds`.
    Worker {
        /// Number of the worker, from 0.
        worker: usize,
        /// Version of Python.
        python: &'a str,
        /// Version of torch.
        torch: &'a str,
        /// Seconds from its start to its first answer.
        seconds: f64,
    },
    /// The entry was imported and the model made.
    Opened {
        /// The project's own files that the entry imports or reads.
        sources: usize,
        /// Installed packages that the entry imports.
        packages: usize,
        /// Seconds that the import and the model took.
        seconds: f64,
    },
    /// A warning for the user, once for all programs that it concerns.
    Note {
        /// One line for the user.
        message: &'a str,
    },
    /// The weight set is in the store.
    Weights {
        /// Digest of its content.
        object: Digest,
        /// Bytes of its content.
        bytes: u64,
    },
    /// A worker began a job.
    Begin {
        /// Number of the worker, from 0.
        worker: usize,
        /// Kind of the job, as `capture`, `compile` or `gate`.
        job: &'a str,
        /// The program or segment that it is about, for people.
        what: &'a str,
    },
    /// The job a worker is at has reached a phase.
    Phase {
        /// Number of the worker, from 0.
        worker: usize,
        /// Name of the phase, as `lower` or `link`.
        phase: &'a str,
    },
    /// A worker ended its job.
    End {
        /// Number of the worker, from 0.
        worker: usize,
        /// Kind of the job, as at its begin.
        job: &'a str,
        /// The program or segment that it is about, for people.
        what: &'a str,
        /// Seconds since its begin.
        seconds: f64,
    },
    /// The estimated remaining time of the build; only with an earlier measurement.
    #[serde(rename = "left")]
    Remaining {
        /// Seconds from now.
        seconds: f64,
    },
    /// A task is repeated with no other task running: it ran out of memory, or eager seemed faster.
    Again {
        /// Number of the worker, from 0.
        worker: usize,
        /// Kind of the job, as at its begin.
        job: &'a str,
        /// The program or segment that it is about, for people.
        what: &'a str,
        /// The reason, in one line.
        message: &'a str,
    },
    /// A program was captured into steps that call this many distinct artifacts, of which `missing` must be compiled.
    Captured {
        /// Title of the module.
        module: &'a str,
        /// As `batch=8 seq=128`, `dynamic` or `eager`.
        bucket: &'a str,
        /// Calls of artifacts in one run.
        steps: usize,
        /// Distinct artifacts that they call.
        artifacts: usize,
        /// Artifacts that are not in the store.
        missing: usize,
    },
    /// A program was compiled with several option sets: a row for each candidate, as in receipts.
    Tuned {
        /// Title of the module.
        module: &'a str,
        /// As `batch=8 seq=128` or `dynamic`.
        bucket: &'a str,
        /// The candidates, the module's own option set first.
        tried: &'a [Tried],
    },
    /// A program is not gated again: an earlier gate, of the program `by`, had the same inputs.
    GatedBefore {
        /// Title of the module.
        module: &'a str,
        /// As `batch=8 seq=128` or `dynamic`.
        bucket: &'a str,
        /// Request key of the program with the earlier gate.
        by: Digest,
    },
    /// A program passed its gate and is in the store.
    Published {
        /// Title of the module.
        module: &'a str,
        /// As `batch=8 seq=128`, `dynamic` or `eager`.
        bucket: &'a str,
        /// The request key.
        id: Digest,
        /// Whether eager was faster by more than noise, and answers instead.
        slower: bool,
    },
    /// A program can't be built, and its model works without it.
    LeftOut {
        /// Title of the module.
        module: &'a str,
        /// As `batch=8 seq=128`, `dynamic` or `eager`.
        bucket: &'a str,
        /// The reason, in one line.
        message: &'a str,
    },
    /// A builder on another machine said something.
    Builder {
        /// Number of the builder, from 0.
        builder: usize,
        /// Name of its machine.
        node: &'a str,
        /// Its line: an event of this list, `{"log": TEXT}` for other text, or an error, a warning or a note.
        said: &'a serde_json::Value,
    },
    /// A program failed.
    Failed {
        /// Title of the module.
        module: &'a str,
        /// As `batch=8 seq=128`, `dynamic` or `eager`.
        bucket: &'a str,
        /// The key under which the store keeps the log.
        id: Digest,
        /// The reason, in one line.
        message: &'a str,
        /// The user's file and line that caused it, as `model.py:12`.
        location: Option<&'a str>,
    },
}

/// Receives the events of a build. Called from several threads.
pub trait Progress: Sync {
    /// Takes one event; a slow answer holds up the build.
    fn event(&self, event: &Event<'_>);
}

/// Hears nothing.
pub struct Silent;

impl Progress for Silent {
    fn event(&self, _: &Event<'_>) {}
}
