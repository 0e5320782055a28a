//! Gives each folder and file of a store a wrong owner or mode, or replaces it by a link. Every start must refuse it.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt, lchown, symlink},
    path::{Path, PathBuf},
};

use precast::{
    Digest, Store, StoreError,
    store::{Options, Policy},
};
use walkdir::WalkDir;

use crate::{
    report::Tally,
    scene::{self, Random},
    spread,
};

/// A user and a group that nobody here is.
const STRANGER: u32 = 12_345;

/// The folders of what is published and unpacked.
const CONTENT: [&str; 6] = [
    "objects",
    "ready",
    "artifacts",
    "programs",
    "failures",
    "releases",
];

const LINK: &str = "a link to the same";

/// How a place is made unsafe; false where this user can't.
type Way = (&'static str, fn(&Path, &Path) -> bool);

fn mode(path: &Path, mode: u32) -> bool {
    fs::set_permissions(path, Permissions::from_mode(mode)).is_ok()
}

const WAYS: &[Way] = &[
    ("mode 0666", |path, _| mode(path, 0o666)),
    ("mode 0777", |path, _| mode(path, 0o777)),
    ("mode 1777", |path, _| mode(path, 0o1777)),
    ("mode 0446", |path, _| mode(path, 0o446)),
    ("a stranger's", |path, _| {
        lchown(path, Some(STRANGER), None).is_ok()
    }),
    ("a stranger's group", |path, _| {
        lchown(path, None, Some(STRANGER)).is_ok() && mode(path, 0o775)
    }),
    (LINK, |path, away| {
        let away = away.join("away");
        fs::rename(path, &away).is_ok() && symlink(away, path).is_ok()
    }),
];

fn open(root: &Path, read_only: bool) -> Result<Store, StoreError> {
    let options = Options {
        read_only,
        ..Options::default()
    };
    Store::open_with(root, options)
}

fn start(root: &Path, files: &[PathBuf], read_only: bool) -> Result<(), StoreError> {
    work(&open(root, read_only)?, files, read_only)
}

/// Reads all files of a start, and a little more. A start that may write also does the work of a builder and of `gc`.
fn work(store: &Store, files: &[PathBuf], read_only: bool) -> Result<(), StoreError> {
    store.releases().models()?;
    for path in files {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let id = stem.parse::<Digest>();
        let mut names = path.iter().map(|name| name.to_string_lossy());
        match (names.next().as_deref(), id) {
            (Some("objects"), Ok(id)) => drop(store.objects().read(&id)?),
            (Some("ready"), Ok(id)) => drop(store.objects().map(&id)?),
            (Some("artifacts"), Ok(id)) => drop(store.records().artifact(&id)?),
            (Some("programs"), Ok(id)) => drop(store.records().program(&id)?),
            (Some("failures"), Ok(id)) => drop(store.records().failure(&id)?),
            _ => {}
        }
    }
    for model in ["m", "a", "b/c", "\u{fc}"] {
        if let Some(release) = store.releases().get(model, None)? {
            drop(store.releases().all(model)?);
            drop(store.releases().hold(&release)?);
        }
    }
    if !read_only {
        drop(store.leases().try_claim(&Digest::of(b"key"))?);
        store.collector().gc(&Policy::default())?;
    }
    Ok(())
}

/// Returns every folder and file that a start looks at, the store's own folder first.
fn places(root: &Path) -> Vec<PathBuf> {
    let all = WalkDir::new(root).sort_by_file_name();
    let inside = all.into_iter().map(|entry| {
        let path = entry.unwrap().into_path();
        path.strip_prefix(root).unwrap().to_owned()
    });
    // Backup tools read it, and `verify`.
    inside
        .filter(|path| path != Path::new("CACHEDIR.TAG"))
        .collect()
}

/// Makes a store that is used: with locks, and unpacked weights.
fn used(root: &Path, seed: u64) {
    let store = Store::create(root).unwrap();
    let scene = scene::build(&store, &mut |_| {}).unwrap();
    drop(store.objects().map(&scene.weights).unwrap());
    if seed > 0 {
        scene::fill(&store, &mut Random(seed)).unwrap();
    }
    drop(store);
    start(root, &places(root), false).unwrap();
    start(root, &places(root), true).unwrap();
}

/// Tries every place in every way, or one of each kind; counts the places and the starts. A store that is open already
/// looks at each file and its folder too, and `verify` names them.
pub fn one(seed: u64, every: bool) -> Tally {
    let dir = scene::scratch();
    let sound = dir.path().join("sound");
    used(&sound, seed);
    let mut tried = Tally::of(["places", "starts"]);
    let all = places(&sound);
    let mut kinds = BTreeSet::new();
    for place in &all {
        let kind = (place.iter().next(), place.iter().count());
        if !kinds.insert(kind) && !every {
            continue;
        }
        tried.add("places", 1);
        for (name, make) in WAYS {
            let trial = dir.path().join("trial");
            let root = trial.join("store");
            fs::create_dir(&trial).unwrap();
            scene::copy(&sound, &root);
            let path = root.join(place);
            let opened = open(&root, true).unwrap();
            if make(&path, &trial) {
                let top = place.iter().next().unwrap_or_default();
                if CONTENT.iter().any(|name| top == *name) && place.iter().count() > 1 {
                    let named = match opened.audit().verify() {
                        Ok(found) => !found.defects.is_empty(),
                        Err(_) => *name == LINK,
                    };
                    if !named || work(&opened, &all, true).is_ok() {
                        let place = place.display();
                        tried.fail(format!(
                            "seed {seed}: `{place}`, {name}, open before: taken"
                        ));
                    }
                }
                for read_only in [true, false] {
                    // A reader takes no lock.
                    if read_only && place.starts_with("locks/") {
                        continue;
                    }
                    tried.add("starts", 1);
                    match start(&root, &all, read_only) {
                        Err(StoreError::Unsafe { .. } | StoreError::Stranger { .. }) => {}
                        Err(error) if *name == LINK => drop(error),
                        other => tried.fail(format!(
                            "seed {seed}: `{}`, {name}, read only {read_only}: {other:?}",
                            place.display()
                        )),
                    }
                }
            }
            fs::remove_dir_all(&trial).unwrap();
        }
    }
    tried
}

/// Tries every place of as many stores.
pub fn spread(seed: u64, stores: u64) -> Tally {
    let seeds: Vec<u64> = (0..stores).map(|n| seed + n).collect();
    spread::sum(&seeds, |seed| one(*seed, true))
}
