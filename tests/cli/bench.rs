//! `bench`: the fields of a row. Times are not checked.

#[path = "../fake/mod.rs"]
mod fake;

use fake::{Fake, Memory};
use precast::Store;
use serde_json::Value;

use crate::sandbox::Sandbox;

/// A sandbox whose store has one module: `f` at `batch=4 seq=4` and `batch=2 seq=2`, the first with an exported graph.
/// `slow` says that eager was the faster one when it was built.
fn sandbox(slow: bool) -> Sandbox {
    let sandbox = Sandbox::new();
    let store = Store::create(sandbox.path("artifacts")).unwrap();
    let mut memory = Memory::default();
    let fake = |size| Fake::sized(size, size).outputs(2);
    memory.add_with_graph(&fake(4));
    if slow {
        for program in memory.programs.values_mut() {
            program.receipt = serde_json::from_value(serde_json::json!({
                "gate": { "artifact_us": 90.0, "artifact_runs": 20, "eager_us": 30.0, "eager_runs": 20,
                    "sign_test": { "rounds": 20, "eager_faster": 20, "exclusive": true, "faster": "eager" } },
            }))
            .unwrap();
        }
    } else {
        memory.add("f", &fake(2));
    }
    memory.publish(&store, "fake");
    sandbox
}

fn rows(sandbox: &Sandbox, more: &[&str]) -> Vec<Value> {
    let document = sandbox.json(&[&["bench", "f", "--seconds", "0.02"], more].concat());
    crate::schemas::check("bench", &document);
    document["buckets"].as_array().unwrap().clone()
}

#[test]
fn a_row_has_the_rung_and_the_padding() {
    let sandbox = sandbox(false);
    let summary = |row: &Value| {
        let figure = |name: &str| row[name].as_f64().unwrap();
        assert!(figure("median") > 0.0 && figure("p99") >= figure("median"));
        assert!(figure("throughput") > 0.0);
        let [rung, runner] = ["rung", "runner"].map(|name| row[name].as_str().unwrap());
        let (request, bucket, padding) = (&row["request"], &row["bucket"], &row["padding"]);
        format!("{request} in {bucket}: {rung}, {runner}, {padding}")
    };
    let own = rows(&sandbox, &["--threads", "2"]);
    let mut own: Vec<String> = own.iter().map(summary).collect();
    own.sort();
    insta::assert_snapshot!(own.join("\n"), @r#"
    {"batch":2,"seq":2} in {"batch":2,"seq":2}: exact, artifact, 0.0
    {"batch":4,"seq":4} in {"batch":4,"seq":4}: exact, artifact, 0.0
    "#);
    let at = ["--at", "batch=1,seq=2", "--at", "batch=3,seq=4"];
    let at: Vec<String> = rows(&sandbox, &at).iter().map(summary).collect();
    insta::assert_snapshot!(at.join("\n"), @r#"
    {"batch":1,"seq":2} in {"batch":2,"seq":2}: padded, artifact, 0.5
    {"batch":3,"seq":4} in {"batch":4,"seq":4}: padded, artifact, 0.25
    "#);
}

#[test]
fn eager_is_measured_beside_it() {
    for row in rows(&sandbox(false), &["--against", "eager"]) {
        // It was exported at one size only, so the other one is padded.
        let own = row["bucket"]["batch"] == 4;
        assert_eq!(
            row["eager"]["padding"],
            if own { 0.0 } else { 0.75 },
            "{row}"
        );
        let median = |row: &Value| row["median"].as_f64().unwrap();
        let ratio = median(&row["eager"]) / median(&row);
        let error = row["ratio"].as_f64().unwrap() / ratio - 1.0;
        assert!(error.abs() < 1e-9, "{row}");
    }
    let none = sandbox(false).run(&["bench", "f", "--seconds", "0.02", "--against", "torch"]);
    none.exits(2);
}

#[test]
fn a_row_says_that_eager_answered_in_place_of_the_artifact() {
    let sandbox = sandbox(true);
    let answered_by = |more: &[&str]| {
        let rows = rows(&sandbox, more);
        (rows[0]["rung"].clone(), rows[0]["runner"].clone())
    };
    assert_eq!(answered_by(&[]), ("eager".into(), "eager".into()));
    let compiled = answered_by(&["--compiled"]);
    assert_eq!(compiled, ("exact".into(), "artifact".into()));
}

#[test]
fn requests_are_refused_by_name() {
    let sandbox = sandbox(false);
    for (at, code, says) in [
        (
            "batch=4",
            2,
            "error: `--at batch=4` does not name the module's dimensions\n\
             hint: say a size for each, as one of batch=2 seq=2; batch=4 seq=4\n",
        ),
        (
            "batch=0,seq=1",
            2,
            "'--at <DIM=SIZE,…>': expected sizes of at least 1, as `batch=3,seq=20`\n",
        ),
        (
            "batch=5,seq=1",
            3,
            "measuring batch=5 seq=1, 1 of 1, about 40 ms\n\
             error: module `f` has no bucket for batch=5 seq=1; it has batch=2 seq=2, batch=4 seq=4\n\
             hint: the nearest is batch=4 seq=4\n",
        ),
    ] {
        sandbox
            .run(&["bench", "f", "--seconds", "0.02", "--at", at])
            .exits(code)
            .says(says);
    }
}

#[test]
fn eager_answers_with_no_bucket_in_a_run_in_counts_and_in_the_report() {
    let sandbox = Sandbox::new();
    let store = Store::create(sandbox.path("artifacts")).unwrap();
    let mut memory = Memory::default();
    memory.add_with_graph(&Fake::sized(4, 4).outputs(2));
    for program in memory.programs.values_mut() {
        program.steps.clear();
        let bounds = precast::record::Bounds { min: 1, max: 64 };
        program.dynamic = Some(["batch", "seq"].map(|dim| (dim.to_owned(), bounds)).into());
        program.receipt = serde_json::from_value(serde_json::json!({
            "gate": { "artifact_us": 95.0, "eager_us": 100.0 },
        }))
        .unwrap();
    }
    memory.publish(&store, "fake");
    sandbox.tensors("x.safetensors", &[("x", &[9, 7], &[1.0; 63])]);
    let run = [
        "run",
        "f",
        "--inputs",
        "x.safetensors",
        "--counts",
        "counts.json",
    ];
    let ran = sandbox.run(&[&run[..], &["-q"]].concat());
    let line = ran.stdout.lines().next().unwrap();
    let is_eager = line.starts_with("f batch=9 seq=7 ") && line.ends_with(", eager");
    assert!(is_eager, "{line}");
    let document = sandbox.json(&run);
    crate::schemas::check("run", &document);
    assert_eq!(document.get("bucket"), None);
    crate::sandbox::assert_run!(sandbox, ["stats", "counts.json"], @"
    fake f
      2 calls: 2 eager
      0.0 % had a bucket of their own size

      ASKED FOR  ANSWERED BY  BUCKET  CALLS  PADDING
      batch=9 seq=7  eager  2
    ");
    sandbox.ok(&["report", "--counts", "counts.json"]);
    let page = std::fs::read_to_string(sandbox.path("report.html")).unwrap();
    // Eager is not compared with eager.
    assert!(page.contains("Latency was not measured"));
    assert!(!page.contains("of the work was padding"));
}
