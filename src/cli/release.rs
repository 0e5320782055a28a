//! `precast release`: list a model's releases, and go back to an earlier one.

use anyhow::Result;
use serde::Serialize;

use super::{
    Context, name,
    table::{self, Column},
    text::{age, count},
};
use crate::{inspect::torches, record::Release, store::Store};

#[derive(clap::Args)]
pub(super) struct ReleaseArgs {
    #[command(subcommand)]
    command: ReleaseCommand,
}

#[derive(clap::Subcommand)]
enum ReleaseCommand {
    /// List releases, the newest first; a load without a number gets the newest
    Ls {
        /// Only releases of this model, or the release `MODEL@NUMBER` or `MODEL@NAME`
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

impl ReleaseArgs {
    /// Returns whether it changes nothing.
    pub(super) fn reads(&self) -> bool {
        matches!(self.command, ReleaseCommand::Ls { .. })
    }
}

/// `precast release ls` and `precast release rollback --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub(super) enum ReleaseDocument {
    Listed {
        releases: Vec<Listed>,
    },
    RolledBack {
        release: Box<Release>,
        /// False if the newest release already had this content.
        published: bool,
    },
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Listed {
    #[serde(flatten)]
    release: Release,
    /// Full versions of the torch that it runs under, beginning with that of its build. Empty where its first program
    /// can't be read.
    torch: Vec<String>,
}

pub(super) fn run(args: &ReleaseArgs, context: &Context) -> Result<u8> {
    let store = context.open()?;
    match &args.command {
        ReleaseCommand::Ls { model } => list(&store, model.as_deref(), context)?,
        ReleaseCommand::Rollback { model, to } => {
            let (model, seq) = name::release_number(&store, model, *to, "--to")?;
            let (release, published) = store.releases().rollback(&model, seq)?;
            if context.out.json() {
                let release = Box::new(release);
                let document = ReleaseDocument::RolledBack { release, published };
                return context.out.document(&document).map(|()| 0);
            }
            let (seq, programs) = (release.seq, count(release.programs.len(), "program"));
            let since = if published { "now" } else { "already" };
            let name = release.name.map(|name| format!(", `{name}`"));
            let name = name.unwrap_or_default();
            writeln!(
                context.out,
                "release {seq} of {model} is the newest {since}: {programs}{name}"
            )?;
        }
    }
    Ok(0)
}

fn list(store: &Store, model: Option<&str>, context: &Context) -> Result<()> {
    let mut all: Vec<Release> = Vec::new();
    let models = match model {
        Some(one) if one.contains('@') => {
            all.push(name::release(store, one)?);
            vec![]
        }
        Some(model) => vec![model.to_owned()],
        None => store.releases().models()?,
    };
    for model in models {
        all.extend(store.releases().all(&model)?.into_iter().rev());
    }
    let listed = all.into_iter().map(|release| Listed {
        torch: torches::of_release(store, &release),
        release,
    });
    let all: Vec<Listed> = listed.collect();
    if context.out.json() {
        let releases = all;
        return context.out.document(&ReleaseDocument::Listed { releases });
    }
    let rows = all.into_iter().map(|Listed { release, torch }| {
        let remark = match (release.lacks.len(), release.rollback) {
            (0, None) => String::new(),
            (0, Some(earlier)) => format!("rollback to {earlier}"),
            (lacks, _) => format!("partial: lacks {lacks}"),
        };
        let weights = release.weights.map(|weights| weights.short());
        vec![
            release.model,
            release.seq.to_string(),
            release.name.unwrap_or_default(),
            release.programs.len().to_string(),
            remark,
            torch.join(", "),
            weights.unwrap_or_default(),
            age(release.provenance.created),
        ]
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
    table::print_some(&context.out, &COLUMNS, rows, "releases")
}
