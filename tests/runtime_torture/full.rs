//! The whole figures of PROMISES 15 to 25, written to `benches/results/torture-runtime.json`. `make torture-runtime` runs this.
//!
//! `PRECAST_TORTURE_SCALE` (1 by default) scales every count; the file says which it was. With `PRECAST_TORTURE_ONLY` only
//! the parts whose names begin with its words are run, and replace their rows in the file.

use std::{collections::BTreeMap, process::Command, time::Instant};

use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    SEED, bad_calls, crowds, exits, fake, loading, memory, only::Only, padding, races, real, shim,
    values,
};

const FILE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/benches/results/torture-runtime.json"
);

struct Report {
    scale: f64,
    only: Only,
    parts: BTreeMap<String, Value>,
    /// The number of failures in the parts that ran.
    bad: usize,
}

impl Report {
    fn count(&self, whole: u64) -> u64 {
        ((whole as f64 * self.scale) as u64).max(1)
    }

    /// Runs one part and keeps its outcome and its failures.
    fn part<T: Serialize>(
        &mut self,
        name: &str,
        seed: Option<u64>,
        work: impl FnOnce() -> (T, Vec<String>),
    ) {
        if !self.only.has(name) {
            return;
        }
        let begin = Instant::now();
        let (outcome, bad) = work();
        let mut outcome = serde_json::to_value(outcome).unwrap();
        outcome["date"] = json!(printed("date", &["-u", "+%F"]));
        outcome["commit"] = json!(printed("git", &["rev-parse", "--short", "HEAD"]));
        if let Some(seed) = seed {
            outcome["seed"] = json!(seed);
        }
        outcome["scale"] = json!(self.scale);
        outcome["bad"] = json!(bad.len());
        if !bad.is_empty() {
            outcome["examples"] = json!(bad.iter().take(5).collect::<Vec<_>>());
        }
        outcome["seconds"] = json!((begin.elapsed().as_secs_f64() * 10.0).round() / 10.0);
        println!("{name}: {outcome}");
        self.bad += bad.len();
        self.parts.insert(name.to_owned(), outcome);
        self.save();
    }

    fn skip(&mut self, name: &str, why: &str) {
        if !self.only.has(name) {
            return;
        }
        println!("{name}: skipped: {why}");
        self.parts
            .insert(name.to_owned(), json!({ "skipped": why }));
        self.save();
    }

    /// Saved after every part, so that an interrupted run keeps its finished parts.
    fn save(&self) {
        let bad = |part: &Value| part["bad"].as_u64().unwrap_or(0);
        let document = json!({
            "schema": 1,
            "command": "make torture-runtime",
            "machine": {
                "cpu": cpu(),
                "cores": std::thread::available_parallelism().map_or(1, usize::from),
                "kernel": printed("uname", &["-sr"]),
                "torch": fake::target().torch,
                "compiler": printed("g++", &["-dumpfullversion"]),
            },
            "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
            "bad": self.parts.values().map(bad).sum::<u64>(),
            "parts": self.parts,
        });
        let text = serde_json::to_string_pretty(&document).unwrap();
        std::fs::write(FILE, format!("{text}\n")).unwrap();
    }
}

fn printed(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

fn cpu() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([':', ' ', '\t']).to_owned())
}

/// Splits an outcome from its failures.
macro_rules! outcome {
    ($outcome:expr) => {{
        let mut outcome = $outcome;
        let bad = std::mem::take(&mut outcome.bad);
        (outcome, bad)
    }};
}

pub fn run() {
    let scale = std::env::var("PRECAST_TORTURE_SCALE")
        .ok()
        .and_then(|text| text.parse().ok());
    let only = Only::asked_for();
    let mut report = Report {
        scale: scale.unwrap_or(1.0),
        parts: only.kept(FILE),
        only,
        bad: 0,
    };
    let report = &mut report;
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;

    let count = report.count(100_000);
    report.part("15 bad calls", Some(SEED), || {
        outcome!(bad_calls::run(SEED, count))
    });
    let count = report.count(100_000);
    match real::store().filter(values::there) {
        Some(store) => report.part("15 hostile values", Some(SEED), || {
            outcome!(values::run(&store, count, SEED))
        }),
        None => report.skip(
            "15 hostile values",
            "run `cargo test --test numerics` first",
        ),
    }
    let count = report.count(1_000_000);
    report.part("16 mixed calls", Some(SEED), || {
        outcome!(crowds::mixed(&[4, 8, 16, 32, 64], count, SEED))
    });
    let count = report.count(10_000);
    report.part("16 fresh containers", Some(SEED), || {
        outcome!(crowds::fresh(count, SEED))
    });
    report.part("17 padding, fake artifacts", None, || {
        outcome!(padding::fakes(&[
            (1, 1),
            (2, 3),
            (4, 4),
            (8, 4),
            (5, 7),
            (8, 16)
        ]))
    });
    let count = report.count(100_000);
    report.part("17 padding, several callers", None, || {
        outcome!(padding::threads(count))
    });
    match real::store() {
        Some(store) => report.part("17 padding, real artifacts", None, || {
            outcome!(padding::real(&store))
        }),
        None => report.skip(
            "17 padding, real artifacts",
            "run `cargo test --test numerics` first",
        ),
    }
    report.part("18 wrong hosts", None, || outcome!(loading::hosts()));
    let count = report.count(100_000);
    report.part("19 swap races", Some(SEED), || {
        outcome!(races::run(count, cores.div_ceil(2), SEED))
    });
    let count = report.count(5_000);
    report.part("20 artifacts that do not load", Some(SEED), || {
        outcome!(loading::broken(count, SEED))
    });
    let count = report.count(200_000);
    report.part("21 outputs are the caller's", Some(SEED), || {
        outcome!(crowds::outputs(count, SEED))
    });
    report.part("22 weights once", None, || {
        outcome!(memory::sharing(8, 256 << 20))
    });
    let count = report.count(100);
    report.part("23 no memory", None, || outcome!(memory::exhaustion(count)));
    let count = report.count(1_000_000);
    report.part("24 leaks", None, || outcome!(memory::leaks(count)));
    let count = report.count(1_000);
    report.part("24 exits in mid-work", Some(SEED), || {
        outcome!(exits::run(count, cores, SEED))
    });
    let count = report.count(1_000);
    report.part("25 hot swaps", None, || outcome!(crowds::swaps(count, 4)));
    let count = report.count(40_000);
    report.part("the shim under sanitizers", None, || {
        outcome!(shim::run(count))
    });
    let count = report.count(200);
    report.part("uploads under sanitizers", None, || {
        outcome!(shim::uploads(count))
    });
    assert_eq!(report.bad, 0, "see benches/results/torture-runtime.json");
}
