//! `ls` and `show`, as text and as JSON.

use crate::sandbox::{Sandbox, assert_run, count};

#[test]
fn programs_are_listed_and_shown() {
    let sandbox = Sandbox::built();
    assert_run!(sandbox, ["ls"], @"
    ID  MODEL  MODULE  BUCKET  STATE  TARGET  STEPS  SIZE  AGE  USED
    [ID]  fake  affine  batch=1  live  [TARGET]  1  [SIZE]  [TIME]  [TIME]
    [ID]  fake  affine  batch=4  live  [TARGET]  1  [SIZE]  [TIME]  [TIME]
    [ID]  fake  affine  eager  failed  [TIME]
    ");
    let listed = sandbox.json(&["ls"]);
    assert_eq!(
        (&listed["schema"], count(&listed["programs"])),
        (&1.into(), 3)
    );
    let id = listed["programs"][0]["id"].as_str().unwrap();
    // Any unique prefix is accepted.
    for id in [id, &id[..12], &id[..6]] {
        let shown = sandbox.ok(&["show", id]);
        for part in [
            "fake affine batch=1",
            "x: float32[batch=1, 3]",
            "(x) → (%1: float32[1, 3])",
            "out: float32[batch=1, 3] = %1",
            "two runs give the same bits",
            "model.py",
        ] {
            shown.prints(part);
        }
    }
}
