//! `precast --version -v`: the version, and what this host has. Files are read; only the Python is started.

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

/// A command line that asks for the version and for nothing else.
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
pub(super) struct Document {
    /// Version of precast.
    precast: &'static str,
    /// Version of the torch that `run` would use; none where none is found.
    torch: Option<String>,
    /// Its folder with `libtorch_cpu.so`.
    libtorch: Option<PathBuf>,
    /// Version and path of the Python that builds, or why it does not.
    python: String,
    /// GPUs and their driver.
    gpu: String,
    /// Path of the store, and what is in it.
    store: String,
    /// Names of the targets that this host builds and runs, for its own CPU; none without a torch.
    targets: Vec<String>,
}

/// Returns what a command line asks for that clap answered with the version; none where that is all.
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
    let document = Document {
        precast: env!("CARGO_PKG_VERSION"),
        targets: targets.collect(),
        torch: torch.as_ref().map(|torch| torch.version.clone()),
        libtorch,
        python: doctor::python(&launcher),
        gpu: doctor::gpu(&gpus),
        store: doctor::store(context),
    };
    match context.out.json() {
        true => context.out.document(&document)?,
        false => print(&document, context)?,
    }
    Ok(0)
}

fn print(document: &Document, context: &Context) -> Result<()> {
    context
        .out
        .line(format_args!("precast {}", document.precast))?;
    let folder = document
        .libtorch
        .as_ref()
        .map(|folder| folder.display().to_string());
    let torch = match (&document.torch, folder) {
        (Some(version), Some(folder)) => format!("{version}, {folder}"),
        (None, Some(folder)) => format!("of unknown version, {folder}"),
        (_, None) => "none".to_owned(),
    };
    let targets = match document.targets.is_empty() {
        true => "none without a torch".to_owned(),
        false => document.targets.join(", "),
    };
    let rows = [
        ("torch", &torch),
        ("Python", &document.python),
        ("GPU", &document.gpu),
        ("store", &document.store),
        ("target", &targets),
    ];
    for (name, found) in rows {
        context
            .out
            .line(format_args!("{} {found}", format!("{name:7}").dimmed()))?;
    }
    Ok(())
}
