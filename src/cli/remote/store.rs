//! `--store REMOTE`: commands that read a store read a remote.
//!
//! | command | how |
//! |---|---|
//! | `ls`, `show`, `why`, `diff`, `du`, `release ls` | on the records of the remote, in a temporary store without objects |
//! | `verify`, `gc` | in the remote |
//! | others that use a store | refused: `precast pull` brings the releases here |

use std::{path::Path, sync::atomic::Ordering};

use anyhow::{Context as _, Result};
use owo_colors::OwoColorize;
use serde::Serialize;
use tempfile::TempDir;

use super::{
    super::{
        Context,
        exit::{self, FAILED, Refusal},
        text::{bytes, count, plain},
    },
    ask, names,
};
use crate::store::transfer::{Event, Flaw, Mirrored, RemoteGc, RemoteVerified, Request};

/// Lines of a plan that are shown.
const SHOWN: usize = 20;

/// `precast verify --store REMOTE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct RemoteVerifyDocument {
    remote: String,
    #[serde(flatten)]
    verified: RemoteVerified,
}

/// `precast gc --store REMOTE --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(in crate::cli) struct RemoteGcDocument {
    remote: String,
    #[serde(flatten)]
    gc: RemoteGc,
}

/// Returns the URL of the remote that stands in the place of a store; none for a folder. A folder comes before a remote
/// of the same name.
pub(in crate::cli) fn place(store: &Path) -> Option<String> {
    let text = store.to_str()?;
    if names::is_url(text) {
        return Some(text.to_owned());
    }
    if text.contains('/') || store.exists() {
        return None;
    }
    names::known(text).ok().flatten()
}

/// Returns the error for a command that needs the store here.
pub(in crate::cli) fn needs_folder(place: &str) -> anyhow::Error {
    let message = format!("this command needs a store on this machine, and `{place}` is a remote");
    let hint = format!(
        "`precast pull {place} MODEL` brings a release into a store; `--store DIR` names it"
    );
    Refusal::usage(message, hint).into()
}

/// Brings the records of a remote, which stands in the place of the store from now on. They are removed with the folder
/// that is returned.
pub(in crate::cli) fn mirror(place: &str, context: &mut Context) -> Result<TempDir> {
    let folder = tempfile::tempdir().context("can't make a temporary folder")?;
    let store = folder.path().join("store");
    let request = Request::Mirror {
        remote: place.to_owned(),
        folder: store.clone(),
    };
    let mut mirrored = Mirrored::default();
    ask(&request, context, &mut |event| {
        if let Event::Mirrored(found) = event {
            mirrored = found;
        }
    })?;
    for Flaw { name, why } in &mirrored.left_out {
        context.damaged.store(true, Ordering::Relaxed);
        let text = format!(
            "`{}` is damaged: {}; its releases are left out",
            plain(name),
            plain(why)
        );
        exit::warning(&text);
    }
    let (releases, records) = (
        count(mirrored.releases, "release"),
        count(mirrored.records, "record"),
    );
    note!("{place}: {releases}, {records}; objects stay there");
    context.store = store;
    context.remote = Some(place.to_owned());
    Ok(folder)
}

/// Reads every file of a remote's releases.
pub(in crate::cli) fn verify(place: &str, context: &Context) -> Result<u8> {
    let request = Request::Verify {
        remote: place.to_owned(),
    };
    let mut verified = RemoteVerified::default();
    ask(&request, context, &mut |event| {
        if let Event::Verified(found) = event {
            verified = found;
        }
    })?;
    let document = RemoteVerifyDocument {
        remote: place.to_owned(),
        verified,
    };
    let verified = &document.verified;
    context.show(&document, || {
        for Flaw { name, why } in &verified.flaws {
            writeln!(
                context.out,
                "{}  {}: {}",
                "damaged".red(),
                plain(name),
                plain(why)
            )?;
        }
        let result = match verified.flaws.len() {
            0 => "sound".green().to_string(),
            flaws => count(flaws, "flaw").red().to_string(),
        };
        writeln!(
            context.out,
            "{} of {}: {} objects and {} records checked ({}): {result}",
            count(verified.releases, "release"),
            place,
            verified.objects,
            verified.records,
            bytes(verified.bytes),
        )
    })?;
    if !verified.flaws.is_empty() {
        exit::tell_hint(
            "delete a damaged file there, then push the release again from a store that has it",
        );
        return Ok(FAILED);
    }
    Ok(0)
}

/// Collects a remote.
pub(in crate::cli) fn gc(
    place: &str,
    grace: i64,
    keep: Option<usize>,
    apply: bool,
    context: &Context,
) -> Result<u8> {
    let request = Request::Gc {
        remote: place.to_owned(),
        grace,
        keep,
        apply,
    };
    let mut gc = RemoteGc::default();
    ask(&request, context, &mut |event| {
        if let Event::Collected(found) = event {
            gc = found;
        }
    })?;
    let document = RemoteGcDocument {
        remote: place.to_owned(),
        gc,
    };
    let gc = &document.gc;
    context.show(&document, || {
        let shown = match context.verbose {
            _ if gc.applied => 0,
            0 => SHOWN,
            _ => usize::MAX,
        };
        for name in gc.files.iter().take(shown) {
            writeln!(context.out, "{}", plain(name))?;
        }
        if !gc.applied && gc.files.len() > shown {
            writeln!(context.out, "… and {} more", gc.files.len() - shown)?;
        }
        let done = if gc.applied {
            "deleted"
        } else {
            "would delete"
        };
        writeln!(
            context.out,
            "{done} {} and {}: {} of {}",
            count(gc.releases.len(), "release"),
            count(
                gc.files.len() - gc.releases.len().min(gc.files.len()),
                "file"
            ),
            bytes(gc.bytes),
            bytes(gc.before)
        )
    })?;
    if gc.young > 0 {
        note!(
            "{} that no release needs stay: they are too young",
            count(gc.young, "file")
        );
    }
    if !apply && !gc.files.is_empty() {
        exit::tell_hint("`--apply` deletes them");
    }
    Ok(0)
}
