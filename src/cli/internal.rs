//! How `precast` starts itself for what may crash. Not part of the command line's promises.

use std::{env, path::PathBuf};

use anyhow::{Context as _, Result};

use super::libtorch::LibtorchArgs;

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

/// How a candidate is checked.
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

/// Answers the question on stdin; the verdict goes to stdout.
pub(super) fn gate(args: &GateArgs) -> Result<u8> {
    args.libtorch.open_for(args.python.as_deref())?;
    let question = serde_json::from_reader(std::io::stdin().lock())?;
    serde_json::to_writer(std::io::stdout().lock(), &crate::gate::answer(&question))?;
    Ok(0)
}

/// Loads the objects on stdin, which may crash or hang.
pub(super) fn try_load(args: &TrialArgs) -> Result<u8> {
    use std::{fs::File, io::Write as _, os::fd::AsFd as _, thread, time};
    let limit = time::Duration::from_secs(args.seconds);
    let parent = args.parent;
    // The start of a thread takes the loader's lock, which a load that hangs keeps.
    let runs = std::sync::Arc::new(std::sync::Barrier::new(2));
    let running = runs.clone();
    let watch = move || {
        runs.wait();
        let begun = time::Instant::now();
        let alone = || rustix::process::Pid::as_raw(rustix::process::getppid()) != parent;
        while begun.elapsed() < limit && !alone() {
            thread::sleep(time::Duration::from_millis(50));
        }
        // With what was forked.
        let group = rustix::process::getpgrp();
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    };
    let mut told = File::from(std::io::stdout().as_fd().try_clone_to_owned()?);
    let answered = thread::Builder::new()
        .spawn(watch)
        .map_err(Into::into)
        .and_then(|_| {
            running.wait();
            args.libtorch.open()
        })
        .and_then(|_| {
            let input = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
            Ok(crate::runtime::command::answer_trial(
                input,
                told.try_clone()?,
            )?)
        });
    if let Err(error) = &answered {
        told.write_all(format!("{error:#}").as_bytes())?;
    }
    answered.map(|()| 0)
}

/// Returns how first loads are tried: by this program, remembered by the store, or by the user where that is read-only.
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
    let named = |name| env::var_os(name).filter(|value| !value.is_empty());
    let cache = named("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(named("HOME")?).join(".cache")));
    let Some(folder) = cache.map(|cache| cache.join("precast")) else {
        return Ok(trial);
    };
    // Where it can't be made, nothing is remembered.
    let _ = std::fs::create_dir_all(&folder);
    Ok(trial.remember(folder.join("loads")))
}
