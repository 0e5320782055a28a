//! A store with synthetic records of every kind, for tests of commands that read stores. Its programs can't run.
#![allow(dead_code, reason = "each test target uses a part of it")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use precast::{
    Digest, Store, Target,
    record::{
        Artifact, ArtifactKind, Constant, Dtype, Entry, Failure, Follow, Input, Layout, Operand,
        Output, Pad, Padding, Prepared, Program, Recipe, Release, Sizes, Step,
    },
    target::DeviceKind,
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

fn target() -> Target {
    Target {
        os: "linux".into(),
        arch: "x86_64".into(),
        isa: "x86-64-v3".into(),
        features: vec!["avx2".into(), "fma".into()],
        device: DeviceKind::Cpu,
        sm: None,
        torch: "2.11.0".into(),
        torch_git: "70d99e9".into(),
        cuda: None,
        cxx11_abi: true,
    }
}

fn layout(dtype: Dtype, shape: &[i64]) -> Layout {
    let mut stride = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        stride[axis] = stride[axis + 1] * shape[axis + 1];
    }
    Layout {
        dtype,
        shape: shape.into(),
        stride,
    }
}

fn artifact(store: &Store, step: &str, batch: i64, seq: i64, place: usize) -> Digest {
    let name = format!("{step} {batch} {seq}");
    let content = name.repeat(400 * (1 + place));
    let hidden = layout(Dtype::Float32, &[batch, seq, 8]);
    let constants = vec![Constant {
        name: "weight".into(),
        layout: layout(Dtype::Float32, &[8, 8]),
    }];
    let prepared = vec![Prepared {
        name: "p0".into(),
        dtype: Dtype::Float32,
        shape: vec![8, 8],
        stride: None,
        call: Recipe {
            operator: "mkldnn::_reorder_linear_weight".into(),
            arguments: vec![("self".into(), Operand::Constant("weight".into()))],
        },
    }];
    let log = format!("compiling {name}\n\u{1b}[31mnote\u{1b}[0m: autotuning skipped\n");
    let record = Artifact {
        schema: 1,
        id: Digest::of(name.as_bytes()),
        kind: ArtifactKind::Library,
        object: store.objects().put_bytes(content.as_bytes()).unwrap(),
        size: content.len() as u64,
        target: target(),
        inputs: vec![hidden.clone()],
        outputs: vec![hidden],
        constants: if step == "blocks" { constants } else { vec![] },
        prepared: if step == "blocks" { prepared } else { vec![] },
        proxy: None,
        imports: None,
        libraries: vec![],
        graph: None,
        log: Some(store.objects().put_bytes(log.as_bytes()).unwrap()),
        key: json!({"kind": "artifact", "format": 1, "graph": Digest::of(name.as_bytes()), "mode": "default"}),
        receipt: read(json!({"seconds": {"lower": 1.5 + place as f64, "cpp": 3.25, "link": 0.4}})),
        provenance: read(json!({"precast": "0.1.0", "created": BUILT + 12 * place as i64})),
    };
    store.records().put_artifact(&record).unwrap().id
}

/// Returns a part of a record that is written as this JSON.
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
    let (head, block) = (
        artifact(store, "head", batch, seq, place),
        artifact(store, "blocks", batch, seq, place),
    );
    let step = |name: String, artifact, from: usize| Step {
        name,
        artifact,
        inputs: vec![from],
        outputs: vec![from + 1],
        binding: match artifact == block {
            true => BTreeMap::from([("weight".to_owned(), format!("layers.{from}.weight"))]),
            false => BTreeMap::new(),
        },
    };
    let mut steps = vec![step("head".into(), head, 0)];
    steps.extend((0..6).map(|i| step(format!("layers.{i}"), block, 1 + i)));
    let request = request("minilm", &sizes, source);
    let eager = 0.0021 * (batch * seq) as f64 / 32.0;
    Program {
        schema: 1,
        id: Digest::of(request.to_string().as_bytes()),
        model: "minilm".into(),
        module: "encode".into(),
        dynamic: None,
        target: target(),
        inputs: vec![Input {
            name: "input_ids".into(),
            layout: layout(Dtype::Int64, &[batch, seq]),
            dims: vec![Some("batch".into()), Some("seq".into())],
            pad: Pad::Int(0),
            range: Some([0, 30_522]),
            within: None,
            bounds: None,
            default: None,
        }],
        states: vec![],
        outputs: vec![Output {
            name: "output".into(),
            layout: layout(Dtype::Float32, &[batch, 8]),
            dims: vec![
                Some(Follow {
                    dim: "batch".into(),
                    scale: 1,
                    offset: 0,
                }),
                None,
            ],
        }],
        results: vec![7],
        checks: vec![],
        values: 8,
        steps,
        eager: None,
        constants: None,
        padding: Padding::Allowed,
        train: None,
        call_spec: json!(null),
        request,
        receipt: read(json!({
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
        })),
        provenance: read(json!({"precast": "0.1.0", "created": BUILT + 60})),
        sizes,
    }
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
            programs.push(
                store
                    .records()
                    .put_program(&program(&store, batch, seq, source, place))
                    .unwrap()
                    .id,
            );
        }
        releases.push(programs.clone());
        store.releases().put(&release(programs, weights)).unwrap();
    }
    let failed = sizes(8, 128);
    let failure = Failure {
        schema: 1,
        id: Digest::of(b"failed"),
        model: "minilm".into(),
        module: "encode".into(),
        bucket: precast::record::bucket_name(&failed),
        sizes: failed,
        code: "compile".into(),
        message: "no kernel for `aten::cumsum` with <script>alert(1)</script>".into(),
        location: Some("model.py:31".into()),
        hint: Some("give the module `enabled = false`, or another backend".into()),
        log: Some(
            store
                .objects()
                .put_bytes(b"Traceback: no kernel\n")
                .unwrap(),
        ),
        provenance: read(json!({"created": BUILT})),
    };
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
    Release {
        schema: 1,
        model: "minilm".into(),
        seq: 0,
        name: None,
        rollback: None,
        programs,
        lacks: vec![],
        shims: vec![],
        weights: Some(weights),
        aliases: BTreeMap::new(),
        assets: BTreeMap::new(),
        entry: Entry {
            entry: "model:load".into(),
            sources: vec![],
            packages: vec![],
            declared: Default::default(),
            site_packages: vec![],
        },
        provenance: read(json!({"created": BUILT})),
    }
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
