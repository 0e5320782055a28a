//! Releases: complete sets of programs, each visible whole or not at all.
//!
//! A release is one file, published last, so that no process sees a part of it. Releases are numbered; a load without a
//! number gets the highest one. Releases are never withdrawn: a rollback publishes an earlier release again, as the newest.
//! Publishing the content of the newest release again has no effect.
//!
//! A narrowed build may leave out programs that the spec asks for. It publishes a **partial release**. That has a number, by
//! which it can be loaded, but it is never the newest one: a load must name it, a rollback skips it, and gc does not count
//! it.

use std::{collections::BTreeSet, fs};

use super::{
    Store, checksum,
    error::{At, StoreError},
    layout::check_name,
    publish,
    records::{created, dangling, known_schema},
    rows::{self, ProgramRow},
    sync,
};
use crate::{
    Digest,
    record::{Provenance, Release},
};

/// No model has as many releases.
const LAST: u64 = 1 << 53;

impl Store {
    /// Publishes a release as the newest one of its model, whatever its `seq`. Returns it with its new `seq`, and whether it
    /// is new: if the newest release has the same content, entry, name and shims, that one is returned and nothing is
    /// published.
    ///
    /// Everything that it refers to must be in the store: a release is visible whole or not at all.
    pub fn put_release(&self, release: &Release) -> Result<(Release, bool), StoreError> {
        let last = || Ok::<_, StoreError>(self.sequences(&release.model)?.last().copied());
        // Most builds change nothing: they take no lock and read no record.
        if let Some(same) = self.same(release, last()?) {
            return Ok((same, false));
        }
        let _adding = self.adding(&held_by(release))?;
        self.check_release(release)?;
        let mut release = release.clone();
        loop {
            let last = last()?;
            // What is looked at here is still the newest when the next number is free.
            if let Some(same) = self.same(&release, last) {
                return Ok((same, false));
            }
            release.seq = last.map_or(1, |last| last + 1);
            if self.publish_release(&release)? {
                return Ok((release, true));
            }
        }
    }

    /// Publishes a copy of a release under its own number. Fails where there is another one of that number.
    pub(super) fn put_numbered_release(&self, release: &Release) -> Result<(), StoreError> {
        let _adding = self.adding(&held_by(release))?;
        self.check_release(release)?;
        let published = self.publish_release(release)?;
        match published || self.release_at(&release.model, release.seq)?.as_ref() == Some(release) {
            true => Ok(()),
            false => Err(StoreError::TakenNumber {
                model: release.model.clone(),
                seq: release.seq,
            }),
        }
    }

    /// Fails where a release's name is none, or something that it refers to is not in the store.
    fn check_release(&self, release: &Release) -> Result<(), StoreError> {
        if let Some(name) = &release.name {
            check_release_name(name)?;
        }
        let what = format!("release of `{}`", release.model);
        for id in &release.programs {
            let Some(program) = self.program(id)? else {
                return Err(dangling(&what, "program", id));
            };
            self.need_artifacts(&program)?;
        }
        self.need_objects(&what, &objects_of(release))
    }

    /// Writes a release's file and its row; returns false where there is one of that number.
    fn publish_release(&self, release: &Release) -> Result<bool, StoreError> {
        let path = self.layout().release(&release.model, release.seq)?;
        let (text, checksum) = checksum::encode(release, &path)?;
        if !publish::bytes(self.pending_file()?, &path, &text)? {
            return Ok(false);
        }
        sync::point("put:release-published");
        let created = created(&path)?;
        self.index()
            .write(|tx| rows::insert_release(tx, release, &checksum, created))?;
        Ok(true)
    }

    /// Returns the newest release, or for a partial one the last, where it is what `release` would be.
    fn same(&self, release: &Release, last: Option<u64>) -> Option<Release> {
        // One that can't be read is no reason to put nothing: what is put takes its place.
        let now = match release.is_partial() {
            true => self.release_at(&release.model, last?),
            false => self.release(&release.model, None),
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
            Some(seq) => self.release_at(model, seq)?.ok_or_else(|| none(seq))?,
            None => self.before_newest(model)?.ok_or_else(|| none(0))?,
        };
        match earlier.is_partial() {
            true => Err(StoreError::Partial {
                model: model.to_owned(),
                seq: earlier.seq,
                lacks: earlier.lacks.len(),
            }),
            false => self.put_release(&Release {
                rollback: earlier.rollback.or(Some(earlier.seq)),
                provenance: Provenance::now(),
                ..earlier
            }),
        }
    }

    /// Returns the last whole release before the newest one that has other content.
    fn before_newest(&self, model: &str) -> Result<Option<Release>, StoreError> {
        let mut newest: Option<Release> = None;
        for seq in self.sequences(model)?.into_iter().rev() {
            let whole = |release: &Release| !release.is_partial();
            let Some(release) = self.release_at(model, seq)?.filter(whole) else {
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
    pub fn release(&self, model: &str, which: Option<&str>) -> Result<Option<Release>, StoreError> {
        if let Some(seq) = which.and_then(|which| which.parse().ok()) {
            return self.release_at(model, seq);
        }
        self.find_release(model, |release| {
            !release.is_partial() && (which.is_none() || release.name.as_deref() == which)
        })
    }

    /// Returns the last release of `model`, be it a partial one.
    pub fn last_release(&self, model: &str) -> Result<Option<Release>, StoreError> {
        self.find_release(model, |_| true)
    }

    /// Returns the newest release of `model` that `is` says.
    pub fn find_release(
        &self,
        model: &str,
        is: impl Fn(&Release) -> bool,
    ) -> Result<Option<Release>, StoreError> {
        for seq in self.sequences(model)?.into_iter().rev() {
            let found = self.release_at(model, seq)?.filter(&is);
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Returns the names of the programs that `before` has and `after` has nothing in the place of.
    pub fn lost(&self, before: &Release, after: &Release) -> Result<Vec<String>, StoreError> {
        let names = |release: &Release| -> Result<BTreeSet<(String, String)>, StoreError> {
            let rows = release.programs.iter().map(|id| self.program_row(id));
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
        let name = |(name, device): (String, String)| match after.iter().any(|(n, _)| *n == name) {
            // It is there, but for another device.
            true => format!("{name} on {device}"),
            false => name,
        };
        Ok(lost.map(name).collect())
    }

    /// Returns the release of `model` with this number.
    pub fn release_at(&self, model: &str, seq: u64) -> Result<Option<Release>, StoreError> {
        let path = self.layout().release(model, seq)?;
        let Some((release, _)) = checksum::read::<Release>(self.layout(), &path)? else {
            return Ok(None);
        };
        known_schema(release.schema, &path)?;
        match release.model == model && release.seq == seq {
            true => Ok(Some(release)),
            false => Err(checksum::damaged(
                &path,
                "it is the record of another release".into(),
            )),
        }
    }

    /// Returns whether `model` has a release with this number: a `stat`.
    pub fn has_release(&self, model: &str, seq: u64) -> bool {
        let path = self.layout().release(model, seq);
        path.is_ok_and(|path| fs::symlink_metadata(path).is_ok())
    }

    /// Returns all releases of `model`, oldest first.
    pub fn releases(&self, model: &str) -> Result<Vec<Release>, StoreError> {
        let mut all = Vec::new();
        for seq in self.sequences(model)? {
            all.extend(self.release_at(model, seq)?);
        }
        Ok(all)
    }

    /// Returns the numbers of a model's releases, sorted: the names of their files.
    pub(super) fn sequences(&self, model: &str) -> Result<Vec<u64>, StoreError> {
        let folder = self.layout().releases(model)?;
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
}

/// Returns the objects that a release itself refers to.
fn objects_of(release: &Release) -> Vec<Digest> {
    [release.weights.as_slice(), &release.shim_objects()].concat()
}

/// Returns everything that a release itself refers to.
fn held_by(release: &Release) -> Vec<Digest> {
    [&release.programs[..], &objects_of(release)].concat()
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

    /// Puts programs of one artifact.
    fn programs<const N: usize>(store: &Store) -> [Digest; N] {
        let artifact = store.put_artifact(&testing::artifact(store, "block"));
        let artifact = artifact.unwrap().id;
        std::array::from_fn(|batch| {
            let program = testing::program("m", batch as i64, &[artifact]);
            store.put_program(&program).unwrap().id
        })
    }

    #[test]
    fn releases_count_up_and_have_names_and_numbers() {
        let (_dir, store) = testing::store();
        let [one, two] = programs(&store);
        for (seq, name, program) in [(1, Some("v1"), one), (2, None, two), (3, Some("v1"), one)] {
            let (put, new) = store
                .put_release(&testing::release("m", name, &[program]))
                .unwrap();
            assert_eq!((put.seq, new), (seq, true));
        }
        let seq = |which| store.release("m", which).unwrap().map(|found| found.seq);
        let found = [None, Some("v1"), Some("2"), Some("v9"), Some("9")].map(seq);
        assert_eq!(found, [Some(3), Some(3), Some(2), None, None]);
        assert_eq!(store.releases("m").unwrap().len(), 3);
        assert_eq!(store.models().unwrap(), ["m"]);
        let result = store.put_release(&testing::release("m", Some("7"), &[one]));
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
            let (put, new) = store.put_release(&testing::release("m", name, of)).unwrap();
            (put.seq, new)
        };
        assert_eq!(put(None, &[one, two]), (1, true));
        assert_eq!(put(None, &[two, one]), (1, false), "in another order");
        assert_eq!(put(Some("v1"), &[one, two]), (2, true), "it has no name");
        assert_eq!(put(None, &[one, two]), (2, false), "any name will do");
        assert_eq!(put(Some("v2"), &[one, two]), (3, true));
        let mut other = testing::release("m", None, &[one, two]);
        other.weights = Some(store.put_bytes(b"other weights").unwrap());
        assert!(store.put_release(&other).unwrap().1);
        // Builders that publish the same at the same time make one release of it.
        other.programs = vec![one];
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let store = Store::open(store.path()).unwrap();
                    assert_eq!(store.put_release(&other).unwrap().0.seq, 5);
                });
            }
        });
        // What went before with other content is what one goes back to.
        assert_eq!(store.rollback("m", None).unwrap().0.programs.len(), 2);
        let (same, new) = store.rollback("m", Some(4)).unwrap();
        assert_eq!((same.seq, new), (6, false));
    }

    #[test]
    fn a_partial_release_is_nobodys_newest() {
        let (_dir, store) = testing::store();
        let [one, two, three] = programs(&store);
        let put = |lacks: &[&str], of: &[Digest]| {
            let mut release = testing::release("m", None, of);
            release.lacks = lacks.iter().map(ToString::to_string).collect();
            let (put, new) = store.put_release(&release).unwrap();
            (put.seq, new)
        };
        let newest = || store.release("m", None).unwrap().map(|newest| newest.seq);
        assert_eq!(put(&["encode batch=1"], &[one]), (1, true));
        assert_eq!((newest(), store.newest_release("m").unwrap()), (None, None));
        assert_eq!(put(&[], &[one, two]), (2, true));
        assert_eq!(put(&["encode batch=1"], &[three]), (3, true));
        assert_eq!(put(&["encode batch=1"], &[three]), (3, false));
        assert_eq!(
            (newest(), store.newest_release("m").unwrap()),
            (Some(2), Some(2))
        );
        assert_eq!(store.release("m", Some("3")).unwrap().unwrap().seq, 3);
        assert_eq!(store.last_release("m").unwrap().unwrap().seq, 3);
        assert_eq!(store.released(&three).unwrap(), None);
        assert_eq!(store.partly_released(&three).unwrap(), Some(3));
        assert_eq!(put(&[], &[one, two]), (2, false), "it is the newest still");
        let error = store.rollback("m", Some(3)).unwrap_err();
        assert!(
            matches!(error, StoreError::Partial { lacks: 1, .. }),
            "{error}"
        );
        let error = store.rollback("m", None).unwrap_err();
        assert!(matches!(error, StoreError::NoRelease { .. }), "{error}");
        assert_eq!(store.verify().unwrap().defects, []);
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
            let (put, new) = store.put_release(&release).unwrap();
            (put.seq, new)
        };
        assert_eq!(put(&["2.11.0"], &[two]), (1, true));
        assert_eq!(put(&["2.11.0"], &[one]), (2, true));
        assert_eq!(put(&["2.11.0", "2.13.0"], &[one]), (3, true));
        assert_eq!(put(&["2.11.0"], &[one]), (3, false), "it has it already");
        // One runs the same under both.
        let back = store.rollback("m", None).unwrap().0;
        assert_eq!((back.seq, &back.programs[..]), (4, &[two][..]));
        // What a release needs stays, and is missed.
        let newest = put(&["2.13.0"], &[one]).0;
        let policy = super::super::Policy {
            keep_releases: 1,
            ..Default::default()
        };
        store.gc(&policy).unwrap();
        let release = store.release("m", None).unwrap().unwrap();
        assert_eq!(release.seq, newest);
        let _hold = store.hold_release(&release).unwrap();
        assert_eq!(store.verify().unwrap().defects, []);
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
            store.put_release(&release),
            Err(StoreError::Dangling { .. })
        ));
        assert!(!store.verify().unwrap().defects.is_empty());
    }

    #[test]
    fn what_a_newer_release_does_not_answer_has_a_name() {
        let (_dir, store) = testing::store();
        let [one, two, three] = programs(&store);
        let release = |of: &[Digest]| testing::release("m", None, of);
        let lost = store.lost(&release(&[one, two]), &release(&[two, three]));
        assert_eq!(lost.unwrap(), ["encode batch=0"]);
        let lost = store.lost(&release(&[two]), &release(&[two, three]));
        assert_eq!(lost.unwrap(), [""; 0]);
    }

    #[test]
    fn going_back_puts_the_earlier_one_once_more() {
        let (_dir, store) = testing::store();
        let artifact = store
            .put_artifact(&testing::artifact(&store, "block"))
            .unwrap();
        let put = |batch| {
            store
                .put_program(&testing::program("m", batch, &[artifact.id]))
                .unwrap()
                .id
        };
        let (one, two) = (put(1), put(2));
        assert!(matches!(
            store.rollback("m", None),
            Err(StoreError::NoRelease { .. })
        ));
        for (name, program) in [("v1", one), ("v2", two)] {
            store
                .put_release(&testing::release("m", Some(name), &[program]))
                .unwrap();
        }
        let back = store.rollback("m", None).unwrap().0;
        assert_eq!(
            (back.seq, back.name.as_deref(), &back.programs[..]),
            (3, Some("v1"), &[one][..])
        );
        assert_eq!(store.release("m", None).unwrap(), Some(back));
        assert_eq!(store.rollback("m", Some(2)).unwrap().0.programs, [two]);
        let error = store.rollback("m", Some(9)).unwrap_err();
        assert_eq!(error.to_string(), "`m` has no release 9");
        fs::remove_file(
            store
                .layout()
                .record(super::super::layout::Kind::Program, &one),
        )
        .unwrap();
        assert!(matches!(
            store.rollback("m", Some(1)),
            Err(StoreError::Dangling { .. })
        ));
        assert_eq!(store.release("m", None).unwrap().unwrap().seq, 4);
    }
}
