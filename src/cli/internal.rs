//! How `precast` starts the half of itself that has libtorch. Not part of the command line's promises.

use std::{env, os::unix::process::CommandExt, path::PathBuf, process};

use anyhow::{Context as _, Result};

use super::{Command, Context, exit::Usage};
pub(super) const GATE: &str = "__gate";

/// The program that has libtorch.
const TORCH: &str = "precast-torch";

/// The argument of the helper that tries first loads.
#[cfg(feature = "torch")]
pub(super) const TRIAL: &str = crate::runtime::TRIAL;
#[cfg(not(feature = "torch"))]
pub(super) const TRIAL: &str = "__trial";

#[derive(clap::Args)]
#[cfg_attr(not(feature = "torch"), allow(dead_code))]
pub(super) struct TrialArgs {
    /// End the process after so many seconds, should its parent be gone.
    seconds: u64,
}

/// Returns the program that runs artifacts: it lies beside this one.
pub(super) fn with_torch() -> Result<PathBuf> {
    let own = env::current_exe().context("can't find this program's own file")?;
    Ok(own.with_file_name(TORCH))
}

/// Becomes the program that has libtorch, with the arguments of this one.
pub(super) fn hand_over(_: &Command, _: &Context) -> Result<u8> {
    let program = with_torch()?;
    let mut command = process::Command::new(&program);
    let error = command.args(env::args_os().skip(1)).exec();
    Err(Usage {
        message: format!(
            "can't start `{}`, which runs artifacts: {error}",
            program.display()
        ),
        hint: format!("install `{TORCH}` beside `precast`"),
    }
    .into())
}

/// Checks the candidate on stdin; the verdict goes to stdout.
#[cfg(feature = "torch")]
pub(super) fn gate() -> Result<u8> {
    let candidate = serde_json::from_reader(std::io::stdin().lock())?;
    serde_json::to_writer(std::io::stdout().lock(), &crate::gate::check(&candidate))?;
    Ok(0)
}

/// Loads the artifact on stdin, which may crash or hang.
#[cfg(feature = "torch")]
pub(super) fn try_load(args: &TrialArgs) -> Result<u8> {
    let limit = std::time::Duration::from_secs(args.seconds);
    std::thread::Builder::new().spawn(move || {
        std::thread::sleep(limit);
        process::abort();
    })?;
    crate::runtime::answer_trial(std::io::stdin().lock())?;
    Ok(crate::runtime::TRIED)
}

/// Returns how first loads are tried: by this program, remembered by the store, or by the user where that is read-only.
#[cfg(feature = "torch")]
pub(super) fn trial(store: &crate::Store) -> Result<crate::runtime::Trial> {
    use crate::runtime::{Trial, trial_memory};
    let trial = Trial::with(with_torch()?);
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
