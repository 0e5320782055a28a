//! `precast.lock`: which releases a project takes, for a reviewer to read and `pull --locked` to obey.
//!
//! ```toml
//! schema = 1
//!
//! [[model]]
//! name = "minilm"
//! remote = "s3://models/precast"
//! release = 7
//! identity = "3f…"
//! targets = ["torch211-cxx11-cpu-x86_64-linux-native"]
//! ```
//!
//! Models are sorted by name, so that a change of one is a change of its lines. The digest decides: the number says
//! where to look for it.

use std::{fs, io::ErrorKind, path::Path};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::{
    super::{Context, exit::Refusal},
    ask,
    document::{self, SCHEMA},
    names,
};
use crate::{
    Digest,
    store::{
        is_foreign_number,
        transfer::{Event, Listed, Moved, Request},
    },
};

/// The name of the file, in the current folder.
const FILE: &str = "precast.lock";
const HEAD: &str = "# The releases that `precast pull --locked` takes; `precast pull REMOTE MODEL --lock` writes it.\n";
const AGAIN: &str = "write it again: `precast pull REMOTE MODEL --lock`";

#[derive(Serialize)]
struct Lock {
    schema: u32,
    model: Vec<Locked>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    #[serde(rename = "schema")]
    _schema: u32,
    #[serde(default)]
    model: Vec<Spanned<Locked>>,
}

/// A release that a project takes.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Locked {
    name: String,
    remote: String,
    release: u64,
    identity: Digest,
    targets: Vec<String>,
}

/// Reads the file; none if there is none.
fn load() -> Result<Option<Vec<Locked>>> {
    let path = Path::new(FILE);
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            return Err(Refusal::usage(format!("can't read `{FILE}`: {error}"), AGAIN).into());
        }
    };
    let read: Read = document::parse(path, &text, AGAIN)?;
    let mut all: Vec<Locked> = Vec::new();
    for one in read.model {
        let at = one.span().start;
        let locked = one.into_inner();
        let name = &locked.name;
        let why = if all.iter().any(|other| other.name == *name) {
            format!("`{name}` is there twice")
        } else if !names::is_url(&locked.remote) {
            format!("`{}` is no place of a remote", locked.remote)
        } else if !is_foreign_number(locked.release) {
            format!("{} is no number of a release", locked.release)
        } else {
            all.push(locked);
            continue;
        };
        return Err(document::wrong(path, &text, at, &why, AGAIN));
    }
    Ok(Some(all))
}

/// Writes what was pulled into the file; other models stay.
pub(super) fn write(remote: &str, pulled: Vec<Listed>) -> Result<()> {
    let mut all = load()?.unwrap_or_default();
    all.retain(|locked| pulled.iter().all(|one| one.model != locked.name));
    all.extend(pulled.into_iter().map(|one| Locked {
        name: one.model,
        remote: remote.to_owned(),
        release: one.seq,
        identity: one.identity,
        targets: one.targets,
    }));
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let lock = Lock {
        schema: SCHEMA,
        model: all,
    };
    let text = toml::to_string(&lock)?;
    names::replace(Path::new(FILE), &format!("{HEAD}{text}"))
}

/// Pulls the releases of the file, or that of one model. Returns them with their places.
pub(super) fn pull(
    model: Option<&str>,
    dry_run: bool,
    context: &Context,
) -> Result<Vec<(String, Moved)>> {
    let Some(all) = load()? else {
        let hint = "`precast pull REMOTE MODEL --lock` writes it";
        return Err(Refusal::missing(format!("there is no `{FILE}` here"), hint).into());
    };
    let wanted = all.into_iter();
    let wanted = wanted.filter(|locked| model.is_none_or(|model| model == locked.name));
    let wanted: Vec<Locked> = wanted.collect();
    if let (Some(model), []) = (model, &wanted[..]) {
        let hint = format!("`precast pull REMOTE {model} --lock` adds it");
        return Err(Refusal::missing(format!("`{FILE}` has no model `{model}`"), hint).into());
    }
    let mut pulled = Vec::new();
    for locked in wanted {
        let request = Request::Locked {
            store: std::path::absolute(&context.store)?,
            remote: locked.remote.clone(),
            model: locked.name,
            seq: locked.release,
            identity: locked.identity,
            dry_run,
            shared: context.shared,
            trusted: context.options().trusted,
        };
        ask(&request, context, &mut |event| {
            if let Event::Moved(moved) = event {
                pulled.push((locked.remote.clone(), moved));
            }
        })?;
    }
    Ok(pulled)
}
