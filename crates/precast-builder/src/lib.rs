//! Makes exist what the plan says is missing: capture, compile, gate, publish.
//!
//! Workers are Python processes that stay alive (`worker`) and speak one JSON document per line ([`protocol`]). The
//! first worker holds the model and captures; every worker compiles. A program whose artifacts are all there is run in
//! a process of its own and compared with eager ([`gate`]) before its record is published, so nothing that was not seen
//! to work can be dispatched to. One failing program never stops the others. A release is published at the end, and
//! only by a build that was not interrupted.
//!
//! | file | holds |
//! |---|---|
//! | `engine` | one build from plan to release |
//! | `schedule` | the graph of tasks: what is waiting, ready, running, done and failed |
//! | `work` | the threads that run tasks, one for each worker |
//! | `workers` | starting worker processes |
//! | `check` | asking what will break, before anything is built |
//! | `describe` | asking what a spec for a model would say |
//! | `task`, `capture`, `compile` | what a task works on, and how it is done |
//! | `estimate` | how long the build will still take |
//! | `publish` | programs and artifacts, as the store gets them |
//! | `release` | the release of a build: what it names, and what it is without |
//! | `options`, `model` | what a build is given and returns; making the model in a worker |
//! | `worker`, `launcher`, `protocol` | a Python process, how it starts, and its messages |
//! | `limits` | what a process may take, and how it ends |
//! | `lifeline` | how it ends with a build that is killed |
//! | `scratch` | a build's private folder, and what killed builds left |
//! | `gate` | comparing a candidate with eager |
//! | `regate` | when an earlier gate holds for a program |
//! | `sign_test` | a sign test: which of two programs is the faster one |
//! | `candidates` | the option sets that a program can be compiled with |
//! | `tune` | gating the candidates of a program, and keeping the fastest |
//!
//! What is not promised: a sandbox. The worker runs the model's own code with the rights of its user.
//!
//! ## Layers
//!
//! A module uses those of earlier lines only; a test holds it.
//!
//! ```text
//! lifeline, limits, schedule, sign_test, spec
//! plan
//! estimate, progress, protocol
//! error
//! launcher, scratch
//! gate, worker
//! describe
//! candidates, options
//! task, weights, workers
//! model
//! work
//! capture, compile, regate, tune
//! check, publish
//! release
//! engine
//! ```

pub mod plan;
pub mod spec;

mod candidates;
mod capture;
mod check;
mod compile;
mod describe;
mod engine;
mod error;
mod estimate;
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
mod scratch;
mod sign_test;
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
    launcher::Launcher,
    limits::machine_memory,
    options::{Built, Options, Outcome, Summary},
    scratch::sweep,
};

/// The torch that this binary is made for.
pub const TORCH: &str = "2.11.0";
