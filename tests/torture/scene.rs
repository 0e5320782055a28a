//! Small stores with records and objects of every kind.

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use precast::{
    Digest, Store, StoreError, Target,
    record::{
        Artifact, ArtifactKind, Constant, Dtype, Entry, Failure, Input, Layout, Pad, Padding,
        Program, Release, Step,
    },
    target::DeviceKind,
};
use serde_json::json;

#[path = "../sample/random.rs"]
mod random;
pub use random::Random;

pub fn target() -> Target {
    Target {
        os: "linux".into(),
        arch: "x86_64".into(),
        isa: "x86-64-v3".into(),
        features: vec!["avx2".into()],
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

/// Returns content that compresses about as well as code does.
pub fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let words: Vec<u64> = (0..64).map(|_| random.draw()).collect();
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend(words[random.below(64)].to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

pub fn artifact(name: &str, object: Digest, size: u64, log: Option<Digest>) -> Artifact {
    Artifact {
        schema: 1,
        id: Digest::of(name.as_bytes()),
        object,
        size,
        target: target(),
        inputs: vec![layout()],
        outputs: vec![layout()],
        constants: vec![Constant {
            name: "w".into(),
            layout: layout(),
        }],
        prepared: vec![],
        proxy: None,
        imports: None,
        libraries: vec![],
        log,
        kind: ArtifactKind::Library,
        graph: None,
        key: json!({ "graph": name }),
        receipt: serde_json::from_value(json!({ "seconds": {"compile": 1.5} })).unwrap(),
        provenance: Default::default(),
    }
}

pub fn program(model: &str, batch: i64, artifacts: &[Digest]) -> Program {
    let step = |artifact: &Digest| Step {
        name: "s".into(),
        artifact: *artifact,
        inputs: vec![0],
        outputs: vec![1],
        binding: BTreeMap::new(),
    };
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
        steps: artifacts.iter().map(step).collect(),
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

pub fn release(model: &str, programs: &[Digest], weights: Option<Digest>) -> Release {
    Release {
        schema: 1,
        model: model.into(),
        seq: 0,
        name: Some("v1".into()),
        rollback: None,
        programs: programs.into(),
        lacks: vec![],
        shims: vec![],
        weights,
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

pub fn failure(name: &str, log: Digest) -> Failure {
    Failure {
        schema: 1,
        id: Digest::of(name.as_bytes()),
        model: "m".into(),
        module: "encode".into(),
        bucket: "fixed".into(),
        sizes: BTreeMap::new(),
        code: "compile".into(),
        message: "it did not compile".into(),
        location: None,
        hint: None,
        log: Some(log),
        provenance: Default::default(),
    }
}

/// The records of a scene.
pub struct Scene {
    pub artifacts: Vec<Artifact>,
    pub programs: Vec<Program>,
    pub weights: Digest,
    pub failure: Failure,
}

/// How many bytes each object of the scene has.
const SIZE: usize = 3000;

/// Puts all missing parts, as a build does. `tell` gets each part that is durable.
pub fn build(store: &Store, tell: &mut dyn FnMut(String)) -> Result<Scene, StoreError> {
    let mut artifacts = Vec::new();
    for n in 0..3u64 {
        let name = format!("artifact {n}");
        let id = Digest::of(name.as_bytes());
        // As a builder asks: a present artifact stays from now on.
        let whole = match store.records().keep_artifact(&id)? {
            true => store.records().artifact(&id)?,
            false => None,
        };
        artifacts.push(match whole {
            Some(artifact) => artifact,
            None => {
                let object = store.objects().put_bytes(&content(n, SIZE))?;
                tell(format!("object {object}"));
                let log = store
                    .objects()
                    .put_bytes(format!("log of {n}").as_bytes())?;
                let put = store.records().put_artifact(&artifact(
                    &name,
                    object,
                    SIZE as u64,
                    Some(log),
                ))?;
                tell(format!("artifact {id}"));
                put
            }
        });
    }
    let mut programs = Vec::new();
    for batch in 0..2 {
        let of: Vec<_> = artifacts[batch..batch + 2].iter().map(|a| a.id).collect();
        let put = store
            .records()
            .put_program(&program("m", batch as i64, &of))?;
        tell(format!("program {}", put.id));
        programs.push(put);
    }
    let weights = store.objects().put_bytes(&content(99, 2 * SIZE))?;
    tell(format!("object {weights}"));
    let failed = failure("failed", store.objects().put_bytes(b"why it failed")?);
    store.records().put_failure(&failed)?;
    tell(format!("failure {}", failed.id));
    let ids: Vec<_> = programs.iter().map(|program| program.id).collect();
    if store
        .releases()
        .get("m", None)?
        .is_none_or(|newest| newest.programs != ids)
    {
        let put = store.releases().put(&release("m", &ids, Some(weights)))?;
        tell(format!("release m {}", put.0.seq));
    }
    Ok(Scene {
        artifacts,
        programs,
        weights,
        failure: failed,
    })
}

/// Puts artifacts, programs, failures and releases as the seed says, each whole.
pub fn fill(store: &Store, random: &mut Random) -> Result<(), StoreError> {
    let mut artifacts = Vec::new();
    for n in 0..1 + random.below(12) {
        let bytes = content(random.draw(), 1 + random.below(6000));
        let object = store.objects().put_bytes(&bytes)?;
        let log = match random.below(2) {
            0 => None,
            _ => Some(store.objects().put_bytes(format!("log {n}").as_bytes())?),
        };
        let record = artifact(&format!("a{n}"), object, bytes.len() as u64, log);
        artifacts.push(store.records().put_artifact(&record)?.id);
    }
    for model in ["a", "b/c", "ü"].into_iter().take(1 + random.below(3)) {
        let mut programs = Vec::new();
        for batch in 0..1 + random.below(8) {
            let of = [artifacts[random.below(artifacts.len())], artifacts[0]];
            programs.push(
                store
                    .records()
                    .put_program(&program(model, batch as i64, &of))?
                    .id,
            );
        }
        for last in 0..random.below(4) {
            let weights = store.objects().put_bytes(&content(last as u64, 500))?;
            store
                .releases()
                .put(&release(model, &programs, Some(weights)))?;
        }
    }
    for n in 0..random.below(3) {
        let log = store
            .objects()
            .put_bytes(format!("failed {n}").as_bytes())?;
        store
            .records()
            .put_failure(&failure(&format!("f{n}"), log))?;
    }
    Ok(())
}

/// Checks that everything a build promises is there, bit for bit.
pub fn check(store: &Store) -> Result<(), String> {
    let message = |e: StoreError| chain(&e);
    let release = store
        .releases()
        .get("m", None)
        .map_err(message)?
        .ok_or("no release")?;
    let _hold = store.releases().hold(&release).map_err(message)?;
    for id in &release.programs {
        let program = store
            .records()
            .program(id)
            .map_err(message)?
            .ok_or("no program")?;
        for step in &program.steps {
            let artifact = store
                .records()
                .artifact(&step.artifact)
                .map_err(message)?
                .ok_or("no artifact")?;
            let bytes = store.objects().read(&artifact.object).map_err(message)?;
            if bytes.len() as u64 != artifact.size {
                return Err("another size".into());
            }
        }
    }
    let weights = release.weights.ok_or("no weights")?;
    match store.objects().map(&weights).map_err(message)?[..] == content(99, 2 * SIZE) {
        true => Ok(()),
        false => Err("other weights".into()),
    }
}

/// Returns an error with all its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(&format!(": {cause}"));
        next = cause.source();
    }
    text
}

/// Makes an empty folder, in memory where there is one: an fsync costs nothing there and means as much to these tests.
pub fn scratch() -> tempfile::TempDir {
    // Containers often have less of it than some stores here unpack to.
    const ENOUGH: u64 = 2 << 30;
    let room = rustix::fs::statvfs("/dev/shm").map_or(0, |fs| fs.f_bavail * fs.f_frsize);
    let memory = (room > ENOUGH).then(|| tempfile::tempdir_in("/dev/shm").ok());
    memory
        .flatten()
        .unwrap_or_else(|| tempfile::tempdir().unwrap())
}

/// Copies a folder with modes and time stamps as they are.
pub fn copy(from: &Path, to: &Path) {
    let meta = fs::metadata(from).unwrap();
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
            continue;
        }
        // With its mode, which may be read-only.
        fs::copy(&path, &to).unwrap();
        let times =
            fs::FileTimes::new().set_modified(fs::metadata(&path).unwrap().modified().unwrap());
        fs::File::open(&to).unwrap().set_times(times).unwrap();
    }
    fs::set_permissions(to, meta.permissions()).unwrap();
}

/// Changes a read-only file in place, as a failing disk would: the time stamp stays.
pub fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let meta = fs::metadata(path).unwrap();
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
    fs::write(path, bytes).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(meta.modified().unwrap()).unwrap();
    fs::set_permissions(path, meta.permissions()).unwrap();
}

/// Lists every file below `folder`, sorted.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() && !path.is_symlink() {
            true => all.extend(files(&path)),
            false => all.push(path),
        }
    }
    all.sort();
    all
}

/// Returns the file of an object.
pub fn object(root: &Path, digest: &Digest) -> PathBuf {
    let hex = digest.hex();
    let shard = root.join("objects").join(&hex[..2]);
    shard.join(format!("{hex}.zst"))
}

/// Writes a read-only file in place of another.
pub fn replace(path: &Path, bytes: &[u8]) {
    let _ = fs::remove_file(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o444)).unwrap();
}

/// Writes an object file of any frame under any name, with the right checksum.
pub fn crafted(root: &Path, digest: &Digest, frame: &[u8]) {
    let mut bytes = frame.to_vec();
    bytes.extend([0x5A, 0x2A, 0x4D, 0x18, 32, 0, 0, 0]);
    bytes.extend(Digest::of(frame).as_bytes());
    replace(&object(root, digest), &bytes);
}
