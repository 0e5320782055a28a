//! Arguments of the commands that run artifacts, and the model and the device that they select.

use std::path::PathBuf;

use anyhow::Result;

use super::{Context, exit::Refusal, libtorch::LibtorchArgs, name};
use crate::{
    Device, Store, record::Sizes, runtime::cuda::Graphs, store::Unpacked, target::DeviceKind,
};

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
    /// Start with the states of this file, if it is there, and write them to it after the call
    #[arg(long, value_name = "FILE")]
    pub(super) session: Option<PathBuf>,
    /// Add the request and the rung that answered it to this file of counts, for `precast stats`
    #[arg(long, value_name = "FILE")]
    pub(super) counts: Option<PathBuf>,
    /// Never let eager answer in place of a compiled program, even if it is faster or the program does not load
    #[arg(long)]
    pub(super) compiled: bool,
    #[command(flatten)]
    pub(super) place: PlaceArgs,
}

#[derive(clap::Args)]
pub(super) struct BenchArgs {
    /// The module, as the spec names it
    pub(super) module: String,
    /// Callers at once; each has a thread
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) threads: u16,
    /// Seconds of each measurement of a bucket: single calls, then calls by all threads
    #[arg(long, default_value_t = 2.0)]
    pub(super) seconds: f64,
    /// Measure this too, in turns on the same inputs: the exported graph, without Python
    #[arg(long, value_parser = ["eager"])]
    pub(super) against: Option<String>,
    /// Measure requests of these sizes, as `batch=3,seq=20` (may be repeated) [default: each bucket's own]
    #[arg(long, value_name = "DIM=SIZE,…", value_parser = sizes)]
    pub(super) at: Vec<Sizes>,
    /// Never let eager answer in place of a compiled program, even if it is faster or the program does not load
    #[arg(long)]
    pub(super) compiled: bool,
    /// When programs run as CUDA graphs
    #[arg(long, default_value = "as-built", value_parser = ["as-built", "always", "never"])]
    graphs: String,
    #[command(flatten)]
    pub(super) place: PlaceArgs,
}

/// The model, its device, its weights and its libtorch.
#[derive(clap::Args)]
pub(super) struct PlaceArgs {
    /// The model, with `@NUMBER` or `@NAME` for a release of it [default: the only one in the store]
    #[arg(long)]
    model: Option<String>,
    /// The device, as `cpu` or `cuda:0` [default: the kind that the model was built for]
    #[arg(long, value_parser = device)]
    device: Option<Device>,
    #[command(flatten)]
    weights: WeightArgs,
    #[command(flatten)]
    pub(super) libtorch: LibtorchArgs,
}

impl PlaceArgs {
    /// Opens the store, and chooses the model and the device.
    pub(super) fn open(&self, context: &Context) -> Result<(Store, String, Device)> {
        let store = context.open_with(self.weights.unpacked())?;
        let name = model(&store, self.model.as_deref())?;
        let device = match self.device {
            Some(device) => device,
            None => built_for(&store, &name)?,
        };
        Ok((store, name, device))
    }
}

/// How unpacked weights are read.
#[derive(clap::Args)]
struct WeightArgs {
    /// Map weights without hashing them: changes of the files are not noticed
    #[arg(long, conflicts_with = "copy_weights")]
    trust_unpacked: bool,
    /// Copy weights to memory of this process: later changes of the files have no effect
    #[arg(long)]
    copy_weights: bool,
}

impl WeightArgs {
    fn unpacked(&self) -> Unpacked {
        match (self.trust_unpacked, self.copy_weights) {
            (true, _) => Unpacked::Trust,
            (_, true) => Unpacked::Copy,
            _ => Unpacked::Check,
        }
    }
}

impl BenchArgs {
    pub(super) fn graphs(&self) -> Graphs {
        match self.graphs.as_str() {
            "always" => Graphs::Always,
            "never" => Graphs::Never,
            _ => Graphs::AsBuilt,
        }
    }
}

/// Returns the model with this name, or the only one.
fn model(store: &Store, named: Option<&str>) -> Result<String> {
    let models = store.releases().models()?;
    let name = match (named, models.as_slice()) {
        (Some(name), _) => name,
        (None, [only]) => only,
        (None, []) => return Err(name::no_model(store).into()),
        (None, several) => {
            let number = several.len();
            let message = format!("the store has {number} models: name one with `--model`");
            return Err(Refusal::usage(message, format!("it has {}", several.join(", "))).into());
        }
    };
    name::release(store, name)?;
    Ok(name.to_owned())
}

/// Returns the first device of the kind that a model was built for.
fn built_for(store: &Store, model: &str) -> Result<Device> {
    let release = name::release(store, model)?;
    let first = release.programs.first();
    let program = first.map(|id| store.records().program(id)).transpose()?;
    Ok(
        match program.flatten().map(|program| program.target.device) {
            Some(DeviceKind::Cuda) => Device::Cuda(0),
            _ => Device::Cpu,
        },
    )
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
pub(super) fn device(text: &str) -> Result<Device, String> {
    match (text, text.split_once(':')) {
        ("cpu", _) => Ok(Device::Cpu),
        ("cuda", _) => Ok(Device::Cuda(0)),
        (_, Some(("cuda", number))) => {
            let number = number.parse().map_err(|e| format!("`{number}`: {e}"));
            number.map(Device::Cuda)
        }
        _ => Err("expected `cpu`, `cuda` or `cuda:N`".to_owned()),
    }
}
