//! `precast run`: one module on saved inputs.

use std::{
    collections::HashMap,
    fs::{File, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Instant,
};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{
    Context,
    exit::{Refusal, warning},
    internal,
    phases::Phases,
    progress::seconds,
    served::RunArgs,
};
use crate::{
    Device, Digest, Model, Runtime, RuntimeError, Store,
    inspect::stats::Counts,
    record::{Sizes, bucket_name},
    runtime::{Loading, Outputs, Tensor, command::tensors, counters::Rung},
};

/// Adds counts to those of a file.
fn count(path: &Path, mut counts: Counts) -> Result<()> {
    if path.exists()
        && let [known] = &super::stats::read(&[path.to_owned()])?[..]
    {
        if known.model != counts.model {
            let message = format!("`{}` counts calls of `{}`", path.display(), known.model);
            let hint = "a file has the counts of one model: name another one";
            return Err(Refusal::usage(message, hint).into());
        }
        counts.add(known.clone());
    }
    // Whole or not at all: another process may read it at the same time.
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let write = || -> Result<()> {
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer(&mut file, &counts)?;
        (file.as_file()).set_permissions(Permissions::from_mode(0o644))?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("can't write `{}`", path.display()))
}

/// `precast run MODULE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct RunDocument<'a> {
    model: &'a str,
    module: &'a str,
    /// As `cpu` or `cuda:0`.
    device: String,
    program: Digest,
    /// The bucket that answered; absent for a program of every size.
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<&'a Sizes>,
    #[cfg_attr(test, schemars(extend("enum" = ["exact", "padded", "dynamic", "eager"])))]
    rung: &'static str,
    /// The sizes of the request.
    request: Sizes,
    outputs: Vec<OutputLine<'a>>,
    load_seconds: f64,
    run_seconds: f64,
    /// Phase -> seconds.
    phase_seconds: HashMap<&'static str, f64>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct OutputLine<'a> {
    name: &'a str,
    dtype: String,
    shape: Vec<i64>,
}

/// Runs the module, in a session where it has states or the session's file is named.
fn answer(
    args: &RunArgs,
    model: &Model,
    inputs: &[(&str, &Tensor)],
) -> Result<Outputs, RuntimeError> {
    let programs = model.programs(&args.module);
    let stateful = programs.iter().any(|program| !program.states.is_empty());
    if !stateful && args.session.is_none() {
        return model.run_named(&args.module, inputs);
    }
    let mut session = model.session()?;
    if let Some(path) = args.session.as_ref().filter(|path| path.exists()) {
        session.load(path)?;
    }
    let answer = session.run_named(&args.module, inputs)?;
    if let Some(path) = &args.session {
        session.save(path)?;
    }
    Ok(answer)
}

pub(super) fn run(args: &RunArgs, context: &Context) -> Result<u8> {
    let (store, name, device) = args.place.open(context)?;
    let path = args.inputs.display();
    let file = File::open(&args.inputs).with_context(|| format!("can't read `{path}`"))?;
    let libtorch = args.place.libtorch.open()?;
    let inputs = tensors::read(file).with_context(|| format!("can't use `{path}`"))?;
    let phases = Phases::default();
    let started = Instant::now();
    let model = phases.during(|| load(args, &store, &name, device, context))?;
    let load_seconds = started.elapsed().as_secs_f64();
    if context.verbose > 0 {
        let path = context.store.display();
        note!("loaded `{name}` from `{path}` for {device}, only what is asked for");
        let (version, folder) = (&libtorch.version, libtorch.folder.display());
        note!("torch {version} of `{folder}`");
        for (name, tensor) in &inputs {
            let (dtype, shape) = (tensor.dtype_name(), tensor.shape());
            note!("input {name}: {dtype} {shape:?}");
        }
    }
    let inputs = inputs.into_iter();
    let inputs = inputs.map(|(name, tensor)| Ok((name, tensor.to_device(device)?)));
    let inputs: Vec<_> = inputs.collect::<Result<_>>()?;
    let inputs: Vec<_> = inputs
        .iter()
        .map(|(name, one)| (name.as_str(), one))
        .collect();
    let started = Instant::now();
    let answer = phases.during(|| answer(args, &model, &inputs));
    if let Some(path) = &args.counts {
        count(path, model.counts())?;
    }
    let answer = answer?;
    answer.check()?;
    let outputs = answer.named();
    let outputs = outputs.map(|(name, one)| Ok((name.to_owned(), one.to_device(Device::Cpu)?)));
    let outputs: Vec<_> = outputs.collect::<Result<_>>()?;
    let run_seconds = started.elapsed().as_secs_f64();
    for lost in model.quarantined() {
        let (module, bucket) = (&lost.module, bucket_name(&lost.bucket));
        warning(&format!("{module} {bucket} is set aside: {}", lost.error));
    }
    let served = answer.served();
    if context.verbose > 0 {
        let (asked, bucket) = (bucket_name(&served.request()), served.program().bucket());
        note!(
            "asked for {asked}, answered by {bucket} ({})",
            served.rung().name()
        );
        phases.print();
    }
    if let Some(path) = &args.outputs {
        tensors::write(path, &outputs)
            .with_context(|| format!("can't write `{}`", path.display()))?;
    }
    let outputs = outputs.iter().map(|(name, tensor)| OutputLine {
        name,
        dtype: tensor.dtype_name(),
        shape: tensor.shape(),
    });
    print(
        &RunDocument {
            model: &name,
            module: &args.module,
            device: device.to_string(),
            program: served.program().id,
            bucket: served.bucket(),
            rung: served.rung().name(),
            request: served.request(),
            outputs: outputs.collect(),
            load_seconds,
            run_seconds,
            phase_seconds: phases.seconds(),
        },
        served.rung() == Rung::Padded,
        context,
    )?;
    Ok(0)
}

/// Loads a model for one request: only the programs that it needs.
fn load(
    args: &RunArgs,
    store: &Store,
    name: &str,
    device: Device,
    context: &Context,
) -> Result<Model> {
    let model = Runtime::new(store, device)?
        .loading(Loading::OnDemand)
        .trial(internal::trial(store, context)?)
        .eager_fallback(!args.compiled)
        .load(name)?;
    Ok(model)
}

fn print(document: &RunDocument<'_>, padded: bool, context: &Context) -> Result<()> {
    let out = &context.out;
    if out.json() {
        return out.document(document);
    }
    let request = bucket_name(&document.request);
    let bucket = document.bucket.map_or_else(|| request.clone(), bucket_name);
    let (module, id) = (document.module, document.program.short());
    if padded {
        writeln!(out, "{module} {bucket} {id}, padded from {request}")?;
    } else {
        writeln!(out, "{module} {bucket} {id}, {}", document.rung)?;
    }
    for OutputLine { name, dtype, shape } in &document.outputs {
        writeln!(out, "{name}: {dtype} {shape:?}")?;
    }
    let (loaded, ran) = (
        seconds(document.load_seconds),
        seconds(document.run_seconds),
    );
    note!("loaded in {loaded}, ran in {ran} on {}", document.device);
    Ok(())
}
