//! Small stores and records for tests.

mod own_process;

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

pub use own_process::in_own_process;

use super::{Store, StoreError};
use crate::{
    Digest, Target,
    record::{
        Artifact, ArtifactKind, Dtype, Entry, Failure, Input, Layout, Pad, Padding, Program,
        Release, Shim, Step,
    },
    target::DeviceKind,
};

/// Returns a new store in a temporary folder, which is removed when the `TempDir` is dropped.
pub fn store() -> (TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    (dir, store)
}

/// Returns a store with an artifact and a program that calls it.
pub fn filled() -> (TempDir, Store, Artifact, Program) {
    let (dir, store) = store();
    let artifact = put_artifact(&store, "block");
    let program = put_program(&store, "m", 8, &[artifact.id]);
    (dir, store, artifact, program)
}

/// Puts an artifact of this name.
pub fn put_artifact(store: &Store, name: &str) -> Artifact {
    let artifact = artifact(store, name);
    store.records().put_artifact(&artifact).unwrap()
}

/// Puts a program at a bucket of `batch`, whose steps call `artifacts`.
pub fn put_program(store: &Store, model: &str, batch: i64, artifacts: &[Digest]) -> Program {
    let program = program(model, batch, artifacts);
    store.records().put_program(&program).unwrap()
}

/// Puts a release of programs of the model `m`.
pub fn put_release(store: &Store, name: Option<&str>, programs: &[Digest]) -> Release {
    let release = release("m", name, programs);
    store.releases().put(&release).unwrap().0
}

/// Returns the name of the variant of a result's error.
pub fn refused<T>(result: Result<T, StoreError>) -> String {
    let error = format!("{:?}", result.err().expect("it is refused"));
    error.split([' ', '(']).next().unwrap().to_owned()
}

/// Returns a record, or a part of one, parsed from JSON.
pub fn read<T: DeserializeOwned>(json: Value) -> T {
    serde_json::from_value(json).unwrap()
}

/// Creates the parent folder of `path`.
pub fn shard(path: &Path) -> PathBuf {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    path.to_owned()
}

/// Changes a read-only file in place, as a failing disk would.
pub fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
}

/// Returns a target for the CPU.
pub fn target() -> Target {
    Target {
        os: "linux".into(),
        arch: "x86_64".into(),
        isa: "native".into(),
        features: vec![],
        device: DeviceKind::Cpu,
        sm: None,
        torch: "2.11.0".into(),
        torch_git: "70d99e9".into(),
        cuda: None,
        cxx11_abi: true,
    }
}

fn layout() -> Layout {
    Layout {
        dtype: Dtype::Float32,
        shape: vec![8, 4],
        stride: vec![4, 1],
    }
}

/// Puts an object and returns the record of an artifact with it.
pub fn artifact(store: &Store, name: &str) -> Artifact {
    let content = name.repeat(500);
    let object = store.objects().put_bytes(content.as_bytes()).unwrap();
    artifact_of(name, object, content.len() as u64)
}

/// Returns the record of an artifact with an object of `size` bytes.
pub fn artifact_of(name: &str, object: Digest, size: u64) -> Artifact {
    Artifact {
        schema: 1,
        id: Digest::of(name.as_bytes()),
        object,
        size,
        target: target(),
        inputs: vec![layout()],
        outputs: vec![layout()],
        constants: vec![],
        prepared: vec![],
        proxy: None,
        imports: None,
        libraries: vec![],
        kind: ArtifactKind::Library,
        graph: None,
        log: None,
        key: json!({ "graph": name }),
        receipt: Default::default(),
        provenance: Default::default(),
    }
}

/// Returns a program with one input, at a bucket of `batch`, whose steps call `artifacts`.
pub fn program(model: &str, batch: i64, artifacts: &[Digest]) -> Program {
    Program {
        schema: 1,
        id: Digest::of(format!("{model} {batch}").as_bytes()),
        model: model.into(),
        module: "encode".into(),
        sizes: BTreeMap::from([("batch".into(), batch)]),
        dynamic: None,
        target: target(),
        inputs: vec![Input {
            name: "x".into(),
            layout: layout(),
            dims: vec![Some("batch".into()), None],
            pad: Pad::Int(0),
            range: None,
            within: None,
            bounds: None,
            default: None,
        }],
        states: vec![],
        outputs: vec![],
        results: vec![1],
        checks: vec![],
        values: 2,
        steps: artifacts
            .iter()
            .map(|artifact| Step {
                name: "s".into(),
                artifact: *artifact,
                inputs: vec![0],
                outputs: vec![1],
                binding: BTreeMap::new(),
            })
            .collect(),
        eager: None,
        constants: None,
        padding: Padding::Allowed,
        train: None,
        call_spec: json!(null),
        request: json!({}),
        receipt: Default::default(),
        provenance: Default::default(),
    }
}

/// Returns so many bytes that do not compress; another `seed` gives others.
pub fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = 1u64;
    let words = (0..bytes / 8).flat_map(|_| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(seed);
        random.to_be_bytes()
    });
    words.collect()
}

/// Returns a release of `programs` without weights; the store gives it a number.
pub fn release(model: &str, name: Option<&str>, programs: &[Digest]) -> Release {
    Release {
        schema: 1,
        model: model.into(),
        seq: 0,
        name: name.map(Into::into),
        rollback: None,
        programs: programs.into(),
        lacks: vec![],
        left_out: vec![],
        shims: vec![],
        weights: None,
        aliases: BTreeMap::new(),
        assets: BTreeMap::new(),
        entry: Entry {
            entry: "m:f".into(),
            sources: vec![],
            packages: vec![],
            declared: Default::default(),
            site_packages: vec![],
        },
        provenance: Default::default(),
    }
}

/// Puts the objects of a shim that can't be loaded, and returns the shim.
pub fn shim(store: &Store, torch: &str) -> Shim {
    let put = |half: &str| {
        store
            .objects()
            .put_bytes(format!("{half} {torch}").as_bytes())
            .unwrap()
    };
    Shim {
        arch: std::env::consts::ARCH.into(),
        torch: torch.into(),
        torch_git: format!("commit of {torch}"),
        source: Digest::of(b"sources"),
        object: put("shim"),
        cuda: Some(put("shim of CUDA")),
    }
}

/// Returns the record of a failed build of the program or artifact `id`.
pub fn failure(id: Digest, message: &str) -> Failure {
    Failure {
        schema: 1,
        id,
        model: "m".into(),
        module: "encode".into(),
        bucket: "fixed".into(),
        sizes: BTreeMap::new(),
        code: "compile".into(),
        message: message.into(),
        location: None,
        hint: None,
        log: None,
        provenance: Default::default(),
    }
}
