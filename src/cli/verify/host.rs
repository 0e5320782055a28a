//! `precast verify --host`: runs the gates of releases on this host, under its torch, and publishes releases that pass.
//!
//! The gates are in `precast_builder::gate::host`; here are the command's arguments and lines.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use owo_colors::OwoColorize;

use super::{super::python::PythonArgs, Context};
use crate::{
    Device, RuntimeError, Target,
    build::gate::host::{GatedChain, GatedProgram, GatedRelease, HostGates, HostOptions},
    cli::{build, exit, libtorch::LibtorchArgs, name},
    record::Program,
    runtime,
    target::{DeviceKind, Torch},
};

#[derive(clap::Args)]
pub(in crate::cli) struct HostArgs {
    /// Run the gates of releases on this host, under its torch; those that pass may run here from then on
    #[arg(long, conflicts_with_all = ["repair", "reindex"])]
    pub(super) host: bool,
    /// With --host: whose newest release, or MODEL@NUMBER [default: all models]
    #[arg(value_name = "MODEL", requires = "host")]
    models: Vec<String>,
    #[command(flatten)]
    python: PythonArgs,
    #[command(flatten)]
    libtorch: LibtorchArgs,
}

pub(super) fn run(args: &HostArgs, context: &Context) -> Result<u8> {
    let store = context.open()?;
    let models = if args.models.is_empty() {
        store.releases().models()?
    } else {
        args.models.clone()
    };
    if models.is_empty() {
        return Err(name::no_model(&store).into());
    }
    let open = args.libtorch.open_for(args.python.named())?;
    let launcher = args.python.launcher_beside(&open.folder);
    let mut gate = build::gate_command(&args.python, &launcher)?;
    // With the libtorch that is open here.
    gate.args.push("--libtorch".into());
    gate.args.push(open.folder.clone().into());
    let options = HostOptions {
        store: &store,
        launcher,
        gate,
        scratch: std::env::temp_dir(),
        cancel: Arc::clone(&context.cancel),
    };
    let mut all = Vec::new();
    for model in &models {
        all.push(gate_release(model, &options, context)?);
    }
    let passed = all.iter().all(|gated| gated.passed);
    let document = super::VerifyDocument::Host { releases: all };
    context.show(&document, || Ok(()))?;
    Ok(exit::code(passed))
}

fn gate_release(model: &str, options: &HostOptions<'_>, context: &Context) -> Result<GatedRelease> {
    let store = options.store;
    let release = name::release(store, model)?;
    let (name, seq) = (release.model.clone(), release.seq);
    let gates = HostGates::of(store, release)?;
    let first = gates.programs.first();
    let first = first.with_context(|| format!("release {seq} of `{name}` has no program"))?;
    let device = match first.target.device {
        DeviceKind::Cpu => Device::Cpu,
        DeviceKind::Cuda => Device::Cuda(0),
    };
    let host = runtime::command::host(device)?;
    not_older(first, device, &host)?;
    let mut printed = Ok(());
    let (gated, new) = gates.run(options, &host, &mut |program| {
        if printed.is_ok() {
            printed = print(program, context);
        }
    })?;
    printed?;
    if let Some(chain) = &gated.chain {
        print_chain(chain, context)?;
    }
    if let (Some(seq), true) = (gated.runs_as, new) {
        let (head, torch) = ("published".green().bold().to_string(), &host.torch);
        note!("{head} {name} release {seq}: it runs under torch {torch} too");
    }
    Ok(gated)
}

/// Refuses a torch that is older than the torch of a program's build.
fn not_older(program: &Program, device: Device, host: &Target) -> Result<(), RuntimeError> {
    if !Torch::is_older(&host.torch, &program.target.torch) {
        return Ok(());
    }
    Err(RuntimeError::WrongTarget {
        program: program.id,
        module: program.module.clone(),
        bucket: program.bucket(),
        device,
        mismatches: program.target.mismatches(host),
    })
}

/// Prints the comparison of `prefill` and `decode` in one session.
fn print_chain(chain: &GatedChain, context: &Context) -> Result<()> {
    if context.out.json() {
        return Ok(());
    }
    let modules = "`prefill` and `decode`";
    let line = match (&chain.error, chain.tokens, &chain.not_compared) {
        (Some(error), ..) => format!("{}  {modules} in a session: {error}", "failed".red().bold()),
        (None, Some(tokens), _) => {
            let passed = "passed".green();
            format!("{passed}  {modules}, {tokens} tokens of a session as eager")
        }
        (None, None, why) => {
            let why = why.as_deref().unwrap_or_default();
            format!("{modules} were not compared in a session: {why}")
        }
    };
    context.out.line(line)
}

fn print(program: &GatedProgram, context: &Context) -> Result<()> {
    if context.out.json() {
        return Ok(());
    }
    let place = format!("{} {}", program.module, program.bucket);
    let line = match (&program.error, program.max_abs) {
        (Some(error), _) => format!("{}  {place}: {error}", "failed".red().bold()),
        (None, Some(max_abs)) => {
            let passed = "passed".green();
            format!("{passed}  {place}, at most {max_abs:.1e} from eager")
        }
        (None, None) => format!("{}  {place}", "passed".green()),
    };
    context.out.line(line)
}
