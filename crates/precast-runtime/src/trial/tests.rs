use std::{
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
};

use precast_store::testing;

use super::*;

/// Returns the verdicts that a process has of this file.
fn trials(file: &Path) -> Trials {
    Trials::new(Trial::here().remember(file), &testing::target())
}

fn known(file: &Path, object: Digest) -> bool {
    trials(file).lock().contains_key(&object)
}

#[test]
fn a_file_that_others_can_have_written_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("loads");
    let object = Digest::of(b"object");
    trials(&file).loaded(object);
    assert!(known(&file, object));
    let bytes = fs::read(&file).unwrap();

    for mode in [0o666, 0o646] {
        fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        assert!(!known(&file, object), "{mode:o}");
        trials(&file).loaded(Digest::of(b"other"));
        assert_eq!(fs::read(&file).unwrap(), bytes, "{mode:o}");
    }
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    let link = folder.path().join("link");
    symlink(&file, &link).unwrap();
    assert!(!known(&link, object));
    trials(&link).loaded(Digest::of(b"other"));
    assert_eq!(fs::read(&file).unwrap(), bytes);
    // No call waits for the other end of a pipe.
    let pipe = folder.path().join("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    assert!(!known(&pipe, object));
    trials(&pipe).loaded(object);
    assert!(!known(folder.path(), object));
    trials(folder.path()).loaded(object);

    if std::os::unix::fs::chown(&file, Some(12345), None).is_ok() {
        assert!(!known(&file, object));
        trials(&file).loaded(Digest::of(b"other"));
        assert_eq!(fs::read(&file).unwrap(), bytes);
    } else {
        eprintln!("skipped: this user can't give a file to another user");
    }
}

#[test]
fn the_file_does_not_grow_for_ever() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("loads");
    let object = Digest::of(b"object");
    trials(&file).loaded(object);
    let line = fs::read_to_string(&file).unwrap();
    let count = LONGEST as usize / line.len();
    fs::write(&file, line.repeat(count)).unwrap();
    for i in 0..4_u8 {
        trials(&file).loaded(Digest::of(&[i]));
        assert!(fs::metadata(&file).unwrap().len() <= LONGEST + line.len() as u64);
        assert!(known(&file, Digest::of(&[i])));
    }
    assert_eq!(fs::read_to_string(&file).unwrap().lines().count(), 3);
    assert!(!known(&file, object));
}
