//! The command line, driven in a sandbox: a fake worker and fake artifacts, so that everything but numerics runs in
//! seconds. Snapshots hold exit code, stdout and stderr.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod bad_input;
#[cfg(feature = "torch")]
mod bench;
mod build;
mod check;
#[cfg(feature = "torch")]
mod container;
#[cfg(feature = "torch")]
mod context;
mod control;
mod deps;
mod doctor;
mod export;
#[cfg(feature = "torch")]
mod gate;
mod hostile;
mod init;
mod inspect;
mod json;
mod layers;
#[cfg(feature = "torch")]
mod limits;
#[cfg(feature = "torch")]
mod lost;
#[cfg(feature = "torch")]
mod page;
#[path = "../pty/mod.rs"]
mod pty;
mod release;
#[cfg(feature = "torch")]
mod run;
mod sandbox;
mod schema;
#[path = "../schemas/mod.rs"]
mod schemas;
#[cfg(feature = "torch")]
mod shims;
#[cfg(feature = "torch")]
mod snippets;
mod terminal;
#[cfg(feature = "torch")]
mod torches;
mod trust;
#[cfg(feature = "torch")]
mod tune;
mod version;
mod waiting;
mod wheels;
mod why;
mod workers;
#[cfg(feature = "torch")]
mod worse;
