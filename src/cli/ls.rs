//! `precast ls`: the programs of a store.

use anyhow::Result;
use owo_colors::OwoColorize;
use serde::Serialize;

use super::{
    Context,
    exit::{self, Usage},
    name,
    printer::note,
    table::{self, Column},
    text::{ago, bytes, duration, now},
};
use crate::{
    Digest,
    inspect::list::{self, Pattern, Query, Row, State},
    store::{Store, StoreError},
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Only modules that match, as `encode` or `vision.*`
    #[arg(value_name = "GLOB")]
    glob: Option<String>,
    /// Only programs of this model, or of the release that `MODEL@NUMBER` or `MODEL@NAME` says
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
    /// Only what was built at least this long ago, as `30d` or `12h`
    #[arg(long, value_name = "AGE", value_parser = duration)]
    older: Option<i64>,
    /// Only what was built within this time
    #[arg(long, value_name = "AGE", value_parser = duration)]
    newer: Option<i64>,
    /// Sort by a column, largest first with `-` at the end, as `size-` [default: model, module, bucket]
    #[arg(long, value_name = "COLUMN[-]", value_parser = sort)]
    sort: Option<(list::Column, bool)>,
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
    let found = State::ALL.into_iter().find(|state| state.name() == text);
    found.ok_or_else(|| "expected live, old, partial, loose or failed".to_owned())
}

fn sort(text: &str) -> Result<(list::Column, bool), String> {
    let (name, descending) = match text.strip_suffix('-') {
        Some(name) => (name, true),
        None => (text, false),
    };
    let found = list::Column::ALL
        .into_iter()
        .find(|(column, _)| *column == name);
    found
        .map(|(_, column)| (column, descending))
        .ok_or_else(|| {
            let names: Vec<&str> = list::Column::ALL.iter().map(|(name, _)| *name).collect();
            format!("expected one of {}", names.join(", "))
        })
}

fn pattern(glob: &Option<String>) -> Result<Option<Pattern>> {
    let Some(glob) = glob else {
        return Ok(None);
    };
    let pattern = Pattern::new(glob).map_err(|e| Usage {
        message: format!("`{glob}` is not a pattern: {}", e.kind()),
        hint: "`*` matches anything; put quotes around it for the shell".to_owned(),
    })?;
    Ok(Some(pattern))
}

pub(super) fn run(args: &Args, context: &Context) -> Result<u8> {
    let store = context.look()?;
    match (args.artifacts, args.objects) {
        (true, _) => artifacts(args, &store, context),
        (_, true) => objects(&store, context),
        _ => programs(args, &store, context),
    }
}

/// `precast ls --format json`
#[cfg(test)]
#[derive(Serialize, schemars::JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "rows are printed one by one")]
pub(super) enum Document {
    Programs { programs: Vec<Row> },
    Artifacts { artifacts: Vec<ArtifactLine> },
    Objects { objects: Vec<ObjectLine> },
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct ArtifactLine {
    id: Digest,
    target: String,
    device: String,
    /// How many programs call it.
    programs: u64,
    bytes: u64,
    /// Seconds since 1970.
    created: i64,
    /// When it was used last, in seconds since 1970.
    used: Option<i64>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct ObjectLine {
    digest: Digest,
    /// Content.
    bytes: u64,
    /// The same on disk, compressed.
    stored: u64,
    /// Seconds since 1970.
    created: i64,
}

fn programs(args: &Args, store: &Store, context: &Context) -> Result<u8> {
    let now = now();
    let (model, programs) = match &args.model {
        Some(model) => {
            let (model, programs) = name::programs_of(store, model)?;
            (Some(model), programs)
        }
        None => (None, None),
    };
    let query = Query {
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
    };
    let mut damage = Damage::default();
    let rows = list::list(store, &query)?;
    let rows = rows.filter_map(|row| damage.sound(row));
    if context.out.json() {
        context.out.list("programs", rows.map(Ok))?;
        return Ok(damage.tell(store));
    }
    if args.ids {
        for row in rows {
            context.out.line(row.id)?;
        }
        return Ok(damage.tell(store));
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
    let cells = named(rows, store).map(|row| Ok(cells(row, now)));
    let count = table::print(&context.out, &COLUMNS, cells)?;
    if count == 0 && !context.quiet {
        note("no programs");
    }
    Ok(damage.tell(store))
}

/// Adds the names of their inputs to variants of one module, which stand side by side unless they are sorted otherwise.
fn named(rows: impl Iterator<Item = Row>, store: &Store) -> impl Iterator<Item = Row> {
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

fn cells(row: Row, now: i64) -> Vec<String> {
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
        ago(now, row.created),
        row.used.map_or_else(String::new, |used| ago(now, used)),
    ]
}

fn paint(state: &str) -> String {
    match state {
        "live" => state.green().to_string(),
        "failed" => state.red().to_string(),
        _ => state.dimmed().to_string(),
    }
}

fn artifacts(args: &Args, store: &Store, context: &Context) -> Result<u8> {
    let mut damage = Damage::default();
    let device = |device: &str| args.device.as_deref().is_none_or(|wanted| wanted == device);
    let rows = store
        .records()
        .artifacts()
        .filter_map(|row| damage.sound(row))
        .filter(|row| device(&row.device));
    if context.out.json() {
        let rows = rows.map(|row| {
            Ok(ArtifactLine {
                id: row.id,
                target: row.target,
                device: row.device,
                programs: row.programs,
                bytes: row.size,
                created: row.created,
                used: row.used,
            })
        });
        context.out.list("artifacts", rows)?;
        return Ok(damage.tell(store));
    }
    const COLUMNS: [Column; 6] = [
        Column::left("ID", 0),
        Column::left("TARGET", 1),
        Column::right("PROGRAMS", 0),
        Column::right("SIZE", 0),
        Column::right("AGE", 2),
        Column::right("USED", 3),
    ];
    let now = now();
    let cells = rows.map(|row| {
        let used = row.used.map_or_else(String::new, |used| ago(now, used));
        Ok(vec![
            row.id.short(),
            row.target,
            row.programs.to_string(),
            bytes(row.size),
            ago(now, row.created),
            used,
        ])
    });
    let count = table::print(&context.out, &COLUMNS, cells)?;
    if count == 0 && !context.quiet {
        note("no artifacts");
    }
    Ok(damage.tell(store))
}

fn objects(store: &Store, context: &Context) -> Result<u8> {
    let mut damage = Damage::default();
    let rows = store.objects().rows().filter_map(|row| damage.sound(row));
    if context.out.json() {
        let rows = rows.map(|row| {
            Ok(ObjectLine {
                digest: row.digest,
                bytes: row.size,
                stored: row.stored,
                created: row.created,
            })
        });
        context.out.list("objects", rows)?;
        return Ok(damage.tell(store));
    }
    const COLUMNS: [Column; 4] = [
        Column::left("ID", 0),
        Column::right("SIZE", 0),
        Column::right("ON DISK", 0),
        Column::right("AGE", 1),
    ];
    let now = now();
    let cells = rows.map(|row| {
        let (size, stored) = (bytes(row.size), bytes(row.stored));
        Ok(vec![
            row.digest.short(),
            size,
            stored,
            ago(now, row.created),
        ])
    });
    let count = table::print(&context.out, &COLUMNS, cells)?;
    if count == 0 && !context.quiet {
        note("no objects");
    }
    Ok(damage.tell(store))
}

/// What could not be listed.
#[derive(Default)]
struct Damage(Vec<StoreError>);

impl Damage {
    fn sound<T>(&mut self, row: Result<T, StoreError>) -> Option<T> {
        row.map_err(|error| self.0.push(error)).ok()
    }

    /// Says what is damaged, and returns the exit code.
    fn tell(mut self, store: &Store) -> u8 {
        if self.0.is_empty() {
            return 0;
        }
        self.0.extend(store.audit().damaged());
        for error in &self.0 {
            exit::warn(error);
        }
        exit::FAILED
    }
}
