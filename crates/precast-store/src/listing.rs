//! Counts and listings for `ls`, `du` and `report`; the build needs none of them.

use std::path::Path;

use rusqlite::{OptionalExtension, params};

use super::{
    Options, Store,
    error::StoreError,
    find::{PAGE, Pages},
    index::Index,
    layout::Layout,
    records::{Record, record_file, release_file},
    reindex,
    rows::{self, ObjectRow, ProgramRow},
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program},
};

/// A record and when it was published, in seconds since 1970.
pub type Dated<T> = Result<(T, i64), StoreError>;

impl Store {
    /// Opens the store at `path` for reading, with an index made in memory of its files, whatever state its own is in.
    /// Files that can't be read are left out; [`Store::damaged`] names them.
    pub fn open_without_index(
        path: impl AsRef<Path>,
        mut options: Options,
    ) -> Result<Self, StoreError> {
        let layout = Layout::find(path.as_ref(), options)?;
        let index = Index::in_memory(&layout)?;
        options.read_only = true;
        Ok(Self::with_index(layout, index, options))
    }

    /// Returns why the store's own index can't be used, if it can't: a read-only store then works with one in memory.
    pub fn index_trouble(&self) -> Option<StoreError> {
        match Index::may_be_read(self.layout()) {
            true => Index::open_read_only(self.layout()).err(),
            false => None,
        }
    }

    /// Looks at every record and release, and returns why those that can't be read can't be.
    pub fn damaged(&self) -> Vec<StoreError> {
        let layout = self.layout();
        let mut found = Vec::new();
        self.damaged_of::<Artifact>(&mut found);
        self.damaged_of::<Program>(&mut found);
        self.damaged_of::<Failure>(&mut found);
        for path in reindex::files(&layout.root.join("releases"), ".json") {
            found.extend(release_file(layout, &path).err());
        }
        found
    }

    fn damaged_of<R: Record>(&self, found: &mut Vec<StoreError>) {
        let layout = self.layout();
        for path in reindex::files(&layout.folder(R::KIND), ".json") {
            found.extend(record_file::<R>(layout, &path).err());
        }
    }

    /// Returns a program as the index has it.
    pub fn program_row(&self, id: &Digest) -> Result<Option<ProgramRow>, StoreError> {
        let query = format!(
            "SELECT {} FROM programs p WHERE p.id=?",
            ProgramRow::COLUMNS
        );
        self.index().with(|index| {
            index
                .prepare_cached(&query)?
                .query_row([id.as_bytes()], ProgramRow::read)
                .optional()
        })
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
        self.index().with(|index| {
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
    pub fn releases_with(&self, id: &Digest) -> Result<Vec<(String, u64)>, StoreError> {
        self.index().with(|index| {
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
    pub fn newest_release(&self, model: &str) -> Result<Option<u64>, StoreError> {
        self.index().with(|index| {
            index
                .prepare_cached("SELECT max(seq) FROM releases WHERE model=? AND NOT partial")?
                .query_row([model], |row| row.get::<_, Option<i64>>(0))
                .map(|seq| seq.map(|seq| seq as u64))
        })
    }

    /// Lists what failed and was not built since, with the time of the failure in seconds since 1970. A record that
    /// can't be read is an error in its place.
    pub fn failures(&self) -> impl Iterator<Item = Dated<Failure>> + use<> {
        let store = self.clone();
        let ids = Pages::new(move |last: Option<&(Digest, i64)>| {
            let after = last.map_or(Vec::new(), |(id, _)| id.as_bytes().to_vec());
            store.index().with(|index| {
                index
                    .prepare_cached(&format!(
                        "SELECT id,created FROM failures WHERE id>? ORDER BY id LIMIT {PAGE}"
                    ))?
                    .query_map([after], |row| Ok((rows::digest(row, 0)?, row.get(1)?)))?
                    .collect()
            })
        });
        let store = self.clone();
        ids.filter_map(move |found| match found {
            Ok((id, created)) => match store.failure(&id) {
                Ok(found) => found.map(|failure| Ok((failure, created))),
                Err(error) => Some(Err(error)),
            },
            Err(error) => Some(Err(error)),
        })
    }

    /// Returns the program that calls this artifact and was built first.
    pub fn first_caller(&self, artifact: &Digest) -> Result<Option<Digest>, StoreError> {
        self.index().with(|index| {
            index
                .prepare_cached(
                    "SELECT p.id FROM program_artifacts l JOIN programs p ON p.id=l.program \
                     WHERE l.artifact=? ORDER BY p.created,p.id LIMIT 1",
                )?
                .query_row([artifact.as_bytes()], |row| rows::digest(row, 0))
                .optional()
        })
    }

    /// Lists objects by digest. Rows are read as they are asked for.
    pub fn objects(&self) -> impl Iterator<Item = Result<ObjectRow, StoreError>> + use<> {
        let query = format!(
            "SELECT digest,size,stored,created,sum FROM objects WHERE digest>? ORDER BY digest LIMIT {PAGE}"
        );
        let store = self.clone();
        Pages::new(move |last: Option<&ObjectRow>| {
            let after = last.map_or(Vec::new(), |row| row.digest.as_bytes().to_vec());
            store.index().with(|index| {
                index
                    .prepare_cached(&query)?
                    .query_map([after], ObjectRow::read)?
                    .collect()
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{layout::Kind, testing},
        *,
    };

    #[test]
    fn a_store_without_a_usable_index_still_lists_its_sound_records() {
        let (_dir, store) = testing::store();
        let a = store.put_artifact(&testing::artifact(&store, "a")).unwrap();
        let good = store
            .put_program(&testing::program("m", 1, &[a.id]))
            .unwrap();
        let bad = store
            .put_program(&testing::program("m", 2, &[a.id]))
            .unwrap();
        let path = store.layout().record(Kind::Program, &bad.id);
        testing::damage(&path, |bytes| bytes[10] ^= 1);
        std::fs::write(store.layout().index(), b"not a database").unwrap();
        let again = Store::open_without_index(store.path(), Options::default()).unwrap();
        let ids: Vec<_> = again
            .programs(Default::default())
            .map(|row| row.unwrap().id)
            .collect();
        assert_eq!(ids, [good.id]);
        let errors: Vec<_> = again.damaged();
        assert_eq!(errors.len(), 1);
        assert!(
            errors[0].to_string().contains(&bad.id.hex()),
            "{}",
            errors[0]
        );
    }
}
