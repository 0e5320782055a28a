//! The arguments of the commands that read a spec, and the hints that their output shares.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    build::{Checkpoint, LARGE_WEIGHTS, machine_memory},
    plan::PlanRequest,
    spec::{CommandLine, Spec, SpecError},
};

/// The hint for a bucket that no smaller request can be padded into.
pub(super) const PADDING: &str = "list the sizes that requests have as buckets, or set `dynamic`; a mask among the \
    inputs can make the module ignore its padding";

/// The purpose of eager that no spec asked for.
pub(super) const EAGER: &str =
    "answers sizes that no bucket covers; `fail_policy = \"raise\"` leaves it out";

/// The path of the spec: an argument, or `-f`.
#[derive(clap::Args)]
pub(super) struct SpecFile {
    /// The spec
    #[arg(
        default_value = "precast.toml",
        value_name = "SPEC",
        conflicts_with = "file"
    )]
    spec: PathBuf,
    /// The same, as an option
    #[arg(short, long, value_name = "SPEC")]
    file: Option<PathBuf>,
}

impl SpecFile {
    pub(super) fn path(&self) -> &Path {
        self.file.as_deref().unwrap_or(&self.spec)
    }
}

/// The spec, and the programs of it.
#[derive(clap::Args)]
pub(super) struct SpecArgs {
    #[command(flatten)]
    pub(super) file: SpecFile,
    /// Only modules or programs that match, as `encode` or `encode batch=8 *`
    #[arg(long, value_name = "GLOB")]
    pub(super) only: Option<String>,
    /// Decide a key of [compile] for this run, as `mode=max-autotune`, or `encode.mode=default` for one module; values
    /// are TOML, quotes around a word can be left out. May be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
    /// Try several option sets for every program, and keep the fastest that passes its gate; takes several times as
    /// long
    #[arg(long)]
    pub(super) tune: bool,
}

impl SpecArgs {
    pub(super) fn request(&self, spec: &Spec) -> Result<PlanRequest, SpecError> {
        Ok(PlanRequest {
            only: self.only.clone(),
            command_line: CommandLine::parse(&self.set, spec)?,
            tune: self.tune,
        })
    }
}

/// Returns how many workers compile at once, by cores, memory and weights.
pub(super) fn default_jobs(spec: &Spec) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let files = spec.model.weights.file().map(Checkpoint::open);
    // A file that can't be read is an error of the build.
    let files = files.and_then(Result::ok);
    let sizes = files.iter().flat_map(Checkpoint::files).map(fs::metadata);
    let weights = sizes.filter_map(Result::ok).map(|meta| meta.len()).sum();
    jobs_for(cores, machine_memory(), weights)
}

/// Returns one worker per core, or fewer where memory is short: a worker with torch and a model takes gigabytes. Beside
/// large weights, all workers together take at most 0.3 times the bytes of the weights, or there is one worker.
fn jobs_for(cores: usize, memory: Option<u64>, weights: u64) -> usize {
    const PER_WORKER: u64 = 3 << 30;
    /// Private memory of a worker that compiles regions.
    const OWN: u64 = 1 << 30;
    let fit = memory.map_or(u64::MAX, |bytes| bytes / PER_WORKER);
    let beside = if weights < LARGE_WEIGHTS {
        u64::MAX
    } else {
        weights / 10 * 3 / OWN
    };
    cores
        .min(usize::try_from(fit.min(beside)).unwrap_or(cores))
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::jobs_for;

    #[test]
    fn workers_by_cores_memory_and_weights() {
        let gib = |count: u64| count << 30;
        assert_eq!(jobs_for(16, Some(gib(128)), 0), 16);
        assert_eq!(jobs_for(16, Some(gib(24)), 0), 8);
        assert_eq!(jobs_for(16, Some(gib(1)), 0), 1);
        assert_eq!(jobs_for(4, None, 0), 4);
        assert_eq!(jobs_for(1, Some(gib(512)), 0), 1);
        assert_eq!(jobs_for(16, Some(gib(128)), gib(1) - 1), 16);
        assert_eq!(jobs_for(16, Some(gib(128)), gib(2)), 1);
        assert_eq!(jobs_for(16, Some(gib(128)), gib(15)), 4);
    }
}
