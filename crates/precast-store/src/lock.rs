//! Locks between processes: four modes over two lock files.
//!
//! | mode | `locks/use` | `locks/add` | taken by | waits for |
//! |---|---|---|---|---|
//! | use | shared | – | taking a lease before a read | delete |
//! | add | shared | shared | publishing one file and its row | rebuild, delete |
//! | rebuild | – | exclusive | making the index again | add, rebuild, delete |
//! | delete | exclusive | exclusive | one batch of gc or repair | all |
//!
//! Adding and reading never wait for each other, and no lock is held while bytes are read or compiled. All locks are
//! `flock`s: they end with their process. A process that waits for an exclusive lock holds `locks/gate`, which shared
//! locks pass through. So a stream of shared locks can't delay it forever.
//!
//! Any process that can open a file can lock it, also with read access only. So lock files and the index (which SQLite
//! locks) have mode 0600, or 0660 where a group shares the store. A process without write access takes no lock and
//! keeps an index in memory.
//!
//! Every wait has a limit ([`Options::patience`](super::Options::patience)) and can be stopped by the caller
//! ([`Store::stop_waiting_when`](super::Store::stop_waiting_when)). Its message names the owner of the lock, from
//! `/proc/locks`.

use std::{
    fs::{self, File, Metadata, TryLockError},
    io::{Read, Seek, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    error::{At, StoreError},
    layout::StoreLayout,
    permissions::Options,
};

/// The time between two attempts to get a lock of another process.
pub(crate) const TICK: Duration = Duration::from_millis(20);
/// Default limits of a wait: for short operations of other processes, and for long ones.
const MOMENT: Duration = Duration::from_secs(60);
const WORK: Duration = Duration::from_secs(600);

/// A wait for another process, with its limit.
pub(crate) struct Patience {
    limit: Duration,
    begin: Instant,
    stop: Option<Arc<AtomicBool>>,
}

impl Patience {
    /// Waits for one tick. Fails at the limit, and once the caller has stopped all waits.
    pub fn wait(&self, to: &'static str, path: &Path) -> Result<(), StoreError> {
        if self.stop.as_ref().is_some_and(|stop| stop.load(Relaxed)) {
            return Err(StoreError::Interrupted { to });
        }
        if self.begin.elapsed() >= self.limit {
            return Err(StoreError::Busy {
                to,
                path: path.to_owned(),
                owner: holders(path).unwrap_or_else(|| "another process".to_owned()),
                seconds: self.limit.as_secs(),
            });
        }
        thread::sleep(TICK);
        Ok(())
    }
}

/// Returns a mode for a file in `folder` that only users with write access to the folder can open.
pub(crate) fn private(folder: &Metadata) -> u32 {
    if folder.mode() & 0o020 == 0 {
        0o600
    } else {
        0o660
    }
}

/// Returns the processes with a lock on a file and their names, as the kernel lists them.
pub(crate) fn holders(path: &Path) -> Option<String> {
    let meta = fs::metadata(path).ok()?;
    let dev = meta.dev();
    let end = format!(
        "{:02x}:{:02x}:{}",
        libc::major(dev),
        libc::minor(dev),
        meta.ino()
    );
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let mut found: Vec<String> = Vec::new();
    for line in locks.lines().filter(|line| !line.contains("->")) {
        // 1: FLOCK  ADVISORY  WRITE 4242 00:2a:1234 0 EOF
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, _, pid, file, ..] = fields[..] else {
            continue;
        };
        if file != end || pid == std::process::id().to_string() {
            continue;
        }
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let holder = match name.trim() {
            "" => format!("pid {pid}"),
            name => format!("pid {pid} ({})", name.escape_debug()),
        };
        if !found.contains(&holder) {
            found.push(holder);
        }
    }
    (!found.is_empty()).then(|| found.join(", "))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Use,
    Add,
    Rebuild,
    Delete,
}

/// A wait for a lock of another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The purpose of the wait, as `add to the store`.
    pub to: &'static str,
    /// The owner of the lock, as written in the lock file: `pid 7 (gc)`. Empty if it is unknown.
    pub owner: String,
    /// The lock's file.
    pub path: PathBuf,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let owner = if self.owner.is_empty() {
            "another process"
        } else {
            &self.owner
        };
        write!(f, "waiting for {owner} to {}", self.to)
    }
}

/// A held lock, released on drop.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    _files: Vec<File>,
}

/// Called when a lock is not free.
type OnWait = Box<dyn Fn(&Waiting) + Send + Sync>;

/// The lock files of one store, and the rules of all waits for other processes.
pub(crate) struct Locks {
    pub layout: StoreLayout,
    patience: Option<Duration>,
    on_wait: OnceLock<OnWait>,
    /// Flag that ends all waits.
    stop: OnceLock<Arc<AtomicBool>>,
}

impl Locks {
    pub fn new(layout: &StoreLayout, options: Options) -> Self {
        Self {
            layout: layout.clone(),
            patience: options.patience,
            on_wait: OnceLock::new(),
            stop: OnceLock::new(),
        }
    }

    /// Waits for the lock `mode`.
    pub fn lock(&self, mode: Mode) -> Result<Guard, StoreError> {
        let to = match mode {
            Mode::Use => "take a lease",
            Mode::Add => "add to the store",
            Mode::Rebuild => "rebuild the index",
            Mode::Delete => "delete from the store",
        };
        let exclusive = matches!(mode, Mode::Rebuild | Mode::Delete);
        let usual = if mode == Mode::Use { MOMENT } else { WORK };
        let patience = self.patience(None, usual);
        let gate = self.take("gate", exclusive, to, &patience)?;
        let mut files = Vec::with_capacity(2);
        if mode != Mode::Rebuild {
            files.push(self.take("use", mode == Mode::Delete, to, &patience)?);
        }
        if mode != Mode::Use {
            files.push(self.take("add", exclusive, to, &patience)?);
        }
        drop(gate);
        Ok(Guard { _files: files })
    }

    fn take(
        &self,
        name: &str,
        exclusive: bool,
        to: &'static str,
        patience: &Patience,
    ) -> Result<File, StoreError> {
        let path = self.layout.root.join("locks").join(name);
        let mut file = open(&self.layout, &path)?;
        let mut notified = false;
        loop {
            let attempt = if exclusive {
                file.try_lock()
            } else {
                file.try_lock_shared()
            };
            match attempt {
                Ok(()) => break,
                Err(TryLockError::Error(e)) => return Err(e).at("lock", &path),
                Err(TryLockError::WouldBlock) => {}
            }
            if !notified && let Some(on_wait) = self.on_wait.get() {
                notified = true;
                let mut owner = owner(&mut file);
                if owner.is_empty() {
                    owner = holders(&path).unwrap_or_default();
                }
                on_wait(&Waiting {
                    to,
                    owner,
                    path: path.clone(),
                });
            }
            patience.wait(to, &path)?;
        }
        if exclusive {
            sign(&mut file, to);
        }
        Ok(file)
    }

    /// Begins a wait. Its limit is `limit`, else the limit of the store's options, else `usual`.
    pub fn patience(&self, limit: Option<Duration>, usual: Duration) -> Patience {
        Patience {
            limit: limit.or(self.patience).unwrap_or(usual),
            begin: Instant::now(),
            stop: self.stop.get().cloned(),
        }
    }

    /// Calls `tell` whenever a lock is not free. Only the first call of this method has an effect.
    pub fn on_wait(&self, tell: impl Fn(&Waiting) + Send + Sync + 'static) {
        let _ = self.on_wait.set(Box::new(tell));
    }

    /// Ends every wait with an error once the flag is set. Only the first call of this method has an effect.
    pub fn stop_waiting_when(&self, stop: Arc<AtomicBool>) {
        let _ = self.stop.set(stop);
    }
}

/// Opens a lock file. Creates a missing one.
pub(crate) fn open(layout: &StoreLayout, path: &Path) -> Result<File, StoreError> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    // The file is overwritten, so a link to another file is refused.
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let folder = path.parent().unwrap_or(Path::new("."));
    options.mode(private(&fs::metadata(folder).at("look at", folder)?));
    let file = options.open(path).at("open the lock", path)?;
    match file.metadata().at("open the lock", path)? {
        meta if meta.is_file() && meta.nlink() <= 1 => {
            layout.accept(path, &file).at("open the lock", path)?;
            Ok(file)
        }
        _ => Err(StoreError::Unsafe {
            path: path.to_owned(),
            why: "a lock is a plain file of its own".to_owned(),
        }),
    }
}

/// Writes the owner of a lock into its file, for the messages of waiting processes. Errors are ignored.
pub(crate) fn sign(file: &mut File, doing: &str) {
    let text = format!("pid {} ({doing})", std::process::id());
    let _ = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(text.as_bytes()));
}

/// Reads the owner of a lock from its file. Accepts only printable text, because any user with write access can change
/// it.
pub(crate) fn owner(file: &mut File) -> String {
    let mut text = String::new();
    let _ = file
        .rewind()
        .and_then(|()| file.take(200).read_to_string(&mut text));
    text.retain(|c| !c.is_control());
    text
}

#[cfg(test)]
mod tests {
    use crate::Store;
    use std::{sync::mpsc, thread, time::Duration};

    use super::{super::testing, *};

    #[test]
    fn adding_and_reading_go_together_and_deleting_reports_its_wait() {
        let (_dir, store) = testing::store();
        let adding = store.0.base().lock(Mode::Add).unwrap();
        let reading = store.0.base().lock(Mode::Use).unwrap();
        drop(store.0.base().lock(Mode::Add).unwrap());
        let (sender, receiver) = mpsc::channel();
        let other = Store::open(store.path()).unwrap();
        other.on_wait(move |waiting| drop(sender.send(waiting.to_string())));
        let deleter = thread::spawn(move || drop(other.0.base().lock(Mode::Delete).unwrap()));
        let waits = "waiting for another process to delete from the store";
        assert_eq!(receiver.recv().unwrap(), waits);
        drop((adding, reading));
        deleter.join().unwrap();
    }

    /// Opens a store again, with a limit to every wait.
    fn impatient(store: &Store) -> Store {
        let options = super::super::Options {
            patience: Some(Duration::from_millis(100)),
            ..Default::default()
        };
        Store::open_with(store.path(), options).unwrap()
    }

    #[test]
    fn a_wait_has_an_end_and_names_who_is_in_the_way() {
        let (_dir, store) = testing::store();
        drop(store.0.base().lock(Mode::Add).unwrap());
        let path = store.path().join("locks/use");
        // Like `flock` in a shell: another process, which writes no owner into the file.
        let mut holder = std::process::Command::new("flock")
            .args(["--shared", "--no-fork"])
            .arg(&path)
            .args(["sleep", "60"])
            .spawn()
            .unwrap();
        let begin = Instant::now();
        while holders(&path).is_none() && begin.elapsed() < MOMENT {
            thread::sleep(TICK);
        }
        let error = impatient(&store).0.base().lock(Mode::Delete).unwrap_err();
        let StoreError::Busy { owner, .. } = error else {
            panic!("{error}");
        };
        assert!(
            owner.starts_with(&format!("pid {}", holder.id())),
            "{owner}"
        );
        drop(store.0.base().lock(Mode::Use).unwrap());
        // The caller can stop a wait.
        let waiting = Store::open(store.path()).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        waiting.stop_waiting_when(stop.clone());
        let waiter = thread::spawn(move || waiting.0.base().lock(Mode::Delete).map(drop));
        thread::sleep(Duration::from_millis(50));
        stop.store(true, Relaxed);
        assert_eq!(testing::refused(waiter.join().unwrap()), "Interrupted");
        holder.kill().unwrap();
        holder.wait().unwrap();
        drop(impatient(&store).0.base().lock(Mode::Delete).unwrap());
    }

    #[test]
    fn who_may_only_read_can_lock_nothing() {
        let (_dir, store) = testing::store();
        let kept = store.objects().put_bytes(b"kept").unwrap();
        store.leases().keep(&[kept]).unwrap();
        drop(store.leases().try_claim(&kept).unwrap().unwrap());
        drop(store.0.base().lock(Mode::Delete).unwrap());
        let _claim = store.leases().try_claim(&kept).unwrap().unwrap();
        let mut lockable = vec![store.layout().index()];
        for folder in ["locks", "locks/keys", "leases"] {
            for entry in fs::read_dir(store.path().join(folder)).unwrap() {
                lockable.push(entry.unwrap().path());
            }
        }
        lockable.retain(|path| path.is_file());
        assert!(lockable.len() >= 5, "{lockable:?}");
        for path in lockable {
            let mode = fs::metadata(&path).unwrap().mode() & 0o777;
            assert_eq!(mode, 0o600, "{}", path.display());
        }
    }

    #[test]
    fn rebuilding_stops_adders_only() {
        let (_dir, store) = testing::store();
        let rebuilding = store.0.base().lock(Mode::Rebuild).unwrap();
        drop(store.0.base().lock(Mode::Use).unwrap());
        let (sender, receiver) = mpsc::channel();
        let other = store.clone();
        thread::spawn(move || {
            drop(other.0.base().lock(Mode::Add).unwrap());
            sender.send(()).unwrap();
        });
        assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err());
        drop(rebuilding);
        receiver.recv().unwrap();
    }
}
