//! Errors of a build, with hints.

use std::{
    io,
    path::{Path, PathBuf},
};

use precast_store::{
    Digest, StoreError,
    out_of_memory::says_out_of_memory,
    target::{TRIED, Unfit},
};

use super::protocol::{REPORT, WorkerError};
pub(super) use crate::plan::OUT_OF_MEMORY;
use crate::{plan::PlanError, spec::SpecError};

/// The error of a build, or of one program of it.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The interpreter that was named can't be started.
    #[error("can't start Python `{}`", program.display())]
    NoPython {
        /// The interpreter's path, or its name for a search in `PATH`.
        program: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The process of a gate can't be started.
    #[error("can't start the gate `{}`", program.display())]
    NoGate {
        /// Path of its program.
        program: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The interpreter has a torch that is too old, or newer than the tried versions.
    #[error("Python at `{}` has torch {found}, which {why}", program.display())]
    WrongTorch {
        /// Path of the interpreter.
        program: PathBuf,
        /// Version of the torch that it imports.
        found: String,
        /// The reason why it is not used.
        why: Unfit,
    },
    /// The interpreter has another torch than the libtorch that is to be used.
    #[error("Python at `{}` has torch {found}, and libtorch is {wanted}", program.display())]
    OtherTorch {
        /// Path of the interpreter.
        program: PathBuf,
        /// Full version of the torch that it imports.
        found: String,
        /// Full version of the libtorch.
        wanted: String,
    },
    /// The worker answered a request with an error.
    #[error("{0}")]
    Worker(Box<WorkerError>),
    /// The model can't be made, which no program has the log of.
    #[error("{error}")]
    Model {
        /// The worker's error.
        error: Box<WorkerError>,
        /// Digest of the Python stack.
        log: Digest,
    },
    /// The worker's process ended before its answer.
    #[error("the worker ended in the middle of a request ({status})")]
    WorkerDied {
        /// Exit status or signal, in words.
        status: String,
        /// The end of its log.
        log: String,
    },
    /// The worker was ended because its answer took too long.
    #[error("the worker did not answer within {seconds} s")]
    WorkerHung {
        /// The time limit.
        seconds: u64,
        /// The end of its log.
        log: String,
    },
    /// The worker was ended because of its memory.
    #[error("the worker took too much memory: {what}")]
    WorkerGreedy {
        /// The memory that it took, and the limit, in words.
        what: String,
        /// The end of its log.
        log: String,
    },
    /// The model wrote to a descriptor of the worker, or forked it.
    #[error("the model disturbed its worker: {what}")]
    Disturbed {
        /// The operation, in words.
        what: String,
        /// The end of the worker's log.
        log: String,
    },
    /// An unreadable message, or a worker of another version.
    #[error("the worker and this binary don't understand each other: {message}")]
    Protocol {
        /// The defect of the message.
        message: String,
    },
    /// The build's private folder can't be made, read or written.
    #[error("can't use the scratch folder `{}`", path.display())]
    Scratch {
        /// The folder, or the file in it.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A candidate gave another answer than eager, or ended without one.
    #[error("the artifact failed its gate: {message}")]
    Gate {
        /// The output and its difference, or how its process ended.
        message: String,
        /// Standard error of the process that ran it.
        log: String,
        /// Whether all that is wrong is floats beyond their tolerances.
        far: bool,
    },
    /// Its shared object has a hazard for the loader.
    #[error("the {of}'s shared object is refused: {what}")]
    UnsafeObject {
        /// `artifact` or `shim`.
        of: &'static str,
        /// The hazards, in words.
        what: String,
    },
    /// The spec's weights can't be read as safetensors, or an index does not fit its files.
    #[error("can't use `{}` as weights: {message}", path.display())]
    BadWeights {
        /// The path in the spec.
        path: PathBuf,
        /// The defect.
        message: String,
    },
    /// The spec's weight file failed the smoke run of the existing programs.
    #[error("the weights in `{}` are refused: {message}", path.display())]
    Weights {
        /// Path of the file.
        path: PathBuf,
        /// The tensor or the output, and its defect.
        message: String,
    },
    /// The modules `prefill` and `decode` differ from eager when one session calls them.
    #[error("the release is refused: {message}")]
    Chain {
        /// The call and the output, and its difference.
        message: String,
    },
    /// The digest of a source at the end of the build differs from the plan.
    #[error("`{path}` changed while it was being compiled")]
    SourceChanged {
        /// Path of the source, relative to the spec's folder.
        path: String,
    },
    /// The build may not compile, and a program is missing.
    #[error("{missing} of {total} programs are missing and `--locked` forbids compiling")]
    Locked {
        /// Programs that are not in the store.
        missing: usize,
        /// Number of programs that the spec requests.
        total: usize,
    },
    /// The build may not compile, and no release of the model has the shim for this torch.
    #[error("no release has the shim for torch {torch}, and `--locked` forbids compiling")]
    LockedShim {
        /// Full version of the torch.
        torch: String,
    },
    /// The requested release has a name, and programs are missing.
    #[error("release `{name}` would lack {missing} of {total} programs")]
    Incomplete {
        /// Name that the release was to have.
        name: String,
        /// Programs that are not in the store.
        missing: usize,
        /// Number of programs that the spec requests.
        total: usize,
    },
    /// Some modules have no program at all, so no release was published.
    #[error("nothing answers {}: no release was published", listed(modules))]
    Unanswered {
        /// Their names.
        modules: Vec<String>,
    },
    /// The release would lack programs that the newest one has, so it was not published.
    #[error(
        "no release was published: it would lack {}, which the newest one has",
        few(programs)
    )]
    Lost {
        /// Their names.
        programs: Vec<String>,
    },
    /// Some programs could not be built.
    #[error("{failed} of {total} programs failed")]
    Failed {
        /// Number of failed programs.
        failed: usize,
        /// Number of programs that the spec requests.
        total: usize,
    },
    /// The model lacks a name of the spec.
    #[error(transparent)]
    Spec(Box<SpecError>),
    /// The caller ended the build.
    #[error("interrupted")]
    Interrupted,
    /// The store refused a read or a write.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The plan can't be made.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl BuildError {
    /// Returns a hint for the user.
    pub fn hint(&self) -> String {
        let text = match self {
            Self::NoPython { .. } => {
                "name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`"
            }
            Self::NoGate { .. } => {
                "a build starts its own program for each gate: leave the file in its place, and see that processes can be started"
            }
            Self::WrongTorch { why, .. } => return wrong_torch(*why),
            Self::OtherTorch { .. } => {
                "name the interpreter of that libtorch with `--python PATH`, and leave out `--libtorch`"
            }
            Self::Worker(error) | Self::Model { error, .. } => return error.hint(),
            Self::WorkerDied { .. } => {
                "its log says what it did last; where memory was short, fewer workers help: `-j 1`"
            }
            Self::WorkerHung { .. } => {
                "its log says where it was; `--timeout SECONDS` gives it longer"
            }
            Self::WorkerGreedy { .. } => {
                "`-j N` runs fewer workers at once, `--memory SIZE` says what each may take"
            }
            Self::Disturbed { .. } => {
                "the model may write only to descriptors that it opened, and a process that it forks must end with `os._exit`"
            }
            Self::Protocol { .. } => REPORT,
            Self::Scratch { .. } => "name another folder with `TMPDIR`",
            // A difference names an output; anything else would be no better under other tolerances.
            Self::Gate { message, .. }
                if !["output `", "state `"]
                    .iter()
                    .any(|of| message.contains(of)) =>
            {
                "its log says what it did last; `enabled = false` leaves the module to eager"
            }
            Self::Gate { .. } => {
                "if this error is harmless, widen `[module.gate]`; `enabled = false` leaves the module to eager"
            }
            Self::UnsafeObject { .. } => {
                "look for linker flags in `LDFLAGS`, `CXX` and the options of `[module.compile]`"
            }
            Self::BadWeights { .. } => {
                "`weights` in [model] names a safetensors file, an index of several, or their folder, from the folder of \
                 the spec"
            }
            Self::Weights { .. } => {
                "the newest release stays what it was; write the file again, or set `healthcheck = false` for modules that may \
                 answer so"
            }
            Self::Chain { .. } => {
                "the newest release stays what it was; if this error is harmless, widen `[module.gate]`, or set \
                 `healthcheck = false` for `prefill` or `decode`"
            }
            Self::SourceChanged { .. } => "run `precast build` again",
            Self::Locked { .. } | Self::LockedShim { .. } => {
                "run `precast build` where compiling is allowed, then deploy the store"
            }
            Self::Incomplete { .. } => {
                "nothing was published: fix what failed and build again, or build without `--release`"
            }
            Self::Unanswered { modules } => {
                let without = modules
                    .iter()
                    .map(|module| format!(" --without '{module}'"));
                return format!(
                    "the newest release stays what it was; fix what failed (`precast ls --state failed`), or publish one that \
                     has nothing for it: `precast build{}`",
                    without.collect::<String>()
                );
            }
            Self::Lost { .. } => {
                "the newest release stays what it was; fix what failed (`precast ls --state failed`), or publish without them: \
                 `precast build --allow-lost`"
            }
            Self::Failed { .. } => "`precast log ID` prints the log of a failed program",
            Self::Spec(_) => "change the spec where it is marked",
            Self::Interrupted => "what a build finished is kept: run it again to go on",
            Self::Store(error) => return error.hint().to_owned(),
            Self::Plan(error) => return error.hint(),
        };
        text.to_owned()
    }

    /// Returns whether the build ends with this: no other program can fare better, or the spec names something that
    /// the model does not have.
    pub(super) fn ends_build(&self) -> bool {
        match self {
            Self::Interrupted
            | Self::Store(_)
            | Self::NoPython { .. }
            | Self::NoGate { .. }
            | Self::Scratch { .. } => true,
            Self::Worker(error) => matches!(error.code.as_str(), "no_module" | "no_method"),
            _ => false,
        }
    }

    /// Returns whether only the index of the store is damaged. It can be rebuilt.
    pub(super) fn is_index(&self) -> bool {
        match self {
            Self::Store(error) | Self::Plan(PlanError::Store(error)) => error.is_index(),
            _ => false,
        }
    }

    /// Returns whether memory was short, which it may not be when nothing else is done.
    pub(super) fn short_of_memory(&self) -> bool {
        match self {
            Self::WorkerGreedy { .. } => true,
            Self::Gate { message, .. } => says_out_of_memory(message),
            _ => self.code() == OUT_OF_MEMORY,
        }
    }

    /// Returns the code of the failure for failure records. It is stable.
    pub fn code(&self) -> &str {
        match self {
            Self::Worker(error) | Self::Model { error, .. } => &error.code,
            Self::WorkerDied { .. } => "worker_died",
            Self::WorkerHung { .. } => "worker_hung",
            Self::WorkerGreedy { .. } => "worker_greedy",
            Self::Disturbed { .. } => "worker_disturbed",
            Self::Gate { .. } => "gate",
            Self::UnsafeObject { .. } => "unsafe_object",
            Self::SourceChanged { .. } => "source_changed",
            _ => "build",
        }
    }

    /// Returns the line of the user's own code that caused it, as `model.py:12`, for a model in the folder `root`.
    pub fn location(&self, root: &Path) -> Option<String> {
        match self {
            Self::Worker(error) | Self::Model { error, .. } => error.location.clone(),
            Self::WorkerDied { log, .. }
            | Self::WorkerHung { log, .. }
            | Self::WorkerGreedy { log, .. } => stack_location(log, root),
            _ => None,
        }
    }

    /// Returns the log that belongs to this error; empty when there is none.
    pub fn log(&self) -> &str {
        match self {
            Self::Worker(error) | Self::Model { error, .. } => &error.trace,
            Self::WorkerDied { log, .. }
            | Self::WorkerHung { log, .. }
            | Self::WorkerGreedy { log, .. }
            | Self::Disturbed { log, .. }
            | Self::Gate { log, .. } => log,
            _ => "",
        }
    }
}

/// Returns the hint for a Python whose torch is not used.
fn wrong_torch(why: Unfit) -> String {
    let [(a, b), (c, d)] = TRIED;
    let all_the_same = match why {
        Unfit::Untried => "`--untried-torch` builds with it all the same; or ",
        Unfit::TooOld | Unfit::NoVersion => "",
    };
    format!(
        "{all_the_same}install torch {a}.{b} to {c}.{d} there, or name another interpreter with `--python PATH` or \
         `PRECAST_PYTHON`"
    )
}

/// Returns names in backticks.
fn listed(names: &[String]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

/// Returns the first names in backticks, and the number of the others.
fn few(names: &[String]) -> String {
    const SOME: usize = 5;
    match names.len().saturating_sub(SOME) {
        0 => listed(names),
        more => format!("{} and {more} more", listed(&names[..SOME])),
    }
}

/// Returns the innermost line of a project in the last stack that Python's faulthandler wrote to a log.
fn stack_location(log: &str, root: &Path) -> Option<String> {
    let start = log.rfind("Current thread 0x")?;
    let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
    log[start..].lines().find_map(|line| {
        let (file, rest) = line
            .trim()
            .strip_prefix("File \"")?
            .split_once("\", line ")?;
        let own = Path::new(file).strip_prefix(&root).ok()?;
        let number = rest.split_whitespace().next()?;
        let foreign = |part: &std::ffi::OsStr| part == "site-packages" || part == "dist-packages";
        (!own.iter().any(foreign)).then(|| format!("{}:{number}", own.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_model_in_a_stack() {
        let log = "before\nThread 0x0001 (most recent call first):\n  File \"/m/other.py\", line 9 in wait\n\n\
            Current thread 0x0002 (most recent call first):\n  File \"/m/.venv/site-packages/torch/a.py\", line 3 in f\n  \
            File \"/m/net/model.py\", line 12 in forward\n  File \"/m/model.py\", line 40 in load\n";
        let root = Path::new("/m");
        assert_eq!(
            stack_location(log, root).as_deref(),
            Some("net/model.py:12")
        );
        assert_eq!(stack_location(log, Path::new("/other")), None);
        assert_eq!(stack_location("nothing said", root), None);
    }
}
