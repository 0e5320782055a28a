//! `precast log`: the compiler's output for an artifact, a program or a failure.

use std::collections::BTreeSet;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::Missing,
    name::{self, Named},
    text::plain,
};
use crate::{
    Digest,
    store::{Found, Store, StoreError},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    what: Named,
}

/// `precast log ID --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Document {
    logs: Vec<Log>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Log {
    /// The step, the artifact or the failure that it is the log of.
    of: String,
    text: String,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let what = args.what.text();
    let logs = logs(&store, &what)?;
    if logs.is_empty() {
        let message = format!("nothing was logged for `{what}`");
        let hint =
            "a compiler that says nothing leaves no log; `precast show` has the rest".to_owned();
        return Err(Missing { message, hint }.into());
    }
    let mut read = Vec::new();
    for (title, digest) in logs {
        let text = store.objects().read(&digest)?;
        read.push((title, String::from_utf8_lossy(&text).into_owned()));
    }
    if context.out.json() {
        let logs = read.into_iter().map(|(of, text)| Log { of, text });
        let logs = logs.collect();
        context.out.document(&Document { logs })?;
        return Ok(0);
    }
    let several = read.len() > 1;
    for (title, text) in &read {
        if several {
            context
                .out
                .line(format_args!("{}", format!("==> {title} <==").bold()))?;
        }
        context.out.verbatim(plain(text.trim_end()))?;
    }
    Ok(0)
}

/// Returns the logs of what `what` stands for, each with what it is the log of.
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
            for step in store
                .records()
                .program(&id)?
                .map(|program| program.steps)
                .unwrap_or_default()
            {
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
