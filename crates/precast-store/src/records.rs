//! Publishes records, and reads them with a check of their checksums. A record is published after everything that it
//! refers to.

use std::{fs, sync::Arc};

use rusqlite::Connection;

use super::{
    base::Base,
    checksum::{self, Keyed, Record, created, record_file},
    error::{At, StoreError},
    layout::{Kind, check_name},
    leases::Leases,
    manifest::{Links, Source, Walk},
    objects::Objects,
    publish::{self, remove_all},
    sync,
    uses::Uses,
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program},
};

/// The records of artifacts, programs and failures.
pub struct Records {
    pub(crate) objects: Objects,
    pub(crate) uses: Uses,
}

/// Returns whether a table has a row of this ID that gc is not deleting.
pub(super) fn indexed(index: &Connection, table: &str, id: &Digest) -> rusqlite::Result<bool> {
    let query = format!(
        "SELECT 1 FROM {table} WHERE id=?1 AND NOT EXISTS \
         (SELECT 1 FROM marked WHERE kind='{table}' AND id=?1)"
    );
    index.prepare_cached(&query)?.exists([id])
}

impl Records {
    pub(crate) fn new(objects: Objects) -> Self {
        Self {
            uses: Uses::new(&objects.leases().base),
            objects,
        }
    }

    pub(crate) fn base(&self) -> &Arc<Base> {
        &self.leases().base
    }

    fn leases(&self) -> &Leases {
        self.objects.leases()
    }

    /// Publishes an artifact's record. Its objects must be in the store. Returns the record that is now in the store:
    /// this one, or an earlier one of the same key.
    pub fn put_artifact(&self, artifact: &Artifact) -> Result<Artifact, StoreError> {
        let _adding = self
            .leases()
            .adding(&[&[artifact.id][..], &artifact.objects()].concat())?;
        let what = format!("artifact {}", artifact.id.short());
        self.need(&what, |walk| walk.objects(None, &artifact.objects()))?;
        self.put_record(artifact, |old| {
            old.objects()
                .iter()
                .all(|o| self.objects.has_sound(o).unwrap_or(false))
        })
    }

    /// Publishes a program's record. Its artifacts must be in the store. Returns the record that is now in the store.
    pub fn put_program(&self, program: &Program) -> Result<Program, StoreError> {
        let _claim = self.leases().claim(&program.id, &mut |_| true)?;
        check_name(&program.model)?;
        let _adding = self
            .leases()
            .adding(&[&[program.id][..], &program.artifacts()].concat())?;
        self.need_artifacts(program)?;
        self.put_record(program, |old| self.need_artifacts(old).is_ok())
    }

    /// Publishes the record of a failed build. It replaces an earlier one of the same key.
    pub fn put_failure(&self, failure: &Failure) -> Result<(), StoreError> {
        if let Ok(Some(Failure { log: Some(old), .. })) = self.failure(&failure.id) {
            // A damaged log of the previous attempt is set aside.
            self.objects.restore(&old)?;
        }
        let _adding = self
            .leases()
            .adding(&[&[failure.id][..], failure.log.as_slice()].concat())?;
        let path = self.base().layout.record(Kind::Failure, &failure.id);
        self.leave_newer_failure(&failure.id)?;
        let (text, checksum) = checksum::encode(failure, &path)?;
        let mut pending = self.leases().pending_file()?;
        std::io::Write::write_all(pending.file(), &text).at("write", pending.path())?;
        pending.replace(&path)?;
        let created = created(&path)?;
        self.base()
            .index
            .write(|tx| failure.insert(tx, &checksum, created))
    }

    /// Returns the artifact with this key, if the store has it.
    pub fn artifact(&self, id: &Digest) -> Result<Option<Artifact>, StoreError> {
        self.get(id)
    }

    /// Returns whether the store has a program with this request key. Costs a query and a `stat`.
    pub fn has_program(&self, id: &Digest) -> Result<bool, StoreError> {
        self.has::<Program>(id)
    }

    /// Returns whether the store has an artifact with this key. Costs a query and a `stat`.
    pub fn has_artifact(&self, id: &Digest) -> Result<bool, StoreError> {
        self.has::<Artifact>(id)
    }

    /// Returns whether the store has a record with this ID. Inserts the row of a record that lacks it after a crash.
    /// Reads a file that has changed since its publication.
    fn has<R: Keyed>(&self, id: &Digest) -> Result<bool, StoreError> {
        let index = &self.base().index;
        if index.with(|index| indexed(index, R::KIND.folder(), id))? {
            self.has_sound_record::<R>(id)
        } else {
            self.adopt::<R>(id)
        }
    }

    /// Returns whether the artifact with this key exists with all its objects, undamaged. Protects it from gc while
    /// this store is open. A builder calls this before it compiles.
    pub fn keep_artifact(&self, id: &Digest) -> Result<bool, StoreError> {
        self.leases().keep(&[*id])?;
        if !self.has_artifact(id)? {
            return Ok(false);
        }
        let artifact = match self.artifact(id) {
            Ok(Some(artifact)) => artifact,
            // The next put sets a damaged record aside.
            Ok(None) | Err(StoreError::Record { .. }) => return Ok(false),
            Err(e) => return Err(e),
        };
        for object in artifact.objects() {
            if !self.objects.restore(&object)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the program with this request key, if the store has it.
    pub fn program(&self, id: &Digest) -> Result<Option<Program>, StoreError> {
        self.get(id)
    }

    /// Returns the record of the last build of the program or artifact with this key, if it failed.
    pub fn failure(&self, id: &Digest) -> Result<Option<Failure>, StoreError> {
        self.get(id)
    }

    /// Indexes the record of `id` if its file exists and is sound. Returns whether it is.
    pub(super) fn adopt<R: Keyed>(&self, id: &Digest) -> Result<bool, StoreError> {
        let path = self.base().layout.record(R::KIND, id);
        if fs::symlink_metadata(&path).is_err() {
            return Ok(false);
        }
        if !self.base().is_read_only() {
            let _adding = self.leases().adding(&[])?;
            if let Ok((record, checksum, created)) = record_file::<R>(&self.base().layout, &path) {
                self.base()
                    .index
                    .write(|tx| record.insert(tx, &checksum, created))?;
            }
        }
        // gc may have deleted it meanwhile.
        self.has_sound_record::<R>(id)
    }

    /// Returns whether the record of `id` exists and is undamaged. Costs a `stat`; a file that has changed is read.
    pub(super) fn has_sound_record<R: Keyed>(&self, id: &Digest) -> Result<bool, StoreError> {
        let path = self.base().layout.record(R::KIND, id);
        if publish::as_published(&path) {
            return Ok(true);
        }
        match record_file::<R>(&self.base().layout, &path) {
            Ok(_) => {
                publish::settle_time(&self.base().layout.open(&path).at("read", &path)?);
                Ok(true)
            }
            // A newer precast wrote it.
            Err(StoreError::Newer { .. }) => Ok(true),
            Err(StoreError::Record { .. }) => Ok(false),
            Err(_) if !fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file()) => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn get<R: Keyed>(&self, id: &Digest) -> Result<Option<R>, StoreError> {
        Ok(self.read(id)?.map(|(record, _)| record))
    }

    /// Reads the record of `id` with its checksum, and updates its last-use stamp.
    fn read<R: Keyed>(&self, id: &Digest) -> Result<Option<(R, Digest)>, StoreError> {
        let path = self.base().layout.record(R::KIND, id);
        let found = checksum::read::<R>(&self.base().layout, &path)?;
        if found.is_some() {
            self.uses.add(id);
        }
        Ok(found)
    }

    fn put_record<R: Keyed>(
        &self,
        record: &R,
        sound: impl Fn(&R) -> bool,
    ) -> Result<R, StoreError> {
        let id = record.id();
        let path = self.base().layout.record(R::KIND, &id);
        self.leave_newer_failure(&id)?;
        let (text, _) = checksum::encode(record, &path)?;
        // Another process may publish a record between the two steps. The next round reads it.
        while !publish::bytes(self.leases().pending_file()?, &path, &text)? {
            match self.get::<R>(&id) {
                Ok(Some(old)) if sound(&old) => break,
                Ok(_) | Err(StoreError::Record { .. }) => self.base().set_aside(&path)?,
                Err(e) => return Err(e),
            }
        }
        sync::point("put:record-published");
        let Some((now, checksum)) = checksum::read::<R>(&self.base().layout, &path)? else {
            return Err(StoreError::Missing { digest: id, path });
        };
        let created = created(&path)?;
        self.base().index.write(|tx| {
            now.insert(tx, &checksum, created)?;
            tx.prepare_cached("DELETE FROM failures WHERE id=?")?
                .execute([&id])
        })?;
        let failure = self.base().layout.record(Kind::Failure, &id);
        remove_all(&failure)?;
        self.uses.add(&id);
        Ok(now)
    }

    /// Fails if a newer precast wrote the record of a failure. It is neither replaced nor removed.
    fn leave_newer_failure(&self, id: &Digest) -> Result<(), StoreError> {
        match self.failure(id) {
            Err(e @ StoreError::Newer { .. }) => Err(e),
            _ => Ok(()),
        }
    }

    /// Runs a walk that `add` fills, and fails at its first missing part. `what` is the root of the walk, in words.
    pub(super) fn need(
        &self,
        what: &str,
        add: impl FnOnce(&mut Walk<'_, Self>),
    ) -> Result<(), StoreError> {
        let mut walk = Walk::new(self);
        add(&mut walk);
        let Some(missing) = walk.missing.into_iter().next() else {
            return Ok(());
        };
        let by = (missing.by).map(|(kind, id)| format!("{} {}", kind.name(), id.short()));
        Err(missing.error(by.as_deref().unwrap_or(what)))
    }

    fn need_artifacts(&self, program: &Program) -> Result<(), StoreError> {
        let what = format!("program {}", program.id.short());
        self.need(&what, |walk| {
            walk.records(None, Kind::Artifact, &program.artifacts());
        })
    }
}

impl Source for Records {
    fn links(&self, kind: Kind, id: &Digest) -> Result<Option<Links>, StoreError> {
        Ok(match kind {
            Kind::Program => self.read::<Program>(id)?.map(|(program, checksum)| Links {
                checksum,
                to: program.artifacts(),
            }),
            _ => self
                .read::<Artifact>(id)?
                .map(|(artifact, checksum)| Links {
                    checksum,
                    to: artifact.objects(),
                }),
        })
    }

    fn has_object(&self, digest: &Digest) -> bool {
        self.objects.has(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};

    #[test]
    fn records_come_back_and_the_first_one_stays() {
        let (_dir, store) = testing::store();
        let artifact = testing::artifact(&store, "block");
        assert!(!store.records().has_artifact(&artifact.id).unwrap());
        assert_eq!(store.records().put_artifact(&artifact).unwrap(), artifact);
        let mut other = artifact.clone();
        other.receipt = testing::read(serde_json::json!({"seconds": {"compile": 2.0}}));
        assert_eq!(store.records().put_artifact(&other).unwrap(), artifact);
        let found = store.records().artifact(&artifact.id).unwrap();
        assert_eq!(found, Some(artifact.clone()));
        let program = testing::program("m", 8, &[artifact.id]);
        assert_eq!(store.records().put_program(&program).unwrap(), program);
        assert!(store.records().has_program(&program.id).unwrap());
        assert_eq!(store.records().program(&program.id).unwrap(), Some(program));
        assert_eq!(store.records().program(&artifact.id).unwrap(), None);
    }

    #[test]
    fn an_artifact_whose_object_is_gone_is_replaced() {
        let (_dir, store) = testing::store();
        let old = testing::artifact(&store, "old");
        store.records().put_artifact(&old).unwrap();
        assert!(store.records().keep_artifact(&old.id).unwrap());
        fs::remove_file(store.layout().object(&old.object)).unwrap();
        assert!(!store.records().keep_artifact(&old.id).unwrap());
        let new = Artifact {
            object: store.objects().put_bytes(b"new").unwrap(),
            ..old
        };
        assert_eq!(store.records().put_artifact(&new).unwrap(), new);
        assert_eq!(store.records().artifact(&new.id).unwrap(), Some(new));
    }

    #[test]
    fn nothing_refers_to_what_is_not_there() {
        let (_dir, store) = testing::store();
        let mut artifact = testing::artifact(&store, "block");
        artifact.log = Some(Digest::of(b"log"));
        let error = store.records().put_artifact(&artifact).unwrap_err();
        let object = matches!(error, StoreError::Dangling { kind: "object", .. });
        assert!(object, "{error}");
        let program = testing::program("m", 8, &[artifact.id]);
        let put = store.records().put_program(&program);
        assert_eq!(testing::refused(put), "Dangling");
        let release = testing::release("m", None, &[program.id]);
        let put = store.releases().put(&release);
        assert_eq!(testing::refused(put), "Dangling");
        assert_eq!(store.releases().get("m", None).unwrap(), None);
    }

    #[test]
    fn a_failure_goes_with_the_next_success() {
        let (_dir, store) = testing::store();
        let artifact = testing::artifact(&store, "block");
        for message in ["first", "second"] {
            let failure = testing::failure(artifact.id, message);
            store.records().put_failure(&failure).unwrap();
        }
        let failed = || store.records().failure(&artifact.id).unwrap();
        assert_eq!(failed().unwrap().message, "second");
        store.records().put_artifact(&artifact).unwrap();
        assert_eq!(failed(), None);
    }

    #[test]
    fn a_damaged_or_swapped_record_is_an_error_that_names_the_file() {
        let (_dir, store) = testing::store();
        let [one, two] = ["one", "two"].map(|name| testing::put_artifact(&store, name));
        let path = store.layout().record(Kind::Artifact, &one.id);
        let theirs = fs::read(store.layout().record(Kind::Artifact, &two.id)).unwrap();
        testing::damage(&path, |bytes| *bytes = theirs);
        let error = store.records().artifact(&one.id).unwrap_err();
        assert!(error.to_string().contains(&one.id.hex()), "{error}");
        assert_eq!(store.records().put_artifact(&one).unwrap(), one);
        assert_eq!(store.records().artifact(&one.id).unwrap(), Some(one));
    }
}
