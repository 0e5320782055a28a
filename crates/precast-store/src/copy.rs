//! Copying releases from one store into another: everything that they need, under the same names and numbers.
//!
//! Objects are copied as they lie on disk and are checked in the copy. A copy of a release is published last, so that an
//! interrupted copy leaves objects and records that gc removes.

use std::collections::BTreeSet;

use super::{
    Store,
    error::StoreError,
    records::dangling,
    rows::{artifacts_of, objects_of},
};
use crate::{Digest, record::Release};

impl Store {
    /// Returns all objects that a release needs, sorted, with those of its programs.
    pub fn objects_of_release(&self, release: &Release) -> Result<BTreeSet<Digest>, StoreError> {
        let mut objects = BTreeSet::from_iter(release.shim_objects());
        objects.extend(release.weights);
        for id in &release.programs {
            for id in artifacts_of(&self.needed_program(release, id)?) {
                objects.extend(objects_of(&self.needed_artifact(&id)?));
            }
        }
        Ok(objects)
    }

    /// Copies the records of a release, whose objects this store has already ([`Self::copy_object`]), and publishes it with
    /// its own number. Fails where this store has another release of that number.
    pub fn copy_release(&self, from: &Self, release: &Release) -> Result<(), StoreError> {
        let mut artifacts = BTreeSet::new();
        for id in &release.programs {
            let program = from.needed_program(release, id)?;
            for id in artifacts_of(&program) {
                if artifacts.insert(id) {
                    self.put_artifact(&from.needed_artifact(&id)?)?;
                }
            }
            self.put_program(&program)?;
        }
        self.put_numbered_release(release)
    }

    fn needed_program(
        &self,
        release: &Release,
        id: &Digest,
    ) -> Result<crate::record::Program, StoreError> {
        let what = || format!("release {} of `{}`", release.seq, release.model);
        let program = self.program(id)?;
        program.ok_or_else(|| dangling(&what(), "program", id))
    }

    fn needed_artifact(&self, id: &Digest) -> Result<crate::record::Artifact, StoreError> {
        let artifact = self.artifact(id)?;
        artifact.ok_or_else(|| dangling("a program", "artifact", id))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{super::testing, *};

    /// A store with two releases of one model, which share an artifact.
    fn source() -> (tempfile::TempDir, Store) {
        let (dir, store) = testing::store();
        let artifact = store
            .put_artifact(&testing::artifact(&store, "block"))
            .unwrap();
        for batch in [1, 2] {
            let program = testing::program("m", batch, &[artifact.id]);
            let program = store.put_program(&program).unwrap().id;
            let mut release = testing::release("m", None, &[program]);
            release.weights = Some(store.put_bytes(b"weights").unwrap());
            store.put_release(&release).unwrap();
        }
        (dir, store)
    }

    fn copy(from: &Store, to: &Store, release: &Release) -> Result<(), StoreError> {
        for object in from.objects_of_release(release)? {
            to.copy_object(from, &object)?;
        }
        to.copy_release(from, release)
    }

    #[test]
    fn a_copy_has_a_release_and_nothing_else() {
        let (_from, from) = source();
        from.put_bytes(b"of nobody").unwrap();
        let (_to, to) = testing::store();
        let release = from.release("m", None).unwrap().unwrap();
        copy(&from, &to, &release).unwrap();
        assert_eq!(to.release("m", None).unwrap().unwrap(), release);
        assert_eq!(release.seq, 2);
        assert_eq!(to.releases("m").unwrap().len(), 1);
        assert!(to.verify().unwrap().defects.is_empty());
        let objects: BTreeSet<_> = to.objects().map(|row| row.unwrap().digest).collect();
        assert_eq!(objects, from.objects_of_release(&release).unwrap());
        // Again, and the other one beside it.
        copy(&from, &to, &release).unwrap();
        let first = from.release("m", Some("1")).unwrap().unwrap();
        copy(&from, &to, &first).unwrap();
        assert_eq!(to.releases("m").unwrap(), from.releases("m").unwrap());
        assert!(to.verify().unwrap().defects.is_empty());
    }

    #[test]
    fn another_release_of_the_same_number_stays() {
        let (_from, from) = source();
        let (_to, to) = source();
        let mut release = from.release("m", None).unwrap().unwrap();
        release.name = Some("other".to_owned());
        let error = to.copy_release(&from, &release).unwrap_err();
        assert_eq!(error.to_string(), "`m` has another release 2 already");
        assert_eq!(to.releases("m").unwrap(), from.releases("m").unwrap());
    }

    #[test]
    fn a_damaged_object_is_not_copied() {
        let (_from, from) = source();
        let (_to, to) = testing::store();
        let release = from.release("m", None).unwrap().unwrap();
        let weights = release.weights.unwrap();
        testing::damage(&from.layout().object(&weights), |bytes| bytes[12] ^= 1);
        assert!(matches!(
            copy(&from, &to, &release),
            Err(StoreError::Corrupt { .. })
        ));
        assert!(!to.has_object(&weights));
        // One that is gone.
        fs::remove_file(from.layout().object(&weights)).unwrap();
        assert!(matches!(
            copy(&from, &to, &release),
            Err(StoreError::Missing { .. })
        ));
        assert!(matches!(
            to.copy_release(&from, &release),
            Err(StoreError::Dangling { .. })
        ));
    }
}
