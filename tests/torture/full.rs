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

/// Returns a tally of one count.
fn tally(name: &str, count: usize, bad: Vec<String>) -> Tally {
    let mut tally = Tally::default();
    tally.set(name, count);
    tally.bad = bad;
    tally
}

/// Runs the parts that kill, fail or delay calls.
fn crashes(report: &mut Report) {
    // SIGKILL before every write-class call, and in the middle of every write.
    report.part("1 kill at every write-class call", |report| {
        let mut tried = Tally::of(["points", "states"]);
        for name in ["build", "gc", "repair", "rollback"] {
            let begin = crash::Start::new(name);
            for mode in ["kill", "short"] {
                begin.sweep(mode, 0, stride(report, 1.0), &mut tried);
            }
        }
        tried
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
        let mut tried = Tally::of(["points", "states"]);
        for name in ["build", "gc"] {
            let begin = crash::Start::new(name);
            for errno in [libc::ENOSPC, libc::EIO, libc::EMFILE, libc::EDQUOT] {
                for mode in ["fail", "ever"] {
                    begin.sweep(mode, errno, stride(report, 3.0), &mut tried);
                }
            }
        }
        tried
    });
    // A call that takes long, while another process builds or collects.
    report.part("5 delayed calls", |report| {
        let mut tried = Tally::of(["points", "states"]);
        for name in ["build", "gc"] {
            let begin = crash::Start::new(name);
            begin.sweep_delayed(&["build", "gc"], stride(report, 2.0), &mut tried);
        }
        tried
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
    report.part("6 seeded defects", |_| {
        let bad = spread::each(seeds::SEEDS, |seed| seeds::try_seed(&path, &scene, seed));
        tally("kinds", seeds::SEEDS.len(), bad)
    });
    report.part("6 sound stores, and their index deleted", sound_ones);
    // Nothing is written or replaced once it has its final name.
    report.part("7 writes to published files", |_| {
        let (mut published, mut bad) = (0, Vec::new());
        for name in ["build", "gc", "repair", "rollback"] {
            let (count, wrong) = replay::Record::of(name).writes_after_publishing();
            published += count;
            bad.extend(wrong);
        }
        tally("published", published as usize, bad)
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
                Err(why) if why.starts_with("skipped") => tally.set(how, why),
                Err(why) => tally.fail(format!("{how}: {why}")),
            }
        }
        tally
    });
    report.part("9 newer stores", |_| {
        let tried = |kind| newer::tried(&path, &scene, kind);
        let bad = newer::KINDS.iter().flat_map(tried).collect();
        let mut tally = tally("kinds", newer::KINDS.len(), bad);
        tally.set("steps_each", newer::TRIED);
        tally
    });
    report.part("26 mapped weights", |report| {
        let changes = report.count(20_000);
        spread::shares(SEED, changes, |seed, count| {
            mapped::sweep(seed, count, report.count(6_000) * count / changes)
        })
    });
    report.part("27 permissions", |report| {
        permissions::spread(SEED, report.count(20))
    });
    // One at a time: the cost of each is measured.
    report.part("hostile stores", |_| {
        let attacks = attacks::ATTACKS.iter();
        let bad = attacks.filter_map(|attack| attacks::try_attack(&path, &scene, attack).err());
        tally("stores", attacks::ATTACKS.len(), bad.collect())
    });
}

/// Promise 6: sound stores of all sizes raise no alarm, and their index comes back identical when it is deleted.
fn sound_ones(report: &Report) -> Tally {
    let rows = AtomicU64::new(0);
    let stores: Vec<u64> = (0..report.count(1_000)).collect();
    let bad = spread::each(&stores, |n| {
        let dir = scene::scratch();
        let path = dir.path().join("store");
        let message = |e: precast::StoreError| scene::chain(&e);
        let store = Store::create(&path).map_err(message)?;
        scene::fill(&store, &mut Random(SEED + n)).map_err(message)?;
        let alarms = |store: &Store| match store.audit().verify().map_err(message)?.defects {
            none if none.is_empty() => Ok(()),
            some => Err(format!("store {n} is sound: {some:?}")),
        };
        alarms(&store)?;
        drop(store);
        let count = seeds::index_comes_back(&path)?;
        rows.fetch_add(count, Ordering::Relaxed);
        alarms(&Store::open(&path).map_err(message)?)
    });
    let mut tally = tally("stores", stores.len(), bad);
    tally.set("rows", rows.into_inner());
    tally
}
