//! The summary of `precast build`, as text and as JSON.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::super::{
    Context,
    finding::finding as lines_of,
    progress::seconds,
    spec::{EAGER, PADDING},
    text,
};
use crate::{
    build::{Built, Outcome, Summary, protocol::Finding},
    inspect::receipt::Instead,
    record::Release,
    store::{Store, StoreError},
};

/// Returns the programs that eager answers in place of slower artifacts.
pub(super) fn instead(summary: &Summary, store: &Store) -> Result<Vec<Instead>, StoreError> {
    let mut found = Vec::new();
    for id in summary
        .programs
        .iter()
        .filter_map(|(_, outcome)| outcome.id())
    {
        let program = store.records().program(&id)?;
        found.extend(program.as_ref().and_then(Instead::of));
    }
    Ok(found)
}

/// Prints the summary of a build.
pub(super) fn print(summary: &Summary, instead: Vec<Instead>, context: &Context) -> Result<()> {
    if context.out.json() {
        return context.out.event(&document(summary, instead));
    }
    failures(summary);
    gaps(summary);
    for one in &instead {
        note!("{} {one}", "slower:".yellow());
    }
    note!("{}", last_line(summary));
    if let (true, Some(release)) = (summary.published, &summary.release) {
        published(release, summary.before);
    }
    if let Some(tokens) = summary.generated {
        let tokens = text::count(usize::try_from(tokens).unwrap_or(usize::MAX), "token");
        note!("        `prefill` and `decode` agree with eager for {tokens} of a session");
    }
    if let (true, Some((old, new))) = (summary.published, &summary.weights_changed) {
        let (old, new) = (old.short(), new.short());
        note!("        its weights changed: {old} -> {new}");
    }
    if let (false, Some(before)) = (summary.lost.is_empty(), summary.before) {
        let (lost, names) = ("lost".yellow().bold().to_string(), few(&summary.lost));
        note!("{lost} {names}: release {before} has it, the new one does not");
    }
    if !summary.without.is_empty() {
        let (without, names) = ("without".yellow().bold().to_string(), few(&summary.without));
        note!("{without} {names}: nothing answers it");
    }
    Ok(())
}

/// Prints the programs that failed, and the findings about modules that could not be captured.
fn failures(summary: &Summary) {
    for (name, outcome) in &summary.programs {
        let Outcome::Failed {
            key,
            message,
            location,
            hint,
            ..
        } = outcome
        else {
            continue;
        };
        let place = location.iter().map(|place| format!("{place}: "));
        let place: String = place.collect();
        note!("{} {name}: {place}{message}", "failed".red().bold());
        note!("       {} {hint}", "hint:".cyan().bold());
        if let Some(key) = key {
            note!("       `precast log {}` prints the whole log", key.short());
        }
    }
    for (module, findings) in &summary.findings {
        for finding in findings {
            note!("\n{}", lines_of(finding).join("\n"));
        }
        let more = "`precast check` says what else it finds";
        note!("\n{} {module}: {more}", "note:".cyan().bold());
    }
}

/// Prints the requests that no artifact of this build answers.
fn gaps(summary: &Summary) {
    for (why, names) in left_out(summary) {
        let (few, refused) = (few(&names), refused_without(summary, &names));
        note!("{} {few}: {why}{refused}", "left out".yellow());
    }
    for (why, names) in exact_only(summary) {
        let (reason, why) = why.split_once(": ").unwrap_or((why, ""));
        note!("{} {}: {why}", reason.yellow(), few(&names));
        note!("       {} {PADDING}", "hint:".cyan().bold());
    }
    for (name, sizes) in narrowed(summary) {
        note!("{} {name}: {sizes}", "only".yellow());
    }
    if !summary.eager_unasked.is_empty() {
        let names = few(&summary.eager_unasked);
        note!("{} {names}: eager {EAGER}", "also".cyan());
    }
}

/// Returns the line with the numbers of programs and artifacts.
fn last_line(summary: &Summary) -> String {
    let count = |is: fn(&Outcome) -> bool| {
        let outcomes = summary.programs.iter().map(|(_, outcome)| outcome);
        outcomes.filter(|outcome| is(outcome)).count()
    };
    let hits = count(|outcome| matches!(outcome, Outcome::Hit { .. }));
    let built = count(|outcome| matches!(outcome, Outcome::Built(_)));
    let gated = count(|outcome| matches!(outcome, Outcome::Built(it) if it.gated_by.is_some()));
    let (failed, _) = summary.failed();
    let (time, total) = (seconds(summary.seconds), summary.programs.len());
    let from: BTreeSet<&str> = (summary.programs.iter())
        .filter_map(|(_, outcome)| match outcome {
            Outcome::Hit { from, .. } => from.as_deref(),
            _ => None,
        })
        .collect();
    let mut line = if (built, failed) == (0, 0) {
        let fresh = "fresh".green().bold().to_string();
        format!("{fresh} {hits} of {total} programs are in the store, nothing to compile ({time})")
    } else {
        let built = text::count(built, "program");
        let compiled = text::count(summary.compiled, "artifact");
        let there = match hits {
            0 => String::new(),
            _ => format!(", {} there already", text::count(hits, "program")),
        };
        format!(
            "{} {built}, {compiled} compiled{there} ({time})",
            "built".green().bold()
        )
    };
    let came = count(|outcome| matches!(outcome, Outcome::Hit { from: Some(_), .. }));
    for remote in from {
        line += &format!(
            ", {} from {}",
            text::count(came, "program"),
            text::plain(remote)
        );
    }
    if gated > 0 {
        line += &format!(", {gated} not gated again");
    }
    if failed > 0 {
        line += &format!(", {} failed", failed.red());
    }
    line
}

/// Prints a new release. `before` is the number of the newest complete one.
fn published(release: &Release, before: Option<u64>) {
    let (model, seq) = (&release.model, release.seq);
    let name = release.name.iter().map(|name| format!(" `{name}`"));
    let name: String = name.collect();
    let partial = if release.is_partial() {
        ", a partial one"
    } else {
        ""
    };
    note!(
        "{} {model} release {seq}{name}{partial}",
        "published".green().bold()
    );
    if release.is_partial() {
        let newest = match before {
            Some(before) => format!("release {before} stays the newest"),
            None => "until `precast build` makes the rest".to_owned(),
        };
        let lacks = few(&release.lacks);
        note!("        it lacks {lacks}: only `{model}@{seq}` loads it, {newest}");
    }
}

/// Returns some names, and the number of further names.
fn few<T: AsRef<str>>(names: &[T]) -> String {
    const SOME: usize = 3;
    let some: Vec<&str> = names.iter().take(SOME).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(SOME) {
        0 => some.join(", "),
        more => format!("{} and {more} more", some.join(", ")),
    }
}

/// Returns the programs that are left out, by reason.
fn left_out(summary: &Summary) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, outcome) in &summary.programs {
        if let Outcome::Skipped { why } = outcome {
            found.entry(why).or_default().push(name);
        }
    }
    found
}

/// Returns the requests that are refused without these programs, where these are eager.
fn refused_without(summary: &Summary, names: &[&str]) -> &'static str {
    let modules = names.iter().map(|name| name.strip_suffix(" eager"));
    let Some(modules) = modules.collect::<Option<Vec<&str>>>() else {
        return "";
    };
    let own = |name: &str| {
        let rest = modules.iter().find_map(|module| name.strip_prefix(module));
        rest.is_some_and(|rest| rest.starts_with(' '))
    };
    let programs = summary.programs.iter().filter(|(name, _)| own(name));
    let padded = programs.filter_map(|(_, outcome)| match outcome {
        Outcome::Built(built) => Some(built.padding_refused.is_none()),
        Outcome::Hit { .. } => Some(true),
        _ => None,
    });
    match padded.reduce(|one, other| one || other) {
        None => "",
        Some(true) => "; requests that no other program covers are refused",
        Some(false) => "; requests of other sizes than the buckets' are refused",
    }
}

/// Returns the new programs that take no smaller request in some dimension, by reason.
fn exact_only(summary: &Summary) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, outcome) in &summary.programs {
        if let Outcome::Built(Built {
            padding_refused: Some(why),
            ..
        }) = outcome
        {
            found.entry(why).or_default().push(name);
        }
    }
    found
}

/// Returns the new programs with fewer sizes than the spec requests, and their sizes.
fn narrowed(summary: &Summary) -> impl Iterator<Item = (&str, &str)> {
    let built = summary.programs.iter();
    built.filter_map(|(name, outcome)| match outcome {
        Outcome::Built(built) => Some((name.as_str(), built.narrowed.as_deref()?)),
        _ => None,
    })
}

/// The last line of `precast build --format json`, after its events.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub(in crate::cli) enum Last<'a> {
    Finished {
        programs: Vec<ProgramLine<'a>>,
        /// The findings about modules that could not be captured.
        findings: Vec<Stopped<'a>>,
        /// Number of compiled artifacts.
        compiled: usize,
        /// Number of artifacts that came from the remote, in place of a compile.
        fetched: usize,
        /// The newest release; null if there is none.
        release: Option<Newest<'a>>,
        /// Whether that release is new.
        published: bool,
        /// Names of lost programs of the previous release.
        lost: &'a [String],
        /// Requests without a program.
        unanswered: &'a [String],
        /// Modules without any program.
        without: &'a [String],
        /// Programs that eager answers in place of slower artifacts.
        eager_instead: Vec<Instead>,
        /// Number of tokens that `prefill` and `decode` generated as eager did; null if they were not compared.
        generated: Option<u64>,
        seconds: f64,
    },
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct Stopped<'a> {
    /// The module's title in the spec.
    module: &'a str,
    /// As `precast check` prints them.
    findings: &'a [Finding],
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct Newest<'a> {
    seq: u64,
    name: Option<&'a str>,
    /// Names of programs that a narrowed build left out.
    lacks: &'a [String],
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct ProgramLine<'a> {
    /// Its module and bucket.
    program: &'a str,
    #[serde(flatten)]
    outcome: &'a Outcome,
}

fn document(summary: &Summary, eager_instead: Vec<Instead>) -> Last<'_> {
    let programs = summary.programs.iter();
    let findings = summary.findings.iter();
    let release = summary.release.as_ref();
    Last::Finished {
        programs: programs
            .map(|(program, outcome)| ProgramLine { program, outcome })
            .collect(),
        findings: findings
            .map(|(module, findings)| Stopped { module, findings })
            .collect(),
        compiled: summary.compiled,
        fetched: summary.fetched,
        release: release.map(|release| Newest {
            seq: release.seq,
            name: release.name.as_deref(),
            lacks: &release.lacks,
        }),
        published: summary.published,
        lost: &summary.lost,
        generated: summary.generated,
        eager_instead,
        unanswered: &summary.unanswered,
        without: &summary.without,
        seconds: summary.seconds,
    }
}
