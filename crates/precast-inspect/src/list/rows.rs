//! Rows in the order of the index: built programs, then failures.

use precast_store::{Dated, Digest, Filter, ProgramRow, Store, StoreError, record::Failure};

use super::{Query, Row, State};

/// Returns every row of the query, unsorted.
pub(super) fn rows(
    store: &Store,
    query: &Query,
) -> impl Iterator<Item = Result<Row, StoreError>> + use<> {
    let filter = Filter {
        model: query.model.clone(),
        device: query.device.clone(),
        ..Filter::default()
    };
    let built = Built {
        rows: Box::new(store.records().programs(filter.clone())),
        reader: Reader::new(store),
        filter,
        last: None,
        from_files: false,
    };
    let failures = matches!(query.state, None | Some(State::Failed));
    let failures = failures
        .then(|| store.records().failures())
        .into_iter()
        .flatten();
    let there = store.clone();
    let failed = failures.filter_map(move |failure| failed(&there, failure).transpose());
    let query = query.clone();
    built
        .chain(failed)
        .filter(move |row| row.as_ref().map_or(true, |row| query.matches(row)))
}

/// Returns the row of a failure; none for a program that was built later.
fn failed(store: &Store, failure: Dated<Failure>) -> Result<Option<Row>, StoreError> {
    let (failure, created) = failure?;
    if store.records().has_program(&failure.id)? {
        return Ok(None);
    }
    Ok(Some(Row {
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
    }))
}

/// Built programs from the index, and after a damaged row from the files.
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
                    if error.is_index() && !self.from_files {
                        self.from_files = true;
                        if let Ok(store) = {
                            let store = &self.reader.store;
                            Store::open_without_index(store.path(), store.options())
                        } {
                            self.rows = Box::new(store.records().programs(self.filter.clone()));
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

/// Creates rows. The newest release of the current model is cached.
struct Reader {
    store: Store,
    newest: Option<(String, Option<u64>)>,
}

impl Reader {
    fn new(store: &Store) -> Self {
        Self {
            store: store.clone(),
            newest: None,
        }
    }

    fn row(&mut self, row: ProgramRow) -> Result<Row, StoreError> {
        let newest = match &self.newest {
            Some((model, newest)) if *model == row.model => *newest,
            _ => {
                let newest = self.store.releases().newest(&row.model)?;
                self.newest = Some((row.model.clone(), newest));
                newest
            }
        };
        let state = match self.store.releases().released(&row.id)? {
            None => match self.store.releases().partly_released(&row.id)? {
                Some(_) => State::Partial,
                None => State::Loose,
            },
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
