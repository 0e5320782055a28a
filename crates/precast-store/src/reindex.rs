//! Rebuilding the index from the files.

use std::{fs, path::Path};

use rusqlite::Connection;
use walkdir::WalkDir;

use super::{
    checksum::{Record, record_file},
    error::StoreError,
    layout::{Kind, StoreLayout},
    object,
    rows::ObjectRow,
};
use crate::{
    Digest,
    record::{Artifact, Failure, Program, Release},
};

/// Inserts a row for every sound file without one. Unreadable files get no row; `verify` names them.
pub(crate) fn fill(layout: &StoreLayout, to: &Connection) -> rusqlite::Result<()> {
    for path in files(&layout.root.join("objects"), ".zst") {
        let Some(digest) = named(&path, ".zst") else {
            continue;
        };
        if path == layout.object(&digest)
            && ObjectRow::find(to, &digest)?.is_none()
            && let Ok(row) = object::row(layout, &path, &digest)
        {
            row.insert(to)?;
        }
    }
    records::<Artifact>(layout, to)?;
    records::<Program>(layout, to)?;
    records::<Failure>(layout, to)?;
    for path in files(&layout.folder(Kind::Release), ".json") {
        if let Ok((release, checksum, created)) = record_file::<Release>(layout, &path) {
            release.insert(to, &checksum, created)?;
        }
    }
    Ok(())
}

/// Returns the error for a record of a newer precast. It has no row and its references are unknown, so nothing may be
/// deleted.
pub(crate) fn newer(
    layout: &StoreLayout,
    index: &Connection,
) -> rusqlite::Result<Option<StoreError>> {
    let mut found = newer_of::<Artifact>(layout, index)?;
    found = found.or(newer_of::<Program>(layout, index)?);
    found = found.or(newer_of::<Failure>(layout, index)?);
    let newer_release = files(&layout.folder(Kind::Release), ".json")
        .filter_map(|path| record_file::<Release>(layout, &path).err())
        .find(is_newer);
    Ok(found.or(newer_release))
}

fn newer_of<R: Record>(
    layout: &StoreLayout,
    index: &Connection,
) -> rusqlite::Result<Option<StoreError>> {
    for path in files(&layout.folder(R::KIND), ".json") {
        if is_new::<R>(index, &path)?
            && let Err(error) = record_file::<R>(layout, &path)
            && is_newer(&error)
        {
            return Ok(Some(error));
        }
    }
    Ok(None)
}

fn is_newer(error: &StoreError) -> bool {
    matches!(error, StoreError::Newer { .. })
}

/// Removes the rows of releases whose file is missing: gc removes the file first.
pub(crate) fn drop_gone_releases(layout: &StoreLayout, to: &Connection) -> rusqlite::Result<()> {
    let all: Vec<(String, i64)> = to
        .prepare("SELECT model,seq FROM releases")?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let mut delete = to.prepare("DELETE FROM releases WHERE model=? AND seq=?")?;
    for (model, seq) in all {
        let path = layout.release(&model, seq as u64);
        if path.is_ok_and(|path| fs::symlink_metadata(path).is_err()) {
            delete.execute((model, seq))?;
        }
    }
    Ok(())
}

fn records<R: Record>(layout: &StoreLayout, to: &Connection) -> rusqlite::Result<()> {
    for path in files(&layout.folder(R::KIND), ".json") {
        if is_new::<R>(to, &path)?
            && let Ok((record, checksum, created)) = record_file::<R>(layout, &path)
        {
            record.insert(to, &checksum, created)?;
        }
    }
    Ok(())
}

/// Returns whether a file has the name of a record and no row.
fn is_new<R: Record>(index: &Connection, path: &Path) -> rusqlite::Result<bool> {
    let query = format!("SELECT 1 FROM {} WHERE id=?", R::KIND.folder());
    let mut query = index.prepare_cached(&query)?;
    named(path, ".json").map_or(Ok(false), |id| Ok(!query.exists([id])?))
}

/// Lists the plain files two levels down in `folder`.
pub(crate) fn files(
    folder: &Path,
    suffix: &'static str,
) -> impl Iterator<Item = std::path::PathBuf> {
    WalkDir::new(folder)
        .min_depth(2)
        .max_depth(2)
        .into_iter()
        .filter_map(Result::ok)
        .filter(move |e| {
            e.file_type().is_file() && e.file_name().to_string_lossy().ends_with(suffix)
        })
        .map(walkdir::DirEntry::into_path)
}

/// Returns the digest in a file's name.
pub(crate) fn named(path: &Path, suffix: &str) -> Option<Digest> {
    path.file_name()?
        .to_str()?
        .strip_suffix(suffix)?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::{super::testing, *};
    use crate::Store;

    fn dump(store: &Store) -> std::collections::BTreeMap<String, String> {
        store.index().with(super::super::verify::dump).unwrap()
    }

    #[test]
    fn a_deleted_index_comes_back_the_same() {
        let (_dir, store, _, program) = testing::filled();
        testing::put_release(&store, Some("v1"), &[program.id]);
        let failure = testing::failure(Digest::of(b"f"), "why");
        store.records().put_failure(&failure).unwrap();
        let before = dump(&store);
        assert_eq!(before.len(), 8);
        let path = store.path().to_owned();
        drop(store);
        fs::remove_file(path.join("index.sqlite")).unwrap();
        assert_eq!(dump(&Store::open_read_only(&path).unwrap()), before);
        assert!(!path.join("index.sqlite").exists());
        assert_eq!(dump(&Store::open(&path).unwrap()), before);
    }
}
