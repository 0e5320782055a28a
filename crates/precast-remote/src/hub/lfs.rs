//! Large files of a Hub, by the batch API of Git LFS: the Hub names a place for what it lacks, and the bytes go there.
//!
//! A file is known by the SHA-256 of its bytes. It is in the repository when a commit names it.

use std::{collections::BTreeMap, io::Cursor};

use bytes::Bytes;
use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

use super::client::{Ask, Client, LFS};
use crate::{carrier::Source, error::RemoteError};

/// Most bytes of a part that a Hub asks for: it is in memory.
const LARGEST_PART: u64 = 64 << 20;

/// What a commit says of a large file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// SHA-256, in hexadecimal.
    pub oid: String,
    pub bytes: u64,
}

#[derive(Deserialize)]
struct Batch {
    objects: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    oid: String,
    /// None if the Hub has it.
    actions: Option<Actions>,
    error: Option<Fault>,
}

#[derive(Deserialize)]
struct Fault {
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    /// For a file in parts: `chunk_size`, and a URL for each number.
    header: Option<BTreeMap<String, Value>>,
}

/// Brings a file to the Hub, unless it is there. `batch` is the URL of the API, and `branch` where a commit will name it.
pub fn upload(
    client: &Client,
    batch: &Url,
    branch: &str,
    name: &str,
    from: &mut dyn Source,
    bytes: u64,
) -> Result<Pointer, RemoteError> {
    let digest = from.digest().map_err(|source| RemoteError::Read {
        name: name.to_owned(),
        source,
    })?;
    let to = Upload {
        client,
        name,
        pointer: Pointer {
            oid: digest.hex(),
            bytes,
        },
    };
    let pointer = &to.pointer;
    let answer = to.post(
        batch,
        &json!({
            "operation": "upload",
            "transfers": ["basic", "multipart"],
            "hash_algo": "sha256",
            "ref": {"name": branch},
            "objects": [{"oid": pointer.oid, "size": bytes}],
        }),
    )?;
    let answer: Batch = serde_json::from_slice(&answer)
        .map_err(|e| to.wrong(format!("the Hub's answer can't be read: {e}")))?;
    let mut items = answer.objects.into_iter();
    let item = items.find(|item| item.oid == pointer.oid);
    let item = item.ok_or_else(|| to.wrong("the Hub answers for another file".to_owned()))?;
    if let Some(error) = item.error {
        return Err(to.wrong(error.message));
    }
    let Some(actions) = item.actions else {
        return Ok(to.pointer);
    };
    if let Some(action) = &actions.upload {
        let url = client.named(batch, &action.href, name)?;
        match chunk_size(action).map_err(|why| to.wrong(why))? {
            None => {
                client.put(&url, name, from, bytes)?;
            }
            Some(size) => to.parts(batch, &url, action, size, from)?,
        }
    }
    if let Some(action) = &actions.verify {
        let url = client.named(batch, &action.href, name)?;
        to.post(&url, &json!({"oid": pointer.oid, "size": bytes}))?;
    }
    Ok(to.pointer)
}

/// Returns the size of the parts that the Hub wants; none for a file in one.
fn chunk_size(action: &Action) -> Result<Option<u64>, String> {
    let size = action
        .header
        .as_ref()
        .and_then(|header| header.get("chunk_size"));
    let Some(size) = size else { return Ok(None) };
    let number = match size {
        Value::String(text) => text.parse().ok(),
        other => other.as_u64(),
    };
    match number {
        Some(number) if (1..=LARGEST_PART).contains(&number) => Ok(Some(number)),
        _ => Err(format!("the Hub asks for parts of {size} bytes")),
    }
}

/// A file on its way.
struct Upload<'a> {
    client: &'a Client,
    name: &'a str,
    pointer: Pointer,
}

impl Upload<'_> {
    fn wrong(&self, why: String) -> RemoteError {
        RemoteError::Storage {
            what: "write",
            name: self.name.to_owned(),
            why,
        }
    }

    fn post(&self, url: &Url, document: &Value) -> Result<Vec<u8>, RemoteError> {
        let answer = self.client.text(&Ask {
            method: Method::POST,
            url: url.clone(),
            body: Some((LFS, Bytes::from(document.to_string()))),
            what: "write",
            name: self.name,
            from: 0,
        })?;
        let answer =
            answer.ok_or_else(|| self.wrong(format!("the Hub has no `{}`", url.path())))?;
        Ok(answer.1)
    }

    /// Sends a file in parts, and says at the end what they were.
    fn parts(
        &self,
        batch: &Url,
        end: &Url,
        action: &Action,
        size: u64,
        from: &mut dyn Source,
    ) -> Result<(), RemoteError> {
        let lost = |source| RemoteError::Read {
            name: self.name.to_owned(),
            source,
        };
        from.rewind().map_err(lost)?;
        let (mut left, mut sent) = (self.pointer.bytes, Vec::new());
        while left > 0 {
            let number = sent.len() + 1;
            let urls = action.header.iter().flatten();
            let mut urls = urls.filter(|(key, _)| key.parse() == Ok(number));
            let url = urls.next().and_then(|(_, url)| url.as_str());
            let url =
                url.ok_or_else(|| self.wrong(format!("the Hub has no place for part {number}")))?;
            let url = self.client.named(batch, url, self.name)?;
            let mut part = vec![0; left.min(size) as usize];
            from.read_exact(&mut part).map_err(lost)?;
            let bytes = part.len() as u64;
            let headers = self
                .client
                .put(&url, self.name, &mut Cursor::new(part), bytes)?;
            let tag = headers.get("etag").and_then(|tag| tag.to_str().ok());
            let tag = tag.ok_or_else(|| self.wrong(format!("part {number} has no `ETag`")))?;
            sent.push(json!({"partNumber": number, "etag": tag}));
            left -= bytes;
        }
        self.post(end, &json!({"oid": self.pointer.oid, "parts": sent}))?;
        Ok(())
    }
}
