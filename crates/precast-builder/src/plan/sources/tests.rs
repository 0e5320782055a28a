use std::{fs::File, time::Duration};

use super::*;

fn project(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

fn entry(root: &Path, sources: &[&str], packages: &[(&str, &str)]) -> Entry {
    let source = |path: &&str| SourceFile {
        path: (*path).to_owned(),
        digest: Digest::of_file(&root.join(path)).unwrap().0,
    };
    let package = |(name, version): &(&str, &str)| Package {
        name: (*name).into(),
        version: (*version).into(),
    };
    Entry {
        entry: "model:load".into(),
        sources: sources.iter().map(source).collect(),
        packages: packages.iter().map(package).collect(),
        declared: Default::default(),
        site_packages: vec![root.join("site").to_string_lossy().into_owned()],
    }
}

/// Makes the file appear a minute old, like the files of a checkout.
fn age(cache: &mut StatCache) {
    for stamp in cache.stamps.values_mut() {
        stamp.hashed += 60_000_000_000;
    }
}

#[test]
fn an_unchanged_file_is_not_read_again_and_a_changed_one_is() {
    let folder = project(&[("model.py", "one")]);
    let path = folder.path().join("model.py");
    let file = folder.path().join("cache/sources.json");
    let mut cache = StatCache::load(&file);
    let one = cache.digest(&path).unwrap();
    age(&mut cache);
    cache.save().unwrap();

    let mut cache = StatCache::load(&file);
    // A poisoned digest shows whether the file was read.
    let poison = Digest::of(b"poison");
    cache.stamps.get_mut(&path).unwrap().digest = poison;
    assert_eq!(cache.digest(&path).unwrap(), poison);
    assert!(!cache.changed);

    // Same size, and a time stamp set back: the change time differs.
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, "two").unwrap();
    File::open(&path).unwrap().set_modified(before).unwrap();
    let two = cache.digest(&path).unwrap();
    assert_eq!(two, Digest::of(b"two"));
    assert_ne!(one, two);
}

#[test]
fn a_file_that_was_young_when_it_was_hashed_is_read_again() {
    let folder = project(&[("model.py", "one")]);
    let path = folder.path().join("model.py");
    let mut cache = StatCache::load(&folder.path().join("cache.json"));
    cache.digest(&path).unwrap();
    cache.stamps.get_mut(&path).unwrap().digest = Digest::of(b"poison");
    assert_eq!(cache.digest(&path).unwrap(), Digest::of(b"one"));
}

#[test]
fn a_damaged_cache_is_an_empty_one() {
    let folder = project(&[("cache.json", "{\"a\": 1}"), ("model.py", "one")]);
    let at = |name: &str| folder.path().join(name);
    let mut cache = StatCache::load(&at("cache.json"));
    assert_eq!(cache.digest(&at("model.py")).unwrap(), Digest::of(b"one"));
    cache.save().unwrap();
    assert_eq!(StatCache::load(&at("cache.json")).stamps.len(), 1);
    assert!(cache.digest(&at("gone.py")).is_err());
}

#[test]
fn an_entry_is_seen_as_it_is_now() {
    let version = "__version__ = '2.11.0+cu130'\ngit_version = 'f'\ncuda = None\n";
    let folder = project(&[
        ("model.py", "a"),
        ("sub/layers.py", "b"),
        ("old.py", "c"),
        ("site/x/__init__.py", ""),
        ("site/My_Pkg-1.2.dist-info/METADATA", ""),
        ("site/eggy-3.0-py3.11.egg-info/PKG-INFO", ""),
        ("site/torch-2.11.0.dist-info/METADATA", ""),
        ("site/torch/version.py", version),
    ]);
    let root = folder.path();
    let packages = [
        ("my.pkg", "1.2"),
        ("eggy", "2.0"),
        ("gone", "1"),
        ("torch", "2.11.0+cu130"),
        ("torch", "2.11.0"),
    ];
    let before = entry(root, &["model.py", "sub/layers.py", "old.py"], &packages);
    assert_eq!(changed_source(root, &before), None);
    fs::write(root.join("sub/layers.py"), "B").unwrap();
    fs::remove_file(root.join("old.py")).unwrap();

    let now = refresh(root, &before, &mut StatCache::default()).unwrap();
    let paths: Vec<&str> = now.sources.iter().map(|source| &*source.path).collect();
    assert_eq!(paths, ["model.py", "sub/layers.py"]);
    assert_eq!(now.sources[0], before.sources[0]);
    assert_eq!(now.sources[1].digest, Digest::of(b"B"));
    let packages = now
        .packages
        .iter()
        .map(|p| format!("{} {}", p.name, p.version));
    let versions = [
        "my.pkg 1.2",
        "eggy 3.0",
        "torch 2.11.0+cu130",
        "torch 2.11.0",
    ];
    assert_eq!(packages.collect::<Vec<_>>(), versions);
    let changed = changed_source(root, &before);
    assert_eq!(changed.as_deref(), Some("sub/layers.py"));
}

#[test]
fn bystanders_are_new_files_that_are_no_sources() {
    let folder = project(&[
        ("model.py", ""),
        ("README.md", ""),
        (".git/x", ""),
        ("__pycache__/m.pyc", ""),
        ("artifacts/a", ""),
        ("old.txt", ""),
    ]);
    let root = folder.path();
    let entry = entry(root, &["model.py"], &[]);
    let past = SystemTime::now() - Duration::from_secs(60);
    let old = File::open(root.join("old.txt")).unwrap();
    old.set_modified(past - Duration::from_secs(60)).unwrap();
    let skip = root.join("artifacts");
    assert_eq!(bystanders(root, &entry, past, &[&skip], 9), ["README.md"]);
    assert_eq!(bystanders(root, &entry, past, &[], 1), ["README.md"]);
}
