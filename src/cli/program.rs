//! The output of `precast show` for a program.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use owo_colors::OwoColorize;

use super::{
    Context,
    show::{host, section},
    table::{self, Column},
    text::{bytes, count},
};
use crate::{
    Digest,
    inspect::{
        receipt::{self, Latency, ReceiptSummary},
        torches::Torches,
        words::time,
    },
    record::{Artifact, Input, Layout, Output, Padding, Prepared, Program, Step, bounds_name},
    store::{Store, StoreError},
    target::DeviceKind,
};

/// The artifacts of a program that the store has.
type Artifacts = BTreeMap<Digest, Artifact>;

pub(super) fn show(
    program: &Program,
    torches: &Torches,
    store: &Store,
    context: &Context,
) -> Result<()> {
    let out = &context.out;
    let artifacts = artifacts(program, store)?;
    out.line(format_args!("{} {}", "program".bold(), program.id))?;
    let name = format!("{} {} {}", program.model, program.module, program.bucket());
    let release = match store.releases().released(&program.id)? {
        Some(seq) => format!("release {seq}"),
        None => match store.releases().partly_released(&program.id)? {
            Some(seq) => format!("release {seq}, a partial one"),
            None => "in no release".to_owned(),
        },
    };
    out.line(format_args!("{name}, {release}"))?;
    let measured = ReceiptSummary::of(program);
    if let Some(dynamic) = &program.dynamic {
        let who = if program.steps.is_empty() {
            "eager runs it"
        } else {
            "one artifact for all"
        };
        out.line(format_args!(
            "{who}: it answers sizes that no bucket covers, {}",
            bounds_name(dynamic, &program.sizes)
        ))?;
    }
    match &program.padding {
        _ if program.dynamic.is_some() => {}
        Padding::Allowed if measured.sensitive == Some(true) => out.line(
            "smaller requests are padded; other values in the padding than the spec's would change the answer",
        )?,
        Padding::Allowed => out.line("smaller requests are padded")?,
        refused => {
            let refusal = refused.refusal(&program.sizes).unwrap_or_default();
            out.line(refusal)?;
        }
    }
    out.line("")?;
    for line in draw(program, &artifacts, context.verbose > 0) {
        out.line(line)?;
    }
    out.line("")?;
    list(program, &artifacts, store, context)?;
    if let made @ 1.. = made_at_load(program, &artifacts) {
        out.line(format_args!(
            "at load {} of weights are laid out anew, in every process",
            bytes(made)
        ))?;
    }
    receipt(&measured, context)?;
    host(&program.target, torches, context)?;
    section(context, "key", &program.request)?;
    section(
        context,
        "provenance",
        &serde_json::to_value(&program.provenance)?,
    )
}

/// Returns the bytes that are made of weights when a process loads the program first; views among them take none, and so
/// do matrices that are joined on a device.
fn made_at_load(program: &Program, artifacts: &Artifacts) -> u64 {
    let steps: BTreeSet<_> = program
        .steps
        .iter()
        .map(|step| (step.artifact, &step.binding))
        .collect();
    let artifacts = steps.iter().filter_map(|(id, _)| artifacts.get(id));
    let device = program.target.device == DeviceKind::Cuda;
    let made = artifacts.flat_map(|artifact| &artifact.prepared);
    let made = made.filter(|made| !(device && made.call.joined().is_some()));
    made.map(Prepared::bytes).sum()
}

fn artifacts(program: &Program, store: &Store) -> Result<Artifacts, StoreError> {
    let mut found = Artifacts::new();
    for step in &program.steps {
        if !found.contains_key(&step.artifact)
            && let Some(artifact) = store.records().artifact(&step.artifact)?
        {
            found.insert(step.artifact, artifact);
        }
    }
    Ok(found)
}

/// Returns the drawing: inputs, each step with what it takes, gives and binds, outputs.
fn draw(program: &Program, artifacts: &Artifacts, whole: bool) -> Vec<String> {
    let name = |value: &usize| match program.inputs.get(*value) {
        Some(input) => input.name.clone(),
        None => format!("%{value}"),
    };
    let mut lines: Vec<String> = program
        .inputs
        .iter()
        .map(|input| format!("in   {}", signature(input)))
        .collect();
    let steps: Vec<String> = program
        .steps
        .iter()
        .map(|step| title(step).to_owned())
        .collect();
    let width = steps
        .iter()
        .map(|step| step.chars().count())
        .max()
        .unwrap_or(0);
    for (index, (step, title)) in program.steps.iter().zip(&steps).enumerate() {
        let last = index + 1 == program.steps.len();
        let takes: Vec<String> = step.inputs.iter().map(name).collect();
        let artifact = artifacts.get(&step.artifact);
        let gives = step.outputs.iter().enumerate().map(|(place, value)| {
            let layout = artifact.and_then(|artifact| artifact.outputs.get(place));
            layout.map_or_else(
                || name(value),
                |layout| format!("{}: {}", name(value), tensor(layout)),
            )
        });
        let gives: Vec<String> = gives.collect();
        let bound = match step.binding.len() {
            0 => String::new(),
            bound => format!("  {}", count(bound as u64, "weight").dimmed()),
        };
        lines.push(format!(
            "{} {title:<width$}  {}  ({}) → ({}){bound}",
            if last { " └─" } else { " ├─" },
            step.artifact.short().cyan(),
            takes.join(", "),
            gives.join(", "),
        ));
        if whole {
            for (constant, weight) in &step.binding {
                let layout =
                    artifact.and_then(|a| a.constants.iter().find(|c| c.name == *constant));
                let layout = layout
                    .map(|constant| tensor(&constant.layout))
                    .unwrap_or_default();
                let rail = if last { "   " } else { " │ " };
                lines.push(format!(
                    "{rail}     {constant} = {weight}  {}",
                    layout.dimmed()
                ));
            }
        }
    }
    for (output, value) in program.outputs.iter().zip(&program.results) {
        lines.push(format!("out  {} = {}", result(output), name(value)));
    }
    lines
}

fn title(step: &Step) -> &str {
    if step.name.is_empty() {
        "(whole)"
    } else {
        &step.name
    }
}

fn tensor(layout: &Layout) -> String {
    let shape: Vec<String> = layout.shape.iter().map(i64::to_string).collect();
    format!("{}[{}]", layout.dtype, shape.join(", "))
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

/// Prints the artifacts, each once, with its objects.
fn list(program: &Program, artifacts: &Artifacts, store: &Store, context: &Context) -> Result<()> {
    const COLUMNS: [Column; 7] = [
        Column::left("ARTIFACT", 0),
        Column::left("FIRST STEP", 1),
        Column::right("STEPS", 2),
        Column::right("SIZE", 0),
        Column::right("ON DISK", 3),
        Column::right("COMPILE", 2),
        Column::left("OBJECT", 4),
    ];
    let mut rows = Vec::new();
    let mut seen = Vec::new();
    for step in &program.steps {
        if seen.contains(&step.artifact) {
            continue;
        }
        seen.push(step.artifact);
        let calls = program
            .steps
            .iter()
            .filter(|other| other.artifact == step.artifact)
            .count();
        let (id, first, calls) = (
            step.artifact.short(),
            title(step).to_owned(),
            calls.to_string(),
        );
        let Some(artifact) = artifacts.get(&step.artifact) else {
            rows.push(Ok(vec![id, first, calls, "not in the store".to_owned()]));
            continue;
        };
        let stored = store
            .objects()
            .row(&artifact.object)?
            .map_or_else(|| "missing".to_owned(), |row| bytes(row.stored));
        let compile: f64 = artifact.compile_seconds();
        let compile = if compile > 0.0 {
            time(compile)
        } else {
            String::new()
        };
        rows.push(Ok(vec![
            id,
            first,
            calls,
            bytes(artifact.size),
            stored,
            compile,
            artifact.object.short(),
        ]));
    }
    for (id, what) in [
        (
            program.eager.as_ref().map(|eager| eager.artifact),
            "(eager)",
        ),
        (program.constants, "(made by code)"),
    ] {
        if let Some(id) = id
            && let Some(artifact) = store.records().artifact(&id)?
        {
            let stored = store
                .objects()
                .row(&artifact.object)?
                .map_or_else(|| "missing".to_owned(), |row| bytes(row.stored));
            let (short, object) = (id.short(), artifact.object.short());
            let size = bytes(artifact.size);
            rows.push(Ok(vec![
                short,
                what.to_owned(),
                String::new(),
                size,
                stored,
                String::new(),
                object,
            ]));
        }
    }
    table::print(&context.out, &COLUMNS, rows.into_iter())?;
    Ok(())
}

fn receipt(receipt: &ReceiptSummary, context: &Context) -> Result<()> {
    let out = &context.out;
    out.line(format_args!("\n{}", "receipt".bold()))?;
    if *receipt == ReceiptSummary::default() {
        return out.line("  nothing was measured");
    }
    let seconds: Vec<String> = receipt
        .seconds
        .iter()
        .map(|(phase, s)| format!("{phase} {}", time(*s)))
        .collect();
    if !seconds.is_empty() {
        out.line(format_args!("  built in    {}", seconds.join(", ")))?;
    }
    if let Some(by) = &receipt.gated_by {
        out.line(format_args!(
            "  gated       as {}: the same artifacts, weights and samples, on the same host",
            by.short()
        ))?;
    }
    for (name, latency) in [("eager", receipt.eager), ("artifact", receipt.artifact)] {
        if let Some(latency) = latency {
            let ratio = match receipt.speedup() {
                Some(ratio) if name == "artifact" && ratio < 1.0 => {
                    format!(", {:.2}× slower than eager", 1.0 / ratio)
                }
                Some(ratio) if name == "artifact" => format!(", {ratio:.2}× faster than eager"),
                _ => String::new(),
            };
            out.line(format_args!(
                "  {name:<11} {} a call{ratio}",
                spread(&latency)
            ))?;
        }
    }
    if let Some(turns) = &receipt.turns {
        let verdict = receipt::decided(turns);
        match receipt.slower {
            true => out.line(format_args!("  by turns    {}", verdict.yellow()))?,
            false => out.line(format_args!("  by turns    {verdict}"))?,
        }
    }
    if let Some((eager, artifact)) = receipt.memory {
        out.line(format_args!(
            "  memory      {} a call at most, eager {}",
            bytes(artifact),
            bytes(eager)
        ))?;
    }
    if let Some(same) = receipt.deterministic {
        let repeats = if same {
            "two runs give the same bits"
        } else {
            "two runs differ"
        };
        out.line(format_args!("  repeats     {repeats}"))?;
    }
    if !receipt.outputs.is_empty() {
        out.line("")?;
        const COLUMNS: [Column; 7] = [
            Column::left("  OUTPUT", 0),
            Column::right("USED", 0),
            Column::right("MAX ABS", 1),
            Column::right("ATOL", 2),
            Column::right("MAX REL", 3),
            Column::right("RTOL", 4),
            Column::right("COSINE", 5),
        ];
        let rows = receipt.outputs.iter().map(|output| {
            let mut row = vec![format!("  {}", output.name)];
            match output.exact {
                true => row.push("equal".to_owned()),
                false => row.extend([
                    format!("{:.2} %", output.used() * 100.0),
                    format!("{:.2e}", output.max_abs),
                    format!("{:.2e}", output.atol),
                    format!("{:.2e}", output.max_rel),
                    format!("{:.2e}", output.rtol),
                    format!("{:.9}", output.cosine),
                ]),
            }
            Ok(row)
        });
        table::print(out, &COLUMNS, rows)?;
    }
    tuned(receipt, context)
}

/// Prints the option sets that it was compiled with.
fn tuned(receipt: &ReceiptSummary, context: &Context) -> Result<()> {
    let out = &context.out;
    let Some(choice) = receipt::choice(&receipt.tuned) else {
        return Ok(());
    };
    out.line(format_args!("\n{}", "tuned".bold()))?;
    out.line(format_args!("  {choice}"))?;
    if let Some(by) = &receipt.tuned_by {
        out.line(format_args!(
            "  measured for {}, which has the same artifacts",
            by.short()
        ))?;
    }
    out.line("")?;
    const COLUMNS: [Column; 6] = [
        Column::left("  OPTIONS", 0),
        Column::right("COMPILE", 2),
        Column::right("LATENCY", 0),
        Column::right("SPEED", 3),
        Column::right("MAX ABS", 4),
        Column::left("", 1).painted(|text| match text {
            "kept" => text.green().to_string(),
            _ => text.yellow().to_string(),
        }),
    ];
    let first = receipt.tuned.first().and_then(|first| first.latency);
    let rows = receipt.tuned.iter().map(|tried| {
        let speed = first.zip(tried.latency);
        Ok(vec![
            format!("  {}", tried.options),
            tried.seconds.map(time).unwrap_or_default(),
            tried.latency.map(time).unwrap_or_default(),
            speed
                .map(|(first, own)| format!("{:.2}×", first / own))
                .unwrap_or_default(),
            tried
                .max_abs
                .map(|error| format!("{error:.2e}"))
                .unwrap_or_default(),
            match (tried.chosen, &tried.refused) {
                (true, _) => "kept".to_owned(),
                (false, Some(_)) => "refused".to_owned(),
                (false, None) => String::new(),
            },
        ])
    });
    table::print(out, &COLUMNS, rows)?;
    out.line("")?;
    for tried in &receipt.tuned {
        if let Some(why) = &tried.refused {
            out.line(format_args!("  {} was refused: {why}", tried.options))?;
        }
    }
    Ok(())
}

fn spread(latency: &Latency) -> String {
    match (latency.low, latency.high) {
        (Some(low), Some(high)) => {
            format!("{} ({} to {})", time(latency.median), time(low), time(high))
        }
        _ => time(latency.median),
    }
}
