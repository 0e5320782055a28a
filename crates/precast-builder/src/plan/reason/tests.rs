//! One snapshot for each reason, produced by a change of a key where possible.

use serde_json::json;

use super::{super::diff::diff, *};

/// Returns an explained request key.
fn request() -> Value {
    json!({
        "kind": "request", "format": 1, "protocol": 1,
        "common": {
            "model": "tiny", "entry": "model:load", "samples": null,
            "sources": {"model.py": Digest::of(b"a"), "layers.py": Digest::of(b"b")},
            "packages": {"torch": "2.11.0", "numpy": "2.3.0"},
            "target": {"os": "linux", "isa": "native", "features": ["avx2", "sse4a"], "sm": "90", "torch": "2.11.0+cu130", "cuda": "13.0"},
        },
        "module": "encode", "path": "", "method": "forward",
        "inputs": [
            {"name": "ids", "dtype": "int64", "shape": [2, 4], "stride": [4, 1], "dims": ["batch", null], "pad": 0, "range": null},
            {"name": "mask", "dtype": "bool", "shape": [2, 4], "stride": [4, 1], "dims": ["batch", null], "pad": false, "range": null},
        ],
        "sizes": {"batch": 2}, "regions": [], "compiles": true, "dynamic": false, "backend": "inductor", "mode": "default",
        "options": {"epilogue_fusion": true}, "passes": ["passes:fold"],
    })
}

/// Returns an explained artifact key.
fn artifact() -> Value {
    json!({
        "kind": "artifact", "format": 1, "protocol": 1, "graph": Digest::of(b"graph"),
        "inputs": [{"dtype": "float32", "shape": [2, 4], "stride": [4, 1]}],
        "outputs": [], "constants": [], "backend": "inductor", "mode": "default", "options": {},
        "passes": [{"callable": "passes:fold", "source": Digest::of(b"pass")}],
        "target": {"sm": "90"},
    })
}

/// Returns the reasons for `change` as JSON tag and text, one per line.
fn report(old: Value, change: impl Fn(&mut Value)) -> String {
    let mut new = old.clone();
    change(&mut new);
    let lines: Vec<String> = reasons(&old, &new).iter().map(line).collect();
    lines.join("\n")
}

fn line(reason: &Reason) -> String {
    let tag = serde_json::to_value(reason).unwrap()["reason"].clone();
    format!("{}: {reason}", bare(&tag))
}

fn remove(value: &mut Value, pointer: &str, name: &str) {
    value
        .pointer_mut(pointer)
        .and_then(Value::as_object_mut)
        .unwrap()
        .remove(name);
}

#[test]
fn equal_keys_have_no_reason() {
    assert_eq!(reasons(&request(), &request()), []);
    assert_eq!(diff(&request(), &request()), []);
}

#[test]
fn sources() {
    let changed = |new: &mut Value| new["common"]["sources"]["model.py"] = json!(Digest::of(b"A"));
    insta::assert_snapshot!(report(request(), changed), @"source-changed: `model.py` changed");
    let added = |new: &mut Value| new["common"]["sources"]["rope.py"] = json!(Digest::of(b"A"));
    insta::assert_snapshot!(report(request(), added), @"source-added: `rope.py` became a source");
    insta::assert_snapshot!(report(request(), |new| remove(new, "/common/sources", "layers.py")), @"source-removed: `layers.py` is no source any more");
}

#[test]
fn packages() {
    insta::assert_snapshot!(report(request(), |new| new["common"]["packages"]["numpy"] = json!("2.4.0")), @"package-changed: package `numpy` changed: `2.3.0` -> `2.4.0`");
    insta::assert_snapshot!(report(request(), |new| new["common"]["packages"]["scipy"] = json!("1.0")), @"package-added: package `scipy` 1.0 is imported now");
    insta::assert_snapshot!(report(request(), |new| remove(new, "/common/packages", "numpy")), @"package-removed: package `numpy` 2.3.0 is not imported any more");
}

#[test]
fn targets() {
    let with = |field: &str, value: Value| {
        report(request(), |new| {
            new["common"]["target"][field] = value.clone()
        })
    };
    insta::assert_snapshot!(with("sm", json!("100")), @"target-changed: the target changed: `sm_90` -> `sm_100`");
    insta::assert_snapshot!(with("sm", json!(null)), @"target-changed: the target changed: `sm_90` -> `cpu`");
    insta::assert_snapshot!(with("isa", json!("x86-64-v3")), @"target-changed: the target changed: `native` -> `x86-64-v3`");
    insta::assert_snapshot!(with("features", json!(["avx2", "avx512f", "fma"])), @"target-changed: the target changed: CPU features `+avx512f +fma -sse4a`");
    insta::assert_snapshot!(with("torch", json!("2.12.0")), @"target-changed: the target's torch changed: `2.11.0+cu130` -> `2.12.0`");
    insta::assert_snapshot!(with("cuda", json!(null)), @"target-changed: the target's cuda changed: `13.0` -> none");
    insta::assert_snapshot!(report(artifact(), |new| new["target"]["sm"] = json!("100")), @"target-changed: the target changed: `sm_90` -> `sm_100`");
}

#[test]
fn settings_and_options() {
    insta::assert_snapshot!(report(request(), |new| new["options"]["epilogue_fusion"] = json!(false)), @"option-changed: option `epilogue_fusion` changed: `true` -> `false`");
    insta::assert_snapshot!(report(request(), |new| new["options"] = json!({"max_fusion_size": 8})), @r"
    option-changed: option `epilogue_fusion` changed: `true` -> none
    option-changed: option `max_fusion_size` changed: none -> `8`
    ");
    insta::assert_snapshot!(report(request(), |new| new["mode"] = json!("max-autotune")), @"setting-changed: `mode` changed: `default` -> `max-autotune`");
    insta::assert_snapshot!(report(request(), |new| new["common"]["entry"] = json!("model:other")), @"setting-changed: `entry` changed: `model:load` -> `model:other`");
    insta::assert_snapshot!(report(request(), |new| new["regions"] = json!(["layer.*"])), @r#"setting-changed: `regions` changed: `[]` -> `["layer.*"]`"#);
    insta::assert_snapshot!(report(request(), |new| new["passes"] = json!([])), @r#"setting-changed: `passes` changed: `["passes:fold"]` -> `[]`"#);
    insta::assert_snapshot!(report(artifact(), |new| new["passes"][0]["source"] = json!(Digest::of(b"x"))), @"pass-changed: pass `passes:fold` changed");
}

#[test]
fn inputs_by_name() {
    insta::assert_snapshot!(report(request(), |new| new["inputs"][0]["pad"] = json!(1)), @"input-changed: `pad` of input `ids` changed: `0` -> `1`");
    let reshaped = |new: &mut Value| {
        new["inputs"][1]["shape"] = json!([2, 8]);
        new["inputs"][1]["stride"] = json!([8, 1]);
    };
    insta::assert_snapshot!(report(request(), reshaped), @"input-changed: `shape` of input `mask` changed: `[2,4]` -> `[2,8]`");
    // A program for any size is captured at the largest bucket: no input changed.
    let larger = |new: &mut Value| {
        new["sizes"] = json!({"batch": 8});
        for input in [0, 1] {
            new["inputs"][input]["shape"] = json!([8, 4]);
        }
    };
    insta::assert_snapshot!(report(request(), larger), @r#"setting-changed: the largest bucket changed: `{"batch":2}` -> `{"batch":8}`"#);
    insta::assert_snapshot!(report(request(), |new| new["inputs"][1]["name"] = json!("types")), @r"
    input-removed: input `mask` was removed
    input-added: input `types` was added
    ");
    insta::assert_snapshot!(report(request(), |new| new["inputs"].as_array_mut().unwrap().swap(0, 1)), @"inputs-reordered: the order of the inputs changed");
    insta::assert_snapshot!(report(request(), |new| new["inputs"] = json!(null)), @r"
    input-removed: input `ids` was removed
    input-removed: input `mask` was removed
    ");
}

#[test]
fn what_only_a_capture_shows() {
    insta::assert_snapshot!(report(artifact(), |new| new["graph"] = json!(Digest::of(b"other"))), @"graph-changed: the captured graph changed");
    insta::assert_snapshot!(report(artifact(), |new| new["inputs"][0]["shape"] = json!([4, 4])), @"layout-changed: the layout of the inputs changed");
    insta::assert_snapshot!(report(artifact(), |new| new["constants"] = json!([{"name": "c0"}])), @"layout-changed: the layout of the constants changed");
}

#[test]
fn versions_and_fields_of_other_versions() {
    insta::assert_snapshot!(report(request(), |new| new["format"] = json!(2)), @"format-changed: the key format changed: `1` -> `2`");
    insta::assert_snapshot!(report(request(), |new| new["protocol"] = json!(2)), @"protocol-changed: the worker protocol changed: `1` -> `2`");
    insta::assert_snapshot!(report(request(), |new| new["common"]["planet"] = json!({"name": "mars"})), @r#"field-changed: common.planet: none -> `{"name":"mars"}`"#);
    insta::assert_snapshot!(report(json!(3), |new| *new = json!({"a": 1})), @"field-changed: a: none -> `1`");
}

#[test]
fn what_no_comparison_shows() {
    let object = Digest::of(b"object");
    let reasons = [
        Reason::NeverBuilt,
        Reason::FailedBefore {
            message: "C++ compile error".into(),
        },
        Reason::ObjectMissing {
            what: "artifact".into(),
            object,
        },
        Reason::EntryUnknown,
        Reason::NotASource {
            path: "README.md".into(),
        },
        Reason::Unchanged,
    ];
    insta::assert_snapshot!(reasons.iter().map(line).collect::<Vec<_>>().join("\n"), @r"
    never-built: never built
    failed-before: failed before: C++ compile error
    object-missing: artifact `2958d416d08a` is missing or damaged
    entry-unknown: what the entry imports has to be found out anew
    not-a-source: `README.md` is not a source
    unchanged: nothing changed
    ");
}

#[test]
fn what_people_edited_comes_first() {
    let all = |new: &mut Value| {
        new["protocol"] = json!(2);
        new["common"]["target"]["sm"] = json!("100");
        new["common"]["packages"]["numpy"] = json!("3");
        new["mode"] = json!("max-autotune");
        new["common"]["sources"]["model.py"] = json!(Digest::of(b"A"));
    };
    insta::assert_snapshot!(report(request(), all), @r"
    source-changed: `model.py` changed
    setting-changed: `mode` changed: `default` -> `max-autotune`
    target-changed: the target changed: `sm_90` -> `sm_100`
    package-changed: package `numpy` changed: `2.3.0` -> `3`
    protocol-changed: the worker protocol changed: `1` -> `2`
    ");
}

#[test]
fn a_diff_is_exact() {
    let mut new = request();
    new["options"] = json!({"epilogue_fusion": true, "x.y": [1, 2]});
    new["inputs"][0]["pad"] = json!(7);
    new["passes"] = json!(["passes:fold", "passes:more"]);
    remove(&mut new, "", "sizes");
    let lines: Vec<String> = diff(&request(), &new)
        .iter()
        .map(ToString::to_string)
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    inputs.0.pad: `0` -> `7`
    sizes: `{"batch":2}` -> none
    options.x.y: none -> `[1,2]`
    passes: `["passes:fold"]` -> `["passes:fold","passes:more"]`
    "#);
}

#[test]
fn a_reason_is_json() {
    let reason = Reason::TargetChanged {
        field: "sm".into(),
        old: "90".into(),
        new: "100".into(),
    };
    insta::assert_snapshot!(serde_json::to_string(&reason).unwrap(), @r#"{"reason":"target-changed","field":"sm","old":"90","new":"100"}"#);
}
