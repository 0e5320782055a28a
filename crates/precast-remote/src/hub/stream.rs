//! A file of a Hub that arrives. One that breaks off goes on where it stopped: at one commit it stays the same.

use std::{
    io::{self, Read},
    sync::Arc,
    thread,
    time::Duration,
};

use bytes::{Buf, Bytes};
use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use reqwest::{Method, StatusCode};
use url::Url;

use super::{
    answer::said,
    client::{Ask, Client, TRIES},
};
use crate::error::RemoteError;

/// A file that arrives.
pub struct Streamed {
    client: Arc<Client>,
    url: Url,
    name: String,
    stream: BoxStream<'static, reqwest::Result<Bytes>>,
    now: Bytes,
    at: u64,
    /// Bytes that come again.
    skip: u64,
    /// How often it broke off since the last byte.
    broken: u32,
}

impl Streamed {
    /// Opens a file, and returns its size; none if there is none.
    pub fn open(
        client: &Arc<Client>,
        url: Url,
        name: &str,
    ) -> Result<Option<(u64, Self)>, RemoteError> {
        let mut file = Self {
            client: client.clone(),
            url,
            name: name.to_owned(),
            stream: stream::empty().boxed(),
            now: Bytes::new(),
            at: 0,
            skip: 0,
            broken: 0,
        };
        let size = file.connect()?;
        Ok(size.map(|size| (size, file)))
    }

    /// Asks for the file from where it stopped. Returns the size of what comes; none if there is no such file.
    fn connect(&mut self) -> Result<Option<u64>, RemoteError> {
        let answer = self.client.ask(&Ask {
            method: Method::GET,
            url: self.url.clone(),
            body: None,
            what: "read",
            name: &self.name,
            from: self.at,
        })?;
        let Some(answer) = answer else {
            return Ok(None);
        };
        // Some storage begins at the start whatever was asked.
        self.skip = match answer.status() {
            StatusCode::PARTIAL_CONTENT => 0,
            _ => self.at,
        };
        let size = answer.content_length().unwrap_or_default();
        self.stream = answer.bytes_stream().boxed();
        Ok(Some(size))
    }
}

impl Read for Streamed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            match self.client.wait(self.stream.next()) {
                None => return Ok(0),
                Some(Ok(mut more)) => {
                    let known = self.skip.min(more.len() as u64);
                    self.skip -= known;
                    more.advance(known as usize);
                    if !more.is_empty() {
                        self.broken = 0;
                    }
                    self.now = more;
                }
                Some(Err(e)) if self.broken >= TRIES => return Err(io::Error::other(said(&e))),
                Some(Err(_)) => {
                    thread::sleep(Duration::from_millis(100 << self.broken));
                    self.broken += 1;
                    let again = self.connect().map_err(io::Error::other)?;
                    again.ok_or_else(|| io::Error::other("it is gone"))?;
                }
            }
        }
        let count = into.len().min(self.now.len());
        let (now, _) = into.split_at_mut(count);
        self.now.copy_to_slice(now);
        self.at += count as u64;
        Ok(count)
    }
}
