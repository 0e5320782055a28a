//! Publishing records, and reading them back with their checksums verified. A record is published after everything it
//! refers to.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use rusqlite::Connection;
use serde::{Serialize, de::DeserializeOwned};

use super::{
    Store, checksum,
    error::{At, StoreError},
    layout::{Kind, Layout, check_name},
    publish,
    rows::{self, artifacts_of, objects_of},
    sync,
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program, Release, SCHEMA},
};

/// A record that is named by a key.
pub(crate) trait Record: Serialize + DeserializeOwned + PartialEq {
    const KIND: Kind;
    fn id(&self) -> Digest;
    fn schema(&self) -> u32;
    fn insert(&self, to: &Connection, checksum: &Digest, created: i64) -> rusqlite::Result<()>;
}

macro_rules! record {
    ($type:ty, $kind:expr, $insert:path) => {
        impl Record for $type {
            const KIND: Kind = $kind;
            fn id(&self) -> Digest {
                self.id
            }
            fn schema(&self) -> u32 {
                self.schema
            }
            fn insert(
                &self,
                to: &Connection,
                checksum: &Digest,
                created: i64,
            ) -> rusqlite::Result<()> {
                $insert(to, self, checksum, created)
            }
        }
    };
}
record!(Artifact, Kind::Artifact, rows::insert_artifact);
record!(Program, Kind::Program, rows::insert_program);
record!(Failure, Kind::Failure, rows::insert_failure);

impl Store {
    /// Keeps an artifact's record, whose objects must be in the store. Returns the record that the store has now: the
    /// given one, or the one of the same key that was there before.
    pub fn put_artifact(&self, artifact: &Artifact) -> Result<Artifact, StoreError> {
        let _adding = self.adding(&[&[artifact.id][..], &objects_of(artifact)].concat())?;
        self.need_objects(
            &format!("artifact {}", artifact.id.short()),
            &objects_of(artifact),
        )?;
        self.put_record(artifact, |old| {
            objects_of(old)
                .iter()
                .all(|o| self.has_sound_object(o).unwrap_or(false))
        })
    }

    /// Keeps a program's record, whose artifacts must be in the store. Returns the record that the store has now.
    pub fn put_program(&self, program: &Program) -> Result<Program, StoreError> {
        let _alone = self.claim(&program.id, &mut |_| true)?;
        self.put_claimed(program)
    }

    fn put_claimed(&self, program: &Program) -> Result<Program, StoreError> {
        check_name(&program.model)?;
        let _adding = self.adding(&[&[program.id][..], &artifacts_of(program)].concat())?;
        self.need_artifacts(program)?;
        self.put_record(program, |old| self.need_artifacts(old).is_ok())
    }

    /// Keeps why something could not be built, in the place of what was kept about it before.
    pub fn put_failure(&self, failure: &Failure) -> Result<(), StoreError> {
        if let Ok(Some(Failure { log: Some(old), .. })) = self.failure(&failure.id) {
            // A damaged log of the attempt before is set aside.
            self.restore_object(&old)?;
        }
        let _adding = self.adding(&[&[failure.id][..], failure.log.as_slice()].concat())?;
        let path = self.layout().record(Kind::Failure, &failure.id);
        self.leave_newer_failure(&failure.id)?;
        let (text, checksum) = checksum::encode(failure, &path)?;
        let mut pending = self.pending_file()?;
        std::io::Write::write_all(pending.file(), &text).at("write", pending.path())?;
        pending.replace(&path)?;
        let created = created(&path)?;
        self.index()
            .write(|tx| failure.insert(tx, &checksum, created))
    }

    /// Returns the artifact with this key, if the store has it.
    pub fn artifact(&self, id: &Digest) -> Result<Option<Artifact>, StoreError> {
        self.get(id)
    }

    /// Returns whether the artifact with this key is there with all its objects, undamaged, and if so keeps it from being
    /// collected for as long as this store is open: what a builder asks before it compiles.
    pub fn keep_artifact(&self, id: &Digest) -> Result<bool, StoreError> {
        self.keep(&[*id])?;
        if !self.has_artifact(id)? {
            return Ok(false);
        }
        let artifact = match self.artifact(id) {
            Ok(Some(artifact)) => artifact,
            // Putting it again sets a damaged one aside.
            Ok(None) | Err(StoreError::Record { .. }) => return Ok(false),
            Err(e) => return Err(e),
        };
        for object in objects_of(&artifact) {
            if !self.restore_object(&object)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the program with this request key, if the store has it.
    pub fn program(&self, id: &Digest) -> Result<Option<Program>, StoreError> {
        self.get(id)
    }

    /// Returns why the thing with this key could not be built, if the last attempt failed.
    pub fn failure(&self, id: &Digest) -> Result<Option<Failure>, StoreError> {
        self.get(id)
    }

    /// Indexes the record of `id` if its file is there and sound; returns whether it is.
    pub(super) fn adopt<R: Record>(&self, id: &Digest) -> Result<bool, StoreError> {
        let path = self.layout().record(R::KIND, id);
        if fs::symlink_metadata(&path).is_err() {
            return Ok(false);
        }
        if !self.is_read_only() {
            let _adding = self.adding(&[])?;
            if let Ok((record, checksum, created)) = record_file::<R>(self.layout(), &path) {
                self.index()
                    .write(|tx| record.insert(tx, &checksum, created))?;
            }
        }
        // gc may have been faster.
        self.has_sound_record::<R>(id)
    }

    /// Returns whether the record of `id` is there and undamaged. Costs a `stat`; a file that changed is read.
    pub(super) fn has_sound_record<R: Record>(&self, id: &Digest) -> Result<bool, StoreError> {
        let path = self.layout().record(R::KIND, id);
        if publish::as_published(&path) {
            return Ok(true);
        }
        match record_file::<R>(self.layout(), &path) {
            Ok(_) => {
                publish::settle_time(&self.layout().open(&path).at("read", &path)?);
                Ok(true)
            }
            // A newer precast wrote it: it is there.
            Err(StoreError::Newer { .. }) => Ok(true),
            Err(StoreError::Record { .. }) => Ok(false),
            Err(_) if !fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_file()) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Reads the record of `id`, checks it, and remembers that it was used.
    fn get<R: Record>(&self, id: &Digest) -> Result<Option<R>, StoreError> {
        let path = self.layout().record(R::KIND, id);
        let Some((record, _)) = checksum::read::<R>(self.layout(), &path)? else {
            return Ok(None);
        };
        known_schema(record.schema(), &path)?;
        if record.id() != *id {
            return Err(checksum::damaged(
                &path,
                "it is the record of another key".into(),
            ));
        }
        self.used(id);
        Ok(Some(record))
    }

    fn put_record<R: Record>(
        &self,
        record: &R,
        sound: impl Fn(&R) -> bool,
    ) -> Result<R, StoreError> {
        let id = record.id();
        let path = self.layout().record(R::KIND, &id);
        self.leave_newer_failure(&id)?;
        let (text, _) = checksum::encode(record, &path)?;
        // What another process puts between the two steps is looked at in the next round.
        while !publish::bytes(self.pending_file()?, &path, &text)? {
            match self.get::<R>(&id) {
                Ok(Some(old)) if sound(&old) => break,
                Ok(_) | Err(StoreError::Record { .. }) => self.set_aside(&path)?,
                Err(e) => return Err(e),
            }
        }
        sync::point("put:record-published");
        let Some((now, checksum)) = checksum::read::<R>(self.layout(), &path)? else {
            return Err(StoreError::Missing { digest: id, path });
        };
        let created = created(&path)?;
        self.index().write(|tx| {
            now.insert(tx, &checksum, created)?;
            tx.prepare_cached("DELETE FROM failures WHERE id=?")?
                .execute([id.as_bytes()])
        })?;
        self.forget_failure(&id)?;
        self.used(&id);
        Ok(now)
    }

    /// Refuses to replace or remove what a newer precast kept about a failure.
    fn leave_newer_failure(&self, id: &Digest) -> Result<(), StoreError> {
        match self.failure(id) {
            Err(e @ StoreError::Newer { .. }) => Err(e),
            _ => Ok(()),
        }
    }

    /// Removes what was kept about an earlier failure of what now succeeded.
    fn forget_failure(&self, id: &Digest) -> Result<(), StoreError> {
        let path = self.layout().record(Kind::Failure, id);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at("remove", &path),
            _ => Ok(()),
        }
    }

    pub(super) fn need_objects(&self, what: &str, objects: &[Digest]) -> Result<(), StoreError> {
        match objects.iter().find(|object| !self.has_object(object)) {
            Some(object) => Err(dangling(what, "object", object)),
            None => Ok(()),
        }
    }

    pub(super) fn need_artifacts(&self, program: &Program) -> Result<(), StoreError> {
        let what = format!("program {}", program.id.short());
        for id in artifacts_of(program) {
            let Some(artifact) = self.artifact(&id)? else {
                return Err(dangling(&what, "artifact", &id));
            };
            self.need_objects(&format!("artifact {}", id.short()), &objects_of(&artifact))?;
        }
        Ok(())
    }
}

/// Returns when the file at `path` was published, in seconds since 1970.
pub(super) fn created(path: &Path) -> Result<i64, StoreError> {
    Ok(fs::symlink_metadata(path).at("look at", path)?.mtime())
}

/// Refuses a record that a newer precast wrote.
pub(super) fn known_schema(schema: u32, path: &Path) -> Result<(), StoreError> {
    match schema <= SCHEMA {
        true => Ok(()),
        false => Err(checksum::newer(path, schema)),
    }
}

pub(super) fn dangling(what: &str, kind: &'static str, id: &Digest) -> StoreError {
    StoreError::Dangling {
        what: what.to_owned(),
        kind,
        id: *id,
    }
}

/// Reads one record file and checks that it lies where it belongs.
pub(crate) fn record_file<R: Record>(
    layout: &Layout,
    path: &Path,
) -> Result<(R, Digest, i64), StoreError> {
    let gone = || checksum::damaged(path, "it is gone".into());
    let (record, checksum) = checksum::read::<R>(layout, path)?.ok_or_else(gone)?;
    known_schema(record.schema(), path)?;
    match layout.record(R::KIND, &record.id()) == path {
        true => Ok((record, checksum, created(path)?)),
        false => Err(checksum::damaged(
            path,
            "it is the record of another key".into(),
        )),
    }
}

/// Reads one release file and checks that it lies where it belongs.
pub(crate) fn release_file(
    layout: &Layout,
    path: &Path,
) -> Result<(Release, Digest, i64), StoreError> {
    let gone = || checksum::damaged(path, "it is gone".into());
    let (release, checksum) = checksum::read::<Release>(layout, path)?.ok_or_else(gone)?;
    known_schema(release.schema, path)?;
    match layout.release(&release.model, release.seq)? == path {
        true => Ok((release, checksum, created(path)?)),
        false => Err(checksum::damaged(
            path,
            "it is the record of another release".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};

    #[test]
    fn records_come_back_and_the_first_one_stays() {
        let (_dir, store) = testing::store();
        let artifact = testing::artifact(&store, "block");
        assert!(!store.has_artifact(&artifact.id).unwrap());
        assert_eq!(store.put_artifact(&artifact).unwrap(), artifact);
        let mut other = artifact.clone();
        other.receipt = testing::read(serde_json::json!({"seconds": 2.0}));
        assert_eq!(store.put_artifact(&other).unwrap(), artifact);
        assert_eq!(
            store.artifact(&artifact.id).unwrap(),
            Some(artifact.clone())
        );
        let program = testing::program("m", 8, &[artifact.id]);
        assert_eq!(store.put_program(&program).unwrap(), program);
        assert!(store.has_program(&program.id).unwrap());
        assert_eq!(store.program(&program.id).unwrap(), Some(program));
        assert_eq!(store.program(&artifact.id).unwrap(), None);
    }

    #[test]
    fn a_replacement_that_an_earlier_version_was_cut_off_in_is_finished_on_opening() {
        for published in [false, true] {
            let (_dir, store) = testing::store();
            let [one, two] = ["one", "two"].map(|name| {
                let artifact = testing::artifact(&store, name);
                store.put_artifact(&artifact).unwrap().id
            });
            let old = testing::program("m", 8, &[one]);
            store.put_program(&old).unwrap();
            let mut new = testing::program("m", 8, &[two]);
            let mut both = testing::program("m", 8, &[one, two]);
            (new.id, both.id) = (old.id, old.id);
            let path = store.layout().record(Kind::Program, &old.id);
            let (_, checksum) = checksum::encode(&old, &path).unwrap();
            let widen = |tx: &rusqlite::Transaction| {
                rows::insert_program(tx, &both, &checksum, 1)?;
                tx.execute(
                    "INSERT INTO marked VALUES ('replaced',?)",
                    [old.id.as_bytes()],
                )
            };
            store.index().write(widen).unwrap();
            if published {
                let (text, _) = checksum::encode(&new, &path).unwrap();
                testing::damage(&path, |bytes| *bytes = text);
            }
            assert_ne!(store.verify().unwrap().defects, []);
            let folder = store.path().to_owned();
            drop(store);
            let store = Store::open(folder).unwrap();
            assert_eq!(store.verify().unwrap().defects, []);
            assert!(store.has_program(&old.id).unwrap());
            let is = if published { new } else { old };
            assert_eq!(store.program(&is.id).unwrap(), Some(is));
        }
    }

    #[test]
    fn an_artifact_whose_object_is_gone_is_replaced() {
        let (_dir, store) = testing::store();
        let old = testing::artifact(&store, "old");
        store.put_artifact(&old).unwrap();
        assert!(store.keep_artifact(&old.id).unwrap());
        fs::remove_file(store.layout().object(&old.object)).unwrap();
        assert!(!store.keep_artifact(&old.id).unwrap());
        let new = Artifact {
            object: store.put_bytes(b"new").unwrap(),
            ..old
        };
        assert_eq!(store.put_artifact(&new).unwrap(), new);
        assert_eq!(store.artifact(&new.id).unwrap(), Some(new));
    }

    #[test]
    fn nothing_refers_to_what_is_not_there() {
        let (_dir, store) = testing::store();
        let mut artifact = testing::artifact(&store, "block");
        artifact.log = Some(Digest::of(b"log"));
        let error = store.put_artifact(&artifact).unwrap_err();
        assert!(
            matches!(error, StoreError::Dangling { kind: "object", .. }),
            "{error}"
        );
        let program = testing::program("m", 8, &[artifact.id]);
        assert!(matches!(
            store.put_program(&program),
            Err(StoreError::Dangling { .. })
        ));
        let release = testing::release("m", None, &[program.id]);
        assert!(matches!(
            store.put_release(&release),
            Err(StoreError::Dangling { .. })
        ));
        assert_eq!(store.release("m", None).unwrap(), None);
    }

    #[test]
    fn a_failure_goes_with_the_next_success() {
        let (_dir, store) = testing::store();
        let artifact = testing::artifact(&store, "block");
        let failure = testing::failure(artifact.id, "first");
        store.put_failure(&failure).unwrap();
        store
            .put_failure(&testing::failure(artifact.id, "second"))
            .unwrap();
        assert_eq!(
            store.failure(&artifact.id).unwrap().unwrap().message,
            "second"
        );
        store.put_artifact(&artifact).unwrap();
        assert_eq!(store.failure(&artifact.id).unwrap(), None);
    }

    #[test]
    fn a_damaged_or_swapped_record_is_an_error_that_names_the_file() {
        let (_dir, store) = testing::store();
        let one = store
            .put_artifact(&testing::artifact(&store, "one"))
            .unwrap();
        let two = store
            .put_artifact(&testing::artifact(&store, "two"))
            .unwrap();
        let path = store.layout().record(Kind::Artifact, &one.id);
        let theirs = fs::read(store.layout().record(Kind::Artifact, &two.id)).unwrap();
        testing::damage(&path, |bytes| *bytes = theirs);
        let error = store.artifact(&one.id).unwrap_err();
        assert!(error.to_string().contains(&one.id.hex()), "{error}");
        assert_eq!(store.put_artifact(&one).unwrap(), one);
        assert_eq!(store.artifact(&one.id).unwrap(), Some(one));
    }

    #[test]
    fn a_receipt_that_is_no_object_is_an_error_that_names_record_and_field() {
        let (_dir, store, _, program) = testing::filled();
        let path = store.layout().record(Kind::Program, &program.id);
        let mut json = serde_json::to_value(&program).unwrap();
        let mut put = |receipt: serde_json::Value| {
            json["receipt"] = receipt;
            let (text, _) = checksum::encode(&json, &path).unwrap();
            testing::damage(&path, |bytes| *bytes = text);
            store.program(&program.id)
        };
        // A field of another type is no reason to refuse a program.
        let odd = serde_json::json!({"gate": "passed"});
        let read = put(odd.clone()).unwrap().unwrap();
        assert_eq!(serde_json::to_value(&read.receipt).unwrap(), odd);
        assert_eq!(
            (read.seconds(false), read.slower_than_eager()),
            (None, false)
        );
        let message = put(5.into()).unwrap_err().to_string();
        assert!(message.contains(&program.id.hex()), "{message}");
        assert!(message.contains("expected a receipt"), "{message}");
    }
}
