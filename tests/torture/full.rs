//! The full test of PROMISES 1 to 9, with figures in `benches/results/torture.json`. `make torture` runs this.

use std::sync::atomic::{AtomicU64, Ordering};

use precast::Store;
use serde_json::json;

use crate::{
    attacks, build, crash, many, mapped, mutate, newer, permissions, readonly, replay,
    report::{Report, Tally, machine, profile, versions},
    scene::{self, Random},
    seeds, sound, spread,
};

/// Where every generator begins.
const SEED: u64 = 20_261_120;

/// The actors whose calls are counted; the first two make most of them.
pub const ACTORS: [&str; 4] = ["build", "gc", "repair", "rollback"];

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results/torture.json");

/// Returns every how many calls one is tried.
fn stride(report: &Report, whole: f64) -> u64 {
    (whole / report.scale).ceil() as u64
}

/// Runs all parts. The names of those in the file begin with the promise.
pub fn run() {
    let head = json!({
        "schema": 1,
        "command": "make torture",
        "machine": machine(),
        "versions": versions(),
        "profile": profile(),
        "seed": SEED,
        "jobs": spread::jobs(),
    });
    let mut report = Report::new(FILE, head, &["points", "states", "mutations", "bad"]);
    crashes(&mut report);
    others(&mut report);
    report.end();
}

/// Runs the parts that kill, fail or delay calls.
fn crashes(report: &mut Report) {
    // SIGKILL before every write-class call, and in the middle of every write.
    report.part("1 kill at every write-class call", |report| {
        let modes = [("kill", 0), ("short", 0)];
        crash::swept(&ACTORS, &modes, |_, _| stride(report, 1.0))
    });
    // Replay of lost, cut and reordered writes that were not synced.
    report.part("1 power loss at every moment", |report| {
        let mut tried = Tally::of(["points", "states"]);
        for (name, share) in [("build", 4_500), ("gc", 4_500), ("rollback", 1_000)] {
            replay::Record::of(name).sweep(SEED, report.count(share), &mut tried);
        }
        tried
    });
    report.part("1 kill of precast build", |report| {
        let calls = build::calls();
        let mut tried = build::kills(calls, report.count(250).min(calls), SEED);
        tried.set("calls", calls);
        tried
    });
    report.part("3 failing calls", |report| {
        let errors = [libc::ENOSPC, libc::EIO, libc::EMFILE, libc::EDQUOT];
        let modes = errors.map(|errno| [("fail", errno), ("ever", errno)]);
        crash::swept(&ACTORS[..2], modes.as_flattened(), |_, _| {
            stride(report, 3.0)
        })
    });
    // A call that takes long, while another process builds or collects.
    report.part("5 delayed calls", |report| {
        crash::delays(|_| stride(report, 2.0))
    });
}

/// Runs the parts that change files, share a store or refuse one.
fn others(report: &mut Report) {
    let (_dir, path, scene) = sound();
    report.part("2 changes of objects and records", |report| {
        mutate::spread(&path, SEED, report.count(1_000_000), mutate::files)
    });
    report.part("2 changes of the index", |report| {
        mutate::spread(&path, SEED, report.count(20_000), mutate::index)
    });
    report.part("4 builders of the same specs", |report| {
        let (processes, specs) = (report.count(64), report.count(100));
        let mut crowd = many::builders(processes, specs, 1_000, report.count(100), SEED);
        if crowd.count("begun") == crowd.count("finished") {
            crowd.fail("no owner was killed: nothing was replaced");
        }
        crowd
    });
    report.part("5 reads under gc", |report| {
        many::reads_under_gc(16, report.count(62_500), 20)
    });
    report.part("6 seeded defects", |_| seeds::all(&path, &scene));
    report.part("6 sound stores, and their index deleted", sound_ones);
    // Nothing is written or replaced once it has its final name.
    report.part("7 writes to published files", |_| {
        let (mut published, mut bad) = (0, Vec::new());
        for name in ACTORS {
            let (count, wrong) = replay::Record::of(name).writes_after_publishing();
            published += count;
            bad.extend(wrong);
        }
        Tally::one("published", published as usize, bad)
    });
    report.part("8 read-only stores", |_| {
        let mut tally = Tally::default();
        for how in readonly::WAYS {
            match readonly::reads(&path, &scene.programs[0].id.hex(), how) {
                Ok((runs, calls)) => {
                    tally.set(how, json!({ "runs": runs, "write_class_calls": calls }));
                    let bad = (calls > 0).then(|| format!("{how}: {calls} write-class calls"));
                    tally.bad.extend(bad);
                }
                Err(why) if why.to_string().starts_with("skipped") => {
                    tally.set(how, why.to_string())
                }
                Err(why) => tally.fail(format!("{how}: {why:#}")),
            }
        }
        tally
    });
    report.part("9 newer stores", |_| newer::all(&path, &scene));
    report.part("26 mapped weights", |report| {
        let changes = report.count(20_000);
        spread::shares(SEED, changes, |seed, count| {
            mapped::sweep(seed, count, report.count(6_000) * count / changes)
        })
    });
    report.part("27 permissions", |report| {
        permissions::spread(SEED, report.count(20))
    });
    report.part("hostile stores", |_| attacks::all(&path, &scene));
}

/// Promise 6: sound stores of all sizes raise no alarm, and their index comes back identical when it is deleted.
fn sound_ones(report: &Report) -> Tally {
    let rows = AtomicU64::new(0);
    let stores: Vec<u64> = (0..report.count(1_000)).collect();
    let bad = spread::each(&stores, |n| {
        let dir = scene::scratch();
        let path = dir.path().join("store");
        let store = Store::create(&path)?;
        scene::fill(&store, &mut Random(SEED + n))?;
        let alarms = |store: &Store| {
            let defects = store.audit().verify()?.defects;
            anyhow::ensure!(defects.is_empty(), "store {n} is sound: {defects:?}");
            Ok(())
        };
        alarms(&store)?;
        drop(store);
        let count = seeds::index_comes_back(&path)?;
        rows.fetch_add(count, Ordering::Relaxed);
        alarms(&Store::open(&path)?)
    });
    let mut tally = Tally::one("stores", stores.len(), bad);
    tally.set("rows", rows.into_inner());
    tally
}
