//! What the gate finds, and what becomes of it in receipts and records. Wrong answers, NaN and crashes: see `build`.

use serde_json::Value;

use crate::sandbox::{Sandbox, assert_run};

/// The program that these tests look at.
const FOUR: &str = "affine batch=4";

/// Builds a model whose file says this, and returns the record of the program.
fn built(lines: &[&str], args: &[&str]) -> (Sandbox, Value) {
    let sandbox = Sandbox::new();
    for line in lines {
        sandbox.append("model.py", line);
    }
    let ran = sandbox.run(&[&["build", "--only", FOUR], args].concat());
    assert_eq!(ran.code, 0, "{}", ran.text());
    let listed = sandbox.json(&["ls"]);
    let id = listed["programs"][0]["id"].as_str().unwrap();
    let record = sandbox.json(&["show", id]);
    (sandbox, record)
}

#[test]
fn a_receipt_says_whether_two_runs_are_equal() {
    let (_, record) = built(&[], &[]);
    assert_eq!(record["receipt"]["gate"]["deterministic"], true);
    // One step is no two runs.
    let one = ["--set", "smoketest_steps=1"];
    let (_, record) = built(&["# fake: answers vary"], &one);
    let gate = &record["receipt"]["gate"];
    assert_eq!(
        (&gate["deterministic"], &gate["steps"]),
        (&false.into(), &2.into())
    );
}

#[test]
fn an_artifact_that_minds_padding_is_for_its_exact_size() {
    let (_, record) = built(&[], &[]);
    assert_eq!(record["padding"], "allowed");
    let padding = &record["receipt"]["gate"]["padding"];
    assert_eq!(padding["points"], serde_json::json!([{ "batch": 3 }]));
    assert_eq!(padding["refused"], Value::Null);

    // Eager does not, so nothing but a run of the artifact can tell.
    let (sandbox, record) = built(&["# fake: padding leaks"], &[]);
    assert_eq!(record["padding"], "refused");
    let shown = sandbox.run(&["show", record["id"].as_str().unwrap()]);
    let line = shown.stdout.lines().nth(2).unwrap();
    assert!(
        line.starts_with("exact sizes only: padded from batch=3, output `out` differs from eager in 1 of 9 elements"),
        "{line}"
    );
    sandbox.tensors("x.safetensors", &[("x", &[3, 3], &[1.0; 9])]);
    assert_run!(sandbox, ["run", "affine", "--inputs", "x.safetensors"], @"
    exit code 3
    ----- stderr
    error: module `affine` has no bucket for batch=3; it has batch=4
    hint: batch=4 covers it, and its record says why it can't be padded into
    ");
    sandbox.tensors("x.safetensors", &[("x", &[4, 3], &[1.0; 12])]);
    assert_eq!(
        sandbox
            .run(&["run", "affine", "--inputs", "x.safetensors"])
            .code,
        0
    );
}
