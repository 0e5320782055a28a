//! Small stores with records and objects of every kind.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use precast::{
    Digest, Store, StoreError,
    record::{Artifact, Failure, Program, Release},
    store::Policy,
};
use precast_store::testing::{self, program};

#[path = "../sample/random.rs"]
mod random;
pub use random::Random;

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
        log,
        ..testing::artifact_of(name, object, size)
    }
}

pub fn release(model: &str, programs: &[Digest], weights: Option<Digest>) -> Release {
    Release {
        weights,
        ..testing::release(model, Some("v1"), programs)
    }
}

fn failure(name: &str, log: Digest) -> Failure {
    Failure {
        log: Some(log),
        ..testing::failure(Digest::of(name.as_bytes()), "it did not compile")
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
                let put = |bytes: &[u8]| store.objects().put_bytes(bytes);
                let object = put(&content(n, SIZE))?;
                tell(format!("object {object}"));
                let log = put(format!("log of {n}").as_bytes())?;
                let record = artifact(&name, object, SIZE as u64, Some(log));
                let put = store.records().put_artifact(&record)?;
                tell(format!("artifact {id}"));
                put
            }
        });
    }
    let mut programs = Vec::new();
    for batch in 0..2 {
        let of: Vec<_> = artifacts[batch..batch + 2].iter().map(|a| a.id).collect();
        let record = program("m", batch as i64, &of);
        let put = store.records().put_program(&record)?;
        tell(format!("program {}", put.id));
        programs.push(put);
    }
    let weights = store.objects().put_bytes(&content(99, 2 * SIZE))?;
    tell(format!("object {weights}"));
    let failed = failure("failed", store.objects().put_bytes(b"why it failed")?);
    store.records().put_failure(&failed)?;
    tell(format!("failure {}", failed.id));
    let ids: Vec<_> = programs.iter().map(|program| program.id).collect();
    let newest = store.releases().get("m", None)?;
    if newest.is_none_or(|newest| newest.programs != ids) {
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
            let record = program(model, batch as i64, &of);
            programs.push(store.records().put_program(&record)?.id);
        }
        for last in 0..random.below(4) {
            let weights = store.objects().put_bytes(&content(last as u64, 500))?;
            let record = release(model, &programs, Some(weights));
            store.releases().put(&record)?;
        }
    }
    for n in 0..random.below(3) {
        let log = format!("failed {n}");
        let record = failure(&format!("f{n}"), store.objects().put_bytes(log.as_bytes())?);
        store.records().put_failure(&record)?;
    }
    Ok(())
}

/// Checks that everything a build promises is there, bit for bit.
pub fn check(store: &Store) -> Result<()> {
    let release = store.releases().get("m", None)?.context("no release")?;
    let _hold = store.releases().hold(&release)?;
    read(store, &release)?;
    let weights = release.weights.context("no weights")?;
    let sound = store.objects().map(&weights)?[..] == content(99, 2 * SIZE);
    ensure!(sound, "other weights");
    Ok(())
}

/// Reads every program, artifact and object of a release.
pub fn read(store: &Store, release: &Release) -> Result<()> {
    for id in &release.programs {
        let program = store.records().program(id)?.context("no program")?;
        for step in &program.steps {
            let artifact = store.records().artifact(&step.artifact)?;
            let artifact = artifact.context("no artifact")?;
            let bytes = store.objects().read(&artifact.object)?;
            ensure!(bytes.len() as u64 == artifact.size, "another size");
        }
    }
    Ok(())
}

/// Returns an error with all its causes.
pub fn chain(error: StoreError) -> String {
    format!("{:#}", anyhow::Error::from(error))
}

/// Keeps the newest release, and nothing that is in none.
pub fn newest_only() -> Policy {
    Policy {
        keep_releases: 1,
        unreleased: true,
        ..Policy::default()
    }
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
