//! The parts of the output of `precast show` that all records share.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;
use serde_json::Value;

use super::Context;
use crate::{
    Target,
    inspect::{self, torches::Torches, words::date},
    record::Layout,
};

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
