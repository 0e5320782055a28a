//! The SQLite index: what makes a lookup fast. It holds nothing that the files don't say, but for the last-use stamps.
//!
//! Rollback journal, because stores lie on network mounts and read-only images. Every row carries a check sum over its
//! own fields, so that a flipped bit in the index is an error and not another answer. `user_version` counts the schema.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior, types::Type};

use super::error::StoreError;
use crate::digest::Hasher;

/// The first SQLite without the corruption that was fixed in 3.51.3.
const SQLITE: (i32, &str) = (3_051_003, "3.51.3");

/// Each entry takes the index from the version of its position to the next.
const MIGRATIONS: [&str; 1] = [include_str!("index.sql")];

/// How long to wait for another process that writes the index.
const PATIENCE: Duration = Duration::from_secs(60);

/// Puts the rows of all files into an empty index.
pub(crate) type Fill<'a> = dyn Fn(&Connection) -> rusqlite::Result<()> + 'a;

/// An open index.
pub(crate) struct Index {
    path: PathBuf,
    connection: Mutex<Connection>,
}

impl Index {
    /// Opens the index for reading and writing, making or migrating it. `fill` puts rows into one that was just made.
    pub fn open(path: &Path, fill: &Fill) -> Result<Self, StoreError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let index = Self::connect(path, Connection::open_with_flags(path, base(flags)))?;
        index.with(|connection| {
            connection.pragma_update(None, "journal_mode", "DELETE")?;
            connection.pragma_update(None, "synchronous", "FULL")?;
            connection.pragma_update(None, "foreign_keys", true)
        })?;
        index.migrate(fill)?;
        Ok(index)
    }

    /// Opens the index for reading only; never writes, not even a lock file.
    pub fn open_read_only(path: &Path) -> Result<Self, StoreError> {
        let flags = base(OpenFlags::SQLITE_OPEN_READ_ONLY);
        let index = Self::connect(path, Connection::open_with_flags(path, flags))?;
        let version = index.version()?;
        match version == MIGRATIONS.len() as i64 {
            true => Ok(index),
            false => Err(newer(path, version)),
        }
    }

    /// Makes an index in memory, for a store whose own can't be used.
    pub fn in_memory(fill: &Fill) -> Result<Self, StoreError> {
        let index = Self::connect(Path::new(":memory:"), Connection::open_in_memory())?;
        index.migrate(fill)?;
        Ok(index)
    }

    fn connect(path: &Path, opened: rusqlite::Result<Connection>) -> Result<Self, StoreError> {
        if rusqlite::version_number() < SQLITE.0 {
            return Err(StoreError::OldSqlite {
                found: rusqlite::version().to_owned(),
                needed: SQLITE.1,
            });
        }
        let index = Self {
            path: path.to_owned(),
            connection: Mutex::new(opened.map_err(|e| failed(path, e))?),
        };
        index.with(|connection| {
            connection.busy_timeout(PATIENCE)?;
            connection.set_prepared_statement_cache_capacity(64);
            connection.pragma_update(None, "mmap_size", 0)?;
            connection.pragma_update(None, "cell_size_check", true)?;
            connection.pragma_update(None, "trusted_schema", false)
        })?;
        Ok(index)
    }

    fn version(&self) -> Result<i64, StoreError> {
        self.with(|connection| {
            connection.pragma_query_value(None, "user_version", |row| row.get(0))
        })
    }

    fn migrate(&self, fill: &Fill) -> Result<(), StoreError> {
        let known = MIGRATIONS.len() as i64;
        let found = self.version()?;
        if found > known || found < 0 {
            return Err(newer(&self.path, found));
        }
        if found == known {
            return Ok(());
        }
        self.write(|tx| {
            // Another process may have been faster.
            let from: i64 = tx.pragma_query_value(None, "user_version", |row| row.get(0))?;
            for step in MIGRATIONS.iter().skip(from.max(0) as usize) {
                tx.execute_batch(step)?;
            }
            if from == 0 {
                fill(tx)?;
            }
            tx.pragma_update(None, "user_version", known)
        })
    }

    /// Runs `read` on the connection.
    pub fn with<T>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        read(&self.lock()).map_err(|e| self.failed(e))
    }

    /// Runs `write` in one transaction that is committed when it succeeds.
    pub fn write<T>(
        &self,
        write: impl FnOnce(&Transaction) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let mut connection = self.lock();
        let run = || {
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let done = write(&tx)?;
            tx.commit()?;
            Ok(done)
        };
        run().map_err(|e| self.failed(e))
    }

    /// Returns the error for a failing statement; a row whose check sum is wrong gets its own.
    fn failed(&self, error: rusqlite::Error) -> StoreError {
        if let rusqlite::Error::FromSqlConversionFailure(_, _, inner) = &error
            && let Some(BadSum(table)) = inner.downcast_ref()
        {
            return StoreError::Row {
                path: self.path.clone(),
                table,
            };
        }
        failed(&self.path, error)
    }

    /// A panic can't leave the connection in a bad state: SQLite rolls back what was not committed.
    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn base(flags: OpenFlags) -> OpenFlags {
    flags | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_EXRESCODE
}

fn newer(path: &Path, found: i64) -> StoreError {
    StoreError::Newer {
        path: path.to_owned(),
        found,
        known: MIGRATIONS.len() as i64,
    }
}

fn failed(path: &Path, source: rusqlite::Error) -> StoreError {
    StoreError::Index {
        path: path.to_owned(),
        source,
    }
}

/// The check sum of a row did not match.
#[derive(Debug, thiserror::Error)]
#[error("a row of `{0}` has a wrong check sum")]
struct BadSum(&'static str);

/// Returns the error for a row of `table` whose check sum is wrong.
pub(crate) fn bad_sum(table: &'static str) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Integer, Box::new(BadSum(table)))
}

/// Builds the check sum of one row: its table, then every field with its length before it.
pub(crate) struct Sum(Hasher);

impl Sum {
    pub fn new(table: &str) -> Self {
        Self(Hasher::default()).field(table.as_bytes())
    }

    pub fn field(mut self, bytes: &[u8]) -> Self {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    pub fn text(self, text: &str) -> Self {
        self.field(text.as_bytes())
    }

    pub fn int(self, value: i64) -> Self {
        self.field(&value.to_le_bytes())
    }

    /// Returns the sum as SQLite keeps it.
    pub fn finish(self) -> i64 {
        let digest = self.0.finish();
        let mut first = [0; 8];
        first.copy_from_slice(&digest.as_bytes()[..8]);
        i64::from_le_bytes(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_index_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("index.sqlite");
        let nothing: &Fill = &|_| Ok(());
        let index = Index::open(&path, nothing).unwrap();
        index
            .with(|index| index.pragma_update(None, "user_version", 99))
            .unwrap();
        drop(index);
        let before = std::fs::read(&path).unwrap();
        for told in [
            Index::open(&path, nothing).err(),
            Index::open_read_only(&path).err(),
        ] {
            assert!(
                matches!(told, Some(StoreError::Newer { found: 99, .. })),
                "{told:?}"
            );
        }
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    #[test]
    fn a_changed_row_is_an_error() {
        use crate::{Digest, store::rows::ObjectRow};
        let index = Index::in_memory(&|_| Ok(())).unwrap();
        let digest = Digest::of(b"x");
        let row = ObjectRow {
            digest,
            size: 1,
            stored: 2,
            created: 3,
        };
        index.write(|tx| row.insert(tx)).unwrap();
        assert_eq!(
            index.with(|index| ObjectRow::find(index, &digest)).unwrap(),
            Some(row)
        );
        index
            .write(|tx| tx.execute("UPDATE objects SET size=9", []))
            .unwrap();
        let told = index
            .with(|index| ObjectRow::find(index, &digest))
            .unwrap_err();
        assert!(
            matches!(
                told,
                StoreError::Row {
                    table: "objects",
                    ..
                }
            ),
            "{told}"
        );
    }
}
