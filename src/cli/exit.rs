//! Exit codes and the format of errors, for all commands.
//!
//! | code | means |
//! |---|---|
//! | 0 | done |
//! | 1 | a check failed, a build had failures under `raise`, or a module has no program, or a release would lose some |
//! | 2 | the command line, the spec or an input is wrong; a file, Python or libtorch can't be used |
//! | 3 | not in the store |
//! | 4 | built for another target than this host; the torch of a build is untried or missing |
//! | 70 | a bug |
//! | 130 | interrupted; finished artifacts are kept |

use std::{
    any::Any,
    io::{self, ErrorKind},
    path::Path,
};

use anyhow::Error;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{folders, printer};
use crate::runtime::{RuntimeError, command::tensors::TensorFileError};
use crate::{
    Digest,
    build::BuildError,
    inspect::{
        external::ExternalError, libraries::LibraryError, sizes::SizesError, stats::CountsError,
    },
    plan::PlanError,
    spec::{Problem, SpecError},
    store::StoreError,
};

pub(super) const FAILED: u8 = 1;
pub(super) const USAGE: u8 = 2;
pub(super) const MISSING: u8 = 3;
pub(super) const TARGET: u8 = 4;
pub(super) const BUG: u8 = 70;
pub(super) const INTERRUPTED: u8 = 130;

const PLEASE_REPORT: &str = "this is a bug of precast: please report it";

/// Prints a formatted line to stderr, under `--quiet` too.
macro_rules! message {
    ($($text:tt)*) => {
        printer::message(format_args!($($text)*))
    };
}

/// An error of the command itself, with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Refusal {
    code: u8,
    pub(super) message: String,
    pub(super) hint: String,
}

impl Refusal {
    fn new(code: u8, message: impl Into<String>, hint: impl Into<String>) -> Self {
        let (message, hint) = (message.into(), hint.into());
        Self {
            code,
            message,
            hint,
        }
    }

    /// Returns the error for a mistake on the command line that clap can't see.
    pub(super) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(USAGE, message, hint)
    }

    /// Returns the error for work that was done and failed.
    pub(super) fn failed(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(FAILED, message, hint)
    }

    /// Returns the error for something that is for another host.
    pub(super) fn target(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(TARGET, message, hint)
    }

    /// Returns the error for work that was stopped.
    pub(super) fn interrupted(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(INTERRUPTED, message, hint)
    }

    /// Returns the error for an object named on the command line that the store does not have.
    pub(super) fn missing(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(MISSING, message, hint)
    }
}

/// An error: the last line of stderr with `--format json`.
#[derive(Serialize, Default)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Report {
    error: String,
    /// Instructions for the user.
    hint: String,
    /// The exit code.
    code: u8,
    /// The line of the user's own code that caused it.
    location: Option<String>,
    /// Its causes, the nearest first.
    causes: Vec<String>,
    /// The last lines that a worker printed.
    log: Vec<String>,
    /// The ID that `precast log` prints the Python stack of.
    stack: Option<Digest>,
    /// Every mistake in a spec.
    mistakes: Vec<Problem>,
}

/// A warning: a line of stderr with `--format json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Warning<'a> {
    warning: &'a str,
    /// Instructions for the user.
    hint: Option<&'a str>,
}

/// Returns the exit code of a check.
pub(super) fn code(passed: bool) -> u8 {
    if passed { 0 } else { FAILED }
}

/// Runs `body` and returns its exit code; [`BUG`] where it panics.
pub(super) fn guarded(body: impl FnOnce() -> u8) -> u8 {
    let panic = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(code) => return code,
        Err(panic) => panic,
    };
    // The standard hook has printed the panic itself.
    if printer::json() {
        printer::say(&Report {
            error: panicked(&*panic).to_owned(),
            hint: PLEASE_REPORT.to_owned(),
            code: BUG,
            ..Report::default()
        })
    } else {
        tell_hint(PLEASE_REPORT)
    }
    BUG
}

/// Returns the message of a panic.
fn panicked(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message")
}

/// Prints the help or the error of clap, and returns its code: 0 for `--help`, 2 for a mistake.
pub(super) fn usage(error: &clap::Error) -> u8 {
    if !error.use_stderr() {
        let _ = error.print();
        return 0;
    }
    if !printer::json() {
        let _ = error.print();
        return USAGE;
    }
    // The message, then tips and the usage, with empty lines between them.
    let text = error.render().to_string();
    let mut parts = text
        .split("\n\n")
        .map(|part| part.split_whitespace().collect::<Vec<_>>().join(" "));
    let message = parts.next().unwrap_or_default();
    printer::say(&Report {
        error: message.trim_start_matches("error: ").to_owned(),
        hint: parts.collect::<Vec<_>>().join("; "),
        code: USAGE,
        ..Report::default()
    });
    USAGE
}

/// Prints an error with its causes and its hint, and returns its exit code.
pub(super) fn report(error: &Error) -> u8 {
    if closed_pipe(error) {
        return 0;
    }
    let marked = match error.downcast_ref::<BuildError>() {
        Some(BuildError::Spec(marked)) => Some(&**marked),
        _ => None,
    };
    let spec = error.downcast_ref::<SpecError>().or(marked);
    if let (false, Some(errors)) = (printer::json(), spec) {
        // With source lines and carets below them.
        printer::verbatim_message(errors.render());
        return USAGE;
    }
    let report = Report::of(error, spec);
    if printer::json() {
        printer::say(&report)
    } else {
        report.print()
    }
    report.code
}

impl Report {
    fn of(error: &Error, spec: Option<&SpecError>) -> Self {
        let (code, hint) = match spec {
            Some(spec) => (USAGE, spec.help().to_owned()),
            None => classify(error),
        };
        let mut seen = error.to_string();
        let mut causes = Vec::new();
        for cause in error.chain().skip(1) {
            let text = cause.to_string();
            // A transparent error has the text of its cause.
            if !seen.contains(&text) {
                seen.clone_from(&text);
                causes.push(text);
            }
        }
        let mistakes = match spec {
            Some(SpecError::Invalid(problems)) => problems.clone(),
            _ => vec![],
        };
        let log = error.chain().find_map(last_words).unwrap_or_default();
        Self {
            error: error.to_string(),
            hint,
            code,
            location: error.chain().find_map(place),
            causes,
            log: log.into_iter().map(str::to_owned).collect(),
            stack: error.chain().find_map(kept_log),
            mistakes,
        }
    }

    fn print(&self) {
        message!("{} {}", "error:".red().bold(), self.error);
        if let Some(place) = &self.location {
            message!("  {} {place}", "-->".cyan());
        }
        for text in &self.causes {
            message!("  {} {text}", "caused by:".dimmed());
        }
        for line in &self.log {
            message!("  {} {line}", "log:".dimmed());
        }
        tell_hint(&self.hint);
        if let Some(log) = &self.stack {
            let log = log.short();
            message!("      `precast log {log}` prints the Python stack");
        }
    }
}

/// Prints an instruction for the user.
pub(super) fn tell_hint(hint: &str) {
    message!("{} {hint}", "hint:".cyan().bold());
}

/// Prints an error that does not stop the command as a warning.
pub(super) fn warn(error: &StoreError) {
    tell_warning(&error.to_string(), Some(error.hint()));
}

/// Prints a warning.
pub(super) fn warning(text: &str) {
    tell_warning(text, None);
}

/// Prints a warning with its hint.
pub(super) fn tell_warning(warning: &str, hint: Option<&str>) {
    if printer::json() {
        return printer::say(&Warning { warning, hint });
    }
    message!("{} {warning}", "warning:".yellow().bold());
    if let Some(hint) = hint {
        tell_hint(hint);
    }
}

/// Returns the hint for a store that the list does not name.
fn untrusted(store: &Path) -> String {
    let list = folders::shown_trusted();
    let (store, list) = (store.display(), list.display());
    format!("if you trust that user, add the line `{store}` to `{list}`")
}

type AnyError = dyn std::error::Error + 'static;

/// Returns the line of the user's own code that caused an error of the worker.
fn place(cause: &AnyError) -> Option<String> {
    match cause.downcast_ref::<BuildError>()? {
        BuildError::Worker(error) | BuildError::Model { error, .. } => error.location.clone(),
        _ => None,
    }
}

/// Returns the log with the Python stack of an error that belongs to no program.
fn kept_log(cause: &AnyError) -> Option<Digest> {
    match cause.downcast_ref::<BuildError>()? {
        BuildError::Model { log, .. } => Some(*log),
        _ => None,
    }
}

/// Returns the last output of a worker whose error ended the build.
fn last_words(cause: &AnyError) -> Option<Vec<&str>> {
    const LINES: usize = 12;
    let error = cause.downcast_ref::<BuildError>()?;
    let ended = matches!(
        error,
        BuildError::WorkerDied { .. }
            | BuildError::WorkerHung { .. }
            | BuildError::WorkerGreedy { .. }
    );
    let lines: Vec<&str> = error.log().lines().collect();
    ended.then(|| lines[lines.len().saturating_sub(LINES)..].to_vec())
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

/// Returns the exit code of an error, and a hint for the user. Every error has one.
fn classify(error: &Error) -> (u8, String) {
    let known = error.chain().find_map(code_and_hint);
    known.unwrap_or_else(|| (BUG, PLEASE_REPORT.to_owned()))
}

fn code_and_hint(cause: &AnyError) -> Option<(u8, String)> {
    let answer = if let Some(it) = cause.downcast_ref::<Refusal>() {
        (it.code, it.hint.clone())
    } else if let Some(it) = cause.downcast_ref::<BuildError>() {
        (build(it), it.hint())
    } else if let Some(it) = cause.downcast_ref::<PlanError>() {
        (plan(it), it.hint())
    } else if let Some(it) = cause.downcast_ref::<StoreError>() {
        (store(it), store_hint(it))
    } else if let Some(it) = cause.downcast_ref::<ExternalError>() {
        (external(it), it.hint().to_owned())
    } else if let Some(it) = cause.downcast_ref::<LibraryError>() {
        (library(it), it.hint().to_owned())
    } else if let Some(it) = cause.downcast_ref::<CountsError>() {
        (USAGE, it.hint().to_owned())
    } else if let Some(it) = cause.downcast_ref::<RuntimeError>() {
        (runtime(it), it.hint())
    } else if let Some(it) = cause.downcast_ref::<TensorFileError>() {
        (USAGE, it.hint().to_owned())
    } else if let Some(it) = cause.downcast_ref::<io::Error>() {
        (USAGE, io_hint(it).to_owned())
    } else {
        // An error of sizes that wraps another error has no hint.
        let sizes = cause.downcast_ref::<SizesError>()?;
        (USAGE, sizes.hint()?)
    };
    Some(answer)
}

/// Returns the hint for an error of the operating system outside of a store.
fn io_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => "check the path: it is looked up from the current folder",
        ErrorKind::PermissionDenied => "check who may use it",
        ErrorKind::AlreadyExists => "name another one, or remove it",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free some space",
        ErrorKind::ReadOnlyFilesystem => "write to another folder",
        ErrorKind::IsADirectory => "name a file",
        ErrorKind::NotADirectory => "name a folder",
        _ => "the operating system refused it; `precast help COMMAND` says what is expected",
    }
}

fn store_hint(error: &StoreError) -> String {
    match error {
        StoreError::Stranger { path, .. } => untrusted(path),
        other => other.hint().to_owned(),
    }
}

fn external(error: &ExternalError) -> u8 {
    match error {
        ExternalError::Malformed { .. } | ExternalError::TooLarge { .. } => FAILED,
        _ => USAGE,
    }
}

fn library(error: &LibraryError) -> u8 {
    match error {
        LibraryError::Store(error) => store(error),
        _ => USAGE,
    }
}

fn build(error: &BuildError) -> u8 {
    match error {
        BuildError::NoPython { .. }
        | BuildError::NoGate { .. }
        | BuildError::BadWeights { .. }
        | BuildError::Spec(_) => USAGE,
        BuildError::WrongTorch { .. } | BuildError::OtherTorch { .. } => TARGET,
        BuildError::Worker(error) | BuildError::Model { error, .. } => match error.code.as_str() {
            "torch_missing" | "torch_untried" => TARGET,
            "no_module" | "no_method" | "bad_input" => USAGE,
            _ => FAILED,
        },
        BuildError::Protocol { .. } => BUG,
        BuildError::Interrupted => INTERRUPTED,
        BuildError::Store(error) => store(error),
        BuildError::Plan(error) => plan(error),
        _ => FAILED,
    }
}

fn plan(error: &PlanError) -> u8 {
    match error {
        PlanError::Store(error) => store(error),
        _ => USAGE,
    }
}

fn store(error: &StoreError) -> u8 {
    match error {
        _ if error.is_missing() => MISSING,
        StoreError::Interrupted { .. } => INTERRUPTED,
        StoreError::NotAStore { .. } | StoreError::NotEmpty { .. } | StoreError::Newer { .. } => {
            USAGE
        }
        StoreError::BadPrefix(_)
        | StoreError::Ambiguous { .. }
        | StoreError::BadName(_)
        | StoreError::NumberName(_) => USAGE,
        _ => FAILED,
    }
}

fn runtime(error: &RuntimeError) -> u8 {
    use RuntimeError as E;
    match error {
        E::WrongTarget { .. } | E::WrongArtifact { .. } | E::NoShim { .. } | E::NoDevice { .. } => {
            TARGET
        }
        E::NoModule { .. } | E::NoBucket { .. } | E::NoRelease(_) => MISSING,
        E::Interrupted { .. } => INTERRUPTED,
        E::Libtorch { .. }
        | E::Devices
        | E::BadInput { .. }
        | E::InputCount { .. }
        | E::InputNames { .. } => USAGE,
        _ => FAILED,
    }
}

#[cfg(test)]
mod tests;
