//! Tries to break the store: what `make torture` runs at full size and `cargo test` as a small seeded sample.

mod actor;
mod crash;
mod mutate;
mod replay;
mod scene;
mod seeds;

use std::path::PathBuf;

use precast::Store;
use tempfile::TempDir;

/// Makes a sound store; returns where it is and what is in it.
fn sound() -> (TempDir, PathBuf, scene::Scene) {
    let dir = scene::scratch();
    let path = dir.path().join("store");
    let store = Store::create(&path).unwrap();
    let scene = scene::build(&store, &mut |_| {}).unwrap();
    scene::check(&store).unwrap();
    let found = store.verify().unwrap();
    assert_eq!(found.defects, [], "a sound store");
    (dir, path, scene)
}

#[test]
fn verify_finds_every_seeded_defect_and_repair_undoes_it() {
    let (_dir, path, scene) = sound();
    let bad: Vec<String> = seeds::SEEDS
        .iter()
        .filter_map(|seed| seeds::try_seed(&path, &scene, seed).err())
        .collect();
    assert!(
        bad.is_empty(),
        "{} of {} defects:\n{}",
        bad.len(),
        seeds::SEEDS.len(),
        bad.join("\n")
    );
}

#[test]
fn changed_bytes_of_objects_and_records_are_refused() {
    let (_dir, path, scene) = sound();
    let swept = mutate::files(&path, &scene, 1, 8_000);
    assert_eq!(swept.bad, [] as [String; 0]);
    assert_eq!(swept.refused, swept.mutations);
}

#[test]
fn a_changed_index_is_refused_or_right_or_named() {
    let (_dir, path, scene) = sound();
    let swept = mutate::index(&path, &scene, 1, 400);
    assert_eq!(swept.bad, [] as [String; 0]);
    assert!(swept.refused + swept.named_by_verify > 30, "{swept:?}");
}

/// Not a test: what this binary does when it is run as a child of one.
#[test]
fn actor() {
    actor::act();
}

#[test]
fn a_kill_at_any_call_leaves_a_store_that_the_next_build_finishes_from() {
    for name in ["build", "gc", "repair", "rollback"] {
        let start = crash::Start::new(name);
        assert!(start.calls > 10, "{name}: {}", start.calls);
        let mut tried = crash::Tried::default();
        start.sweep("kill", 0, start.calls / 12, &mut tried);
        start.sweep("short", 0, start.calls / 6, &mut tried);
        assert!(tried.bad.is_empty(), "{:#?}", tried.bad);
    }
}

#[test]
fn a_full_disk_or_a_failing_one_is_told_and_harms_nothing() {
    for name in ["build", "gc"] {
        let start = crash::Start::new(name);
        let mut tried = crash::Tried::default();
        for errno in [libc::ENOSPC, libc::EIO, libc::EMFILE] {
            start.sweep("fail", errno, start.calls / 6, &mut tried);
            start.sweep("ever", errno, start.calls / 4, &mut tried);
        }
        assert!(tried.bad.is_empty(), "{:#?}", tried.bad);
    }
}

#[test]
fn a_power_loss_at_any_moment_keeps_what_was_promised() {
    for name in ["build", "gc"] {
        let record = replay::Record::of(name);
        let mut tried = crash::Tried::default();
        record.sweep(1, 60, &mut tried);
        assert!(tried.bad.is_empty(), "{:#?}", tried.bad);
    }
}
