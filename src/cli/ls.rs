//! `precast ls`: the programs of a store.

use std::cell::RefCell;

use anyhow::Result;
use owo_colors::OwoColorize;
#[cfg(test)]
use serde::Serialize;

use super::{
    Context,
    exit::{self, Refusal},
    name, remote,
    table::{self, Column},
    text::{age, bytes, duration, now},
};
use crate::{
    inspect::list::{self, Pattern, Query, Row, State},
    store::{ArtifactRow, ObjectRow, Store, StoreError},
};

#[derive(clap::Args)]
pub(super) struct LsArgs {
    /// Only modules that match, as `encode` or `vision.*`; or a remote, as `prod` or `s3://BUCKET/PATH`, for its
    /// releases
    #[arg(value_name = "GLOB")]
    glob: Option<String>,
    /// Only programs of this model, or of the release `MODEL@NUMBER` or `MODEL@NAME`
    #[arg(long)]
    model: Option<String>,
    /// Only buckets that match, as `batch=8 *`
    #[arg(long, value_name = "GLOB")]
    bucket: Option<String>,
    /// Only programs for this kind of device: cpu or cuda
    #[arg(long, value_parser = ["cpu", "cuda"])]
    device: Option<String>,
    /// Only programs that are live (in the newest release), old (only in older ones), partial (only in a partial
    /// one), loose (in none) or failed
    #[arg(long, value_parser = state)]
    state: Option<State>,
    /// Only programs that were built at least this long ago, as `30d` or `12h`
    #[arg(long, value_name = "AGE", value_parser = duration)]
    older: Option<i64>,
    /// Only programs that were built within this time
    #[arg(long, value_name = "AGE", value_parser = duration)]
    newer: Option<i64>,
    /// Sort by a column, largest first with `-` at the end, as `size-` [default: model, module, bucket]
    #[arg(long, value_name = "COLUMN[-]", value_parser = sort)]
    sort: Option<(list::Order, bool)>,
    /// Print IDs only, one a line
    #[arg(long, conflicts_with_all = ["artifacts", "objects"])]
    ids: bool,
    /// List artifacts instead of programs
    #[arg(long, conflicts_with_all = ["glob", "model", "bucket", "state", "older", "newer", "sort"])]
    artifacts: bool,
    /// List objects instead: the bytes behind artifacts, weights and logs
    #[arg(long, conflicts_with_all = ["glob", "model", "bucket", "device", "state", "older", "newer", "sort", "artifacts"])]
    objects: bool,
}

fn state(text: &str) -> Result<State, String> {
    named(&State::ALL, text)
}

fn sort(text: &str) -> Result<(list::Order, bool), String> {
    let name = text.strip_suffix('-').unwrap_or(text);
    Ok((named(&list::ORDERS, name)?, name != text))
}

/// Returns the entry of a table with this name.
fn named<T: Copy>(table: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = table.iter().find(|(own, _)| *own == name);
    let names: Vec<&str> = table.iter().map(|(own, _)| *own).collect();
    let expected = || format!("expected one of {}", names.join(", "));
    found.map(|(_, entry)| *entry).ok_or_else(expected)
}

fn pattern(glob: &Option<String>) -> Result<Option<Pattern>, Refusal> {
    let parse = |glob: &String| {
        Pattern::new(glob).map_err(|error| {
            let message = format!("`{glob}` is not a pattern: {}", error.kind());
            let hint = "`*` matches anything; put quotes around it for the shell";
            Refusal::usage(message, hint)
        })
    };
    glob.as_ref().map(parse).transpose()
}

pub(super) fn run(args: &LsArgs, context: &Context) -> Result<u8> {
    if let Some(text) = &args.glob
        && let Some(place) = remote::names::known(text)?
    {
        if !remote::names::is_url(text) {
            note!(
                "`{text}` is the remote {place}; `ls '{text}*'` or `ls --model {text}` lists what the store has"
            );
        }
        return remote::list(&place, context);
    }
    let store = context.look()?;
    let damage = Damage::default();
    if args.artifacts {
        artifacts(args, damage.sound(store.records().artifacts()), context)?;
    } else if args.objects {
        objects(damage.sound(store.objects().rows()), context)?;
    } else {
        let rows = list::list(&store, &query(args, &store)?);
        programs(args, damage.sound(rows), &store, context)?;
    }
    Ok(damage.code(&store))
}

/// `precast ls --format json`
#[cfg(test)]
#[derive(Serialize, schemars::JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "rows are printed one by one")]
pub(super) enum LsDocument {
    Programs { programs: Vec<Row> },
    Artifacts { artifacts: Vec<ArtifactRow> },
    Objects { objects: Vec<ObjectRow> },
}

fn query(args: &LsArgs, store: &Store) -> Result<Query> {
    let (model, programs) = name::model_and_programs(store, args.model.as_deref())?;
    let now = now();
    Ok(Query {
        module: pattern(&args.glob)?,
        model,
        programs,
        bucket: pattern(&args.bucket)?,
        device: args.device.clone(),
        state: args.state,
        until: args.older.map(|age| now - age),
        since: args.newer.map(|age| now - age),
        sort: args.sort.map(|(column, _)| column),
        descending: args.sort.is_some_and(|(_, descending)| descending),
    })
}

fn programs(
    args: &LsArgs,
    mut rows: impl Iterator<Item = Row>,
    store: &Store,
    context: &Context,
) -> Result<()> {
    if context.out.json() {
        return context.out.list("programs", rows.map(Ok));
    }
    if args.ids {
        return rows.try_for_each(|row| context.out.line(row.id));
    }
    const COLUMNS: [Column; 10] = [
        Column::left("ID", 0),
        Column::left("MODEL", 2),
        Column::left("MODULE", 0),
        Column::left("BUCKET", 0),
        Column::left("STATE", 1).painted(paint),
        Column::left("TARGET", 6),
        Column::right("STEPS", 7),
        Column::right("SIZE", 4),
        Column::right("AGE", 3),
        Column::right("USED", 5),
    ];
    let cells = with_inputs(rows, store).map(|row| {
        let failed = row.state == State::Failed;
        let some = |text: String| if failed { String::new() } else { text };
        vec![
            row.id.short(),
            row.model,
            row.module,
            row.bucket,
            row.state.to_string(),
            row.target,
            some(row.steps.to_string()),
            some(bytes(row.bytes)),
            age(row.created),
            age(row.used),
        ]
    });
    table::print_some(&context.out, &COLUMNS, cells, "programs")
}

/// Adds the names of their inputs to variants of one module that stand side by side.
fn with_inputs(rows: impl Iterator<Item = Row>, store: &Store) -> impl Iterator<Item = Row> {
    let place = |row: &Row| {
        let text = [&row.model, &row.module, &row.bucket, &row.device];
        (row.state == State::Live).then(|| text.map(Clone::clone))
    };
    let mut rows = rows.peekable();
    let mut last = None;
    std::iter::from_fn(move || {
        let mut row = rows.next()?;
        let here = place(&row);
        let beside =
            here.is_some() && (last == here || rows.peek().map(place) == Some(here.clone()));
        last = here;
        if beside && let Ok(Some(program)) = store.records().program(&row.id) {
            row.module = program.title();
        }
        Some(row)
    })
}

fn paint(state: &str) -> String {
    match state {
        "live" => state.green().to_string(),
        "failed" => state.red().to_string(),
        _ => state.dimmed().to_string(),
    }
}

fn artifacts(
    args: &LsArgs,
    rows: impl Iterator<Item = ArtifactRow>,
    context: &Context,
) -> Result<()> {
    let wanted = |row: &ArtifactRow| args.device.as_ref().is_none_or(|name| *name == row.device);
    let rows = rows.filter(wanted);
    if context.out.json() {
        return context.out.list("artifacts", rows.map(Ok));
    }
    const COLUMNS: [Column; 6] = [
        Column::left("ID", 0),
        Column::left("TARGET", 1),
        Column::right("PROGRAMS", 0),
        Column::right("SIZE", 0),
        Column::right("AGE", 2),
        Column::right("USED", 3),
    ];
    let cells = rows.map(|row| {
        vec![
            row.id.short(),
            row.target,
            row.programs.to_string(),
            bytes(row.size),
            age(row.created),
            age(row.used),
        ]
    });
    table::print_some(&context.out, &COLUMNS, cells, "artifacts")
}

fn objects(rows: impl Iterator<Item = ObjectRow>, context: &Context) -> Result<()> {
    if context.out.json() {
        return context.out.list("objects", rows.map(Ok));
    }
    const COLUMNS: [Column; 4] = [
        Column::left("ID", 0),
        Column::right("SIZE", 0),
        Column::right("ON DISK", 0),
        Column::right("AGE", 1),
    ];
    let cells = rows.map(|row| {
        let (size, stored) = (bytes(row.size), bytes(row.stored));
        vec![row.digest.short(), size, stored, age(row.created)]
    });
    table::print_some(&context.out, &COLUMNS, cells, "objects")
}

/// The errors of rows that can't be listed.
#[derive(Default)]
struct Damage(RefCell<Vec<StoreError>>);

impl Damage {
    /// Returns the rows without an error, and keeps the errors of the others.
    fn sound<T>(
        &self,
        rows: impl Iterator<Item = Result<T, StoreError>>,
    ) -> impl Iterator<Item = T> {
        rows.filter_map(|row| row.map_err(|error| self.0.borrow_mut().push(error)).ok())
    }

    /// Prints a warning for each error and each damaged file of the store, and returns the exit code.
    fn code(self, store: &Store) -> u8 {
        let mut errors = self.0.into_inner();
        if errors.is_empty() {
            return 0;
        }
        errors.extend(store.audit().damaged());
        errors.iter().for_each(exit::warn);
        exit::FAILED
    }
}
