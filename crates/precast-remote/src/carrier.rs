//! A carrier: files by name, somewhere else. Few functions; everything above them is the same for all storage, but for
//! three questions whose usual answer stands here.
//!
//! A name is a path with `/`, relative to the place of the remote. No function holds a whole large file in memory.

use std::io::{self, Cursor, Read, Seek};

use precast_store::Digest;

use crate::error::RemoteError;

/// A file to create. Some storage needs the digest of a file before its bytes, and a request that failed sends them
/// again.
pub trait Source: Read + Send {
    /// Returns the digest of the whole file, and goes to its start.
    fn digest(&mut self) -> io::Result<Digest>;

    /// Goes to its start.
    fn rewind(&mut self) -> io::Result<()>;
}

impl<T: AsRef<[u8]> + Send> Source for Cursor<T> {
    fn digest(&mut self) -> io::Result<Digest> {
        self.set_position(0);
        Ok(Digest::of(self.get_ref().as_ref()))
    }

    fn rewind(&mut self) -> io::Result<()> {
        Seek::rewind(self)
    }
}

/// A file that is being read.
pub struct Body {
    /// Its size, as the other side says.
    pub bytes: u64,
    /// Its bytes.
    pub read: Box<dyn Read + Send>,
}

/// A file in a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// When it was last written, by the clock of the storage, in seconds since 1970.
    pub modified: i64,
}

/// How a file is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Only if there is none of this name: a record, a release.
    New,
    /// As [`Self::New`], but two writers of a large file may both win: an object, whose content is the same.
    Content,
    /// Whatever is there: what can be computed again.
    Any,
}

/// Files by name.
pub trait Carrier: Send + Sync {
    /// Returns the size of a file; none if there is no such file.
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError>;

    /// Opens a file; none if there is no such file.
    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError>;

    /// Creates a file of `bytes` bytes, visible whole or not at all. Returns false if there was one, unless
    /// `how` is [`How::Any`].
    fn create(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
        how: How,
    ) -> Result<bool, RemoteError>;

    /// Returns the names of all files below a folder; none if this storage has no lists, as plain static files.
    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError>;

    /// As [`Self::list`], with sizes and times; none if this storage does not say them, and then it has no gc.
    fn found(&self, _folder: &str) -> Result<Option<Vec<Found>>, RemoteError> {
        Ok(None)
    }

    /// Deletes a file. No error if there is none.
    fn delete(&self, name: &str) -> Result<(), RemoteError>;

    /// Returns whether it is known that a file is not created twice; none if it has to be tried.
    fn refuses_twice(&self) -> Option<bool> {
        None
    }

    /// Returns whether each file lies there by itself under its name, as in a folder. Without that, no web server has the
    /// files under these names, and none is written again every few seconds: there is no list of releases for such a
    /// server, and no lease.
    fn is_folder(&self) -> bool {
        true
    }

    /// Ends a push, with the name of the release that it has found or published: what was created is visible after it.
    fn finish(&self, _release: Option<&str>) -> Result<(), RemoteError> {
        Ok(())
    }
}

/// The file that marks a place as a remote.
pub const MARKER: &str = "precast-store.json";

/// Maximum bytes of a file that is read whole: a record or a listing.
pub const LARGEST: u64 = 256 << 20;

/// Reads a file of at most `most` bytes.
pub fn small(carrier: &dyn Carrier, name: &str, most: u64) -> Result<Option<Vec<u8>>, RemoteError> {
    let Some(body) = carrier.get(name)? else {
        return Ok(None);
    };
    let most = most.min(LARGEST);
    let large = || RemoteError::damaged(name, format!("it has more than {most} bytes"));
    if body.bytes > most {
        return Err(large());
    }
    let mut text = Vec::new();
    let read = body.read.take(most + 1).read_to_end(&mut text);
    let read = read.map_err(|source| RemoteError::Read {
        name: name.to_owned(),
        source,
    })?;
    if read as u64 > most {
        return Err(large());
    }
    Ok(Some(text))
}
