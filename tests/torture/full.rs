//! The whole figures of PROMISES 1 to 9, written to `benchmarks/torture.json`. `make torture` runs this.
//!
//! `PRECAST_TORTURE_SCALE` (1 by default) scales every count; the file says which it was.

use std::{collections::BTreeMap, time::Instant};

use serde::Serialize;
use serde_json::{Value, json};

use crate::{attacks, crash, many, mutate, readonly, replay, seeds, sound};

/// Where every generator begins.
const SEED: u64 = 20_261_120;

struct Report {
    scale: f64,
    promises: BTreeMap<String, Value>,
    bad: usize,
}

impl Report {
    fn count(&self, whole: u64) -> u64 {
        ((whole as f64 * self.scale) as u64).max(1)
    }

    fn add(&mut self, name: &str, seconds: f64, bad: &[String], told: &impl Serialize) {
        let mut told = serde_json::to_value(told).unwrap();
        told["bad"] = json!(bad.len());
        told["examples"] = json!(bad.iter().take(5).collect::<Vec<_>>());
        told["seconds"] = json!((seconds * 10.0).round() / 10.0);
        println!("{name}: {told}");
        self.bad += bad.len();
        self.promises.insert(name.to_owned(), told);
        self.save();
    }

    /// Saved after every part, so that what ran is there when a later part is cut off.
    fn save(&self) {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benchmarks/torture.json");
        let document = json!({
            "schema": 1,
            "command": "make torture",
            "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
            "scale": self.scale,
            "seed": SEED,
            "cores": std::thread::available_parallelism().map_or(1, usize::from),
            "bad": self.bad,
            "parts": self.promises,
        });
        let text = serde_json::to_string_pretty(&document).unwrap();
        std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/benchmarks")).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    }
}

pub fn run() {
    let scale = std::env::var("PRECAST_TORTURE_SCALE")
        .ok()
        .and_then(|text| text.parse().ok());
    let mut report = Report {
        scale: scale.unwrap_or(1.0),
        promises: BTreeMap::new(),
        bad: 0,
    };
    kills(&mut report);
    power(&mut report);
    mutations(&mut report);
    failures(&mut report);
    crowds(&mut report);
    seeded(&mut report);
    immutable(&mut report);
    read_only(&mut report);
    assert_eq!(report.bad, 0, "see benchmarks/torture.json");
}

/// Promise 1: SIGKILL before every write-class call, and in the middle of every write.
fn kills(report: &mut Report) {
    let start = Instant::now();
    let mut tried = crash::Tried::default();
    for name in ["build", "gc", "repair", "rollback"] {
        let begin = crash::Start::new(name);
        let stride = (1.0 / report.scale).ceil() as u64;
        begin.sweep("kill", 0, stride, &mut tried);
        begin.sweep("short", 0, stride, &mut tried);
    }
    let bad = tried.bad.clone();
    report.add(
        "1 kill at every write-class call",
        start.elapsed().as_secs_f64(),
        &bad,
        &tried,
    );
}

/// Promise 1: replay of lost, cut and reordered writes that were not synced.
fn power(report: &mut Report) {
    let start = Instant::now();
    let mut tried = crash::Tried::default();
    for (name, share) in [("build", 4_500), ("gc", 4_500), ("rollback", 1_000)] {
        let record = replay::Record::of(name);
        record.sweep(SEED, report.count(share), &mut tried);
    }
    let bad = tried.bad.clone();
    report.add(
        "1 power loss at every moment",
        start.elapsed().as_secs_f64(),
        &bad,
        &tried,
    );
}

/// Promise 2.
fn mutations(report: &mut Report) {
    let (_dir, path, scene) = sound();
    let start = Instant::now();
    let swept = mutate::files(&path, &scene, SEED, report.count(1_000_000));
    let bad = swept.bad.clone();
    report.add(
        "2 changes of objects and records",
        start.elapsed().as_secs_f64(),
        &bad,
        &swept,
    );
    let start = Instant::now();
    let swept = mutate::index(&path, &scene, SEED, report.count(20_000));
    let bad = swept.bad.clone();
    report.add(
        "2 changes of the index",
        start.elapsed().as_secs_f64(),
        &bad,
        &swept,
    );
}

/// Promise 3.
fn failures(report: &mut Report) {
    let start = Instant::now();
    let mut tried = crash::Tried::default();
    for name in ["build", "gc"] {
        let begin = crash::Start::new(name);
        let stride = (3.0 / report.scale).ceil() as u64;
        for errno in [libc::ENOSPC, libc::EIO, libc::EMFILE, libc::EDQUOT] {
            begin.sweep("fail", errno, stride, &mut tried);
            begin.sweep("ever", errno, stride, &mut tried);
        }
    }
    let bad = tried.bad.clone();
    report.add(
        "3 failing calls",
        start.elapsed().as_secs_f64(),
        &bad,
        &tried,
    );
}

/// Promises 4 and 5.
fn crowds(report: &mut Report) {
    let crowd = many::builders(report.count(64), report.count(100), report.count(60), SEED);
    let bad = crowd.bad.clone();
    report.add("4 builders of the same specs", crowd.seconds, &bad, &crowd);
    let told = many::reads_under_gc(16, report.count(62_500), 20);
    let bad = told.bad.clone();
    report.add("5 reads under gc", told.seconds, &bad, &told);
}

/// Promise 7: nothing is written or replaced once it has its final name.
fn immutable(report: &mut Report) {
    let start = Instant::now();
    let (mut published, mut bad) = (0, Vec::new());
    for name in ["build", "gc", "repair", "rollback"] {
        let (count, wrong) = replay::Record::of(name).writes_after_publishing();
        published += count;
        bad.extend(wrong);
    }
    let told = json!({ "published": published });
    report.add(
        "7 writes to published files",
        start.elapsed().as_secs_f64(),
        &bad,
        &told,
    );
}

/// Promise 6, and hostile stores.
fn seeded(report: &mut Report) {
    let (_dir, path, scene) = sound();
    let start = Instant::now();
    let bad: Vec<String> = seeds::SEEDS
        .iter()
        .filter_map(|seed| seeds::try_seed(&path, &scene, seed).err())
        .collect();
    let told = json!({ "kinds": seeds::SEEDS.len() });
    report.add(
        "6 seeded defects",
        start.elapsed().as_secs_f64(),
        &bad,
        &told,
    );
    let start = Instant::now();
    let bad: Vec<String> = attacks::ATTACKS
        .iter()
        .filter_map(|attack| attacks::try_attack(&path, &scene, attack).err())
        .collect();
    let told = json!({ "stores": attacks::ATTACKS.len() });
    report.add("hostile stores", start.elapsed().as_secs_f64(), &bad, &told);
}

/// Promise 8.
fn read_only(report: &mut Report) {
    let (_dir, path, _) = sound();
    let start = Instant::now();
    let mut told = json!({});
    let mut bad = Vec::new();
    for how in readonly::WAYS {
        match readonly::reads(&path, how) {
            Ok(calls) => {
                told[how] = json!({ "write_class_calls": calls });
                if calls > 0 {
                    bad.push(format!("{how}: {calls} write-class calls"));
                }
            }
            Err(why) if why.starts_with("skipped") => told[how] = json!(why),
            Err(why) => bad.push(format!("{how}: {why}")),
        }
    }
    report.add(
        "8 read-only stores",
        start.elapsed().as_secs_f64(),
        &bad,
        &told,
    );
}
