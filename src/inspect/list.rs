//! Which programs a store has: filtered, sorted, and one row at a time.
//!
//! Rows stream in the order of the index (model, module, bucket). Another order needs all rows that match, but only
//! what is compared and the ID of each is kept, and every row is read again when its turn comes.

use std::{cmp::Ordering, collections::HashMap, fmt};

use globset::{GlobBuilder, GlobMatcher};
use serde::Serialize;

use crate::{
    Digest,
    store::{Filter, ProgramRow, Store, StoreError},
};

/// Where a program stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// In the newest release of its model: what a plain load gets.
    Live,
    /// Only in older releases.
    Old,
    /// In no release.
    Loose,
    /// The last attempt to build it failed, and it is not there.
    Failed,
}

impl State {
    pub const ALL: [Self; 4] = [Self::Live, Self::Old, Self::Loose, Self::Failed];

    /// Returns the word that is printed and accepted.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Old => "old",
            Self::Loose => "loose",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One program that is in the store, or that failed to get there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    pub id: Digest,
    pub model: String,
    pub module: String,
    /// As `batch=8 seq=128`.
    pub bucket: String,
    pub state: State,
    /// The target's name; empty for what failed.
    pub target: String,
    /// `cpu` or `cuda`; empty for what failed.
    pub device: String,
    pub steps: u64,
    /// Bytes of the distinct shared objects that it calls.
    pub bytes: u64,
    /// When it was built, or failed, in seconds since 1970.
    pub created: i64,
    /// When it was last used, if it was.
    pub used: Option<i64>,
}

/// By what rows are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    Id,
    Model,
    Module,
    Bucket,
    State,
    Target,
    Device,
    Steps,
    Size,
    Age,
    Used,
}

impl Column {
    pub const ALL: [(&'static str, Self); 11] = [
        ("id", Self::Id),
        ("model", Self::Model),
        ("module", Self::Module),
        ("bucket", Self::Bucket),
        ("state", Self::State),
        ("target", Self::Target),
        ("device", Self::Device),
        ("steps", Self::Steps),
        ("size", Self::Size),
        ("age", Self::Age),
        ("used", Self::Used),
    ];

    /// Returns what is compared, so that the smallest comes first: the youngest for ages.
    fn key(self, row: &Row) -> Key {
        match self {
            Self::Id => Key::Text(row.id.hex()),
            Self::Model => Key::Text(row.model.clone()),
            Self::Module => Key::Text(row.module.clone()),
            Self::Bucket => Key::Bucket(numbers(&row.bucket)),
            Self::State => Key::Number(row.state as i64),
            Self::Target => Key::Text(row.target.clone()),
            Self::Device => Key::Text(row.device.clone()),
            Self::Steps => Key::Number(row.steps as i64),
            Self::Size => Key::Number(row.bytes as i64),
            Self::Age => Key::Number(-row.created),
            Self::Used => Key::Number(-row.used.unwrap_or(0)),
        }
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Number(i64),
    Text(String),
    Bucket(Vec<(String, i64)>),
}

/// Returns `batch=8 seq=128` as names and numbers, so that 16 comes after 8.
fn numbers(bucket: &str) -> Vec<(String, i64)> {
    let part = |part: &str| match part.split_once('=') {
        Some((name, size)) => (name.to_owned(), size.parse().unwrap_or(0)),
        None => (part.to_owned(), 0),
    };
    bucket.split(' ').map(part).collect()
}

/// Which programs to list, and how. The empty query lists all.
#[derive(Clone, Debug, Default)]
pub struct Query {
    pub module: Option<Pattern>,
    pub model: Option<String>,
    /// As `batch=8 *`.
    pub bucket: Option<Pattern>,
    pub device: Option<String>,
    pub state: Option<State>,
    /// Built at this time or before, in seconds since 1970.
    pub until: Option<i64>,
    /// Built at this time or after.
    pub since: Option<i64>,
    pub sort: Option<Column>,
    pub descending: bool,
}

/// A glob over a whole name: `*` matches anything, `?` one character.
#[derive(Clone, Debug)]
pub struct Pattern(GlobMatcher);

impl Pattern {
    /// Parses a glob.
    pub fn new(text: &str) -> Result<Self, globset::Error> {
        let glob = GlobBuilder::new(text).literal_separator(false).build()?;
        Ok(Self(glob.compile_matcher()))
    }

    fn matches(&self, name: &str) -> bool {
        self.0.is_match(name)
    }
}

impl Query {
    fn matches(&self, row: &Row) -> bool {
        let is =
            |wanted: &Option<String>, found: &str| wanted.as_deref().is_none_or(|w| w == found);
        let fits = |pattern: &Option<Pattern>, text: &str| {
            pattern.as_ref().is_none_or(|p| p.matches(text))
        };
        is(&self.model, &row.model)
            && is(&self.device, &row.device)
            && fits(&self.module, &row.module)
            && fits(&self.bucket, &row.bucket)
            && self.state.is_none_or(|state| state == row.state)
            && self.until.is_none_or(|until| row.created <= until)
            && self.since.is_none_or(|since| row.created >= since)
    }
}

/// Lists programs. What can't be read is an error in its place, and what comes after it is still listed where the index
/// allows.
pub fn list(
    store: &Store,
    query: &Query,
) -> Result<Box<dyn Iterator<Item = Result<Row, StoreError>>>, StoreError> {
    let all = rows(store, query)?;
    let Some(column) = query.sort else {
        return Ok(Box::new(all));
    };
    let mut order = Vec::new();
    // Rows that the index can't give again: of failures, and those that were read from the files.
    let mut kept = Vec::new();
    let mut broken = Vec::new();
    for row in all {
        match row {
            Ok(row) => {
                order.push((column.key(&row), row.id));
                if row.state == State::Failed || !broken.is_empty() {
                    kept.push(row);
                }
            }
            Err(error) => broken.push(Err(error)),
        }
    }
    let descending = query.descending;
    order.sort_by(|a, b| {
        let by_key = a.0.cmp(&b.0);
        let by_key = if descending { by_key.reverse() } else { by_key };
        by_key.then_with(|| a.1.cmp(&b.1))
    });
    let mut kept: HashMap<Digest, Row> = kept.into_iter().map(|row| (row.id, row)).collect();
    let mut reader = Reader::new(store);
    let sorted = order
        .into_iter()
        .filter_map(move |(_, id)| match kept.remove(&id) {
            Some(row) => Some(Ok(row)),
            // What was removed since the listing began is not listed.
            None => reader.again(&id).transpose(),
        });
    Ok(Box::new(sorted.chain(broken)))
}

fn rows(
    store: &Store,
    query: &Query,
) -> Result<impl Iterator<Item = Result<Row, StoreError>> + use<>, StoreError> {
    let filter = Filter {
        model: query.model.clone(),
        device: query.device.clone(),
        ..Filter::default()
    };
    let failures = match query.state {
        None | Some(State::Failed) => store.failures()?,
        Some(_) => vec![],
    };
    let built = Built {
        rows: Box::new(store.programs(filter.clone())),
        reader: Reader::new(store),
        filter,
        last: None,
        from_files: false,
    };
    let there = store.clone();
    let failed = failures
        .into_iter()
        .filter_map(move |failure| match failure {
            // An artifact's failure is told by the programs that wanted it.
            Ok((failure, created)) => match there.has_program(&failure.id) {
                Ok(true) => None,
                Err(error) => Some(Err(error)),
                Ok(false) => Some(Ok(Row {
                    id: failure.id,
                    bucket: failure.bucket,
                    model: failure.model,
                    module: failure.module,
                    state: State::Failed,
                    target: String::new(),
                    device: String::new(),
                    steps: 0,
                    bytes: 0,
                    created,
                    used: None,
                })),
            },
            Err(error) => Some(Err(error)),
        });
    let query = query.clone();
    Ok(built
        .chain(failed)
        .filter(move |row| row.as_ref().map_or(true, |row| query.matches(row))))
}

/// What was built, from the index; from where that is damaged on, from the files.
struct Built {
    rows: Box<dyn Iterator<Item = Result<ProgramRow, StoreError>>>,
    reader: Reader,
    filter: Filter,
    last: Option<(String, String, String, Digest)>,
    from_files: bool,
}

impl Iterator for Built {
    type Item = Result<Row, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let row = self.rows.next()?.and_then(|row| self.reader.row(row));
            let row = match row {
                Ok(row) => row,
                Err(error) => {
                    let index = matches!(error, StoreError::Row { .. } | StoreError::Index { .. });
                    if index && !self.from_files {
                        self.from_files = true;
                        if let Ok(store) = Store::open_without_index(self.reader.store.path()) {
                            self.rows = Box::new(store.programs(self.filter.clone()));
                            self.reader = Reader::new(&store);
                        }
                    }
                    return Some(Err(error));
                }
            };
            let place = (
                row.model.clone(),
                row.module.clone(),
                row.bucket.clone(),
                row.id,
            );
            if self.last.as_ref().is_none_or(|last| place > *last) {
                self.last = Some(place);
                return Some(Ok(row));
            }
        }
    }
}

/// Makes rows, and remembers the newest release of each model meanwhile.
struct Reader {
    store: Store,
    newest: HashMap<String, Option<u64>>,
}

impl Reader {
    fn new(store: &Store) -> Self {
        Self {
            store: store.clone(),
            newest: HashMap::new(),
        }
    }

    fn again(&mut self, id: &Digest) -> Result<Option<Row>, StoreError> {
        match self.store.program_row(id)? {
            Some(row) => self.row(row).map(Some),
            None => Ok(None),
        }
    }

    fn row(&mut self, row: ProgramRow) -> Result<Row, StoreError> {
        let newest = match self.newest.get(&row.model) {
            Some(newest) => *newest,
            None => {
                let newest = self.store.newest_release(&row.model)?;
                self.newest.insert(row.model.clone(), newest);
                newest
            }
        };
        let state = match self.store.released(&row.id)? {
            None => State::Loose,
            released if released == newest => State::Live,
            Some(_) => State::Old,
        };
        Ok(Row {
            id: row.id,
            model: row.model,
            module: row.module,
            bucket: row.bucket,
            state,
            target: row.target,
            device: row.device,
            steps: row.steps,
            bytes: row.bytes,
            created: row.created,
            used: row.used,
        })
    }
}

/// Compares buckets by name and number: `batch=8` before `batch=16`.
pub fn bucket_order(a: &str, b: &str) -> Ordering {
    numbers(a).cmp(&numbers(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing;

    fn filled() -> (tempfile::TempDir, Store) {
        let (dir, store) = testing::store();
        let a = store.put_artifact(&testing::artifact(&store, "a")).unwrap();
        let b = store
            .put_artifact(&testing::artifact(&store, "bbbb"))
            .unwrap();
        let one = store
            .put_program(&testing::program("m", 1, &[a.id]))
            .unwrap();
        let two = store
            .put_program(&testing::program("m", 16, &[a.id, b.id]))
            .unwrap();
        store
            .put_program(&testing::program("m", 8, &[b.id]))
            .unwrap();
        store
            .put_release(&testing::release("m", None, &[one.id, two.id]))
            .unwrap();
        store
            .put_release(&testing::release("m", None, &[two.id]))
            .unwrap();
        let mut failure = testing::failure(Digest::of(b"failed"), "no kernel");
        failure.bucket = "batch=32".into();
        store.put_failure(&failure).unwrap();
        (dir, store)
    }

    fn told(store: &Store, query: &Query) -> Vec<String> {
        let row = |row: Result<Row, StoreError>| {
            let row = row.unwrap();
            format!("{} {}", row.bucket, row.state)
        };
        list(store, query).unwrap().map(row).collect()
    }

    #[test]
    fn states_follow_from_releases_and_failures() {
        let (_dir, store) = filled();
        let all = told(&store, &Query::default());
        assert_eq!(
            all,
            [
                "batch=1 old",
                "batch=16 live",
                "batch=8 loose",
                "batch=32 failed"
            ]
        );
        for state in State::ALL {
            let query = Query {
                state: Some(state),
                ..Query::default()
            };
            assert_eq!(told(&store, &query).len(), 1, "{state}");
        }
    }

    #[test]
    fn rows_sort_by_number_and_both_ways() {
        let (_dir, store) = filled();
        let sorted = |sort, descending| {
            let query = Query {
                sort: Some(sort),
                descending,
                ..Query::default()
            };
            let all = told(&store, &query);
            all.iter()
                .map(|row| {
                    row.split(' ').next().unwrap()["batch=".len()..]
                        .parse::<i64>()
                        .unwrap()
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(sorted(Column::Bucket, false), [1, 8, 16, 32]);
        assert_eq!(sorted(Column::Bucket, true), [32, 16, 8, 1]);
        assert_eq!(sorted(Column::Size, true)[0], 16);
        assert_eq!(sorted(Column::State, false), [16, 1, 8, 32]);
        for (name, column) in Column::ALL {
            assert_eq!(sorted(column, false).len(), 4, "{name}");
        }
    }

    #[test]
    fn a_damaged_index_is_said_and_the_files_are_listed() {
        let (_dir, store) = filled();
        let path = store.path().to_owned();
        drop(store);
        let index = rusqlite::Connection::open(path.join("index.sqlite")).unwrap();
        index
            .execute("UPDATE programs SET steps=7 WHERE bucket='batch=16'", [])
            .unwrap();
        drop(index);
        let store = Store::open_read_only(&path).unwrap();
        let query = Query::default();
        let (rows, errors): (Vec<_>, Vec<_>) =
            list(&store, &query).unwrap().partition(Result::is_ok);
        assert_eq!(rows.len(), 4);
        assert!(
            matches!(errors[..], [Err(StoreError::Row { .. })]),
            "{errors:?}"
        );
        let query = Query {
            sort: Some(Column::Age),
            ..query
        };
        let (rows, errors): (Vec<_>, Vec<_>) =
            list(&store, &query).unwrap().partition(Result::is_ok);
        assert_eq!((rows.len(), errors.len()), (4, 1));
    }

    #[test]
    fn globs_and_times_narrow_it() {
        let (_dir, store) = filled();
        let bucket = Some(Pattern::new("batch=1*").unwrap());
        let query = Query {
            bucket,
            ..Query::default()
        };
        assert_eq!(told(&store, &query).len(), 2);
        let module = Some(Pattern::new("dec*").unwrap());
        assert_eq!(
            told(
                &store,
                &Query {
                    module,
                    ..Query::default()
                }
            )
            .len(),
            0
        );
        assert_eq!(
            told(
                &store,
                &Query {
                    until: Some(0),
                    ..Query::default()
                }
            )
            .len(),
            0
        );
        assert_eq!(
            told(
                &store,
                &Query {
                    since: Some(0),
                    ..Query::default()
                }
            )
            .len(),
            4
        );
        let device = Some("cuda".to_owned());
        assert_eq!(
            told(
                &store,
                &Query {
                    device,
                    ..Query::default()
                }
            )
            .len(),
            0
        );
    }
}
