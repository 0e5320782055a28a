//! The output of `precast check`: a table by severity, each finding in full, and the facts of each module.

use anyhow::Result;
use owo_colors::OwoColorize;

use crate::{
    build::{
        CheckedModule, Forecast,
        protocol::{Checked, Cost, Free, KeptOut, Recompiles, Repeated, Severity},
    },
    cli::{
        Context,
        finding::finding,
        progress::seconds,
        table::{self, Column},
        text::{bytes, count, plain},
    },
    inspect::{
        checks::{Checks, FindingRow, Padding, rows},
        words::time,
    },
    record::bucket_name,
};

/// The number of reasons against a CUDA graph that are named.
const REASONS: usize = 3;

pub(super) fn print(checks: &Checks, context: &Context) -> Result<()> {
    let out = &context.out;
    let rows = rows(&checks.modules);
    let (allowed, open): (Vec<&FindingRow<'_>>, Vec<&FindingRow<'_>>) =
        rows.iter().partition(|row| row.finding.allowed.is_some());
    table(&open, context)?;
    for row in &open {
        writeln!(out, "\n{}", finding(row.finding).join("\n"))?;
    }
    if !open.is_empty() {
        out.line("")?;
    }
    for row in allowed {
        let text = |text: &Option<String>| plain(text.as_deref().unwrap_or("-"));
        let (category, location) = (&row.finding.category, text(&row.finding.location));
        let (allowed, why) = ("allowed".dimmed(), text(&row.finding.allowed));
        writeln!(out, "{allowed} {category} at {location}: {why}")?;
    }
    for module in &checks.modules {
        summary(module, context)?;
    }
    for one in &checks.padding {
        writeln!(out, "{}: {}", "padding".bold(), padding(one))?;
    }
    writeln!(out, "{}: {}", "a build".bold(), forecast(&checks.build))?;
    note!("{}", verdict(&open, checks.failed));
    Ok(())
}

fn table(rows: &[&FindingRow<'_>], context: &Context) -> Result<()> {
    let paint = |text: &str| match text {
        "high" => text.red().bold().to_string(),
        "medium" => text.yellow().to_string(),
        _ => text.dimmed().to_string(),
    };
    let columns = [
        Column::left("SEVERITY", 0).painted(paint),
        Column::left("FINDING", 0),
        Column::left("WHERE", 0),
        Column::left("MODULE", 1),
        Column::left("FUNCTION", 2),
    ];
    let cells = rows.iter().map(|row| {
        let finding = row.finding;
        let text = |text: &Option<String>| plain(text.as_deref().unwrap_or("-"));
        vec![
            finding.severity.word().to_owned(),
            finding.category.clone(),
            text(&finding.location),
            row.modules.join(", "),
            text(&finding.function),
        ]
    });
    table::print(&context.out, &columns, cells)
}

/// Prints the state of a module, and its known and unknown facts.
fn summary(module: &CheckedModule, context: &Context) -> Result<()> {
    let out = &context.out;
    let title = format!("{} {}", module.module.bold(), module.bucket);
    let state = match module.checked.captured {
        Some(true) => "can be captured".to_owned(),
        Some(false) => "can't be captured".red().to_string(),
        None => "was not looked at".to_owned(),
    };
    writeln!(out, "{}: {state}", title.trim_end())?;
    let mut before = "";
    for (name, fact) in facts(&module.checked, module.buckets) {
        let shown = if name == before { "" } else { name };
        before = name;
        let shown = format!("{shown:<13}");
        writeln!(out, "  {} {}", shown.dimmed(), plain(&fact))?;
    }
    for unknown in &module.checked.unknown {
        writeln!(out, "  {} {}", "not known:   ".yellow(), plain(unknown))?;
    }
    Ok(())
}

fn facts(module: &Checked, buckets: usize) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    if let (Some(artifacts), Some(steps)) = (module.artifacts, module.steps) {
        let (artifacts, steps) = (count(artifacts, "artifact"), count(steps, "step"));
        let each = match buckets {
            0 | 1 => String::new(),
            buckets => format!(" for each of {buckets} buckets"),
        };
        facts.push(("compiles", format!("{artifacts} in {steps}{each}")));
    }
    let sizes = module.dynamic.iter().flatten();
    let sizes: Vec<String> = sizes
        .map(|(dim, free)| free_sizes(dim, free.as_ref()))
        .collect();
    if !sizes.is_empty() {
        facts.push(("sizes", sizes.join(", ")));
    }
    facts.extend(module.lists.iter().map(|list| ("repeated", repeated(list))));
    if !module.graph.is_empty() {
        facts.push(("CUDA graph", kept_out(&module.graph)));
    }
    if let Some(recompiles) = &module.recompiles {
        facts.push(("torch.compile", recompiled(recompiles)));
    }
    if let Some(cost) = &module.cost {
        facts.extend(costs(cost).into_iter().map(|line| ("cost", line)));
    }
    facts
}

fn free_sizes(dim: &str, free: Option<&Free>) -> String {
    match free.map(|free| (free.min, free.max)) {
        Some((min, Some(max))) => format!("`{dim}` is free from {min} to {max}"),
        Some((min, None)) => format!("`{dim}` is free from {min} on"),
        None => format!("`{dim}` is fixed by the code"),
    }
}

fn repeated(list: &Repeated) -> String {
    let (members, class, glob) = (list.count, &list.class, &list.glob);
    let shared = count(list.artifacts, "artifact");
    match (list.region, list.artifacts < members) {
        (true, true) => format!("{members} `{class}` share {shared}: `{glob}`"),
        (true, false) => {
            format!("{members} `{class}` share nothing: `{glob}` is no use as a region")
        }
        (false, true) => {
            format!("{members} `{class}` could share {shared}: regions = [\"{glob}\"]")
        }
        (false, false) => format!("{members} `{class}` at `{glob}` are all different"),
    }
}

fn kept_out(reasons: &[KeptOut]) -> String {
    let first = reasons.iter().take(REASONS).map(|one| match &one.location {
        Some(location) => format!("{} at {location}", one.why),
        None => one.why.clone(),
    });
    let more = reasons.len().saturating_sub(REASONS);
    let more = (more > 0).then(|| format!("{more} more"));
    let all: Vec<String> = first.chain(more).collect();
    format!("none has it: {}", all.join("; "))
}

fn recompiled(recompiles: &Recompiles) -> String {
    let Some((first, others)) = recompiles.calls.split_first() else {
        return "nothing is known".to_owned();
    };
    let mut text = match first.graphs {
        0 => "no graph: eager runs all of it".to_owned(),
        graphs => count(graphs, "graph"),
    };
    if first.breaks > 0 {
        text += &format!(", {}", count(first.breaks, "break"));
    }
    let again = others.iter().filter(|call| !call.guards.is_empty());
    let again: Vec<String> = again.map(|call| bucket_name(&call.sizes)).collect();
    let calls = count(others.len(), "call");
    text + &match again.len() {
        0 => format!(", none more in {calls}"),
        number => format!(
            ", compiled again in {number} of {calls}: {}",
            again.join("; ")
        ),
    }
}

fn costs(cost: &Cost) -> Vec<String> {
    let buckets = cost.buckets.iter().map(|one| {
        let name = if one.sizes.is_empty() {
            String::new()
        } else {
            format!("{}: ", bucket_name(&one.sizes))
        };
        let (flops, moved, took) = (
            scaled(one.flops as f64),
            bytes(one.bytes),
            time(one.seconds),
        );
        format!("{name}{flops}FLOP, {moved}, at least {took}")
    });
    let (flops, moved) = (scaled(cost.flops_per_second), scaled(cost.bytes_per_second));
    let machine = format!(
        "of this machine: {flops}FLOP/s and {moved}B/s, by {}",
        cost.measured
    );
    buckets.chain([machine]).collect()
}

/// Returns a number with a prefix of the SI, as `1.5 G`.
fn scaled(number: f64) -> String {
    const PREFIXES: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match PREFIXES.iter().find(|(size, _)| number >= *size) {
        Some((size, prefix)) => format!("{:.1} {prefix}", number / size),
        None => format!("{number:.0} "),
    }
}

fn padding(padding: &Padding) -> String {
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let (dim, buckets, uncovered) = (&padding.dim, &padding.buckets, padding.uncovered);
    let mut text = match padding.waste.map(percent) {
        Some(waste) => {
            format!("{waste} of the work in `{dim}` is padding, at the buckets {buckets:?}")
        }
        None => format!("no bucket of `{dim}` covers any of the sizes"),
    };
    if uncovered > 0 {
        let sizes = padding.sizes;
        text += &format!("; {uncovered} of {sizes} sizes are larger than all of them");
    }
    let less = padding.waste.is_none_or(|waste| padding.best_waste < waste);
    if less || uncovered > 0 {
        let best = percent(padding.best_waste);
        text += &format!("; {:?} would waste {best}", padding.best);
    }
    text
}

fn forecast(build: &Forecast) -> String {
    let (missing, stopped) = (build.missing, build.stopped);
    if missing == 0 {
        return format!(
            "nothing to do: all of {} programs are in the store",
            build.programs
        );
    }
    if missing == stopped {
        return format!("makes no program: none of the {missing} missing ones can be captured");
    }
    let mut text = format!(
        "makes {} of {}",
        missing - stopped,
        count(build.programs, "program")
    );
    if stopped > 0 {
        text += &format!(" ({stopped} can't be captured)");
    }
    let Some(artifacts) = build.artifacts else {
        return text + "; how many artifacts is not known";
    };
    text += &format!(", compiles up to {}", count(artifacts, "artifact"));
    let Some(took) = build.seconds.map(seconds) else {
        return text + "; how long is not known: no earlier build is in the store";
    };
    let (workers, known) = (
        count(build.workers, "worker"),
        count(build.receipts, "artifact"),
    );
    text + &format!(", in about {took} with {workers} (by {known} of earlier builds)")
}

fn verdict(rows: &[&FindingRow<'_>], failed: bool) -> String {
    let of = |severity| {
        let own = rows.iter().filter(|row| row.finding.severity == severity);
        own.count()
    };
    let (high, medium, low) = (of(Severity::High), of(Severity::Medium), of(Severity::Low));
    let word = if failed {
        "failed".red().bold().to_string()
    } else {
        "passed".green().bold().to_string()
    };
    let others = format!("{medium} medium, {low} low");
    match (high, medium + low) {
        (0, 0) => format!("{word}: nothing found"),
        (0, _) => format!("{word}: nothing stops a build; {others}"),
        (1, _) => format!("{word}: 1 finding stops a build; {others}"),
        _ => format!("{word}: {high} findings stop a build; {others}"),
    }
}
