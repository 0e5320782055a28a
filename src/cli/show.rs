//! `precast show`: every field of one program, artifact or object.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;
use serde_json::Value;

use super::{
    Context,
    exit::{AGAIN, Missing},
    name::{self, Named},
    program,
    text::{bytes, count},
};
use crate::{
    Digest, Target,
    inspect::{self, torches::Torches, words::date},
    record::{Artifact, ArtifactKind, Failure, Layout, Program},
    store::{Found, ObjectRow, Store},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    what: Named,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let what = args.what.text();
    let gone = || Missing {
        message: format!("`{what}` went away while it was read"),
        hint: AGAIN.to_owned(),
    };
    match name::find(&store, &what)? {
        Found::Program(id) => show_program(
            &store.records().program(&id)?.ok_or_else(gone)?,
            &store,
            context,
        )?,
        Found::Artifact(id) => show_artifact(
            &store.records().artifact(&id)?.ok_or_else(gone)?,
            &store,
            context,
        )?,
        Found::Failure(id) => {
            show_failure(&store.records().failure(&id)?.ok_or_else(gone)?, context)?
        }
        Found::Object(digest) => {
            show_object(&store.objects().row(&digest)?.ok_or_else(gone)?, context)?
        }
    }
    Ok(0)
}

/// `precast show WHAT --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub(super) enum Document<'a> {
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
        /// What its object is: `kind` in the record.
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
    let ObjectRow {
        digest,
        size,
        stored,
        ..
    } = object;
    if context.out.json() {
        return context.out.document(&Document::Object {
            kind: "object",
            digest,
            size: *size,
            stored: *stored,
        });
    }
    context
        .out
        .line(format_args!("{} {digest}", "object".bold()))?;
    let (size, stored) = (bytes(*size), bytes(*stored));
    context
        .out
        .line(format_args!("{size} ({stored} compressed)"))
}

fn show_failure(failure: &Failure, context: &Context) -> Result<()> {
    let out = &context.out;
    if out.json() {
        return out.document(&Document::Failure {
            failure,
            kind: "failure",
        });
    }
    out.line(format_args!("{} {}", "failed".red().bold(), failure.id))?;
    let bucket = &failure.bucket;
    out.line(format_args!(
        "{} {} {bucket}",
        failure.model, failure.module
    ))?;
    let place = failure
        .location
        .as_ref()
        .map(|place| format!("{place}: "))
        .unwrap_or_default();
    out.line(format_args!("{place}{}", failure.message))?;
    if let Some(hint) = &failure.hint {
        out.line(format_args!("{} {hint}", "hint:".cyan().bold()))?;
    }
    out.line(format_args!(
        "`precast log {}` prints the whole log",
        failure.id.short()
    ))
}

fn show_program(program: &Program, store: &Store, context: &Context) -> Result<()> {
    let torches = Torches::of(store, &program.id, &program.target)?;
    if context.out.json() {
        return context.out.document(&Document::Program {
            program,
            torches,
            kind: "program",
        });
    }
    program::show(program, &torches, store, context)
}

/// Says what a target is, which versions of torch meet it, and whether this host does.
pub(super) fn host(target: &Target, torches: &Torches, context: &Context) -> Result<()> {
    let out = &context.out;
    out.line(format_args!("\n{}", "target".bold()))?;
    out.line(format_args!("  {}", target.name()))?;
    let newer = match torches.also.is_empty() {
        true => "a newer one runs it once its gates passed there".to_owned(),
        false => format!("its gates passed under {} too", torches.also.join(", ")),
    };
    out.line(format_args!(
        "  torch {} is the least; {newer}",
        torches.least
    ))?;
    let verdict = inspect::host::verdict(target);
    for mismatch in &verdict.mismatches {
        out.line(format_args!("  {} {mismatch}", "not on this host:".red()))?;
    }
    if verdict.mismatches.is_empty() {
        let unknown = verdict.unknown.join(", ");
        out.line(format_args!(
            "  this host has the system and the CPU for it ({unknown}: looked at when it is loaded)"
        ))?;
    }
    Ok(())
}

fn show_artifact(artifact: &Artifact, store: &Store, context: &Context) -> Result<()> {
    let out = &context.out;
    let torches = Torches::of(store, &artifact.id, &artifact.target)?;
    if out.json() {
        return out.document(&Document::Artifact {
            artifact,
            holds: artifact.kind,
            torches,
            kind: "artifact",
        });
    }
    out.line(format_args!("{} {}", "artifact".bold(), artifact.id))?;
    out.line(format_args!(
        "object {}  {}",
        artifact.object.short(),
        bytes(artifact.size)
    ))?;
    out.line("")?;
    let layout = |layout: &Layout| format!("{}{:?}", layout.dtype, layout.shape);
    for input in &artifact.inputs {
        out.line(format_args!("in   {}", layout(input)))?;
    }
    for output in &artifact.outputs {
        out.line(format_args!("out  {}", layout(output)))?;
    }
    for constant in &artifact.constants {
        out.line(format_args!(
            "bind {}: {}",
            constant.name,
            layout(&constant.layout)
        ))?;
    }
    if let Some(imports) = &artifact.imports {
        out.line(format_args!(
            "uses {} of libtorch",
            count(imports.len() as u64, "function")
        ))?;
        if context.verbose > 0 {
            for name in imports {
                out.line(format_args!("     {name}"))?;
            }
        }
    }
    for made in &artifact.prepared {
        out.line(format_args!(
            "make {}: {}{:?} with {}",
            made.name, made.dtype, made.shape, made.call.operator
        ))?;
    }
    section(
        context,
        "receipt",
        &serde_json::to_value(&artifact.receipt)?,
    )?;
    host(&artifact.target, &torches, context)?;
    section(context, "key", &artifact.key)?;
    section(
        context,
        "provenance",
        &serde_json::to_value(&artifact.provenance)?,
    )
}

/// Prints a JSON tree as indented `name: value` lines under a heading.
pub(super) fn section(context: &Context, heading: &str, value: &Value) -> Result<()> {
    context.out.line(format_args!("\n{}", heading.bold()))?;
    tree(context, value, 1)
}

fn tree(context: &Context, value: &Value, depth: usize) -> Result<()> {
    let indent = "  ".repeat(depth);
    let rows: Vec<(String, &Value)> = match value {
        Value::Object(map) => map
            .iter()
            .map(|(name, value)| (name.clone(), value))
            .collect(),
        Value::Array(list) => list.iter().map(|value| ("-".to_owned(), value)).collect(),
        leaf => return context.out.line(format_args!("{indent}{leaf}")),
    };
    // A list of every package says little at a glance.
    const SOME: usize = 12;
    if depth > 1 && rows.len() > SOME && context.verbose == 0 {
        let count = format!("{} entries", rows.len());
        return context.out.line(format_args!(
            "{indent}{}",
            format!("({count}, -v lists them)").dimmed()
        ));
    }
    for (name, value) in rows {
        let nested = match value {
            Value::Object(map) => !map.is_empty(),
            Value::Array(list) => list.iter().any(|item| item.is_object() || item.is_array()),
            _ => false,
        };
        if nested {
            context.out.line(format_args!("{indent}{name}"))?;
            tree(context, value, depth + 1)?;
        } else {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Number(at) if name == "created" => at.as_i64().map_or(at.to_string(), date),
                Value::Array(list) if list.len() > SOME && context.verbose == 0 => {
                    format!("({} entries, -v lists them)", list.len())
                }
                other => other.to_string(),
            };
            context
                .out
                .line(format_args!("{indent}{name} {}", text.dimmed()))?;
        }
    }
    Ok(())
}
