//! `precast push`, `precast pull` and `precast ls REMOTE`, with the program beside this one.

use std::{fs, path::Path};

use crate::sandbox::Sandbox;

/// Returns the program beside `precast`, which `cargo test --workspace` builds.
fn beside() {
    let own = Path::new(env!("CARGO_BIN_EXE_precast"));
    let program = own.with_file_name("precast-remote");
    let hint =
        "build it: cargo build --bin precast-remote, with the features and packages of the tests";
    assert!(
        program.is_file(),
        "there is no `{}`: {hint}",
        program.display()
    );
}

#[test]
fn a_release_goes_from_one_store_to_another_by_a_folder() {
    beside();
    let sandbox = Sandbox::built();
    let url = format!("file://{}", sandbox.path("there").display());
    let none = sandbox.run(&["ls", &url]);
    none.says("is no remote: can't open");
    assert_eq!(none.code, 2);
    sandbox
        .run(&["push", "fake", &url, "-n"])
        .prints("would be the next number of file://");
    assert!(!sandbox.path("there").exists());
    let pushed = sandbox.run(&["push", "fake", &url]);
    pushed.prints("is now release 1 of file://");
    pushed.says("to move (");
    sandbox
        .run(&["push", "fake@1", &url])
        .prints("is already release 1 of file://");
    let missing = sandbox.run(&["push", "nothing", &url]);
    assert_eq!(missing.code, 3);
    missing.says("no release `nothing`");
    sandbox.run(&["ls", &url]).prints("fake");
    let listed = sandbox.json(&["ls", &url]);
    assert_eq!(listed["releases"][0]["seq"], 1);
    // Another store, then the one that has it.
    let pull = ["pull", &url, "fake", "--store", "other", "--all"];
    sandbox.run(&pull).prints("release 1 of fake");
    sandbox.run(&pull).prints("is here already; moved 0 files");
    sandbox.ok(&["verify", "--store", "other"]);
    // With the place in the environment.
    let mut command = sandbox.command(&["pull", "fake", "--store", "fourth", "--all"]);
    sandbox
        .output(command.env("PRECAST_REMOTE", &url))
        .prints("release 1 of fake");
    let mut command = sandbox.command(&["push", "fake"]);
    sandbox
        .output(command.env("PRECAST_REMOTE", &url))
        .prints("is already release 1 of file://");
    let elsewhere = sandbox.run(&["pull", &url, "--store", "third", "--for", "mars"]);
    assert_eq!(elsewhere.code, 4);
    elsewhere.says("no release of `fake` fits this host: release 1 is for");
    // Without the program.
    let alone = sandbox.path("precast");
    fs::copy(env!("CARGO_BIN_EXE_precast"), &alone).unwrap();
    let mut command = std::process::Command::new(&alone);
    let ended = command.args(["ls", &url]).env("PATH", "").output().unwrap();
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(
        text.contains("which has the network code") && text.contains("make remote"),
        "{text}"
    );
}
