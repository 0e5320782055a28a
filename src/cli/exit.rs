//! Exit codes, and how errors look: decided here and nowhere else.
//!
//! | code | means |
//! |---|---|
//! | 0 | done |
//! | 1 | a check failed, or a build had failures under `raise` |
//! | 2 | the command line or the spec is wrong |
//! | 3 | not in the store |
//! | 4 | wrong target |
//! | 70 | a bug |
//! | 130 | interrupted; what was finished is kept |

use std::{
    io::{self, ErrorKind},
    process::ExitCode,
};

use anyhow::Error;
use owo_colors::OwoColorize;

use super::printer::note;
use crate::{
    build::BuildError, inspect::foreign::ForeignError, plan::PlanError, spec::SpecError,
    store::StoreError,
};

pub(super) const FAILED: u8 = 1;
pub(super) const USAGE: u8 = 2;
pub(super) const MISSING: u8 = 3;
pub(super) const TARGET: u8 = 4;
pub(super) const BUG: u8 = 70;
pub(super) const INTERRUPTED: u8 = 130;

/// A mistake in how a command was called that clap can't see.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Usage {
    pub(super) message: String,
    pub(super) hint: Option<String>,
}

/// Something asked for by name that is not in the store.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Missing {
    pub(super) message: String,
    pub(super) hint: Option<String>,
}

/// Prints what clap has to say and returns its code: 0 for `--help`, 2 for a mistake.
pub(super) fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    match error.use_stderr() {
        true => USAGE.into(),
        false => ExitCode::SUCCESS,
    }
}

/// Prints an error with its causes and its hint, and returns its exit code.
pub(super) fn report(error: &Error) -> ExitCode {
    if closed_pipe(error) {
        return ExitCode::SUCCESS;
    }
    if let Some(errors) = error.downcast_ref::<SpecError>() {
        note(errors.render());
        return USAGE.into();
    }
    let (code, hint) = judge(error);
    note(format_args!("{} {error}", "error:".red().bold()));
    if let Some(place) = error.chain().find_map(place) {
        note(format_args!("  {} {place}", "-->".cyan()));
    }
    let mut seen = error.to_string();
    for cause in error.chain().skip(1) {
        let text = cause.to_string();
        // A transparent error repeats what it wraps.
        if !seen.contains(&text) {
            note(format_args!("  {} {text}", "caused by:".dimmed()));
            seen = text;
        }
    }
    if let Some(hint) = hint {
        note(format_args!("{} {hint}", "hint:".cyan().bold()));
    }
    code.into()
}

/// Prints what is wrong with a part that does not stop the rest.
pub(super) fn warn(error: &StoreError) {
    warning(&error.to_string());
    if let Some(hint) = error.hint() {
        note(format_args!("{} {hint}", "hint:".cyan().bold()));
    }
}

/// Prints one line that is no error.
pub(super) fn warning(text: &str) {
    note(format_args!("{} {text}", "warning:".yellow().bold()));
}

/// Returns the line of the user's own code that an error of the worker is about.
fn place(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    match cause.downcast_ref::<BuildError>()? {
        BuildError::Worker(error) => error.location.clone(),
        _ => None,
    }
}

fn closed_pipe(error: &Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>();
        let json = cause
            .downcast_ref::<serde_json::Error>()
            .and_then(serde_json::Error::io_error_kind);
        io.is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) || json == Some(ErrorKind::BrokenPipe)
    })
}

fn judge(error: &Error) -> (u8, Option<String>) {
    for cause in error.chain() {
        if let Some(usage) = cause.downcast_ref::<Usage>() {
            return (USAGE, usage.hint.clone());
        }
        if let Some(missing) = cause.downcast_ref::<Missing>() {
            return (MISSING, missing.hint.clone());
        }
        if let Some(error) = cause.downcast_ref::<BuildError>() {
            return build(error);
        }
        if let Some(error) = cause.downcast_ref::<PlanError>() {
            return (USAGE, error.hint());
        }
        if let Some(error) = cause.downcast_ref::<StoreError>() {
            return store(error);
        }
        if let Some(error) = cause.downcast_ref::<ForeignError>() {
            let code = match error {
                ForeignError::Malformed { .. } | ForeignError::TooLarge { .. } => FAILED,
                _ => USAGE,
            };
            return (code, error.hint().map(str::to_owned));
        }
        #[cfg(feature = "torch")]
        if let Some(error) = cause.downcast_ref::<crate::runtime::RuntimeError>() {
            return runtime(error);
        }
    }
    (USAGE, None)
}

fn build(error: &BuildError) -> (u8, Option<String>) {
    let code = match error {
        BuildError::NoPython { .. } => USAGE,
        BuildError::WrongTorch { .. } => TARGET,
        BuildError::Worker(error) => match error.code.as_str() {
            "torch_missing" => TARGET,
            "no_module" | "no_method" | "bad_input" => USAGE,
            _ => FAILED,
        },
        BuildError::Protocol { .. } => BUG,
        BuildError::Interrupted => INTERRUPTED,
        BuildError::Store(error) => return store(error),
        BuildError::Plan(error) => return (USAGE, error.hint()),
        _ => FAILED,
    };
    (code, error.hint())
}

fn store(error: &StoreError) -> (u8, Option<String>) {
    let code = match error {
        _ if error.is_missing() => MISSING,
        StoreError::NotAStore { .. } | StoreError::NotEmpty { .. } | StoreError::Newer { .. } => {
            USAGE
        }
        StoreError::BadPrefix(_) | StoreError::Ambiguous { .. } | StoreError::BadName(_) => USAGE,
        _ => FAILED,
    };
    (code, error.hint().map(str::to_owned))
}

#[cfg(feature = "torch")]
fn runtime(error: &crate::runtime::RuntimeError) -> (u8, Option<String>) {
    use crate::runtime::RuntimeError as E;
    let code = match error {
        E::WrongTarget { .. } | E::NoDevice { .. } => TARGET,
        E::NoModule { .. } | E::NoBucket { .. } => MISSING,
        E::Devices | E::BadInput { .. } | E::InputCount { .. } | E::InputNames { .. } => USAGE,
        _ => FAILED,
    };
    (code, error.hint())
}
