//! Record files: one line of JSON, then one line with its SHA-256, so that a changed byte is an error.
//!
//! ```text
//! {"schema":1,"id":"3f…",…}
//! {"sha256":"9c…"}
//! ```

use std::{
    io::{self, Read},
    path::Path,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    error::{At, StoreError},
    layout::Layout,
};
use crate::{Digest, record::SCHEMA};

/// No record is larger; what is, was not written by precast.
const LIMIT: u64 = 256 << 20;
const OPEN: &str = "{\"sha256\":\"";
const CLOSE: &str = "\"}\n";

/// Returns the bytes of the file for `record`, and their checksum.
pub(crate) fn encode<T: Serialize>(
    record: &T,
    path: &Path,
) -> Result<(Vec<u8>, Digest), StoreError> {
    let mut text = serde_json::to_vec(record).map_err(|e| damaged(path, e.to_string()))?;
    text.push(b'\n');
    let checksum = Digest::of(&text);
    text.extend(OPEN.as_bytes());
    text.extend(checksum.hex().as_bytes());
    text.extend(CLOSE.as_bytes());
    Ok((text, checksum))
}

/// Reads and checks the record at `path`; none when there is no such file.
pub(crate) fn read<T: DeserializeOwned>(
    layout: &Layout,
    path: &Path,
) -> Result<Option<(T, Digest)>, StoreError> {
    match raw(layout, path)? {
        Some(text) => decode(&text, path).map(Some),
        None => Ok(None),
    }
}

/// What every record says whatever version it has.
#[derive(Deserialize)]
struct Head {
    schema: u32,
}

/// Checks and parses the bytes of a record file.
pub(crate) fn decode<T: DeserializeOwned>(
    text: &[u8],
    path: &Path,
) -> Result<(T, Digest), StoreError> {
    let (line, checksum) = check(text, path)?;
    let record = serde_json::from_slice(line).map_err(|e| match serde_json::from_slice(line) {
        // A newer precast may write other fields: that is no damage.
        Ok(Head { schema }) if schema > SCHEMA => newer(path, schema),
        _ => damaged(path, e.to_string()),
    })?;
    Ok((record, checksum))
}

/// Returns the first line and its checksum, when they match.
fn check<'a>(text: &'a [u8], path: &Path) -> Result<(&'a [u8], Digest), StoreError> {
    let tail = OPEN.len() + 64 + CLOSE.len();
    let (line, rest) = text.split_at(text.len().saturating_sub(tail));
    let checksum = Digest::of(line);
    let expected = format!("{OPEN}{checksum}{CLOSE}");
    match line.ends_with(b"\n") && rest == expected.as_bytes() {
        true => Ok((line, checksum)),
        false => Err(damaged(path, "its checksum does not match".to_owned())),
    }
}

fn raw(layout: &Layout, path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    let file = match layout.open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).at("read", path),
    };
    let mut text = Vec::new();
    file.take(LIMIT + 1)
        .read_to_end(&mut text)
        .at("read", path)?;
    match text.len() as u64 > LIMIT {
        true => Err(damaged(path, "it is larger than any record".to_owned())),
        false => Ok(Some(text)),
    }
}

/// Returns the error for a record that a newer precast wrote.
pub(crate) fn newer(path: &Path, schema: u32) -> StoreError {
    StoreError::Newer {
        path: path.to_owned(),
        found: schema.into(),
        known: SCHEMA.into(),
    }
}

pub(crate) fn damaged(path: &Path, why: String) -> StoreError {
    StoreError::Record {
        path: path.to_owned(),
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flip_and_cut_is_caught() {
        let path = Path::new("record");
        let (text, checksum) = encode(&serde_json::json!({"a": [1, 2, "x"]}), path).unwrap();
        let (back, again): (serde_json::Value, _) = decode(&text, path).unwrap();
        assert_eq!((back["a"][2].as_str(), again), (Some("x"), checksum));
        for at in 0..text.len() {
            for bit in 0..8 {
                let mut bad = text.clone();
                bad[at] ^= 1 << bit;
                assert!(decode::<serde_json::Value>(&bad, path).is_err(), "{at}");
            }
            assert!(decode::<serde_json::Value>(&text[..at], path).is_err());
        }
        let deep = "[".repeat(100_000);
        assert!(decode::<serde_json::Value>(deep.as_bytes(), path).is_err());
    }
}
