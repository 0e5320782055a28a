//! Stores of other users: refused until they are listed as trusted.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, lchown},
};

use crate::sandbox::Sandbox;

const STRANGER: u32 = 12_345;

#[test]
fn another_users_store_is_run_once_it_is_named_in_a_list_of_ones_own() {
    let sandbox = Sandbox::built();
    let store = sandbox.path("artifacts");
    for entry in walkdir::WalkDir::new(&store) {
        if lchown(entry.unwrap().path(), Some(STRANGER), None).is_err() {
            eprintln!("skipped: this user can't give a file to another user");
            return;
        }
    }
    let config = sandbox.path("config");
    let list = config.join("precast/trusted-stores");
    let ran = |args: &[&str]| {
        let mut command = sandbox.command(args);
        sandbox.output(command.env("XDG_CONFIG_HOME", &config))
    };
    for args in [&["ls"][..], &["build"], &["verify"], &["du"], &["gc", "-n"]] {
        let ran = ran(args);
        assert_ne!(ran.code, 0, "{args:?}");
        let text = ran.text();
        assert!(text.contains("belongs to user 12345"), "{text}");
        assert!(
            text.contains("add the line") && text.contains("trusted-stores"),
            "{text}"
        );
    }
    fs::create_dir_all(list.parent().unwrap()).unwrap();
    fs::write(&list, format!("# mine\n{}\n", store.display())).unwrap();
    let listed = ran(&["ls"]);
    assert_eq!(listed.code, 0, "{}", listed.text());
    assert_eq!(ran(&["verify"]).code, 0);
    // A list that others could have written names nothing.
    fs::set_permissions(&list, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(ran(&["ls"]).text().contains("is not read"));
    fs::set_permissions(&list, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(ran(&["ls"]).code, 0);
    lchown(&list, Some(STRANGER), None).unwrap();
    assert_ne!(ran(&["ls"]).code, 0);
    // Nor does one of other stores.
    lchown(&list, Some(0), None).unwrap();
    fs::write(&list, "/\nartifacts\n*\n").unwrap();
    assert_ne!(ran(&["ls"]).code, 0);
}
