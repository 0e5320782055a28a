//! How long a build will still take: by what the same steps took in earlier builds, as receipts say, and else by what
//! steps of their kind took in this one.
//!
//! A guess, for people who wait. What is left is spread over the workers, but captures run one after the other. Until
//! there is anything to go by, there is no guess.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Instant,
};

use crate::{
    plan::Plan,
    store::{Store, StoreError},
};

/// What steps of one kind took.
#[derive(Default)]
struct Kind {
    /// Name of a step -> seconds in an earlier build.
    before: BTreeMap<String, f64>,
    /// Seconds of those of this build, and how many they are.
    now: (f64, u32),
}

impl Kind {
    fn mean(&self) -> Option<f64> {
        match (self.now, self.before.len()) {
            ((seconds, count @ 1..), _) => Some(seconds / f64::from(count)),
            (_, 0) => None,
            (_, count) => Some(self.before.values().sum::<f64>() / count as f64),
        }
    }

    fn of(&self, name: &str) -> Option<f64> {
        self.before.get(name).copied().or_else(|| self.mean())
    }

    /// Returns what all steps of a program took together, by the names that they had.
    fn of_program(&self, name: &str) -> Option<f64> {
        let own = |step: &str| {
            step.strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
        };
        let own = self.before.iter().filter(|(step, _)| own(step));
        own.map(|(_, seconds)| *seconds).reduce(|a, b| a + b)
    }
}

/// What is left to do, besides what is being done.
pub(super) struct Left {
    /// Names of programs to capture, and whether they are compiled.
    pub captures: Vec<(String, bool)>,
    /// How many artifacts such a program is expected to lack.
    pub brought: usize,
    pub compiles: Vec<String>,
    pub gates: usize,
}

/// What steps took, and those that are under way.
#[derive(Default)]
pub(super) struct Pace {
    kinds: HashMap<String, Kind>,
    running: HashMap<usize, (String, String, Instant)>,
}

impl Pace {
    /// Reads what the last release of the model took.
    pub fn new(plan: &Plan, store: &Store) -> Result<Self, StoreError> {
        let mut pace = Self::default();
        let wanted: HashSet<String> = plan.items.iter().map(|item| item.form.name()).collect();
        let last = plan.release.iter().flat_map(|release| &release.programs);
        for id in last {
            let Some(program) = store.program(id)? else {
                continue;
            };
            let bucket = program.bucket();
            if !wanted.contains(&bucket) {
                continue;
            }
            let name = format!("{} {bucket}", program.module);
            if let Some(seconds) = program.receipt["seconds"]["capture"].as_f64() {
                pace.before("capture", name.clone(), seconds);
            }
            for step in &program.steps {
                let artifact = store.artifact(&step.artifact)?;
                let seconds = artifact.map_or(0.0, |artifact| artifact.compile_seconds());
                let step = format!("{name} {}", step.name).trim_end().to_owned();
                if seconds > 0.0 && !pace.has("compile", &step) {
                    pace.before("compile", step, seconds);
                }
            }
        }
        Ok(pace)
    }

    fn before(&mut self, kind: &str, name: String, seconds: f64) {
        let kind = self.kinds.entry(kind.to_owned()).or_default();
        kind.before.insert(name, seconds);
    }

    fn has(&self, kind: &str, name: &str) -> bool {
        let kind = self.kinds.get(kind);
        kind.is_some_and(|kind| kind.before.contains_key(name))
    }

    pub fn begin(&mut self, worker: usize, kind: &str, name: &str) {
        let running = (kind.to_owned(), name.to_owned(), Instant::now());
        self.running.insert(worker, running);
    }

    pub fn end(&mut self, worker: usize, kind: &str, seconds: f64) {
        self.running.remove(&worker);
        let now = &mut self.kinds.entry(kind.to_owned()).or_default().now;
        *now = (now.0 + seconds, now.1 + 1);
    }

    fn of(&self, kind: &str, name: &str) -> Option<f64> {
        self.kinds.get(kind)?.of(name)
    }

    /// Returns the seconds until everything is done by so many workers, where there is anything to go by.
    pub fn left(&self, left: &Left, workers: usize) -> Option<f64> {
        let mut serial = 0.0;
        let mut all = 0.0;
        let mut longest: f64 = 0.0;
        for (kind, name, since) in self.running.values() {
            let rest = (self.of(kind, name)? - since.elapsed().as_secs_f64()).max(0.0);
            match kind.as_str() {
                "capture" => serial += rest,
                _ => longest = longest.max(rest),
            }
            all += rest;
        }
        for (name, compiled) in &left.captures {
            let seconds = self.of("capture", name)?;
            serial += seconds;
            all += seconds;
            if *compiled {
                let earlier = self.kinds.get("compile").and_then(|k| k.of_program(name));
                all += match earlier {
                    Some(seconds) => seconds,
                    None if left.brought == 0 => 0.0,
                    None => self.of("compile", name)? * left.brought as f64,
                };
            }
        }
        for name in &left.compiles {
            let seconds = self.of("compile", name)?;
            longest = longest.max(seconds);
            all += seconds;
        }
        let gate = self.of("gate", "").unwrap_or(0.0);
        let gates = left.gates + left.captures.len();
        all += gate * gates as f64;
        let last = if gates > 0 { gate } else { 0.0 };
        Some((all / workers.max(1) as f64).max(serial.max(longest) + last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(captures: &[&str], compiles: &[&str], gates: usize) -> Left {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let captures: Vec<String> = names(captures);
        Left {
            captures: captures.into_iter().map(|name| (name, true)).collect(),
            brought: 1,
            compiles: names(compiles),
            gates,
        }
    }

    #[test]
    fn nothing_to_go_by_is_no_guess() {
        let mut pace = Pace::default();
        assert_eq!(pace.left(&left(&["a b=1"], &[], 0), 2), None);
        pace.end(0, "capture", 4.0);
        assert_eq!(pace.left(&left(&["a b=1"], &[], 0), 2), None, "no compile");
        pace.end(1, "compile", 10.0);
        // 4 s of capture and 10 s of compile by two workers; by one it is their sum.
        assert_eq!(pace.left(&left(&["a b=1"], &[], 0), 2), Some(7.0));
        assert_eq!(pace.left(&left(&["a b=1"], &[], 0), 1), Some(14.0));
        // However many workers there are, the longest step takes its time.
        assert_eq!(pace.left(&left(&[], &["a b=1 main"], 1), 8), Some(10.0));
    }

    #[test]
    fn an_earlier_build_knows_each_step() {
        let mut pace = Pace::default();
        pace.before("capture", "a b=1".into(), 2.0);
        pace.before("compile", "a b=1 main".into(), 30.0);
        pace.before("compile", "a b=16 main".into(), 50.0);
        assert_eq!(pace.left(&left(&["a b=1"], &[], 0), 1), Some(32.0));
        assert_eq!(pace.left(&left(&[], &["a b=16 main"], 0), 4), Some(50.0));
        // A step that is new is taken for one like the others, of this build where there are any.
        assert_eq!(pace.left(&left(&[], &["c main"], 0), 4), Some(40.0));
        pace.end(0, "compile", 8.0);
        assert_eq!(pace.left(&left(&[], &["c main"], 0), 4), Some(8.0));
        pace.begin(0, "compile", "a b=1 main");
        let seconds = pace.left(&left(&[], &[], 0), 4).unwrap();
        assert!((29.0..=30.0).contains(&seconds), "{seconds}");
    }
}
