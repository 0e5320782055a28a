//! Flips bits of stored files, truncates and extends them, and then reads the store.
//!
//! A damaged object or record must be refused. A damaged index must give the same answers as the files, or an error, or
//! a defect of `verify`; and gc must not act on it.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
};

use precast::{Digest, Store, store::Filter};

use crate::{
    report::Tally,
    scene::{self, Random, Scene},
    spread,
};

type Ask = Box<dyn Fn(&Store) -> bool>;

/// Returns every object and record file, with a question that must fail while the file is wrong.
fn targets(root: &Path, scene: &Scene) -> Vec<(PathBuf, Ask)> {
    let mut all: Vec<(PathBuf, Ask)> = Vec::new();
    for path in scene::files(root) {
        let inside = path.strip_prefix(root).unwrap().to_owned();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let id = stem.parse::<Digest>().unwrap_or(Digest::of(b"none"));
        let ask: Ask = match inside.iter().next().unwrap().to_str().unwrap() {
            "objects" => Box::new(move |store| store.objects().read(&id).is_err()),
            "artifacts" => Box::new(move |store| store.records().artifact(&id).is_err()),
            "programs" => Box::new(move |store| store.records().program(&id).is_err()),
            "failures" => Box::new(move |store| store.records().failure(&id).is_err()),
            "releases" => Box::new(|store| store.releases().get("m", None).is_err()),
            _ => continue,
        };
        all.push((path, ask));
    }
    assert!(all.len() > scene.artifacts.len() + scene.programs.len());
    all
}

/// Makes `count` seeded changes to objects and records, or to the index, on as many copies of the store as there are
/// jobs.
pub fn spread(
    root: &Path,
    seed: u64,
    count: u64,
    sweep: fn(&Path, &Scene, u64, u64) -> Tally,
) -> Tally {
    spread::shares(seed, count, |seed, count| {
        let dir = scene::scratch();
        let copy = dir.path().join("store");
        scene::copy(root, &copy);
        let scene = scene::build(&Store::open(&copy).unwrap(), &mut |_| {}).unwrap();
        sweep(&copy, &scene, seed, count)
    })
}

/// Makes `count` seeded changes to objects and records.
pub fn files(root: &Path, scene: &Scene, seed: u64, count: u64) -> Tally {
    let store = Store::open_read_only(root).unwrap();
    let targets = targets(root, scene);
    let mut random = Random(seed);
    let mut sweep = Tally::of(["mutations", "refused"]);
    let open = targets.iter().map(|(path, _)| {
        fs::set_permissions(path, Permissions::from_mode(0o644)).unwrap();
        let file = File::options().write(true).open(path).unwrap();
        (file, fs::read(path).unwrap())
    });
    let open: Vec<(File, Vec<u8>)> = open.collect();
    for n in 0..count {
        let which = random.below(targets.len());
        let (file, sound) = &open[which];
        let length = sound.len();
        let at = random.below(length);
        let what = match n % 8 {
            // Every length there is, in turn.
            6 => {
                let length = (n / 8) as usize % length;
                file.set_len(length as u64).unwrap();
                format!("cut to {length}")
            }
            7 => {
                let count = 1 + random.below(64);
                let more: Vec<u8> = (0..count).map(|_| random.draw() as u8).collect();
                file.write_all_at(&more, length as u64).unwrap();
                format!("extended by {}", more.len())
            }
            _ => {
                let bit = random.below(8);
                let changed = [sound[at] ^ (1 << bit)];
                file.write_all_at(&changed, at as u64).unwrap();
                format!("bit {bit} of byte {at}")
            }
        };
        sweep.add("mutations", 1);
        match targets[which].1(&store) {
            true => sweep.add("refused", 1),
            false => {
                let path = targets[which].0.display();
                sweep.fail(format!("seed {seed} step {n}: {path}: {what}"));
            }
        }
        file.write_all_at(sound, 0).unwrap();
        file.set_len(length as u64).unwrap();
    }
    scene::check(&store).unwrap();
    sweep
}

/// Everything the index can be asked.
fn answers(store: &Store, scene: &Scene) -> Result<String, precast::StoreError> {
    let programs = store.records().programs(Filter::default());
    let programs = programs.collect::<Result<Vec<_>, _>>()?;
    let artifacts = store.records().artifacts().collect::<Result<Vec<_>, _>>()?;
    let mut all = format!(
        "{programs:?}\n{artifacts:?}\n{:?}\n",
        store.releases().models()?
    );
    for artifact in &scene.artifacts {
        let found = store.records().resolve(&artifact.id.hex()[..12])?;
        all += &format!("{:?} {found:?}\n", store.objects().row(&artifact.object)?);
    }
    Ok(all)
}

/// Makes `count` seeded changes to the index. An answer is refused, as right as that of the files, or wrong in a way that
/// `verify` names.
pub fn index(root: &Path, scene: &Scene, seed: u64, count: u64) -> Tally {
    let path = root.join("index.sqlite");
    let sound = fs::read(&path).unwrap();
    let policy = scene::newest_only();
    let store = Store::open_read_only(root).unwrap();
    let expected = answers(&store, scene).unwrap();
    let planned = store.collector().plan(&policy).unwrap();
    drop(store);
    let mut random = Random(seed);
    let mut sweep = Tally::of(["mutations", "refused", "right", "named_by_verify"]);
    for n in 0..count {
        let mut bytes = sound.clone();
        let at = random.below(bytes.len());
        let what = match n % 8 {
            6 => {
                bytes.truncate(at);
                format!("cut to {at}")
            }
            7 => {
                let more = 1 + random.below(64);
                bytes.extend(std::iter::repeat_n(7, more));
                format!("extended by {more}")
            }
            _ => {
                // A change in the half that is free pages would say little: half of the steps hit the pages in use.
                bytes[at] ^= 1 << random.below(8);
                format!("byte {at}")
            }
        };
        fs::write(&path, &bytes).unwrap();
        sweep.add("mutations", 1);
        let Ok(store) = Store::open_read_only(root) else {
            sweep.add("refused", 1);
            continue;
        };
        let mut bad = |why: &str| sweep.fail(format!("seed {seed} step {n}: index {what}: {why}"));
        for artifact in &scene.artifacts {
            // A look-up that the index can't answer is answered by the files.
            let has = store.records().has_artifact(&artifact.id);
            if has.is_ok_and(|has| !has) {
                bad("an artifact is not found");
            }
        }
        match store.collector().plan(&policy) {
            Ok(plan) if plan != planned => bad("gc would act on it"),
            _ => {}
        }
        match answers(&store, scene) {
            Err(_) => sweep.add("refused", 1),
            Ok(all) if all == expected => sweep.add("right", 1),
            Ok(_) => match store.audit().verify() {
                Ok(found) if found.defects.is_empty() => {
                    bad("a wrong answer that verify does not name")
                }
                _ => sweep.add("named_by_verify", 1),
            },
        }
    }
    fs::write(&path, &sound).unwrap();
    sweep
}
