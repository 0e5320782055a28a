//! The output of `precast show` for a program.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use owo_colors::{OwoColorize, Style};

use super::{
    Context,
    fields::{host, section, tensor},
    printer::Printer,
    table::{self, Column},
    text::{bytes, count},
};
use crate::{
    Digest,
    inspect::{
        receipt::{self, ReceiptSummary},
        torches::Torches,
        words::time,
    },
    record::{
        Artifact, First, Input, Layout, Output, Padding, Prepared, Program, State, Step,
        bounds_name, receipt::Truth, session_bytes,
    },
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
    let measured = ReceiptSummary::of(program);
    title(program, &measured, store, context)?;
    out.line("")?;
    for line in draw(program, &artifacts, context.verbose > 0) {
        out.line(line)?;
    }
    out.line("")?;
    list(program, &artifacts, store, context)?;
    if let made @ 1.. = made_at_load(program, &artifacts) {
        let made = bytes(made);
        writeln!(
            out,
            "at load {made} of weights are laid out anew, unless they are kept"
        )?;
    }
    receipt(&measured, out)?;
    host(&program.target, torches, context)?;
    section(context, "key", &program.request)?;
    section(context, "provenance", &program.provenance)
}

/// Prints the name of a program, its release, and the sizes that it answers.
fn title(
    program: &Program,
    measured: &ReceiptSummary,
    store: &Store,
    context: &Context,
) -> Result<()> {
    let out = &context.out;
    let release = match (
        store.releases().released(&program.id)?,
        store.releases().partly_released(&program.id)?,
    ) {
        (Some(seq), _) => format!("release {seq}"),
        (None, Some(seq)) => format!("release {seq}, a partial one"),
        (None, None) => "in no release".to_owned(),
    };
    let (model, module, bucket) = (&program.model, &program.module, program.bucket());
    writeln!(out, "{} {}", "program".bold(), program.id)?;
    writeln!(out, "{model} {module} {bucket}, {release}")?;
    if let Some(dynamic) = &program.dynamic {
        let runner = match program.steps[..] {
            [] => "eager runs it",
            _ => "one artifact for all",
        };
        let sizes = bounds_name(dynamic, &program.sizes);
        return writeln!(
            out,
            "{runner}: it answers sizes that no bucket covers, {sizes}"
        );
    }
    match &program.padding {
        Padding::Allowed if measured.sensitive == Some(true) => out.line(
            "smaller requests are padded; other values in the padding than the spec's would change the answer",
        ),
        Padding::Allowed => out.line("smaller requests are padded"),
        refused => out.line(refused.refusal(&program.sizes).unwrap_or_default()),
    }
}

/// Returns the bytes of weights that each process prepacks. Views take none, nor do matrices that are concatenated on a
/// device.
fn made_at_load(program: &Program, artifacts: &Artifacts) -> u64 {
    let steps = program.steps.iter();
    let steps: BTreeSet<_> = steps.map(|step| (step.artifact, &step.binding)).collect();
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

/// Returns a drawing of the inputs, the steps with their inputs, outputs and weights, and the outputs.
fn draw(program: &Program, artifacts: &Artifacts, whole: bool) -> Vec<String> {
    let inputs = program.inputs.iter().map(|input| &input.name);
    let states = program.states.iter().map(|state| &state.name);
    let named: Vec<&String> = inputs.chain(states).collect();
    let name = |value: &usize| match named.get(*value) {
        Some(name) => (*name).clone(),
        None => format!("%{value}"),
    };
    let inputs = program.inputs.iter();
    let mut lines: Vec<String> = inputs.map(|one| format!("in   {}", input(one))).collect();
    lines.extend(states_of(program, whole));
    let widths = program
        .steps
        .iter()
        .map(|step| step_name(step).chars().count());
    let width = widths.max().unwrap_or(0);
    for (index, step) in program.steps.iter().enumerate() {
        let last = index + 1 == program.steps.len();
        let inputs: Vec<String> = step.inputs.iter().map(name).collect();
        let artifact = artifacts.get(&step.artifact);
        let outputs = step.outputs.iter().enumerate().map(|(place, value)| {
            match artifact.and_then(|artifact| artifact.outputs.get(place)) {
                Some(layout) => format!("{}: {}", name(value), tensor(layout)),
                None => name(value),
            }
        });
        let bound = match step.binding.len() {
            0 => String::new(),
            bound => format!("  {}", count(bound, "weight").dimmed()),
        };
        lines.push(format!(
            "{} {:<width$}  {}  ({}) → ({}){bound}",
            if last { " └─" } else { " ├─" },
            step_name(step),
            step.artifact.short().cyan(),
            inputs.join(", "),
            outputs.collect::<Vec<_>>().join(", "),
        ));
        let rail = if last { "   " } else { " │ " };
        for (constant, weight) in step.binding.iter().filter(|_| whole) {
            let mut constants = artifact.iter().flat_map(|artifact| &artifact.constants);
            let layout = constants.find(|known| known.name == *constant);
            let layout = layout
                .map(|known| tensor(&known.layout))
                .unwrap_or_default();
            lines.push(format!(
                "{rail}     {constant} = {weight}  {}",
                layout.dimmed()
            ));
        }
    }
    for (one, value) in program.outputs.iter().zip(&program.results) {
        lines.push(format!("out  {} = {}", output(one), name(value)));
    }
    lines
}

fn step_name(step: &Step) -> &str {
    if step.name.is_empty() {
        "(whole)"
    } else {
        &step.name
    }
}

/// Returns the states, a line each; one line for many states, unless `whole` is set.
fn states_of(program: &Program, whole: bool) -> Vec<String> {
    const FEW: usize = 4;
    let line = |state: &State| {
        let text = format!("kept {}", sized(&state.name, &state.layout, &state.dims));
        match &state.first {
            First::Output { module, .. } => format!("{text}, filled by `{module}`"),
            First::Zeros | First::Tensor(_) => text,
        }
    };
    match &program.states[..] {
        [first, .., last] if !whole && program.states.len() > FEW => {
            let (number, bytes) = (program.states.len(), bytes(session_bytes([program])));
            let (first, last) = (&first.name, &last.name);
            vec![format!("kept {number} states of {bytes}, {first} … {last}")]
        }
        states => states.iter().map(line).collect(),
    }
}

fn input(input: &Input) -> String {
    sized(&input.name, &input.layout, &input.dims)
}

/// Returns a tensor as `ids: int64[batch=4, 8]`.
fn sized(name: &str, layout: &Layout, dims: &[Option<String>]) -> String {
    let named = dims
        .iter()
        .map(|dim| dim.as_ref().map(|dim| format!("{dim}=")));
    with_axes(name, layout, named)
}

/// Returns a tensor with a prefix of each size.
fn with_axes(
    name: &str,
    layout: &Layout,
    prefixes: impl Iterator<Item = Option<String>>,
) -> String {
    let axes = layout.shape.iter().zip(prefixes);
    let axes = axes.map(|(size, prefix)| format!("{}{size}", prefix.unwrap_or_default()));
    let axes: Vec<String> = axes.collect();
    format!("{name}: {}[{}]", layout.dtype, axes.join(", "))
}

/// Returns an output as `logits: float32[batch=4, 2*seq+1=17]`.
fn output(output: &Output) -> String {
    let named = output.dims.iter().map(|follow| {
        let follow = follow.as_ref()?;
        let (dim, scale, offset) = (&follow.dim, follow.scale, follow.offset);
        Some(match (scale, offset) {
            (1, 0) => format!("{dim}="),
            _ => format!("{scale}*{dim}{offset:+}="),
        })
    });
    with_axes(&output.name, &output.layout, named)
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
    let row = |id: &Digest, name: &str, steps: String, artifact: Option<&Artifact>| {
        let mut cells = vec![id.short(), name.to_owned(), steps];
        let Some(artifact) = artifact else {
            cells.push("not in the store".to_owned());
            return anyhow::Ok(cells);
        };
        let stored = store.objects().row(&artifact.object)?;
        let compile = artifact.compile_seconds();
        cells.extend([
            bytes(artifact.size),
            stored.map_or_else(|| "missing".to_owned(), |row| bytes(row.stored)),
            Some(compile)
                .filter(|it| *it > 0.0)
                .map(time)
                .unwrap_or_default(),
            artifact.object.short(),
        ]);
        Ok(cells)
    };
    let mut rows = Vec::new();
    let mut seen = BTreeSet::new();
    for step in &program.steps {
        let id = &step.artifact;
        if seen.insert(id) {
            let own = program.steps.iter().filter(|other| other.artifact == *id);
            let steps = own.count().to_string();
            rows.push(row(id, step_name(step), steps, artifacts.get(id))?);
        }
    }
    let eager = program.eager.as_ref().map(|eager| eager.artifact);
    for (id, name) in [(eager, "(eager)"), (program.constants, "(made by code)")] {
        if let Some(id) = id
            && let Some(artifact) = store.records().artifact(&id)?
        {
            rows.push(row(&id, name, String::new(), Some(&artifact))?);
        }
    }
    table::print(&context.out, &COLUMNS, rows.into_iter())
}

fn receipt(receipt: &ReceiptSummary, out: &Printer) -> Result<()> {
    writeln!(out, "\n{}", "receipt".bold())?;
    if *receipt == ReceiptSummary::default() {
        return out.line("  nothing was measured");
    }
    let seconds = receipt.seconds.iter();
    let seconds: Vec<String> = seconds
        .map(|(phase, s)| format!("{phase} {}", time(*s)))
        .collect();
    if !seconds.is_empty() {
        writeln!(out, "  built in    {}", seconds.join(", "))?;
    }
    if let Some(by) = &receipt.gated_by {
        let same = "the same artifacts, weights and samples, on the same host";
        writeln!(out, "  gated       as {}: {same}", by.short())?;
    }
    if let Some(eager) = &receipt.eager {
        writeln!(out, "  eager       {} a call", time(eager.median))?;
    }
    if let Some(artifact) = &receipt.artifact {
        let ratio = match receipt.speedup() {
            Some(ratio) if ratio < 1.0 => format!(", {:.2}× slower than eager", 1.0 / ratio),
            Some(ratio) => format!(", {ratio:.2}× faster than eager"),
            None => String::new(),
        };
        let took = time(artifact.median);
        writeln!(out, "  artifact    {took} a call{ratio}")?;
    }
    if let Some(test) = &receipt.sign_test {
        let verdict = receipt::decided(test);
        let style = if receipt.slower {
            Style::new().yellow()
        } else {
            Style::new()
        };
        writeln!(out, "  by turns    {}", verdict.style(style))?;
    }
    if let Some((eager, artifact)) = receipt.memory {
        let (eager, artifact) = (bytes(eager), bytes(artifact));
        writeln!(
            out,
            "  memory      {artifact} a call at most, eager {eager}"
        )?;
    }
    match receipt.deterministic {
        Some(true) => out.line("  repeats     two runs give the same bits")?,
        Some(false) => out.line("  repeats     two runs differ")?,
        None => {}
    }
    let decided = (receipt.outputs.iter()).filter_map(|one| Some((one.name.as_str(), one.truth?)));
    if let Some(line) = truth(&decided.collect::<Vec<_>>()) {
        out.line(format!("  truth       {line}"))?;
    }
    outputs(receipt, out)?;
    tuned(receipt, out)
}

/// Says on how many values the truth decided, with the one that is furthest from it.
fn truth(decided: &[(&str, Truth)]) -> Option<String> {
    let times = |distances: &Truth| distances.artifact / distances.eager.max(f64::MIN_POSITIVE);
    let furthest = (decided.iter()).max_by(|(_, a), (_, b)| times(a).total_cmp(&times(b)));
    let (name, distances) = furthest?;
    let mut line = format!(
        "{} decided on {} values, at most {:.1} times as far from it as eager's (`{name}`)",
        distances.dtype,
        decided.len(),
        times(distances),
    );
    let noise = decided.iter().filter(|(_, found)| found.size_alone).count();
    if noise > 0 {
        line += &format!("; noise in eager, and as large here: {noise}");
    }
    Some(line)
}

/// Prints the differences between the outputs and eager's.
fn outputs(receipt: &ReceiptSummary, out: &Printer) -> Result<()> {
    const COLUMNS: [Column; 7] = [
        Column::left("  OUTPUT", 0),
        Column::right("USED", 0),
        Column::right("MAX ABS", 1),
        Column::right("ATOL", 2),
        Column::right("MAX REL", 3),
        Column::right("RTOL", 4),
        Column::right("COSINE", 5),
    ];
    if receipt.outputs.is_empty() {
        return Ok(());
    }
    out.line("")?;
    let rows = receipt.outputs.iter().map(|output| {
        let mut row = vec![format!("  {}", output.name)];
        if output.exact {
            row.push("equal".to_owned());
            return row;
        }
        row.extend([
            format!("{:.2} %", output.used() * 100.0),
            format!("{:.2e}", output.max_abs),
            format!("{:.2e}", output.atol),
            format!("{:.2e}", output.max_rel),
            format!("{:.2e}", output.rtol),
            format!("{:.9}", output.cosine),
        ]);
        row
    });
    table::print(out, &COLUMNS, rows)
}

/// Prints the option sets that the program was compiled with.
fn tuned(receipt: &ReceiptSummary, out: &Printer) -> Result<()> {
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
    let Some(choice) = receipt::choice(&receipt.tuned) else {
        return Ok(());
    };
    writeln!(out, "\n{}\n  {choice}", "tuned".bold())?;
    if let Some(by) = &receipt.tuned_by {
        let by = by.short();
        writeln!(out, "  measured for {by}, which has the same artifacts")?;
    }
    out.line("")?;
    let first = receipt.tuned.first().and_then(|first| first.latency);
    let rows = receipt.tuned.iter().map(|tried| {
        let speed = first.zip(tried.latency).map(|(first, own)| first / own);
        let verdict = match (tried.chosen, &tried.refused) {
            (true, _) => "kept",
            (false, Some(_)) => "refused",
            (false, None) => "",
        };
        let (speed, error) = (
            speed.map(|speed| format!("{speed:.2}×")),
            tried.max_abs.map(|error| format!("{error:.2e}")),
        );
        vec![
            format!("  {}", tried.options),
            tried.seconds.map(time).unwrap_or_default(),
            tried.latency.map(time).unwrap_or_default(),
            speed.unwrap_or_default(),
            error.unwrap_or_default(),
            verdict.to_owned(),
        ]
    });
    table::print(out, &COLUMNS, rows)?;
    out.line("")?;
    for tried in &receipt.tuned {
        if let Some(why) = &tried.refused {
            writeln!(out, "  {} was refused: {why}", tried.options)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_truth_decided_is_one_line() {
        let one = |artifact, size_alone| Truth {
            dtype: crate::record::Dtype::Float32,
            artifact,
            eager: 0.5,
            artifact_worst: None,
            eager_worst: None,
            size_alone,
        };
        assert_eq!(truth(&[]), None);
        let line = |decided: &[(&str, Truth)]| truth(decided).unwrap();
        insta::assert_snapshot!(line(&[("loss", one(0.25, false)), ("a", one(0.7, false))]), @"float32 decided on 2 values, at most 1.4 times as far from it as eager's (`a`)");
        insta::assert_snapshot!(line(&[("loss", one(0.25, false)), ("a", one(0.7, true))]), @"float32 decided on 2 values, at most 1.4 times as far from it as eager's (`a`); noise in eager, and as large here: 1");
    }
}
