//! The full test of PROMISES 1 to 9, with figures in `benches/results/torture.json`. `make torture` runs this.

use std::sync::atomic::{AtomicU64, Ordering};

use precast::Store;
use serde_json::json;

use crate::{
    attacks, build, crash, many, mapped, mutate, newer, permissions, readonly, replay,
    report::{Report, machine, outcome, profile, versions},
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

/// Runs the parts that kill, fail or delay calls.
fn crashes(report: &mut Report) {
    // SIGKILL before every write-class call, and in the middle of every write.
    report.part("1 kill at every write-class call", |report| {
        let mut tried = crash::Tried::default();
        for name in ["build", "gc", "repair", "rollback"] {
            let begin = crash::Start::new(name);
            for mode in ["kill", "short"] {
                begin.sweep(mode, 0, stride(report, 1.0), &mut tried);
            }
        }
        outcome!(tried)
    });
    // Replay of lost, cut and reordered writes that were not synced.
    report.part("1 power loss at every moment", |report| {
        let mut tried = crash::Tried::default();
        for (name, share) in [("build", 4_500), ("gc", 4_500), ("rollback", 1_000)] {
            replay::Record::of(name).sweep(SEED, report.count(share), &mut tried);
        }
        outcome!(tried)
    });
    report.part("1 kill of precast build", |report| {
        let mut tried = crash::Tried::default();
        let calls = build::calls();
        let killed = build::kills(calls, report.count(250).min(calls), SEED, &mut tried);
        let counts = json!({ "calls": calls, "points": tried.points, "states": tried.states, "killed": killed });
        (counts, tried.bad)
    });
    report.part("3 failing calls", |report| {
        let mut tried = crash::Tried::default();
        for name in ["build", "gc"] {
            let begin = crash::Start::new(name);
            for errno in [libc::ENOSPC, libc::EIO, libc::EMFILE, libc::EDQUOT] {
                for mode in ["fail", "ever"] {
                    begin.sweep(mode, errno, stride(report, 3.0), &mut tried);
                }
            }
        }
        outcome!(tried)
    });
    // A call that takes long, while another process builds or collects.
    report.part("5 delayed calls", |report| {
        let mut tried = crash::Tried::default();
        for name in ["build", "gc"] {
            let begin = crash::Start::new(name);
            begin.sweep_delayed(&["build", "gc"], stride(report, 2.0), &mut tried);
        }
        outcome!(tried)
    });
}

/// Runs the parts that change files, share a store or refuse one.
fn others(report: &mut Report) {
    let (_dir, path, scene) = sound();
    report.part("2 changes of objects and records", |report| {
        outcome!(mutate::spread(
            &path,
            SEED,
            report.count(1_000_000),
            mutate::files
        ))
    });
    report.part("2 changes of the index", |report| {
        outcome!(mutate::spread(
            &path,
            SEED,
            report.count(20_000),
            mutate::index
        ))
    });
    report.part("4 builders of the same specs", |report| {
        let (processes, specs) = (report.count(64), report.count(100));
        let mut crowd = many::builders(processes, specs, 1_000, report.count(100), SEED);
        if crowd.begun == crowd.finished {
            let why = "no owner was killed: nothing was replaced";
            crowd.bad.push(why.to_owned());
        }
        outcome!(crowd)
    });
    report.part("5 reads under gc", |report| {
        outcome!(many::reads_under_gc(16, report.count(62_500), 20))
    });
    report.part("6 seeded defects", |_| {
        let bad = spread::each(seeds::SEEDS, |seed| seeds::try_seed(&path, &scene, seed));
        (json!({ "kinds": seeds::SEEDS.len() }), bad)
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
        (json!({ "published": published }), bad)
    });
    report.part("8 read-only stores", |_| {
        let (mut counts, mut bad) = (json!({}), Vec::new());
        for how in readonly::WAYS {
            match readonly::reads(&path, &scene.programs[0].id.hex(), how) {
                Ok((runs, calls)) => {
                    counts[how] = json!({ "runs": runs, "write_class_calls": calls });
                    bad.extend((calls > 0).then(|| format!("{how}: {calls} write-class calls")));
                }
                Err(why) if why.starts_with("skipped") => counts[how] = json!(why),
                Err(why) => bad.push(format!("{how}: {why}")),
            }
        }
        (counts, bad)
    });
    report.part("9 newer stores", |_| {
        let kinds = newer::KINDS.iter();
        let bad = kinds
            .flat_map(|kind| newer::tried(&path, &scene, kind))
            .collect();
        (
            json!({ "kinds": newer::KINDS.len(), "steps_each": newer::TRIED }),
            bad,
        )
    });
    report.part("26 mapped weights", |report| {
        outcome!(mapped::spread(
            SEED,
            report.count(20_000),
            report.count(6_000)
        ))
    });
    report.part("27 permissions", |report| {
        outcome!(permissions::spread(SEED, report.count(20)))
    });
    // One at a time: the cost of each is measured.
    report.part("hostile stores", |_| {
        let attacks = attacks::ATTACKS.iter();
        let bad = attacks.filter_map(|attack| attacks::try_attack(&path, &scene, attack).err());
        (json!({ "stores": attacks::ATTACKS.len() }), bad.collect())
    });
}

/// Promise 6: sound stores of all sizes raise no alarm, and their index comes back identical when it is deleted.
fn sound_ones(report: &Report) -> (serde_json::Value, Vec<String>) {
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
    (
        json!({ "stores": stores.len(), "rows": rows.into_inner() }),
        bad,
    )
}
