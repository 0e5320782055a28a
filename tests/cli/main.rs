//! The command line, driven in a sandbox: a fake worker and fake artifacts, so that everything but numerics runs in
//! seconds. Snapshots hold exit code, stdout and stderr.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod bad_input;
mod bench;
mod build;
mod check;
mod container;
mod context;
mod control;
mod deps;
mod doctor;
mod export;
mod gate;
mod hostile;
mod init;
mod inspect;
mod json;
mod layers;
mod limits;
mod lost;
mod page;
#[path = "../pty/mod.rs"]
mod pty;
mod release;
mod run;
mod sandbox;
mod schema;
#[path = "../schemas/mod.rs"]
mod schemas;
mod shims;
mod snippets;
mod terminal;
mod torches;
mod trust;
mod tune;
mod version;
mod waiting;
mod wheels;
mod why;
mod workers;
mod worse;
