//! Who may do what at the same time.
//!
//! | mode | `locks/use` | `locks/add` | taken by | waits for |
//! |---|---|---|---|---|
//! | use | shared | – | taking a lease on what will be read | delete |
//! | add | shared | shared | publishing one file and its row | rebuild, delete |
//! | rebuild | – | exclusive | making the index again | add, rebuild, delete |
//! | delete | exclusive | exclusive | one batch of gc or repair | all |
//!
//! So adding never waits for readers, nor they for it, and nobody holds a lock while reading bytes or compiling. All
//! are `flock`s: they end with their process. Who wants an exclusive lock closes `locks/gate` while waiting, which
//! those that share pass through, so that a stream of them can't keep it out for ever.

use std::{
    fs::{File, TryLockError},
    io::{Read, Seek, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use super::{
    Store,
    error::{At, StoreError},
    layout::Layout,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Use,
    Add,
    Rebuild,
    Delete,
}

/// What is being waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What this process wants to do.
    pub to: &'static str,
    /// What the process that is in the way says about itself, as `pid 7 (gc)`; empty when it says nothing.
    pub owner: String,
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

/// Held until it is dropped.
#[derive(Debug)]
pub(crate) struct Guard {
    _files: Vec<File>,
}

impl Store {
    /// Waits until `mode` is free. Returns at once, with nothing held, for a store that can't be written.
    pub(crate) fn lock(&self, mode: Mode) -> Result<Guard, StoreError> {
        if self.is_read_only() {
            return Ok(Guard { _files: Vec::new() });
        }
        let to = match mode {
            Mode::Use => "take a lease",
            Mode::Add => "add to the store",
            Mode::Rebuild => "rebuild the index",
            Mode::Delete => "delete from the store",
        };
        let exclusive = matches!(mode, Mode::Rebuild | Mode::Delete);
        let gate = self.take("gate", exclusive, to)?;
        let mut files = Vec::with_capacity(2);
        if mode != Mode::Rebuild {
            files.push(self.take("use", mode == Mode::Delete, to)?);
        }
        if mode != Mode::Use {
            files.push(self.take("add", exclusive, to)?);
        }
        drop(gate);
        Ok(Guard { _files: files })
    }

    fn take(&self, name: &str, exclusive: bool, to: &'static str) -> Result<File, StoreError> {
        let path = self.path().join("locks").join(name);
        let mut file = open(self.layout(), &path)?;
        let tried = match exclusive {
            true => file.try_lock(),
            false => file.try_lock_shared(),
        };
        match tried {
            Ok(()) => {}
            Err(TryLockError::Error(e)) => return Err(e).at("lock", &path),
            Err(TryLockError::WouldBlock) => {
                self.tell(&Waiting {
                    to,
                    owner: owner(&mut file),
                    path: path.clone(),
                });
                match exclusive {
                    true => file.lock().at("lock", &path)?,
                    false => file.lock_shared().at("lock", &path)?,
                }
            }
        }
        if exclusive {
            sign(&mut file, to);
        }
        Ok(file)
    }
}

/// Opens a lock file, making it when it is missing.
pub(crate) fn open(layout: &Layout, path: &Path) -> Result<File, StoreError> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    // What it says is overwritten: that must not be a file elsewhere.
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
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

/// Writes into a lock's file who has it, for those that wait. Only a message: that it fails changes nothing.
pub(crate) fn sign(file: &mut File, doing: &str) {
    let text = format!("pid {} ({doing})", std::process::id());
    let _ = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(text.as_bytes()));
}

/// Reads who has a lock; printable text only, as anyone who can write the store can write it.
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
    use std::{sync::mpsc, thread, time::Duration};

    use super::{super::testing, *};

    #[test]
    fn adding_and_reading_go_together_and_deleting_waits_and_says_so() {
        let (_dir, store) = testing::store();
        let adding = store.lock(Mode::Add).unwrap();
        let reading = store.lock(Mode::Use).unwrap();
        drop(store.lock(Mode::Add).unwrap());
        let (tell, told) = mpsc::channel();
        let other = Store::open(store.path()).unwrap();
        other.on_wait(move |waiting| drop(tell.send(waiting.to_string())));
        let deleter = thread::spawn(move || drop(other.lock(Mode::Delete).unwrap()));
        assert_eq!(
            told.recv().unwrap(),
            "waiting for another process to delete from the store"
        );
        drop((adding, reading));
        deleter.join().unwrap();
    }

    #[test]
    fn rebuilding_stops_adders_only() {
        let (_dir, store) = testing::store();
        let rebuilding = store.lock(Mode::Rebuild).unwrap();
        drop(store.lock(Mode::Use).unwrap());
        let (tell, told) = mpsc::channel();
        let other = store.clone();
        thread::spawn(move || {
            drop(other.lock(Mode::Add).unwrap());
            tell.send(()).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err());
        drop(rebuilding);
        told.recv().unwrap();
    }
}
