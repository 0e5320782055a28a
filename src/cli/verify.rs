//! `precast verify`: checks every byte of a store, and repairs defects on request; with `--host` it runs gates instead.
//!
//! | code | means |
//! |---|---|
//! | 0 | the store has no defects (left-over files of killed processes aside), or all were repaired |
//! | 1 | a defect remains, or a gate failed |
//! | 3 | a damaged file is in `quarantine/`: the next build creates it again |

mod host;

use std::{cmp::Reverse, mem::discriminant, path::PathBuf};

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::{FAILED, MISSING, Refusal, tell_hint},
    remote,
    text::{bytes, count},
};
use crate::{
    Digest,
    build::gate::host::GatedRelease,
    store::{Defect, Needs, Store},
};

/// Defects of one kind that are shown.
const SHOWN: usize = 3;

#[derive(clap::Args)]
pub(super) struct VerifyArgs {
    /// Repair what can be repaired; set aside what can't be used
    #[arg(long)]
    repair: bool,
    /// Make the index again from the files, without looking at their bytes
    #[arg(long, conflicts_with = "repair")]
    reindex: bool,
    #[command(flatten)]
    host: host::HostArgs,
}

/// `precast verify --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub(super) enum VerifyDocument<'a> {
    /// With `--reindex`.
    Reindexed { reindexed: bool },
    Verified {
        /// Objects whose bytes were checked.
        objects: u64,
        /// Bytes of their contents.
        bytes: u64,
        /// Records that were checked.
        records: u64,
        /// Files in `quarantine/`, which is not a defect.
        quarantined: u64,
        defects: Vec<DefectReport<'a>>,
    },
    /// With `--host`.
    Host { releases: Vec<GatedRelease> },
    /// With `--repair`.
    Repaired {
        found: Vec<DefectReport<'a>>,
        /// Files that were moved to `quarantine/`.
        set_aside: &'a [PathBuf],
        /// Objects that were restored from their unpacked files.
        restored: &'a [Digest],
        /// The defects that are left.
        left: Vec<DefectReport<'a>>,
    },
}

/// A defect and its remedy. The further fields depend on `kind`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct DefectReport<'a> {
    #[serde(flatten)]
    defect: &'a Defect,
    needs: Needs,
    message: String,
}

impl<'a> DefectReport<'a> {
    fn of(defect: &'a Defect) -> Self {
        Self {
            defect,
            needs: defect.needs(),
            message: defect.to_string(),
        }
    }
}

pub(super) fn run(args: &VerifyArgs, context: &Context) -> Result<u8> {
    if args.host.host {
        return host::run(&args.host, context);
    }
    let store = context.ready(Store::open_for_repair(&context.store, context.options())?)?;
    if args.reindex {
        store.audit().reindex()?;
        let document = VerifyDocument::Reindexed { reindexed: true };
        context.show(&document, || context.out.line("made the index again"))?;
        return Ok(0);
    }
    if args.repair {
        repair(&store, context)
    } else {
        verify(&store, context)
    }
}

/// Reads every file of a remote's releases.
pub(super) fn of_remote(args: &VerifyArgs, place: &str, context: &Context) -> Result<u8> {
    if args.repair || args.reindex || args.host.host {
        let message = "`--repair`, `--reindex` and `--host` are for stores on this machine";
        let hint = "a push of the release from a store that has it mends what a remote has lost";
        return Err(Refusal::usage(message, hint).into());
    }
    remote::store::verify(place, context)
}

fn verify(store: &Store, context: &Context) -> Result<u8> {
    let found = store.audit().verify()?;
    let out = &context.out;
    let code = match found.needs() {
        None | Some(Needs::Sweep) => 0,
        Some(_) => FAILED,
    };
    if out.json() {
        out.document(&VerifyDocument::Verified {
            objects: found.objects,
            bytes: found.bytes,
            records: found.records,
            quarantined: found.quarantined,
            defects: found.defects.iter().map(DefectReport::of).collect(),
        })?;
        return Ok(code);
    }
    list(&found.defects, context)?;
    let (objects, size, records) = (found.objects, bytes(found.bytes), found.records);
    let result = match found.defects.len() {
        0 => "sound".green().to_string(),
        defects => count(defects, "defect").red().to_string(),
    };
    writeln!(
        out,
        "{objects} objects ({size}) and {records} records checked: {result}"
    )?;
    if found.needs().is_some_and(|needs| needs != Needs::Person) {
        tell_hint("`precast verify --repair` repairs what can be repaired");
    }
    Ok(code)
}

fn repair(store: &Store, context: &Context) -> Result<u8> {
    let done = store.audit().repair()?;
    super::gc::note_swept(false);
    let left = done.left.iter().map(Defect::needs);
    let code = match left.max() {
        Some(Needs::Repair | Needs::Person) => FAILED,
        Some(Needs::Rebuild) => MISSING,
        None | Some(Needs::Sweep) if done.lost() => MISSING,
        None | Some(Needs::Sweep) => 0,
    };
    let out = &context.out;
    if out.json() {
        out.document(&VerifyDocument::Repaired {
            found: done.found.iter().map(DefectReport::of).collect(),
            set_aside: &done.set_aside,
            restored: &done.restored,
            left: done.left.iter().map(DefectReport::of).collect(),
        })?;
        return Ok(code);
    }
    list(&done.found, context)?;
    if !done.restored.is_empty() {
        let objects = count(done.restored.len(), "object");
        writeln!(out, "{objects} made again from `ready/`")?;
    }
    let (found, left) = (done.found.len(), done.left.len());
    let aside = done.set_aside.len();
    writeln!(
        out,
        "{found} defects found, {aside} files set aside in `quarantine/`, {left} left"
    )?;
    if code == MISSING {
        tell_hint("`precast build` makes what was lost again");
    }
    Ok(code)
}

/// Lists defects, the gravest first and a cause before its effects. Of many of one kind it shows the first.
fn list(defects: &[Defect], context: &Context) -> Result<()> {
    let mut sorted: Vec<&Defect> = defects.iter().collect();
    sorted.sort_by_key(|defect| Reverse(defect.needs()));
    let mut hidden = false;
    for kind in sorted.chunk_by(|a, b| discriminant(*a) == discriminant(*b)) {
        let word = match kind[0].needs() {
            Needs::Sweep => "litter".dimmed().to_string(),
            Needs::Repair => "repair".yellow().to_string(),
            Needs::Rebuild => "rebuild".red().to_string(),
            Needs::Person => "look".red().bold().to_string(),
        };
        let shown = match context.verbose {
            0 if kind.len() > SHOWN + 1 => SHOWN,
            _ => kind.len(),
        };
        for defect in &kind[..shown] {
            writeln!(context.out, "{word}  {defect}")?;
        }
        if shown < kind.len() {
            let more = kind.len() - shown;
            writeln!(context.out, "{word}  … and {more} more of this kind")?;
            hidden = true;
        }
    }
    if hidden {
        tell_hint("`-v` lists every defect");
    }
    Ok(())
}
