//! The tables of the index.

use std::{path::Path, sync::OnceLock};

use rusqlite::{Connection, TransactionBehavior};

use crate::{error::StoreError, layout::StoreLayout, reindex};

/// The first SQLite without a bug that corrupts databases; 3.51.3 fixed it.
const SQLITE: (i32, &str) = (3_051_003, "3.51.3");

const TABLES: &str = include_str!("../index.sql");

/// The version of the tables, which the index has as `user_version`.
pub(super) const KNOWN: i64 = 5;

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Checks the tables of an index. Creates and fills them in a new one. Refuses another version.
pub(super) fn prepare_tables(
    connection: &mut Connection,
    layout: &StoreLayout,
    path: &Path,
) -> Result<(), StoreError> {
    if rusqlite::version_number() < SQLITE.0 {
        return Err(StoreError::OldSqlite {
            found: rusqlite::version().to_owned(),
            needed: SQLITE.1,
        });
    }
    if version(connection).map_err(|e| failed(path, e))? == 0 {
        let mut make = || {
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            // Another process may have created the tables meanwhile.
            if version(&tx)? == 0 && schema(&tx)?.is_empty() {
                tx.execute_batch(TABLES)?;
                reindex::fill(layout, &tx)?;
                tx.pragma_update(None, "user_version", KNOWN)?;
            }
            tx.commit()
        };
        make().map_err(|e| failed(path, e))?;
    }
    check_schema(connection, path)
}

/// Returns the type, name, table and text of everything in a schema.
fn schema(of: &Connection) -> rusqlite::Result<Vec<[Option<String>; 4]>> {
    of.prepare("SELECT type,name,tbl_name,sql FROM main.sqlite_schema ORDER BY 1,2")?
        .query_map([], |row| {
            Ok([row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?])
        })?
        .collect()
}

/// Returns the schema that this code creates.
fn own_schema() -> &'static [[Option<String>; 4]] {
    static OWN: OnceLock<Vec<[Option<String>; 4]>> = OnceLock::new();
    let own = || {
        let fresh = Connection::open_in_memory()?;
        fresh.execute_batch(TABLES)?;
        schema(&fresh)
    };
    OWN.get_or_init(|| own().unwrap_or_default())
}

/// Refuses an index of another version, or with tables, triggers or views other than ours: the source of a store may be
/// unknown.
pub(super) fn check_schema(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let found = version(connection).map_err(|e| failed(path, e))?;
    if found != KNOWN {
        let (path, known) = (path.to_owned(), KNOWN);
        return Err(if found > KNOWN {
            StoreError::Newer { path, found, known }
        } else {
            StoreError::Older { path, found, known }
        });
    }
    if schema(connection).map_err(|e| failed(path, e))? != *own_schema() {
        return Err(StoreError::Schema {
            path: path.to_owned(),
        });
    }
    Ok(())
}

pub(super) fn failed(path: &Path, source: rusqlite::Error) -> StoreError {
    StoreError::Index {
        path: path.to_owned(),
        source,
    }
}
