//! Sorts rows in another order than that of the index, in little memory for any number of rows.
//!
//! A temporary SQLite database sorts them. It spills to an unnamed file when the rows exceed its cache, and needs no lock of
//! the store while they are read.

use std::{cmp::Ordering, collections::VecDeque, path::Path};

use precast_store::StoreError;
use rusqlite::{Connection, params, types::Value};

use super::Row;

/// By what rows are sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// The request key.
    Id,
    /// Name of the model.
    Model,
    /// Name of the module.
    Module,
    /// Sizes of the bucket, as numbers.
    Bucket,
    /// The state's place among [`State::ALL`](super::State::ALL).
    State,
    /// Name of the target.
    Target,
    /// `cpu` or `cuda`.
    Device,
    /// How many artifacts one run calls.
    Steps,
    /// Bytes of the shared objects.
    Size,
    /// When it was built.
    Age,
    /// When it was last used.
    Used,
}

impl Column {
    /// Every column with the word that selects it.
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
    fn key(self, row: &Row) -> Value {
        let text = |text: &str| Value::Text(text.to_owned());
        match self {
            Self::Id => Value::Blob(row.id.as_bytes().to_vec()),
            Self::Model => text(&row.model),
            Self::Module => text(&row.module),
            Self::Bucket => Value::Blob(bucket_key(&row.bucket)),
            Self::State => Value::Integer(row.state as i64),
            Self::Target => text(&row.target),
            Self::Device => text(&row.device),
            Self::Steps => Value::Integer(row.steps as i64),
            Self::Size => Value::Integer(row.bytes as i64),
            Self::Age => Value::Integer(row.created.saturating_neg()),
            Self::Used => Value::Integer(row.used.unwrap_or(0).saturating_neg()),
        }
    }
}

/// Compares buckets by name and number: `batch=8` before `batch=16`.
pub fn bucket_order(a: &str, b: &str) -> Ordering {
    bucket_key(a).cmp(&bucket_key(b))
}

/// Returns bytes that compare as the names and numbers of `batch=8 seq=128` do, so that 16 comes after 8.
fn bucket_key(bucket: &str) -> Vec<u8> {
    let mut key = Vec::new();
    for part in bucket.split(' ') {
        let (name, size) = part.split_once('=').unwrap_or((part, "0"));
        let size: i64 = size.parse().unwrap_or(0);
        key.extend(name.bytes());
        key.push(0);
        // Negative numbers first.
        key.extend((size as u64 ^ 1 << 63).to_be_bytes());
    }
    key
}

/// How many rows are read back at once.
const PAGE: i64 = 256;

/// Sorted rows.
pub(super) struct Sorted {
    rows: Connection,
    page: VecDeque<Row>,
    /// The last place that was read.
    place: i64,
    done: bool,
}

impl Sorted {
    /// Takes all rows in; what is an error among them goes to `broken`.
    pub(super) fn new(
        rows: impl Iterator<Item = Result<Row, StoreError>>,
        column: Column,
        descending: bool,
        broken: &mut Vec<StoreError>,
    ) -> Result<Self, StoreError> {
        let fill = || {
            // No name: private to this connection, on disk as far as it does not fit into the cache, gone with it.
            let database = Connection::open("")?;
            database.execute_batch(
                "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA locking_mode=EXCLUSIVE;
                 CREATE TABLE row (key, id BLOB, text TEXT);",
            )?;
            database.execute_batch("BEGIN")?;
            let mut insert = database.prepare("INSERT INTO row VALUES (?,?,?)")?;
            for row in rows {
                match row {
                    Ok(row) => {
                        let text = serde_json::to_string(&row).unwrap_or_default();
                        insert.execute(params![column.key(&row), row.id.as_bytes(), text])?;
                    }
                    Err(error) => broken.push(error),
                }
            }
            drop(insert);
            let direction = if descending { "DESC" } else { "ASC" };
            database.execute_batch(&format!(
                "CREATE TABLE place AS SELECT rowid AS at FROM row ORDER BY key {direction}, id;
                 COMMIT;"
            ))?;
            Ok(database)
        };
        Ok(Self {
            rows: fill().map_err(failed)?,
            page: VecDeque::new(),
            place: 0,
            done: false,
        })
    }

    fn next_page(&mut self) -> rusqlite::Result<()> {
        let mut query = self.rows.prepare_cached(
            "SELECT r.text, p.rowid FROM place p JOIN row r ON r.rowid=p.at \
             WHERE p.rowid>?1 AND p.rowid<=?1+?2 ORDER BY p.rowid",
        )?;
        let mut found = query.query(params![self.place, PAGE])?;
        let before = self.place;
        while let Some(row) = found.next()? {
            let text: String = row.get(0)?;
            self.place = row.get(1)?;
            self.page.extend(serde_json::from_str::<Row>(&text));
        }
        self.done = self.place < before + PAGE;
        Ok(())
    }
}

impl Iterator for Sorted {
    type Item = Result<Row, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.page.is_empty()
            && !self.done
            && let Err(error) = self.next_page()
        {
            self.done = true;
            return Some(Err(failed(error)));
        }
        self.page.pop_front().map(Ok)
    }
}

fn failed(error: rusqlite::Error) -> StoreError {
    StoreError::Io {
        what: "sort rows in",
        path: Path::new("the temporary folder").to_owned(),
        source: std::io::Error::other(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_compare_by_name_and_number() {
        let sorted = [
            "batch=-1",
            "batch=1 seq=32",
            "batch=1 seq=128",
            "batch=8",
            "batch=16 seq=1",
            "dynamic",
            "eager",
            "seq=2",
        ];
        for pair in sorted.windows(2) {
            assert_eq!(bucket_order(pair[0], pair[1]), Ordering::Less, "{pair:?}");
        }
        assert_eq!(bucket_order("batch=8", "batch=8"), Ordering::Equal);
    }
}
