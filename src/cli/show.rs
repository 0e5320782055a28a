//! `precast show`: every field of one program, artifact or object.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    fields::{host, section, tensor},
    name::{self, NameArgs, Record},
    program,
    text::{bytes, count},
};
use crate::{
    Digest,
    inspect::torches::Torches,
    record::{Artifact, ArtifactKind, Failure, Program},
    store::{ObjectRow, Store},
};

#[derive(clap::Args)]
pub(super) struct ShowArgs {
    #[command(flatten)]
    what: NameArgs,
}

pub(super) fn run(args: &ShowArgs, context: &Context) -> Result<u8> {
    let store = context.look()?;
    match name::record(&store, &args.what.text())? {
        Record::Program(program) => show_program(&program, &store, context)?,
        Record::Artifact(artifact) => show_artifact(&artifact, &store, context)?,
        Record::Failure(failure) => show_failure(&failure, context)?,
        Record::Object(object) => show_object(&object, context)?,
    }
    Ok(0)
}

/// `precast show ID --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub(super) enum ShowDocument<'a> {
    /// The record of a program.
    Program {
        #[serde(flatten)]
        program: &'a Program,
        torches: Torches,
        #[cfg_attr(test, schemars(extend("const" = "program")))]
        kind: &'static str,
    },
    /// The record of an artifact.
    Artifact {
        #[serde(flatten)]
        artifact: &'a Artifact,
        /// The kind of its object: `kind` in the record.
        holds: ArtifactKind,
        torches: Torches,
        // After the record, whose `kind` it replaces.
        #[cfg_attr(test, schemars(extend("const" = "artifact")))]
        kind: &'static str,
    },
    Object {
        #[cfg_attr(test, schemars(extend("const" = "object")))]
        kind: &'static str,
        digest: &'a Digest,
        /// Bytes of its content.
        size: u64,
        /// The same on disk, compressed.
        stored: u64,
    },
    /// The record of a failure.
    Failure {
        #[serde(flatten)]
        failure: &'a Failure,
        #[cfg_attr(test, schemars(extend("const" = "failure")))]
        kind: &'static str,
    },
}

fn show_object(object: &ObjectRow, context: &Context) -> Result<()> {
    let (out, digest) = (&context.out, &object.digest);
    if out.json() {
        return out.document(&ShowDocument::Object {
            kind: "object",
            digest,
            size: object.size,
            stored: object.stored,
        });
    }
    writeln!(out, "{} {digest}", "object".bold())?;
    let (size, stored) = (bytes(object.size), bytes(object.stored));
    writeln!(out, "{size} ({stored} compressed)")
}

fn show_failure(failure: &Failure, context: &Context) -> Result<()> {
    let out = &context.out;
    if out.json() {
        let kind = "failure";
        return out.document(&ShowDocument::Failure { failure, kind });
    }
    let (model, module, bucket) = (&failure.model, &failure.module, &failure.bucket);
    writeln!(out, "{} {}", "failed".red().bold(), failure.id)?;
    writeln!(out, "{model} {module} {bucket}")?;
    match &failure.location {
        Some(place) => writeln!(out, "{place}: {}", failure.message)?,
        None => out.line(&failure.message)?,
    }
    if let Some(hint) = &failure.hint {
        writeln!(out, "{} {hint}", "hint:".cyan().bold())?;
    }
    let id = failure.id.short();
    writeln!(out, "`precast log {id}` prints the whole log")
}

fn show_program(program: &Program, store: &Store, context: &Context) -> Result<()> {
    let torches = Torches::of(store, &program.id, &program.target)?;
    if context.out.json() {
        return context.out.document(&ShowDocument::Program {
            program,
            torches,
            kind: "program",
        });
    }
    program::show(program, &torches, store, context)
}

fn show_artifact(artifact: &Artifact, store: &Store, context: &Context) -> Result<()> {
    let out = &context.out;
    let torches = Torches::of(store, &artifact.id, &artifact.target)?;
    if out.json() {
        return out.document(&ShowDocument::Artifact {
            artifact,
            holds: artifact.kind,
            torches,
            kind: "artifact",
        });
    }
    let (object, size) = (artifact.object.short(), bytes(artifact.size));
    writeln!(out, "{} {}", "artifact".bold(), artifact.id)?;
    writeln!(out, "object {object}  {size}\n")?;
    for input in &artifact.inputs {
        writeln!(out, "in   {}", tensor(input))?;
    }
    for output in &artifact.outputs {
        writeln!(out, "out  {}", tensor(output))?;
    }
    for constant in &artifact.constants {
        writeln!(out, "bind {}: {}", constant.name, tensor(&constant.layout))?;
    }
    if let Some(imports) = &artifact.imports {
        writeln!(out, "uses {} of libtorch", count(imports.len(), "function"))?;
        for name in imports.iter().filter(|_| context.verbose > 0) {
            writeln!(out, "     {name}")?;
        }
    }
    for made in &artifact.prepared {
        let (name, dtype, shape) = (&made.name, made.dtype, &made.shape);
        writeln!(
            out,
            "make {name}: {dtype}{shape:?} with {}",
            made.call.operator
        )?;
    }
    section(context, "receipt", &artifact.receipt)?;
    host(&artifact.target, &torches, context)?;
    section(context, "key", &artifact.key)?;
    section(context, "provenance", &artifact.provenance)
}
