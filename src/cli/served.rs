//! The arguments of the commands that run artifacts. Known without libtorch, so that `precast` can parse them, explain
//! them and hand over.

use std::path::PathBuf;

use crate::Device;

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
    /// The model, with `@NAME` for a named release [default: the only one in the store]
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Where to run: `cpu` or `cuda:0` [default: what the model was built for]
    #[arg(long, value_parser = device)]
    pub(super) device: Option<Device>,
}

#[derive(clap::Args)]
pub(super) struct BenchArgs {
    /// The module, as the spec names it
    pub(super) module: String,
    /// Callers at once; each has a thread
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) threads: u16,
    /// How long each bucket is measured, in seconds
    #[arg(long, default_value_t = 2.0)]
    pub(super) seconds: f64,
    /// Whether programs run as CUDA graphs: as built, always or never
    #[arg(long, value_enum, default_value_t = GraphChoice::AsBuilt)]
    pub(super) graphs: GraphChoice,
    /// The model, with `@NAME` for a named release [default: the only one in the store]
    #[arg(long)]
    pub(super) model: Option<String>,
    /// Where to run: `cpu` or `cuda:0` [default: what the model was built for]
    #[arg(long, value_parser = device)]
    pub(super) device: Option<Device>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum GraphChoice {
    AsBuilt,
    Always,
    Never,
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
