//! Carries out a plan of gc, in batches, so that other processes wait only briefly.
//!
//! A batch holds `Mode::Delete`, under which no process takes a lease or adds. It reads leases and references again,
//! marks the rows that may still be deleted, deletes their files, then the rows. After a crash, marked rows count as
//! deleted, and the next gc finishes them.

use std::{
    collections::{BTreeSet, HashSet},
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, params};
use serde::{Deserialize, Serialize};

use super::{
    error::{At, StoreError},
    gc::{Collector, GcPlan, Policy, Victim},
    layout::Kind,
    lock::Mode,
    prepacked,
    publish::{plain_folder, remove_all, sync_folder},
    quarantine,
    reason::Reason,
    reindex, sync,
};
use crate::Digest;

const BATCH: usize = 1024;

/// Age at which files in `tmp/` without a lease are removed.
const STALE: Duration = Duration::from_secs(3600);

/// The result of a collection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Collected {
    /// Releases that were deleted.
    pub releases: usize,
    /// Programs that were deleted.
    pub programs: usize,
    /// Artifacts that were deleted.
    pub artifacts: usize,
    /// Objects that were deleted.
    pub objects: usize,
    /// Records of failed builds that were deleted.
    pub failures: usize,
    /// Files removed from `quarantine/`.
    pub damaged: usize,
    /// Bytes of the files removed from `quarantine/`.
    pub damaged_bytes: u64,
    /// Bytes of the objects and unpacked files that were deleted, as [`GcPlan`] counts them.
    pub bytes: u64,
    /// Things of the plan that were held or needed at the time of their deletion.
    pub skipped: usize,
}

/// The differences between the four kinds of victims.
struct Table {
    name: &'static str,
    /// Whether it refers to other things.
    refers: bool,
    /// SQL for a reference to it.
    needed: &'static str,
    delete: &'static str,
}

const PROGRAMS: Table = Table {
    name: "programs",
    refers: true,
    needed: "SELECT 1 FROM release_programs WHERE program=?1",
    delete: "DELETE FROM programs WHERE id=?1",
};
const ARTIFACTS: Table = Table {
    name: "artifacts",
    refers: true,
    needed: "SELECT 1 FROM program_artifacts WHERE artifact=?1",
    delete: "DELETE FROM artifacts WHERE id=?1",
};
const OBJECTS: Table = Table {
    name: "objects",
    refers: false,
    needed: "SELECT 1 FROM artifact_objects WHERE object=?1 UNION ALL \
             SELECT 1 FROM releases WHERE weights=?1 UNION ALL SELECT 1 FROM release_objects WHERE object=?1 \
             UNION ALL SELECT 1 FROM failures WHERE log=?1",
    delete: "DELETE FROM objects WHERE digest=?1",
};
const FAILURES: Table = Table {
    name: "failures",
    refers: true,
    needed: "SELECT 1 WHERE 0 AND ?1",
    delete: "DELETE FROM failures WHERE id=?1",
};

impl Collector {
    /// Updates the index, then computes the plan of `policy` and carries it out.
    pub fn gc(&self, policy: &Policy) -> Result<(GcPlan, Collected), StoreError> {
        self.recover()?;
        let plan = self.plan(policy)?;
        let done = self.collect(&plan)?;
        Ok((plan, done))
    }

    /// Carries out `plan`. Things that are held or needed by now stay.
    pub fn collect(&self, plan: &GcPlan) -> Result<Collected, StoreError> {
        self.base().writable("delete from the store")?;
        let mut done = Collected::default();
        self.drop_releases(plan, &mut done)?;
        done.programs = self.batches(&PROGRAMS, &plan.programs, &mut done)?;
        done.artifacts = self.batches(&ARTIFACTS, &plan.artifacts, &mut done)?;
        done.failures = self.batches(&FAILURES, &plan.failures, &mut done)?;
        done.objects = self.batches(&OBJECTS, &plan.objects, &mut done)?;
        (done.damaged, done.damaged_bytes) =
            quarantine::remove(self.base().path(), &plan.quarantine)?;
        // The plan has counted these bytes with the weights.
        prepacked::sweep(self.base());
        self.forget_uses()?;
        Ok(done)
    }

    /// Deletes an object, unless something refers to it or a process holds it.
    pub fn discard(&self, object: &Digest) -> Result<(), StoreError> {
        self.base().writable("delete from the store")?;
        let victim = Victim {
            id: *object,
            name: String::new(),
            bytes: 0,
            reason: Reason::Unreferenced,
        };
        self.batches(&OBJECTS, &[victim], &mut Collected::default())?;
        prepacked::sweep(self.base());
        Ok(())
    }

    fn drop_releases(&self, plan: &GcPlan, done: &mut Collected) -> Result<(), StoreError> {
        for release in &plan.releases {
            let _lock = self.base().lock(Mode::Delete)?;
            let path = self.base().layout.release(&release.model, release.seq)?;
            let last = self.releases.sequences(&release.model)?.last() == Some(&release.seq);
            if last || self.releases.newest(&release.model)? == Some(release.seq) {
                done.skipped += 1;
                continue;
            }
            remove(&path)?;
            // The removal of the name must be durable before its programs are deleted.
            if let Some(folder) = path.parent() {
                sync_folder(folder)?;
            }
            sync::point("gc:release-removed");
            self.base().index.write(|tx| {
                tx.prepare_cached("DELETE FROM releases WHERE model=? AND seq=?")?
                    .execute(params![release.model, release.seq as i64])
            })?;
            done.releases += 1;
        }
        Ok(())
    }

    fn batches(
        &self,
        table: &Table,
        victims: &[Victim],
        done: &mut Collected,
    ) -> Result<usize, StoreError> {
        let mut count = 0;
        for batch in victims.chunks(BATCH) {
            let ids: Vec<Digest> = batch.iter().map(|victim| victim.id).collect();
            sync::point("gc:before-batch");
            let _lock = self.base().lock(Mode::Delete)?;
            let leased = self.releases.leases().held_by_live()?;
            let going = self
                .base()
                .index
                .write(|tx| mark(tx, table, &ids, &leased))?;
            sync::point("gc:marked");
            let bytes = self.finish(table, &going)?;
            done.bytes += if table.refers { 0 } else { bytes };
            done.skipped += ids.len() - going.len();
            count += going.len();
        }
        Ok(count)
    }

    /// Deletes the files, then the rows, of marked things. Returns the freed bytes.
    fn finish(&self, table: &Table, ids: &[Digest]) -> Result<u64, StoreError> {
        let mut bytes = 0;
        let mut folders = BTreeSet::new();
        for id in ids {
            for path in self.paths(table, id) {
                bytes += remove(&path)?;
                folders.extend(path.parent().map(Path::to_owned));
            }
        }
        if table.refers {
            // A record must not reappear after a power loss, without its references. An object may: nothing refers to
            // it, and the next gc removes it.
            folders.retain(|folder| folder.exists());
            folders.iter().try_for_each(|folder| sync_folder(folder))?;
        }
        sync::point("gc:bytes-deleted");
        self.base().index.write(|tx| {
            let mut delete = tx.prepare_cached(table.delete)?;
            let mut unmark = tx.prepare_cached("DELETE FROM marked WHERE kind=? AND id=?")?;
            for id in ids {
                delete.execute([id])?;
                unmark.execute(params![table.name, id])?;
            }
            Ok(())
        })?;
        sync::point("gc:rows-deleted");
        Ok(bytes)
    }

    fn paths(&self, table: &Table, id: &Digest) -> Vec<PathBuf> {
        let layout = &self.base().layout;
        match table.name {
            "programs" => vec![layout.record(Kind::Program, id)],
            "artifacts" => vec![layout.record(Kind::Artifact, id)],
            "failures" => vec![layout.record(Kind::Failure, id)],
            _ => vec![layout.ready(id), layout.object(id)],
        }
    }

    /// Recovers from a crash: indexes files without a row, finishes marked deletions, and removes temporary files of
    /// dead processes.
    pub fn recover(&self) -> Result<(), StoreError> {
        self.base().writable("recover the store")?;
        let _lock = self.base().lock(Mode::Delete)?;
        self.recover_locked()
    }

    /// Like [`Self::recover`]. The caller has `Mode::Delete`.
    pub(crate) fn recover_locked(&self) -> Result<(), StoreError> {
        let leased = self.releases.leases().held_by_live()?;
        for table in [&PROGRAMS, &ARTIFACTS, &FAILURES, &OBJECTS] {
            let going = self.base().index.write(|tx| {
                let marked = marked(tx, table)?;
                unmark_all(tx, table)?;
                mark(tx, table, &marked, &leased)
            })?;
            self.finish(table, &going)?;
        }
        self.sweep_tmp()?;
        self.base().index.write(|tx| {
            reindex::drop_gone_releases(&self.base().layout, tx)?;
            reindex::fill(&self.base().layout, tx)
        })
    }

    /// Removes temporary files of dead processes. The caller has `Mode::Delete`.
    fn sweep_tmp(&self) -> Result<(), StoreError> {
        let tmp = self.base().layout.tmp();
        for entry in fs::read_dir(&tmp).at("list", &tmp)? {
            let path = entry.at("list", &tmp)?.path();
            let lease = path.file_name().map(|name| {
                let name = format!("{}.lease", name.to_string_lossy());
                self.base().path().join("leases").join(name)
            });
            if lease.is_some_and(|lease| lease.exists()) {
                continue;
            }
            // Its process may be removing it at this moment.
            let Ok(meta) = fs::symlink_metadata(&path) else {
                continue;
            };
            let old = meta.modified().ok().and_then(|at| at.elapsed().ok());
            if old.is_some_and(|age| age > STALE) {
                remove_all(&path)?;
            }
        }
        Ok(())
    }

    /// Deletes the last-use stamps of deleted things.
    fn forget_uses(&self) -> Result<(), StoreError> {
        self.base().index.write(|tx| {
            tx.execute_batch(
                "DELETE FROM uses WHERE id NOT IN (SELECT id FROM programs) \
                 AND id NOT IN (SELECT id FROM artifacts) AND id NOT IN (SELECT id FROM failures)",
            )
        })
    }
}

/// Marks and returns the IDs that are neither held nor referred to.
fn mark(
    tx: &Connection,
    table: &Table,
    ids: &[Digest],
    leased: &HashSet<Digest>,
) -> rusqlite::Result<Vec<Digest>> {
    let mut needed = tx.prepare_cached(table.needed)?;
    let mut mark = tx.prepare_cached("INSERT OR IGNORE INTO marked VALUES (?,?)")?;
    let mut going = Vec::new();
    for id in ids {
        if !leased.contains(id) && !needed.exists([id])? {
            mark.execute(params![table.name, id])?;
            going.push(*id);
        }
    }
    Ok(going)
}

fn marked(tx: &Connection, table: &Table) -> rusqlite::Result<Vec<Digest>> {
    tx.prepare_cached("SELECT id FROM marked WHERE kind=?")?
        .query_map([table.name], |row| row.get(0))?
        .collect()
}

fn unmark_all(tx: &Connection, table: &Table) -> rusqlite::Result<usize> {
    tx.prepare_cached("DELETE FROM marked WHERE kind=?")?
        .execute([table.name])
}

/// Removes one file. Returns its size, or 0 if it does not exist.
fn remove(path: &Path) -> Result<u64, StoreError> {
    let size = match fs::symlink_metadata(path) {
        Ok(meta) => meta.len(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(e).at("look at", path),
    };
    if let Some(folder) = path.parent() {
        plain_folder(folder)?;
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).at("remove", path),
        _ => Ok(size),
    }
}

#[cfg(test)]
mod tests;
