//! `precast du`: disk usage of a store, by group.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    table::{self, Column},
    text::bytes,
};
use crate::{
    inspect::usage::{self, Bytes, DiskUsage},
    store::GroupBy,
};

#[derive(clap::Args)]
pub(super) struct DuArgs {
    /// The rows of the sum
    #[arg(long, default_value = "model", value_parser = ["model", "module", "release"])]
    by: String,
}

/// `precast du --format json`
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct DuDocument {
    by: GroupBy,
    #[serde(flatten)]
    usage: DiskUsage,
}

pub(super) fn run(args: &DuArgs, context: &Context) -> Result<u8> {
    let (by, heading) = match args.by.as_str() {
        "module" => (GroupBy::Module, "MODULE"),
        "release" => (GroupBy::Release, "RELEASE"),
        _ => (GroupBy::Model, "MODEL"),
    };
    let usage = usage::usage(&context.open_or_look()?, by)?;
    if context.out.json() {
        context.out.document(&DuDocument { by, usage })?;
        return Ok(0);
    }
    if usage.total.objects == 0 {
        note!("the store is empty");
        return Ok(0);
    }
    let columns = [
        Column::left(heading, 0),
        Column::right("OBJECTS", 4),
        Column::right("LOGICAL", 3),
        Column::right("CONTENT", 2),
        Column::right("ON DISK", 0),
        Column::right("SHARED", 1),
        Column::right("RECLAIMABLE", 0).painted(|text| match text {
            "0 B" => text.to_owned(),
            some => some.yellow().to_string(),
        }),
    ];
    let groups = usage.groups.iter();
    let groups = groups.map(|group| cells(&group.name, &group.bytes));
    let rest = (usage.rest.objects > 0).then(|| cells("(no program)", &usage.rest));
    let kept = [
        ("(unpacked)", usage.unpacked),
        ("(prepacked)", usage.prepacked),
    ];
    let kept = kept.into_iter().filter(|(_, size)| *size > 0);
    let kept = kept.map(|(name, size)| {
        let mut cells = vec![String::new(); columns.len()];
        cells[0] = name.to_owned();
        cells[4] = bytes(size);
        cells
    });
    let mut total = cells("total", &usage.total);
    total[4] = bytes(usage.on_disk());
    let rows = groups.chain(rest).chain(kept).chain([total]);
    table::print(&context.out, &columns, rows)?;
    if context.remote.is_some() {
        note!("of what its releases need; `precast gc` lists what nothing needs");
        return Ok(0);
    }
    match usage.total.reclaimable {
        0 => note!(
            "everything is held by a release: `precast gc --keep-releases 1 --unreleased --dry-run` \
             lists what only older ones need"
        ),
        some => {
            let some = bytes(some);
            note!("{some} can go: `precast gc --unreleased --dry-run` lists it");
        }
    }
    Ok(0)
}

fn cells(name: &str, all: &Bytes) -> Vec<String> {
    vec![
        name.to_owned(),
        all.objects.to_string(),
        bytes(all.logical),
        bytes(all.content),
        bytes(all.stored),
        bytes(all.shared),
        bytes(all.reclaimable),
    ]
}
