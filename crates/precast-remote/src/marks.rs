//! Marks: what a gc is about to delete, said where every push sees it.
//!
//! A push takes a file that is there for sent. If no release needs that file, a gc may be about to delete it. Neither
//! can lock the other out, so each writes first and looks then:
//!
//! | gc | push |
//! |---|---|
//! | writes its mark, with the names of what goes | writes the listing of its release |
//! | lists releases and listings again; a new one ends it | reads the marks; waits while one has a file of the listing |
//! | deletes, then deletes its mark | looks at every file again, sends what is gone, and publishes the release |
//!
//! If the listing came before the second list, the gc stops. If not, the mark was there before the push looked for it,
//! or the gc is done, and what it took is sent again. A gc deletes for a while only and then starts anew, so an old
//! mark is that of one that died.

use std::{
    collections::BTreeSet,
    io::Cursor,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::{
    carrier::{Found, How, LARGEST, small},
    error::RemoteError,
    remote::Remote,
};

const MARK: &str = "tmp/gc-";
/// How long a gc deletes after its mark.
const WORKS: Duration = Duration::from_secs(10 * 60);
/// The age of a mark, in seconds, after which its gc is dead.
const DEAD: i64 = 20 * 60;

/// The names of what a gc is about to delete.
#[derive(Serialize, Deserialize)]
struct Named {
    files: Vec<String>,
}

/// A mark of this gc.
pub(crate) struct Mark {
    name: String,
    begun: Instant,
}

impl Mark {
    /// Says what will be deleted.
    pub fn put(remote: &Remote, files: Vec<String>) -> Result<Self, RemoteError> {
        let begun = Instant::now();
        let name = format!("{MARK}{}.json", stamp());
        let text = serde_json::to_vec(&Named { files }).unwrap_or_default();
        let bytes = text.len() as u64;
        (remote.carrier).create(&name, &mut Cursor::new(text), bytes, How::New)?;
        Ok(Self { name, begun })
    }

    /// Returns whether a push may take its gc for dead soon.
    pub fn is_late(&self) -> bool {
        self.begun.elapsed() > WORKS
    }

    /// Removes it: nothing is deleted any more.
    pub fn end(self, remote: &Remote) -> Result<(), RemoteError> {
        remote.carrier.delete(&self.name)
    }
}

impl Remote {
    /// Returns what gcs are about to delete; none if this storage has no gc.
    pub(crate) fn marked(&self) -> Result<Option<BTreeSet<String>>, RemoteError> {
        let Some(found) = self.carrier.found("tmp")? else {
            return Ok(None);
        };
        let marks = found.iter().filter(|one| one.name.starts_with(MARK));
        let marks: Vec<&Found> = marks.collect();
        let mut names = BTreeSet::new();
        if marks.is_empty() {
            return Ok(Some(names));
        }
        let now = self.clock()?;
        for mark in marks {
            if now - mark.modified > DEAD {
                continue;
            }
            // None: its gc is done meanwhile.
            let Some(text) = small(&*self.carrier, &mark.name, LARGEST)? else {
                continue;
            };
            let named: Named = serde_json::from_slice(&text)
                .map_err(|e| RemoteError::damaged(&mark.name, e.to_string()))?;
            names.extend(named.files);
        }
        Ok(Some(names))
    }

    /// Returns the time by the clock of the storage, in seconds since 1970: that of a file which it writes now.
    pub(crate) fn clock(&self) -> Result<i64, RemoteError> {
        let name = format!("tmp/clock-{}", stamp());
        (self.carrier).create(&name, &mut Cursor::new(b"-"), 1, How::New)?;
        let found = self.carrier.found("tmp");
        self.carrier.delete(&name)?;
        let found = found?.unwrap_or_default();
        let found = found.into_iter().find(|one| one.name == name);
        let found = found.ok_or_else(|| RemoteError::Storage {
            what: "list",
            name,
            why: "a file that was just written is not in the list".to_owned(),
        })?;
        Ok(found.modified)
    }
}

/// Returns a text that no other process has.
fn stamp() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_nanos());
    let thread = format!("{:?}", std::thread::current().id());
    let thread: String = thread.chars().filter(char::is_ascii_digit).collect();
    format!("{now}-{}-{thread}", std::process::id())
}
