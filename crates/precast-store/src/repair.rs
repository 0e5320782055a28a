//! Repairs the defects that `verify` finds. Damaged files move to `quarantine/` and are not deleted; rows are rebuilt from
//! the files.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    Store,
    defect::{Defect, Needs},
    error::{At, StoreError},
    index::Index,
    layout::Layout,
    lock::Mode,
    reindex, rows,
};

/// What `repair` did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Repaired {
    /// Version of this document.
    pub schema: u32,
    /// What was wrong.
    pub found: Vec<Defect>,
    /// Files that were moved to `quarantine/`, as they were named in the store.
    pub set_aside: Vec<PathBuf>,
    /// What is still wrong: it needs the next build, or a person.
    pub left: Vec<Defect>,
}

impl Repaired {
    /// Returns whether something was lost that the next build has to make again.
    pub fn lost(&self) -> bool {
        self.found
            .iter()
            .any(|defect| defect.needs() == Needs::Rebuild)
    }
}

impl Store {
    /// Repairs defects. Files that can't be repaired are set aside.
    pub fn repair(&self) -> Result<Repaired, StoreError> {
        self.writable("repair the store")?;
        let first = self.plain_folders()?;
        self.layout().complete()?;
        let mut found = self.verify()?.defects;
        found.extend(first);
        if found
            .iter()
            .any(|defect| matches!(defect, Defect::Index { .. }))
        {
            self.reindex()?;
        }
        let mut set_aside = BTreeSet::new();
        let mut left = found.clone();
        // Setting one thing aside leaves what refers to it without it: object, artifact, program.
        for _ in 0..4 {
            let more = self.repair_some(&left, &mut set_aside)?;
            self.recover()?;
            self.reindex()?;
            left = self.verify()?.defects;
            if !more {
                break;
            }
        }
        let set_aside = set_aside.into_iter().collect();
        Ok(Repaired {
            schema: 1,
            found,
            set_aside,
            left,
        })
    }

    /// Makes the index again from the files.
    pub fn reindex(&self) -> Result<(), StoreError> {
        self.writable("rebuild the index")?;
        let _alone = self.lock(Mode::Rebuild)?;
        let sound = Index::open_read_only(self.layout()).and_then(|own| {
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
            let path = self.layout().index();
            self.set_aside(&path)?;
            self.set_aside(&path.with_extension("sqlite-journal"))?;
        }
        self.index().write(|tx| {
            tx.execute_batch(
                "DELETE FROM objects; DELETE FROM artifacts; DELETE FROM programs; DELETE FROM releases; \
                 DELETE FROM artifact_objects; DELETE FROM program_artifacts; DELETE FROM release_programs; \
                 DELETE FROM release_objects; DELETE FROM failures; DELETE FROM ready;",
            )?;
            for id in rows::bad_uses(tx)? {
                tx.execute("DELETE FROM uses WHERE id=?", [id])?;
            }
            reindex::fill(self.layout(), tx)
        })
    }

    /// Moves away what is in the place of the store's own folders: nothing works before that.
    fn plain_folders(&self) -> Result<Vec<Defect>, StoreError> {
        let mut found = Vec::new();
        for folder in Layout::FOLDERS {
            let path = self.path().join(folder);
            if fs::symlink_metadata(&path).is_ok_and(|meta| !meta.is_dir()) {
                let what = "file or a link".to_owned();
                found.push(Defect::NotPlain {
                    path: folder.into(),
                    what,
                });
                match folder {
                    // It becomes a foreign file, and follows the others.
                    "quarantine" => {
                        let to = path.with_extension("old");
                        fs::rename(&path, to).at("set aside", &path)?;
                    }
                    _ => self.set_aside(&path)?,
                }
            }
        }
        Ok(found)
    }

    /// Does what each defect needs that is about a file; returns whether others may follow from it.
    fn repair_some(
        &self,
        defects: &[Defect],
        aside: &mut BTreeSet<PathBuf>,
    ) -> Result<bool, StoreError> {
        let _alone = self.lock(Mode::Delete)?;
        let mut more = false;
        for defect in defects {
            let away = |path: &Path| self.set_aside(&self.path().join(path));
            match defect {
                // A record has no other witness than itself of what others wrote into it.
                Defect::Mode { path, mode }
                    if mode & 0o022 != 0 && path.extension().is_some_and(|end| end == "json") =>
                {
                    away(path)?;
                    aside.insert(path.clone());
                    more = true;
                }
                Defect::Mode { path, .. } => self.reset_mode(path)?,
                Defect::Linked { path, .. } => self.unlink_others(path)?,
                Defect::Tag { path } => {
                    away(path)?;
                    more = true;
                }
                // A release is not set aside: it is whole again once the next build has made what it lacks.
                Defect::NoProgram { .. } => {}
                Defect::NoObject { by, .. } if by.starts_with("releases") => {}
                Defect::Foreign { path }
                | Defect::Misplaced { path }
                | Defect::NotPlain { path, .. }
                | Defect::Object { path, .. }
                | Defect::Ready { path, .. }
                | Defect::Record { path, .. }
                | Defect::Stale { path }
                | Defect::NoObject { by: path, .. }
                | Defect::Size { by: path, .. }
                | Defect::NoArtifact { by: path, .. } => {
                    away(path)?;
                    aside.insert(path.clone());
                    more = true;
                }
                _ => {}
            }
        }
        self.layout().complete()?;
        Ok(more)
    }

    fn reset_mode(&self, inside: &Path) -> Result<(), StoreError> {
        let path = self.path().join(inside);
        let meta = fs::symlink_metadata(&path).at("look at", &path)?;
        if meta.is_file() && meta.nlink() > 1 {
            // The mode belongs to all names of a file: only a copy of our own may be changed.
            return self.unlink_others(inside);
        }
        let mode = match meta.is_dir() {
            true => meta.permissions().mode() & 0o7755,
            false => 0o444,
        };
        fs::set_permissions(&path, Permissions::from_mode(mode)).at("set the mode of", &path)
    }

    /// Gives a file that has other names a copy of its own.
    fn unlink_others(&self, path: &Path) -> Result<(), StoreError> {
        let path = self.path().join(path);
        let mut pending = self.pending_file()?;
        let mut file = super::publish::open_plain(&path).at("read", &path)?;
        std::io::copy(&mut file, pending.file()).at("copy", &path)?;
        pending.replace(&path)
    }
}
