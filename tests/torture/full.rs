//! The full test of PROMISES 1 to 9, with figures in `benches/results/torture.json`. `make torture` runs this.
//!
//! `PRECAST_TORTURE_SCALE` (1 by default) scales every count; the file has the scale and the machine.

use std::{
    collections::BTreeMap,
    fs,
    process::Command,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use serde_json::{Value, json};

use precast::Store;

use crate::{
    attacks, build, crash, many, mapped, mutate, newer,
    only::Only,
    permissions, readonly, replay,
    scene::{self, Random},
    seeds, sound, spread,
};

/// Where every generator begins.
const SEED: u64 = 20_261_120;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/results/torture.json");

struct Report {
    scale: f64,
    parts: BTreeMap<String, Value>,
}

impl Report {
    fn count(&self, whole: u64) -> u64 {
        ((whole as f64 * self.scale) as u64).max(1)
    }

    fn add(&mut self, name: &str, seconds: f64, bad: &[String], values: &impl Serialize) {
        let mut values = serde_json::to_value(values).unwrap();
        values["date"] = json!(today());
        values["scale"] = json!(self.scale);
        values["bad"] = json!(bad.len());
        values["examples"] = json!(bad.iter().take(5).collect::<Vec<_>>());
        values["seconds"] = json!((seconds * 10.0).round() / 10.0);
        println!("{name}: {values}");
        self.parts.insert(name.to_owned(), values);
        self.save();
    }

    /// Returns the sum of a field over all parts.
    fn sum(&self, field: &str) -> u64 {
        let parts = self.parts.values();
        parts.filter_map(|part| part[field].as_u64()).sum()
    }

    /// Saved after every part, so that an interrupted run keeps its finished parts.
    fn save(&self) {
        let document = json!({
            "schema": 1,
            "command": "make torture",
            "machine": machine(),
            "versions": versions(),
            "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
            "seed": SEED,
            "jobs": spread::jobs(),
            "points": self.sum("points"),
            "states": self.sum("states"),
            "mutations": self.sum("mutations"),
            "bad": self.sum("bad"),
            "parts": self.parts,
        });
        let text = serde_json::to_string_pretty(&document).unwrap();
        fs::write(FILE, format!("{text}\n")).unwrap();
    }
}

/// Returns the date as `2026-11-21`.
pub fn today() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    first_line("date", &["-u", "-d", &format!("@{seconds}"), "+%F"])
}

pub fn machine() -> Value {
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text
            .lines()
            .find(|line| line.starts_with(name))
            .map(str::to_owned);
        let value = line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()));
        value.unwrap_or_default()
    };
    json!({
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": first_line("uname", &["-sr"]),
    })
}

pub fn versions() -> Value {
    json!({
        "precast": env!("CARGO_PKG_VERSION"),
        "rustc": first_line("rustc", &["--version"]),
        "sqlite": rusqlite::version(),
        "zstd": zstd::zstd_safe::version_string(),
    })
}

/// Returns the first line that a command prints; empty when there is no such command.
fn first_line(command: &str, args: &[&str]) -> String {
    let output = Command::new(command).args(args).output();
    let text = output.map_or_else(
        |_| String::new(),
        |o| String::from_utf8_lossy(&o.stdout).into_owned(),
    );
    text.lines().next().unwrap_or_default().to_owned()
}

type Part = (&'static str, fn(&mut Report));

/// The parts by the beginnings of their names in the file, the promise first.
const PARTS: &[Part] = &[
    ("1 kill at every", kills),
    ("1 power", power),
    ("1 kill of", killed_builds),
    ("2", mutations),
    ("3", failures),
    ("4", builders),
    ("5 delayed", delays),
    ("5 reads", reads),
    ("6 seeded", seeded),
    ("6 sound", sound_ones),
    ("7", immutable),
    ("8", read_only),
    ("9", newer_stores),
    ("26", mapped_weights),
    ("27", permissions_of_all),
    ("hostile", hostile),
];

/// Runs all parts, or the parts whose names begin with the words of `PRECAST_TORTURE_ONLY`, which replace their rows in
/// the file.
pub fn run() {
    let scale = std::env::var("PRECAST_TORTURE_SCALE").ok();
    let only = Only::asked_for();
    let mut report = Report {
        scale: scale.and_then(|text| text.parse().ok()).unwrap_or(1.0),
        parts: only.kept(FILE),
    };
    for (_, part) in PARTS.iter().filter(|(name, _)| only.has(name)) {
        part(&mut report);
    }
    assert_eq!(report.sum("bad"), 0, "see benches/results/torture.json");
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

/// Promises 1 and 9: `kill -9` of `precast build` at moments all over it.
fn killed_builds(report: &mut Report) {
    let start = Instant::now();
    let mut tried = crash::Tried::default();
    let calls = build::calls();
    let killed = build::kills(calls, report.count(250).min(calls), SEED, &mut tried);
    let counts =
        json!({ "calls": calls, "points": tried.points, "states": tried.states, "killed": killed });
    report.add(
        "1 kill of precast build",
        start.elapsed().as_secs_f64(),
        &tried.bad,
        &counts,
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
    let (_dir, path, _) = sound();
    let start = Instant::now();
    let swept = mutate::spread(&path, SEED, report.count(1_000_000), mutate::files);
    let bad = swept.bad.clone();
    report.add(
        "2 changes of objects and records",
        start.elapsed().as_secs_f64(),
        &bad,
        &swept,
    );
    let start = Instant::now();
    let swept = mutate::spread(&path, SEED, report.count(20_000), mutate::index);
    let bad = swept.bad.clone();
    report.add(
        "2 changes of the index",
        start.elapsed().as_secs_f64(),
        &bad,
        &swept,
    );
}

/// Promise 26.
fn mapped_weights(report: &mut Report) {
    let start = Instant::now();
    let swept = mapped::spread(SEED, report.count(20_000), report.count(6_000));
    let bad = swept.bad.clone();
    report.add(
        "26 mapped weights",
        start.elapsed().as_secs_f64(),
        &bad,
        &swept,
    );
}

/// Promise 27.
fn permissions_of_all(report: &mut Report) {
    let start = Instant::now();
    let tried = permissions::spread(SEED, report.count(20));
    let bad = tried.bad.clone();
    report.add(
        "27 permissions",
        start.elapsed().as_secs_f64(),
        &bad,
        &tried,
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

/// Promise 4.
fn builders(report: &mut Report) {
    let (processes, specs) = (report.count(64), report.count(100));
    let mut crowd = many::builders(processes, specs, 1_000, report.count(100), SEED);
    if crowd.begun == crowd.finished {
        crowd
            .bad
            .push("no owner was killed: nothing was replaced".to_owned());
    }
    let bad = crowd.bad.clone();
    report.add("4 builders of the same specs", crowd.seconds, &bad, &crowd);
}

/// Promise 5: a call that takes long, while another process builds or collects.
fn delays(report: &mut Report) {
    let start = Instant::now();
    let mut tried = crash::Tried::default();
    for name in ["build", "gc"] {
        let stride = (2.0 / report.scale).ceil() as u64;
        crash::Start::new(name).sweep_delayed(&["build", "gc"], stride, &mut tried);
    }
    let bad = tried.bad.clone();
    report.add(
        "5 delayed calls",
        start.elapsed().as_secs_f64(),
        &bad,
        &tried,
    );
}

/// Promise 5.
fn reads(report: &mut Report) {
    let reads = many::reads_under_gc(16, report.count(62_500), 20);
    let bad = reads.bad.clone();
    report.add("5 reads under gc", reads.seconds, &bad, &reads);
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
    let counts = json!({ "published": published });
    report.add(
        "7 writes to published files",
        start.elapsed().as_secs_f64(),
        &bad,
        &counts,
    );
}

/// Promise 6.
fn seeded(report: &mut Report) {
    let (_dir, path, scene) = sound();
    let start = Instant::now();
    let bad = spread::each(seeds::SEEDS, |seed| seeds::try_seed(&path, &scene, seed));
    let counts = json!({ "kinds": seeds::SEEDS.len() });
    report.add(
        "6 seeded defects",
        start.elapsed().as_secs_f64(),
        &bad,
        &counts,
    );
}

/// Hostile stores, one at a time: the cost of each is measured.
fn hostile(report: &mut Report) {
    let (_dir, path, scene) = sound();
    let start = Instant::now();
    let bad: Vec<String> = attacks::ATTACKS
        .iter()
        .filter_map(|attack| attacks::try_attack(&path, &scene, attack).err())
        .collect();
    let counts = json!({ "stores": attacks::ATTACKS.len() });
    report.add(
        "hostile stores",
        start.elapsed().as_secs_f64(),
        &bad,
        &counts,
    );
}

/// Promise 6: sound stores of all sizes raise no alarm, and their index comes back identical when it is deleted.
fn sound_ones(report: &mut Report) {
    let start = Instant::now();
    let rows = std::sync::atomic::AtomicU64::new(0);
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
        rows.fetch_add(count, std::sync::atomic::Ordering::Relaxed);
        alarms(&Store::open(&path).map_err(message)?)
    });
    let counts = json!({ "stores": stores.len(), "rows": rows.into_inner() });
    report.add(
        "6 sound stores, and their index deleted",
        start.elapsed().as_secs_f64(),
        &bad,
        &counts,
    );
}

/// Promise 9.
fn newer_stores(report: &mut Report) {
    let (_dir, path, scene) = sound();
    let start = Instant::now();
    let bad: Vec<String> = newer::KINDS
        .iter()
        .flat_map(|kind| newer::tried(&path, &scene, kind))
        .collect();
    let counts = json!({ "kinds": newer::KINDS.len(), "steps_each": newer::TRIED });
    report.add(
        "9 newer stores",
        start.elapsed().as_secs_f64(),
        &bad,
        &counts,
    );
}

/// Promise 8.
fn read_only(report: &mut Report) {
    let (_dir, path, scene) = sound();
    let start = Instant::now();
    let mut counts = json!({});
    let mut bad = Vec::new();
    for how in readonly::WAYS {
        match readonly::reads(&path, &scene.programs[0].id.hex(), how) {
            Ok((runs, calls)) => {
                counts[how] = json!({ "runs": runs, "write_class_calls": calls });
                if calls > 0 {
                    bad.push(format!("{how}: {calls} write-class calls"));
                }
            }
            Err(why) if why.starts_with("skipped") => counts[how] = json!(why),
            Err(why) => bad.push(format!("{how}: {why}")),
        }
    }
    report.add(
        "8 read-only stores",
        start.elapsed().as_secs_f64(),
        &bad,
        &counts,
    );
}
