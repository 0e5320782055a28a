//! Builds the missing programs of a plan: capture, compile, gate, publish.
//!
//! Workers are long-lived Python processes (`worker`) that exchange one JSON document per line ([`protocol`]). The
//! first worker holds the model and captures; every worker compiles. A program with all its artifacts runs in a
//! separate process and is compared with eager ([`gate`]). Its record is published only after that, so that only tested
//! programs can be dispatched to. A program that fails never stops the others. The release is published at the end,
//! unless the build was interrupted.
//!
//! | file | holds |
//! |---|---|
//! | `engine` | one build from plan to release |
//! | `schedule` | a graph of tasks: waiting, ready, running, done and failed |
//! | `executor` | access of the threads to the schedule: taking a task, and waiting for one |
//! | `task` | the tasks of a build, and their programs |
//! | `slot` | a thread's slot for a worker process |
//! | `tasks` | the tasks as functions: capture, compile, gate, shim |
//! | `work` | the threads: each runs the next task, and keeps its result for other tasks |
//! | `publish` | publication of artifacts, programs and failures |
//! | `release` | the release of a build: its programs, and the missing ones |
//! | `workers` | the start of worker processes |
//! | `check` | problems of a model, found before a build |
//! | `describe` | the modules and inputs of a model, for a new spec |
//! | `estimate` | the remaining time of a build |
//! | `shims` | the shim of a release: found, or compiled by a worker |
//! | `remote`, `sharing` | another machine's builds, by key; what a build takes from them, and how several share their work |
//! | `options`, `model` | arguments and result of a build; the model in a worker |
//! | `chain` | `prefill` and `decode` of a release in one session, compared with eager |
//! | `checkpoint` | the files of a weight set, in one or in several |
//! | `weights`, `weight_file` | the weight set of a release; how a file of weights differs from the weights before |
//! | `worker`, `launcher`, `protocol` | a Python process, its start, and its messages |
//! | `limits` | memory and time limits of a process, and its termination |
//! | `lifeline` | termination of child processes when the build is killed |
//! | `scratch` | a build's private folder, and those of killed builds |
//! | `gate` | the comparison of a candidate with eager, and the choice of the fastest |
//!
//! Not promised: a sandbox. The worker runs the model's own code with the rights of its user.
//!
//! ## Layers
//!
//! A module uses only modules of earlier lines. A test checks this.
//!
//! ```text
//! lifeline, limits, schedule, spec
//! plan
//! names, progress, protocol
//! error
//! checkpoint, executor, launcher, scratch, task
//! weight_file
//! estimate, shims, worker
//! remote
//! describe, options
//! sharing
//! workers
//! model
//! slot
//! gate
//! chain, publish, weights
//! tasks
//! check, work
//! forecast, release
//! engine
//! ```

pub mod plan;
pub mod spec;

mod chain;
mod check;
mod checkpoint;
mod describe;
mod engine;
mod error;
mod estimate;
mod executor;
mod forecast;
pub mod gate;
mod launcher;
mod lifeline;
mod limits;
mod model;
mod names;
mod options;
pub mod progress;
pub mod protocol;
mod publish;
mod release;
mod remote;
mod schedule;
pub mod scratch;
mod sharing;
mod shims;
mod slot;
mod task;
mod tasks;
mod weight_file;
mod weights;
mod work;
mod worker;
mod workers;

pub use self::{
    check::{CheckOptions, CheckedModule, check},
    checkpoint::Checkpoint,
    describe::{DescribeOptions, describe},
    engine::build,
    error::BuildError,
    forecast::{Forecast, forecast},
    launcher::{Forks, GateCommand, Launcher, WHAT_IS_OFF},
    limits::machine_memory,
    options::{Built, Options, Outcome, Summary},
    remote::{Remote, Turn},
    task::LARGE as LARGE_WEIGHTS,
};
