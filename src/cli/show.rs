//! `precast show`: one program, artifact or object whole.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde_json::{Value, json};

use super::{Context, exit::Missing};
use crate::{
    Digest,
    record::{Artifact, Failure, Input, Layout, Output, Padding, Program},
    store::{Found, ObjectRow, Store},
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// An ID, or the first digits of one
    id: String,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let gone = || Missing {
        message: format!("`{}` went away while it was read", args.id),
        hint: None,
    };
    match store.resolve(&args.id)? {
        Found::Program(id) => {
            show_program(&store.program(&id)?.ok_or_else(gone)?, &store, context)?
        }
        Found::Artifact(id) => show_artifact(&store.artifact(&id)?.ok_or_else(gone)?, context)?,
        Found::Failure(id) => show_failure(&store.failure(&id)?.ok_or_else(gone)?, context)?,
        Found::Object(digest) => show_object(&store.object(&digest)?.ok_or_else(gone)?, context)?,
    }
    Ok(0)
}

fn show_object(object: &ObjectRow, context: &Context) -> Result<()> {
    let ObjectRow {
        digest,
        size,
        stored,
        ..
    } = object;
    if context.out.json() {
        let fields = json!({ "kind": "object", "digest": digest, "size": size, "stored": stored });
        return context.out.document(fields);
    }
    context
        .out
        .line(format_args!("{} {digest}", "object".bold()))?;
    let (size, stored) = (indicatif::HumanBytes(*size), indicatif::HumanBytes(*stored));
    context
        .out
        .line(format_args!("{size} ({stored} compressed)"))
}

fn show_failure(failure: &Failure, context: &Context) -> Result<()> {
    let out = &context.out;
    if out.json() {
        let mut document = serde_json::to_value(failure)?;
        document["kind"] = json!("failure");
        return out.document(document);
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
    let out = &context.out;
    if out.json() {
        let mut document = serde_json::to_value(program)?;
        document["kind"] = json!("program");
        return out.document(document);
    }
    out.line(format_args!("{} {}", "program".bold(), program.id))?;
    out.line(format_args!(
        "{} {} {}",
        program.model,
        program.module,
        program.bucket()
    ))?;
    out.line(format_args!("for {}", program.target.name()))?;
    match &program.padding {
        Padding::Allowed => out.line("smaller requests are padded")?,
        Padding::Refused { why } => out.line(format_args!("exact sizes only: {why}"))?,
    }
    out.line("")?;
    for line in draw(program) {
        out.line(line)?;
    }
    out.line("")?;
    let mut seen: Vec<Digest> = Vec::new();
    for step in &program.steps {
        if !seen.contains(&step.artifact) {
            seen.push(step.artifact);
        }
    }
    for id in seen {
        let steps = program
            .steps
            .iter()
            .filter(|step| step.artifact == id)
            .count();
        let size = store
            .artifact(&id)?
            .map(|artifact| indicatif::HumanBytes(artifact.size).to_string());
        let size = size.unwrap_or_else(|| "not in the store".to_owned());
        out.line(format_args!(
            "artifact {}  {size}, {steps} steps",
            id.short().cyan()
        ))?;
    }
    section(context, "receipt", &program.receipt)?;
    section(context, "key", &program.request)?;
    section(context, "provenance", &program.provenance)
}

/// Returns the drawing of a program: inputs, each step with what it takes and gives, outputs.
fn draw(program: &Program) -> Vec<String> {
    let mut names: Vec<String> = (0..program.values)
        .map(|value| format!("%{value}"))
        .collect();
    for (value, input) in program.inputs.iter().enumerate() {
        names[value] = input.name.clone();
    }
    let list = |values: &[usize]| {
        let names: Vec<&str> = values.iter().map(|value| names[*value].as_str()).collect();
        names.join(", ")
    };
    let mut lines: Vec<String> = program
        .inputs
        .iter()
        .map(|input| format!("in   {}", signature(input)))
        .collect();
    for (index, step) in program.steps.iter().enumerate() {
        let last = index + 1 == program.steps.len();
        let name = if step.name.is_empty() {
            "(whole)"
        } else {
            &step.name
        };
        lines.push(format!(
            "{} {name} {}  ({}) -> ({}), {} weights",
            if last { " └─" } else { " ├─" },
            step.artifact.short(),
            list(&step.inputs),
            list(&step.outputs),
            step.binding.len()
        ));
    }
    for (output, value) in program.outputs.iter().zip(&program.results) {
        lines.push(format!("out  {} = {}", result(output), names[*value]));
    }
    lines
}

fn signature(input: &Input) -> String {
    let axes = input.layout.shape.iter().zip(&input.dims);
    let axes = axes.map(|(size, dim)| {
        dim.as_ref()
            .map_or_else(|| size.to_string(), |dim| format!("{dim}={size}"))
    });
    format!(
        "{}: {}[{}]",
        input.name,
        input.layout.dtype,
        axes.collect::<Vec<_>>().join(", ")
    )
}

fn result(output: &Output) -> String {
    let axes = output
        .layout
        .shape
        .iter()
        .zip(&output.dims)
        .map(|(size, follow)| match follow {
            Some(follow) if follow.scale == 1 && follow.offset == 0 => {
                format!("{}={size}", follow.dim)
            }
            Some(follow) => format!("{}*{}{:+}={size}", follow.scale, follow.dim, follow.offset),
            None => size.to_string(),
        });
    format!(
        "{}: {}[{}]",
        output.name,
        output.layout.dtype,
        axes.collect::<Vec<_>>().join(", ")
    )
}

fn show_artifact(artifact: &Artifact, context: &Context) -> Result<()> {
    let out = &context.out;
    if out.json() {
        let mut document = serde_json::to_value(artifact)?;
        document["kind"] = json!("artifact");
        return out.document(document);
    }
    out.line(format_args!("{} {}", "artifact".bold(), artifact.id))?;
    out.line(format_args!("for {}", artifact.target.name()))?;
    out.line(format_args!(
        "object {}  {}",
        artifact.object.short(),
        indicatif::HumanBytes(artifact.size)
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
    section(context, "receipt", &artifact.receipt)?;
    section(context, "key", &artifact.key)?;
    section(context, "provenance", &artifact.provenance)
}

/// Prints a JSON tree as indented `name: value` lines under a heading.
fn section(context: &Context, heading: &str, value: &Value) -> Result<()> {
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
            let text = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            context
                .out
                .line(format_args!("{indent}{name} {}", text.dimmed()))?;
        }
    }
    Ok(())
}
