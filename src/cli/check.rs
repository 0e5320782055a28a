//! `precast check`: what will break, why, and what to write instead, before anything is built.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    build::PythonArgs,
    exit,
    printer::note,
    table::{self, Column},
    text::{count, plain},
};
use crate::{
    build::{
        self, CheckOptions, CheckedModule,
        protocol::{Finding, Free, Severity},
    },
    spec::{Spec, check::Allow},
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The spec
    #[arg(default_value = "precast.toml", value_name = "SPEC")]
    file: PathBuf,
    #[command(flatten)]
    python: PythonArgs,
    /// Look at every submodule too, not only at the modules of the spec
    #[arg(long)]
    all: bool,
    /// End with 1 if there is a finding of at least this severity
    #[arg(long, value_enum, default_value_t = FailOn::High, value_name = "SEVERITY")]
    fail_on: FailOn,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum FailOn {
    Low,
    Medium,
    High,
}

impl From<FailOn> for Severity {
    fn from(fail_on: FailOn) -> Self {
        match fail_on {
            FailOn::Low => Self::Low,
            FailOn::Medium => Self::Medium,
            FailOn::High => Self::High,
        }
    }
}

/// One finding, and every module that has it.
struct Row<'a> {
    finding: &'a Finding,
    modules: Vec<&'a str>,
    /// Whether a build needs one of them.
    needed: bool,
    /// The spec's entry that it is intended by.
    allowed: Option<&'a Allow>,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let spec = Spec::load(&args.file)?;
    let options = CheckOptions {
        spec: &spec,
        launcher: args.python.launcher(&spec.root),
        scratch: std::env::temp_dir(),
        all: args.all,
        cancel: Arc::clone(&context.cancel),
    };
    let say = |text: &str| {
        if !context.quiet {
            note(format_args!("{} {}", "note:".cyan().bold(), plain(text)));
        }
    };
    let begin = |module: &str| {
        if context.verbose > 0 {
            note(format_args!("{} {module}", "checking".cyan()));
        }
    };
    let modules = build::check(&options, &say, &begin)?;
    let rows = rows(&modules, &spec);
    let least = Severity::from(args.fail_on);
    let counts =
        |row: &&Row<'_>| row.needed && row.allowed.is_none() && row.finding.severity >= least;
    let failed = rows.iter().filter(counts).count() > 0;
    let unused: Vec<&Allow> = (spec.allowed.iter())
        .filter(|allow| !rows.iter().any(|row| is_about(allow, row.finding)))
        .collect();
    match context.out.json() {
        true => context
            .out
            .document(&document(&spec, &modules, &unused, failed))?,
        false => print(&modules, &rows, failed, context)?,
    }
    for allow in unused {
        exit::warning(&format!(
            "nothing is found that `{}`{} of [[check.allow]] allows",
            allow.finding,
            (allow.function.as_ref()).map_or(String::new(), |function| format!(" in `{function}`"))
        ));
    }
    Ok(if failed { exit::FAILED } else { 0 })
}

fn is_about(allow: &Allow, finding: &Finding) -> bool {
    allow.matches(&finding.category, finding.function.as_deref())
}

/// Returns the spec's entry that a finding is intended by. What stops a build can't be allowed: it would stop it all the same.
fn allowed<'a>(spec: &'a Spec, finding: &Finding) -> Option<&'a Allow> {
    let mut own = spec.allowed.iter();
    own.find(|allow| finding.severity < Severity::High && is_about(allow, finding))
}

/// Returns the findings, each once, by severity.
fn rows<'a>(modules: &'a [CheckedModule], spec: &'a Spec) -> Vec<Row<'a>> {
    let mut rows: Vec<Row<'a>> = Vec::new();
    for module in modules {
        for finding in &module.checked.findings {
            let same = |row: &&mut Row<'a>| {
                row.finding.category == finding.category
                    && row.finding.location == finding.location
                    && row.finding.severity == finding.severity
                    && (finding.location.is_some() || row.finding.why == finding.why)
            };
            match rows.iter_mut().find(same) {
                Some(row) => {
                    row.modules.push(&module.module);
                    row.needed |= module.needed;
                }
                None => rows.push(Row {
                    finding,
                    modules: vec![&module.module],
                    needed: module.needed,
                    allowed: allowed(spec, finding),
                }),
            }
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.finding.severity));
    rows
}

fn word(severity: Severity) -> &'static str {
    match severity {
        Severity::High => "high",
        Severity::Medium => "medium",
        Severity::Low => "low",
    }
}

fn print(
    modules: &[CheckedModule],
    rows: &[Row<'_>],
    failed: bool,
    context: &Context,
) -> Result<()> {
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
    let (allowed, open): (Vec<&Row<'_>>, Vec<&Row<'_>>) =
        rows.iter().partition(|row| row.allowed.is_some());
    let cells = open.iter().map(|row| {
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
    for row in &open {
        context.out.line("")?;
        full(row, context)?;
    }
    if !open.is_empty() {
        context.out.line("")?;
    }
    for row in allowed {
        let reason = row.allowed.map_or("", |allow| allow.reason.as_str());
        context.out.line(format_args!(
            "{} {} at {}: {}",
            "allowed".dimmed(),
            row.finding.category,
            plain(row.finding.location.as_deref().unwrap_or("-")),
            plain(reason)
        ))?;
    }
    for module in modules {
        summary(module, context)?;
    }
    if !context.quiet {
        note(verdict(&open, failed));
    }
    Ok(())
}

/// Prints one finding whole.
fn full(row: &Row<'_>, context: &Context) -> Result<()> {
    let finding = row.finding;
    let place = match &finding.location {
        Some(location) => format!("{}: ", plain(location)),
        None => String::new(),
    };
    let (out, why) = (&context.out, plain(&finding.why));
    out.line(format_args!("{place}{}: {why}", finding.category.bold()))?;
    if let Some(source) = &finding.source {
        out.line(format_args!("    {}", plain(source)))?;
    }
    out.line(format_args!(
        "  {} {}",
        "mend:".cyan().bold(),
        plain(&finding.mend.text)
    ))?;
    for line in &finding.mend.lines {
        out.line(format_args!("    {}", plain(line).green()))?;
    }
    Ok(())
}

/// Prints what is known of a module beside its findings, and what is not.
fn summary(module: &CheckedModule, context: &Context) -> Result<()> {
    let checked = &module.checked;
    let bucket = match module.bucket.is_empty() {
        true => String::new(),
        false => format!(" {}", module.bucket),
    };
    let state = match checked.captured {
        Some(true) => "can be captured",
        Some(false) => "can't be captured",
        None => "was not looked at",
    };
    let mut line = format!("{}{bucket}: {state}", module.module.bold());
    if let (Some(artifacts), Some(steps)) = (checked.artifacts, checked.steps) {
        let artifacts = count(artifacts, "artifact");
        line.push_str(&format!(", {artifacts} in {}", count(steps, "step")));
        if module.buckets > 1 {
            line.push_str(&format!(" for each of {} buckets", module.buckets));
        }
    }
    for (dim, free) in checked.dynamic.iter().flatten() {
        let said = match free {
            Some(Free {
                min,
                max: Some(max),
            }) => format!("free from {min} to {max}"),
            Some(Free { min, max: None }) => format!("free from {min} on"),
            None => "fixed by the code".to_owned(),
        };
        line.push_str(&format!(", `{dim}` is {said}"));
    }
    context.out.line(line)?;
    for unknown in &checked.unknown {
        let line = format!("  {} {}", "not known:".yellow(), plain(unknown));
        context.out.line(line)?;
    }
    Ok(())
}

fn verdict(rows: &[&Row<'_>], failed: bool) -> String {
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

/// `precast check --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document<'a> {
    model: &'a str,
    /// Whether the exit code is 1.
    failed: bool,
    modules: Vec<ModuleLine<'a>>,
    /// Entries of `[[check.allow]]` that no finding matches.
    unused: &'a [&'a Allow],
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct ModuleLine<'a> {
    /// The module's title in the spec, or the submodule's name.
    module: &'a str,
    /// The submodule; empty for the model itself.
    path: &'a str,
    /// Whether a build needs it: its findings can fail the check.
    needed: bool,
    /// The bucket that was looked at.
    bucket: &'a str,
    /// How many buckets it has.
    buckets: usize,
    /// Whether a build can capture it; null where it was not looked at.
    captured: Option<bool>,
    /// Calls of artifacts at one bucket.
    steps: Option<u64>,
    /// Distinct artifacts at one bucket.
    artifacts: Option<u64>,
    /// Bucketed dimension -> the sizes that a dynamic artifact holds for; null where the code fixes it.
    dynamic: Option<&'a BTreeMap<String, Option<Free>>>,
    findings: Vec<FindingLine<'a>>,
    /// What could not be found out.
    unknown: &'a [String],
    seconds: f64,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct FindingLine<'a> {
    #[serde(flatten)]
    finding: &'a Finding,
    /// The reason in `[[check.allow]]`, where the spec has one for it.
    allowed: Option<&'a str>,
}

fn document<'a>(
    spec: &'a Spec,
    modules: &'a [CheckedModule],
    unused: &'a [&'a Allow],
    failed: bool,
) -> Document<'a> {
    let line = |finding: &'a Finding| FindingLine {
        finding,
        allowed: allowed(spec, finding).map(|allow| allow.reason.as_str()),
    };
    let modules = modules.iter().map(|module| ModuleLine {
        module: &module.module,
        path: &module.path,
        needed: module.needed,
        bucket: &module.bucket,
        buckets: module.buckets,
        captured: module.checked.captured,
        steps: module.checked.steps,
        artifacts: module.checked.artifacts,
        dynamic: module.checked.dynamic.as_ref(),
        findings: module.checked.findings.iter().map(line).collect(),
        unknown: &module.checked.unknown,
        seconds: module.checked.seconds,
    });
    Document {
        model: &spec.model.name,
        failed,
        modules: modules.collect(),
        unused,
    }
}
