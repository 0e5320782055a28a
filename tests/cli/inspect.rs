//! `ls` and `show`, as text and as JSON.

use crate::sandbox::{Sandbox, assert_run};

#[test]
fn a_store_without_anything() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["ls"], @"
    exit code 2
    ----- stderr
    error: `artifacts` is not a store: there is no such folder
    hint: `precast build` makes one; `--store` says where it is
    ");
}

#[test]
fn programs_are_listed_and_shown() {
    let sandbox = Sandbox::built();
    assert_run!(sandbox, ["ls"], @"
    exit code 0
    ----- stdout
    ID  MODEL  MODULE  BUCKET  STATE  TARGET  STEPS  SIZE  AGE  USED
    [ID]  fake  affine  batch=1  live  [TARGET]  1  [SIZE]  [TIME]  [TIME]
    [ID]  fake  affine  batch=4  live  [TARGET]  1  [SIZE]  [TIME]  [TIME]
    [ID]  fake  affine  eager  failed  [TIME]
    ");
    let listed = sandbox.json(&["ls"]);
    assert_eq!(listed["schema"], 1);
    let programs = listed["programs"].as_array().unwrap();
    assert_eq!(programs.len(), 3, "{listed}");
    let id = programs[0]["id"].as_str().unwrap();
    // Any unique prefix is accepted.
    for id in [id, &id[..12], &id[..6]] {
        sandbox.ok(&["show", id]);
    }
    // `reading` has a snapshot of a whole program.
    let shown = sandbox.run(&["show", &id[..12]]).stdout;
    for part in [
        "fake affine batch=1",
        "x: float32[batch=1, 3]",
        "(x) → (%1: float32[1, 3])",
        "out: float32[batch=1, 3] = %1",
        "two runs give the same bits",
        "model.py",
    ] {
        assert!(shown.contains(part), "`{part}` is not in\n{shown}");
    }
}

#[test]
fn help_and_version_are_data() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["--version"], @"
    exit code 0
    ----- stdout
    precast 0.1.0
    ");
    assert_run!(sandbox, ["frobnicate"], @"
    exit code 2
    ----- stderr
    error: unrecognized subcommand 'frobnicate'

    Usage: precast [OPTIONS] <COMMAND>

    For more information, try '--help'.
    ");
    sandbox.ok(&["--help"]);
    sandbox.ok(&["build", "--help"]);
}
