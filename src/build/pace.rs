//! How long a build will still take: by what the same steps took in earlier builds, as receipts say, and else by what
//! steps of their kind took in this one.
//!
//! A guess, for people who wait. What is left is spread over the workers, captures over those that hold the model. Until
//! there is anything to go by, there is no guess.

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use crate::{
    Digest,
    plan::{Plan, State},
    spec::Spec,
    store::{Store, StoreError},
};

/// How many programs of a release stand for what was never built: a release may have thousands.
const SAMPLE: usize = 32;

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
    /// How many workers hold the model.
    pub capturers: usize,
}

/// What steps took, and those that are under way.
#[derive(Default)]
pub(super) struct Pace {
    kinds: HashMap<String, Kind>,
    running: HashMap<usize, (String, String, Instant)>,
}

impl Pace {
    /// Reads what those programs took in whose place the missing ones come; for what is new, a few of the last release.
    pub fn new(plan: &Plan, spec: &Spec, store: &Store) -> Result<Self, StoreError> {
        let mut pace = Self::default();
        let mut new = false;
        for item in plan.missing() {
            match &item.state {
                State::Miss {
                    before: Some(id), ..
                } => pace.read(id, Some(item.name(spec)), store)?,
                _ => new = true,
            }
        }
        let last = plan.release.iter().flat_map(|release| &release.programs);
        for id in last.take(if new { SAMPLE } else { 0 }) {
            pace.read(id, None, store)?;
        }
        Ok(pace)
    }

    /// Takes note of what a program took, by its own name where it has no other now.
    fn read(&mut self, id: &Digest, name: Option<String>, store: &Store) -> Result<(), StoreError> {
        let Some(program) = store.program(id)? else {
            return Ok(());
        };
        let own = || format!("{} {}", program.module, program.bucket());
        let name = name.unwrap_or_else(own);
        if let Some(seconds) = program.receipt["seconds"]["capture"].as_f64() {
            self.before("capture", name.clone(), seconds);
        }
        for step in &program.steps {
            let step_name = format!("{name} {}", step.name).trim_end().to_owned();
            if self.has("compile", &step_name) {
                continue;
            }
            let artifact = store.artifact(&step.artifact)?;
            let seconds = artifact.map_or(0.0, |artifact| artifact.compile_seconds());
            if seconds > 0.0 {
                self.before("compile", step_name, seconds);
            }
        }
        Ok(())
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
        let serial = serial / left.capturers.max(1) as f64;
        Some((all / workers.max(1) as f64).max(serial.max(longest) + last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing;

    fn left(captures: &[&str], compiles: &[&str], gates: usize) -> Left {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let captures: Vec<String> = names(captures);
        Left {
            captures: captures.into_iter().map(|name| (name, true)).collect(),
            brought: 1,
            compiles: names(compiles),
            gates,
            capturers: 1,
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
    fn what_a_program_took_is_read_from_its_records() {
        let (_dir, store) = testing::store();
        let mut artifact = testing::artifact(&store, "block");
        artifact.receipt = serde_json::json!({"seconds": {"lower": 1.0, "cpp": 2.0}});
        let artifact = store.put_artifact(&artifact).unwrap();
        let mut program = testing::program("m", 8, &[artifact.id]);
        program.receipt = serde_json::json!({"seconds": {"capture": 4.0}});
        let step = program.steps[0].name.clone();
        let program = store.put_program(&program).unwrap();
        let mut pace = Pace::default();
        pace.read(&program.id, None, &store).unwrap();
        let name = format!("{} {}", program.module, program.bucket());
        pace.read(&program.id, Some("other".into()), &store)
            .unwrap();
        pace.read(&Digest::of(b"gone"), None, &store).unwrap();
        for name in [name, "other".to_owned()] {
            assert_eq!(pace.of("capture", &name), Some(4.0));
            let step = format!("{name} {step}");
            assert!(pace.has("compile", step.trim_end()));
            assert_eq!(pace.of("compile", step.trim_end()), Some(3.0));
        }
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
        // Its own, less what went by since; the others took 8.
        assert!(seconds <= 30.0 && seconds > 8.0, "{seconds}");
    }
}
