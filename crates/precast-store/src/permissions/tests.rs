use std::{fs::Permissions, os::unix::fs::PermissionsExt};

use super::{super::testing, *};
use crate::Store;

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn refused(path: &Path) -> String {
    let error = Store::open(path).unwrap_err();
    assert!(matches!(error, StoreError::Unsafe { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_store_in_a_folder_that_others_can_write_is_refused_unless_it_is_sticky() {
    let (dir, store) = testing::store();
    let path = store.path().to_owned();
    mode(dir.path(), 0o777);
    assert!(refused(&path).contains("everybody can write it"));
    mode(dir.path(), 0o1777);
    Store::open(&path).unwrap();
}

/// Changes the owner of a path. Prints that the test is skipped, and returns false, if this user may not.
fn give(path: &Path, uid: u32) -> bool {
    let given = std::os::unix::fs::lchown(path, Some(uid), None).is_ok();
    if !given {
        eprintln!("skipped: this user can't give a file to another user");
    }
    given
}

#[test]
fn a_strangers_store_is_run_only_when_it_was_named() {
    let (_dir, store, artifact, _) = testing::filled();
    let path = store.path().to_owned();
    drop(store);
    for entry in walkdir::WalkDir::new(&path) {
        if !give(entry.unwrap().path(), 12345) {
            return;
        }
    }
    let error = Store::open(&path).unwrap_err();
    let stranger = matches!(error, StoreError::Stranger { uid: 12345, .. });
    assert!(stranger, "{error}");
    Store::create(&path).unwrap_err();
    Store::open_read_only(&path).unwrap_err();
    Store::open_for_repair(&path, Options::default()).unwrap_err();
    Store::open_without_index(&path, Options::default()).unwrap_err();
    let trusted = Options {
        trusted: true,
        ..Options::default()
    };
    let store = Store::open_with(&path, trusted).unwrap();
    store.objects().read(&artifact.object).unwrap();
    // Only the trusted user is accepted.
    give(&store.layout().object(&artifact.object), 12346);
    store.objects().read(&artifact.object).unwrap_err();
}

#[test]
fn a_group_shares_a_store_only_with_the_option() {
    let (_dir, store) = testing::store();
    // A group with another number than the user.
    let gid = fs::metadata(store.path()).unwrap().uid() + 1;
    if std::os::unix::fs::chown(store.path(), None, Some(gid)).is_err() {
        eprintln!("skipped: this user can't give a folder to another group");
        return;
    }
    mode(store.path(), 0o775);
    assert!(refused(store.path()).contains("group"));
    let shared = Options {
        shared: true,
        ..Options::default()
    };
    Store::open_with(store.path(), shared).unwrap();
    mode(store.path(), 0o777);
    assert!(Store::open_with(store.path(), shared).is_err());
}

#[test]
fn a_link_is_refused_and_a_trusted_link_above_is_followed() {
    let (dir, store) = testing::store();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(store.path(), &link).unwrap();
    assert!(refused(&link).contains("symbolic link"));
    let above = dir.path().join("above");
    std::os::unix::fs::symlink(dir.path(), &above).unwrap();
    Store::open(above.join("store")).unwrap();
    let objects = store.path().join("objects");
    fs::rename(&objects, dir.path().join("away")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("away"), &objects).unwrap();
    assert!(refused(store.path()).contains("symbolic link"));
}

#[test]
fn each_folder_and_link_of_a_path_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let [far, env, bin] = ["far", "env", "env/bin"].map(|name| root.join(name));
    for folder in [&far, &env, &bin] {
        fs::create_dir(folder).unwrap();
    }
    let (file, python, other) = (far.join("python"), bin.join("python"), far.join("other"));
    fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink("python", &other).unwrap();
    std::os::unix::fs::symlink("../../far/other", &python).unwrap();
    check_path(&python).unwrap();
    for path in [&root, &far, &env, &bin, &file, &python, &other] {
        let refusal = || match check_path(&python).unwrap_err() {
            StoreError::Unsafe { path, why } => (path, why),
            error => panic!("{error}"),
        };
        if !path.is_symlink() {
            let sound = fs::metadata(path).unwrap().permissions();
            mode(path, 0o777);
            assert_eq!(refusal().0, **path);
            fs::set_permissions(path, sound).unwrap();
        }
        let owner = fs::symlink_metadata(path).unwrap().uid();
        if give(path, 12345) {
            let (at, why) = refusal();
            assert!(
                at == **path && why.ends_with("to user 12345"),
                "{at:?} {why}"
            );
            give(path, owner);
        }
        check_path(&python).unwrap();
    }
    // In a sticky folder no user can replace the files of others, but any user can add one.
    mode(&bin, 0o1777);
    check_path(&python).unwrap();
    check_path(&bin).unwrap_err();
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("other", &file).unwrap();
    check_path(&python).unwrap_err();
}

#[test]
fn a_store_below_a_strangers_folder_is_refused() {
    let (dir, store) = testing::store();
    if !give(dir.path(), 12345) {
        return;
    }
    assert!(refused(store.path()).contains("user 12345"));
    // The store of a deploy user in the folder of that user.
    give(store.path(), 12345);
    let trusted = Options {
        trusted: true,
        ..Options::default()
    };
    Store::open_with(store.path(), trusted).unwrap();
    give(dir.path(), 12346);
    Store::open_with(store.path(), trusted).unwrap_err();
}
