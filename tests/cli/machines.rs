//! A store that is copied to another machine in the order that the guide says.

use std::{fs, path::Path, process::Command};

use crate::{
    page::blocks,
    sandbox::{RUN, Sandbox, count},
};

const PAGE: &str = "docs/src/guide/machines.md";

/// Returns the paths that each `rsync` of the page copies, in order.
fn copies() -> Vec<Vec<String>> {
    let mut blocks = blocks(PAGE, "console").into_iter();
    let block = blocks
        .find(|block| block.contains("$ rsync -a artifacts/"))
        .unwrap();
    let lines = block
        .lines()
        .filter_map(|line| line.strip_prefix("$ rsync"));
    let names = lines.map(|line| {
        let names = line
            .split(' ')
            .filter_map(|word| word.strip_prefix("artifacts/"));
        names.map(str::to_owned).collect()
    });
    names.collect()
}

fn copy(from: &Path, to: &Path) {
    // As `--ignore-existing`.
    let mut command = Command::new("cp");
    let done = command.args(["-rpn"]).args([from, to]).status();
    assert!(done.unwrap().success(), "{from:?}");
}

#[test]
fn a_release_is_there_when_its_last_file_is_and_never_in_part() {
    let names = copies();
    assert_eq!(names.concat().last().unwrap(), "releases");
    let sandbox = Sandbox::new();
    sandbox.rows(1);
    let (here, host) = (sandbox.path("artifacts"), sandbox.path("host"));
    fs::create_dir(&host).unwrap();
    let host_of_fake = ["--store", "host", "--model", "fake"];
    let answer = || sandbox.run(&[&RUN[..], &host_of_fake].concat());
    let releases = || count(&sandbox.json(&["release", "ls", "--store", "host"])["releases"]);
    for (released, offset) in [(0, "OFFSET = 1.0"), (1, "OFFSET = 3.0")] {
        sandbox.edit("model.py", "OFFSET = 1.0", offset);
        sandbox.ok(&["build", "-q"]);
        for name in names.concat() {
            // Before its last file a release is not there, and the one before it answers.
            if host.join("precast-store.json").exists() {
                assert_eq!(releases(), released, "{name}");
                assert_eq!(answer().code == 0, released > 0, "{name}");
            }
            copy(&here.join(&name), &host);
        }
        assert_eq!(answer().code, 0, "{}", answer().text());
        sandbox.ok(&["verify", "--reindex", "--store", "host"]);
        assert_eq!(releases(), released + 1);
        sandbox.ok(&["verify", "--store", "host"]).prints("sound");
    }
    let gc = ["gc", "--keep-releases", "1", "--unreleased", "--store"];
    let deleted = sandbox.ok(&[&gc[..], &["host"]].concat());
    deleted.prints("deleted 1 release");
    assert_eq!(answer().code, 0);
}
