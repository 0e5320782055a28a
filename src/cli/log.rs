//! `precast log`: the compiler's output for an artifact, a program or a failure.

use std::collections::BTreeSet;

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::Refusal,
    name::{self, NameArgs, Record},
    text::plain,
};
use crate::{
    Digest,
    store::{ObjectRow, Store},
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
        return Err(Refusal::missing(format!("nothing was logged for `{what}`"), hint).into());
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
    let titled = |kind: &str, id: &Digest, step: &str, log: Option<Digest>| {
        let title = format!("{kind} {} {step}", id.short());
        log.map(|log| (title.trim_end().to_owned(), log))
    };
    let mut logs = Vec::new();
    match name::record(store, what)? {
        Record::Object(ObjectRow { digest, .. }) => {
            logs.extend(titled("object", &digest, "", Some(digest)));
        }
        Record::Failure(failure) => logs.extend(titled("failure", &failure.id, "", failure.log)),
        Record::Artifact(it) => logs.extend(titled("artifact", &it.id, "", it.log)),
        Record::Program(program) => {
            let mut seen = BTreeSet::new();
            for step in program.steps {
                if seen.insert(step.artifact) {
                    let artifact = store.records().artifact(&step.artifact)?;
                    let log = artifact.and_then(|artifact| artifact.log);
                    logs.extend(titled("artifact", &step.artifact, &step.name, log));
                }
            }
        }
    }
    Ok(logs)
}
