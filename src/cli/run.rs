//! `precast run`: one module on saved inputs.

use std::{
    collections::HashMap, fs::Permissions, os::unix::fs::PermissionsExt, path::Path, time::Instant,
};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{
    Context,
    exit::{Usage, warning},
    internal,
    phases::Phases,
    printer::note,
    progress::seconds,
    served::{RunArgs, model, place},
};
use crate::{
    Device, Digest, Runtime,
    inspect::stats::Counts,
    record::{Sizes, bucket_name},
    runtime::{Loading, Rung, command::tensors},
};

/// Adds counts to those of a file.
fn count(path: &Path, mut counts: Counts) -> Result<()> {
    if path.exists() {
        let [known] = &super::stats::read(&[path.to_owned()])?[..] else {
            return Ok(());
        };
        if known.model != counts.model {
            return Err(Usage {
                message: format!("`{}` counts calls of `{}`", path.display(), known.model),
                hint: "a file has the counts of one model: name another one".to_owned(),
            }
            .into());
        }
        counts.add(known.clone());
    }
    let told = || format!("can't write `{}`", path.display());
    // Whole or not at all: another process may be reading it.
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let mut file =
        tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new("."))).with_context(told)?;
    serde_json::to_writer(&mut file, &counts).with_context(told)?;
    file.as_file()
        .set_permissions(Permissions::from_mode(0o644))
        .with_context(told)?;
    file.persist(path).with_context(told)?;
    Ok(())
}

/// `precast run MODULE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document<'a> {
    model: &'a str,
    module: &'a str,
    /// As `cpu` or `cuda:0`.
    device: String,
    program: Digest,
    /// The bucket that answered; absent for a program that takes every size.
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<&'a Sizes>,
    #[cfg_attr(test, schemars(extend("enum" = ["exact", "padded", "dynamic", "eager"])))]
    rung: &'static str,
    /// The sizes of the request.
    request: Sizes,
    outputs: Vec<Tensor<'a>>,
    load_seconds: f64,
    run_seconds: f64,
    /// Phase -> seconds.
    phase_seconds: HashMap<&'static str, f64>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Tensor<'a> {
    name: &'a str,
    dtype: String,
    shape: Vec<i64>,
}

pub(super) fn run(args: &RunArgs, context: &Context) -> Result<u8> {
    let store = context.open_with(args.weights.unpacked())?;
    let name = model(&store, args.model.as_deref())?;
    let device = place(&store, &name, args.device)?;
    let bytes = std::fs::read(&args.inputs)
        .with_context(|| format!("can't read `{}`", args.inputs.display()))?;
    let libtorch = args.libtorch.open()?;
    let inputs =
        tensors::read(&bytes).with_context(|| format!("can't use `{}`", args.inputs.display()))?;
    let trial = internal::trial(&store, context)?;
    let phases = Phases::default();
    let started = Instant::now();
    let model = phases.during(|| {
        // One request is answered: programs that it does not need are not loaded.
        Runtime::new(&store, device)?
            .loading(Loading::OnDemand)
            .trial(trial)
            .eager_fallback(!args.compiled)
            .load(&name)
    })?;
    let loaded = started.elapsed().as_secs_f64();
    if context.verbose > 0 {
        note(format_args!(
            "loaded `{name}` from `{}` for {device}, only what is asked for",
            context.store.display()
        ));
        let (version, folder) = (&libtorch.version, libtorch.folder.display());
        note(format_args!("torch {version} of `{folder}`"));
        for (name, tensor) in &inputs {
            let (dtype, shape) = (tensor.dtype_name(), tensor.shape());
            note(format_args!("input {name}: {dtype} {shape:?}"));
        }
    }
    let named: Vec<_> = inputs
        .into_iter()
        .map(|(name, tensor)| Ok((name, tensor.to_device(device)?)))
        .collect::<Result<_>>()?;
    let borrowed: Vec<_> = named
        .iter()
        .map(|(name, tensor)| (name.as_str(), tensor))
        .collect();
    let started = Instant::now();
    let answer = phases.during(|| model.run_named(&args.module, &borrowed));
    if let Some(path) = &args.counts {
        count(path, model.counts())?;
    }
    let answer = answer?;
    answer.check()?;
    let outputs: Vec<_> = answer
        .named()
        .map(|(name, tensor)| Ok((name.to_owned(), tensor.to_device(Device::Cpu)?)))
        .collect::<Result<_>>()?;
    for lost in model.quarantined() {
        let bucket = bucket_name(&lost.bucket);
        warning(&format!(
            "{} {bucket} is set aside: {}",
            lost.module, lost.error
        ));
    }
    let served = answer.served();
    let took = started.elapsed().as_secs_f64();
    if context.verbose > 0 {
        note(format_args!(
            "asked for {}, answered by {} ({})",
            bucket_name(&served.request()),
            served.program().bucket(),
            served.rung().name()
        ));
        for text in phases.warnings() {
            note(text);
        }
        for (phase, took) in phases.seconds() {
            note(format_args!("{phase:<12} {}", seconds(took)));
        }
    }
    if let Some(path) = &args.outputs {
        tensors::write(path, &outputs)
            .with_context(|| format!("can't write `{}`", path.display()))?;
    }
    let shapes = outputs
        .iter()
        .map(|(name, tensor)| (name, tensor.dtype_name(), tensor.shape()));
    if context.out.json() {
        let outputs = shapes.map(|(name, dtype, shape)| Tensor { name, dtype, shape });
        context.out.document(&Document {
            model: &name,
            module: &args.module,
            device: device.to_string(),
            program: served.program().id,
            bucket: served.bucket(),
            rung: served.rung().name(),
            request: served.request(),
            outputs: outputs.collect(),
            load_seconds: loaded,
            run_seconds: took,
            phase_seconds: phases.seconds(),
        })?;
        return Ok(0);
    }
    let bucket = bucket_name(served.bucket().unwrap_or(&served.request()));
    let id = served.program().id.short();
    context.out.line(match served.rung() {
        Rung::Padded => format!(
            "{} {bucket} {id}, padded from {}",
            args.module,
            bucket_name(&served.request())
        ),
        rung => format!("{} {bucket} {id}, {}", args.module, rung.name()),
    })?;
    for (name, dtype, shape) in shapes {
        context
            .out
            .line(format_args!("{name}: {dtype} {shape:?}"))?;
    }
    if !context.quiet {
        note(format_args!(
            "loaded in {}, ran in {} on {device}",
            seconds(loaded),
            seconds(took)
        ));
    }
    Ok(0)
}
