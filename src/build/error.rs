//! What can go wrong while building, with what to do about it.

use std::{io, path::PathBuf};

use super::protocol::WorkerError;
use crate::{plan::PlanError, store::StoreError};

/// What to do about a bug.
pub(super) const REPORT: &str =
    "this is a bug of precast: please report it, with what `precast build -vv` prints";

/// Why a build, or one program of it, failed.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error("can't start Python `{}`", program.display())]
    NoPython { program: PathBuf, source: io::Error },
    #[error("Python at `{}` has torch {found}, this binary is made for torch {expected}", program.display())]
    WrongTorch {
        program: PathBuf,
        found: String,
        expected: &'static str,
    },
    #[error("{0}")]
    Worker(Box<WorkerError>),
    #[error("the worker ended in the middle of a request ({status})")]
    WorkerDied { status: String, log: String },
    #[error("the worker did not answer within {seconds} s")]
    WorkerHung { seconds: u64, log: String },
    #[error("the worker and this binary don't understand each other: {message}")]
    Protocol { message: String },
    #[error("can't use the scratch folder `{}`", path.display())]
    Scratch { path: PathBuf, source: io::Error },
    #[error("the artifact failed its gate: {message}")]
    Gate { message: String, log: String },
    #[error("`{path}` changed while it was being compiled")]
    SourceChanged { path: String },
    #[error("{missing} of {total} programs are missing and `--locked` forbids compiling")]
    Locked { missing: usize, total: usize },
    #[error("release `{name}` would lack {missing} of {total} programs")]
    Incomplete {
        name: String,
        missing: usize,
        total: usize,
    },
    #[error("{failed} of {total} programs failed")]
    Failed { failed: usize, total: usize },
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl BuildError {
    /// Returns what the user can do.
    pub fn hint(&self) -> String {
        let text = match self {
            Self::NoPython { .. } => {
                "name an interpreter that has torch with `--python PATH` or `PRECAST_PYTHON`"
            }
            Self::WrongTorch { expected, .. } => {
                return format!(
                    "install torch {expected} there, or name another interpreter with `--python PATH`"
                );
            }
            Self::Worker(error) => return error.hint(),
            Self::WorkerDied { .. } => {
                "its log says what it did last; where memory was short, fewer workers help: `-j 1`"
            }
            Self::WorkerHung { .. } => {
                "its log says where it was; `-j 1` leaves the whole machine to one compile"
            }
            Self::Protocol { .. } => REPORT,
            Self::Scratch { .. } => "name another folder with `TMPDIR`",
            Self::Gate { .. } => {
                "if this error is harmless, widen `[module.gate]`; `enabled = false` leaves the module to eager"
            }
            Self::SourceChanged { .. } => "run `precast build` again",
            Self::Locked { .. } => {
                "run `precast build` where compiling is allowed, then deploy the store"
            }
            Self::Incomplete { .. } => {
                "nothing was published: mend what failed and build again, or build without `--release`"
            }
            Self::Failed { .. } => "`precast log ID` prints the log of a failed program",
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
            Self::Interrupted | Self::Store(_) | Self::NoPython { .. } | Self::Scratch { .. } => {
                true
            }
            Self::Worker(error) => matches!(error.code.as_str(), "no_module" | "no_method"),
            _ => false,
        }
    }

    /// Returns a stable word for what failed, as failure records keep it.
    pub fn code(&self) -> &str {
        match self {
            Self::Worker(error) => &error.code,
            Self::WorkerDied { .. } => "worker_died",
            Self::WorkerHung { .. } => "worker_hung",
            Self::Gate { .. } => "gate",
            Self::SourceChanged { .. } => "source_changed",
            _ => "build",
        }
    }

    /// Returns the log that belongs to this error; empty when there is none.
    pub fn log(&self) -> &str {
        match self {
            Self::Worker(error) => &error.trace,
            Self::WorkerDied { log, .. }
            | Self::WorkerHung { log, .. }
            | Self::Gate { log, .. } => log,
            _ => "",
        }
    }
}
