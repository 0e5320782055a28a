//! Hidden commands: `precast` starts itself for work that may crash. They are no part of the public interface.

use std::{
    env,
    fs::File,
    io::{self, Write as _},
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _},
    path::PathBuf,
    sync::{Arc, Barrier},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::process::{self, Pid};

use super::{folders, libtorch::LibtorchArgs};

pub(super) const GATE: &str = "__gate";

/// The argument of the helper that tries first loads.
pub(super) const TRIAL: &str = crate::runtime::command::TRIAL;

#[derive(clap::Args)]
pub(super) struct TrialArgs {
    /// End the process after so many seconds.
    seconds: u64,
    /// End the process when it is no longer a child of this process.
    parent: i32,
    #[command(flatten)]
    libtorch: LibtorchArgs,
}

/// The arguments of a check of a candidate.
#[derive(clap::Args)]
pub(super) struct GateArgs {
    /// The Python whose torch compiled it.
    #[arg(long)]
    python: Option<PathBuf>,
    #[command(flatten)]
    libtorch: LibtorchArgs,
}

/// Returns this program.
pub(super) fn own_program() -> Result<PathBuf> {
    env::current_exe().context("can't find this program's own file")
}

/// Answers the request on stdin, and writes the report to stdout.
pub(super) fn gate(args: &GateArgs) -> Result<u8> {
    args.libtorch.open_for(args.python.as_deref())?;
    let question = serde_json::from_reader(io::stdin().lock())?;
    serde_json::to_writer(io::stdout().lock(), &crate::gate::answer(&question))?;
    Ok(0)
}

/// Loads the objects on stdin, which may crash or hang.
pub(super) fn try_load(args: &TrialArgs) -> Result<u8> {
    let (limit, parent) = (Duration::from_secs(args.seconds), args.parent);
    // The start of a thread takes the loader's lock, which a load that hangs keeps.
    let started = Arc::new(Barrier::new(2));
    let watching = started.clone();
    let watch = move || {
        watching.wait();
        let begun = Instant::now();
        let orphan = || Pid::as_raw(process::getppid()) != parent;
        while begun.elapsed() < limit && !orphan() {
            thread::sleep(Duration::from_millis(50));
        }
        // Ends processes that the load forked, too.
        let _ = process::kill_process_group(process::getpgrp(), process::Signal::KILL);
    };
    let mut out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let load = || {
        thread::Builder::new().spawn(watch)?;
        started.wait();
        args.libtorch.open()?;
        let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
        Ok(crate::runtime::command::answer_trial(
            input,
            out.try_clone()?,
        )?)
    };
    let loaded: Result<()> = load();
    if let Err(error) = &loaded {
        out.write_all(format!("{error:#}").as_bytes())?;
    }
    loaded.map(|()| 0)
}

/// Returns the trial of first loads by this program. Its results are kept in the store, or in the user's cache where
/// the store is read-only.
pub(super) fn trial(
    store: &crate::Store,
    context: &super::Context,
) -> Result<crate::runtime::Trial> {
    use crate::runtime::{Trial, command::trial_memory};
    let trial = Trial::with(own_program()?).stop(context.cancel.clone());
    let memory = trial_memory(store.path());
    let folder = memory.parent().unwrap_or(store.path());
    if rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok() {
        return Ok(trial.remember(memory));
    }
    let Some(folder) = folders::cache() else {
        return Ok(trial);
    };
    // If it can't be created, no result is kept. Nor in one that others can write.
    let mut folders = std::fs::DirBuilder::new();
    let _ = folders.recursive(true).mode(0o755).create(&folder);
    Ok(trial.remember(folder.join("loads")))
}
