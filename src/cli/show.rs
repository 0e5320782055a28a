//! `precast show`: every field of one program, artifact or object.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;
use serde_json::Value;

use super::{
    Context,
    name::{self, NameArgs, Record},
    program,
    text::{bytes, count},
};
use crate::{
    Digest, Target,
    inspect::{self, torches::Torches, words::date},
    record::{Artifact, ArtifactKind, Failure, Layout, Program},
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

/// Prints a target, the versions of torch that it runs under, and the differences from this host.
pub(super) fn host(target: &Target, torches: &Torches, context: &Context) -> Result<()> {
    let out = &context.out;
    writeln!(out, "\n{}\n  {}", "target".bold(), target.name())?;
    let newer = if torches.also.is_empty() {
        "a newer one runs it once its gates passed there".to_owned()
    } else {
        format!("its gates passed under {} too", torches.also.join(", "))
    };
    writeln!(out, "  torch {} is the least; {newer}", torches.least)?;
    let mismatches = inspect::host::mismatches(target);
    for mismatch in &mismatches {
        writeln!(out, "  {} {mismatch}", "not on this host:".red())?;
    }
    if mismatches.is_empty() {
        let gpu = target.sm.as_ref().map_or("", |_| ", sm, cuda");
        let system = "  this host has the system and the CPU for it";
        writeln!(out, "{system} (torch{gpu}: looked at when it is loaded)")?;
    }
    Ok(())
}

/// Returns a layout as `float32[4, 8]`.
pub(super) fn tensor(layout: &Layout) -> String {
    format!("{}{:?}", layout.dtype, layout.shape)
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

/// Prints a JSON tree as indented `name: value` lines under a heading.
pub(super) fn section(context: &Context, heading: &str, value: &impl Serialize) -> Result<()> {
    writeln!(context.out, "\n{}", heading.bold())?;
    tree(context, &serde_json::to_value(value)?, 1)
}

fn tree(context: &Context, value: &Value, depth: usize) -> Result<()> {
    /// Longer lists are printed with `-v` only.
    const SOME: usize = 12;
    let (out, indent) = (&context.out, "  ".repeat(depth));
    let rows: Vec<(&str, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(name, value)| (&**name, value)).collect(),
        Value::Array(list) => list.iter().map(|value| ("-", value)).collect(),
        leaf => return writeln!(out, "{indent}{leaf}"),
    };
    let long = |count: usize| count > SOME && context.verbose == 0;
    let counted = |count: usize| format!("({count} entries, -v lists them)");
    if depth > 1 && long(rows.len()) {
        return writeln!(out, "{indent}{}", counted(rows.len()).dimmed());
    }
    for (name, value) in rows {
        let nested = match value {
            Value::Object(map) => !map.is_empty(),
            Value::Array(list) => list.iter().any(|item| item.is_object() || item.is_array()),
            _ => false,
        };
        if nested {
            writeln!(out, "{indent}{name}")?;
            tree(context, value, depth + 1)?;
            continue;
        }
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(at) if name == "created" => at.as_i64().map_or(at.to_string(), date),
            Value::Array(list) if long(list.len()) => counted(list.len()),
            other => other.to_string(),
        };
        writeln!(out, "{indent}{name} {}", text.dimmed())?;
    }
    Ok(())
}
