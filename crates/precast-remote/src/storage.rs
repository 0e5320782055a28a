//! Storage that `object_store` knows: a folder, a bucket, plain files over HTTPS.
//!
//! It retries what a server refuses for a while, resumes reads that break off where the server names versions of files, and knows every dialect of a conditional
//! create. Its futures run on a few threads of this process; the callers wait, each in a thread of its own.

use std::{
    io::{self, Read},
    sync::Arc,
};

use bytes::{Buf, Bytes};
use futures_util::StreamExt;
use object_store::{
    Error, ObjectStore, ObjectStoreExt, PutMode, PutPayload, WriteMultipart, path::Path,
};
use tokio::{runtime::Runtime, sync::mpsc};

use crate::{
    carrier::{Body, Carrier, Found, How, Source},
    error::RemoteError,
    work,
};

/// Files up to this size are written in one request; larger ones in parts of it.
const PART: u64 = 8 << 20;
/// Files up to this size are created in one request where that must fail if there is one.
const WHOLE: u64 = 256 << 20;
/// Most parts of a file: S3 takes 10,000.
const MOST_PARTS: u64 = 9_000;
/// Pieces of a body that may wait for its reader: each is of some hundred kilobytes at most.
const AHEAD: usize = 32;
/// How often a create is tried that is refused although there is no file.
const TRIES: usize = 5;
/// Parts of one file that are on their way.
const PARTS: usize = 3;

/// Files in a folder of some storage.
pub struct Storage {
    store: Arc<dyn ObjectStore>,
    /// The folder.
    at: Path,
    /// Whether the storage can list files.
    lists: bool,
    runtime: Arc<Runtime>,
}

impl Storage {
    /// Returns the carrier for a folder of some storage.
    pub fn new(store: Arc<dyn ObjectStore>, at: Path, lists: bool) -> Result<Self, RemoteError> {
        let runtime = Arc::new(work::runtime(at.as_ref())?);
        Ok(Self {
            store,
            at,
            lists,
            runtime,
        })
    }

    /// Returns the path of a file, letter by letter: the names of a store are safe, and have `%` in them.
    fn path(&self, name: &str) -> Result<Path, RemoteError> {
        let path = match (self.at.as_ref(), name) {
            ("", name) => Path::parse(name),
            (at, "") => Path::parse(at),
            (at, name) => Path::parse(format!("{at}/{name}")),
        };
        path.map_err(|e| RemoteError::damaged(name, e.to_string()))
    }

    /// Creates a file in one request. Returns false if there was one, unless `how` is [`How::Any`].
    fn put(&self, name: &str, content: PutPayload, how: How) -> Result<bool, RemoteError> {
        let path = self.path(name)?;
        let mode = match how {
            How::New | How::Content => PutMode::Create,
            How::Any => PutMode::Overwrite,
        };
        let mut left = TRIES;
        loop {
            let put = (self.store).put_opts(&path, content.clone(), mode.clone().into());
            let error = match self.runtime.block_on(put) {
                Ok(_) => return Ok(true),
                Err(e) => e,
            };
            // What a create is answered with that meets another: 412 and 409, and 404 by some servers. 409 does not say
            // that there is a file: the other request may have failed.
            let met_another = matches!(
                error,
                Error::AlreadyExists { .. }
                    | Error::Precondition { .. }
                    | Error::NotModified { .. }
                    | Error::NotFound { .. }
            );
            left -= 1;
            if how == How::Any || !met_another {
                return Err(failed("write", name, &error));
            }
            if self.head(name)?.is_some() {
                return Ok(false);
            }
            if left == 0 {
                return Err(failed("write", name, &error));
            }
        }
    }
}

/// Returns the error for what the storage said.
fn failed(what: &'static str, name: &str, error: &Error) -> RemoteError {
    let name = name.to_owned();
    match error {
        Error::Unauthenticated { source, .. } | Error::PermissionDenied { source, .. } => {
            RemoteError::Denied {
                name,
                why: chain(&**source),
            }
        }
        _ => RemoteError::Storage {
            what,
            name,
            why: chain(error),
        },
    }
}

/// Returns an error with its causes, without those that repeat what was said.
pub fn chain(error: &dyn std::error::Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    text
}

impl Carrier for Storage {
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
        match self.runtime.block_on(self.store.head(&self.path(name)?)) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(failed("look at", name, &e)),
        }
    }

    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
        match self.runtime.block_on(self.store.get(&self.path(name)?)) {
            Ok(found) => {
                let bytes = found.meta.size;
                let mut stream = found.into_stream();
                let (send, arrived) = mpsc::channel(AHEAD);
                self.runtime.spawn(async move {
                    while let Some(part) = stream.next().await {
                        if send.send(part).await.is_err() {
                            break;
                        }
                    }
                });
                let read = Box::new(Streamed {
                    arrived,
                    now: Bytes::new(),
                    _runtime: self.runtime.clone(),
                });
                Ok(Some(Body { bytes, read }))
            }
            Err(Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(failed("read", name, &e)),
        }
    }

    fn create(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
        how: How,
    ) -> Result<bool, RemoteError> {
        let path = self.path(name)?;
        let wrong = |source| RemoteError::Read {
            name: name.to_owned(),
            source,
        };
        // What is not an object is in memory anyway, and a file in parts has no condition.
        if bytes <= PART || (how == How::New && bytes <= WHOLE) {
            let mut content = Vec::with_capacity(bytes as usize);
            from.take(bytes).read_to_end(&mut content).map_err(wrong)?;
            return self.put(name, content.into(), how);
        }
        if how != How::Any && self.head(name)?.is_some() {
            return Ok(false);
        }
        let part_size = PART.max(bytes / MOST_PARTS);
        let upload = self.runtime.block_on(self.store.put_multipart(&path));
        let upload = upload.map_err(|e| failed("write", name, &e))?;
        let mut write = WriteMultipart::new_with_chunk_size(upload, part_size as usize);
        let mut left = bytes;
        let sent = loop {
            if left == 0 {
                break Ok(());
            }
            let mut part = vec![0; left.min(part_size) as usize];
            if let Err(e) = from.read_exact(&mut part) {
                break Err(wrong(e));
            }
            left -= part.len() as u64;
            // In the runtime: a part is a task of its own.
            let put = self.runtime.block_on(async {
                let ready = write.wait_for_capacity(PARTS).await;
                if ready.is_ok() {
                    write.put(part.into());
                }
                ready
            });
            if let Err(e) = put {
                break Err(failed("write", name, &e));
            }
        };
        match sent {
            Ok(()) => {
                let done = self.runtime.block_on(write.finish());
                done.map(|_| true).map_err(|e| failed("write", name, &e))
            }
            Err(e) => {
                // Nothing is visible; a server removes the parts itself in time if this fails too.
                let _ = self.runtime.block_on(write.abort());
                Err(e)
            }
        }
    }

    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
        let found = self.found(folder)?;
        Ok(found.map(|all| all.into_iter().map(|one| one.name).collect()))
    }

    fn found(&self, folder: &str) -> Result<Option<Vec<Found>>, RemoteError> {
        /// More than any folder of a store that is of use.
        const MOST: usize = 1_000_000;
        if !self.lists {
            return Ok(None);
        }
        let path = self.path(folder)?;
        let all = self.runtime.block_on(async {
            let mut found = self.store.list(Some(&path));
            let mut all = Vec::new();
            while let Some(meta) = found.next().await {
                let meta = meta.map_err(|e| failed("list", folder, &e))?;
                let Some(parts) = meta.location.prefix_match(&self.at) else {
                    continue;
                };
                let parts: Vec<String> = parts.map(|part| part.as_ref().to_owned()).collect();
                all.push(Found {
                    name: parts.join("/"),
                    bytes: meta.size,
                    modified: meta.last_modified.timestamp(),
                });
                if all.len() > MOST {
                    return Err(RemoteError::damaged(
                        folder,
                        format!("it has more than {MOST} files"),
                    ));
                }
            }
            Ok(all)
        })?;
        Ok(Some(all))
    }

    fn delete(&self, name: &str) -> Result<(), RemoteError> {
        match self.runtime.block_on(self.store.delete(&self.path(name)?)) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(failed("delete", name, &e)),
        }
    }
}

/// A body that arrives, while what has arrived is hashed and written.
struct Streamed {
    arrived: mpsc::Receiver<object_store::Result<Bytes>>,
    now: Bytes,
    /// Where it arrives.
    _runtime: Arc<Runtime>,
}

impl Read for Streamed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            match self.arrived.blocking_recv() {
                None => return Ok(0),
                Some(Ok(more)) => self.now = more,
                Some(Err(e)) => return Err(io::Error::other(chain(&e))),
            }
        }
        let count = into.len().min(self.now.len());
        self.now.copy_to_slice(&mut into[..count]);
        Ok(count)
    }
}
