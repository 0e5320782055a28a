//! The report of a torture suite, saved after every part. With `PRECAST_TORTURE_ONLY` only the parts whose names begin
//! with its words run, and replace their rows in the file. `PRECAST_TORTURE_SCALE` (1 by default) scales every count.
#![allow(dead_code, reason = "each target uses a part of it")]

use std::{collections::BTreeMap, fs, process::Command, time::Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Counts and figures by name, and failures.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    #[serde(flatten)]
    figures: Map<String, Value>,
    #[serde(default)]
    pub bad: Vec<String>,
}

impl Tally {
    /// Returns a tally whose counts of these names are zero.
    pub fn of<const N: usize>(names: [&str; N]) -> Self {
        let mut tally = Self::default();
        for name in names {
            tally.add(name, 0);
        }
        tally
    }

    /// Returns a tally of one count.
    pub fn one(name: &str, count: usize, bad: Vec<String>) -> Self {
        let mut tally = Self::default();
        tally.set(name, count);
        tally.bad = bad;
        tally
    }

    /// Fails where something is bad, and where a count is not above its number.
    #[track_caller]
    pub fn good(&self, above: &[(&str, u64)]) {
        assert_eq!(self.bad, [] as [String; 0]);
        for (name, number) in above {
            assert!(self.count(name) > *number, "{name}: {self:?}");
        }
    }

    pub fn figure(&self, name: &str) -> &Value {
        self.figures.get(name).unwrap_or(&Value::Null)
    }

    /// Returns a count; it is zero for an unknown name.
    pub fn count(&self, name: &str) -> u64 {
        self.figure(name).as_u64().unwrap_or(0)
    }

    pub fn add(&mut self, name: &str, more: u64) {
        self.set(name, self.count(name) + more);
    }

    pub fn set(&mut self, name: &str, figure: impl Into<Value>) {
        self.figures.insert(name.to_owned(), figure.into());
    }

    /// Adds a failure.
    pub fn fail(&mut self, why: impl Into<String>) {
        self.bad.push(why.into());
    }

    /// Adds the counts and failures of a part.
    pub fn merge(&mut self, part: Self) {
        for (name, figure) in part.figures {
            match figure.as_u64() {
                Some(count) => self.add(&name, count),
                None => self.set(&name, figure),
            }
        }
        self.bad.extend(part.bad);
    }
}

pub struct Report {
    pub scale: f64,
    file: &'static str,
    /// The fields that come before the parts.
    head: Map<String, Value>,
    /// The fields of parts that are added up.
    sums: &'static [&'static str],
    only: Option<String>,
    parts: BTreeMap<String, Value>,
    /// The number of failures in the parts that ran.
    bad: usize,
}

impl Report {
    /// Returns a report with the parts of an earlier run's file that do not run now.
    pub fn new(file: &'static str, head: Value, sums: &'static [&'static str]) -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let before = fs::read_to_string(file).unwrap_or_default();
        let before: Value = serde_json::from_str(&before).unwrap_or_default();
        let Value::Object(head) = head else {
            panic!("no object: {head}")
        };
        let mut report = Self {
            scale: set("PRECAST_TORTURE_SCALE")
                .and_then(|text| text.parse().ok())
                .unwrap_or(1.0),
            file,
            head,
            sums,
            only: set("PRECAST_TORTURE_ONLY"),
            parts: serde_json::from_value(before["parts"].clone()).unwrap_or_default(),
            bad: 0,
        };
        let mut kept = std::mem::take(&mut report.parts);
        kept.retain(|name, _| !report.has(name));
        report.parts = kept;
        report
    }

    /// Returns a scaled count.
    pub fn count(&self, whole: u64) -> u64 {
        ((whole as f64 * self.scale) as u64).max(1)
    }

    /// Returns whether a part runs.
    fn has(&self, name: &str) -> bool {
        let begins = |only: &str| only.split(' ').zip(name.split(' ')).all(|(a, b)| a == b);
        self.only.as_deref().is_none_or(begins)
    }

    /// Runs one part and keeps its outcome and its failures.
    pub fn part(&mut self, name: &str, work: impl FnOnce(&Self) -> Tally) {
        if !self.has(name) {
            return;
        }
        let begin = Instant::now();
        let Tally { figures, bad } = work(self);
        let mut outcome = Value::Object(figures);
        outcome["date"] = json!(printed("date", &["-u", "+%F"]));
        outcome["commit"] = json!(printed("git", &["rev-parse", "--short", "HEAD"]));
        outcome["scale"] = json!(self.scale);
        outcome["bad"] = json!(bad.len());
        outcome["examples"] = json!(bad.iter().take(5).collect::<Vec<_>>());
        outcome["seconds"] = json!((begin.elapsed().as_secs_f64() * 10.0).round() / 10.0);
        self.bad += bad.len();
        self.keep(name, outcome);
    }

    /// Notes a part that can't run here.
    pub fn skip(&mut self, name: &str, why: &str) {
        if self.has(name) {
            self.keep(name, json!({ "skipped": why }));
        }
    }

    fn keep(&mut self, name: &str, outcome: Value) {
        println!("{name}: {outcome}");
        self.parts.insert(name.to_owned(), outcome);
        let mut document = self.head.clone();
        for field in self.sums {
            let counts = self.parts.values().filter_map(|part| part[field].as_u64());
            document.insert((*field).to_owned(), json!(counts.sum::<u64>()));
        }
        document.insert("parts".to_owned(), json!(self.parts));
        write(self.file, &document.into());
    }

    /// Fails where a part that ran had a failure.
    pub fn end(&self) {
        assert_eq!(self.bad, 0, "see {}", self.file);
    }
}

/// Writes a document.
pub fn write(file: &str, document: &Value) {
    let text = serde_json::to_string_pretty(document).unwrap();
    fs::write(file, format!("{text}\n")).unwrap();
}

/// Returns the first line of a command's output; none where the command fails.
pub fn printed(command: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(command).args(args).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().next().filter(|line| !line.is_empty());
    line.filter(|_| output.status.success()).map(str::to_owned)
}

pub fn machine() -> Value {
    let field = |file: &str, name: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
    };
    json!({
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": printed("uname", &["-sr"]),
    })
}

pub fn profile() -> &'static str {
    if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    }
}

/// Returns the versions of the store's libraries.
pub fn versions() -> Value {
    json!({
        "precast": env!("CARGO_PKG_VERSION"),
        "rustc": printed("rustc", &["--version"]),
        "sqlite": rusqlite::version(),
        "zstd": zstd::zstd_safe::version_string(),
    })
}
