//! `precast doctor`: checks this machine for everything that a build and a run need.
//!
//! A check uses its subject: it starts the interpreter, compiles a few lines, opens libtorch or the store. It changes
//! nothing.

mod build;
mod run;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{Context, exit, libtorch::LibtorchArgs, python::PythonArgs};
use crate::{build::Launcher, target::compute_capabilities};

#[derive(clap::Args)]
pub(super) struct DoctorArgs {
    #[command(flatten)]
    python: PythonArgs,
    #[command(flatten)]
    libtorch: LibtorchArgs,
}

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
    Ok,
    /// Builds or runs work, but not everywhere, or slower than they could.
    Note,
    /// Builds or runs don't work.
    Missing,
}

/// The result of one check.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Check {
    need: Need,
    name: &'static str,
    state: State,
    /// A version, a path or a reason.
    found: String,
    /// Instructions for the user; none without a problem.
    hint: Option<String>,
}

/// The subject of a check: its need and its name.
struct Subject(Need, &'static str);

impl Subject {
    fn check(&self, state: State, found: impl Into<String>, hint: Option<String>) -> Check {
        Check {
            need: self.0,
            name: self.1,
            state,
            found: found.into(),
            hint,
        }
    }

    fn ok(&self, found: impl Into<String>) -> Check {
        self.check(State::Ok, found, None)
    }

    fn note(&self, found: impl Into<String>, hint: impl Into<String>) -> Check {
        self.check(State::Note, found, Some(hint.into()))
    }

    fn missing(&self, found: impl Into<String>, hint: impl Into<String>) -> Check {
        self.check(State::Missing, found, Some(hint.into()))
    }
}

/// `precast doctor --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct DoctorDocument<'a> {
    /// Version of precast.
    precast: &'a str,
    /// Whether every check for builds passed.
    can_build: bool,
    /// Whether every check for runs passed.
    can_run: bool,
    checks: &'a [Check],
}

pub(super) fn run(args: &DoctorArgs, context: &Context) -> Result<u8> {
    let launcher = args.python.launcher("".as_ref());
    let gpus = compute_capabilities();
    let mut checks = build::checks(&launcher, &gpus);
    checks.extend(run::checks(&args.libtorch, args.python.named(), &gpus));
    checks.extend(run::store(context));
    let can = |need: Need| {
        let mut own = checks.iter().filter(|check| check.need == need);
        own.all(|check| check.state != State::Missing)
    };
    let document = DoctorDocument {
        precast: env!("CARGO_PKG_VERSION"),
        can_build: can(Need::Build),
        can_run: can(Need::Run),
        checks: &checks,
    };
    if context.out.json() {
        context.out.document(&document)?;
    } else {
        print(&document, context)?;
    }
    let sound = checks.iter().all(|check| check.state != State::Missing);
    Ok(exit::code(sound))
}

fn print(document: &DoctorDocument<'_>, context: &Context) -> Result<()> {
    let groups = [
        (Need::Build, "to build"),
        (Need::Run, "to run"),
        (Need::Store, "the store"),
    ];
    let out = &context.out;
    let widths = document.checks.iter().map(|check| check.name.len());
    let width = widths.max().unwrap_or_default();
    for (need, title) in groups {
        out.line(title.bold())?;
        for check in document.checks.iter().filter(|check| check.need == need) {
            let state = match check.state {
                State::Ok => format!("{:7}", "ok").green().to_string(),
                State::Note => format!("{:7}", "note").yellow().to_string(),
                State::Missing => format!("{:7}", "missing").red().bold().to_string(),
            };
            writeln!(out, "  {state} {:width$}  {}", check.name, check.found)?;
            if let Some(hint) = &check.hint {
                let indent = " ".repeat(12 + width);
                writeln!(out, "{indent}{}", hint.dimmed())?;
            }
        }
    }
    let can = |yes| if yes { "can" } else { "can't" };
    let (build, run) = (can(document.can_build), can(document.can_run));
    note!("this machine {build} build, and {run} run what is built");
    Ok(())
}

/// Returns the version and path of the Python that builds, or why it does not.
pub(super) fn python(launcher: &Launcher) -> String {
    build::python(launcher).1.found
}

/// Returns the GPUs and their driver; `gpus` are the compute capabilities.
pub(super) fn gpu(gpus: &[String]) -> String {
    run::gpu(gpus).found
}

/// Returns the path of the store and the number of its models, or why it can't be used.
pub(super) fn store(context: &Context) -> String {
    let checks = run::store(context).into_iter();
    checks.map(|check| check.found).next().unwrap_or_default()
}

/// Returns the first line of a program's output that is not empty.
fn first_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines().map(str::trim);
    lines
        .find(|line| !line.is_empty())
        .unwrap_or_default()
        .to_owned()
}
