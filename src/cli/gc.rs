//! `precast gc`: deletes unused files of a store.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::{FAILED, Usage},
    printer::note,
    text::{bytes as human, count},
};
use crate::store::{Collected, GcPlan, Policy};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Delete programs and artifacts that were not used for this many days
    #[arg(long, value_name = "DAYS")]
    keep_days: Option<u32>,
    /// Delete what was not used for longest until the store is at most this large, as 20GiB or 500MB
    #[arg(long, value_name = "SIZE")]
    max_size: Option<String>,
    /// Delete what is not in any release
    #[arg(long)]
    unreleased: bool,
    /// How many releases of each model stay, with all that they need; those of equal content count once
    #[arg(long, value_name = "N", default_value_t = 3)]
    keep_releases: usize,
    /// Say what would be deleted, and delete nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

/// `precast gc --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document<'a> {
    dry_run: bool,
    plan: &'a GcPlan,
    /// Null when nothing was to be deleted.
    done: Option<&'a Collected>,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let policy = Policy {
        keep_days: args.keep_days,
        max_size: args.max_size.as_deref().map(bytes).transpose()?,
        unreleased: args.unreleased,
        keep_releases: args.keep_releases,
    };
    let store = context.open()?;
    let (plan, done) = match args.dry_run {
        true => (store.collector().plan(&policy)?, None),
        false => {
            let (plan, done) = store.collector().gc(&policy)?;
            (plan, Some(done))
        }
    };
    if context.out.json() {
        let dry_run = args.dry_run;
        let (plan, done) = (&plan, done.as_ref());
        let document = Document {
            dry_run,
            plan,
            done,
        };
        context.out.document(&document)?;
    } else {
        print(&plan, done.as_ref(), context)?;
    }
    super::build::note_swept(context, args.dry_run);
    let over = plan.over_limit();
    if over > 0 && !context.quiet {
        note(format_args!(
            "{} {} over the limit are held or released: {}",
            "warning:".yellow().bold(),
            human(over),
            "`--keep-releases` says how many releases stay"
        ));
    }
    Ok(if over > 0 { FAILED } else { 0 })
}

fn print(plan: &GcPlan, done: Option<&Collected>, context: &Context) -> Result<()> {
    let text = plan.to_string();
    let (list, _) = text.rsplit_once('\n').unwrap_or(("", ""));
    if !list.is_empty() && (done.is_none() || context.verbose > 0) {
        context.out.line(list)?;
    }
    let freed = plan.before - plan.after;
    let counts = |releases, programs, artifacts, objects| {
        [
            count(releases as u64, "release"),
            count(programs as u64, "program"),
            count(artifacts as u64, "artifact"),
            count(objects as u64, "object"),
        ]
        .join(", ")
    };
    match done {
        None => {
            if !plan.quarantine.is_empty() {
                let files = count(plan.quarantine.len() as u64, "damaged file");
                let bytes = human(plan.quarantine.iter().map(|one| one.bytes).sum());
                let what = format_args!("would delete {files} of `quarantine/`: {bytes}");
                context.out.line(what)?;
            }
            context.out.line(format_args!(
                "would delete {}: {} of {}",
                counts(
                    plan.releases.len(),
                    plan.programs.len(),
                    plan.artifacts.len(),
                    plan.objects.len()
                ),
                human(freed),
                human(plan.before)
            ))
        }
        Some(done) => {
            context.out.line(format_args!(
                "deleted {}: {} of {}",
                counts(done.releases, done.programs, done.artifacts, done.objects),
                human(done.bytes),
                human(plan.before)
            ))?;
            if done.damaged > 0 {
                let files = count(done.damaged as u64, "damaged file");
                let bytes = human(done.damaged_bytes);
                let what = format_args!("deleted {files} of `quarantine/`: {bytes}");
                context.out.line(what)?;
            }
            if done.skipped > 0 {
                context.out.line(format_args!(
                    "{} were taken into use meanwhile and stay",
                    done.skipped
                ))?;
            }
            Ok(())
        }
    }
}

/// Reads a size such as `20GiB`, `1.5 GB`, `500M` or a plain number of bytes.
pub(super) fn bytes(text: &str) -> Result<u64, Usage> {
    let wrong = || Usage {
        message: format!("`{text}` is not a size"),
        hint: "write it as 20GiB, 500MB or a number of bytes".to_owned(),
    };
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
