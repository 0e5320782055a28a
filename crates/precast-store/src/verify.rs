//! Checks a whole store: every file, byte, reference and row.
//!
//! It takes no lock while it hashes, so other processes may add and delete meanwhile. A suspected defect is checked
//! again under an exclusive lock, and reported only if it is still there. A read-only store gets no second check and is
//! not written.

use std::collections::{BTreeMap, BTreeSet};

use rusqlite::Connection;
use serde::{Deserialize, Serialize};

use super::{
    base::Base,
    checksum::{Record, record_file},
    defect::{Defect, Needs},
    error::StoreError,
    files::Files,
    gc::Collector,
    graph::Graph,
    index::Index,
    layout::StoreLayout,
    lock::Mode,
    reindex, rows, sync,
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program, Release},
};

/// The result of a check of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verified {
    /// Version of this document.
    pub schema: u32,
    /// Objects whose bytes were checked.
    pub objects: u64,
    /// Bytes of their contents.
    pub bytes: u64,
    /// Records that were checked: artifacts, programs, releases, failures.
    pub records: u64,
    /// Files in `quarantine/`: found damaged earlier, never used. Not a defect.
    pub quarantined: u64,
    /// All defects, sorted; empty in a sound store.
    pub defects: Vec<Defect>,
}

impl Verified {
    /// Returns the most serious remedy that a defect needs; none for a sound store.
    pub fn needs(&self) -> Option<Needs> {
        self.defects.iter().map(Defect::needs).max()
    }
}

/// The checks and repairs of a store.
pub struct Audit {
    pub(crate) collector: Collector,
}

impl Audit {
    pub(crate) fn base(&self) -> &Base {
        self.collector.base()
    }

    /// Checks every file, byte, reference and row.
    pub fn verify(&self) -> Result<Verified, StoreError> {
        let first = self.look(true)?;
        if first.defects.is_empty() || self.base().is_read_only() {
            return Ok(first);
        }
        sync::point("verify:looked");
        let _lock = self.base().lock(Mode::Delete)?;
        sync::point("verify:again");
        self.again(first)
    }

    /// Checks again, and hashes only the files that had a wrong hash. The caller has `Mode::Delete`.
    pub(super) fn again(&self, first: Verified) -> Result<Verified, StoreError> {
        let mut second = self.look(false)?;
        for defect in first.defects {
            if let Defect::Object { path, .. } | Defect::Ready { path, .. } = &defect
                && let Some(still) = Files::new(&self.base().layout).recheck(path)
            {
                second.defects.push(still);
            }
        }
        second.defects.sort();
        second.defects.dedup();
        Ok(Verified {
            objects: first.objects,
            bytes: first.bytes,
            ..second
        })
    }

    pub(super) fn look(&self, hash: bool) -> Result<Verified, StoreError> {
        let mut files = Files::new(&self.base().layout);
        files.everything(hash)?;
        let mut defects = files.defects;
        self.compare_rows(&mut defects)?;
        defects.sort();
        defects.dedup();
        Ok(Verified {
            schema: 1,
            objects: files.objects,
            bytes: files.bytes,
            records: files.records,
            quarantined: files.quarantined,
            defects,
        })
    }

    /// Returns the error of an unusable index of the store. A read-only store then uses an index in memory.
    pub fn index_error(&self) -> Option<StoreError> {
        if !Index::may_be_read(&self.base().layout) {
            return None;
        }
        Index::open_read_only(&self.base().locks).err()
    }

    /// Returns the errors of unreadable records and releases.
    pub fn damaged(&self) -> Vec<StoreError> {
        let (layout, mut errors) = (&self.base().layout, Vec::new());
        unreadable::<Artifact>(layout, &mut errors);
        unreadable::<Program>(layout, &mut errors);
        unreadable::<Failure>(layout, &mut errors);
        unreadable::<Release>(layout, &mut errors);
        errors
    }

    /// Adds the defects of the index: compares it with an index that is built from the files now.
    fn compare_rows(&self, defects: &mut Vec<Defect>) -> Result<(), StoreError> {
        let Base { layout, locks, .. } = self.base();
        let damaged = |why: String| Defect::Index { why };
        if !layout.index().exists() {
            defects.push(damaged("it is missing".into()));
            return Ok(());
        }
        if !Index::may_be_read(layout) {
            // Only a user with write access can check it.
            return Ok(());
        }
        let looked = Index::open_read_only(locks).and_then(|own| {
            own.with(|index| {
                let checked: String =
                    index.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
                if checked != "ok" {
                    return Ok(Err(checked));
                }
                let marked = index
                    .prepare("SELECT id FROM marked")?
                    .query_map([], |row| row.get(0))?
                    .collect::<rusqlite::Result<Vec<Digest>>>()?;
                let sums = Graph::read(index).err().map(|e| e.to_string());
                Ok(Ok((dump(index)?, marked, rows::bad_uses(index)?, sums)))
            })
        });
        let why = match looked {
            Ok(Ok((found, marked, uses, sums))) => {
                defects.extend(sums.map(damaged));
                defects.extend(uses.iter().map(|id| Defect::Row {
                    row: format!("uses {}", hex::encode(id)),
                }));
                let expected = Index::in_memory(locks).with(dump)?;
                compare(&found, &expected, &marked, defects);
                return Ok(());
            }
            Err(e @ StoreError::Newer { .. }) => return Err(e),
            Err(StoreError::Index { source, .. }) => source.to_string(),
            Err(e) => e.to_string(),
            Ok(Err(why)) => why,
        };
        defects.push(damaged(why));
        Ok(())
    }
}

/// Adds the differences between the rows of an index and the expected ones. A marked row counts as deleted.
fn compare(
    found: &BTreeMap<String, String>,
    expected: &BTreeMap<String, String>,
    marked: &[Digest],
    defects: &mut Vec<Defect>,
) {
    let half: BTreeSet<String> = marked.iter().map(Digest::hex).collect();
    defects.extend(marked.iter().map(|&id| Defect::HalfDeleted { id }));
    let names: BTreeSet<&String> = found.keys().chain(expected.keys()).collect();
    for name in names {
        let row = name.clone();
        match (found.get(name), expected.get(name)) {
            (Some(is), Some(should)) if is == should => {}
            (Some(_), Some(_)) => defects.push(Defect::Row { row }),
            (Some(_), None) if row.split(' ').nth(1).is_some_and(|id| half.contains(id)) => {}
            (Some(_), None) => defects.push(Defect::Dangling { row }),
            (None, _) => defects.push(Defect::Unindexed { row }),
        }
    }
}

/// Adds the error of each record of one kind that can't be read.
fn unreadable<R: Record>(layout: &StoreLayout, errors: &mut Vec<StoreError>) {
    let folder = layout.folder(R::KIND);
    let files = reindex::files(&folder, ".json");
    errors.extend(files.filter_map(|path| record_file::<R>(layout, &path).err()));
}

/// Returns every row that is computed from files: table and key -> fields. Leaves out the time, which differs in a copy
/// of a store, and the check sum, which covers the time.
pub(crate) fn dump(from: &Connection) -> rusqlite::Result<BTreeMap<String, String>> {
    let tables = [
        ("objects", 1),
        ("artifacts", 1),
        ("artifact_objects", 2),
        ("programs", 1),
        ("program_artifacts", 2),
        ("releases", 2),
        ("release_programs", 3),
        ("release_objects", 3),
        ("failures", 1),
    ];
    let mut all = BTreeMap::new();
    for (table, key) in tables {
        let mut query = from.prepare(&format!("SELECT * FROM {table}"))?;
        let columns: Vec<usize> = (0..query.column_count())
            .filter(|at| !matches!(query.column_name(*at), Ok("created" | "sum")))
            .collect();
        let mut rows = query.query([])?;
        while let Some(row) = rows.next()? {
            let mut fields = Vec::with_capacity(columns.len());
            for &at in &columns {
                fields.push(match row.get_ref(at)? {
                    rusqlite::types::ValueRef::Blob(bytes) => hex::encode(bytes),
                    rusqlite::types::ValueRef::Text(text) => {
                        String::from_utf8_lossy(text).into_owned()
                    }
                    rusqlite::types::ValueRef::Integer(value) => value.to_string(),
                    rusqlite::types::ValueRef::Real(value) => value.to_string(),
                    rusqlite::types::ValueRef::Null => String::new(),
                });
            }
            all.insert(
                format!("{table} {}", fields[..key].join(" ")),
                fields.join("\t"),
            );
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{layout::StoreLayout, testing};
    use crate::{Options, Store};

    #[test]
    fn a_copy_without_what_was_unpacked_and_without_empty_folders_is_sound_and_works() {
        for read_only in [false, true] {
            let (_dir, store, artifact, program) = testing::filled();
            let digest = store.objects().put_bytes(b"weights").unwrap();
            testing::put_release(&store, Some("v1"), &[program.id]);
            drop(store.objects().map(&digest).unwrap());
            let path = store.path().to_owned();
            drop(store);
            // Like a checkout of `git`, and like many copies.
            fs::remove_dir_all(path.join("ready")).unwrap();
            for folder in StoreLayout::FOLDERS {
                let _ = fs::remove_dir(path.join(folder));
            }
            fs::remove_dir_all(path.join("locks")).unwrap();
            assert!(!path.join("tmp").exists());
            let open = || {
                let options = Options {
                    read_only,
                    ..Options::default()
                };
                Store::open_with(&path, options).unwrap()
            };
            let store = open();
            assert_eq!(store.audit().verify().unwrap().defects, []);
            let plan = store.collector().plan(&Default::default()).unwrap();
            assert_eq!(plan.releases, []);
            let release = store.releases().get("m", None).unwrap().unwrap();
            let _hold = store.releases().hold(&release).unwrap();
            assert_eq!(&store.objects().map(&digest).unwrap()[..], b"weights");
            store.objects().read(&artifact.object).unwrap();
            assert_eq!(store.objects().unpacked_bytes() > 0, !read_only);
            assert_eq!(open().audit().verify().unwrap().defects, []);
            if !read_only {
                store.objects().put_bytes(b"more").unwrap();
            }
        }
    }
}
