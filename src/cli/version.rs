//! `precast --version -v`: the version, and the torch, Python, GPU, store and targets of this host. Files are read;
//! only the Python is started.

use std::{ffi::OsString, path::PathBuf};

use anyhow::Result;
use clap::{Parser, error::ErrorKind};
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{Context, Global, doctor, libtorch::LibtorchFolder, python::PythonArgs};
use crate::{
    inspect::libraries::torch_folder,
    target::{DeviceKind, Target, Torch, compute_capabilities},
};

/// A command line with `--version` and no command.
#[derive(Parser)]
#[command(name = "precast", disable_version_flag = true)]
pub(super) struct About {
    #[command(flatten)]
    pub(super) global: Global,
    #[command(flatten)]
    asked: Asked,
}

#[derive(clap::Args)]
pub(super) struct Asked {
    #[arg(short = 'V', long)]
    version: bool,
    #[command(flatten)]
    python: PythonArgs,
    #[command(flatten)]
    libtorch: LibtorchFolder,
}

/// `precast --version -v --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct VersionDocument {
    /// Version of precast.
    precast: &'static str,
    /// Version of the torch that `run` would use; none if there is no torch.
    torch: Option<String>,
    /// Its folder with `libtorch_cpu.so`.
    libtorch: Option<PathBuf>,
    /// Version and path of the Python that builds, or why it does not.
    python: String,
    /// GPUs and their driver.
    gpu: String,
    /// Path of the store, and the number of its models.
    store: String,
    /// Names of the targets that this host builds and runs, for its own CPU; none without a torch.
    targets: Vec<String>,
}

/// Returns the arguments of a command line with `--version` and `-v`, for which clap prints only the version.
pub(super) fn asked(error: &clap::Error, args: &[OsString]) -> Option<(Global, Asked)> {
    if error.kind() != ErrorKind::DisplayVersion {
        return None;
    }
    // One with a command has the version of that command.
    let about = About::try_parse_from(args).ok()?;
    (about.global.verbose > 0 && about.asked.version).then_some((about.global, about.asked))
}

pub(super) fn run(args: &Asked, context: &Context) -> Result<u8> {
    let gpus = compute_capabilities();
    let libtorch = args.libtorch.find().and_then(|named| torch_folder(&named));
    let site: Vec<_> = libtorch
        .iter()
        .filter_map(|lib| lib.ancestors().nth(2))
        .collect();
    let torch = Torch::find(&site);
    let mut kinds = vec![DeviceKind::Cpu];
    if !gpus.is_empty() && torch.as_ref().is_some_and(|torch| torch.cuda.is_some()) {
        kinds.push(DeviceKind::Cuda);
    }
    let targets = torch.iter().flat_map(|torch| {
        let target = |kind: &DeviceKind| Target::on_host(*kind, "native", torch, &gpus).name();
        kinds.iter().map(target)
    });
    let launcher = args.python.launcher("".as_ref());
    let document = VersionDocument {
        precast: env!("CARGO_PKG_VERSION"),
        targets: targets.collect(),
        torch: torch.as_ref().map(|torch| torch.version.clone()),
        libtorch,
        python: doctor::python(&launcher),
        gpu: doctor::gpu(&gpus),
        store: doctor::store(context),
    };
    if context.out.json() {
        context.out.document(&document)?;
    } else {
        print(&document, context)?;
    }
    Ok(0)
}

fn print(document: &VersionDocument, context: &Context) -> Result<()> {
    let out = &context.out;
    writeln!(out, "precast {}", document.precast)?;
    let folder = document.libtorch.as_ref().map(|folder| folder.display());
    let torch = match (&document.torch, folder) {
        (Some(version), Some(folder)) => format!("{version}, {folder}"),
        (None, Some(folder)) => format!("of unknown version, {folder}"),
        (_, None) => "none".to_owned(),
    };
    let targets = match document.targets.join(", ") {
        none if none.is_empty() => "none without a torch".to_owned(),
        targets => targets,
    };
    let rows = [
        ("torch", &torch),
        ("Python", &document.python),
        ("GPU", &document.gpu),
        ("store", &document.store),
        ("target", &targets),
    ];
    for (name, found) in rows {
        writeln!(out, "{} {found}", format!("{name:7}").dimmed())?;
    }
    Ok(())
}
