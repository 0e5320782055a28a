//! Publishes artifacts, programs that passed their gate, and failures.
//!
//! The store takes its own copy of each file of a worker before the file is used. A program's record is published last,
//! if no source of the model has changed meanwhile. `tasks/gate.rs` makes that record; those of artifacts and failures
//! are made here.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use precast_store::{
    Digest, Store, StoreError,
    elf::Elf,
    record::{
        Artifact, ArtifactKind, CompileReceipt, Failure, Layout, Program, Provenance, SCHEMA,
        bounds_name,
    },
};

use super::{
    BuildError,
    options::{Built, Outcome},
    plan::changed_source,
    progress::Event,
    protocol::Compiled,
    shims::harmless,
    slot::Context,
    task::{Job, TaskFailure},
};
use crate::{
    gate::candidates::OptionSet,
    plan::{HeldKey, Known},
    protocol::Segment,
    spec::FailPolicy,
};

/// An artifact to compile.
pub(super) struct MissingArtifact {
    pub key: Digest,
    pub explained: serde_json::Value,
    pub segment: Segment,
    pub set: OptionSet,
    /// Its name in progress.
    pub name: String,
}

/// Inputs and outputs of an artifact.
#[derive(Default)]
pub(super) struct Layouts {
    pub inputs: Vec<Layout>,
    pub outputs: Vec<Layout>,
}

/// Puts libraries of custom operators, and returns their digests in the same order.
pub(super) fn libraries(store: &Store, paths: &[PathBuf]) -> Result<Vec<Digest>, StoreError> {
    let puts = paths.iter().map(|path| store.objects().put_file(path));
    puts.map(|put| put.map(|(object, _)| object)).collect()
}

/// Puts the graph or the constants of a program, and returns the key of the artifact that holds them.
pub(super) fn held(
    store: &Store,
    kind: ArtifactKind,
    file: &Path,
    known: &Known,
    layouts: Layouts,
    libraries: Vec<Digest>,
) -> Result<Digest, StoreError> {
    let (object, size) = store.objects().put_file(file)?;
    let (id, key) = HeldKey {
        kind,
        object: &object,
        libraries: &libraries,
        target: &known.target,
    }
    .explained();
    if !store.records().keep_artifact(&id)? {
        store.records().put_artifact(&Artifact {
            schema: SCHEMA,
            id,
            kind,
            object,
            size,
            target: known.target.clone(),
            inputs: layouts.inputs,
            outputs: layouts.outputs,
            constants: vec![],
            prepared: vec![],
            proxy: None,
            libraries,
            imports: None,
            graph: None,
            log: None,
            key,
            receipt: CompileReceipt::default(),
            provenance: Provenance::now(),
        })?;
    }
    Ok(id)
}

/// Puts a compiled artifact into the store.
pub(super) fn artifact(
    store: &Store,
    known: &Known,
    compile: MissingArtifact,
    compiled: Compiled,
    log: &[u8],
) -> Result<(), BuildError> {
    let (object, size) = store.objects().put_file(&compiled.library)?;
    let bytes = store.objects().read(&object)?;
    harmless("artifact", &bytes)?;
    let proxy = match &compiled.proxy {
        Some(path) => Some(store.objects().put_file(path)?.0),
        None => None,
    };
    let libraries = libraries(store, &compile.segment.libraries)?;
    let log = if log.is_empty() {
        None
    } else {
        Some(store.objects().put_bytes(log)?)
    };
    let graph = store
        .objects()
        .put_bytes(compile.segment.graph.as_bytes())?;
    let mut provenance = Provenance::now();
    provenance.metadata = compiled.metadata.into();
    store.records().put_artifact(&Artifact {
        schema: SCHEMA,
        id: compile.key,
        kind: ArtifactKind::Library,
        object,
        size,
        target: known.target.clone(),
        inputs: compile.segment.inputs,
        outputs: compile.segment.outputs,
        constants: compile.segment.constants,
        prepared: compiled.prepared,
        proxy,
        libraries,
        imports: Elf::parse(&*bytes).and_then(|elf| elf.imports()).ok(),
        graph: Some(graph),
        log,
        key: compile.explained,
        receipt: CompileReceipt {
            seconds: compiled.seconds,
        },
        provenance,
    })?;
    Ok(())
}

/// Puts a program that passed its gate into the store. `compiled`: the number of artifacts that were compiled for it.
pub(super) fn program(
    context: &Context<'_>,
    job: &Job<'_>,
    program: &Program,
    compiled: usize,
) -> Result<Outcome, TaskFailure> {
    let options = context.options();
    if let Some(path) = changed_source(&options.spec.root, &context.model.known.entry) {
        return Err(BuildError::SourceChanged { path }.into());
    }
    options.store.records().put_program(program)?;
    context.event(&Event::Published {
        module: &job.module.name,
        bucket: &job.bucket,
        id: job.id,
        slower: program.slower_than_eager(),
    });
    let artifacts = program.steps.iter().map(|step| step.artifact);
    Ok(Outcome::Built(Built {
        id: job.id,
        artifacts: artifacts.collect::<BTreeSet<_>>().len(),
        compiled,
        gated_by: program.receipt.gated_by,
        padding_refused: program.padding_refused(),
        narrowed: (program.dynamic.as_ref())
            .filter(|dims| job.item.form.is_narrowed_by(dims))
            .map(|dims| bounds_name(dims, &program.sizes)),
    }))
}

/// Records that a program failed, with its log, so that `precast log` can show it. An error that ends the build is
/// returned.
pub(super) fn failure(
    context: &Context<'_>,
    job: &Job<'_>,
    failure: &TaskFailure,
) -> Result<Outcome, BuildError> {
    let (options, error) = (context.options(), &failure.error);
    let (form, compile) = (&job.item.form, &job.item.settings.compile);
    let (module, bucket) = (&job.module.name, &job.bucket);
    let message = error.to_string();
    let location = error.location(&options.spec.root);
    let log = options.store.objects().put_bytes(&log(&message, failure))?;
    options.store.records().put_failure(&Failure {
        schema: SCHEMA,
        id: job.id,
        model: options.spec.model.name.clone(),
        module: module.clone(),
        bucket: bucket.clone(),
        sizes: form.sizes.clone(),
        code: error.code().to_owned(),
        message: message.clone(),
        location: location.clone(),
        hint: Some(error.hint()),
        log: Some(log),
        provenance: Provenance::now(),
    })?;
    if form.left_out(error.code(), compile) {
        context.event(&Event::LeftOut {
            module,
            bucket,
            message: &message,
        });
        return Ok(Outcome::Skipped { why: message });
    }
    context.event(&Event::Failed {
        module,
        bucket,
        id: job.id,
        message: &message,
        location: location.as_deref(),
    });
    Ok(Outcome::Failed {
        key: Some(job.id),
        message,
        location,
        hint: error.hint(),
        raise: compile.fail_policy == FailPolicy::Raise,
    })
}

/// Returns the log of a failure: its message, the log of the error, and the worker's.
fn log(message: &str, failure: &TaskFailure) -> Vec<u8> {
    let TaskFailure { error, log } = failure;
    // The log of a worker that was ended may have the end of its log as the log of the error.
    let whole = match error {
        BuildError::Worker(_) | BuildError::Gate { .. } => false,
        _ => !log.is_empty(),
    };
    let mut text = format!("{message}\n").into_bytes();
    let parts = [error.log().as_bytes(), log].into_iter();
    for part in parts
        .skip(usize::from(whole))
        .filter(|part| !part.is_empty())
    {
        text.push(b'\n');
        text.extend_from_slice(part);
    }
    text
}
