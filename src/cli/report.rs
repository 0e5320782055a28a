//! `precast report`: one self-contained HTML page about a store.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::{
    Context, check,
    exit::{self, Missing, Usage},
    name,
    printer::note,
    stats,
    text::{bytes, now},
};
use crate::inspect::report::{Choice, Page};

#[derive(clap::Args)]
pub(super) struct Args {
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
    /// Only this model; with `@NUMBER` or `@NAME` that release of it instead of the newest one
    #[arg(long)]
    model: Option<String>,
    /// The release of this number instead of the newest one
    #[arg(long, value_name = "SEQ", requires = "model")]
    release: Option<u64>,
    /// Counts that a service wrote; may be given again
    #[arg(long, value_name = "FILE")]
    counts: Vec<PathBuf>,
    /// What `precast check --format json` printed; may be given again
    #[arg(long, value_name = "FILE")]
    check: Vec<PathBuf>,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let (named, release) = match &args.model {
        Some(model) => {
            let (model, release) = name::release_number(&store, model, args.release, "--release")?;
            (Some(model), release)
        }
        None => (None, None),
    };
    if let Some(model) = &named {
        let there = match release {
            Some(seq) => store.releases().at(model, seq)?.is_some(),
            None => store.releases().models()?.contains(model),
        };
        if !there {
            let release = release
                .map(|seq| format!("release {seq} of "))
                .unwrap_or_default();
            return Err(Missing {
                message: format!("{release}model `{model}` is not in the store"),
                hint: "`precast release ls` lists models and releases".to_owned(),
            }
            .into());
        }
    }
    let choice = Choice {
        model: named,
        release,
        counts: stats::read(&args.counts)?,
        checks: check::read(&args.check)?,
    };
    let page = Page::read(&store, &choice, now())?;
    for line in &page.damage {
        exit::warning(line);
    }
    let code = if page.damage.is_empty() {
        0
    } else {
        exit::FAILED
    };
    if context.out.json() {
        context.out.document(&page)?;
        return Ok(code);
    }
    let html = page.html();
    if args.output.is_dir() {
        let message = format!("`{}` is a folder", args.output.display());
        return Err(Usage {
            message,
            hint: "give a file, as `-o report.html`".to_owned(),
        }
        .into());
    }
    std::fs::write(&args.output, &html)
        .with_context(|| format!("can't write `{}`", args.output.display()))?;
    if !context.quiet {
        note(format_args!(
            "wrote `{}` ({})",
            args.output.display(),
            bytes(html.len() as u64)
        ));
    }
    Ok(code)
}
