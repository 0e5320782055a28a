//! Limits of `quarantine/`: damaged files are removed when they are old, or when there are many.
//!
//! A damaged file is kept so that a person can look for the cause. `precast gc` removes files that are older than
//! [`DAYS`], then the oldest ones until [`BYTES`] remain: a disk with many errors must not fill up. The plan of gc
//! lists them. Nothing else removes files here.

use std::{fs, io, os::unix::fs::MetadataExt, path::Path};

use serde::{Deserialize, Serialize};
use walkdir::WalkDir;

use super::{
    error::{At, StoreError},
    publish::remove_all,
    reason::Reason,
};

/// Days for which a damaged file is kept.
const DAYS: i64 = 30;
/// Maximum bytes of damaged files.
const BYTES: u64 = 1 << 30;

/// A damaged file to remove.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Damaged {
    /// Its name in `quarantine/`.
    pub name: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// The reason for the removal.
    pub reason: Reason,
}

/// Returns the files to remove from the quarantine of the store at `root`, oldest first.
pub(crate) fn old(root: &Path, now: i64) -> Result<Vec<Damaged>, StoreError> {
    let folder = root.join("quarantine");
    let entries = match fs::read_dir(&folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        other => other.at("list", &folder)?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry.at("list", &folder)?;
        // The store creates only names that are text.
        if let Ok(name) = entry.file_name().into_string() {
            let at = set_aside_at(&name, &entry.path());
            all.push((at, name, size(&entry.path())));
        }
    }
    all.sort();
    let mut left: u64 = all.iter().map(|(_, _, bytes)| bytes).sum();
    let mut old = Vec::new();
    for (at, name, bytes) in all {
        let days = (now - at) / (24 * 60 * 60);
        let reason = if days >= DAYS {
            Reason::Age { days }
        } else if left > BYTES {
            Reason::Size
        } else {
            break;
        };
        left -= bytes;
        old.push(Damaged {
            name,
            bytes,
            reason,
        });
    }
    Ok(old)
}

/// Removes these files. Returns the number of the removed files, and their bytes.
pub(crate) fn remove(root: &Path, damaged: &[Damaged]) -> Result<(usize, u64), StoreError> {
    let mut done = (0, 0);
    for one in damaged {
        let path = root.join("quarantine").join(&one.name);
        // A plan may come from another program. Only names in this folder are accepted.
        if Path::new(&one.name).file_name() != Some(one.name.as_ref())
            || fs::symlink_metadata(&path).is_err()
        {
            continue;
        }
        remove_all(&path)?;
        done = (done.0 + 1, done.1 + one.bytes);
    }
    Ok(done)
}

/// Returns the time at which a file was set aside. Its name ends with that second and a number (`Base::set_aside`). A
/// file with another name was set aside at the time of its last status change.
fn set_aside_at(name: &str, path: &Path) -> i64 {
    let mut parts = name.rsplit('.');
    let number = parts.next().and_then(|part| part.parse::<u32>().ok());
    let second = parts.next().and_then(|part| part.parse().ok());
    match (number, second) {
        (Some(_), Some(second)) => second,
        _ => fs::symlink_metadata(path).map_or(0, |meta| meta.ctime()),
    }
}

/// Returns the bytes of a file, or of all files in a folder.
fn size(path: &Path) -> u64 {
    let files = WalkDir::new(path).into_iter().flatten();
    let sizes = files.filter_map(|file| Some(file.metadata().ok()?.len()));
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::{
        super::{Policy, testing, time::now},
        *,
    };

    #[test]
    fn what_was_set_aside_goes_with_age_and_by_size_oldest_first() {
        let (_dir, store) = testing::store();
        let folder = store.path().join("quarantine");
        let days = |days: i64| now() - days * 24 * 60 * 60;
        let put = |name: String, bytes: u64| {
            // A sparse file, which takes no space on the disk.
            let file = File::create(folder.join(&name)).unwrap();
            file.set_len(bytes).unwrap();
            name
        };
        let old = put(format!("a.zst.{}.0", days(31)), 5);
        let whole = format!("b.{}.1", days(40));
        fs::create_dir(folder.join(&whole)).unwrap();
        fs::write(folder.join(&whole).join("x"), "1234").unwrap();
        let large = put(format!("c.zst.{}.0", days(3)), BYTES);
        put(format!("d.zst.{}.0", days(2)), 7);
        put("put here by hand".to_owned(), 7);

        let plan = store.collector().plan(&Policy::default()).unwrap();
        let names: Vec<&str> = plan.quarantine.iter().map(|one| &*one.name).collect();
        assert_eq!(names, [&whole, &old, &large]);
        assert_eq!(plan.quarantine[1].reason, Reason::Age { days: 31 });
        assert_eq!(plan.quarantine[2].reason, Reason::Size);
        assert!(!plan.is_empty());
        let line = format!("damaged   {old}  not used for 31 days\n");
        assert!(plan.to_string().contains(&line), "{plan}");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 5);

        let (_, done) = store.collector().gc(&Policy::default()).unwrap();
        assert_eq!(done.damaged, 3);
        assert!(done.damaged_bytes >= BYTES + 9);
        assert_eq!(done.bytes, plan.before - plan.after);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
    }

    #[test]
    fn a_plan_names_nothing_outside() {
        let (_dir, store) = testing::store();
        let outside = Damaged {
            name: "../precast-store.json".to_owned(),
            bytes: 1,
            reason: Reason::Size,
        };
        assert_eq!(remove(store.path(), &[outside]).unwrap(), (0, 0));
        assert!(store.path().join("precast-store.json").exists());
    }
}
