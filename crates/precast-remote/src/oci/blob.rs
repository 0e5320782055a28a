//! A blob that arrives. Where the connection breaks off it goes on from there, and its digest is checked at its end.

use std::{
    io::{self, Read},
    sync::Arc,
    thread,
    time::Duration,
};

use bytes::{Buf, Bytes};
use futures_util::{StreamExt, stream::BoxStream};
use oci_client::{
    Client, Reference,
    client::{BlobResponse, SizedStream},
};
use precast_store::digest::Hasher;
use tokio::runtime::Runtime;

use super::documents::Blob;

/// How often a blob may break off with nothing new, and the pause before it goes on.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(500);

/// A blob that arrives.
pub struct Arriving {
    client: Client,
    at: Reference,
    blob: Blob,
    stream: BoxStream<'static, io::Result<Bytes>>,
    now: Bytes,
    arrived: u64,
    hasher: Hasher,
    breaks: u32,
    runtime: Arc<Runtime>,
}

impl Arriving {
    pub fn new(
        client: Client,
        at: Reference,
        blob: Blob,
        opened: SizedStream,
        runtime: Arc<Runtime>,
    ) -> Self {
        Self {
            client,
            at,
            blob,
            stream: opened.stream,
            now: Bytes::new(),
            arrived: 0,
            hasher: Hasher::default(),
            breaks: 0,
            runtime,
        }
    }

    /// Asks for the rest, after a break for this reason. Not every registry hands out parts.
    fn go_on(&mut self, why: io::Error) -> io::Result<()> {
        self.breaks += 1;
        if self.breaks > TRIES {
            return Err(why);
        }
        thread::sleep(PAUSE);
        let (client, at, arrived) = (self.client.clone(), self.at.clone(), self.arrived);
        let digest = self.blob.name();
        let rest = self.runtime.spawn(async move {
            let rest = client.pull_blob_stream_partial(&at, &*digest, arrived, None);
            rest.await
        });
        match self.runtime.block_on(rest) {
            Ok(Ok(BlobResponse::Partial(rest))) => self.stream = rest.stream,
            Ok(Ok(BlobResponse::Full(whole))) if arrived == 0 => self.stream = whole.stream,
            Ok(Ok(BlobResponse::Full(_))) => return Err(why),
            Ok(Err(_)) | Err(_) => {
                let broken = io::Error::new(why.kind(), why.to_string());
                self.stream = futures_util::stream::iter([Err(broken)]).boxed();
            }
        }
        Ok(())
    }
}

impl Read for Arriving {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            let next = self.runtime.block_on(self.stream.next());
            let is_whole = self.arrived == self.blob.bytes;
            match next {
                Some(Ok(more)) => {
                    self.arrived += more.len() as u64;
                    if self.arrived > self.blob.bytes {
                        return Err(io::Error::other("it is longer than its manifest says"));
                    }
                    self.hasher.update(&more);
                    self.now = more;
                    self.breaks = 0;
                }
                None if is_whole => {
                    // A stream that ended may say anything when it is asked once more.
                    self.stream = futures_util::stream::empty().boxed();
                    if self.hasher.clone().finish() != self.blob.digest {
                        return Err(io::Error::other(
                            "it has another digest than its manifest says",
                        ));
                    }
                    return Ok(0);
                }
                Some(Err(error)) if is_whole => return Err(error),
                Some(Err(error)) => self.go_on(error)?,
                None => self.go_on(io::ErrorKind::UnexpectedEof.into())?,
            }
        }
        let count = into.len().min(self.now.len());
        self.now.copy_to_slice(&mut into[..count]);
        Ok(count)
    }
}
