//! The SQLite index, for fast lookups. All of it can be rebuilt from the files, except the last-use stamps.
//!
//! It uses a rollback journal, because stores lie on network mounts and read-only images. `user_version` is the version
//! of the schema.

mod schema;

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, ErrorCode, OpenFlags, Params, Row, Transaction, TransactionBehavior};
use rustix::fs::{Access, access};

use self::schema::{check_schema, failed, prepare_tables};
use super::{
    error::{At, StoreError},
    layout::StoreLayout,
    lock::{Locks, Patience, private},
    rows::BadSum,
};

/// Maximum wait of a reader for a process that writes the index.
const PATIENCE: Duration = Duration::from_secs(60);

/// An open index.
pub(crate) struct Index {
    locks: Arc<Locks>,
    /// Whether writes go to the index file of the store.
    own: bool,
    /// Absent before the first use of an index in memory.
    open: Mutex<Option<Open>>,
}

/// A connection, and the inode of its file; 0 for one in memory.
struct Open {
    connection: Connection,
    inode: u64,
}

impl Index {
    fn new(locks: &Arc<Locks>, own: bool, open: Option<Open>) -> Self {
        Self {
            locks: locks.clone(),
            own,
            open: Mutex::new(open),
        }
    }

    /// Opens the index for reading and writing. Rebuilds a missing one from the files.
    pub fn open(locks: &Arc<Locks>) -> Result<Self, StoreError> {
        let open = open_own(&locks.layout)?;
        Ok(Self::new(locks, true, Some(open)))
    }

    /// Returns whether this user may read the store's index. Its mode allows only writers, because any reader could
    /// lock it.
    pub fn may_be_read(layout: &StoreLayout) -> bool {
        let read = access(layout.index(), Access::READ_OK);
        !matches!(read, Err(rustix::io::Errno::ACCESS))
    }

    /// Opens the index for reading only; never writes, not even a lock file.
    pub fn open_read_only(locks: &Arc<Locks>) -> Result<Self, StoreError> {
        let path = locks.layout.index();
        refuse(&locks.layout)?;
        let flags = base(OpenFlags::SQLITE_OPEN_READ_ONLY);
        let open = || prepare(Connection::open_with_flags(&path, flags)?);
        let connection = open().map_err(|e| failed(&path, e))?;
        check_schema(&connection, &path)?;
        let inode = 0;
        Ok(Self::new(locks, false, Some(Open { connection, inode })))
    }

    /// Returns an index in memory. Its first use builds it from the files.
    pub fn in_memory(locks: &Arc<Locks>) -> Self {
        Self::new(locks, false, None)
    }

    /// Like [`Self::in_memory`]. The first write opens the index file of the store.
    pub fn until_rebuilt(locks: &Arc<Locks>) -> Self {
        Self::new(locks, true, None)
    }

    /// Returns the rows of a query.
    pub fn query<T>(
        &self,
        query: &str,
        params: impl Params,
        read: impl FnMut(&Row) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, StoreError> {
        self.with(|index| {
            let mut query = index.prepare_cached(query)?;
            query.query_map(params, read)?.collect()
        })
    }

    /// Runs `read` on the connection.
    pub fn with<T>(
        &self,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let mut open = self.lock();
        let connection = self.opened(&mut open)?;
        read(connection).map_err(|e| self.failed(e))
    }

    /// Returns the connection. The first call for an index in memory builds it.
    fn opened<'a>(&self, open: &'a mut Option<Open>) -> Result<&'a Connection, StoreError> {
        let there = match open.take() {
            Some(there) => there,
            None => make_in_memory(&self.locks.layout)?,
        };
        Ok(&open.insert(there).connection)
    }

    /// Runs `write` in one transaction, and commits it on success.
    pub fn write<T>(
        &self,
        write: impl FnOnce(&Transaction) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        self.write_within(None, write)
    }

    /// Like [`Self::write`], with a limit of the wait for other processes.
    pub fn write_within<T>(
        &self,
        limit: Option<Duration>,
        write: impl FnOnce(&Transaction) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let mut open = self.lock();
        let inode_was = open.as_ref().map(|open| open.inode);
        if self.own && inode(&self.locks.layout.index()) != inode_was {
            // Another process rebuilt or removed the index.
            *open = Some(open_own(&self.locks.layout)?);
        }
        let connection = self.opened(&mut open)?;
        let patience = self.locks.patience(limit, PATIENCE);
        let begin = || Transaction::new_unchecked(connection, TransactionBehavior::Immediate);
        let tx = self.insist(connection, &patience, begin)?;
        let done = write(&tx).map_err(|e| self.failed(e))?;
        self.insist(connection, &patience, || tx.execute_batch("COMMIT"))?;
        Ok(done)
    }

    /// Repeats an attempt while another process has locked the index.
    fn insist<T>(
        &self,
        connection: &Connection,
        patience: &Patience,
        attempt: impl Fn() -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let limit = |limit| connection.busy_timeout(limit).map_err(|e| self.failed(e));
        limit(Duration::ZERO)?;
        let done = loop {
            match attempt() {
                Err(e) if e.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                    if let Err(e) = patience.wait("write the index", &self.locks.layout.index()) {
                        break Err(e);
                    }
                }
                other => break other.map_err(|e| self.failed(e)),
            }
        };
        limit(PATIENCE)?;
        done
    }

    /// Converts an error of SQLite. A row with a wrong check sum is [`StoreError::Row`].
    fn failed(&self, error: rusqlite::Error) -> StoreError {
        let path = self.locks.layout.index();
        if let rusqlite::Error::FromSqlConversionFailure(_, _, inner) = &error
            && let Some(BadSum(table)) = inner.downcast_ref()
        {
            return StoreError::Row { path, table };
        }
        failed(&path, error)
    }

    /// A panic leaves the connection in a good state: SQLite rolls the transaction back.
    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn make_in_memory(layout: &StoreLayout) -> Result<Open, StoreError> {
    let path = layout.index();
    let mut connection = Connection::open_in_memory()
        .and_then(prepare)
        .map_err(|e| failed(&path, e))?;
    prepare_tables(&mut connection, layout, &path)?;
    let inode = 0;
    Ok(Open { connection, inode })
}

/// Creates the file of the index with a mode that only users with write access to the store can open: any process that
/// opens the file can lock it.
///
/// An existing file is not opened here: closing it would end the locks of other connections of this process.
fn make_private(layout: &StoreLayout) -> Result<(), StoreError> {
    let path = layout.index();
    if fs::symlink_metadata(&path).is_err() {
        let folder = fs::metadata(&layout.root).at("look at", &layout.root)?;
        let tmp = layout.tmp();
        let empty = tempfile::Builder::new()
            .permissions(Permissions::from_mode(private(&folder)))
            .tempfile_in(&tmp);
        let empty = empty.at("write a file in", &tmp)?.into_temp_path();
        // Another process may create the file first. On a file system without hard links, SQLite creates it.
        let _ = fs::hard_link(&empty, &path);
    }
    Ok(())
}

fn open_own(layout: &StoreLayout) -> Result<Open, StoreError> {
    let path = layout.index();
    refuse(layout)?;
    make_private(layout)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
    let open = || {
        let connection = prepare(Connection::open_with_flags(&path, base(flags))?)?;
        connection.pragma_update(None, "journal_mode", "DELETE")?;
        // EXTRA also syncs the folder after a commit, so that a deleted row stays deleted.
        connection.pragma_update(None, "synchronous", "EXTRA")?;
        connection.pragma_update(None, "foreign_keys", true)?;
        Ok(connection)
    };
    let mut connection = open().map_err(|e| failed(&path, e))?;
    prepare_tables(&mut connection, layout, &path)?;
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

/// Refuses links, which SQLite would follow and write through, and a journal of another user, which it would apply.
fn refuse(layout: &StoreLayout) -> Result<(), StoreError> {
    let path = layout.index();
    for path in [path.with_extension("sqlite-journal"), path] {
        match fs::symlink_metadata(&path) {
            Ok(meta) if !meta.is_file() => {
                return Err(StoreError::Unsafe {
                    path,
                    why: "an index is a plain file, not a link or a folder".to_owned(),
                });
            }
            Ok(_) => layout.look(&path)?,
            Err(_) => {}
        }
    }
    Ok(())
}

fn inode(path: &Path) -> Option<u64> {
    Some(fs::symlink_metadata(path).ok()?.ino())
}

fn base(flags: OpenFlags) -> OpenFlags {
    flags | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_EXRESCODE
}

#[cfg(test)]
mod tests {
    use super::{super::testing, schema::KNOWN, *};
    use crate::{Options, Store, rows::ObjectRow};

    #[test]
    fn a_full_disk_is_no_damage_of_the_index() {
        let (_dir, store) = testing::store();
        let index = store.index();
        index
            .with(|own| own.query_row("PRAGMA max_page_count = 1", [], |_| Ok(())))
            .unwrap();
        let many = |tx: &Transaction| {
            let rows = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9999)";
            tx.execute_batch(&format!("CREATE TABLE more AS {rows} SELECT i FROM n"))
        };
        let error = index.write(many).unwrap_err();
        assert!(!error.is_index(), "{error}");
        assert!(error.hint().contains("free some space"), "{}", error.hint());
        let damaged = index.write(|tx| tx.execute_batch("SELECT * FROM nowhere"));
        assert!(damaged.unwrap_err().is_index());
    }

    #[test]
    fn an_index_of_this_version_with_other_tables_is_refused_and_reindexed() {
        let (_dir, store) = testing::store();
        let one = store.objects().put_bytes(b"one").unwrap();
        let path = store.layout().index();
        fs::remove_file(&path).unwrap();
        let sql = format!("CREATE TABLE objects (digest); PRAGMA user_version={KNOWN}");
        let other = Connection::open(&path).unwrap();
        other.execute_batch(&sql).unwrap();
        drop(other);
        let before = fs::read(&path).unwrap();
        let error = Store::open(store.path()).unwrap_err();
        assert!(matches!(error, StoreError::Schema { .. }), "{error}");
        // A reader uses an index in memory and does not change the file.
        let reader = Store::open_read_only(store.path()).unwrap();
        assert!(reader.objects().row(&one).unwrap().is_some());
        assert_eq!(fs::read(&path).unwrap(), before);
        let repairing = Store::open_for_repair(store.path(), Default::default()).unwrap();
        repairing.audit().reindex().unwrap();
        let again = Store::open(store.path()).unwrap();
        assert!(again.objects().row(&one).unwrap().is_some());
    }

    #[test]
    fn a_reader_that_stays_is_waited_for_with_an_end_and_harms_no_load() {
        let (_dir, store) = testing::store();
        let digest = store.objects().put_bytes(b"x").unwrap();
        let reader = Connection::open(store.layout().index()).unwrap();
        let begun = reader.execute_batch("BEGIN; SELECT * FROM objects");
        begun.unwrap();
        let options = Options {
            patience: Some(Duration::from_millis(100)),
            ..Options::default()
        };
        let waiting = Store::open_with(store.path(), options).unwrap();
        assert_eq!(testing::refused(waiting.objects().put_bytes(b"y")), "Busy");
        // A load writes nothing to the index, so it does not wait.
        let begin = std::time::Instant::now();
        let loading = Store::open(store.path()).unwrap();
        let _hold = loading.leases().hold(&[digest]).unwrap();
        assert_eq!(&loading.objects().map(&digest).unwrap()[..], b"x");
        loading.records().uses.add(&digest);
        drop((_hold, loading));
        assert!(begin.elapsed() < PATIENCE / 4);
        reader.execute_batch("COMMIT").unwrap();
        waiting.objects().put_bytes(b"y").unwrap();
    }

    #[test]
    fn an_index_in_memory_is_made_when_it_is_needed() {
        let (_dir, store) = testing::store();
        let digest = store.objects().put_bytes(b"x").unwrap();
        let index = Index::in_memory(&store.0.base().locks);
        assert!(index.lock().is_none());
        let row = index.with(|index| ObjectRow::find(index, &digest));
        assert!(row.unwrap().is_some() && index.lock().is_some());
    }

    #[test]
    fn a_changed_row_is_an_error() {
        let (_dir, store) = testing::store();
        let digest = store.objects().put_bytes(b"x").unwrap();
        let find = || store.index().with(|index| ObjectRow::find(index, &digest));
        assert_eq!(find().unwrap().unwrap().size, 1);
        let change = |tx: &Transaction| tx.execute("UPDATE objects SET size=9", []);
        store.index().write(change).unwrap();
        let StoreError::Row { table, .. } = find().unwrap_err() else {
            panic!("another error");
        };
        assert_eq!(table, "objects");
    }

    #[test]
    fn an_index_that_is_removed_under_an_open_store_comes_back() {
        let (_dir, store) = testing::store();
        let one = store.objects().put_bytes(b"one").unwrap();
        fs::remove_file(store.layout().index()).unwrap();
        let two = store.objects().put_bytes(b"two").unwrap();
        let other = Store::open(store.path()).unwrap();
        for digest in [one, two] {
            assert!(other.objects().row(&digest).unwrap().is_some());
        }
    }
}
