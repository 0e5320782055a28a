//! Releases: complete sets of programs, each visible whole or not at all.
//!
//! A release is one file, published last, so that no process sees a part of it. Releases are numbered; a load without a
//! number gets the highest one. Releases are never withdrawn: a rollback publishes an earlier release again, as the
//! newest. Publishing the content of the newest release again has no effect.
//!
//! A narrowed build may leave out programs that the spec asks for. It publishes a **partial release**, with a number by
//! which it can be loaded. It is never the newest one: a load must name it, a rollback skips it, and gc does not count
//! it.
//!
//! ## Numbers between stores
//!
//! A number belongs to one store. Publishing never replaces a file: of two builders of one store one gets a number, and
//! the other one gets the next. A copy keeps its number, so that `MODEL@7` means the same on both sides. It is refused
//! if the other store has another release 7, since that name would then mean two things.
//!
//! So two builders can push to one remote, although each has numbers of its own:
//!
//! | question | rule |
//! |---|---|
//! | May both add the parts of their releases? | Yes, in any order. The name of each part of a [manifest](Manifest) but the release follows from its content or its key. Two compiles of one key differ in bytes: the first record stays, and a later release uses it. |
//! | Which number does a release get? | The remote assigns it: the number after the highest one there, with a write that fails if the name exists, then the next. [`Releases::put`] does the same in one store. The number in the local store does not change. |
//! | Are two releases equal? | If their manifests are, but for the last part, which has the number. A push of the newest content of the remote publishes nothing, as `put` does. A signature covers the same list. |
//! | Does a record refer to a number? | Only `rollback`. A push translates it by content, or leaves it out. |

use std::{collections::BTreeSet, fs, io};

use rusqlite::{Params, Row};

use super::{
    base::Base,
    checksum::{self, Record, created},
    error::{At, StoreError},
    layout::{Kind, check_name},
    leases::{Hold, Leases},
    manifest::{Manifest, Walk},
    publish,
    records::Records,
    sync,
};
use crate::{
    Digest,
    record::{Provenance, Release},
};

/// Maximum number of a release.
const LAST: u64 = 1 << 53;

/// The releases of all models.
pub struct Releases {
    pub(crate) records: Records,
}

impl Releases {
    pub(crate) fn base(&self) -> &Base {
        self.records.base()
    }

    pub(crate) fn leases(&self) -> &Leases {
        self.records.objects.leases()
    }

    /// Publishes a release as the newest one of its model. Returns it with its new `seq`, and true. If the newest
    /// release has the same content, entry, name and shims, publishes nothing, and returns that release with false.
    ///
    /// Everything that it refers to must be in the store: a release is visible whole or not at all.
    pub fn put(&self, release: &Release) -> Result<(Release, bool), StoreError> {
        let last = || Ok::<_, StoreError>(self.sequences(&release.model)?.last().copied());
        // Most builds change nothing: they take no lock and read no record.
        if let Some(same) = self.same(release, last()?) {
            return Ok((same, false));
        }
        let _adding = self.leases().adding(&held_by(release))?;
        self.check(release)?;
        let mut release = release.clone();
        loop {
            let last = last()?;
            // It is still the newest one if the next number is free.
            if let Some(same) = self.same(&release, last) {
                return Ok((same, false));
            }
            release.seq = last.map_or(1, |last| last + 1);
            if self.publish(&release)? {
                return Ok((release, true));
            }
        }
    }

    /// Publishes a copy of a release under its own number. Fails if another release has that number.
    pub(crate) fn put_numbered(&self, release: &Release) -> Result<(), StoreError> {
        let _adding = self.leases().adding(&held_by(release))?;
        self.check(release)?;
        let published = self.publish(release)?;
        if published || self.at(&release.model, release.seq)?.as_ref() == Some(release) {
            return Ok(());
        }
        Err(StoreError::TakenNumber {
            model: release.model.clone(),
            seq: release.seq,
        })
    }

    /// Fails if a release has a bad name or a missing part.
    fn check(&self, release: &Release) -> Result<(), StoreError> {
        if let Some(name) = &release.name {
            check_release_name(name)?;
        }
        let what = format!("release of `{}`", release.model);
        self.records.need(&what, |walk| {
            walk.release(&release.programs, &release.objects());
        })
    }

    /// Writes a release's file and its row. Returns false if the number is in use.
    fn publish(&self, release: &Release) -> Result<bool, StoreError> {
        let path = self.base().layout.release(&release.model, release.seq)?;
        let (text, checksum) = checksum::encode(release, &path)?;
        if !publish::bytes(self.leases().pending_file()?, &path, &text)? {
            return Ok(false);
        }
        sync::point("put:release-published");
        let created = created(&path)?;
        self.base()
            .index
            .write(|tx| release.insert(tx, &checksum, created))?;
        Ok(true)
    }

    /// Returns the newest release if publishing `release` would change nothing. A partial release is compared with the
    /// last release. An unreadable release is not compared: the new one takes its place.
    fn same(&self, release: &Release, last: Option<u64>) -> Option<Release> {
        let now = if release.is_partial() {
            self.at(&release.model, last?)
        } else {
            self.get(&release.model, None)
        };
        now.ok().flatten().filter(|now| {
            // A release without a name matches any name.
            let name = release.name.is_none() || release.name == now.name;
            let lacks = release.lacks == now.lacks;
            let shims = release.shims.iter().all(|shim| now.shims.contains(shim));
            name && lacks && shims && release.entry == now.entry && release.same_content(now)
        })
    }

    /// Publishes an earlier release again, as the newest one: number `seq`, or the last whole one with other content
    /// than the newest one. Returns it, and false if it is already the newest one.
    ///
    /// Fails, and changes nothing, if a part of it is missing.
    pub fn rollback(&self, model: &str, seq: Option<u64>) -> Result<(Release, bool), StoreError> {
        let none = |seq| StoreError::NoRelease {
            model: model.to_owned(),
            seq,
        };
        let earlier = match seq {
            Some(seq) => self.at(model, seq)?.ok_or_else(|| none(seq))?,
            None => self.before_newest(model)?.ok_or_else(|| none(0))?,
        };
        if earlier.is_partial() {
            return Err(StoreError::Partial {
                model: model.to_owned(),
                seq: earlier.seq,
                lacks: earlier.lacks.len(),
            });
        }
        self.put(&Release {
            rollback: earlier.rollback.or(Some(earlier.seq)),
            provenance: Provenance::now(),
            ..earlier
        })
    }

    /// Returns the last whole release with other content than the newest one.
    fn before_newest(&self, model: &str) -> Result<Option<Release>, StoreError> {
        let Some(newest) = self.get(model, None)? else {
            return Ok(None);
        };
        self.find(model, |release| {
            !release.is_partial() && !newest.same_content(release)
        })
    }

    /// Returns the newest release of `model`, or the one with the number or the name `which`. A partial release is
    /// found by its number only.
    pub fn get(&self, model: &str, which: Option<&str>) -> Result<Option<Release>, StoreError> {
        if let Some(seq) = which.and_then(|which| which.parse().ok()) {
            return self.at(model, seq);
        }
        self.find(model, |release| {
            !release.is_partial() && (which.is_none() || release.name.as_deref() == which)
        })
    }

    /// Returns the last release of `model`, whole or partial.
    pub fn last(&self, model: &str) -> Result<Option<Release>, StoreError> {
        self.find(model, |_| true)
    }

    /// Returns the newest release of `model` for which `is` returns true.
    pub fn find(
        &self,
        model: &str,
        is: impl Fn(&Release) -> bool,
    ) -> Result<Option<Release>, StoreError> {
        for seq in self.sequences(model)?.into_iter().rev() {
            let found = self.at(model, seq)?.filter(&is);
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Returns the names of the programs of `before` that have no successor in `after`.
    pub fn lost(&self, before: &Release, after: &Release) -> Result<Vec<String>, StoreError> {
        let names = |release: &Release| -> Result<BTreeSet<(String, String)>, StoreError> {
            let mut names = BTreeSet::new();
            for id in &release.programs {
                if let Some(row) = self.records.program_row(id)? {
                    names.insert((format!("{} {}", row.module, row.bucket), row.device));
                }
            }
            Ok(names)
        };
        let (before, after) = (names(before)?, names(after)?);
        let name = |(name, device): &(String, String)| {
            if after.iter().any(|(n, _)| n == name) {
                // Only a program for another device exists.
                format!("{name} on {device}")
            } else {
                name.clone()
            }
        };
        Ok(before.difference(&after).map(name).collect())
    }

    /// Returns the release of `model` with this number.
    pub fn at(&self, model: &str, seq: u64) -> Result<Option<Release>, StoreError> {
        let path = self.base().layout.release(model, seq)?;
        let found = checksum::read::<Release>(&self.base().layout, &path)?;
        Ok(found.map(|(release, _)| release))
    }

    /// Returns whether `model` has a release with this number. Costs a `stat`.
    pub fn has(&self, model: &str, seq: u64) -> bool {
        let path = self.base().layout.release(model, seq);
        path.is_ok_and(|path| fs::symlink_metadata(path).is_ok())
    }

    /// Returns all releases of `model`, oldest first.
    pub fn all(&self, model: &str) -> Result<Vec<Release>, StoreError> {
        let mut all = Vec::new();
        for seq in self.sequences(model)? {
            all.extend(self.at(model, seq)?);
        }
        Ok(all)
    }

    /// Returns the numbers of a model's releases, sorted: the names of their files.
    pub(crate) fn sequences(&self, model: &str) -> Result<Vec<u64>, StoreError> {
        let folder = self.base().layout.releases(model)?;
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(e).at("list", &folder),
        };
        let mut all = Vec::new();
        for entry in entries {
            let name = entry.at("list", &folder)?.file_name();
            all.extend(name.to_str().and_then(sequence));
        }
        all.sort_unstable();
        Ok(all)
    }

    /// Returns the number of the newest release that has this program; none when no whole release has it.
    pub fn released(&self, program: &Digest) -> Result<Option<u64>, StoreError> {
        self.last_with(program, false)
    }

    /// Returns the number of the newest partial release that has this program; none when no such release has it.
    pub fn partly_released(&self, program: &Digest) -> Result<Option<u64>, StoreError> {
        self.last_with(program, true)
    }

    fn last_with(&self, program: &Digest, partial: bool) -> Result<Option<u64>, StoreError> {
        let query = "SELECT max(r.seq) FROM release_programs p JOIN releases r ON r.model=p.model AND r.seq=p.seq \
                     WHERE p.program=? AND r.partial=?";
        self.number(query, (program, partial))
    }

    /// Returns the releases that have this program, or a program that calls this artifact: model and number, the oldest
    /// of each model first.
    pub fn with(&self, id: &Digest) -> Result<Vec<(String, u64)>, StoreError> {
        let query = "SELECT DISTINCT model,seq FROM release_programs WHERE program=?1 \
                     OR program IN (SELECT program FROM program_artifacts WHERE artifact=?1) ORDER BY 1,2";
        let read = |row: &Row| Ok((row.get(0)?, row.get::<_, i64>(1)? as u64));
        self.base().index.query(query, [id], read)
    }

    /// Returns the number of a model's newest whole release.
    pub fn newest(&self, model: &str) -> Result<Option<u64>, StoreError> {
        let query = "SELECT max(seq) FROM releases WHERE model=? AND NOT partial";
        self.number(query, [model])
    }

    fn number(&self, query: &str, params: impl Params) -> Result<Option<u64>, StoreError> {
        let read = |row: &Row| row.get::<_, Option<i64>>(0);
        let found = self.base().index.query(query, params, read)?;
        Ok(found.into_iter().flatten().next().map(|seq| seq as u64))
    }

    /// Returns the names of all models that have a program or a release, sorted.
    pub fn models(&self) -> Result<Vec<String>, StoreError> {
        let query = "SELECT model FROM programs UNION SELECT model FROM releases ORDER BY 1";
        self.base().index.query(query, [], |row| row.get(0))
    }

    /// Returns every file that a release consists of. Fails if one is missing.
    pub fn manifest(&self, release: &Release) -> Result<Manifest, StoreError> {
        let walk = self.walk(release);
        if let Some(missing) = walk.missing.into_iter().next() {
            return Err(missing.error(&title(release)));
        }
        let path = self.base().layout.release(&release.model, release.seq)?;
        let (_, checksum) = checksum::encode(release, &path)?;
        let path = path.strip_prefix(self.base().path()).unwrap_or(&path);
        Ok(Manifest::new(walk.found, path.to_owned(), checksum))
    }

    fn walk(&self, release: &Release) -> Walk<'_, Records> {
        let mut walk = Walk::new(&self.records);
        walk.release(&release.programs, &release.objects());
        walk
    }

    /// Holds a release with all its parts: weights, programs, their artifacts and objects. Fails if one is missing.
    pub fn hold(&self, release: &Release) -> Result<Hold, StoreError> {
        let (hold, missing) = self.hold_found(release)?;
        missing.map_or(Ok(hold), Err)
    }

    /// Holds the existing parts of a release, and returns the error for the first missing one: a reader may not need
    /// it.
    pub fn hold_found(&self, release: &Release) -> Result<(Hold, Option<StoreError>), StoreError> {
        // gc deletes nothing that a held record refers to.
        let first = self.leases().hold(&held_by(release))?;
        let walk = self.walk(release);
        let ids: Vec<Digest> = walk.found.iter().map(|node| node.id).collect();
        let all = self.leases().hold(&ids)?;
        drop(first);
        let missing = walk.missing.into_iter().next();
        Ok((all, missing.map(|missing| missing.error(&title(release)))))
    }

    /// Copies the records of a release and publishes it with its own number, after
    /// [`Objects::copy`](super::Objects::copy) of its objects. Fails if this store has another release of that number.
    ///
    /// The release is published last, so that an interrupted copy leaves objects and records that gc removes.
    pub fn copy(&self, from: &Self, release: &Release) -> Result<(), StoreError> {
        let manifest = from.manifest(release)?;
        for id in manifest.of(Some(Kind::Artifact)) {
            if let Some(artifact) = from.records.artifact(&id)? {
                self.records.put_artifact(&artifact)?;
            }
        }
        for id in manifest.of(Some(Kind::Program)) {
            if let Some(program) = from.records.program(&id)? {
                self.records.put_program(&program)?;
            }
        }
        self.put_numbered(release)
    }
}

/// Returns the name of a release in errors.
fn title(release: &Release) -> String {
    format!("release {} of `{}`", release.seq, release.model)
}

/// Returns everything that a release refers to directly.
fn held_by(release: &Release) -> Vec<Digest> {
    [&release.programs[..], &release.objects()].concat()
}

/// Refuses a name that is a number: `model@7` is release 7.
pub fn check_release_name(name: &str) -> Result<(), StoreError> {
    check_name(name)?;
    if name.parse::<u64>().is_ok() {
        return Err(StoreError::NumberName(name.to_owned()));
    }
    Ok(())
}

/// Returns the number in the file name of a release; none for other names.
pub(crate) fn sequence(name: &str) -> Option<u64> {
    let seq: u64 = name.strip_suffix(".json")?.parse().ok()?;
    (seq < LAST && name == format!("{seq:08}.json")).then_some(seq)
}

#[cfg(test)]
mod tests;
