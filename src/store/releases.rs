//! Releases: complete sets of programs, each visible whole or not at all.
//!
//! A release is one file, published last, so there is no moment at which a part of it can be seen. Its number says its
//! place: the highest one is what a plain load gets. Nothing is ever taken back; going back to an earlier release puts
//! it once more, as the newest.

use std::fs;

use super::{
    Store,
    error::{At, StoreError},
    layout::check_name,
    publish,
    records::{created, dangling, known_schema},
    rows, sealed, sync,
};
use crate::record::Release;

/// No model has as many releases.
const LAST: u64 = 1 << 53;

impl Store {
    /// Keeps a release as the newest one of its model, whatever `seq` it was given; returns it with the one it got.
    ///
    /// Everything it needs must be in the store: a release is visible whole or not at all.
    pub fn put_release(&self, release: &Release) -> Result<Release, StoreError> {
        if let Some(name) = &release.name {
            check_name(name)?;
        }
        let held = [&release.programs[..], release.weights.as_slice()].concat();
        let _adding = self.adding(&held)?;
        let mut release = release.clone();
        let what = format!("release of `{}`", release.model);
        for id in &release.programs {
            let Some(program) = self.program(id)? else {
                return Err(dangling(&what, "program", id));
            };
            self.need_artifacts(&program)?;
        }
        self.need_objects(&what, release.weights.as_slice())?;
        loop {
            release.seq = self
                .sequences(&release.model)?
                .last()
                .map_or(1, |last| last + 1);
            let path = self.layout().release(&release.model, release.seq)?;
            let (text, seal) = sealed::encode(&release, &path)?;
            if publish::bytes(self.draft()?, &path, &text)? {
                sync::point("put:release-published");
                let created = created(&path)?;
                self.index()
                    .write(|tx| rows::insert_release(tx, &release, &seal, created))?;
                return Ok(release);
            }
        }
    }

    /// Makes an earlier release the newest one again: the one with number `seq`, or the one before the newest.
    ///
    /// Fails, and changes nothing, when something that it needs is gone.
    pub fn rollback(&self, model: &str, seq: Option<u64>) -> Result<Release, StoreError> {
        let all = self.sequences(model)?;
        let back = |seq: &u64| StoreError::NoRelease {
            model: model.to_owned(),
            seq: *seq,
        };
        let seq = match seq {
            Some(seq) => seq,
            None => match all[..] {
                [.., before, _] => before,
                _ => return Err(back(&0)),
            },
        };
        let earlier = self.release_at(model, seq)?.ok_or_else(|| back(&seq))?;
        self.put_release(&earlier)
    }

    /// Returns the newest release of `model`, or the newest one that has this name.
    pub fn release(&self, model: &str, name: Option<&str>) -> Result<Option<Release>, StoreError> {
        for seq in self.sequences(model)?.into_iter().rev() {
            let found = self.release_at(model, seq)?;
            if let Some(release) = found
                && (name.is_none() || release.name.as_deref() == name)
            {
                return Ok(Some(release));
            }
        }
        Ok(None)
    }

    /// Returns the release of `model` with this number.
    pub fn release_at(&self, model: &str, seq: u64) -> Result<Option<Release>, StoreError> {
        let path = self.layout().release(model, seq)?;
        let Some((release, _)) = sealed::read::<Release>(&path)? else {
            return Ok(None);
        };
        known_schema(release.schema, &path)?;
        match release.model == model && release.seq == seq {
            true => Ok(Some(release)),
            false => Err(sealed::damaged(
                &path,
                "it is the record of another release".into(),
            )),
        }
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

/// Returns the number that a release's file name says, if it is one that this code writes.
fn sequence(name: &str) -> Option<u64> {
    let seq: u64 = name.strip_suffix(".json")?.parse().ok()?;
    (seq < LAST && name == format!("{seq:08}.json")).then_some(seq)
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};

    #[test]
    fn releases_count_up_and_have_names() {
        let (_dir, store, _, program) = testing::filled();
        for (seq, name) in [(1, Some("v1")), (2, None), (3, Some("v1"))] {
            let put = store
                .put_release(&testing::release("m", name, &[program.id]))
                .unwrap();
            assert_eq!(put.seq, seq);
        }
        assert_eq!(store.release("m", None).unwrap().unwrap().seq, 3);
        assert_eq!(store.release("m", Some("v1")).unwrap().unwrap().seq, 3);
        assert_eq!(store.release("m", Some("v9")).unwrap(), None);
        assert_eq!(store.releases("m").unwrap().len(), 3);
        assert_eq!(store.models().unwrap(), ["m"]);
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
        let back = store.rollback("m", None).unwrap();
        assert_eq!(
            (back.seq, back.name.as_deref(), &back.programs[..]),
            (3, Some("v1"), &[one][..])
        );
        assert_eq!(store.release("m", None).unwrap(), Some(back));
        assert_eq!(store.rollback("m", Some(2)).unwrap().programs, [two]);
        let told = store.rollback("m", Some(9)).unwrap_err();
        assert_eq!(told.to_string(), "`m` has no release 9");
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
