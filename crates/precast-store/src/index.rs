//! The SQLite index, for fast lookups. All of it can be rebuilt from the files, except the last-use stamps.
//!
//! It uses a rollback journal, because stores lie on network mounts and read-only images. Every row has a checksum over
//! its own fields, so that a flipped bit is an error and not a wrong answer. `user_version` is the version of the schema.

mod schema;

use std::{
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, atomic::AtomicBool},
    time::Duration,
};

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior};
use rustix::fs::{Access, access};

use self::schema::{check_schema, failed, prepare_tables};
use super::{
    error::{At, StoreError},
    layout::Layout,
    lock::{Patience, private},
    sum::BadSum,
};

/// How long to wait for another process that writes the index.
const PATIENCE: Duration = Duration::from_secs(60);

/// An open index.
pub(crate) struct Index {
    layout: Layout,
    /// Whether this is the store's own file, and it may be written.
    own: bool,
    /// None until it is made in memory.
    open: Mutex<Option<Open>>,
    /// How long to wait for others.
    pub patience: Option<Duration>,
    stop: OnceLock<Arc<AtomicBool>>,
}

/// A connection, and the file it is to.
struct Open {
    connection: Connection,
    inode: u64,
}

impl Index {
    /// Opens the index for reading and writing. One that is missing is made from the files.
    pub fn open(layout: &Layout) -> Result<Self, StoreError> {
        Ok(Self {
            layout: layout.clone(),
            own: true,
            open: Mutex::new(Some(open_own(layout)?)),
            patience: None,
            stop: OnceLock::new(),
        })
    }

    /// Returns whether this user may read the store's index. Only those may who may write it: a reader could lock it.
    pub fn may_be_read(layout: &Layout) -> bool {
        let read = access(layout.index(), Access::READ_OK);
        !matches!(read, Err(rustix::io::Errno::ACCESS))
    }

    /// Makes an index in memory when something is looked up in it.
    pub fn when_needed(layout: &Layout) -> Self {
        Self {
            layout: layout.clone(),
            own: false,
            open: Mutex::default(),
            patience: None,
            stop: OnceLock::new(),
        }
    }

    pub fn stop_waiting_when(&self, stop: Arc<AtomicBool>) {
        let _ = self.stop.set(stop);
    }

    /// Opens the index for reading only; never writes, not even a lock file.
    pub fn open_read_only(layout: &Layout) -> Result<Self, StoreError> {
        let path = layout.index();
        refuse(layout)?;
        let flags = base(OpenFlags::SQLITE_OPEN_READ_ONLY);
        let open = || prepare(Connection::open_with_flags(&path, flags)?);
        let connection = open().map_err(|e| failed(&path, e))?;
        check_schema(&connection, &path)?;
        Ok(Self::other(layout, connection))
    }

    /// Makes an index of the files in memory, for a store whose own can't be used.
    pub fn in_memory(layout: &Layout) -> Result<Self, StoreError> {
        Ok(Self::other(layout, make_in_memory(layout)?))
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
            open: Mutex::new(Some(open)),
            ..Self::when_needed(layout)
        }
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

    /// Returns the connection, after making an index in memory if that was put off.
    fn opened<'a>(&self, open: &'a mut Option<Open>) -> Result<&'a Connection, StoreError> {
        let there = match open.take() {
            Some(there) => there,
            None => Open {
                connection: make_in_memory(&self.layout)?,
                inode: 0,
            },
        };
        Ok(&open.insert(there).connection)
    }

    /// Runs `write` in one transaction that is committed when it succeeds.
    pub fn write<T>(
        &self,
        write: impl FnOnce(&Transaction) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        self.write_within(None, write)
    }

    /// As [`Self::write`], and waits for others no longer than this.
    pub fn write_within<T>(
        &self,
        patience: Option<Duration>,
        write: impl FnOnce(&Transaction) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let mut open = self.lock();
        let inode_was = open.as_ref().map(|open| open.inode);
        if self.own && inode(&self.layout.index()) != inode_was {
            // Another process rebuilt or removed the index.
            *open = Some(open_own(&self.layout)?);
        }
        let connection = self.opened(&mut open)?;
        let patience = Patience::new(patience.or(self.patience), &self.stop);
        let begin = || Transaction::new_unchecked(connection, TransactionBehavior::Immediate);
        let tx = self.insist(connection, &patience, begin)?;
        let done = write(&tx).map_err(|e| self.failed(e))?;
        self.insist(connection, &patience, || tx.execute_batch("COMMIT"))?;
        Ok(done)
    }

    /// Tries again while another process has the index.
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
                    if let Err(e) = patience.wait("write the index", &self.layout.index()) {
                        break Err(e);
                    }
                }
                other => break other.map_err(|e| self.failed(e)),
            }
        };
        limit(PATIENCE)?;
        done
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
    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn make_in_memory(layout: &Layout) -> Result<Connection, StoreError> {
    let path = layout.index();
    let mut connection = Connection::open_in_memory()
        .and_then(prepare)
        .map_err(|e| failed(&path, e))?;
    prepare_tables(&mut connection, layout, &path)?;
    Ok(connection)
}

/// Makes the file of the index, or repairs its mode, so that only users who may write the store can open it: any process
/// that opens the file can lock it.
///
/// It is not opened here: to close it would end the locks that other connections of this process have on it.
fn make_private(layout: &Layout) -> Result<(), StoreError> {
    let path = layout.index();
    let folder = fs::metadata(&layout.root).at("look at", &layout.root)?;
    let wanted = Permissions::from_mode(private(&folder));
    match fs::symlink_metadata(&path) {
        Ok(meta) if meta.mode() & 0o777 & !wanted.mode() == 0 => {}
        // Who does not own it can't, and need not.
        Ok(_) => drop(fs::set_permissions(&path, wanted)),
        Err(_) => {
            let tmp = layout.tmp();
            let empty = tempfile::Builder::new()
                .permissions(wanted)
                .tempfile_in(&tmp);
            let empty = empty.at("write a file in", &tmp)?.into_temp_path();
            // Another process may be faster; where there are no hard links SQLite makes it.
            let _ = fs::hard_link(&empty, &path);
        }
    }
    Ok(())
}

fn open_own(layout: &Layout) -> Result<Open, StoreError> {
    let path = layout.index();
    refuse(layout)?;
    make_private(layout)?;
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

/// SQLite would follow a link, and write what it leads to; and it would believe a journal that others left.
fn refuse(layout: &Layout) -> Result<(), StoreError> {
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

    /// Replaces the index by one that `sql` makes, with other versions than ours.
    fn replaced(store: &Store, sql: &str) -> std::path::PathBuf {
        let path = store.layout().index();
        fs::remove_file(&path).unwrap();
        Connection::open(&path).unwrap().execute_batch(sql).unwrap();
        path
    }

    #[test]
    fn an_index_with_other_tables_or_of_an_older_version_is_refused_and_reindexed() {
        let (_dir, store) = testing::store();
        let one = store.objects().put_bytes(b"one").unwrap();
        for (tables, version) in [("objects", KNOWN), ("objects", 0), ("other", KNOWN - 1)] {
            let path = replaced(
                &store,
                &format!("CREATE TABLE {tables} (digest); PRAGMA user_version={version}"),
            );
            let before = fs::read(&path).unwrap();
            let error = Store::open(store.path()).unwrap_err();
            match error {
                StoreError::Schema { .. } => assert_eq!(version, KNOWN),
                StoreError::Older { found, .. } => assert_eq!(version, found),
                other => panic!("{other}"),
            }
            assert!(error.hint().contains("--reindex"));
            // A reader makes one in memory and leaves this one as it is.
            let reader = Store::open_read_only(store.path()).unwrap();
            assert!(reader.objects().row(&one).unwrap().is_some());
            assert_eq!(fs::read(&path).unwrap(), before);
            let repairing = Store::open_for_repair(store.path(), Default::default()).unwrap();
            repairing.audit().reindex().unwrap();
            let again = Store::open(store.path()).unwrap();
            assert!(again.objects().row(&one).unwrap().is_some());
        }
    }

    #[test]
    fn a_reader_that_stays_is_waited_for_with_an_end_and_harms_no_load() {
        let (_dir, store) = testing::store();
        let digest = store.objects().put_bytes(b"x").unwrap();
        let reader = Connection::open(store.layout().index()).unwrap();
        reader
            .execute_batch("BEGIN; SELECT * FROM objects")
            .unwrap();
        let options = Options {
            patience: Some(Duration::from_millis(100)),
            ..Options::default()
        };
        let waiting = Store::open_with(store.path(), options).unwrap();
        let error = waiting.objects().put_bytes(b"y").unwrap_err();
        assert!(matches!(error, StoreError::Busy { .. }), "{error}");
        // A load writes nothing that it would have to wait for.
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
        let index = Index::when_needed(store.layout());
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
        store
            .index()
            .write(|tx| tx.execute("UPDATE objects SET size=9", []))
            .unwrap();
        let error = find().unwrap_err();
        assert!(
            matches!(
                error,
                StoreError::Row {
                    table: "objects",
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn an_index_that_is_removed_under_an_open_store_comes_back() {
        let (_dir, store) = testing::store();
        let one = store.objects().put_bytes(b"one").unwrap();
        fs::remove_file(store.layout().index()).unwrap();
        let two = store.objects().put_bytes(b"two").unwrap();
        let other = Store::open(store.path()).unwrap();
        assert!(
            other.objects().row(&one).unwrap().is_some()
                && other.objects().row(&two).unwrap().is_some()
        );
    }
}
