//! The SQLite index: what makes a lookup fast. It holds nothing that the files don't say, but for the last-use stamps.
//!
//! Rollback journal, because stores lie on network mounts and read-only images. Every row carries a check sum over its
//! own fields, so that a flipped bit in the index is an error and not another answer. `user_version` counts the schema.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior, types::Type};

use super::{error::StoreError, layout::Layout, reindex};
use crate::digest::Hasher;

/// The first SQLite without the corruption that was fixed in 3.51.3.
const SQLITE: (i32, &str) = (3_051_003, "3.51.3");

/// Each entry takes the index from the version of its position to the next.
const MIGRATIONS: [&str; 1] = [include_str!("index.sql")];

const KNOWN: i64 = MIGRATIONS.len() as i64;

/// How long to wait for another process that writes the index.
const PATIENCE: Duration = Duration::from_secs(60);

/// An open index.
pub(crate) struct Index {
    layout: Layout,
    /// Whether this is the store's own file, and it may be written.
    own: bool,
    open: Mutex<Open>,
}

/// A connection, and the file it is to.
struct Open {
    connection: Connection,
    inode: u64,
}

impl Index {
    /// Opens the index for reading and writing. One that is missing is made from the files, an older one is migrated.
    pub fn open(layout: &Layout) -> Result<Self, StoreError> {
        Ok(Self {
            layout: layout.clone(),
            own: true,
            open: Mutex::new(open_own(layout)?),
        })
    }

    /// Opens the index for reading only; never writes, not even a lock file.
    pub fn open_read_only(layout: &Layout) -> Result<Self, StoreError> {
        let path = layout.index();
        refuse_link(&path)?;
        let flags = base(OpenFlags::SQLITE_OPEN_READ_ONLY);
        let open = || {
            let connection = prepare(Connection::open_with_flags(&path, flags)?)?;
            let version = version(&connection)?;
            Ok((connection, version))
        };
        let (connection, version) = open().map_err(|e| failed(&path, e))?;
        if version != KNOWN {
            return Err(newer(&path, version));
        }
        check_schema(&connection, &path)?;
        Ok(Self::other(layout, connection))
    }

    /// Makes an index of the files in memory, for a store whose own can't be used.
    pub fn in_memory(layout: &Layout) -> Result<Self, StoreError> {
        let path = layout.index();
        let mut connection = Connection::open_in_memory()
            .and_then(prepare)
            .map_err(|e| failed(&path, e))?;
        migrate(&mut connection, layout, &path)?;
        Ok(Self::other(layout, connection))
    }

    /// Makes an index in memory that gives way to the store's own once that can be opened.
    pub fn until_rebuilt(layout: &Layout) -> Result<Self, StoreError> {
        Ok(Self {
            own: true,
            ..Self::in_memory(layout)?
        })
    }

    fn other(layout: &Layout, connection: Connection) -> Self {
        let open = Open {
            connection,
            inode: 0,
        };
        Self {
            layout: layout.clone(),
            own: false,
            open: Mutex::new(open),
        }
    }

    /// Runs `read` on the connection.
    pub fn with<T>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        read(&self.lock().connection).map_err(|e| self.failed(e))
    }

    /// Runs `write` in one transaction that is committed when it succeeds.
    pub fn write<T>(
        &self,
        write: impl FnOnce(&Transaction) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let mut open = self.lock();
        if self.own && inode(&self.layout.index()) != Some(open.inode) {
            // Another process rebuilt the index, or somebody removed it.
            *open = open_own(&self.layout)?;
        }
        let connection = &mut open.connection;
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
                path: self.layout.index(),
                table,
            };
        }
        failed(&self.layout.index(), error)
    }

    /// A panic can't leave the connection in a bad state: SQLite rolls back what was not committed.
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_own(layout: &Layout) -> Result<Open, StoreError> {
    let path = layout.index();
    refuse_link(&path)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
    let open = || {
        let connection = prepare(Connection::open_with_flags(&path, base(flags))?)?;
        connection.pragma_update(None, "journal_mode", "DELETE")?;
        // EXTRA also syncs the folder after a commit: a row that is gone stays gone.
        connection.pragma_update(None, "synchronous", "EXTRA")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        Ok(connection)
    };
    let mut connection = open().map_err(|e| failed(&path, e))?;
    migrate(&mut connection, layout, &path)?;
    let inode = inode(&path).unwrap_or(0);
    Ok(Open { connection, inode })
}

fn prepare(connection: Connection) -> rusqlite::Result<Connection> {
    connection.busy_timeout(PATIENCE)?;
    connection.set_prepared_statement_cache_capacity(64);
    connection.pragma_update(None, "mmap_size", 0)?;
    connection.pragma_update(None, "cell_size_check", true)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    Ok(connection)
}

fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.pragma_query_value(None, "user_version", |row| row.get(0))
}

/// Takes an index from whatever version it has to the one known here; fills one that was just made.
fn migrate(connection: &mut Connection, layout: &Layout, path: &Path) -> Result<(), StoreError> {
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
    if !(0..=KNOWN).contains(&found) {
        return Err(newer(path, found));
    }
    let mut run = || {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Another process may have been faster.
        let from = version(&tx)?;
        for step in MIGRATIONS.iter().skip(from.max(0) as usize) {
            tx.execute_batch(step)?;
        }
        if from == 0 {
            reindex::fill(layout, &tx)?;
        }
        tx.pragma_update(None, "user_version", KNOWN)?;
        tx.commit()
    };
    run().map_err(|e| failed(path, e))
}

/// Refuses an index with other tables, triggers or views than ours: a store may come from anywhere.
fn check_schema(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let schema = |of: &Connection| {
        of.prepare("SELECT type,name,tbl_name,sql FROM sqlite_schema ORDER BY 1,2")?
            .query_map([], |row| {
                let columns = (0..4).map(|at| row.get::<_, Option<String>>(at));
                columns.collect::<rusqlite::Result<Vec<_>>>()
            })?
            .collect::<rusqlite::Result<Vec<_>>>()
    };
    let own = || {
        let fresh = Connection::open_in_memory()?;
        MIGRATIONS
            .iter()
            .try_for_each(|step| fresh.execute_batch(step))?;
        schema(&fresh)
    };
    static OWN: OnceLock<Vec<Vec<Option<String>>>> = OnceLock::new();
    let expected = OWN.get_or_init(|| own().unwrap_or_default());
    match schema(connection).map_err(|e| failed(path, e))? == *expected {
        true => Ok(()),
        false => Err(StoreError::Row {
            path: path.to_owned(),
            table: "sqlite_schema",
        }),
    }
}

/// SQLite would follow a link, and write what it leads to.
fn refuse_link(path: &Path) -> Result<(), StoreError> {
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.is_file() => Err(StoreError::Unsafe {
            path: path.to_owned(),
            why: "an index is a plain file, not a link or a folder".to_owned(),
        }),
        _ => Ok(()),
    }
}

fn inode(path: &Path) -> Option<u64> {
    Some(fs::symlink_metadata(path).ok()?.ino())
}

fn base(flags: OpenFlags) -> OpenFlags {
    flags | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_EXRESCODE
}

fn newer(path: &Path, found: i64) -> StoreError {
    StoreError::Newer {
        path: path.to_owned(),
        found,
        known: KNOWN,
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
    use super::{super::testing, *};
    use crate::{Store, store::rows::ObjectRow};

    #[test]
    fn a_newer_index_is_refused_and_left_alone() {
        let (_dir, store) = testing::store();
        let path = store.layout().index();
        store
            .index()
            .with(|index| index.pragma_update(None, "user_version", 99))
            .unwrap();
        let before = fs::read(&path).unwrap();
        for told in [
            Store::open(store.path()),
            Store::open_read_only(store.path()),
        ] {
            assert!(
                matches!(told, Err(StoreError::Newer { found: 99, .. })),
                "{told:?}"
            );
        }
        assert_eq!(fs::read(&path).unwrap(), before);
    }

    #[test]
    fn a_changed_row_is_an_error() {
        let (_dir, store) = testing::store();
        let digest = store.put_bytes(b"x").unwrap();
        let find = || store.index().with(|index| ObjectRow::find(index, &digest));
        assert_eq!(find().unwrap().unwrap().size, 1);
        store
            .index()
            .write(|tx| tx.execute("UPDATE objects SET size=9", []))
            .unwrap();
        let told = find().unwrap_err();
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

    #[test]
    fn an_index_that_is_removed_under_an_open_store_comes_back() {
        let (_dir, store) = testing::store();
        let one = store.put_bytes(b"one").unwrap();
        fs::remove_file(store.layout().index()).unwrap();
        let two = store.put_bytes(b"two").unwrap();
        let other = Store::open(store.path()).unwrap();
        assert!(other.object(&one).unwrap().is_some() && other.object(&two).unwrap().is_some());
    }
}
