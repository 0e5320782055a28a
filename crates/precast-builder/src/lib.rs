//! Builds the missing programs of a plan: capture, compile, gate, publish.
//!
//! Workers are long-lived Python processes (`worker`) that exchange one JSON document per line ([`protocol`]). The first
//! worker holds the model and captures; every worker compiles. A program with all its artifacts is run in a process of its
//! own and compared with eager ([`gate`]). Its record is published only then, so that only tested programs can be
//! dispatched to. A program that fails never stops the others. The release is published at the end, unless the build was
//! interrupted.
//!
//! | file | holds |
//! |---|---|
//! | `engine` | one build from plan to release |
//! | `schedule` | the graph of tasks: waiting, ready, running, done and failed |
//! | `work` | the threads that run tasks, one for each worker |
//! | `workers` | the start of worker processes |
//! | `check` | problems of a model, found before a build |
//! | `describe` | the modules and inputs of a model, for a new spec |
//! | `task`, `capture`, `compile` | the data of a task; captures and compiles |
//! | `estimate` | the remaining time of a build |
//! | `publish` | programs and artifacts on their way into the store |
//! | `release` | the release of a build: its programs, and those it lacks |
//! | `shims` | the shim of a release: found, or compiled by a worker |
//! | `options`, `model` | arguments and result of a build; the model in a worker |
//! | `worker`, `launcher`, `protocol` | a Python process, its start, and its messages |
//! | `limits` | memory and time limits of a process, and its end |
//! | `lifeline` | the end of child processes when the build is killed |
//! | `scratch` | a build's private folder, and those of killed builds |
//! | `gate` | the comparison of a candidate with eager |
//! | `regate` | reuse of an earlier gate |
//! | `tune` | gating the candidates of a program, and keeping the fastest |
//!
//! Not promised: a sandbox. The worker runs the model's own code with the rights of its user.
//!
//! ## Layers
//!
//! A module uses those of earlier lines only; a test holds it.
//!
//! ```text
//! lifeline, limits, schedule, spec
//! plan
//! estimate, progress, protocol
//! error
//! launcher, scratch
//! shims, worker
//! describe, gate
//! options
//! task, weights, workers
//! model
//! work
//! capture, compile, regate, tune
//! check, publish
//! forecast
//! release
//! engine
//! ```

pub mod plan;
pub mod spec;

mod capture;
mod check;
mod compile;
mod describe;
mod engine;
mod error;
mod estimate;
mod forecast;
pub mod gate;
mod launcher;
mod lifeline;
mod limits;
mod model;
mod options;
pub mod progress;
pub mod protocol;
mod publish;
mod regate;
mod release;
mod schedule;
pub mod scratch;
mod shims;
mod task;
mod tune;
mod weights;
mod work;
mod worker;
mod workers;

pub use self::{
    check::{CheckOptions, CheckedModule, check},
    describe::{DescribeOptions, describe},
    engine::build,
    error::BuildError,
    forecast::{Forecast, forecast},
    launcher::{GateCommand, Launcher, WHAT_IS_OFF},
    limits::machine_memory,
    options::{Built, Options, Outcome, Summary},
};
