//! What `precast check` prints: a table by severity, each finding in full, and what is known of each module.

use anyhow::Result;
use owo_colors::OwoColorize;

use crate::{
    build::{
        Forecast,
        protocol::{Cost, Finding, Free, KeptOut, Recompiles, Repeated, Severity},
    },
    cli::{
        Context,
        printer::note,
        progress::seconds,
        table::{self, Column},
        text::{bytes, count, plain},
    },
    inspect::{
        checks::{Checks, FindingRow, ModuleChecks, Padding},
        words::time,
    },
    record::bucket_name,
};

/// How many of the reasons against a CUDA graph are named.
const REASONS: usize = 3;

pub(super) fn print(checks: &Checks, context: &Context) -> Result<()> {
    let rows = checks.rows();
    let (allowed, open): (Vec<&FindingRow<'_>>, Vec<&FindingRow<'_>>) =
        rows.iter().partition(|row| row.allowed.is_some());
    table(&open, context)?;
    for row in &open {
        context.out.line("")?;
        context.out.line(finding(row.finding).join("\n"))?;
    }
    if !open.is_empty() {
        context.out.line("")?;
    }
    for row in allowed {
        context.out.line(format_args!(
            "{} {} at {}: {}",
            "allowed".dimmed(),
            row.finding.category,
            plain(row.finding.location.as_deref().unwrap_or("-")),
            plain(row.allowed.unwrap_or_default())
        ))?;
    }
    for module in &checks.modules {
        summary(module, context)?;
    }
    let padding = checks.padding.iter().map(padded);
    for (name, said) in padding.chain([("a build", forecast(&checks.build))]) {
        context.out.line(format_args!("{}: {said}", name.bold()))?;
    }
    if !context.quiet {
        note(verdict(&open, checks.failed));
    }
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
        Ok(vec![
            word(finding.severity).to_owned(),
            finding.category.clone(),
            text(&finding.location),
            row.modules.join(", "),
            text(&finding.function),
        ])
    });
    table::print(&context.out, &columns, cells)?;
    Ok(())
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::High => "high",
        Severity::Medium => "medium",
        Severity::Low => "low",
    }
}

/// Returns one finding in full, line by line.
pub(in crate::cli) fn finding(finding: &Finding) -> Vec<String> {
    let place = match &finding.location {
        Some(location) => format!("{}: ", plain(location)),
        None => String::new(),
    };
    let why = plain(&finding.why);
    let mut lines = vec![format!("{place}{}: {why}", finding.category.bold())];
    lines.extend((finding.source.iter()).map(|source| format!("    {}", plain(source))));
    lines.push(format!(
        "  {} {}",
        "fix:".cyan().bold(),
        plain(&finding.fix.text)
    ));
    let fixed = finding.fix.lines.iter();
    lines.extend(fixed.map(|line| format!("    {}", plain(line).green())));
    lines
}

/// Prints what is known of a module beside its findings, and what is not.
fn summary(module: &ModuleChecks, context: &Context) -> Result<()> {
    let bucket = match module.bucket.is_empty() {
        true => String::new(),
        false => format!(" {}", module.bucket),
    };
    let state = match module.captured {
        Some(true) => "can be captured".to_owned(),
        Some(false) => "can't be captured".red().to_string(),
        None => "was not looked at".to_owned(),
    };
    let line = format!("{}{bucket}: {state}", module.module.bold());
    context.out.line(line)?;
    let mut facts: Vec<(&str, String)> = Vec::new();
    if let (Some(artifacts), Some(steps)) = (module.artifacts, module.steps) {
        let mut said = format!(
            "{} in {}",
            count(artifacts, "artifact"),
            count(steps, "step")
        );
        if module.buckets > 1 {
            said.push_str(&format!(" for each of {} buckets", module.buckets));
        }
        facts.push(("compiles", said));
    }
    let sizes: Vec<String> = (module.dynamic.iter().flatten())
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
        facts.extend(costs(cost).into_iter().map(|said| ("cost", said)));
    }
    let mut before = "";
    for (name, said) in facts {
        let shown = if name == before { "" } else { name };
        before = name;
        let line = format!("  {} {}", format!("{shown:<13}").dimmed(), plain(&said));
        context.out.line(line)?;
    }
    for unknown in &module.unknown {
        let line = format!("  {} {}", "not known:   ".yellow(), plain(unknown));
        context.out.line(line)?;
    }
    Ok(())
}

fn free_sizes(dim: &str, free: Option<&Free>) -> String {
    match free {
        Some(Free {
            min,
            max: Some(max),
        }) => format!("`{dim}` is free from {min} to {max}"),
        Some(Free { min, max: None }) => format!("`{dim}` is free from {min} on"),
        None => format!("`{dim}` is fixed by the code"),
    }
}

fn repeated(list: &Repeated) -> String {
    let Repeated {
        glob,
        class,
        count: members,
        artifacts,
        region,
    } = list;
    let shared = count(*artifacts, "artifact");
    match (region, artifacts < members) {
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
    let mut said: Vec<String> = (reasons.iter().take(REASONS))
        .map(|one| match &one.location {
            Some(location) => format!("{} at {location}", one.why),
            None => one.why.clone(),
        })
        .collect();
    if reasons.len() > REASONS {
        said.push(format!("{} more", reasons.len() - REASONS));
    }
    format!("none has it: {}", said.join("; "))
}

fn recompiled(recompiles: &Recompiles) -> String {
    let Some((first, others)) = recompiles.calls.split_first() else {
        return "nothing is known".to_owned();
    };
    let mut said = match first.graphs {
        0 => "no graph: eager runs all of it".to_owned(),
        graphs => count(graphs, "graph"),
    };
    if first.breaks > 0 {
        said.push_str(&format!(", {}", count(first.breaks, "break")));
    }
    let again: Vec<String> = (others.iter().filter(|call| !call.guards.is_empty()))
        .map(|call| bucket_name(&call.sizes))
        .collect();
    match again.is_empty() {
        true => said.push_str(&format!(
            ", none more in {}",
            count(others.len() as u64, "call")
        )),
        false => said.push_str(&format!(
            ", compiled again in {} of {}: {}",
            again.len(),
            count(others.len() as u64, "call"),
            again.join("; ")
        )),
    }
    said
}

fn costs(cost: &Cost) -> Vec<String> {
    let mut lines: Vec<String> = (cost.buckets.iter())
        .map(|one| {
            let name = match one.sizes.is_empty() {
                true => String::new(),
                false => format!("{}: ", bucket_name(&one.sizes)),
            };
            let flops = scaled(one.flops as f64);
            format!(
                "{name}{flops}FLOP, {}, at least {}",
                bytes(one.bytes),
                time(one.seconds)
            )
        })
        .collect();
    let (flops, moved) = (scaled(cost.flops_per_second), scaled(cost.bytes_per_second));
    lines.push(format!(
        "of this machine: {flops}FLOP/s and {moved}B/s, by {}",
        cost.measured
    ));
    lines
}

/// Returns a number with a prefix of the SI, as `1.5 G`.
fn scaled(number: f64) -> String {
    const PREFIXES: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    match PREFIXES.iter().find(|(size, _)| number >= *size) {
        Some((size, prefix)) => format!("{:.1} {prefix}", number / size),
        None => format!("{number:.0} "),
    }
}

fn padded(padding: &Padding) -> (&'static str, String) {
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let mut said = match padding.waste {
        Some(waste) => format!(
            "{} of the work in `{}` is padding, at the buckets {:?}",
            percent(waste),
            padding.dim,
            padding.buckets
        ),
        None => format!("no bucket of `{}` covers any of the sizes", padding.dim),
    };
    if padding.uncovered > 0 {
        let (uncovered, sizes) = (padding.uncovered, padding.sizes);
        said.push_str(&format!(
            "; {uncovered} of {sizes} sizes are larger than all of them"
        ));
    }
    let less = padding.waste.is_none_or(|waste| padding.best_waste < waste);
    if less || padding.uncovered > 0 {
        let best = percent(padding.best_waste);
        said.push_str(&format!("; {:?} would waste {best}", padding.best));
    }
    ("padding", said)
}

fn forecast(build: &Forecast) -> String {
    let Forecast {
        missing,
        stopped,
        programs,
        artifacts,
        workers,
        receipts,
        ..
    } = build;
    let made = match missing {
        0 => return format!("nothing to do: all of {programs} programs are in the store"),
        _ if missing == stopped => {
            return format!("makes no program: none of the {missing} missing ones can be captured");
        }
        _ => format!(
            "makes {} of {}",
            missing - stopped,
            count(*programs as u64, "program")
        ),
    };
    let made = match stopped {
        0 => made,
        _ => format!("{made} ({stopped} can't be captured)"),
    };
    let Some(artifacts) = artifacts else {
        return format!("{made}; how many artifacts is not known");
    };
    let compiled = format!("{made}, compiles up to {}", count(*artifacts, "artifact"));
    match build.seconds {
        Some(took) => format!(
            "{compiled}, in about {} with {} (by {} of earlier builds)",
            seconds(took),
            count(*workers as u64, "worker"),
            count((*receipts).into(), "artifact")
        ),
        None => format!("{compiled}; how long is not known: no earlier build is in the store"),
    }
}

fn verdict(rows: &[&FindingRow<'_>], failed: bool) -> String {
    let of = |severity| {
        let own = rows.iter().filter(|row| row.finding.severity == severity);
        own.count()
    };
    let (high, medium, low) = (of(Severity::High), of(Severity::Medium), of(Severity::Low));
    let word = match failed {
        true => "failed".red().bold().to_string(),
        false => "passed".green().bold().to_string(),
    };
    match (high, medium + low) {
        (0, 0) => format!("{word}: nothing found"),
        (0, _) => format!("{word}: nothing stops a build; {medium} medium, {low} low"),
        (1, _) => format!("{word}: 1 finding stops a build; {medium} medium, {low} low"),
        _ => format!("{word}: {high} findings stop a build; {medium} medium, {low} low"),
    }
}
