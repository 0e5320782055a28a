//! The command line, driven in a sandbox: a fake worker and fake artifacts, so that everything but numerics runs in
//! seconds. Snapshots hold exit code, stdout and stderr.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod bad_input;
mod bench;
mod browser;
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
mod huge;
mod init;
mod inspect;
mod json;
mod keeping;
mod layers;
mod limits;
mod lost;
mod machines;
mod makefile;
mod page;
#[path = "../pty/mod.rs"]
mod pty;
mod reading;
mod reading_json;
mod reading_terminal;
mod release;
mod remote;
mod run;
#[path = "../sample/mod.rs"]
mod sample;
mod sandbox;
#[allow(dead_code, reason = "each test target uses a part of it")]
#[path = "../torture/scene.rs"]
mod scene;
mod schema;
#[path = "../schemas/mod.rs"]
mod schemas;
mod shims;
mod snippets;
mod terminal;
mod torches;
mod trust;
mod tune;
mod twice;
mod version;
mod waiting;
mod wheels;
mod why;
mod workers;
mod worse;
