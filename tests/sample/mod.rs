//! A store with synthetic records of every kind, for tests of commands that read stores. Its programs can't run.
#![allow(dead_code, reason = "each test target uses a part of it")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use precast::{
    Digest, Store,
    record::{ArtifactKind, Failure, Operand, Program, Release, Sizes},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

/// When the sample says that it was built.
pub const BUILT: i64 = 1_760_000_000;

/// A store and the folder that it is in.
pub struct Sample {
    pub dir: TempDir,
    pub path: PathBuf,
    /// The first program of the newest release.
    pub program: Digest,
    /// Its predecessor in the release before.
    pub before: Digest,
    /// The artifact that its six blocks share.
    pub artifact: Digest,
    pub failure: Digest,
}

pub fn sizes(batch: i64, seq: i64) -> Sizes {
    BTreeMap::from([("batch".to_owned(), batch), ("seq".to_owned(), seq)])
}

fn target() -> Value {
    json!({
        "os": "linux", "arch": "x86_64", "isa": "x86-64-v3", "features": ["avx2", "fma"], "device": "cpu", "sm": null,
        "torch": "2.11.0", "torch_git": "70d99e9", "cuda": null, "cxx11_abi": true,
    })
}

/// Returns a JSON object with the fields of a contiguous layout too.
fn with_layout(mut json: Value, dtype: &str, shape: &[i64]) -> Value {
    let mut stride = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        stride[axis] = stride[axis + 1] * shape[axis + 1];
    }
    json["dtype"] = dtype.into();
    json["shape"] = shape.into();
    json["stride"] = stride.into();
    json
}

fn artifact(store: &Store, step: &str, batch: i64, seq: i64, place: usize) -> Digest {
    let name = format!("{step} {batch} {seq}");
    let content = name.repeat(400 * (1 + place));
    let log = format!("compiling {name}\n\u{1b}[31mnote\u{1b}[0m: autotuning skipped\n");
    let put = |bytes: &[u8]| store.objects().put_bytes(bytes).unwrap();
    let hidden = with_layout(json!({}), "float32", &[batch, seq, 8]);
    let weight = Operand::Constant("weight".into());
    let mut record = json!({
        "schema": 1, "id": Digest::of(name.as_bytes()), "kind": ArtifactKind::Library, "object": put(content.as_bytes()),
        "size": content.len(), "target": target(), "inputs": [hidden], "outputs": [hidden], "constants": [],
        "log": put(log.as_bytes()),
        "key": {"kind": "artifact", "format": 1, "graph": Digest::of(name.as_bytes()), "mode": "default"},
        "receipt": {"seconds": {"lower": 1.5 + place as f64, "cpp": 3.25, "link": 0.4}},
        "provenance": {"precast": "0.1.0", "created": BUILT + 12 * place as i64},
    });
    if step == "blocks" {
        record["constants"] = json!([with_layout(json!({"name": "weight"}), "float32", &[8, 8])]);
        record["prepared"] = json!([{
            "name": "p0", "dtype": "float32", "shape": [8, 8],
            "call": {"operator": "mkldnn::_reorder_linear_weight", "arguments": [["self", weight]]},
        }]);
    }
    store.records().put_artifact(&read(record)).unwrap().id
}

/// Returns a record, or a part of one, that is written as this JSON.
fn read<T: DeserializeOwned>(json: Value) -> T {
    serde_json::from_value(json).unwrap()
}

fn request(model: &str, sizes: &Sizes, source: &str) -> Value {
    json!({
        "kind": "request", "format": 1, "protocol": 1,
        "common": {"model": model, "entry": "model:load", "sources": {"model.py": Digest::of(source.as_bytes())}},
        "module": "encode", "sizes": sizes, "mode": "default",
    })
}

fn program(store: &Store, batch: i64, seq: i64, source: &str, place: usize) -> Program {
    let sizes = sizes(batch, seq);
    let [head, block] = ["head", "blocks"].map(|step| artifact(store, step, batch, seq, place));
    let mut steps = vec![
        json!({"name": "head", "artifact": head, "inputs": [0], "outputs": [1], "binding": {}}),
    ];
    steps.extend((1..7).map(|from| json!({
        "name": format!("layers.{}", from - 1), "artifact": block, "inputs": [from], "outputs": [from + 1],
        "binding": {"weight": format!("layers.{from}.weight")},
    })));
    let request = request("minilm", &sizes, source);
    let eager = 0.0021 * (batch * seq) as f64 / 32.0;
    let input =
        json!({"name": "input_ids", "dims": ["batch", "seq"], "pad": 0, "range": [0, 30_522]});
    let output =
        json!({"name": "output", "dims": [{"dim": "batch", "scale": 1, "offset": 0}, null]});
    read(json!({
        "schema": 1, "id": Digest::of(request.to_string().as_bytes()), "model": "minilm", "module": "encode",
        "target": target(), "sizes": sizes, "steps": steps, "values": 8, "results": [7], "padding": "allowed",
        "inputs": [with_layout(input, "int64", &[batch, seq])],
        "outputs": [with_layout(output, "float32", &[batch, 8])],
        "call_spec": null, "request": request,
        "receipt": {
            "seconds": {"capture": 2.5, "gate": 0.75},
            "gate": {"deterministic": true, "eager_us": eager * 1e6, "artifact_us": eager / 1.8 * 1e6, "outputs": [{
                "name": "output", "max_abs": 2.1e-6 * (1 + place) as f64, "max_rel": 2.7e-3, "cosine": 0.9999999,
                "rtol": 1e-4, "atol": 5.9e-5,
            }]},
            "tuned": [
                {"options": "mode=default", "seconds": 5.1, "latency": eager / 1.8, "max_abs": 2.1e-6, "chosen": true, "refused": null},
                {"options": "epilogue_fusion=false", "seconds": 9.4, "latency": eager / 1.7, "max_abs": 2.1e-6, "chosen": false, "refused": null},
                {"options": "freezing=true", "seconds": null, "latency": null, "max_abs": null, "chosen": false, "refused": "it keeps values"},
            ],
        },
        "provenance": {"precast": "0.1.0", "created": BUILT + 60},
    }))
}

/// Makes the store: three of four buckets in two releases, and the fourth failed.
pub fn sample() -> Sample {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("artifacts");
    let store = Store::create(&path).unwrap();
    let grid = [(1, 32), (1, 128), (8, 32)];
    let weights = store.objects().put_bytes(&[7; 3000]).unwrap();
    let mut releases = Vec::new();
    for source in ["first", "second"] {
        let mut programs = Vec::new();
        for (place, (batch, seq)) in grid.into_iter().enumerate() {
            // One bucket stays the same.
            let source = if seq == 128 { "first" } else { source };
            let program = program(&store, batch, seq, source, place);
            programs.push(store.records().put_program(&program).unwrap().id);
        }
        releases.push(programs.clone());
        store.releases().put(&release(programs, weights)).unwrap();
    }
    let failed = sizes(8, 128);
    let failure: Failure = read(json!({
        "schema": 1, "id": Digest::of(b"failed"), "model": "minilm", "module": "encode",
        "bucket": precast::record::bucket_name(&failed), "sizes": failed, "code": "compile",
        "message": "no kernel for `aten::cumsum` with <script>alert(1)</script>", "location": "model.py:31",
        "hint": "give the module `enabled = false`, or another backend",
        "log": store.objects().put_bytes(b"Traceback: no kernel\n").unwrap(), "provenance": {"created": BUILT},
    }));
    store.records().put_failure(&failure).unwrap();
    drop(store);
    Sample {
        path,
        program: releases[1][0],
        before: releases[0][0],
        artifact: Digest::of(b"blocks 1 32"),
        failure: failure.id,
        dir,
    }
}

fn release(programs: Vec<Digest>, weights: Digest) -> Release {
    read(json!({
        "schema": 1, "model": "minilm", "seq": 0, "programs": programs, "weights": weights, "aliases": {},
        "entry": {"entry": "model:load", "sources": [], "packages": [], "site_packages": []},
        "provenance": {"created": BUILT},
    }))
}

/// Writes a file of counts and returns its path.
pub fn counts(dir: &Path) -> PathBuf {
    let path = dir.join("counts.json");
    let calls = |seq: i64, bucket: Option<i64>, rung: &str, count: u64| {
        let mut calls = json!({
            "module": "encode", "sizes": sizes(1, seq), "rung": rung, "count": count,
        });
        if let Some(seq) = bucket {
            calls["bucket"] = json!(sizes(1, seq));
        }
        calls
    };
    let counts = json!({
        "schema": 1, "model": "minilm", "since": BUILT, "until": BUILT + 3600,
        "calls": [
            calls(32, Some(32), "exact", 9_000),
            calls(128, Some(128), "exact", 400),
            calls(40, Some(128), "padded", 500),
            calls(512, None, "eager", 100),
        ],
    });
    std::fs::write(&path, counts.to_string()).unwrap();
    path
}
