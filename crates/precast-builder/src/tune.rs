//! Gates the candidates of a program and keeps the fastest one that passes.
//!
//! A [candidate](super::candidates) is an option set for all segments of a program. `--tune` adds a few to the module's own.
//! A `mode` that autotunes has two candidates. Torch autotunes each kernel alone, which does not measure the program (on an
//! H200 such a choice made a whole block a fifth slower), so its choice competes with `mode = "default"`.
//!
//! Every candidate has artifacts of its own, with ordinary keys: a segment is compiled once per option set. Each candidate
//! is gated in a process of its own. A candidate that fails to compile, fails its gate, crashes or hangs is refused with the
//! reason. The program fails only if all are refused. The others are then measured in alternating calls, as whole programs,
//! in one process and with no other task running.
//!
//! The first candidate is kept unless another one is faster by more than [`GAIN`], by a [sign test](super::sign_test).
//! A smaller difference is noise, and the choice would change from build to build. The table goes into the program's receipt
//! as `tuned`.

use precast_store::{
    Digest, Store, StoreError,
    record::{
        Step, Tried,
        receipt::{Gate, Other},
    },
};

use super::{
    BuildError,
    gate::{self, GateProcess, GateRequest, candidates::Candidate, sign_test},
    progress::Event,
    work::{Action, Work},
};

/// The share of the first candidate's latency that another must stay below.
const GAIN: f64 = 0.98;

/// A candidate that passed its gate.
struct Passed {
    candidate: usize,
    steps: Vec<Step>,
    report: Gate,
}

/// The program with its fastest candidate.
pub(super) struct Fastest {
    pub steps: Vec<Step>,
    pub report: Gate,
    /// A row for each candidate; empty where there is only one.
    pub tuned: Vec<Tried>,
}

impl Work<'_> {
    /// Gates every candidate that is not refused, and returns the fastest one. `steps` makes the steps of a candidate from its
    /// artifacts.
    pub(super) fn gate_candidates(
        &self,
        number: usize,
        (module, bucket): (&str, &str),
        name: &str,
        mut request: GateRequest,
        candidates: Vec<Candidate>,
        steps: &dyn Fn(&[Digest]) -> Vec<Step>,
    ) -> Result<Fastest, BuildError> {
        let several = candidates.len() > 1;
        let mut rows = Vec::new();
        let mut passed: Vec<Passed> = Vec::new();
        let mut failed = None;
        for (index, candidate) in candidates.iter().enumerate() {
            let mut row = Tried {
                options: candidate.set.name.clone(),
                seconds: seconds(self.options.store, &candidate.keys)?,
                latency: None,
                max_abs: None,
                chosen: false,
                refused: None,
                other: Other::default(),
            };
            let verdict = match &candidate.refused {
                Some(why) => Err(why.clone()),
                None => {
                    request.program.steps = steps(&candidate.keys);
                    match self.gate_one(
                        number,
                        Action::Gate,
                        &candidate.of(name, candidates.len()),
                        &request,
                    ) {
                        Ok(mut report) => {
                            let measured = report.clone();
                            sign_test::put(&mut report, &measured, 0, false);
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
            // The first may be for exact sizes only. The others must not lose padding that it has.
            let verdict = verdict.and_then(|report| {
                let first = passed.first().map(|first| first.report.exact());
                let lost = report.exact().into_iter();
                let mut lost =
                    lost.filter(|(dim, _)| !first.iter().any(|one| one.contains_key(dim)));
                match lost.next() {
                    Some((_, why)) if index > 0 => Err(why),
                    _ => Ok(report),
                }
            });
            match verdict {
                Ok(report) => {
                    row.latency = report.artifact_us.get().copied().map(in_seconds);
                    row.max_abs = worst(&report);
                    passed.push(Passed {
                        candidate: index,
                        steps: std::mem::take(&mut request.program.steps),
                        report,
                    });
                }
                Err(why) => row.refused = Some(why),
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
            _ => self.measure_in_turns(number, name, request, &mut passed, &mut rows)?,
        };
        let best = passed.swap_remove(best);
        if !several {
            rows.clear();
        } else {
            rows[best.candidate].chosen = true;
            self.progress.event(&Event::Tuned {
                module,
                bucket,
                tried: &rows,
            });
        }
        Ok(Fastest {
            steps: best.steps,
            report: best.report,
            tuned: rows,
        })
    }

    pub(super) fn gate_one(
        &self,
        number: usize,
        action: Action,
        name: &str,
        request: &GateRequest,
    ) -> Result<Gate, BuildError> {
        let check = || {
            let process = GateProcess {
                command: &self.options.gate,
                limits: &self.workers.limits,
                limit: self.limit(gate::LIMIT),
                stop: &self.workers.stop,
            };
            process.ask(request)
        };
        let (verdict, _) = match action {
            Action::Measure => self.exclusive(|| self.timed(number, action, name, check)),
            _ => self.retried(number, action, name, check, |verdict| {
                verdict.as_ref().err()
            }),
        };
        verdict
    }

    /// Measures the candidates that passed in turns, and returns the index of the fastest.
    fn measure_in_turns(
        &self,
        number: usize,
        name: &str,
        mut request: GateRequest,
        passed: &mut [Passed],
        rows: &mut [Tried],
    ) -> Result<usize, BuildError> {
        request.exclusive = true;
        request.program.steps.clone_from(&passed[0].steps);
        request.others = passed[1..]
            .iter()
            .map(|other| other.steps.clone())
            .collect();
        let report = match self.gate_one(number, Action::Measure, name, &request) {
            Ok(report) => report,
            Err(error) if error.ends_build() => return Err(error),
            // Their gates' own measurements are no reason to choose another than the first.
            Err(_) => return Ok(0),
        };
        let others = report.rivals_us.get().into_iter().flatten();
        let all: Vec<f64> = report
            .artifact_us
            .get()
            .into_iter()
            .chain(others)
            .copied()
            .collect();
        for (index, (one, taken)) in passed.iter_mut().zip(&all).enumerate() {
            rows[one.candidate].latency = Some(in_seconds(*taken));
            sign_test::put(&mut one.report, &report, index, true);
        }
        let runs = report.artifact_runs.get().copied().unwrap_or(0);
        let wins = report.rivals_wins.get().into_iter().flatten();
        // Where the first candidate passed, the others have to beat it.
        let clear: Vec<bool> = std::iter::once(true)
            .chain(wins.map(|wins| passed[0].candidate != 0 || sign_test::significant(*wins, runs)))
            .collect();
        Ok(fastest(&all, &clear, passed[0].candidate == 0))
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

/// Returns what compiling the artifacts of a candidate took, each counted once; none where one of them is not there.
fn seconds(store: &Store, keys: &[Digest]) -> Result<Option<f64>, StoreError> {
    let mut total = 0.0;
    for (index, key) in keys.iter().enumerate() {
        if keys[..index].contains(key) {
            continue;
        }
        let Some(artifact) = store.records().artifact(key)? else {
            return Ok(None);
        };
        total += artifact.compile_seconds();
    }
    Ok((!keys.is_empty()).then_some((total * 1e4).round() / 1e4))
}

/// Rounds as the gate does.
fn in_seconds(micros: f64) -> f64 {
    (micros * 10.0).round() / 1e7
}

/// Returns the largest absolute error of a gate's report.
fn worst(report: &Gate) -> Option<f64> {
    let outputs = report.outputs.get().into_iter().flatten();
    outputs.filter_map(|row| row.max_abs).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

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
