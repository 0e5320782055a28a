//! Tries to break the store: `make torture` runs it at full size, `cargo test` a small seeded sample.
#![allow(
    clippy::exit,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::unwrap_used,
    unsafe_code,
    reason = "tests panic, print, and call C"
)]

mod actor;
mod attacks;
mod build;
mod crash;
mod full;
mod many;
mod mapped;
mod mutate;
mod newer;
mod permissions;
#[cfg(feature = "sync-points")]
mod phases;
mod readonly;
mod replay;
mod report;
#[allow(dead_code, unused_imports, unused_macros)]
#[path = "../cli/sandbox.rs"]
mod sandbox;
mod scene;
mod seeds;
mod spread;

use std::path::PathBuf;

use precast::Store;
use report::Tally;
use tempfile::TempDir;

/// Makes a sound store; returns its path and its content.
fn sound() -> (TempDir, PathBuf, scene::Scene) {
    let dir = scene::scratch();
    let path = dir.path().join("store");
    let store = Store::create(&path).unwrap();
    let scene = scene::build(&store, &mut |_| {}).unwrap();
    scene::check(&store).unwrap();
    let found = store.audit().verify().unwrap();
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
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn changed_bytes_of_objects_and_records_are_refused() {
    let (_dir, path, scene) = sound();
    let swept = mutate::files(&path, &scene, 1, 8_000);
    assert_eq!(swept.bad, [] as [String; 0]);
    assert_eq!(swept.count("refused"), 8_000);
}

#[test]
fn changed_weights_are_never_mapped() {
    let swept = mapped::sweep(1, 250, 120);
    assert_eq!(swept.bad, [] as [String; 0]);
    assert_eq!(
        (swept.count("mutations"), swept.count("during")),
        (250, 120)
    );
}

#[test]
fn files_that_others_could_have_changed_stop_a_start() {
    let tried = permissions::one(0, 2);
    assert_eq!(tried.bad, [] as [String; 0]);
    assert!(
        tried.count("places") > 20 && tried.count("starts") > 150,
        "{tried:?}"
    );
}

#[test]
fn a_changed_index_is_refused_or_right_or_named() {
    let (_dir, path, scene) = sound();
    let swept = mutate::index(&path, &scene, 1, 400);
    assert_eq!(swept.bad, [] as [String; 0]);
    assert!(
        swept.count("refused") + swept.count("named_by_verify") > 30,
        "{swept:?}"
    );
}

/// Not a test: the entry of this binary's children.
#[test]
fn actor() {
    actor::act();
}

#[test]
fn a_kill_at_any_call_leaves_a_store_that_the_next_build_finishes_from() {
    for name in ["build", "gc", "repair", "rollback"] {
        let start = crash::Start::new(name);
        assert!(start.calls > 10, "{name}: {}", start.calls);
        let mut tried = Tally::default();
        start.sweep("kill", 0, start.calls / 12, &mut tried);
        start.sweep("short", 0, start.calls / 6, &mut tried);
        assert_eq!(tried.bad, [] as [String; 0]);
    }
}

#[test]
fn a_call_that_takes_long_harms_nobody() {
    let mut tried = Tally::default();
    for name in ["build", "gc"] {
        let start = crash::Start::new(name);
        start.sweep_delayed(&["build", "gc"], start.calls / 6, &mut tried);
    }
    assert_eq!(tried.bad, [] as [String; 0]);
}

#[test]
fn a_killed_precast_build_is_finished_by_the_next_one() {
    let calls = build::calls();
    assert!(calls > 50, "{calls}");
    let tried = build::kills(calls, 4, 1);
    assert_eq!(tried.bad, [] as [String; 0]);
    assert!(tried.count("killed") >= 4, "{tried:?}");
}

#[test]
fn a_newer_store_is_refused_and_left_as_it_is() {
    let (_dir, path, scene) = sound();
    let bad: Vec<String> = newer::KINDS
        .iter()
        .flat_map(|kind| newer::tried(&path, &scene, kind))
        .collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn an_index_that_is_deleted_comes_back_identical() {
    let (_dir, path, _) = sound();
    seeds::index_comes_back(&path).unwrap();
}

#[test]
fn a_full_or_failing_disk_is_an_error_and_harms_nothing() {
    for name in ["build", "gc"] {
        let start = crash::Start::new(name);
        let mut tried = Tally::default();
        for errno in [libc::ENOSPC, libc::EIO, libc::EMFILE] {
            start.sweep("fail", errno, start.calls / 6, &mut tried);
            start.sweep("ever", errno, start.calls / 4, &mut tried);
        }
        assert_eq!(tried.bad, [] as [String; 0]);
    }
}

#[test]
fn a_power_loss_at_any_moment_keeps_promises() {
    for name in ["build", "gc"] {
        let record = replay::Record::of(name);
        let (published, written) = record.writes_after_publishing();
        assert_eq!(written, [] as [String; 0]);
        assert!(published > 5 || name != "build");
        let mut tried = Tally::default();
        record.sweep(1, 60, &mut tried);
        assert_eq!(tried.bad, [] as [String; 0]);
    }
}

#[test]
fn many_builders_of_one_spec_make_one_artifact() {
    let crowd = many::builders(8, 12, 40, 6, 1);
    assert!(crowd.bad.is_empty(), "{crowd:#?}");
    assert!(
        crowd.count("kills") > 0 && crowd.count("artifacts") == 12,
        "{crowd:#?}"
    );
}

#[test]
fn gc_never_removes_objects_of_readers_and_forgets_dead_ones() {
    let reads = many::reads_under_gc(4, 2_000, 3);
    assert!(reads.bad.is_empty(), "{reads:#?}");
    assert!(
        reads.count("deleted") > 10 && reads.count("put_again") > 10,
        "{reads:#?}"
    );
}

#[cfg(feature = "sync-points")]
#[test]
fn two_processes_stopped_against_each_other_at_every_phase() {
    let bad = phases::everything();
    assert!(bad.is_empty(), "{bad:#?}");
}

#[test]
fn hostile_stores_reach_nothing_outside_and_cost_little() {
    let (_dir, path, scene) = sound();
    let bad: Vec<String> = attacks::ATTACKS
        .iter()
        .filter_map(|attack| attacks::try_attack(&path, &scene, attack).err())
        .collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

fn writes_nothing(how: &str, calls: Result<u64, String>) {
    match calls {
        Ok(calls) => assert_eq!(calls, 0, "{how}: write-class calls"),
        Err(why) if why.starts_with("skipped") => eprintln!("{why}"),
        Err(why) => panic!("{how}: {why}"),
    }
}

#[test]
fn a_store_that_only_may_be_read_works_and_nothing_tries_to_write() {
    let (_dir, path, scene) = sound();
    for how in readonly::WAYS {
        let read = readonly::reads(&path, &scene.programs[0].id.hex(), how);
        writes_nothing(how, read.map(|(_, calls)| calls));
    }
}

#[test]
fn a_model_runs_from_a_store_that_only_may_be_read() {
    let sandbox = sandbox::Sandbox::built();
    sandbox.tensors("x.safetensors", &[("x", &[4, 3], &[1.0; 12])]);
    for how in readonly::WAYS {
        writes_nothing(how, readonly::runs(&sandbox, how));
    }
}

#[test]
#[ignore = "minutes: `make torture` runs it"]
fn full() {
    full::run();
}
