//! The command line: the only stage that prints, reads the environment or exits. One file per subcommand.
//!
//! Data goes to stdout, everything else to stderr. `--format json` prints one JSON document with `"schema": 1`, and an
//! error as another one. Exit codes are decided in one place, `exit`.
//!
//! ## Layers
//!
//! A module uses those of earlier lines only, and nothing of this file; a test holds it.
//!
//! ```text
//! folders, spec, text, trace
//! printer
//! exit, finding, help, table
//! name, python, trusted
//! context, libtorch
//! remote
//! deps, diff, doctor, du, fields, gc, init, inspect, internal, log, ls, plan, progress, release, served, stats, why
//! bench, build, check, export, phases, program, version
//! report, run, show, train, verify
//! ```

/// Prints a formatted note to stderr, unless `--quiet` was given.
macro_rules! note {
    ($($text:tt)*) => {
        $crate::cli::printer::note(format_args!($($text)*))
    };
}

mod bench;
mod build;
mod check;
mod context;
mod deps;
mod diff;
mod doctor;
mod du;
mod exit;
mod export;
mod fields;
mod finding;
mod folders;
mod gc;
mod help;
mod init;
mod inspect;
mod internal;
mod libtorch;
mod log;
mod ls;
mod name;
mod phases;
mod plan;
mod printer;
mod program;
mod progress;
mod python;
mod release;
mod remote;
mod report;
mod run;
mod served;
mod show;
mod spec;
mod stats;
mod table;
#[cfg(test)]
mod tests {
    mod schema;
}
mod text;
mod trace;
mod train;
mod trusted;
mod verify;
mod version;
mod why;

use std::{
    ffi::OsString,
    io,
    path::PathBuf,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::Result;
use clap::{ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use self::{
    context::{Context, Global},
    printer::{Format, Printer},
};

/// Ahead-of-time compiled PyTorch artifacts: build once, keep by content, run without Python
#[derive(Parser)]
#[command(
    name = "precast",
    version,
    propagate_version = true,
    max_term_width = 100
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Returns the value of an option before the command line is parsed: help and usage errors depend on it.
fn asked<T: ValueEnum>(args: &[OsString], option: &str) -> Option<T> {
    let args: Vec<&str> = (args.iter().take_while(|arg| *arg != "--"))
        .map(|arg| arg.to_str().unwrap_or_default())
        .collect();
    let values =
        (args.iter().enumerate()).filter_map(|(place, arg)| match arg.strip_prefix(option)? {
            "" => args.get(place + 1).copied(),
            value => value.strip_prefix('='),
        });
    values
        .filter_map(|value| T::from_str(value, true).ok())
        .next()
}

#[derive(Subcommand)]
enum Command {
    /// Build the programs of a spec that the store lacks
    Build(build::BuildArgs),
    /// List the programs that `build` would make, with the reasons
    Plan(plan::PlanArgs),
    /// Write a spec for a model
    Init(init::InitArgs),
    /// Report code that will break, with the reason and a fix, before a build
    Check(check::CheckArgs),
    /// Check that this machine can build and run, with a hint for each missing part
    Doctor(doctor::DoctorArgs),
    /// List programs, artifacts or objects, filtered and sorted
    #[command(visible_alias = "list")]
    Ls(ls::LsArgs),
    /// Show one program or artifact: steps, receipt, and whether this host can run it
    Show(show::ShowArgs),
    /// Show the disk space that the store takes, and the part that can be freed
    Du(du::DuArgs),
    /// Print the compile log of an artifact, a program or a failure
    Log(log::LogArgs),
    /// Explain why a program or an artifact was built
    Why(why::WhyArgs),
    /// Compare two programs, artifacts, releases or stores
    Diff(diff::DiffArgs),
    /// Show the content of a .so, .pt2 or .safetensors file
    Inspect(inspect::InspectArgs),
    /// Summarise counted requests, and the programs that answered them
    Stats(stats::StatsArgs),
    /// Write an HTML page about a store: programs, costs and speed
    Report(report::ReportArgs),
    /// Print a completion script for a shell
    Completions(help::CompletionsArgs),
    /// Write man pages into a folder
    Man(help::ManArgs),
    /// Load from the store and run one module on saved inputs
    Run(served::RunArgs),
    /// Train a module of kind `step` on batches of a file, without Python
    Train(train::TrainArgs),
    /// Measure the time of a call for each bucket
    Bench(served::BenchArgs),
    /// List the libraries that a host needs to run releases, with their sizes
    Deps(deps::DepsArgs),
    /// Write a folder that runs releases on a machine without Python and torch
    Export(export::ExportArgs),
    /// Copy a release to a place that other machines read
    Push(remote::PushArgs),
    /// Copy releases from such a place into this store
    Pull(remote::PullArgs),
    /// Give names to places of releases, list and remove them
    Remote(remote::names::RemoteArgs),
    /// List releases, and go back to an earlier one
    Release(release::ReleaseArgs),
    /// Check every byte of the store, and repair defects on request
    Verify(verify::VerifyArgs),
    /// Delete unused programs, artifacts and objects
    Gc(gc::GcArgs),
    /// Check a candidate against eager: how `build` calls itself
    #[command(name = internal::GATE, hide = true)]
    Gate(internal::GateArgs),
    /// Load an artifact that may crash: how `run` and `bench` call themselves
    #[command(name = internal::TRIAL, hide = true)]
    Trial(internal::TrialArgs),
}

/// Runs the command line of this process. Only commands that run artifacts open libtorch.
pub fn main() -> ExitCode {
    let code = exit::guarded(|| run(std::env::args_os().collect()));
    // Programs may still be loaded in the background.
    crate::runtime::command::exit(code);
}

/// A command with its arguments.
type Run = dyn FnOnce(&mut Context) -> Result<u8>;

fn run(args: Vec<OsString>) -> u8 {
    let color = asked(&args, "--color").unwrap_or(ColorChoice::Auto);
    printer::set_format(asked(&args, "--format").unwrap_or(Format::Human));
    let cli = help::command(Cli::command())
        .color(color)
        .try_get_matches_from(&args)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let (global, run): (Global, Box<Run>) = match cli {
        Ok(cli) => (
            cli.global,
            Box::new(move |context| dispatch(&cli.command, context)),
        ),
        Err(error) => match version::asked(&error, &args) {
            Some((global, asked)) => (
                global,
                Box::new(move |context| version::run(&asked, context)),
            ),
            None => return exit::usage(&error),
        },
    };
    printer::set_format(global.format);
    printer::set_quiet(global.quiet);
    match global.color {
        ColorChoice::Auto => {}
        ColorChoice::Always => anstream::ColorChoice::Always.write_global(),
        ColorChoice::Never => anstream::ColorChoice::Never.write_global(),
    }
    progress::colour(anstream::AutoStream::choice(&std::io::stderr()));
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second signal ends the process at once, with the code of an interruption.
        let _ = signal_hook::flag::register_conditional_shutdown(
            signal,
            exit::INTERRUPTED.into(),
            cancel.clone(),
        );
        let _ = signal_hook::flag::register(signal, cancel.clone());
    }
    if global.until_stdin_ends {
        let cancel = cancel.clone();
        thread::spawn(move || {
            // An error is an end too.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            cancel.store(true, Ordering::Relaxed);
        });
    }
    let mut context = Context {
        remote: None,
        store: global.store.unwrap_or_else(|| PathBuf::from("artifacts")),
        shared: global.shared,
        verbose: global.verbose,
        out: Printer::new(cancel.clone()),
        cancel,
        damaged: AtomicBool::new(false),
    };
    match run(&mut context) {
        Ok(0) if context.damaged.load(Ordering::Relaxed) => exit::FAILED,
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}

/// Runs a command. Where a remote stands in the place of the store, the command is one that reads.
fn dispatch(command: &Command, context: &mut Context) -> Result<u8> {
    let Some(place) = remote::store::place(&context.store) else {
        return answer(command, context);
    };
    let _records = match command {
        Command::Gc(args) => return gc::of_remote(args, &place, context),
        Command::Verify(args) => return verify::of_remote(args, &place, context),
        Command::Release(args) if !args.reads() => return Err(remote::store::needs_folder(&place)),
        Command::Ls(_)
        | Command::Show(_)
        | Command::Du(_)
        | Command::Why(_)
        | Command::Diff(_)
        | Command::Release(_) => remote::store::mirror(&place, context)?,
        Command::Init(_)
        | Command::Inspect(_)
        | Command::Stats(_)
        | Command::Completions(_)
        | Command::Man(_)
        | Command::Remote(_)
        | Command::Gate(_)
        | Command::Trial(_) => return answer(command, context),
        _ => return Err(remote::store::needs_folder(&place)),
    };
    answer(command, context)
}

fn answer(command: &Command, context: &Context) -> Result<u8> {
    match command {
        Command::Build(args) => build::run(args, context),
        Command::Plan(args) => plan::run(args, context),
        Command::Init(args) => init::run(args, context),
        Command::Check(args) => check::run(args, context),
        Command::Doctor(args) => doctor::run(args, context),
        Command::Ls(args) => ls::run(args, context),
        Command::Show(args) => show::run(args, context),
        Command::Du(args) => du::run(args, context),
        Command::Log(args) => log::run(args, context),
        Command::Why(args) => why::run(args, context),
        Command::Diff(args) => diff::run(args, context),
        Command::Inspect(args) => inspect::run(args, context),
        Command::Stats(args) => stats::run(args, context),
        Command::Report(args) => report::run(args, context),
        Command::Completions(args) => help::completions(args, Cli::command()),
        Command::Man(args) => help::man(args, Cli::command()),
        Command::Run(args) => run::run(args, context),
        Command::Train(args) => train::run(args, context),
        Command::Bench(args) => bench::run(args, context),
        Command::Deps(args) => deps::run(args, context),
        Command::Export(args) => export::run(args, context),
        Command::Push(args) => remote::push(args, context),
        Command::Pull(args) => remote::pull(args, context),
        Command::Remote(args) => remote::names::run(args, context),
        Command::Release(args) => release::run(args, context),
        Command::Verify(args) => verify::run(args, context),
        Command::Gc(args) => gc::run(args, context),
        Command::Gate(args) => internal::gate(args),
        Command::Trial(args) => internal::try_load(args),
    }
}
