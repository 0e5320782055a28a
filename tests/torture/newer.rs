//! Stores and records of a newer precast: refused with the version, and not changed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use precast::{Store, StoreError, store::Options};
use serde_json::{Value, json};

use crate::{
    report::Tally,
    scene::{self, Scene},
    seeds::{record, write_record},
};

/// A newer part: its name, its maker, and whether the whole store is refused because of it.
type Kind = (&'static str, fn(&Path, &Scene), bool);

/// Writes a record of version 99 over another: with the same fields, or others.
fn record_of_99(path: &Path, other_fields: bool) {
    let text = fs::read_to_string(path).unwrap();
    let mut record: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    record["schema"] = json!(99);
    if other_fields {
        let id = record["id"].clone();
        record = json!({ "schema": 99, "id": id, "parts": [{ "kind": "unheard of" }] });
    }
    write_record(path, &record.to_string());
}

#[rustfmt::skip]
const KINDS: &[Kind] = &[
    ("the layout", |r, _| {
        // Only root may write it.
        fs::remove_file(r.join("precast-store.json")).unwrap();
        fs::write(r.join("precast-store.json"), "{\"schema\":2,\"layout\":99}\n").unwrap();
    }, true),
    ("the index", |r, _| {
        let index = rusqlite::Connection::open(r.join("index.sqlite")).unwrap();
        index.execute_batch("CREATE TABLE news (x); PRAGMA user_version=99").unwrap();
    }, true),
    ("an artifact", |r, s| record_of_99(&record(r, "artifacts", &s.artifacts[0].id), false), false),
    ("an artifact with other fields", |r, s| record_of_99(&record(r, "artifacts", &s.artifacts[0].id), true), false),
    ("a program", |r, s| record_of_99(&record(r, "programs", &s.programs[0].id), false), false),
    ("a program with other fields", |r, s| record_of_99(&record(r, "programs", &s.programs[0].id), true), false),
    ("a failure", |r, s| record_of_99(&record(r, "failures", &s.failure.id), false), false),
    ("a failure with other fields", |r, s| record_of_99(&record(r, "failures", &s.failure.id), true), false),
    ("a release", |r, _| record_of_99(&r.join("releases/m/00000001.json"), false), false),
    ("a release with other fields", |r, _| record_of_99(&r.join("releases/m/00000001.json"), true), false),
];

type Step = (&'static str, fn(&Path, &Scene) -> Result<(), StoreError>);

fn fixing(root: &Path) -> Result<Store, StoreError> {
    Store::open_for_repair(root, Options::default())
}

/// Everything that is done to a store. The first four only look; the last three come to every record there is.
#[rustfmt::skip]
const STEPS: &[Step] = &[
    ("open", |r, _| Store::open(r).map(drop)),
    ("open read-only", |r, _| Store::open_read_only(r).map(drop)),
    ("verify", |r, _| fixing(r)?.audit().verify().map(drop)),
    ("verify read-only", |r, _| Store::open_read_only(r)?.audit().verify().map(drop)),
    ("create", |r, _| Store::create(r).map(drop)),
    ("reindex", |r, _| fixing(r)?.audit().reindex()),
    ("repair", |r, _| fixing(r)?.audit().repair().map(drop)),
    ("gc", |r, _| {
        Store::open(r)?.collector().gc(&scene::newest_only()).map(drop)
    }),
    ("look at all", |r, s| {
        let store = Store::open(r)?;
        s.artifacts.iter().try_for_each(|artifact| store.records().artifact(&artifact.id).map(drop))?;
        s.programs.iter().try_for_each(|program| store.records().program(&program.id).map(drop))?;
        store.records().failure(&s.failure.id)?;
        store.releases().get("m", None).map(drop)
    }),
    ("build", |r, _| scene::build(&Store::open(r)?, &mut |_| {}).map(drop)),
];

/// Makes each part newer, and runs every operation on the store.
pub fn all(sound: &Path, scene: &Scene) -> Tally {
    let bad = KINDS.iter().flat_map(|kind| tried(sound, scene, kind));
    let mut tally = Tally::one("kinds", KINDS.len(), bad.collect());
    tally.set("steps_each", STEPS.len());
    tally
}

/// Makes one part newer and runs every operation on the store, in order; returns the failures.
fn tried(sound: &Path, scene: &Scene, kind: &Kind) -> Vec<String> {
    let (name, make, whole) = kind;
    let dir = scene::scratch();
    let root = dir.path().join("store");
    scene::copy(sound, &root);
    make(&root, scene);
    let before = state(&root, *whole);
    let mut bad = Vec::new();
    for (step, act) in STEPS {
        let refused = match act(&root, scene) {
            Ok(()) => false,
            Err(StoreError::Newer { found: 99, .. }) => true,
            Err(e) => {
                bad.push(format!("{name} is newer, {step}: {}", scene::chain(e)));
                continue;
            }
        };
        let must = *whole || matches!(*step, "gc" | "look at all" | "build");
        if must && !refused {
            bad.push(format!("{name} is newer, {step}: was not refused"));
        }
        let after = state(&root, *whole);
        let lost = before
            .iter()
            .filter(|(path, bytes)| after.get(*path) != Some(*bytes));
        let lost: Vec<&PathBuf> = lost.map(|(path, _)| path).collect();
        if !lost.is_empty() || (*whole && after.len() != before.len()) {
            bad.push(format!("{name} is newer, {step}: changed {lost:?}"));
        }
    }
    bad
}

/// Returns every file that no step may change: all of them, or all published ones.
fn state(root: &Path, whole: bool) -> BTreeMap<PathBuf, Vec<u8>> {
    let published = ["objects", "artifacts", "programs", "releases", "failures"];
    let is = |path: &Path| {
        published
            .iter()
            .any(|name| path.starts_with(root.join(name)))
    };
    let files = scene::files(root)
        .into_iter()
        .filter(|path| whole || is(path));
    files
        .map(|path| (path.clone(), fs::read(&path).unwrap()))
        .collect()
}
