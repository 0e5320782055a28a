//! `precast ls`: what is in the store.

use anyhow::{Context as _, Result};
use indicatif::{HumanBytes, HumanDuration};
use serde_json::json;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Context, table};
use crate::store::{Filter, ProgramRow, Store};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Only programs whose module matches, as `encode` or `vision.*`
    #[arg(value_name = "GLOB")]
    glob: Option<String>,
    /// Only programs of this model
    #[arg(long)]
    model: Option<String>,
    /// List artifacts instead of programs
    #[arg(long)]
    artifacts: bool,
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.open()?;
    match args.artifacts {
        true => artifacts(&store, context)?,
        false => programs(args, &store, context)?,
    }
    Ok(0)
}

fn programs(args: &Args, store: &Store, context: &Context) -> Result<()> {
    let glob = args.glob.as_deref().unwrap_or("*");
    let glob = globset::Glob::new(glob)
        .with_context(|| format!("bad pattern `{glob}`"))?
        .compile_matcher();
    let filter = Filter {
        model: args.model.clone(),
        ..Filter::default()
    };
    let rows = store
        .programs(filter)
        .filter(|row| row.as_ref().map_or(true, |row| glob.is_match(&row.module)));
    if context.out.json() {
        let rows = rows
            .map(|row| row.map(|row| document(&row)))
            .collect::<Result<Vec<_>, _>>()?;
        return context.out.document(json!({ "programs": rows }));
    }
    let now = now();
    let cells = rows.map(|row| {
        let row = row?;
        let size = HumanBytes(row.bytes).to_string();
        let id = row.id.short();
        Ok(vec![
            id,
            row.model,
            row.module,
            row.bucket,
            row.target,
            row.steps.to_string(),
            size,
            age(now, row.created),
        ])
    });
    let header = [
        "ID", "MODEL", "MODULE", "BUCKET", "TARGET", "STEPS", "SIZE", "AGE",
    ];
    let count = table::print(&context.out, &header, cells)?;
    if count == 0 && !context.quiet {
        super::printer::note("no programs");
    }
    Ok(())
}

fn document(row: &ProgramRow) -> serde_json::Value {
    json!({
        "id": row.id, "model": row.model, "module": row.module, "bucket": row.bucket, "target": row.target,
        "device": row.device, "steps": row.steps, "bytes": row.bytes, "created": row.created, "used": row.used,
    })
}

fn artifacts(store: &Store, context: &Context) -> Result<()> {
    let rows = store.artifacts();
    if context.out.json() {
        let rows = rows.map(|row| {
            row.map(|row| {
                json!({
                    "id": row.id, "target": row.target, "device": row.device, "programs": row.programs,
                    "bytes": row.size, "created": row.created, "used": row.used,
                })
            })
        });
        return context
            .out
            .document(json!({ "artifacts": rows.collect::<Result<Vec<_>, _>>()? }));
    }
    let now = now();
    let cells = rows.map(|row| {
        let row = row?;
        let size = HumanBytes(row.size).to_string();
        Ok(vec![
            row.id.short(),
            row.target,
            row.programs.to_string(),
            size,
            age(now, row.created),
        ])
    });
    table::print(
        &context.out,
        &["ID", "TARGET", "PROGRAMS", "SIZE", "AGE"],
        cells,
    )?;
    Ok(())
}

fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs() as i64)
}

/// Returns how long ago `then` was, in one unit.
fn age(now: i64, then: i64) -> String {
    let seconds = u64::try_from(now - then).unwrap_or(0);
    format!("{:#}", HumanDuration(Duration::from_secs(seconds)))
}
