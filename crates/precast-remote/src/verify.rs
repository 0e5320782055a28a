//! Verify: every file of a remote's releases is read and hashed as it streams. Nothing is kept.
//!
//! What is wrong is listed, and the check goes on. A connection that breaks is an error, and no flaw of the file.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    sync::Mutex,
};

use precast_store::{
    ListedPart, PartKind,
    transfer::{Flaw, RemoteVerified},
};

use crate::{
    carrier::{LARGEST, small},
    error::RemoteError,
    event::{Counted, Tell},
    remote::{Remote, foreign},
    work,
};

impl Remote {
    /// Reads every file of all releases.
    pub fn verify(&self, tell: &Tell<'_>) -> Result<RemoteVerified, RemoteError> {
        let mut verified = RemoteVerified::default();
        // By path: releases share parts, and two that list one differently are both checked.
        let mut parts: BTreeMap<(String, String), ListedPart> = BTreeMap::new();
        for group in self.groups()? {
            tell.go_on()?;
            for found in self.whole(&group)? {
                verified.releases += 1;
                match found {
                    Ok((listing, _)) => parts.extend(
                        (listing.parts.into_iter())
                            .map(|part| ((part.path(), part.digest.hex()), part)),
                    ),
                    Err(flaw) => verified.flaws.push(flaw),
                }
            }
        }
        let parts: Vec<ListedPart> = parts.into_values().collect();
        let (objects, records): (Vec<_>, Vec<_>) =
            parts.iter().partition(|part| part.kind == PartKind::Object);
        let read = Mutex::new(0);
        let check = |part: &&ListedPart| -> Result<Option<Flaw>, RemoteError> {
            match self.check(part, tell) {
                Ok(bytes) => {
                    if let Ok(mut read) = read.lock() {
                        *read += bytes;
                    }
                    Ok(None)
                }
                Err(error) => flaw(error).map(Some),
            }
        };
        for (parts, width) in [(&records, work::SMALL), (&objects, work::BIG)] {
            verified
                .flaws
                .extend(work::all(parts, width, check)?.into_iter().flatten());
        }
        (verified.objects, verified.records) = (objects.len(), records.len());
        verified.bytes = read.into_inner().unwrap_or_else(|e| e.into_inner());
        verified.flaws.sort();
        verified.flaws.dedup();
        Ok(verified)
    }

    /// Checks one file. Returns its size.
    fn check(&self, part: &ListedPart, tell: &Tell<'_>) -> Result<u64, RemoteError> {
        tell.go_on()?;
        let name = part.path();
        let missing = || RemoteError::damaged(&name, "it is missing");
        if part.kind != PartKind::Object {
            let text = small(&*self.carrier, &name, LARGEST)?.ok_or_else(missing)?;
            (tell.moved)(text.len() as u64);
            part.check_record(&text).map_err(foreign)?;
            return Ok(text.len() as u64);
        }
        let body = self.carrier.get(&name)?.ok_or_else(missing)?;
        let mut from = Kept {
            read: Counted::new(body.read, tell),
            error: None,
        };
        let checked = part.check_object(&mut from, body.bytes);
        if let Some(source) = from.error {
            tell.go_on()?;
            return Err(RemoteError::Read { name, source });
        }
        checked.map_err(foreign)?;
        Ok(body.bytes)
    }
}

/// Returns what is wrong with a file; fails for an error that is not the file's.
fn flaw(error: RemoteError) -> Result<Flaw, RemoteError> {
    match error {
        RemoteError::Damaged { name, why } => Ok(Flaw { name, why }),
        error => Err(error),
    }
}

/// A reader that keeps its error: the code that decodes takes it for damage.
struct Kept<R> {
    read: R,
    error: Option<io::Error>,
}

impl<R: Read> Read for Kept<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read.read(into).map_err(|error| {
            let kind = error.kind();
            if kind == io::ErrorKind::Interrupted {
                return error;
            }
            self.error = Some(error);
            io::Error::new(kind, "the connection broke")
        })
    }
}
