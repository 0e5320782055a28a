//! Mirrors: a store with the records of another place, and without its objects.
//!
//! What asks only for records and sizes (`ls`, `show`, `why`, `diff`, `du`) works on a mirror as on a store. So there
//! is one code for both. The index has a row for each object, with its sizes from the listings, and no file stands
//! behind it. What reads an object fails, as for a store that has lost it.

use std::{io::Write, path::PathBuf};

use super::{
    Store,
    checksum::{self, Record},
    error::{At, StoreError},
    listing::{ListedPart, Listing, PartKind},
    rows::ObjectRow,
    time::now,
};
use crate::record::{Artifact, Program};

impl Store {
    /// Adds a release of another store without its objects. `text` is the file of the release, `records` has those of
    /// its records that are not here yet, in the order of the listing.
    ///
    /// Nothing is made durable.
    pub fn mirror(
        &self,
        text: &[u8],
        listing: &Listing,
        records: &[(&ListedPart, Vec<u8>)],
    ) -> Result<(), StoreError> {
        listing.check_release(text)?;
        let layout = &self.base().layout;
        for (part, text) in records {
            self.mirror_file(layout.root.join(part.path()), text)?;
        }
        let release = &listing.release;
        let path = layout.release(&listing.model, release.seq)?;
        let (_, checksum) = checksum::encode(release, &path)?;
        self.mirror_file(path, text)?;
        let created = release.provenance.created.unwrap_or_else(now);
        let (artifacts, programs) = decoded(records)?;
        self.base().index.write(|to| {
            for part in &listing.parts {
                if part.kind != PartKind::Object || ObjectRow::find(to, &part.id)?.is_some() {
                    continue;
                }
                let row = ObjectRow {
                    digest: part.id,
                    size: part.content.unwrap_or(part.bytes),
                    stored: part.bytes,
                    created,
                };
                row.insert(to)?;
            }
            for (artifact, checksum) in &artifacts {
                artifact.insert(to, checksum, created)?;
            }
            for (program, checksum) in &programs {
                program.insert(to, checksum, created)?;
            }
            release.insert(to, &checksum, created)
        })
    }

    fn mirror_file(&self, path: PathBuf, text: &[u8]) -> Result<(), StoreError> {
        let mut pending = self.leases().pending_file()?;
        pending.file().write_all(text).at("write", &path)?;
        pending.publish_unsynced(&path)
    }
}

/// Returns the records in these files, with the checksums of the files.
fn decoded(records: &[(&ListedPart, Vec<u8>)]) -> Result<Decoded, StoreError> {
    let (mut artifacts, mut programs) = (Vec::new(), Vec::new());
    for (part, text) in records {
        let path = PathBuf::from(part.path());
        match part.kind {
            PartKind::Artifact => artifacts.push(checksum::decode(text, &path)?),
            PartKind::Program => programs.push(checksum::decode(text, &path)?),
            PartKind::Object => {}
        }
    }
    Ok((artifacts, programs))
}

type Decoded = (
    Vec<(Artifact, crate::Digest)>,
    Vec<(Program, crate::Digest)>,
);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing;

    #[test]
    fn a_mirror_has_the_records_and_the_sizes_of_a_store_and_no_objects() {
        let (_dir, store, artifact, program) = testing::filled();
        let release = testing::put_release(&store, None, &[program.id]);
        let listing = store.releases().listing(&release).unwrap();
        let read = |path: &str| fs::read(store.path().join(path)).unwrap();
        let text = read(&crate::release_path("m", 1).unwrap());
        let records = listing.parts.iter();
        let records = records.filter(|part| part.kind != PartKind::Object);
        let records: Vec<_> = records.map(|part| (part, read(&part.path()))).collect();
        let (_other, mirror) = testing::store();
        mirror.mirror(&text, &listing, &records).unwrap();
        let path = mirror.path().to_owned();
        drop(mirror);
        let mirror = Store::open(path).unwrap();
        assert_eq!(mirror.releases().get("m", None).unwrap(), Some(release));
        assert_eq!(
            mirror.records().program(&program.id).unwrap(),
            Some(program)
        );
        let rows = |store: &Store| -> Vec<_> {
            let rows = store.objects().rows();
            rows.map(|row| row.map(|row| (row.digest, row.size, row.stored)))
                .collect::<Result<_, _>>()
                .unwrap()
        };
        assert_eq!(rows(&mirror), rows(&store));
        assert!(!rows(&mirror).is_empty());
        let read = mirror.objects().read(&artifact.object);
        assert_eq!(testing::refused(read), "Missing");
        // A release that is another one than was listed.
        let other = testing::put_release(&store, Some("v2"), &[]);
        let other = store.releases().listing(&other).unwrap();
        assert!(mirror.mirror(&text, &other, &[]).is_err());
    }
}
