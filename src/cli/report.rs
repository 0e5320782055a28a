//! `precast report`: one self-contained HTML page about a store.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use super::{
    Context, check,
    exit::{self, Refusal},
    name, stats,
    text::{bytes, now},
};
use crate::{
    inspect::{
        report::{Choice, Page},
        training::{self, Training},
    },
    store::Store,
};

#[derive(clap::Args)]
pub(super) struct ReportArgs {
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
    /// Only this model; with `@NUMBER` or `@NAME` that release of it instead of the newest one
    #[arg(long)]
    model: Option<String>,
    /// The release of this number instead of the newest one
    #[arg(long, value_name = "SEQ", requires = "model")]
    release: Option<u64>,
    /// Counts that a service wrote; may be repeated
    #[arg(long, value_name = "FILE")]
    counts: Vec<PathBuf>,
    /// A document of `precast check --format json`; may be repeated
    #[arg(long, value_name = "FILE")]
    check: Vec<PathBuf>,
    /// Figures of training: a document of `precast train --format json`, or a file of Python's smoke test; may be
    /// repeated
    #[arg(long, value_name = "FILE")]
    training: Vec<PathBuf>,
}

pub(super) fn run(args: &ReportArgs, context: &Context) -> Result<u8> {
    let store = context.look()?;
    let (model, release) = match &args.model {
        Some(model) => {
            let (model, seq) = name::release_number(&store, model, args.release, "--release")?;
            known(&store, &model, seq)?;
            (Some(model), seq)
        }
        None => (None, None),
    };
    let choice = Choice {
        model,
        release,
        counts: stats::read(&args.counts)?,
        checks: check::read(&args.check)?,
        training: figures(&args.training)?,
    };
    let page = Page::read(&store, &choice, now())?;
    for line in &page.damage {
        exit::warning(line);
    }
    let code = exit::code(page.damage.is_empty());
    if context.out.json() {
        context.out.document(&page)?;
        return Ok(code);
    }
    let html = page.html();
    let path = args.output.display();
    if args.output.is_dir() {
        let hint = "give a file, as `-o report.html`";
        return Err(Refusal::usage(format!("`{path}` is a folder"), hint).into());
    }
    std::fs::write(&args.output, &html).with_context(|| format!("can't write `{path}`"))?;
    note!("wrote `{path}` ({})", bytes(html.len() as u64));
    Ok(code)
}

/// Reads files of figures.
fn figures(files: &[PathBuf]) -> Result<Vec<Training>> {
    let wrong = "has no figures of training";
    let hint = "make it with `precast train --format json`, or with `CompileSmoketest.run(…).training.save`";
    check::documents(files, training::parse, wrong, hint)
}

/// Fails for a model or a release that the store does not have.
fn known(store: &Store, model: &str, seq: Option<u64>) -> Result<()> {
    let (there, release) = match seq {
        Some(seq) => (
            store.releases().at(model, seq)?.is_some(),
            format!("release {seq} of "),
        ),
        None => (
            store
                .releases()
                .models()?
                .iter()
                .any(|known| known == model),
            String::new(),
        ),
    };
    if there {
        return Ok(());
    }
    let message = format!("{release}model `{model}` is not in the store");
    Err(Refusal::missing(message, "`precast release ls` lists models and releases").into())
}
