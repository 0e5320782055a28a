//! `precast log`: the compiler's output for an artifact, a program or a failure.

use std::collections::BTreeSet;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::Missing,
    name::{self, NameArgs},
    text::plain,
};
use crate::{
    Digest,
    store::{Found, Store, StoreError},
};

#[derive(clap::Args)]
pub(super) struct LogArgs {
    #[command(flatten)]
    what: NameArgs,
}

/// `precast log ID --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct LogDocument {
    logs: Vec<Log>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Log {
    /// The step, artifact or failure of the log.
    of: String,
    text: String,
}

pub(super) fn run(args: &LogArgs, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let what = args.what.text();
    let mut logs = Vec::new();
    for (of, digest) in self::logs(&store, &what)? {
        let text = String::from_utf8_lossy(&store.objects().read(&digest)?).into_owned();
        logs.push(Log { of, text });
    }
    if logs.is_empty() {
        let hint = "a compiler that says nothing leaves no log; `precast show` has the rest";
        return Err(Missing::new(format!("nothing was logged for `{what}`"), hint).into());
    }
    if context.out.json() {
        context.out.document(&LogDocument { logs })?;
        return Ok(0);
    }
    for Log { of, text } in &logs {
        if logs.len() > 1 {
            writeln!(context.out, "{}", format!("==> {of} <==").bold())?;
        }
        context.out.verbatim(plain(text.trim_end()))?;
    }
    Ok(0)
}

/// Returns the logs of the named object, each with its title.
fn logs(store: &Store, what: &str) -> Result<Vec<(String, Digest)>> {
    let found = name::find(store, what)?;
    let mut logs = Vec::new();
    match found {
        Found::Object(digest) => logs.push((format!("object {}", digest.short()), digest)),
        Found::Failure(id) => {
            let log = store
                .records()
                .failure(&id)?
                .and_then(|failure| failure.log);
            logs.extend(log.map(|log| (format!("failure {}", id.short()), log)));
        }
        Found::Artifact(id) => logs.extend(artifact(store, &id, "")?),
        Found::Program(id) => {
            let mut seen = BTreeSet::new();
            let steps = store.records().program(&id)?.map(|program| program.steps);
            for step in steps.unwrap_or_default() {
                if seen.insert(step.artifact) {
                    logs.extend(artifact(store, &step.artifact, &step.name)?);
                }
            }
        }
    }
    Ok(logs)
}

fn artifact(
    store: &Store,
    id: &Digest,
    step: &str,
) -> Result<Option<(String, Digest)>, StoreError> {
    let log = store
        .records()
        .artifact(id)?
        .and_then(|artifact| artifact.log);
    let title = format!("artifact {} {step}", id.short());
    Ok(log.map(|log| (title.trim_end().to_owned(), log)))
}
