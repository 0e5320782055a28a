//! `precast stats`: requests of production, and the programs that answered them.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    table::{self, Column},
    text::count,
};
use crate::{
    inspect::{
        stats::{self, Counts, ModuleStats},
        words::asked,
    },
    record::bucket_name,
};

#[derive(clap::Args)]
pub(super) struct StatsArgs {
    /// Counts that services wrote; several add up
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// How many shapes without a bucket of their own are listed for each module
    #[arg(long, default_value_t = 10)]
    top: usize,
}

/// `precast stats FILE… --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct StatsDocument {
    modules: Vec<ModuleStats>,
}

/// Reads files of counts.
pub(super) fn read(files: &[PathBuf]) -> Result<Vec<Counts>> {
    let read = |path: &PathBuf| {
        let failed = || format!("can't use `{}`", path.display());
        let text = std::fs::read(path).with_context(failed)?;
        stats::parse(&text).with_context(failed)
    };
    files.iter().map(read).collect()
}

pub(super) fn run(args: &StatsArgs, context: &Context) -> Result<u8> {
    let modules = stats::stats(&read(&args.files)?);
    let document = StatsDocument { modules };
    context.show(&document, || {
        if document.modules.is_empty() {
            note!("nothing was counted");
        }
        for (place, module) in document.modules.iter().enumerate() {
            if place > 0 {
                context.out.line("")?;
            }
            show(module, args.top, context)?;
        }
        Ok(())
    })?;
    Ok(0)
}

fn show(module: &ModuleStats, top: usize, context: &Context) -> Result<()> {
    let out = &context.out;
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    writeln!(out, "{} {}", module.model.bold(), module.module.bold())?;
    let rungs = module.rungs.iter();
    let rungs: Vec<String> = rungs
        .map(|(rung, calls)| format!("{calls} {rung}"))
        .collect();
    let (calls, hits) = (count(module.calls, "call"), percent(module.hit_rate()));
    writeln!(out, "  {calls}: {}", rungs.join(", "))?;
    writeln!(out, "  {hits} had a bucket of their own size")?;
    if let Some(waste) = module.waste {
        writeln!(out, "  {} of the work was padding", percent(waste))?;
    }
    if module.misses.is_empty() || top == 0 {
        return Ok(());
    }
    out.line("")?;
    const COLUMNS: [Column; 5] = [
        Column::left("  ASKED FOR", 0),
        Column::left("ANSWERED BY", 0),
        Column::left("BUCKET", 1),
        Column::right("CALLS", 0),
        Column::right("PADDING", 2),
    ];
    let rows = module.misses.iter().take(top).map(|miss| {
        vec![
            format!("  {}", asked(&miss.sizes)),
            miss.rung.clone(),
            miss.bucket.as_ref().map(bucket_name).unwrap_or_default(),
            miss.count.to_string(),
            miss.waste.map(percent).unwrap_or_default(),
        ]
    });
    table::print(out, &COLUMNS, rows)
}
