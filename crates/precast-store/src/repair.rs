//! Repairs the defects that `verify` finds. Damaged files move to `quarantine/` and are not deleted; rows are rebuilt
//! from the files.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    checksum::record_file,
    defect::{Defect, Needs},
    error::{At, StoreError},
    graph::Graph,
    index::Index,
    layout::StoreLayout,
    lock::Mode,
    objects::Objects,
    publish::{self, as_published, settle_time},
    reindex::{self, named},
    rows::{self, bad_sum},
    sync,
    verify::Audit,
};
use crate::{Digest, record::Release};

/// The result of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Repaired {
    /// Version of this document.
    pub schema: u32,
    /// The defects before it.
    pub found: Vec<Defect>,
    /// Files that were moved to `quarantine/`, by their names in the store.
    pub set_aside: Vec<PathBuf>,
    /// Objects that were restored from their unpacked files.
    pub restored: Vec<Digest>,
    /// The remaining defects, which need the next build or a person.
    pub left: Vec<Defect>,
}

/// The files that a repair has set aside so far, and the objects that it has restored.
#[derive(Default)]
struct Done {
    aside: BTreeSet<PathBuf>,
    restored: BTreeSet<Digest>,
}

impl Repaired {
    /// Returns whether something was lost that the next build must create again.
    pub fn lost(&self) -> bool {
        let lost = |defect: &&Defect| defect.needs() == Needs::Rebuild;
        (self.found.iter().filter(lost)).any(|defect| match defect {
            Defect::Object { path, .. } => {
                !named(path, ".zst").is_some_and(|digest| self.restored.contains(&digest))
            }
            Defect::NoObject { digest, .. } => !self.restored.contains(digest),
            _ => true,
        })
    }
}

impl Audit {
    fn objects(&self) -> &Objects {
        &self.collector.releases.records.objects
    }

    /// Repairs defects. Files that can't be repaired are set aside.
    ///
    /// Hashes bytes first, without a lock. Then one exclusive lock covers the second check and the repair, so that no
    /// other process adds, deletes or takes a lease between the two.
    pub fn repair(&self) -> Result<Repaired, StoreError> {
        self.base().writable("repair the store")?;
        let mut first = self.plain_folders(&["quarantine", "locks"])?;
        let looked = self.look(true)?;
        sync::point("repair:looked");
        let _lock = self.base().lock(Mode::Delete)?;
        first.extend(self.plain_folders(&StoreLayout::FOLDERS)?);
        self.base().layout.complete()?;
        let mut found = self.again(looked)?.defects;
        found.extend(first);
        if found
            .iter()
            .any(|defect| matches!(defect, Defect::Index { .. }))
        {
            self.reindex_locked()?;
        }
        let mut done = Done::default();
        let mut left = found.clone();
        // Setting one thing aside breaks the references to it: object, artifact, program.
        for _ in 0..4 {
            sync::point("repair:found");
            let more = self.repair_some(&left, &mut done)?;
            sync::point("repair:set-aside");
            self.collector.recover_locked()?;
            self.reindex_locked()?;
            left = self.look(false)?.defects;
            if !more {
                break;
            }
        }
        Ok(Repaired {
            schema: 1,
            found,
            set_aside: done.aside.into_iter().collect(),
            restored: done.restored.into_iter().collect(),
            left,
        })
    }

    /// Sets aside the damaged releases of a model, and returns their numbers. Costs a `stat` of each release.
    pub fn set_damaged_releases_aside(&self, model: &str) -> Result<Vec<u64>, StoreError> {
        let mut damaged = Vec::new();
        for seq in self.collector.releases.sequences(model)? {
            let path = self.base().layout.release(model, seq)?;
            if !as_published(&path) && self.is_damaged_release(&path)? {
                damaged.push(seq);
            }
        }
        if damaged.is_empty() {
            return Ok(damaged);
        }
        self.base().writable("set damaged releases aside")?;
        let _lock = self.base().lock(Mode::Delete)?;
        for &seq in &damaged {
            let path = self.base().layout.release(model, seq)?;
            if self.is_damaged_release(&path)? {
                self.base().set_aside(&path)?;
            }
        }
        self.base()
            .index
            .write(|tx| reindex::drop_gone_releases(&self.base().layout, tx))?;
        Ok(damaged)
    }

    fn is_damaged_release(&self, path: &Path) -> Result<bool, StoreError> {
        match record_file::<Release>(&self.base().layout, path) {
            Ok(_) => {
                settle_time(&self.base().layout.open(path).at("read", path)?);
                Ok(false)
            }
            Err(StoreError::Record { .. }) => Ok(fs::symlink_metadata(path).is_ok()),
            Err(StoreError::Newer { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Fails if the index is damaged: its pages, or the check sum of a row.
    pub fn check_index(&self) -> Result<(), StoreError> {
        self.base().index.with(|index| {
            let checked: String = index.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
            if checked != "ok" {
                return Err(bad_sum("sqlite_schema"));
            }
            // One transaction: each query costs locks of the index.
            Graph::read(&*index.unchecked_transaction()?).map(drop)
        })
    }

    /// Rebuilds the index from the files.
    pub fn reindex(&self) -> Result<(), StoreError> {
        self.base().writable("rebuild the index")?;
        let _lock = self.base().lock(Mode::Rebuild)?;
        self.reindex_locked()
    }

    /// Like [`Self::reindex`]. The caller has `Mode::Rebuild` or `Mode::Delete`.
    fn reindex_locked(&self) -> Result<(), StoreError> {
        let sound = Index::open_read_only(&self.base().locks).and_then(|own| {
            own.with(|index| {
                let checked: String =
                    index.query_row("PRAGMA integrity_check(1)", [], |r| r.get(0))?;
                Ok(checked == "ok")
            })
        });
        if let Err(e @ StoreError::Newer { .. }) = sound {
            return Err(e);
        }
        if !sound.unwrap_or(false) {
            let path = self.base().layout.index();
            self.base().set_aside(&path)?;
            self.base()
                .set_aside(&path.with_extension("sqlite-journal"))?;
        }
        self.base().index.write(|tx| {
            tx.execute_batch(
                "DELETE FROM objects; DELETE FROM artifacts; DELETE FROM programs; DELETE FROM releases; \
                 DELETE FROM artifact_objects; DELETE FROM program_artifacts; DELETE FROM release_programs; \
                 DELETE FROM release_objects; DELETE FROM failures;",
            )?;
            for id in rows::bad_uses(tx)? {
                tx.execute("DELETE FROM uses WHERE id=?", [id])?;
            }
            reindex::fill(&self.base().layout, tx)
        })
    }

    /// Creates these folders of the store, which everything else needs. Sets aside other things in their places.
    fn plain_folders(&self, folders: &[&str]) -> Result<Vec<Defect>, StoreError> {
        let mut found = Vec::new();
        for &folder in folders {
            let path = self.base().path().join(folder);
            if fs::symlink_metadata(&path).is_ok_and(|meta| !meta.is_dir()) {
                let what = "file or a link".to_owned();
                found.push(Defect::NotPlain {
                    path: folder.into(),
                    what,
                });
                if folder == "quarantine" {
                    // The next round sets it aside as an unknown file.
                    let to = path.with_extension("old");
                    fs::rename(&path, to).at("set aside", &path)?;
                } else {
                    self.base().set_aside(&path)?;
                }
            }
            publish::folder(&path)?;
        }
        Ok(found)
    }

    /// Repairs the defects of files. Returns whether the repair may cause others. The caller has `Mode::Delete`.
    fn repair_some(&self, defects: &[Defect], done: &mut Done) -> Result<bool, StoreError> {
        let mut more = false;
        for defect in defects {
            let away = |path: &Path| self.base().set_aside(&self.base().path().join(path));
            match defect {
                // The checksum of a record is in the same file, so it does not detect a change by another user.
                Defect::Mode { path, mode }
                    if mode & 0o022 != 0 && path.extension().is_some_and(|end| end == "json") =>
                {
                    away(path)?;
                    done.aside.insert(path.clone());
                    more = true;
                }
                Defect::Mode { path, .. } => self.reset_mode(path)?,
                Defect::Linked { path, .. } => self.unlink_others(path)?,
                Defect::Tag { path } => {
                    away(path)?;
                    more = true;
                }
                Defect::Object { path, .. } => {
                    away(path)?;
                    done.aside.insert(path.clone());
                    if let Some(digest) = named(path, ".zst") {
                        self.restored(&digest, done)?;
                    }
                    more = true;
                }
                // The object was restored, for this defect or an earlier one.
                Defect::NoObject { digest, .. } if self.restored(digest, done)? => more = true,
                // A release is not set aside: the next build completes it.
                Defect::NoProgram { .. } => {}
                Defect::NoObject { by, .. } if by.starts_with("releases") => {}
                Defect::Ready { path, .. }
                    if let Some(digest) = named(path, "")
                        && !self.objects().has(&digest)
                        && self.restored(&digest, done)? =>
                {
                    more = true;
                }
                Defect::Foreign { path }
                | Defect::Misplaced { path }
                | Defect::NotPlain { path, .. }
                | Defect::Ready { path, .. }
                | Defect::Record { path, .. }
                | Defect::Stale { path }
                | Defect::NoObject { by: path, .. }
                | Defect::Size { by: path, .. }
                | Defect::NoArtifact { by: path, .. } => {
                    away(path)?;
                    done.aside.insert(path.clone());
                    more = true;
                }
                _ => {}
            }
        }
        self.base().layout.complete()?;
        Ok(more)
    }

    /// Returns whether an object exists. Restores it from its unpacked file if that is sound. The caller has
    /// `Mode::Delete`.
    fn restored(&self, digest: &Digest, done: &mut Done) -> Result<bool, StoreError> {
        if !self.objects().has(digest) {
            let Some((pending, written)) = self.objects().encode_unpacked(digest)? else {
                return Ok(false);
            };
            self.objects().publish_written(pending, &written)?;
            done.restored.insert(*digest);
        }
        Ok(true)
    }

    fn reset_mode(&self, inside: &Path) -> Result<(), StoreError> {
        let path = self.base().path().join(inside);
        let meta = fs::symlink_metadata(&path).at("look at", &path)?;
        if meta.is_file() && meta.nlink() > 1 {
            // The mode belongs to all names of a file. Only a private copy may be changed.
            return self.unlink_others(inside);
        }
        let folder = meta.permissions().mode() & 0o7755;
        let mode = if meta.is_dir() { folder } else { 0o444 };
        fs::set_permissions(&path, Permissions::from_mode(mode)).at("set the mode of", &path)
    }

    /// Replaces a file that has other names by a copy of its own.
    fn unlink_others(&self, path: &Path) -> Result<(), StoreError> {
        let path = self.base().path().join(path);
        let mut pending = self.collector.releases.leases().pending_file()?;
        let mut file = publish::open_plain(&path).at("read", &path)?;
        std::io::copy(&mut file, pending.file()).at("copy", &path)?;
        pending.replace(&path)
    }
}
