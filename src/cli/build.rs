//! `precast build`: builds the programs that the store lacks.

mod on_ray;
mod summary;

use std::{ffi::OsString, path::PathBuf, sync::Arc, time::Duration};

use anyhow::Result;

#[cfg(test)]
pub(super) use self::summary::Last;
use super::{
    Context,
    exit::Refusal,
    internal, progress,
    python::PythonArgs,
    remote::{BuildRemote, MACHINES, RemoteArgs},
    spec::{SpecArgs, default_jobs},
    trace,
};
use crate::{
    build::{self, BuildError, GateCommand, Launcher, Outcome},
    spec::Spec,
};

#[derive(clap::Args)]
pub(super) struct BuildArgs {
    #[command(flatten)]
    pub(super) spec: SpecArgs,
    #[command(flatten)]
    python: PythonArgs,
    /// How many workers compile at once [default: by cores, memory and weights]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// The most memory of one worker, as `6GiB` [default: the machine's memory, for all workers]
    #[arg(long, value_name = "SIZE", value_parser = super::gc::bytes)]
    memory: Option<u64>,
    /// The most time of one capture, compile or check [default: from 15 minutes for a check to 2 hours for a compile]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    #[command(flatten)]
    remote: RemoteArgs,
    /// A resource of Ray that each builder needs, as `sm90=1`; may be repeated
    #[arg(
        long,
        value_name = "NAME=NUMBER",
        requires = "on",
        value_parser = on_ray::resource,
        help_heading = MACHINES
    )]
    ray_resource: Vec<(String, f64)>,
    /// Fail instead of compiling
    #[arg(long)]
    locked: bool,
    /// Print the plan, and build nothing
    #[arg(long)]
    dry_run: bool,
    /// Write the work of every worker as a Chrome trace, for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Publish the result under this name, complete or not at all
    #[arg(long, value_name = "NAME")]
    release: Option<String>,
    /// Publish a release even if this module has no program; may be repeated
    #[arg(long, value_name = "MODULE")]
    without: Vec<String>,
    /// Publish a release even if it lacks programs or eager that the newest one has
    #[arg(long)]
    allow_lost: bool,
}

/// Returns the command that checks candidates, under the torch that compiles them.
pub(super) fn gate_command(python: &PythonArgs, launcher: &Launcher) -> Result<GateCommand> {
    let mut args = vec![OsString::from(internal::GATE)];
    if !launcher.replaces_worker {
        args.extend(["--python".into(), launcher.program.clone().into()]);
    }
    if launcher.untried {
        args.push("--untried-libtorch".into());
    }
    let program = match &python.gate {
        Some(gate) => gate.clone(),
        None => internal::own_program()?,
    };
    Ok(GateCommand { program, args })
}

pub(super) fn run(args: &BuildArgs, context: &Context) -> Result<u8> {
    if args.dry_run {
        args.remote.not_asked();
        return super::plan::show(&args.spec, &args.python, context);
    }
    let spec = Spec::load(args.spec.file.path())?;
    known_modules(&args.without, &spec)?;
    let store = context.create()?;
    let launcher = args.python.launcher(&spec.root);
    let progress = progress::reporter(context);
    let remote = args.remote.of(context, progress.as_ref())?;
    let mut options = build::Options {
        gate: gate_command(&args.python, &launcher)?,
        launcher,
        scratch: std::env::temp_dir(),
        request: args.spec.request(&spec)?,
        jobs: args.jobs.map_or_else(|| default_jobs(&spec), usize::from),
        memory: args.memory,
        timeout: args.timeout.map(Duration::from_secs),
        remote: remote.as_ref().map(|remote| remote as &dyn build::Remote),
        locked: args.locked,
        release: args.release.clone(),
        without: args.without.clone(),
        allow_lost: args.allow_lost,
        cancel: Arc::clone(&context.cancel),
        spec: &spec,
        store: &store,
    };
    let traced = trace::Traced::new(progress.as_ref());
    let result = match (args.remote.cluster(), &remote) {
        (Some(cluster), Some(remote)) if !args.locked => {
            let builders = on_ray::Builders {
                args,
                cluster,
                remote: remote.place(),
            };
            on_ray::build(&builders, &mut options, &traced)
        }
        _ => build::build(&options, &traced).map_err(Into::into),
    };
    if let Some(path) = &args.trace {
        traced.write(path)?;
    }
    // Nothing is told any more: the bars go.
    let push = remote.as_ref().and_then(BuildRemote::push);
    drop(progress);
    let summary = result?;
    // Builders on a cluster have pushed their release: only what they lack is left.
    let made = |(_, outcome): &(String, Outcome)| matches!(outcome, Outcome::Built(_));
    let push = push.filter(|_| args.remote.pushes() || summary.programs.iter().any(made));
    let instead = summary::instead(&summary, &store)?;
    summary::print(&summary, instead, context)?;
    if !summary.unanswered.is_empty() {
        let modules = summary.unanswered.clone();
        return Err(BuildError::Unanswered { modules }.into());
    }
    if !summary.published && !summary.lost.is_empty() {
        let programs = summary.lost.clone();
        return Err(BuildError::Lost { programs }.into());
    }
    let (failed, raised) = summary.failed();
    if raised > 0 {
        let total = summary.programs.len();
        return Err(BuildError::Failed { failed, total }.into());
    }
    // The newest release is what this build has, also where it is not new.
    let any = |(_, outcome): &(String, Outcome)| outcome.id().is_some();
    if let (Some(push), Some(release)) = (push, &summary.release)
        && summary.programs.iter().any(any)
    {
        push.send(release, context)?;
    }
    Ok(0)
}

/// Refuses names of modules that the spec does not have.
fn known_modules(names: &[String], spec: &Spec) -> Result<(), Refusal> {
    let titles: Vec<String> = (0..spec.modules.len())
        .map(|index| spec.title(index))
        .collect();
    let known = |name: &&String| {
        titles.contains(name) || spec.modules.iter().any(|module| module.name == **name)
    };
    match names.iter().find(|name| !known(name)) {
        Some(name) => {
            let message = format!("the spec has no module `{name}`");
            Err(Refusal::usage(
                message,
                format!("it has {}", titles.join(", ")),
            ))
        }
        None => Ok(()),
    }
}
