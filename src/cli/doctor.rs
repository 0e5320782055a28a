//! `precast doctor`: what this machine has, and what it lacks, to build and to run.
//!
//! Every check looks at the thing itself: it starts the interpreter, compiles a few lines, opens libtorch and the
//! store. Nothing is changed.

mod build;
mod run;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{Context, exit, libtorch::LibtorchArgs, printer::note, python::PythonArgs};
use crate::{build::Launcher, target::compute_capabilities};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    python: PythonArgs,
    #[command(flatten)]
    libtorch: LibtorchArgs,
}

/// What something is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
enum Need {
    Build,
    Run,
    Store,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
enum State {
    /// It is there and works.
    Ok,
    /// What needs it works, but not everywhere or not as fast as it could.
    Note,
    /// What needs it does not work.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Check {
    need: Need,
    name: &'static str,
    state: State,
    /// What was found: a version, a path, a reason.
    found: String,
    /// What to do; none where nothing is wrong.
    hint: Option<String>,
}

/// `precast doctor --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document<'a> {
    /// Version of precast.
    precast: &'a str,
    /// Whether nothing that is needed to build is missing.
    can_build: bool,
    /// Whether nothing that is needed to run is missing.
    can_run: bool,
    checks: &'a [Check],
}

impl Check {
    fn ok(need: Need, name: &'static str, found: impl Into<String>) -> Self {
        Self {
            need,
            name,
            state: State::Ok,
            found: found.into(),
            hint: None,
        }
    }

    fn note(
        need: Need,
        name: &'static str,
        found: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Note,
            hint: Some(hint.into()),
            ..Self::ok(need, name, found)
        }
    }

    fn missing(
        need: Need,
        name: &'static str,
        found: impl Into<String>,
        hint: impl Into<String>,
    ) -> Self {
        Self {
            state: State::Missing,
            ..Self::note(need, name, found, hint)
        }
    }
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let launcher = args.python.launcher("".as_ref());
    let gpus = compute_capabilities();
    let mut checks = build::checks(&launcher, &gpus);
    checks.extend(run::checks(&args.libtorch, &gpus));
    checks.extend(run::store(context));
    let can = |need: Need| {
        let mut own = checks.iter().filter(|check| check.need == need);
        own.all(|check| check.state != State::Missing)
    };
    let document = Document {
        precast: env!("CARGO_PKG_VERSION"),
        can_build: can(Need::Build),
        can_run: can(Need::Run),
        checks: &checks,
    };
    match context.out.json() {
        true => context.out.document(&document)?,
        false => print(&document, context)?,
    }
    let missing = checks.iter().any(|check| check.state == State::Missing);
    Ok(if missing { exit::FAILED } else { 0 })
}

fn print(document: &Document<'_>, context: &Context) -> Result<()> {
    let groups = [
        (Need::Build, "to build"),
        (Need::Run, "to run"),
        (Need::Store, "the store"),
    ];
    let widths = document.checks.iter().map(|check| check.name.len());
    let width = widths.max().unwrap_or_default();
    for (need, title) in groups {
        context.out.line(title.bold())?;
        for check in document.checks.iter().filter(|check| check.need == need) {
            let state = match check.state {
                State::Ok => format!("{:7}", "ok").green().to_string(),
                State::Note => format!("{:7}", "note").yellow().to_string(),
                State::Missing => format!("{:7}", "missing").red().bold().to_string(),
            };
            let line = format!("  {state} {:width$}  {}", check.name, check.found);
            context.out.line(line)?;
            if let Some(hint) = &check.hint {
                let indent = " ".repeat(12 + width);
                context
                    .out
                    .line(format_args!("{indent}{}", hint.dimmed()))?;
            }
        }
    }
    if !context.quiet {
        let can = |yes| if yes { "can" } else { "can't" };
        note(format_args!(
            "this machine {} build, and {} run what is built",
            can(document.can_build),
            can(document.can_run)
        ));
    }
    Ok(())
}

/// Returns which Python builds.
pub(super) fn python(launcher: &Launcher) -> String {
    build::python(launcher).1.found
}

/// Returns which GPUs and which driver there are; `gpus` are the compute capabilities.
pub(super) fn gpu(gpus: &[String]) -> String {
    run::gpu(gpus).found
}

/// Returns which store is used, or why it can't be.
pub(super) fn store(context: &Context) -> String {
    let checks = run::store(context).into_iter();
    checks.map(|check| check.found).next().unwrap_or_default()
}

/// Returns the first line of what a program printed.
fn first_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines().map(str::trim);
    lines
        .find(|line| !line.is_empty())
        .unwrap_or_default()
        .to_owned()
}
