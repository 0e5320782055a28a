//! Compiles a program in several ways and keeps the fastest one that passes its gate.
//!
//! A way is an option set for all segments of a program. `--tune` tries a few beside the module's own, and a `mode` that
//! autotunes is one of two ways: torch picks kernels by timing each alone, which is no measure of the program (on an H200
//! such a choice made a whole block a fifth slower), so what it picks has to beat `mode = "default"`.
//!
//! | way | tried |
//! |---|---|
//! | the module's own settings | always |
//! | `mode=default` | where the module's mode autotunes |
//! | `coordinate_descent_tuning=true`, `epilogue_fusion=false`, `max_autotune=true` | by `--tune`, where the settings do not say it already |
//! | `layout_optimization=false` | by `--tune`, where the graph has convolutions |
//! | `freezing=true` | refused by name: it would keep values of weights in the artifact |
//!
//! Every way has artifacts of its own, with keys like any other: a segment is compiled once for an option set, whoever
//! asks. Each way passes the gate in a process of its own; what fails to compile or to pass, crashes or hangs is refused
//! with its reason, and the program fails only when nothing is left. Those that pass are then measured by turns, as whole
//! programs and as they will run, in one process and while the build does nothing else. The first way is kept unless another is faster by more than [`GAIN`]
//! and in so many rounds that chance would hardly have it so ([`merit`]): anything less is noise, and a choice that flips from
//! build to build explains nothing. The table goes into the program's
//! receipt as `tuned`.
//!
//! **Keys.** What is chosen depends on a measurement, so it can't be part of a name that is known before. A tuned program's
//! request key says that it is tuned, and nothing of the choice; the artifact keys it lists say which options were chosen.
//! A plain build takes the tuned program where the newest release does not have the untuned one, so it does not undo what
//! `--tune` did; `--tune` finds it too, and tunes nothing again. When only names or sources changed and every way would have the same artifacts as
//! before, the earlier choice and its table are taken over, by a plain build too.

use serde_json::{Value, json};

use super::{
    BuildError,
    gate::{self, Candidate},
    jobs::{Job, Shared, Work},
    merit,
    progress::Event,
    protocol::{Captured, Segment},
};
use crate::{
    Digest,
    plan::{ArtifactKey, Item, Known, State},
    record::Step,
    spec::{Compile, Mode, compile::Options},
    store::{Store, StoreError},
};

/// The share of the first way's latency that another must stay below.
pub(super) const GAIN: f64 = 0.98;

/// What a program can be compiled with.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Set {
    pub mode: Mode,
    pub options: Options,
    /// What the table calls it: how it differs from the module's own settings.
    pub name: String,
    /// Why it is not even tried.
    pub refused: Option<String>,
}

/// An option set for one program, and what came of it so far.
#[derive(Clone, Debug)]
pub(super) struct Way {
    pub set: Set,
    /// Key of each segment's artifact.
    pub keys: Vec<Digest>,
    pub refused: Option<String>,
}

impl Way {
    /// Returns the name to tell a task of it with, where there are several.
    pub fn of(&self, program: &str, ways: usize) -> String {
        match ways {
            1 => program.to_owned(),
            _ => format!("{program} [{}]", self.set.name),
        }
    }
}

/// Returns the option sets to compile a program with; the first is kept unless another is faster.
///
/// `all`: as `--tune` says. `convolves`: whether a segment has a convolution.
pub(super) fn sets(settings: &Compile, all: bool, convolves: bool) -> Vec<Set> {
    let mode = settings.mode;
    let own = Set {
        mode,
        options: settings.options.clone(),
        name: std::iter::once(format!("mode={}", mode.name()))
            .chain(settings.options.iter().map(option))
            .collect::<Vec<_>>()
            .join(" "),
        refused: None,
    };
    let mut sets = Vec::new();
    // Without a gate there is nothing to choose by.
    if !settings.healthcheck {
        return vec![own];
    }
    if mode.autotunes() {
        sets.push(Set {
            mode: Mode::Default,
            name: "mode=default".to_owned(),
            ..own.clone()
        });
    }
    sets.push(own.clone());
    let implied: &[&str] = match mode.autotunes() {
        true => &["coordinate_descent_tuning", "max_autotune"],
        false => &[],
    };
    let tried = [
        ("coordinate_descent_tuning", true, true),
        ("epilogue_fusion", false, true),
        ("max_autotune", true, true),
        ("layout_optimization", false, convolves),
        ("freezing", true, true),
    ];
    for (key, value, applies) in tried {
        let says = settings.options.contains_key(key) || implied.contains(&key);
        if !all || !applies || says {
            continue;
        }
        let mut options = settings.options.clone();
        options.insert(key.to_owned(), value.into());
        let why =
            "it keeps values of weights in the artifact, and weights are bound when it is loaded";
        sets.push(Set {
            mode,
            options,
            name: format!("{key}={value}"),
            refused: (key == "freezing").then(|| why.to_owned()),
        });
    }
    sets
}

fn option((key, value): (&String, &Value)) -> String {
    format!("{key}={value}")
}

impl Set {
    /// Returns the key of a segment that is compiled with it, and its explanation.
    pub fn key(&self, item: &Item, segment: &Segment, known: &Known) -> (Digest, Value) {
        let key = ArtifactKey {
            graph: &Digest::of(segment.graph.as_bytes()),
            inputs: &segment.inputs,
            outputs: &segment.outputs,
            constants: &segment.constants,
            backend: item.settings.compile.backend,
            mode: self.mode,
            options: &self.options,
            passes: &[],
            target: &known.target,
        };
        key.explained()
    }
}

/// What passed its gate.
struct Passed {
    way: usize,
    steps: Vec<Step>,
    report: Value,
}

/// A program that passed its gate.
pub(super) struct Judged {
    pub steps: Vec<Step>,
    pub report: Value,
    /// A row for each way; empty where there is only one.
    pub tuned: Vec<Value>,
}

impl Shared<'_> {
    /// Returns the ways to make a program; `all`: as `--tune` says.
    pub(super) fn ways(
        &self,
        item: &Item,
        segments: &[Segment],
        known: &Known,
        all: bool,
    ) -> Vec<Way> {
        let convolves = segments.iter().any(|s| s.graph.contains("convolution"));
        let mut sets = sets(&item.settings.compile, all, convolves);
        if segments.is_empty() {
            sets.truncate(1);
        }
        let way = |set: Set| Way {
            keys: (segments.iter())
                .map(|segment| set.key(item, segment, known).0)
                .collect(),
            refused: set.refused.clone(),
            set,
        };
        sets.into_iter().map(way).collect()
    }

    /// Returns the way in which what stood in a program's place was fastest, and which program that is: where every way
    /// would have the same artifacts as then, and those of this one are there.
    pub(super) fn chosen_before(
        &self,
        job: &Job<'_>,
        captured: &Captured,
        known: &Known,
    ) -> Result<Option<(Digest, Way)>, BuildError> {
        let store = self.options.store;
        let before = match &job.item.state {
            State::Miss {
                before: Some(before),
                ..
            } => store.program(before)?,
            _ => None,
        };
        let Some(before) = before else {
            return Ok(None);
        };
        let rows = before.receipt["tuned"].as_array();
        let rows: Vec<&Value> = rows.into_iter().flatten().collect();
        // A plain build takes over what `--tune` chose too.
        let mut tried = [true, false].into_iter();
        let ways = tried.find_map(|all| {
            let ways = self.ways(job.item, &captured.segments, known, all);
            let names = ways.iter().map(|way| Some(way.set.name.as_str()));
            let same = names.eq(rows.iter().map(|row| row["options"].as_str()));
            (same && (all || job.request["tuned"] != true)).then_some(ways)
        });
        let chosen = rows.iter().position(|row| row["chosen"] == true);
        let Some(way) = ways
            .zip(chosen)
            .and_then(|(ways, row)| ways.into_iter().nth(row))
        else {
            return Ok(None);
        };
        let called = before.steps.iter().map(|step| Some(step.artifact));
        let calls = captured.steps.iter();
        if !called.eq(calls.map(|step| way.keys.get(step.segment).copied())) {
            return Ok(None);
        }
        for key in &way.keys {
            if !store.keep_artifact(key)? {
                return Ok(None);
            }
        }
        Ok(Some((before.id, way)))
    }

    /// Gates a program in every way that is left of it, and returns it in the best one. `steps` makes the steps of a way
    /// out of its artifacts.
    pub(super) fn judge(
        &self,
        number: usize,
        (module, bucket): (&str, &str),
        name: &str,
        mut candidate: Candidate,
        ways: Vec<Way>,
        steps: &dyn Fn(&[Digest]) -> Vec<Step>,
    ) -> Result<Judged, BuildError> {
        let several = ways.len() > 1;
        let mut rows = Vec::new();
        let mut passed: Vec<Passed> = Vec::new();
        let mut failed = None;
        for (index, way) in ways.iter().enumerate() {
            let mut row = json!({
                "options": way.set.name, "seconds": seconds(self.options.store, &way.keys)?, "latency": null,
                "max_abs": null, "chosen": false, "refused": null,
            });
            let verdict = match &way.refused {
                Some(why) => Err(why.clone()),
                None => {
                    candidate.program.steps = steps(&way.keys);
                    match self.gate_one(number, Work::Gate, &way.of(name, ways.len()), &candidate) {
                        Ok(mut report) => {
                            let measured = report.clone();
                            merit::put(&mut report, &measured, 0, false);
                            Ok(report)
                        }
                        Err(error) if error.ends_build() || !several => return Err(error),
                        Err(error) => {
                            let why = error.to_string();
                            failed.get_or_insert(error);
                            Err(why)
                        }
                    }
                }
            };
            // The first may be for exact sizes only; the others are no worse than it.
            let verdict = verdict.and_then(|report| match report["padding"]["refused"].as_str() {
                Some(why) if index > 0 => Err(why.to_owned()),
                _ => Ok(report),
            });
            match verdict {
                Ok(report) => {
                    row["latency"] = micros(&report["artifact_us"]);
                    row["max_abs"] = worst(&report);
                    passed.push(Passed {
                        way: index,
                        steps: std::mem::take(&mut candidate.program.steps),
                        report,
                    });
                }
                Err(why) => row["refused"] = why.into(),
            }
            rows.push(row);
        }
        let best = match &passed[..] {
            [] => {
                let nothing = || BuildError::Gate {
                    message: "no option set could be compiled".to_owned(),
                    log: String::new(),
                };
                return Err(failed.unwrap_or_else(nothing));
            }
            [_] => 0,
            _ => self.race(number, name, candidate, &mut passed, &mut rows)?,
        };
        let best = passed.swap_remove(best);
        if !several {
            rows.clear();
        } else {
            rows[best.way]["chosen"] = true.into();
            self.progress.event(&Event::Tuned {
                module,
                bucket,
                tried: &rows,
            });
        }
        Ok(Judged {
            steps: best.steps,
            report: best.report,
            tuned: rows,
        })
    }

    pub(super) fn gate_one(
        &self,
        number: usize,
        work: Work,
        name: &str,
        candidate: &Candidate,
    ) -> Result<Value, BuildError> {
        let (verdict, _) = self.told(number, work, name, || {
            gate::in_child(
                &self.options.gate,
                candidate,
                &self.crew.limits,
                self.limit(gate::LIMIT),
                &self.crew.stop,
            )
        });
        verdict
    }

    /// Measures what passed by turns, and returns which is the best.
    fn race(
        &self,
        number: usize,
        name: &str,
        mut candidate: Candidate,
        passed: &mut [Passed],
        rows: &mut [Value],
    ) -> Result<usize, BuildError> {
        candidate.alone = true;
        candidate.program.steps.clone_from(&passed[0].steps);
        candidate.rivals = passed[1..]
            .iter()
            .map(|rival| rival.steps.clone())
            .collect();
        let report = match self.gate_one(number, Work::Measure, name, &candidate) {
            Ok(report) => report,
            Err(error) if error.ends_build() => return Err(error),
            // Each was measured alone, which is no reason to choose another than the first.
            Err(_) => return Ok(0),
        };
        let rivals = report["rivals_us"].as_array().cloned().unwrap_or_default();
        let all: Vec<Value> = [report["artifact_us"].clone()]
            .into_iter()
            .chain(rivals)
            .collect();
        for (index, (one, taken)) in passed.iter_mut().zip(&all).enumerate() {
            rows[one.way]["latency"] = micros(taken);
            merit::put(&mut one.report, &report, index, true);
        }
        let runs = report["artifact_runs"].as_u64().unwrap_or(0);
        let wins = report["rivals_wins"].as_array();
        let wins = wins
            .into_iter()
            .flatten()
            .map(|wins| wins.as_u64().unwrap_or(0));
        // The first is to be beaten, where it is there.
        let clear: Vec<bool> = std::iter::once(true)
            .chain(wins.map(|wins| passed[0].way != 0 || merit::by_merit(wins, runs)))
            .collect();
        let all: Vec<f64> = all.iter().filter_map(Value::as_f64).collect();
        Ok(fastest(&all, &clear, passed[0].way == 0))
    }
}

/// Returns the least of `latencies` among those that are `clear`, or the first where that one is to be beaten and none is
/// less by enough.
fn fastest(latencies: &[f64], clear: &[bool], first: bool) -> usize {
    let left = (0..latencies.len()).filter(|index| clear.get(*index) == Some(&true));
    let least = left.min_by(|a, b| latencies[*a].total_cmp(&latencies[*b]));
    match least {
        Some(least) if !first || latencies[least] < latencies[0] * GAIN => least,
        _ => 0,
    }
}

/// Returns what compiling the artifacts of a way took, each counted once; none where one of them is not there.
fn seconds(store: &Store, keys: &[Digest]) -> Result<Option<f64>, StoreError> {
    let mut total = 0.0;
    for (index, key) in keys.iter().enumerate() {
        if keys[..index].contains(key) {
            continue;
        }
        let Some(artifact) = store.artifact(key)? else {
            return Ok(None);
        };
        total += artifact.compile_seconds();
    }
    Ok((!keys.is_empty()).then_some((total * 1e4).round() / 1e4))
}

fn micros(value: &Value) -> Value {
    // As the gate rounds it.
    let seconds = |micros: f64| (micros * 10.0).round() / 1e7;
    value.as_f64().map(seconds).into()
}

/// Returns the largest absolute error of a gate's report.
fn worst(report: &Value) -> Value {
    let outputs = report["outputs"].as_array();
    let errors = outputs
        .into_iter()
        .flatten()
        .filter_map(|row| row["max_abs"].as_f64());
    errors.reduce(f64::max).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(settings: &Compile, all: bool, convolves: bool) -> Vec<String> {
        let told = |set: Set| match set.refused {
            Some(_) => format!("{} (refused)", set.name),
            None => set.name,
        };
        sets(settings, all, convolves)
            .into_iter()
            .map(told)
            .collect()
    }

    #[test]
    fn a_plain_program_has_one_way_and_a_mode_that_autotunes_has_two() {
        let plain = Compile::default();
        assert_eq!(names(&plain, false, true), ["mode=default"]);
        let auto = Compile {
            mode: Mode::MaxAutotune,
            ..plain.clone()
        };
        // What is kept unless it is beaten comes first.
        assert_eq!(
            names(&auto, false, true),
            ["mode=default", "mode=max-autotune"]
        );
        let unchecked = Compile {
            healthcheck: false,
            ..auto
        };
        assert_eq!(names(&unchecked, false, true), ["mode=max-autotune"]);
    }

    #[test]
    fn tuning_tries_what_the_settings_do_not_say_already() {
        insta::assert_snapshot!(names(&Compile::default(), true, false).join(", "), @"mode=default, coordinate_descent_tuning=true, epilogue_fusion=false, max_autotune=true, freezing=true (refused)");
        let mut says = Compile {
            mode: Mode::MaxAutotuneNoCudagraphs,
            ..Compile::default()
        };
        says.options.insert("epilogue_fusion".into(), false.into());
        insta::assert_snapshot!(names(&says, true, true).join(", "), @"mode=default, mode=max-autotune-no-cudagraphs epilogue_fusion=false, layout_optimization=false, freezing=true (refused)");
        let sets = sets(&says, true, true);
        assert_eq!(
            sets[2].options.len(),
            2,
            "what the spec says stays: {sets:?}"
        );
    }

    #[test]
    fn noise_is_no_reason_to_choose_another() {
        let all = [true; 3];
        assert_eq!(fastest(&[100.0, 99.0, 130.0], &all, true), 0);
        assert_eq!(fastest(&[100.0, 99.0, 97.0], &all, true), 2);
        assert_eq!(fastest(&[100.0, 97.0, 90.0], &[true, true, false], true), 1);
        assert_eq!(fastest(&[100.0, 99.0, 130.0], &all, false), 1);
        assert_eq!(fastest(&[], &[], false), 0);
    }
}
