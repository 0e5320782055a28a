//! Somebody changes bytes between the moment they are checked and the moment they are executed.
//!
//! An attacker in the same process, with the files in its hands, writes another shared object over the one that is
//! being loaded: through a second handle of the memory file, through the folder an object lies in, by renaming and in
//! place. That other object is a canary: it leaves a file behind the moment the loader maps it. Every load has bytes of
//! its own, because a process never loads one object twice; children of a few thousand loads each keep its tables
//! small.

use std::{
    env,
    fs::{self, File},
    io::Write,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use precast::{
    Digest, Store,
    runtime::{
        command::sealed,
        sources::{Source, SourceError},
    },
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde_json::{Value, json};

use crate::{
    act,
    fake::{Fake, Hooked, Memory},
    flat,
    report::Tally,
    runtime, x,
};

/// Loads `count` objects in children, `parallel` of them at a time. The right bytes are executed, or the load is refused
/// by name. In each child the canary is seen when it is loaded on purpose, by its own digest: the control.
pub fn run(count: u64, parallel: u64, seed: u64) -> Tally {
    const SHARE: u64 = 2_500;
    let mut outcome = Tally::of(["canaries", "controls"]);
    let firsts: Vec<u64> = (0..count).step_by(SHARE as usize).collect();
    for group in firsts.chunks(parallel as usize) {
        let children = group.iter().map(|first| {
            let with = json!({ "loads": SHARE.min(count - first), "seed": seed + first });
            act::start("races", &with)
        });
        for child in children.collect::<Vec<_>>() {
            let done = act::finish(child, Duration::from_secs(600));
            match done.answer {
                Some(answer) => outcome.merge(serde_json::from_value(answer).unwrap()),
                None => outcome.fail(format!("a child ended: {}: {}", done.status, done.printed)),
            }
            outcome.add("children", 1);
            if outcome.count("controls") != outcome.count("children") {
                outcome.fail("a canary that is loaded on purpose is not seen");
            }
        }
    }
    outcome
}

/// The way of the bytes to the runtime, and the attack on them.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    /// In a sealed memory file, which the attacker tries to write to.
    Sealed,
    /// In one without seals, written to all the time.
    Unsealed,
    /// In a memory file that may be written to, but not grow or shrink.
    HalfSealed,
    /// On disk, renamed over and written in place.
    OnDisk,
    /// In a sealed memory file: the canary's bytes for the right ones.
    Other,
    /// Out of a store whose object is swapped for the canary's and back.
    Stored,
}

const WAYS: [Way; 6] = [
    Way::Sealed,
    Way::Unsealed,
    Way::HalfSealed,
    Way::OnDisk,
    Way::Other,
    Way::Stored,
];

/// The current target of the attacker.
struct Target {
    way: Way,
    file: Option<File>,
    path: Option<PathBuf>,
    /// Two files of one length: the right one and the canary.
    right: Vec<u8>,
    canary: Vec<u8>,
}

#[derive(Default)]
struct Attacker {
    target: Mutex<Option<Arc<Target>>>,
    stop: AtomicBool,
    attacks: AtomicU64,
    /// Writes to a sealed file that failed.
    denied: AtomicU64,
    wrote_to_sealed: AtomicBool,
}

impl Attacker {
    fn work(&self, dir: &Path) {
        let mut flip = false;
        while !self.stop.load(Relaxed) {
            let Some(target) = self.target.lock().unwrap().clone() else {
                std::thread::yield_now();
                continue;
            };
            flip = !flip;
            let bytes = if flip { &target.canary } else { &target.right };
            self.attacks.fetch_add(1, Relaxed);
            match (target.way, &target.file, &target.path) {
                (Way::Sealed | Way::Other, Some(file), _) => {
                    let again = File::options()
                        .write(true)
                        .open(format!("/proc/self/fd/{}", file.as_raw_fd()));
                    let through = again.map(|again| again.write_all_at(bytes, 0));
                    let direct = file.write_all_at(bytes, 0);
                    let cut = file.set_len(0);
                    if matches!(through, Ok(Ok(()))) || direct.is_ok() || cut.is_ok() {
                        self.wrote_to_sealed.store(true, Relaxed);
                    } else {
                        self.denied.fetch_add(1, Relaxed);
                    }
                }
                (Way::Unsealed | Way::HalfSealed, Some(file), _) => {
                    let _ = file.write_all_at(bytes, 0);
                }
                (Way::OnDisk, _, Some(path)) => {
                    // In place and by another file of the same name.
                    if let Ok(file) = File::options().write(true).open(path) {
                        let _ = file.write_all_at(bytes, 0);
                    }
                    swap(dir, path, bytes);
                }
                (Way::Stored, _, Some(path)) => swap(dir, path, bytes),
                _ => {}
            }
        }
    }
}

/// Puts a file with these bytes in the place of `path`.
fn swap(dir: &Path, path: &Path, bytes: &[u8]) {
    let draft = dir.join("draft");
    let made = fs::write(&draft, bytes)
        .and_then(|()| fs::set_permissions(&draft, PermissionsExt::from_mode(0o444)))
        .and_then(|()| fs::rename(&draft, path));
    drop(made);
}

/// The way of an object to the runtime, under attack while it is loaded.
struct Attack {
    way: Way,
    right: Vec<u8>,
    canary: Vec<u8>,
    store: Store,
    dir: PathBuf,
    attacker: Arc<Attacker>,
}

impl Attack {
    fn aim(&self, file: Option<&File>, path: Option<&Path>, right: &[u8], canary: &[u8]) {
        *self.attacker.target.lock().unwrap() = Some(Arc::new(Target {
            way: self.way,
            file: file.map(|file| file.try_clone().unwrap()),
            path: path.map(Path::to_owned),
            right: right.to_vec(),
            canary: canary.to_vec(),
        }));
        // Let it begin.
        std::thread::yield_now();
    }

    /// Returns the attacked file of an object; none for the shim, which a process opens once.
    fn file(&self, object: &Digest) -> Result<Option<File>, SourceError> {
        if *object != Digest::of(&self.right) {
            return Ok(None);
        }
        let plain = |seals: SealFlags| -> Result<File, SourceError> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let mut file = File::from(memfd_create("attacked", flags)?);
            file.write_all(&self.right)?;
            fcntl_add_seals(&file, seals)?;
            Ok(file)
        };
        let file = match self.way {
            Way::Sealed => sealed("attacked", &self.right)?,
            Way::Other => sealed("attacked", &self.canary)?,
            Way::Unsealed => plain(SealFlags::empty())?,
            Way::HalfSealed => plain(SealFlags::GROW | SealFlags::SHRINK)?,
            Way::OnDisk => {
                let path = self.dir.join("object.so");
                let _ = fs::remove_file(&path);
                fs::write(&path, &self.right)?;
                self.aim(None, Some(&path), &self.right, &self.canary);
                return Ok(Some(File::open(&path)?));
            }
            Way::Stored => {
                let path = object_path(self.store.path(), object);
                let canary = object_path(self.store.path(), &Digest::of(&self.canary));
                self.aim(None, Some(&path), &fs::read(&path)?, &fs::read(canary)?);
                return Source::memfd(&self.store, object).map(Some);
            }
        };
        self.aim(Some(&file), None, &self.right, &self.canary);
        Ok(Some(file))
    }
}

fn object_path(root: &Path, object: &Digest) -> PathBuf {
    let hex = object.to_string();
    root.join(format!("objects/{}/{hex}.zst", &hex[..2]))
}

pub fn child(with: &Value) -> Value {
    let [loads, seed] = ["loads", "seed"].map(|name| with[name].as_u64().unwrap());
    many_files();
    let dir = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .unwrap();
    let sign = dir.path().join("canary");
    // SAFETY: no other thread of this process is running yet that reads or writes the environment.
    unsafe { env::set_var("PRECAST_CANARY", &sign) };
    let fake = Fake::sized(2, 3);
    let (mut right, mut canary) = (fake.object(), fake.clone().behaving("CANARY").object());
    let length = right.len().max(canary.len());
    right.resize(length, 0);
    canary.resize(length, 0);
    let store = Store::create(dir.path().join("store")).unwrap();
    let attacker = Arc::new(Attacker::default());
    let mut outcome = Tally::of(["loads", "loaded", "refused"]);
    let load = |way: Way, right: &[u8], canary: &[u8]| {
        let mut memory = Memory::default();
        let artifact = fake.artifact(Digest::of(right));
        let program = fake.program("f", &artifact);
        memory.artifacts.insert(artifact.id, artifact);
        memory.programs.insert(program.id, program);
        memory.weights = Some(memory.put(crate::fake::weights(&[("scale", &[2.0])])));
        let attack = Attack {
            way,
            right: right.to_vec(),
            canary: canary.to_vec(),
            store: store.clone(),
            dir: dir.path().to_owned(),
            attacker: attacker.clone(),
        };
        runtime(Hooked::over(memory, move |object| attack.file(object))).load("fake")
    };
    // The canary by its own digest: it must be seen, or nothing below shows anything.
    let _ = load(Way::Sealed, &canary, &right);
    outcome.add("controls", sign.exists().into());
    let _ = fs::remove_file(&sign);
    *attacker.target.lock().unwrap() = None;
    std::thread::scope(|scope| {
        scope.spawn(|| attacker.work(dir.path()));
        for i in 0..loads {
            let way = WAYS[(i % WAYS.len() as u64) as usize];
            let own = |bytes: &[u8]| [bytes, &(seed + i).to_le_bytes()].concat();
            let (right, canary) = (own(&right), own(&canary));
            if way == Way::Stored {
                store.objects().put_bytes(&right).unwrap();
                store.objects().put_bytes(&canary).unwrap();
            }
            let loaded = load(way, &right, &canary);
            *attacker.target.lock().unwrap() = None;
            outcome.add("loads", 1);
            let name = || format!("seed {seed} load {i} ({way:?})");
            match loaded {
                Ok(model) => {
                    let answer = model.run("f", &[x(2, 3)]).map(|out| flat(&out[0]));
                    let right = answer.as_ref().ok() == Some(&flat(&(x(2, 3) * 2)));
                    match right && matches!(way, Way::Sealed | Way::Stored) {
                        true => outcome.add("loaded", 1),
                        false => outcome.fail(format!("{}: {answer:?}", name())),
                    }
                }
                Err(error) => match (way, error.name()) {
                    (Way::Unsealed | Way::HalfSealed | Way::OnDisk, "MemoryFile")
                    | (Way::Other, "WrongBytes")
                    | (Way::Stored, "Store" | "Unreadable" | "WrongBytes") => {
                        outcome.add("refused", 1)
                    }
                    _ => outcome.fail(format!("{}: {error}", name())),
                },
            }
            if sign.exists() {
                outcome.add("canaries", 1);
                outcome.fail(format!("{}: a canary was executed", name()));
                let _ = fs::remove_file(&sign);
            }
        }
        attacker.stop.store(true, Relaxed);
    });
    if attacker.wrote_to_sealed.load(Relaxed) {
        outcome.fail("a sealed file was written to");
    }
    outcome.add("attacks", attacker.attacks.load(Relaxed));
    outcome.add("denied", attacker.denied.load(Relaxed));
    serde_json::to_value(outcome).unwrap()
}

/// A loaded object keeps its memory file open.
fn many_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: both calls take a valid pointer to the struct they are declared with.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
}
