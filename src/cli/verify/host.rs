//! `precast verify --host`: runs the gates of releases on this host, under its torch, and remembers those that pass.
//!
//! Inputs are drawn from the program's record. Eager is the program's own graph, run by this libtorch. The comparison is that
//! of a build, with the tolerances of the program's first gate, in a process of its own.

use std::{path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{super::python::PythonArgs, Context};
use crate::{
    Device, Digest, Model, Runtime, RuntimeError, Target,
    build::{
        BuildError,
        gate::{self, GateRequest},
        host::{self, HostOptions},
    },
    cli::{
        build::gate_args,
        exit::{FAILED, Missing},
        internal,
        libtorch::LibtorchArgs,
    },
    gate::samples,
    record::{Program, Release, Shim, Sizes, split_model},
    runtime::{self, Tensor, command::tensors},
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

/// What came of one release.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct Gated {
    model: String,
    /// Number of the release that was gated.
    release: u64,
    /// Full version of the torch that it was built with.
    built_with: String,
    /// Full version of the torch of this host.
    torch: String,
    programs: Vec<Row>,
    passed: bool,
    /// Number of the release that may run here; none where a gate failed.
    runs_as: Option<u64>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Row {
    id: Digest,
    module: String,
    bucket: String,
    /// Largest absolute difference to eager; none where nothing was compared.
    max_abs: Option<f64>,
    /// Why it failed.
    error: Option<String>,
}

pub(super) fn run(args: &HostArgs, context: &Context) -> Result<u8> {
    let store = context.open()?;
    let models = match args.models.is_empty() {
        true => store.models()?,
        false => args.models.clone(),
    };
    if models.is_empty() {
        return Err(Missing {
            message: format!("the store `{}` has no model", store.path().display()),
            hint: "`precast build` makes one".to_owned(),
        }
        .into());
    }
    let open = args.libtorch.open_for(args.python.named())?;
    let launcher = args.python.launcher_beside(&open.folder);
    let gates = gate::Launcher {
        program: match &args.python.gate {
            Some(gate) => gate.clone(),
            None => internal::own_program()?,
        },
        args: [
            gate_args(&launcher),
            // The one that is open here.
            vec!["--libtorch".into(), open.folder.clone().into()],
        ]
        .concat(),
    };
    let options = HostOptions {
        store: &store,
        launcher,
        gate: gates,
        scratch: std::env::temp_dir(),
        cancel: Arc::clone(&context.cancel),
    };
    let mut all = Vec::new();
    for model in &models {
        all.push(gate_release(model, &options, context)?);
    }
    let passed = all.iter().all(|gated| gated.passed);
    if context.out.json() {
        context
            .out
            .document(&super::Document::Host { releases: all })?;
    }
    Ok(if passed { 0 } else { FAILED })
}

fn gate_release(model: &str, options: &HostOptions<'_>, context: &Context) -> Result<Gated> {
    let store = options.store;
    super::super::name::release(store, model)?;
    let (name, which) = split_model(model);
    let release = store.release(name, which)?;
    let release = release.with_context(|| format!("the release of `{model}` is gone"))?;
    let programs = release.programs.iter().map(|id| store.program(id));
    let programs: Vec<Program> = programs
        .filter_map(Result::transpose)
        .collect::<Result<_, _>>()?;
    let first = programs
        .first()
        .with_context(|| format!("release {} of `{name}` has no program", release.seq))?;
    let device = match first.target.device {
        DeviceKind::Cpu => Device::Cpu,
        DeviceKind::Cuda => Device::Cuda(0),
    };
    let host = runtime::command::host(device)?;
    not_older(first, device, &host)?;
    let shim = host::shim(options, name, &host)?;
    let gates = Gates {
        release: &release,
        programs: &programs,
        runtime: Runtime::new(store, device)?,
        device,
        shim: &shim,
        options,
    };
    let mut gated = Gated {
        model: name.to_owned(),
        release: release.seq,
        built_with: first.target.torch.clone(),
        torch: host.torch.clone(),
        programs: Vec::new(),
        passed: true,
        runs_as: None,
    };
    for program in &programs {
        let row = gates.row(program)?;
        gated.passed &= row.error.is_none();
        print(&row, context)?;
        gated.programs.push(row);
    }
    if gated.passed {
        let (published, new) = host::publish(store, release, shim)?;
        gated.runs_as = Some(published.seq);
        if new && !context.quiet {
            super::super::printer::note(format_args!(
                "{} {name} release {}: it runs under torch {} too",
                "published".green().bold(),
                published.seq,
                host.torch
            ));
        }
    }
    Ok(gated)
}

/// Refuses a torch that is older than the one that a program was built with.
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

fn print(row: &Row, context: &Context) -> Result<()> {
    if context.out.json() {
        return Ok(());
    }
    let place = format!("{} {}", row.module, row.bucket);
    let line = match (&row.error, row.max_abs) {
        (Some(error), _) => format!("{}  {place}: {error}", "failed".red().bold()),
        (None, Some(most)) => format!(
            "{}  {place}, at most {most:.1e} from eager",
            "passed".green()
        ),
        (None, None) => format!("{}  {place}", "passed".green()),
    };
    context.out.line(line)
}

/// The gates of one release.
struct Gates<'a> {
    release: &'a Release,
    programs: &'a [Program],
    runtime: Runtime,
    device: Device,
    shim: &'a Shim,
    options: &'a HostOptions<'a>,
}

impl Gates<'_> {
    fn row(&self, program: &Program) -> Result<Row> {
        let mut row = Row {
            id: program.id,
            module: program.module.clone(),
            bucket: program.bucket(),
            max_abs: None,
            error: None,
        };
        match self.gate(program) {
            Ok(most) => row.max_abs = most,
            Err(error) => match error.downcast_ref::<BuildError>() {
                Some(BuildError::Interrupted) => return Err(error),
                Some(BuildError::Gate { message, .. }) => row.error = Some(message.clone()),
                _ => row.error = Some(format!("{error:#}")),
            },
        }
        Ok(row)
    }

    /// Returns the largest difference to eager; none for a program that is eager's, which only runs.
    fn gate(&self, program: &Program) -> Result<Option<f64>> {
        let eager = self.eager(program)?;
        let folder = tempfile::tempdir()?;
        let samples = folder.path().join("samples.safetensors");
        let mut all = self.answered(&eager, program, &program.sizes, "")?;
        if program.steps.is_empty() {
            return Ok(None);
        }
        if let Some(any_size) = self.any_size(program)
            && let smaller = self.smaller(program, any_size)
            && !smaller.is_empty()
        {
            let eager = self.eager(any_size)?;
            for (index, sizes) in smaller.iter().enumerate() {
                let prefix = format!("smaller.{index}.");
                all.extend(self.answered(&eager, program, sizes, &prefix)?);
            }
        }
        tensors::write(&samples, &all)?;
        let report = host::gate(self.options, &self.request(program, &samples))?;
        if let Some(why) = report.exact().into_values().next() {
            anyhow::bail!("a padded request differs from eager: {why}");
        }
        let compared = report.outputs.get().into_iter().flatten();
        let differences = compared.map(|output| output.max_abs.unwrap_or(0.0));
        Ok(Some(differences.fold(0.0, f64::max)))
    }

    fn request(&self, program: &Program, samples: &Path) -> GateRequest {
        let first = program.receipt.gate_given.get();
        GateRequest {
            store: self.options.store.path().to_owned(),
            program: program.clone(),
            others: vec![],
            exclusive: false,
            shim: self.shim.clone(),
            weights: self.release.weights,
            aliases: self.release.aliases.clone(),
            samples: samples.to_owned(),
            steps: first.map_or(1, |given| given.steps),
            rtol: first.and_then(|given| given.rtol),
            atol: first.and_then(|given| given.atol),
            computed_in: first
                .map(|given| given.computed_in.clone())
                .unwrap_or_default(),
        }
    }

    /// Loads the exported graph of a program.
    fn eager(&self, program: &Program) -> Result<Model> {
        anyhow::ensure!(
            program.eager.is_some(),
            "it has no graph that eager could run: build it again"
        );
        let exported = Program {
            steps: Vec::new(),
            ..program.clone()
        };
        Ok(self.runtime.load_programs(
            &self.release.model,
            vec![exported],
            std::slice::from_ref(self.shim),
            self.release.weights,
            self.release.aliases.clone(),
        )?)
    }

    /// Returns the program with the graph for every size of the module, of the variant with these inputs, if it has one.
    fn any_size(&self, program: &Program) -> Option<&Program> {
        let mut others = self.programs.iter();
        others.find(|other| {
            other.title() == program.title() && other.dynamic.is_some() && other.eager.is_some()
        })
    }

    /// Returns sizes that are padded into the bucket, where padding is allowed, and that a graph takes: about half of each, and
    /// one less.
    fn smaller(&self, program: &Program, any_size: &Program) -> Vec<Sizes> {
        if program.dynamic.is_some() {
            return vec![];
        }
        let less = |by: fn(i64) -> i64| -> Sizes {
            let sizes = program.sizes.iter();
            sizes
                .map(|(dim, &size)| {
                    let smaller = program.padding.allows(dim);
                    (
                        dim.clone(),
                        if smaller {
                            by(size).clamp(1, size)
                        } else {
                            size
                        },
                    )
                })
                .collect()
        };
        let mut all = vec![less(|size| size / 2 + 1), less(|size| size - 1)];
        let takes = |(dim, size): (&String, &i64)| {
            let bounds = any_size.dynamic.as_ref().and_then(|dims| dims.get(dim));
            bounds.is_some_and(|bounds| (bounds.min..=bounds.max).contains(size))
        };
        all.retain(|sizes| *sizes != program.sizes && sizes.iter().all(takes));
        all.dedup();
        all
    }

    /// Returns inputs of these sizes and eager's outputs, as a file of samples names them.
    fn answered(
        &self,
        eager: &Model,
        program: &Program,
        sizes: &Sizes,
        prefix: &str,
    ) -> Result<Vec<(String, Tensor)>> {
        let inputs = samples(program, sizes, self.device)?;
        let out = eager.run(&program.module, &inputs)?;
        out.check()?;
        let named = |kind: &str, all: Vec<Tensor>| -> Vec<(String, Tensor)> {
            let numbered = all.into_iter().enumerate();
            numbered
                .map(|(i, tensor)| (format!("{prefix}{kind}.{i}"), tensor))
                .collect()
        };
        let cpu = |tensor: &Tensor| tensor.to_device(Device::Cpu);
        let outputs = out.iter().map(cpu).collect::<Result<_, _>>()?;
        let inputs = inputs.iter().map(cpu).collect::<Result<_, _>>()?;
        let mut all = named("in", inputs);
        all.extend(named("out", outputs));
        Ok(all)
    }
}
