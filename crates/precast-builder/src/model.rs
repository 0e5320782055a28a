//! Opens the model in a worker: its sources, packages and settings.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use precast_store::{Target, record::Entry, target::Torch};

use super::{
    BuildError, names,
    progress::Event,
    protocol::{Hello, Opened, Request},
    weight_file,
    worker::Worker,
    workers::Workers,
};
use crate::{
    plan::Known,
    spec::{CommandLine, Spec},
};

/// Maximum time for the import of the entry and the creation of the model.
pub(super) const OPEN_LIMIT: Duration = Duration::from_secs(1800);

/// The model, once a worker holds it.
pub(super) struct LoadedModel {
    pub known: Known,
    /// Distinguishes the model's weights from others.
    pub fingerprint: Option<String>,
    /// The files that workers read weights from; empty for the model's own.
    pub weights: Vec<PathBuf>,
}

/// Has a worker hold the model, with the weights of these files. Returns it, and the part of the keys that the model
/// decides.
pub(super) fn open(
    workers: &Workers<'_>,
    (mut worker, hello): (Worker, Hello),
    weights: Vec<PathBuf>,
) -> Result<(Worker, LoadedModel), BuildError> {
    let options = workers.options;
    for one in &hello.off {
        let message = format!("torch {}: {} is off: {}", hello.torch, one.what, one.why);
        workers.progress.event(&Event::Note { message: &message });
    }
    let started = Instant::now();
    let command_line = &options.request.command_line;
    let opened = match open_model(options.spec, command_line, &weights, &mut worker) {
        // A refused file of weights leaves nothing in the store.
        Err(BuildError::Worker(error)) if !error.trace.is_empty() && error.code != "weights" => {
            let log = format!("{error}\n\n{}", error.trace);
            let log = options.store.objects().put_bytes(log.as_bytes())?;
            return Err(BuildError::Model { error, log });
        }
        opened => opened?,
    };
    let seconds = started.elapsed().as_secs_f64();
    workers.progress.event(&Event::Opened {
        sources: opened.sources.len(),
        packages: opened.packages.len(),
        seconds,
    });
    for message in &opened.notes {
        workers.progress.event(&Event::Note { message });
    }
    let spec = options.spec;
    let entry = Entry {
        entry: spec.model.entry.clone(),
        sources: opened.sources,
        packages: opened.packages,
        declared: opened.declared,
        site_packages: hello.site_packages.clone(),
    };
    let torch = Torch {
        version: hello.torch,
        git: hello.torch_git,
        cuda: hello.cuda,
        cxx11_abi: hello.cxx11_abi,
    };
    let target = Target::with_torch(spec.target.device, &spec.target.isa, &torch);
    let model = LoadedModel {
        known: Known { entry, target },
        fingerprint: opened.fingerprint,
        weights,
    };
    Ok((worker, model))
}

/// Imports the entry in `worker` and creates the model, so that the worker can capture. `weights` are the files of the
/// spec's weights, if it names some.
pub(super) fn open_model(
    spec: &Spec,
    command_line: &CommandLine,
    weights: &[PathBuf],
    worker: &mut Worker,
) -> Result<Opened, BuildError> {
    let request = Request::Open {
        root: spec.root.clone(),
        entry: spec.model.entry.clone(),
        device: spec.target.device.to_string(),
        also: names::further(spec, command_line),
        weights: weights.to_vec(),
        weights_name: spec.model.weights.file().map(Path::to_owned),
        unused_weights: weight_file::unused(spec),
        context: spec.model.context,
        unsaved: spec.unsaved(),
    };
    let opened = worker.call(&request, OPEN_LIMIT, &mut |_| {})?;
    worker.opened = true;
    Ok(opened)
}

/// Points at the place in the spec that a worker refused, if the spec has it.
pub(super) fn in_spec(spec: &Spec, error: BuildError) -> BuildError {
    let (BuildError::Worker(failure) | BuildError::Model { error: failure, .. }) = &error else {
        return error;
    };
    let mark = |value: &String| spec.mark(value, failure.message.clone(), failure.hint());
    match failure.spec.as_ref().and_then(mark) {
        Some(marked) => BuildError::Spec(Box::new(marked)),
        None => error,
    }
}
