//! Arguments of the commands that run artifacts, and the model and device they select. Nothing here needs libtorch:
//! `precast` parses and explains these arguments before it starts the program that does.

use std::path::PathBuf;

use anyhow::Result;

use super::exit::{Missing, Usage};
use super::libtorch::LibtorchArgs;
use crate::{Device, record::Sizes};
use crate::{Store, record::split_model, store::Unpacked, target::DeviceKind};

#[derive(clap::Args)]
pub(super) struct RunArgs {
    /// The module, as the spec names it
    pub(super) module: String,
    /// A safetensors file whose tensors are named as the module's inputs
    #[arg(long, value_name = "FILE")]
    pub(super) inputs: PathBuf,
    /// Where to write the outputs, as safetensors
    #[arg(long, value_name = "FILE")]
    pub(super) outputs: Option<PathBuf>,
    /// Add what was asked for, and what answered, to this file: `precast stats` reads it
    #[arg(long, value_name = "FILE")]
    pub(super) counts: Option<PathBuf>,
    /// Never let eager answer in place of a compiled program, be it faster or all that loads
    #[arg(long)]
    pub(super) compiled: bool,
    /// The model, with `@NUMBER` or `@NAME` for a release of it [default: the only one in the store]
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Where to run: `cpu` or `cuda:0` [default: what the model was built for]
    #[arg(long, value_parser = device)]
    pub(super) device: Option<Device>,
    #[command(flatten)]
    pub(super) weights: WeightArgs,
    #[command(flatten)]
    pub(super) libtorch: LibtorchArgs,
}

#[derive(clap::Args)]
pub(super) struct BenchArgs {
    /// The module, as the spec names it
    pub(super) module: String,
    /// Callers at once; each has a thread
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) threads: u16,
    /// How long each bucket is measured, in seconds, alone and again by all threads
    #[arg(long, default_value_t = 2.0)]
    pub(super) seconds: f64,
    /// Measure this beside it, in turns on the same inputs
    #[arg(long, value_enum)]
    pub(super) against: Option<Against>,
    /// Measure requests of these sizes, as `batch=3,seq=20` (may be repeated) [default: each bucket's own]
    #[arg(long, value_name = "DIM=SIZE,…", value_parser = sizes)]
    pub(super) at: Vec<Sizes>,
    /// Never let eager answer in place of a compiled program, be it faster or all that loads
    #[arg(long)]
    pub(super) compiled: bool,
    /// Whether programs run as CUDA graphs: as built, always or never
    #[arg(long, value_enum, default_value_t = GraphChoice::AsBuilt)]
    pub(super) graphs: GraphChoice,
    /// The model, with `@NUMBER` or `@NAME` for a release of it [default: the only one in the store]
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Where to run: `cpu` or `cuda:0` [default: what the model was built for]
    #[arg(long, value_parser = device)]
    pub(super) device: Option<Device>,
    #[command(flatten)]
    pub(super) weights: WeightArgs,
    #[command(flatten)]
    pub(super) libtorch: LibtorchArgs,
}

/// What is done with the unpacked weights before they are used.
#[derive(clap::Args)]
pub(super) struct WeightArgs {
    /// Map weights without hashing them first: what changed on the disk is not noticed
    #[arg(long, conflicts_with = "copy_weights")]
    trust_unpacked: bool,
    /// Copy weights to memory of this process, out of the reach of what happens to their file
    #[arg(long)]
    copy_weights: bool,
}

impl WeightArgs {
    pub(super) fn unpacked(&self) -> Unpacked {
        match (self.trust_unpacked, self.copy_weights) {
            (true, _) => Unpacked::Trust,
            (_, true) => Unpacked::Copy,
            _ => Unpacked::Check,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Against {
    /// The exported graph, without Python
    Eager,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum GraphChoice {
    AsBuilt,
    Always,
    Never,
}

/// Returns the model that was named, or the only one.
pub(super) fn model(store: &Store, named: Option<&str>) -> Result<String> {
    if let Some(name) = named {
        super::name::release(store, name)?;
        return Ok(name.to_owned());
    }
    let models = store.releases().models()?;
    match models.as_slice() {
        [only] => {
            super::name::release(store, only)?;
            Ok(only.clone())
        }
        [] => Err(Missing {
            message: format!("the store `{}` has no model", store.path().display()),
            hint: "`precast build` makes one".to_owned(),
        }
        .into()),
        several => Err(Usage {
            message: format!(
                "the store has {} models: name one with `--model`",
                several.len()
            ),
            hint: format!("it has {}", several.join(", ")),
        }
        .into()),
    }
}

/// Returns the device that was named, or the first one of the kind that `model` was built for.
pub(super) fn place(store: &Store, model: &str, named: Option<Device>) -> Result<Device> {
    if let Some(device) = named {
        return Ok(device);
    }
    let (name, release) = split_model(model);
    let release = store.releases().get(name, release)?;
    let first = release.and_then(|release| release.programs.first().copied());
    let program = first
        .map(|id| store.records().program(&id))
        .transpose()?
        .flatten();
    Ok(match program.map(|program| program.target.device) {
        Some(DeviceKind::Cuda) => Device::Cuda(0),
        _ => Device::Cpu,
    })
}

/// Parses `batch=3,seq=20`.
fn sizes(text: &str) -> Result<Sizes, String> {
    let size = |part: &str| {
        let (dim, size) = part.split_once('=')?;
        let size = size.trim().parse().ok().filter(|&size: &i64| size > 0)?;
        Some((dim.trim().to_owned(), size))
    };
    let parsed = text.split(',').map(size).collect::<Option<Sizes>>();
    parsed.ok_or_else(|| "expected sizes of at least 1, as `batch=3,seq=20`".to_owned())
}

/// Parses `cpu`, `cuda` or `cuda:N`.
fn device(text: &str) -> Result<Device, String> {
    match text.split_once(':') {
        None if text == "cpu" => Ok(Device::Cpu),
        None if text == "cuda" => Ok(Device::Cuda(0)),
        Some(("cuda", number)) => number
            .parse()
            .map(Device::Cuda)
            .map_err(|e| format!("`{number}`: {e}")),
        _ => Err("expected `cpu`, `cuda` or `cuda:N`".to_owned()),
    }
}
