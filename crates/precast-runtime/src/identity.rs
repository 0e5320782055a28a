//! The identity of a record: it has the requested ID, and its target matches this host.
//!
//! A record is found by its ID, which is the digest of its key, and the record has the key. So the digest is computed
//! again, and the target in the key must equal the record's own. A record without a key, which no build creates, is not
//! checked.

use precast_store::{
    Device, Digest, Target, canon,
    record::{Artifact, Program},
};
use serde_json::Value;

use super::{RuntimeError, error::in_store, source::Source};

/// Reads the record of an artifact. Fails if it has another ID, or was built for another kind of host.
pub(super) fn artifact(
    source: &dyn Source,
    key: &Digest,
    (device, host): (Device, &Target),
) -> Result<Artifact, RuntimeError> {
    let read = source.artifact(key);
    let record = read.map_err(in_store(format!("artifact `{}`", key.short())))?;
    check("artifact", key, record.id, &record.key, &record.target)?;
    let mismatches = record.target.mismatches(host);
    if mismatches.is_empty() {
        return Ok(record);
    }
    Err(RuntimeError::WrongArtifact {
        artifact: *key,
        device,
        mismatches,
    })
}

/// Reads the record of a program. Fails if it has another ID.
pub(super) fn program(source: &dyn Source, id: &Digest) -> Result<Program, RuntimeError> {
    let read = source.program(id);
    let record = read.map_err(in_store(format!("program `{}`", id.short())))?;
    check("program", id, record.id, &record.request, &record.target)?;
    Ok(record)
}

fn check(
    what: &'static str,
    asked: &Digest,
    own: Digest,
    explained: &Value,
    target: &Target,
) -> Result<(), RuntimeError> {
    let wrong = |reason| RuntimeError::WrongRecord {
        what,
        id: *asked,
        reason,
    };
    if own != *asked {
        return Err(wrong(format!("it is the record of `{}`", own.short())));
    }
    if explained.is_null() {
        return Ok(());
    }
    let digest = canon::digest(explained);
    if digest != *asked {
        return Err(wrong(format!("its key hashes to `{}`", digest.short())));
    }
    if canon::target(target) != *canon::target_of(explained) {
        return Err(wrong("its target is not that of its key".to_owned()));
    }
    Ok(())
}
