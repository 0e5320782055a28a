//! The end of `precast build`: what was made, in words and as JSON.

use std::collections::BTreeMap;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::super::{Context, check, printer::note, progress::seconds, text};
use crate::{
    Digest,
    build::{Built, Outcome, Summary, protocol::Finding},
};

/// Says how the build ended.
pub(super) fn tell(summary: &Summary, context: &Context) -> Result<()> {
    if context.out.json() {
        return context.out.event(&document(summary));
    }
    if context.quiet {
        return Ok(());
    }
    let count = |is: fn(&Outcome) -> bool| {
        summary
            .programs
            .iter()
            .filter(|(_, outcome)| is(outcome))
            .count()
    };
    let hits = count(|outcome| matches!(outcome, Outcome::Hit(_)));
    let built = count(|outcome| matches!(outcome, Outcome::Built(_)));
    let (failed, _) = summary.failed();
    for (name, outcome) in &summary.programs {
        if let Outcome::Failed {
            key,
            message,
            location,
            hint,
            ..
        } = outcome
        {
            let place = location
                .as_ref()
                .map(|place| format!("{place}: "))
                .unwrap_or_default();
            note(format_args!(
                "{} {name}: {place}{message}",
                "failed".red().bold()
            ));
            note(format_args!("       {} {hint}", "hint:".cyan().bold()));
            if let Some(key) = key {
                note(format_args!(
                    "       `precast log {}` prints the whole log",
                    key.short()
                ));
            }
        }
    }
    for (module, findings) in &summary.findings {
        for finding in findings {
            note(format_args!("\n{}", check::finding(finding).join("\n")));
        }
        note(format_args!(
            "\n{} {module}: `precast check` says what else it finds",
            "note:".cyan().bold()
        ));
    }
    for (why, names) in left_out(summary) {
        note(format_args!(
            "{} {}: {why}{}",
            "left out".yellow(),
            few(&names),
            refused_without(summary, &names)
        ));
    }
    for (why, names) in exact_only(summary) {
        let (what, why) = why.split_once(": ").unwrap_or((why, ""));
        note(format_args!("{} {}: {why}", what.yellow(), few(&names)));
        note(format_args!("       {} {PADDING}", "hint:".cyan().bold()));
    }
    for (name, sizes) in narrowed(summary) {
        note(format_args!("{} {name}: {sizes}", "only".yellow()));
    }
    if !summary.eager_unasked.is_empty() {
        note(format_args!(
            "{} {}: eager {EAGER}",
            "also".cyan(),
            few(&summary.eager_unasked)
        ));
    }
    let time = seconds(summary.seconds);
    let total = summary.programs.len();
    let mut line = match (built, failed) {
        (0, 0) => format!(
            "{} {hits} of {total} programs are in the store, nothing to compile ({time})",
            "fresh".green().bold()
        ),
        _ => {
            let there = match hits {
                0 => String::new(),
                _ => format!(", {} there already", text::count(hits as u64, "program")),
            };
            format!(
                "{} {}, {} compiled{there} ({time})",
                "built".green().bold(),
                text::count(built as u64, "program"),
                text::count(summary.compiled as u64, "artifact")
            )
        }
    };
    let before =
        count(|outcome| matches!(outcome, Outcome::Built(built) if built.gated_by.is_some()));
    if before > 0 {
        line.push_str(&format!(", {before} not gated again"));
    }
    if failed > 0 {
        line.push_str(&format!(", {} failed", failed.red()));
    }
    note(line);
    if let (true, Some(release)) = (summary.published, &summary.release) {
        let name = release
            .name
            .as_deref()
            .map(|name| format!(" `{name}`"))
            .unwrap_or_default();
        note(format_args!(
            "{} {} release {}{name}{}",
            "published".green().bold(),
            release.model,
            release.seq,
            if release.is_partial() {
                ", a partial one"
            } else {
                ""
            }
        ));
        if release.is_partial() {
            note(format_args!(
                "        it lacks {}: only `{}@{}` loads it, {}",
                few(&release.lacks),
                release.model,
                release.seq,
                match summary.before {
                    Some(before) => format!("release {before} stays the newest"),
                    None => "until `precast build` makes the rest".to_owned(),
                }
            ));
        }
    }
    if let (true, Some((old, new))) = (summary.published, &summary.weights_changed) {
        note(format_args!(
            "        its weights changed: {} -> {}",
            old.short(),
            new.short()
        ));
    }
    if let (false, Some(before)) = (summary.lost.is_empty(), summary.before) {
        note(format_args!(
            "{} {}: release {before} has it, the new one does not",
            "lost".yellow().bold(),
            few(&summary.lost)
        ));
    }
    if !summary.without.is_empty() {
        note(format_args!(
            "{} {}: nothing answers it",
            "without".yellow().bold(),
            few(&summary.without)
        ));
    }
    Ok(())
}

/// Returns some names, and how many more there are.
fn few<T: AsRef<str>>(names: &[T]) -> String {
    const SOME: usize = 3;
    let some: Vec<&str> = names.iter().take(SOME).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(SOME) {
        0 => some.join(", "),
        more => format!("{} and {more} more", some.join(", ")),
    }
}

/// Returns the programs that a model does without, by the reason why.
fn left_out(summary: &Summary) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, outcome) in &summary.programs {
        if let Outcome::Skipped { why } = outcome {
            found.entry(why).or_default().push(name);
        }
    }
    found
}

/// Returns which requests are refused because these programs are left out, where they are the eager ones.
fn refused_without(summary: &Summary, names: &[&str]) -> &'static str {
    let modules: Option<Vec<&str>> = names
        .iter()
        .map(|name| name.strip_suffix(" eager"))
        .collect();
    let Some(modules) = modules else {
        return "";
    };
    let own = |name: &str| {
        let rest = modules.iter().find_map(|module| name.strip_prefix(module));
        rest.is_some_and(|rest| rest.starts_with(' '))
    };
    let programs = summary.programs.iter().filter(|(name, _)| own(name));
    // Whether smaller requests are padded into them.
    let padded = programs.filter_map(|(_, outcome)| match outcome {
        Outcome::Built(built) => Some(built.padding_refused.is_none()),
        Outcome::Hit(_) => Some(true),
        _ => None,
    });
    match padded.reduce(|one, other| one || other) {
        None => "",
        Some(true) => "; requests that no other program covers are refused",
        Some(false) => "; requests of other sizes than the buckets' are refused",
    }
}

/// What to do about a bucket that no smaller request can be padded into.
pub(in crate::cli) const PADDING: &str = "list the sizes that requests have as buckets, or set `dynamic`; a mask among the \
    inputs can make the module ignore its padding";

/// What eager is there for that no spec asked for.
pub(in crate::cli) const EAGER: &str =
    "answers sizes that no bucket covers; `fail_policy = \"raise\"` leaves it out";

/// Returns the programs that were built and take no smaller request in some dimension, by the reason why.
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

/// Returns the programs that were built with fewer sizes than the spec asks for, and the sizes that they answer.
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
        programs: Vec<Line<'a>>,
        /// What stops the build of modules that could not be captured.
        findings: Vec<Stopped<'a>>,
        /// How many artifacts were compiled.
        compiled: usize,
        /// The newest release; null where there is none.
        release: Option<Newest<'a>>,
        /// Whether that release is new.
        published: bool,
        /// Names of programs that the release before had.
        lost: &'a [String],
        /// Requests that nothing answers.
        unanswered: &'a [String],
        /// Modules without any program.
        without: &'a [String],
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
pub(in crate::cli) struct Line<'a> {
    /// Its module and bucket.
    program: &'a str,
    #[serde(flatten)]
    ended: Ended<'a>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "state", rename_all = "lowercase")]
enum Ended<'a> {
    /// It was there.
    Hit {
        id: &'a Digest,
    },
    Built {
        id: &'a Digest,
        /// How many distinct artifacts it calls.
        artifacts: usize,
        /// How many of them were compiled for it.
        compiled: usize,
        /// The program whose gate it is, where it was not gated again.
        gated_by: Option<&'a Digest>,
        /// The dimensions in which smaller requests are not padded into it, and why.
        padding_refused: Option<&'a str>,
        /// The sizes that it answers, where the model has fewer than the spec asks for.
        narrowed: Option<&'a str>,
    },
    Failed {
        id: Option<&'a Digest>,
        message: &'a str,
        /// The user's file and line that caused it.
        location: Option<&'a str>,
        hint: &'a str,
        /// Whether it fails the build.
        raise: bool,
    },
    Skipped {
        why: &'a str,
    },
}

impl<'a> Line<'a> {
    fn of((program, outcome): &'a (String, Outcome)) -> Self {
        let ended = match outcome {
            Outcome::Hit(id) => Ended::Hit { id },
            Outcome::Built(built) => Ended::Built {
                id: &built.id,
                artifacts: built.artifacts,
                compiled: built.compiled,
                gated_by: built.gated_by.as_ref(),
                padding_refused: built.padding_refused.as_deref(),
                narrowed: built.narrowed.as_deref(),
            },
            Outcome::Failed {
                key,
                message,
                location,
                hint,
                raise,
                ..
            } => Ended::Failed {
                id: key.as_ref(),
                message,
                location: location.as_deref(),
                hint,
                raise: *raise,
            },
            Outcome::Skipped { why } => Ended::Skipped { why },
        };
        Self { program, ended }
    }
}

fn document(summary: &Summary) -> Last<'_> {
    Last::Finished {
        programs: summary.programs.iter().map(Line::of).collect(),
        findings: (summary.findings.iter())
            .map(|(module, findings)| Stopped { module, findings })
            .collect(),
        compiled: summary.compiled,
        release: summary.release.as_ref().map(|release| Newest {
            seq: release.seq,
            name: release.name.as_deref(),
            lacks: &release.lacks,
        }),
        published: summary.published,
        lost: &summary.lost,
        unanswered: &summary.unanswered,
        without: &summary.without,
        seconds: summary.seconds,
    }
}
