//! The schema of the index, and the way to it from older versions.

use std::{path::Path, sync::OnceLock};

use rusqlite::{Connection, TransactionBehavior};

use crate::{error::StoreError, layout::Layout, reindex};

/// The first SQLite without the corruption that was fixed in 3.51.3.
const SQLITE: (i32, &str) = (3_051_003, "3.51.3");

/// Each entry takes the index from the version of its position to the next.
const MIGRATIONS: [&str; 3] = [
    include_str!("../index.sql"),
    include_str!("../partial.sql"),
    include_str!("../shims.sql"),
];

pub(super) const KNOWN: i64 = MIGRATIONS.len() as i64;

pub(super) fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Takes an index from whatever version it has to the one known here; fills one that was just made.
pub(super) fn migrate(
    connection: &mut Connection,
    layout: &Layout,
    path: &Path,
) -> Result<(), StoreError> {
    if rusqlite::version_number() < SQLITE.0 {
        return Err(StoreError::OldSqlite {
            found: rusqlite::version().to_owned(),
            needed: SQLITE.1,
        });
    }
    let found = version(connection).map_err(|e| failed(path, e))?;
    if found == KNOWN {
        return check_schema(connection, path);
    }
    if found > KNOWN {
        return Err(other_version(path, found));
    }
    let mut run = || {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Another process may have been faster.
        let found = version(&tx)?;
        if found < KNOWN {
            let from = usize::try_from(found).unwrap_or(0);
            let stepped = from > 0 && steps(&tx, from).is_ok() && schema(&tx)? == *own_schema();
            if !stepped {
                make_again(layout, &tx)?;
            }
            tx.pragma_update(None, "user_version", KNOWN)?;
        }
        tx.commit()
    };
    run().map_err(|e| failed(path, e))
}

/// Makes the rows of programs again whose records an earlier version replaced when it was cut off. It had marked them.
pub(super) fn finish_replaced(
    connection: &mut Connection,
    layout: &Layout,
) -> rusqlite::Result<()> {
    let marked = "SELECT id FROM marked WHERE kind='replaced'";
    if !connection.prepare(marked)?.exists([])? {
        return Ok(());
    }
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute_batch(&format!(
        "DELETE FROM program_artifacts WHERE program IN ({marked}); DELETE FROM programs WHERE id IN ({marked});
         DELETE FROM marked WHERE kind='replaced'"
    ))?;
    reindex::fill(layout, &tx)?;
    tx.commit()
}

fn steps(to: &Connection, from: usize) -> rusqlite::Result<()> {
    let mut steps = MIGRATIONS.iter().skip(from);
    steps.try_for_each(|step| to.execute_batch(step))
}

/// Makes all tables again from the files, whatever was there; keeps the last-use stamps, which no file has.
fn make_again(layout: &Layout, to: &Connection) -> rusqlite::Result<()> {
    let old = schema(to)?;
    let uses = |entry: &&Entry| entry[1].as_deref() == Some("uses");
    let keeps = match (old.iter().find(uses), own_schema().iter().find(uses)) {
        (Some(is), should) => Some(is) == should,
        (None, _) => false,
    };
    if keeps {
        to.execute_batch("CREATE TEMP TABLE kept AS SELECT id,at,sum FROM main.uses")?;
    }
    // Triggers and views before the tables that they are about, so that nothing of theirs runs.
    for kind in ["trigger", "view", "table"] {
        let of_kind = |entry: &&Entry| entry[0].as_deref() == Some(kind);
        for name in old.iter().filter(of_kind).filter_map(|e| e[1].as_deref()) {
            if !name.starts_with("sqlite_") {
                let name = name.replace('"', "\"\"");
                to.execute_batch(&format!("DROP {kind} IF EXISTS main.\"{name}\""))?;
            }
        }
    }
    steps(to, 0)?;
    if keeps {
        to.execute_batch("INSERT INTO main.uses SELECT * FROM temp.kept; DROP TABLE temp.kept")?;
    }
    reindex::fill(layout, to)
}

/// Type, name, table and text of one thing in a schema.
type Entry = [Option<String>; 4];

fn schema(of: &Connection) -> rusqlite::Result<Vec<Entry>> {
    of.prepare("SELECT type,name,tbl_name,sql FROM main.sqlite_schema ORDER BY 1,2")?
        .query_map([], |row| {
            Ok([row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?])
        })?
        .collect()
}

/// Returns the schema that this code makes.
pub(super) fn own_schema() -> &'static Vec<Entry> {
    static OWN: OnceLock<Vec<Entry>> = OnceLock::new();
    let own = || {
        let fresh = Connection::open_in_memory()?;
        steps(&fresh, 0)?;
        schema(&fresh)
    };
    OWN.get_or_init(|| own().unwrap_or_default())
}

/// Refuses an index with other tables, triggers or views than ours: a store may come from anywhere.
pub(super) fn check_schema(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    match schema(connection).map_err(|e| failed(path, e))? == *own_schema() {
        true => Ok(()),
        false => Err(StoreError::Schema {
            path: path.to_owned(),
        }),
    }
}

/// Returns the error for an index whose version is not the one known here.
pub(super) fn other_version(path: &Path, found: i64) -> StoreError {
    let (path, known) = (path.to_owned(), KNOWN);
    match found > KNOWN {
        true => StoreError::Newer { path, found, known },
        false => StoreError::Older { path, found, known },
    }
}

pub(super) fn failed(path: &Path, source: rusqlite::Error) -> StoreError {
    StoreError::Index {
        path: path.to_owned(),
        source,
    }
}
