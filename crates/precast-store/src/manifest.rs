//! Manifests: the list of every file that a release consists of, each with its digest.
//!
//! | part | path | digest |
//! |---|---|---|
//! | code, graph, log, weights, shim | `objects/3f/3f9c….zst` | of its content; it is also the name |
//! | artifact | `artifacts/a1/a1b2….json` | of the record's line |
//! | program | `programs/07/07de….json` | of the record's line |
//! | the release itself | `releases/NAME/00000007.json` | of the record's line |
//!
//! A part comes after everything that it refers to. A copy publishes the parts in this order, the release last.
//!
//! A manifest is made by a [`Walk`] along the references between records: release → program → artifact → object. The
//! walk reads them from a [`Source`]: the record files for a load, a copy and `verify`; the checked rows of the index
//! for gc. Nothing else follows these references:
//!
//! | user | roots | use of the list |
//! |---|---|---|
//! | `Releases::hold` | one release | the lease of a load |
//! | `Releases::copy`, `precast export` | one release | the files that are copied |
//! | `Collector::plan` | the releases that stay, and all leases | everything that may not be deleted |
//! | `Audit::verify` | all records of the store | missing parts are defects |
//!
//! A manifest is computed when it is needed. It is not a part of the release's file, because a build may replace a lost
//! or damaged record by a new one of the same key, and older releases then use the new one.

use std::{collections::HashSet, path::PathBuf};

use super::{
    error::StoreError,
    layout::{Kind, StoreLayout},
};
use crate::Digest;

/// One file that a release consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Path of the file, relative to the store.
    pub path: PathBuf,
    /// Digest of an object's content, or of a record's line.
    pub digest: Digest,
}

/// Every file that a release consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    nodes: Vec<Node>,
    release: Part,
}

impl Manifest {
    pub(crate) fn new(nodes: Vec<Node>, path: PathBuf, digest: Digest) -> Self {
        let release = Part { path, digest };
        Self { nodes, release }
    }

    /// Returns all parts. A part comes after everything that it refers to.
    pub fn parts(&self) -> impl Iterator<Item = Part> {
        let parts = self.nodes.iter().map(|node| Part {
            path: match node.record {
                Some(kind) => StoreLayout::record_name(kind, &node.id),
                None => StoreLayout::object_name(&node.id),
            },
            digest: node.digest,
        });
        parts.chain([self.release.clone()])
    }

    /// Returns the digests of all objects.
    pub fn objects(&self) -> impl Iterator<Item = Digest> {
        self.of(None)
    }

    /// Returns the keys of all records of a kind, each with the digest of its line.
    pub(crate) fn checksums(&self, kind: Kind) -> impl Iterator<Item = (Digest, Digest)> {
        let nodes = self.nodes.iter();
        nodes
            .filter(move |node| node.record == Some(kind))
            .map(|node| (node.id, node.digest))
    }

    pub(crate) fn of(&self, record: Option<Kind>) -> impl Iterator<Item = Digest> {
        let nodes = self.nodes.iter();
        nodes
            .filter(move |node| node.record == record)
            .map(|node| node.id)
    }
}

/// An object, or the record of an artifact or a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    /// Absent for an object.
    pub record: Option<Kind>,
    pub id: Digest,
    pub digest: Digest,
}

/// A record's checksum, and the keys or digests that it refers to.
#[derive(Clone)]
pub(crate) struct Links {
    pub checksum: Digest,
    pub to: Vec<Digest>,
}

/// The source of references for a [`Walk`].
pub(crate) trait Source {
    /// Returns the links of a program or an artifact, or none if the record is missing.
    fn links(&self, kind: Kind, id: &Digest) -> Result<Option<Links>, StoreError>;
    fn has_object(&self, digest: &Digest) -> bool;
}

/// A reference to a missing thing.
pub(crate) struct Missing {
    /// The record with the reference; none for the root of the walk.
    pub by: Option<(Kind, Digest)>,
    /// Kind of the missing record; none for an object.
    pub kind: Option<Kind>,
    pub id: Digest,
    /// The error of a record that can't be read.
    pub error: Option<StoreError>,
}

impl Missing {
    /// Returns the error for this reference. `what` is the record with the reference, in words.
    pub fn error(self, what: &str) -> StoreError {
        self.error.unwrap_or_else(|| StoreError::Dangling {
            what: what.to_owned(),
            kind: self.kind.map_or("object", Kind::name),
            id: self.id,
        })
    }
}

/// A walk along references, which visits each part once.
pub(crate) struct Walk<'a, S> {
    source: &'a S,
    seen: HashSet<Digest>,
    /// The existing parts, each after everything that it refers to.
    pub found: Vec<Node>,
    pub missing: Vec<Missing>,
}

impl<'a, S: Source> Walk<'a, S> {
    pub fn new(source: &'a S) -> Self {
        Self {
            source,
            seen: HashSet::new(),
            found: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// Adds the references of a release or another root.
    pub fn release(&mut self, programs: &[Digest], objects: &[Digest]) {
        self.objects(None, objects);
        self.records(None, Kind::Program, programs);
    }

    /// Adds programs or artifacts, with everything that they refer to.
    pub fn records(&mut self, by: Option<(Kind, Digest)>, kind: Kind, ids: &[Digest]) {
        for &id in ids {
            if self.seen.contains(&id) {
                continue;
            }
            let (links, error) = match self.source.links(kind, &id) {
                Ok(links) => (links, None),
                Err(error) => (None, Some(error)),
            };
            let Some(links) = links else {
                self.missing.push(Missing {
                    by,
                    kind: Some(kind),
                    id,
                    error,
                });
                continue;
            };
            self.seen.insert(id);
            let own = Some((kind, id));
            match kind {
                Kind::Program => self.records(own, Kind::Artifact, &links.to),
                _ => self.objects(own, &links.to),
            }
            self.found.push(Node {
                record: Some(kind),
                id,
                digest: links.checksum,
            });
        }
    }

    /// Adds objects.
    pub fn objects(&mut self, by: Option<(Kind, Digest)>, digests: &[Digest]) {
        for &id in digests {
            if self.seen.contains(&id) {
                continue;
            }
            if self.source.has_object(&id) {
                self.seen.insert(id);
                self.found.push(Node {
                    record: None,
                    id,
                    digest: id,
                });
            } else {
                self.missing.push(Missing {
                    by,
                    kind: None,
                    id,
                    error: None,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::super::testing;
    use crate::{Digest, Store, StoreError, record::Release};

    /// A store with two releases of one model, which share an artifact.
    fn source() -> (tempfile::TempDir, Store) {
        let (dir, store) = testing::store();
        let artifact = testing::put_artifact(&store, "block");
        for batch in [1, 2] {
            let program = testing::put_program(&store, "m", batch, &[artifact.id]).id;
            let mut release = testing::release("m", None, &[program]);
            release.weights = Some(store.objects().put_bytes(b"weights").unwrap());
            store.releases().put(&release).unwrap();
        }
        (dir, store)
    }

    fn copy(from: &Store, to: &Store, release: &Release) -> Result<(), StoreError> {
        for object in from.releases().manifest(release)?.objects() {
            to.objects().copy(from.objects(), &object)?;
        }
        to.releases().copy(from.releases(), release)
    }

    #[test]
    fn a_copy_has_a_release_and_nothing_else() {
        let (_from, from) = source();
        from.objects().put_bytes(b"of nobody").unwrap();
        let (_to, to) = testing::store();
        let release = from.releases().get("m", None).unwrap().unwrap();
        copy(&from, &to, &release).unwrap();
        assert_eq!(to.releases().get("m", None).unwrap().unwrap(), release);
        assert_eq!(release.seq, 2);
        assert_eq!(to.releases().all("m").unwrap().len(), 1);
        assert!(to.audit().verify().unwrap().defects.is_empty());
        let manifest = from.releases().manifest(&release).unwrap();
        assert_eq!(to.releases().manifest(&release).unwrap(), manifest);
        let there = to.objects().rows().map(|row| row.unwrap().digest);
        let listed: BTreeSet<_> = manifest.objects().collect();
        assert_eq!(there.collect::<BTreeSet<_>>(), listed);
        for part in manifest.parts() {
            let file = fs::read(to.path().join(&part.path)).unwrap();
            let digest = if part.path.starts_with("objects") {
                Digest::of(&zstd::decode_all(&file[..]).unwrap())
            } else {
                Digest::of(file.split_inclusive(|byte| *byte == b'\n').next().unwrap())
            };
            assert_eq!(digest, part.digest, "{}", part.path.display());
        }
        let names: Vec<_> = manifest.parts().map(|part| part.path).collect();
        assert_eq!(names.len(), 5);
        assert!(names.last().unwrap().starts_with("releases/m"), "{names:?}");
        // The same release again, then another one.
        copy(&from, &to, &release).unwrap();
        let first = from.releases().get("m", Some("1")).unwrap().unwrap();
        copy(&from, &to, &first).unwrap();
        let [copied, of] = [&to, &from].map(|store| store.releases().all("m").unwrap());
        assert_eq!(copied, of);
        assert!(to.audit().verify().unwrap().defects.is_empty());
    }

    #[test]
    fn another_release_of_the_same_number_stays() {
        let (_from, from) = source();
        let (_to, to) = source();
        let mut release = from.releases().get("m", None).unwrap().unwrap();
        release.name = Some("other".to_owned());
        let error = to.releases().copy(from.releases(), &release).unwrap_err();
        assert_eq!(error.to_string(), "`m` has another release 2 already");
        let [left, of] = [&to, &from].map(|store| store.releases().all("m").unwrap());
        assert_eq!(left, of);
    }

    #[test]
    fn a_damaged_object_is_not_copied() {
        let (_from, from) = source();
        let (_to, to) = testing::store();
        let release = from.releases().get("m", None).unwrap().unwrap();
        let weights = release.weights.unwrap();
        testing::damage(&from.layout().object(&weights), |bytes| bytes[12] ^= 1);
        assert_eq!(testing::refused(copy(&from, &to, &release)), "Corrupt");
        assert!(!to.objects().has(&weights));
        // A missing object.
        fs::remove_file(from.layout().object(&weights)).unwrap();
        assert_eq!(testing::refused(copy(&from, &to, &release)), "Dangling");
        let copied = to.releases().copy(from.releases(), &release);
        assert_eq!(testing::refused(copied), "Dangling");
    }
}
