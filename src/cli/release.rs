//! `precast release`: list a model's releases, and go back to an earlier one.

use anyhow::Result;
use serde::Serialize;

use super::{
    Context, name,
    table::{self, Column},
    text::{ago, count, now},
};
use crate::{inspect::torches, record::Release, store::Store};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// List releases, the newest first: that is what a plain load gets
    Ls {
        /// Only releases of this model, or the one that `MODEL@NUMBER` or `MODEL@NAME` says
        model: Option<String>,
    },
    /// Make an earlier release the newest one again
    Rollback {
        /// The model, with `@NUMBER` or `@NAME` for the release to go back to
        model: String,
        /// The number of the release to go back to [default: the last one before the newest that has other content]
        #[arg(long, value_name = "SEQ")]
        to: Option<u64>,
    },
}

/// `precast release ls` and `precast release rollback --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub(super) enum Document {
    Listed {
        releases: Vec<Listed>,
    },
    RolledBack {
        release: Box<Release>,
        /// False when the newest release had this content already.
        published: bool,
    },
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Listed {
    #[serde(flatten)]
    release: Release,
    /// Full versions of the torch that it runs under: the one that it was built with first. Empty where its first program
    /// can't be read.
    torch: Vec<String>,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.open()?;
    match &args.command {
        Command::Ls { model } => list(&store, model.as_deref(), context)?,
        Command::Rollback { model, to } => {
            let (model, seq) = name::release_number(&store, model, *to, "--to")?;
            let (release, new) = store.releases().rollback(&model, seq)?;
            if context.out.json() {
                let published = new;
                context.out.document(&Document::RolledBack {
                    release: Box::new(release),
                    published,
                })?;
            } else {
                context.out.line(format_args!(
                    "release {} of {model} is the newest {}: {}{}",
                    release.seq,
                    if new { "now" } else { "already" },
                    count(release.programs.len() as u64, "program"),
                    release
                        .name
                        .map(|name| format!(", `{name}`"))
                        .unwrap_or_default()
                ))?;
            }
        }
    }
    Ok(0)
}

fn list(store: &Store, model: Option<&str>, context: &Context) -> Result<()> {
    let mut all: Vec<Release> = Vec::new();
    match model {
        Some(one) if one.contains('@') => all.push(name::release(store, one)?),
        Some(model) => all.extend(store.releases().all(model)?.into_iter().rev()),
        None => {
            for model in store.releases().models()? {
                all.extend(store.releases().all(&model)?.into_iter().rev());
            }
        }
    }
    let listed = all.into_iter().map(|release| Listed {
        torch: torches::of_release(store, &release),
        release,
    });
    let all: Vec<Listed> = listed.collect();
    if context.out.json() {
        let releases = all;
        return context.out.document(&Document::Listed { releases });
    }
    let now = now();
    let rows = all.into_iter().map(|Listed { release, torch }| {
        Ok(vec![
            release.model,
            release.seq.to_string(),
            release.name.unwrap_or_default(),
            release.programs.len().to_string(),
            match (release.lacks.len(), release.rollback) {
                (0, None) => String::new(),
                (0, Some(earlier)) => format!("rollback to {earlier}"),
                (lacks, _) => format!("partial: lacks {lacks}"),
            },
            torch.join(", "),
            release
                .weights
                .map(|weights| weights.short())
                .unwrap_or_default(),
            release
                .provenance
                .created()
                .map_or_else(String::new, |made| ago(now, made)),
        ])
    });
    const COLUMNS: [Column; 8] = [
        Column::left("MODEL", 0),
        Column::right("SEQ", 0),
        Column::left("NAME", 1),
        Column::right("PROGRAMS", 2),
        Column::left("", 1),
        Column::left("TORCH", 2),
        Column::left("WEIGHTS", 3),
        Column::right("AGE", 0),
    ];
    let count = table::print(&context.out, &COLUMNS, rows)?;
    if count == 0 && !context.quiet {
        super::printer::note("no releases");
    }
    Ok(())
}
