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

/// Returns every how many of a sample's calls one is tried.
fn some(mode: &str, calls: u64) -> u64 {
    calls
        / match mode {
            "kill" => 12,
            "ever" => 4,
            _ => 6,
        }
}

#[test]
fn verify_finds_every_seeded_defect_and_repair_undoes_it() {
    let (_dir, path, scene) = sound();
    seeds::all(&path, &scene).good(&[]);
}

#[test]
fn changed_bytes_of_objects_and_records_are_refused() {
    let (_dir, path, scene) = sound();
    let swept = mutate::files(&path, &scene, 1, 8_000);
    swept.good(&[("refused", 7_999)]);
}

#[test]
fn changed_weights_are_never_mapped() {
    mapped::sweep(1, 250, 120).good(&[("mutations", 249), ("during", 119)]);
}

#[test]
fn files_that_others_could_have_changed_stop_a_start() {
    permissions::one(0, false).good(&[("places", 20), ("starts", 150)]);
}

#[test]
fn a_changed_index_is_refused_or_right_or_named() {
    let (_dir, path, scene) = sound();
    let swept = mutate::index(&path, &scene, 1, 400);
    swept.good(&[]);
    let noticed = swept.count("refused") + swept.count("named_by_verify");
    assert!(noticed > 30, "{swept:?}");
}

/// Not a test: the entry of this binary's children.
#[test]
fn actor() {
    actor::act();
}

#[test]
fn a_kill_at_any_call_leaves_a_store_that_the_next_build_finishes_from() {
    crash::swept(&full::ACTORS, &[("kill", 0), ("short", 0)], some).good(&[]);
}

#[test]
fn a_call_that_takes_long_harms_nobody() {
    crash::delays(|calls| some("delay", calls)).good(&[]);
}

#[test]
fn a_killed_precast_build_is_finished_by_the_next_one() {
    let calls = build::calls();
    assert!(calls > 50, "{calls}");
    build::kills(calls, 4, 1).good(&[("killed", 3)]);
}

#[test]
fn a_newer_store_is_refused_and_left_as_it_is() {
    let (_dir, path, scene) = sound();
    newer::all(&path, &scene).good(&[]);
}

#[test]
fn a_full_or_failing_disk_is_an_error_and_harms_nothing() {
    let modes =
        [libc::ENOSPC, libc::EIO, libc::EMFILE].map(|errno| [("fail", errno), ("ever", errno)]);
    crash::swept(&["build", "gc"], modes.as_flattened(), some).good(&[]);
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
        tried.good(&[]);
    }
}

#[test]
fn many_builders_of_one_spec_make_one_artifact() {
    many::builders(8, 12, 40, 6, 1).good(&[("kills", 0), ("artifacts", 11)]);
}

#[test]
fn gc_never_removes_objects_of_readers_and_forgets_dead_ones() {
    many::reads_under_gc(4, 2_000, 3).good(&[("deleted", 10), ("put_again", 10)]);
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
    attacks::all(&path, &scene).good(&[]);
}

fn writes_nothing(how: &str, calls: anyhow::Result<u64>) {
    match calls {
        Ok(calls) => assert_eq!(calls, 0, "{how}: write-class calls"),
        Err(why) if why.to_string().starts_with("skipped") => eprintln!("{why:#}"),
        Err(why) => panic!("{how}: {why:#}"),
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
