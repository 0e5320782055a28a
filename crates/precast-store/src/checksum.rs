//! Record files: one line of JSON, then one line with its SHA-256, so that a changed byte is an error.
//!
//! ```text
//! {"schema":1,"id":"3f…",…}
//! {"sha256":"9c…"}
//! ```

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rusqlite::Connection;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    error::{At, StoreError},
    layout::{Kind, StoreLayout},
    rows,
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program, Release, SCHEMA},
};

/// Maximum bytes of a record file. precast writes no larger one.
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

/// Reads and checks the record at `path`, which must be its right place. Returns none if the file is missing.
pub(crate) fn read<R: Record>(
    layout: &StoreLayout,
    path: &Path,
) -> Result<Option<(R, Digest)>, StoreError> {
    let Some(text) = raw(layout, path)? else {
        return Ok(None);
    };
    let (record, checksum) = decode::<R>(&text, path)?;
    if record.schema() > SCHEMA {
        return Err(newer(path, record.schema()));
    }
    if record.path(layout)? != path {
        let release = R::KIND == Kind::Release;
        let what = if release { "release" } else { "key" };
        return Err(damaged(path, format!("it is the record of another {what}")));
    }
    Ok(Some((record, checksum)))
}

/// The field that records of all versions have.
#[derive(Deserialize)]
struct Version {
    schema: u32,
}

/// Checks and parses the bytes of a record file.
pub(crate) fn decode<T: DeserializeOwned>(
    text: &[u8],
    path: &Path,
) -> Result<(T, Digest), StoreError> {
    let (line, checksum) = check(text, path)?;
    let record = serde_json::from_slice(line).map_err(|e| match serde_json::from_slice(line) {
        // Other fields of a newer precast are not damage.
        Ok(Version { schema }) if schema > SCHEMA => newer(path, schema),
        _ => damaged(path, e.to_string()),
    })?;
    Ok((record, checksum))
}

/// Returns the first line and its checksum, if they match.
fn check<'a>(text: &'a [u8], path: &Path) -> Result<(&'a [u8], Digest), StoreError> {
    let tail = OPEN.len() + 64 + CLOSE.len();
    let (line, rest) = text.split_at(text.len().saturating_sub(tail));
    let checksum = Digest::of(line);
    let expected = format!("{OPEN}{checksum}{CLOSE}");
    if line.ends_with(b"\n") && rest == expected.as_bytes() {
        Ok((line, checksum))
    } else {
        Err(damaged(path, "its checksum does not match".to_owned()))
    }
}

fn raw(layout: &StoreLayout, path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    let file = match layout.open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.at("read", path)?,
    };
    let mut text = Vec::new();
    let read = file.take(LIMIT + 1).read_to_end(&mut text);
    if read.at("read", path)? as u64 > LIMIT {
        return Err(damaged(path, "it is larger than any record".to_owned()));
    }
    Ok(Some(text))
}

/// Returns the error for a record that a newer precast wrote.
fn newer(path: &Path, schema: u32) -> StoreError {
    StoreError::Newer {
        path: path.to_owned(),
        found: schema.into(),
        known: SCHEMA.into(),
    }
}

fn damaged(path: &Path, why: String) -> StoreError {
    StoreError::Record {
        path: path.to_owned(),
        why,
    }
}

/// A record: a file with a row in the index.
pub(crate) trait Record: Serialize + DeserializeOwned + PartialEq {
    const KIND: Kind;
    fn path(&self, layout: &StoreLayout) -> Result<PathBuf, StoreError>;
    fn schema(&self) -> u32;
    /// Inserts the row of the record. `checksum` is that of its file, and `created` the file's time: the record's own
    /// comes first.
    fn insert(&self, to: &Connection, checksum: &Digest, created: i64) -> rusqlite::Result<()>;
}

/// A record that is named by a key.
pub(crate) trait Keyed: Record {
    fn id(&self) -> Digest;
}

macro_rules! record {
    ($type:ident, $layout:ident, $self:ident => $path:expr, $insert:path) => {
        impl Record for $type {
            const KIND: Kind = Kind::$type;
            fn path(&$self, $layout: &StoreLayout) -> Result<PathBuf, StoreError> {
                $path
            }
            fn schema(&self) -> u32 {
                self.schema
            }
            fn insert(&self, to: &Connection, checksum: &Digest, created: i64) -> rusqlite::Result<()> {
                // A copy of the file is not the publication.
                let created = self.provenance.created.unwrap_or(created);
                $insert(to, self, checksum, created)
            }
        }
    };
    ($type:ident, $insert:path) => {
        record!($type, layout, self => Ok(layout.record(Kind::$type, &self.id)), $insert);
        impl Keyed for $type {
            fn id(&self) -> Digest {
                self.id
            }
        }
    };
}
record!(Artifact, rows::insert_artifact);
record!(Program, rows::insert_program);
record!(Failure, rows::insert_failure);
record!(Release, layout, self => layout.release(&self.model, self.seq), rows::insert_release);

/// Reads one record file and checks that it lies where it belongs.
pub(crate) fn record_file<R: Record>(
    layout: &StoreLayout,
    path: &Path,
) -> Result<(R, Digest, i64), StoreError> {
    let gone = || damaged(path, "it is gone".into());
    let (record, checksum) = read::<R>(layout, path)?.ok_or_else(gone)?;
    Ok((record, checksum, created(path)?))
}

/// Returns the time of the file at `path`, in seconds since 1970.
pub(crate) fn created(path: &Path) -> Result<i64, StoreError> {
    Ok(fs::symlink_metadata(path).at("look at", path)?.mtime())
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
