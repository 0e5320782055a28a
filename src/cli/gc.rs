//! `precast gc`: deletes unused files of a store.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::{self, Refusal},
    remote,
    text::{bytes as human, count, duration},
};
use crate::{
    build::scratch,
    store::{Collected, GcPlan, Policy},
};

#[derive(clap::Args)]
pub(super) struct GcArgs {
    /// Delete programs and artifacts that were not used for this many days
    #[arg(long, value_name = "DAYS")]
    keep_days: Option<u32>,
    /// Delete the least recently used programs until the store is at most this large, as 20GiB or 500MB
    #[arg(long, value_name = "SIZE")]
    max_size: Option<String>,
    /// Delete programs and artifacts that are in no release
    #[arg(long)]
    unreleased: bool,
    /// The number of releases of each model to keep, with all that they need; releases of equal content count once
    /// [default: 3; of a remote: all]
    #[arg(long, value_name = "N")]
    keep_releases: Option<usize>,
    /// Of a remote: keep what is younger, as `7d` or `12h` [default: 7d]
    #[arg(long, value_name = "AGE", value_parser = duration)]
    grace: Option<i64>,
    /// Of a remote: delete what the plan has, which is only printed otherwise
    #[arg(long, conflicts_with = "dry_run")]
    apply: bool,
    /// Print the plan, and delete nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// `precast gc --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct GcDocument<'a> {
    dry_run: bool,
    plan: &'a GcPlan,
    /// Null for a dry run.
    done: Option<&'a Collected>,
}

pub(super) fn run(args: &GcArgs, context: &Context) -> Result<u8> {
    let policy = Policy {
        keep_days: args.keep_days,
        max_size: args.max_size.as_deref().map(bytes).transpose()?,
        unreleased: args.unreleased,
        keep_releases: args.keep_releases.unwrap_or(3),
    };
    if args.grace.is_some() || args.apply {
        let hint = "leave it out, or name a remote: `--store REMOTE`";
        let message = "`--grace` and `--apply` are for remotes, and this store is a folder";
        return Err(Refusal::usage(message, hint).into());
    }
    let store = context.open()?;
    let (plan, done) = if args.dry_run {
        (store.collector().plan(&policy)?, None)
    } else {
        let (plan, done) = store.collector().gc(&policy)?;
        (plan, Some(done))
    };
    if context.out.json() {
        context.out.document(&GcDocument {
            dry_run: args.dry_run,
            plan: &plan,
            done: done.as_ref(),
        })?;
    } else {
        print(&plan, done.as_ref(), context)?;
    }
    note_swept(args.dry_run);
    let over = plan.over_limit();
    if over > 0 {
        let (warning, over) = ("warning:".yellow().bold().to_string(), human(over));
        let hint = "`--keep-releases` says how many releases stay";
        note!("{warning} {over} over the limit are held or released: {hint}");
    }
    Ok(exit::code(over == 0))
}

/// Collects a remote: others use it, so that it only says what would go, until `--apply`.
pub(super) fn of_remote(args: &GcArgs, place: &str, context: &Context) -> Result<u8> {
    const GRACE: i64 = 7 * 24 * 60 * 60;
    if args.keep_days.is_some() || args.max_size.is_some() || args.unreleased {
        let message =
            "`--keep-days`, `--max-size` and `--unreleased` are for stores on this machine";
        let hint =
            "of a remote goes what no release needs; `--keep-releases N` takes old releases too";
        return Err(Refusal::usage(message, hint).into());
    }
    if args.keep_releases == Some(0) {
        let hint = "keep one, or delete the remote's folder with its own tools";
        return Err(Refusal::usage("`--keep-releases 0` would take all", hint).into());
    }
    let grace = args.grace.unwrap_or(GRACE);
    remote::store::gc(place, grace, args.keep_releases, args.apply, context)
}

fn print(plan: &GcPlan, done: Option<&Collected>, context: &Context) -> Result<()> {
    let out = &context.out;
    let text = plan.to_string();
    let (list, _) = text.rsplit_once('\n').unwrap_or(("", ""));
    if !list.is_empty() && (done.is_none() || context.verbose > 0) {
        out.line(list)?;
    }
    let counts = |[releases, programs, artifacts, objects]: [usize; 4]| {
        [
            count(releases, "release"),
            count(programs, "program"),
            count(artifacts, "artifact"),
            count(objects, "object"),
        ]
        .join(", ")
    };
    let before = human(plan.before);
    let Some(done) = done else {
        if !plan.quarantine.is_empty() {
            let files = count(plan.quarantine.len(), "damaged file");
            let bytes = human(plan.quarantine.iter().map(|one| one.bytes).sum());
            writeln!(out, "would delete {files} of `quarantine/`: {bytes}")?;
        }
        let rows = [
            plan.releases.len(),
            plan.programs.len(),
            plan.artifacts.len(),
            plan.objects.len(),
        ];
        let (all, freed) = (counts(rows), human(plan.before - plan.after));
        return writeln!(out, "would delete {all}: {freed} of {before}");
    };
    let all = counts([done.releases, done.programs, done.artifacts, done.objects]);
    writeln!(out, "deleted {all}: {} of {before}", human(done.bytes))?;
    if done.damaged > 0 {
        let (files, bytes) = (
            count(done.damaged, "damaged file"),
            human(done.damaged_bytes),
        );
        writeln!(out, "deleted {files} of `quarantine/`: {bytes}")?;
    }
    if done.skipped > 0 {
        writeln!(out, "{} came into use meanwhile and stay", done.skipped)?;
    }
    Ok(())
}

/// Reads a size such as `20GiB`, `1.5 GB`, `500M` or a plain number of bytes.
pub(super) fn bytes(text: &str) -> Result<u64, Refusal> {
    let hint = "write it as 20GiB, 500MB or a number of bytes";
    let wrong = || Refusal::usage(format!("`{text}` is not a size"), hint);
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024f64.powi(2),
        "g" | "gib" => 1024f64.powi(3),
        "t" | "tib" => 1024f64.powi(4),
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    Ok((number * unit) as u64)
}

/// Removes and reports the temporary folders of killed builds; with `dry_run`, only reports them.
pub(super) fn note_swept(dry_run: bool) {
    let swept = scratch::sweep(&std::env::temp_dir(), scratch::BUILD, dry_run);
    if !swept.is_empty() {
        let folders = count(swept.len(), "folder");
        let done = if dry_run { "would remove" } else { "removed" };
        note!("{done} {folders} of builds that were killed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, expected) in [
            ("0", 0),
            ("512", 512),
            ("1KiB", 1024),
            ("20GiB", 20 << 30),
            ("1.5 GB", 1_500_000_000),
            ("2m", 2 << 20),
        ] {
            assert_eq!(bytes(text).unwrap(), expected, "{text}");
        }
        for text in ["", "x", "-1", "1.2.3", "5 parsecs"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
