//! Releases: complete sets of programs, each visible whole or not at all.
//!
//! A release is one file, published last, so that no process sees a part of it. Releases are numbered; a load without a
//! number gets the highest one. Releases are never withdrawn: a rollback publishes an earlier release again, as the newest.
//! Publishing the content of the newest release again has no effect.
//!
//! A narrowed build may leave out programs that the spec asks for. It publishes a **partial release**, with a number by which
//! it can be loaded. It is never the newest one: a load must name it, a rollback skips it, and gc does not count it.
//!
//! ## Numbers between stores
//!
//! A number belongs to one store. Publishing never replaces a file, so of two builders of one store one gets the number, and
//! the other one takes the next. A copy keeps its number, so that `MODEL@7` means the same on both sides. It is refused where
//! the other store has another release 7: the caller must not get a release under a name that it does not have at home.
//!
//! Two builders that push to one remote will need no common numbers:
//!
//! - The name of every part of a [manifest](Manifest) but the release itself follows from its content or its key. Any number
//!   of builders can add parts in any order. Two compiles of one key differ in their bytes: the first record stays, and the
//!   pushed release uses it.
//! - The remote gives the number: a push publishes the release last, under the number after the highest one there, with a
//!   write that fails where the name exists, and then tries the next. `put` does the same for one store.
//! - What is equal between stores is the content: two releases are the same if their manifests are, but for the last part. A
//!   push of the content that the remote has as its newest one publishes nothing, as `put` does. A signature covers that list.
//! - `rollback`, the one reference to a number, is translated by content, or left out.

use std::{collections::BTreeSet, fs, sync::Arc};

use rusqlite::params;

use super::{
    base::Base,
    checksum::{self, created},
    error::{At, StoreError},
    layout::{Kind, check_name},
    leases::{Hold, Leases},
    manifest::{Manifest, Walk, dangling},
    publish,
    records::Records,
    rows::{self, ProgramRow},
    sync,
};
use crate::{
    Digest,
    record::{Provenance, Release},
};

/// No model has as many releases.
const LAST: u64 = 1 << 53;

/// The releases of all models.
pub struct Releases {
    pub(crate) base: Arc<Base>,
    pub(crate) leases: Arc<Leases>,
    records: Arc<Records>,
}

impl Releases {
    pub(crate) fn new(base: &Arc<Base>, leases: &Arc<Leases>, records: &Arc<Records>) -> Self {
        Self {
            base: base.clone(),
            leases: leases.clone(),
            records: records.clone(),
        }
    }

    /// Publishes a release as the newest one of its model, whatever its `seq`. Returns it with its new `seq`, and whether it
    /// is new: if the newest release has the same content, entry, name and shims, that one is returned and nothing is
    /// published.
    ///
    /// Everything that it refers to must be in the store: a release is visible whole or not at all.
    pub fn put(&self, release: &Release) -> Result<(Release, bool), StoreError> {
        let last = || Ok::<_, StoreError>(self.sequences(&release.model)?.last().copied());
        // Most builds change nothing: they take no lock and read no record.
        if let Some(same) = self.same(release, last()?) {
            return Ok((same, false));
        }
        let _adding = self.leases.adding(&held_by(release))?;
        self.check(release)?;
        let mut release = release.clone();
        loop {
            let last = last()?;
            // What is looked at here is still the newest when the next number is free.
            if let Some(same) = self.same(&release, last) {
                return Ok((same, false));
            }
            release.seq = last.map_or(1, |last| last + 1);
            if self.publish(&release)? {
                return Ok((release, true));
            }
        }
    }

    /// Publishes a copy of a release under its own number. Fails where there is another one of that number.
    fn put_numbered(&self, release: &Release) -> Result<(), StoreError> {
        let _adding = self.leases.adding(&held_by(release))?;
        self.check(release)?;
        let published = self.publish(release)?;
        if published || self.at(&release.model, release.seq)?.as_ref() == Some(release) {
            Ok(())
        } else {
            Err(StoreError::TakenNumber {
                model: release.model.clone(),
                seq: release.seq,
            })
        }
    }

    /// Fails where a release's name is none, or something that it refers to is not in the store.
    fn check(&self, release: &Release) -> Result<(), StoreError> {
        if let Some(name) = &release.name {
            check_release_name(name)?;
        }
        let what = format!("release of `{}`", release.model);
        for id in &release.programs {
            let Some(program) = self.records.program(id)? else {
                return Err(dangling(&what, "program", id));
            };
            self.records.need_artifacts(&program)?;
        }
        self.records.need_objects(&what, &release.objects())
    }

    /// Writes a release's file and its row; returns false where there is one of that number.
    fn publish(&self, release: &Release) -> Result<bool, StoreError> {
        let path = self.base.layout.release(&release.model, release.seq)?;
        let (text, checksum) = checksum::encode(release, &path)?;
        if !publish::bytes(self.leases.pending_file()?, &path, &text)? {
            return Ok(false);
        }
        sync::point("put:release-published");
        let created = created(&path)?;
        self.base
            .index
            .write(|tx| rows::insert_release(tx, release, &checksum, created))?;
        Ok(true)
    }

    /// Returns the newest release, or for a partial one the last, where it is what `release` would be.
    fn same(&self, release: &Release, last: Option<u64>) -> Option<Release> {
        // One that can't be read is no reason to put nothing: what is put takes its place.
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

    /// Makes an earlier release the newest one again: the one with number `seq`, or the last one before the newest that
    /// has other content. Returns it, and whether it was not the newest already.
    ///
    /// Fails, and changes nothing, when something that it needs is gone.
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
            Err(StoreError::Partial {
                model: model.to_owned(),
                seq: earlier.seq,
                lacks: earlier.lacks.len(),
            })
        } else {
            self.put(&Release {
                rollback: earlier.rollback.or(Some(earlier.seq)),
                provenance: Provenance::now(),
                ..earlier
            })
        }
    }

    /// Returns the last whole release before the newest one that has other content.
    fn before_newest(&self, model: &str) -> Result<Option<Release>, StoreError> {
        let mut newest: Option<Release> = None;
        for seq in self.sequences(model)?.into_iter().rev() {
            let whole = |release: &Release| !release.is_partial();
            let Some(release) = self.at(model, seq)?.filter(whole) else {
                continue;
            };
            match &newest {
                None => newest = Some(release),
                Some(newest) if newest.same_content(&release) => {}
                Some(_) => return Ok(Some(release)),
            }
        }
        Ok(None)
    }

    /// Returns the newest release of `model`; or the one that `which` says, by its number or as the newest of that name. A
    /// partial one is only found by its number.
    pub fn get(&self, model: &str, which: Option<&str>) -> Result<Option<Release>, StoreError> {
        if let Some(seq) = which.and_then(|which| which.parse().ok()) {
            return self.at(model, seq);
        }
        self.find(model, |release| {
            !release.is_partial() && (which.is_none() || release.name.as_deref() == which)
        })
    }

    /// Returns the last release of `model`, be it a partial one.
    pub fn last(&self, model: &str) -> Result<Option<Release>, StoreError> {
        self.find(model, |_| true)
    }

    /// Returns the newest release of `model` that `is` says.
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

    /// Returns the names of the programs that `before` has and `after` has nothing in the place of.
    pub fn lost(&self, before: &Release, after: &Release) -> Result<Vec<String>, StoreError> {
        let names = |release: &Release| -> Result<BTreeSet<(String, String)>, StoreError> {
            let rows = release
                .programs
                .iter()
                .map(|id| self.records.program_row(id));
            let names = rows.filter_map(|row| {
                let name = |row: ProgramRow| (format!("{} {}", row.module, row.bucket), row.device);
                row.map(|row| row.map(name)).transpose()
            });
            names.collect()
        };
        let after = names(after)?;
        let lost = names(before)?
            .into_iter()
            .filter(|name| !after.contains(name));
        let name = |(name, device): (String, String)| {
            if after.iter().any(|(n, _)| *n == name) {
                // It is there, but for another device.
                format!("{name} on {device}")
            } else {
                name
            }
        };
        Ok(lost.map(name).collect())
    }

    /// Returns the release of `model` with this number.
    pub fn at(&self, model: &str, seq: u64) -> Result<Option<Release>, StoreError> {
        let path = self.base.layout.release(model, seq)?;
        let found = checksum::read::<Release>(&self.base.layout, &path)?;
        Ok(found.map(|(release, _)| release))
    }

    /// Returns whether `model` has a release with this number: a `stat`.
    pub fn has(&self, model: &str, seq: u64) -> bool {
        let path = self.base.layout.release(model, seq);
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
        let folder = self.base.layout.releases(model)?;
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
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
        self.base.index.with(|index| {
            index
                .prepare_cached(
                    "SELECT max(r.seq) FROM release_programs p JOIN releases r ON r.model=p.model AND r.seq=p.seq \
                     WHERE p.program=? AND r.partial=?",
                )?
                .query_row(params![program.as_bytes(), partial], |row| {
                    row.get::<_, Option<i64>>(0)
                })
                .map(|seq| seq.map(|seq| seq as u64))
        })
    }

    /// Returns the releases that have this program, or a program that calls this artifact: model and number, the oldest of each
    /// model first.
    pub fn with(&self, id: &Digest) -> Result<Vec<(String, u64)>, StoreError> {
        self.base.index.with(|index| {
            index
                .prepare_cached(
                    "SELECT DISTINCT model,seq FROM release_programs WHERE program=?1 \
                     OR program IN (SELECT program FROM program_artifacts WHERE artifact=?1) ORDER BY 1,2",
                )?
                .query_map([id.as_bytes()], |row| {
                    Ok((row.get(0)?, row.get::<_, i64>(1)? as u64))
                })?
                .collect()
        })
    }

    /// Returns the number of a model's newest release, of which a partial one is none.
    pub fn newest(&self, model: &str) -> Result<Option<u64>, StoreError> {
        self.base.index.with(|index| {
            index
                .prepare_cached("SELECT max(seq) FROM releases WHERE model=? AND NOT partial")?
                .query_row([model], |row| row.get::<_, Option<i64>>(0))
                .map(|seq| seq.map(|seq| seq as u64))
        })
    }

    /// Returns the names of all models that have a program or a release, sorted.
    pub fn models(&self) -> Result<Vec<String>, StoreError> {
        self.base.index.with(|index| {
            index
                .prepare_cached(
                    "SELECT model FROM programs UNION SELECT model FROM releases ORDER BY 1",
                )?
                .query_map([], |row| row.get(0))?
                .collect()
        })
    }

    /// Returns every file that a release consists of. Fails where one is missing.
    pub fn manifest(&self, release: &Release) -> Result<Manifest, StoreError> {
        let walk = self.walk(release);
        match walk.missing.into_iter().next() {
            Some(missing) => Err(missing.error(&title(release))),
            None => {
                let path = self.base.layout.release(&release.model, release.seq)?;
                let (_, checksum) = checksum::encode(release, &path)?;
                let path = path.strip_prefix(self.base.path()).unwrap_or(&path);
                Ok(Manifest::new(walk.found, path.to_owned(), checksum))
            }
        }
    }

    fn walk(&self, release: &Release) -> Walk<'_, Records> {
        let mut walk = Walk::new(&*self.records);
        walk.release(&release.programs, &release.objects());
        walk
    }

    /// Holds a release with all that it needs: its weights, programs, their artifacts and objects; checks that all of it
    /// is there.
    pub fn hold(&self, release: &Release) -> Result<Hold, StoreError> {
        match self.hold_found(release)? {
            (hold, None) => Ok(hold),
            (_, Some(missing)) => Err(missing),
        }
    }

    /// Holds the existing part of a release, and returns the error for the first missing part: a reader may not need it.
    pub fn hold_found(&self, release: &Release) -> Result<(Hold, Option<StoreError>), StoreError> {
        // gc deletes nothing that a held record refers to.
        let first = self.leases.hold(&held_by(release))?;
        let walk = self.walk(release);
        let ids: Vec<Digest> = walk.found.iter().map(|node| node.id).collect();
        let all = self.leases.hold(&ids)?;
        drop(first);
        let missing = walk.missing.into_iter().next();
        Ok((all, missing.map(|missing| missing.error(&title(release)))))
    }

    /// Copies the records of a release, whose objects this store has already ([`Objects::copy`](super::Objects::copy)), and publishes it with
    /// its own number. Fails where this store has another release of that number.
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

/// Names a release in errors.
fn title(release: &Release) -> String {
    format!("release {} of `{}`", release.seq, release.model)
}

/// Returns everything that a release itself refers to.
fn held_by(release: &Release) -> Vec<Digest> {
    [&release.programs[..], &release.objects()].concat()
}

/// Refuses a name that reads as a number: `model@7` is release 7.
pub fn check_release_name(name: &str) -> Result<(), StoreError> {
    check_name(name)?;
    match name.parse::<u64>() {
        Ok(_) => Err(StoreError::NumberName(name.to_owned())),
        Err(_) => Ok(()),
    }
}

/// Returns the number that a release's file name says, if it is one that this code writes.
fn sequence(name: &str) -> Option<u64> {
    let seq: u64 = name.strip_suffix(".json")?.parse().ok()?;
    (seq < LAST && name == format!("{seq:08}.json")).then_some(seq)
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};
    use crate::Store;

    /// Puts programs of one artifact.
    fn programs<const N: usize>(store: &Store) -> [Digest; N] {
        let artifact = store
            .records()
            .put_artifact(&testing::artifact(store, "block"));
        let artifact = artifact.unwrap().id;
        std::array::from_fn(|batch| {
            let program = testing::program("m", batch as i64, &[artifact]);
            store.records().put_program(&program).unwrap().id
        })
    }

    #[test]
    fn releases_count_up_and_have_names_and_numbers() {
        let (_dir, store) = testing::store();
        let [one, two] = programs(&store);
        for (seq, name, program) in [(1, Some("v1"), one), (2, None, two), (3, Some("v1"), one)] {
            let (put, new) = store
                .releases()
                .put(&testing::release("m", name, &[program]))
                .unwrap();
            assert_eq!((put.seq, new), (seq, true));
        }
        let seq = |which| {
            store
                .releases()
                .get("m", which)
                .unwrap()
                .map(|found| found.seq)
        };
        let found = [None, Some("v1"), Some("2"), Some("v9"), Some("9")].map(seq);
        assert_eq!(found, [Some(3), Some(3), Some(2), None, None]);
        assert_eq!(store.releases().all("m").unwrap().len(), 3);
        assert_eq!(store.releases().models().unwrap(), ["m"]);
        let result = store
            .releases()
            .put(&testing::release("m", Some("7"), &[one]));
        assert!(
            matches!(result, Err(StoreError::NumberName(_))),
            "{result:?}"
        );
    }

    #[test]
    fn what_the_newest_one_has_already_is_not_put_again() {
        let (_dir, store) = testing::store();
        let [one, two] = programs(&store);
        let put = |name: Option<&str>, of: &[Digest]| {
            let (put, new) = store
                .releases()
                .put(&testing::release("m", name, of))
                .unwrap();
            (put.seq, new)
        };
        assert_eq!(put(None, &[one, two]), (1, true));
        assert_eq!(put(None, &[two, one]), (1, false), "in another order");
        assert_eq!(put(Some("v1"), &[one, two]), (2, true), "it has no name");
        assert_eq!(put(None, &[one, two]), (2, false), "any name will do");
        assert_eq!(put(Some("v2"), &[one, two]), (3, true));
        let mut other = testing::release("m", None, &[one, two]);
        other.weights = Some(store.objects().put_bytes(b"other weights").unwrap());
        assert!(store.releases().put(&other).unwrap().1);
        // Builders that publish the same at the same time make one release of it.
        other.programs = vec![one];
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let store = Store::open(store.path()).unwrap();
                    assert_eq!(store.releases().put(&other).unwrap().0.seq, 5);
                });
            }
        });
        // What went before with other content is what one goes back to.
        assert_eq!(
            store
                .releases()
                .rollback("m", None)
                .unwrap()
                .0
                .programs
                .len(),
            2
        );
        let (same, new) = store.releases().rollback("m", Some(4)).unwrap();
        assert_eq!((same.seq, new), (6, false));
    }

    #[test]
    fn a_partial_release_is_nobodys_newest() {
        let (_dir, store) = testing::store();
        let [one, two, three] = programs(&store);
        let put = |lacks: &[&str], of: &[Digest]| {
            let mut release = testing::release("m", None, of);
            release.lacks = lacks.iter().map(ToString::to_string).collect();
            let (put, new) = store.releases().put(&release).unwrap();
            (put.seq, new)
        };
        let newest = || {
            store
                .releases()
                .get("m", None)
                .unwrap()
                .map(|newest| newest.seq)
        };
        assert_eq!(put(&["encode batch=1"], &[one]), (1, true));
        assert_eq!(
            (newest(), store.releases().newest("m").unwrap()),
            (None, None)
        );
        assert_eq!(put(&[], &[one, two]), (2, true));
        assert_eq!(put(&["encode batch=1"], &[three]), (3, true));
        assert_eq!(put(&["encode batch=1"], &[three]), (3, false));
        assert_eq!(
            (newest(), store.releases().newest("m").unwrap()),
            (Some(2), Some(2))
        );
        assert_eq!(
            store.releases().get("m", Some("3")).unwrap().unwrap().seq,
            3
        );
        assert_eq!(store.releases().last("m").unwrap().unwrap().seq, 3);
        assert_eq!(store.releases().released(&three).unwrap(), None);
        assert_eq!(store.releases().partly_released(&three).unwrap(), Some(3));
        assert_eq!(put(&[], &[one, two]), (2, false), "it is the newest still");
        let error = store.releases().rollback("m", Some(3)).unwrap_err();
        assert!(
            matches!(error, StoreError::Partial { lacks: 1, .. }),
            "{error}"
        );
        let error = store.releases().rollback("m", None).unwrap_err();
        assert!(matches!(error, StoreError::NoRelease { .. }), "{error}");
        assert_eq!(store.audit().verify().unwrap().defects, []);
    }

    #[test]
    fn a_release_needs_its_shims_and_one_more_shim_is_a_release() {
        let (_dir, store) = testing::store();
        let [one, two] = programs(&store);
        let put = |shims: &[&str], of: &[Digest]| {
            let mut release = testing::release("m", None, of);
            release.shims = shims
                .iter()
                .map(|torch| testing::shim(&store, torch))
                .collect();
            let (put, new) = store.releases().put(&release).unwrap();
            (put.seq, new)
        };
        assert_eq!(put(&["2.11.0"], &[two]), (1, true));
        assert_eq!(put(&["2.11.0"], &[one]), (2, true));
        assert_eq!(put(&["2.11.0", "2.13.0"], &[one]), (3, true));
        assert_eq!(put(&["2.11.0"], &[one]), (3, false), "it has it already");
        // One runs the same under both.
        let back = store.releases().rollback("m", None).unwrap().0;
        assert_eq!((back.seq, &back.programs[..]), (4, &[two][..]));
        // What a release needs stays, and is missed.
        let newest = put(&["2.13.0"], &[one]).0;
        let policy = super::super::Policy {
            keep_releases: 1,
            ..Default::default()
        };
        store.collector().gc(&policy).unwrap();
        let release = store.releases().get("m", None).unwrap().unwrap();
        assert_eq!(release.seq, newest);
        let _hold = store.releases().hold(&release).unwrap();
        assert_eq!(store.audit().verify().unwrap().defects, []);
        let object = release.shims[0].object;
        let usage = store.object_usage(crate::GroupBy::Release).unwrap();
        assert!(usage.is_kept(&object).unwrap());
        let needs = usage.needs(&object).unwrap();
        assert_eq!(
            needs.iter().map(|need| &*need.group).collect::<Vec<_>>(),
            ["m 5"]
        );
        fs::remove_file(store.layout().object(&object)).unwrap();
        let mut release = testing::release("m", None, &[one]);
        release.shims = vec![crate::record::Shim {
            torch: "2.14.0".into(),
            ..testing::shim(&store, "2.14.0")
        }];
        release.shims[0].object = object;
        assert!(matches!(
            store.releases().put(&release),
            Err(StoreError::Dangling { .. })
        ));
        assert!(!store.audit().verify().unwrap().defects.is_empty());
    }

    #[test]
    fn what_a_newer_release_does_not_answer_has_a_name() {
        let (_dir, store) = testing::store();
        let [one, two, three] = programs(&store);
        let release = |of: &[Digest]| testing::release("m", None, of);
        let lost = store
            .releases()
            .lost(&release(&[one, two]), &release(&[two, three]));
        assert_eq!(lost.unwrap(), ["encode batch=0"]);
        let lost = store
            .releases()
            .lost(&release(&[two]), &release(&[two, three]));
        assert_eq!(lost.unwrap(), [""; 0]);
    }

    #[test]
    fn going_back_puts_the_earlier_one_once_more() {
        let (_dir, store) = testing::store();
        let artifact = store
            .records()
            .put_artifact(&testing::artifact(&store, "block"))
            .unwrap();
        let put = |batch| {
            store
                .records()
                .put_program(&testing::program("m", batch, &[artifact.id]))
                .unwrap()
                .id
        };
        let (one, two) = (put(1), put(2));
        assert!(matches!(
            store.releases().rollback("m", None),
            Err(StoreError::NoRelease { .. })
        ));
        for (name, program) in [("v1", one), ("v2", two)] {
            store
                .releases()
                .put(&testing::release("m", Some(name), &[program]))
                .unwrap();
        }
        let back = store.releases().rollback("m", None).unwrap().0;
        assert_eq!(
            (back.seq, back.name.as_deref(), &back.programs[..]),
            (3, Some("v1"), &[one][..])
        );
        assert_eq!(store.releases().get("m", None).unwrap(), Some(back));
        assert_eq!(
            store.releases().rollback("m", Some(2)).unwrap().0.programs,
            [two]
        );
        let error = store.releases().rollback("m", Some(9)).unwrap_err();
        assert_eq!(error.to_string(), "`m` has no release 9");
        fs::remove_file(
            store
                .layout()
                .record(super::super::layout::Kind::Program, &one),
        )
        .unwrap();
        assert!(matches!(
            store.releases().rollback("m", Some(1)),
            Err(StoreError::Dangling { .. })
        ));
        assert_eq!(store.releases().get("m", None).unwrap().unwrap().seq, 4);
    }
}
