//! Compiles a program in several ways and keeps the fastest one that passes its gate.
//!
//! A [way](super::ways) is an option set for all segments of a program. `--tune` tries a few beside the module's own, and a `mode` that
//! autotunes is one of two ways: torch picks kernels by timing each alone, which is no measure of the program (on an H200
//! such a choice made a whole block a fifth slower), so what it picks has to beat `mode = "default"`.
//!
//! Every way has artifacts of its own, with keys like any other: a segment is compiled once for an option set, whoever
//! asks. Each way passes the gate in a process of its own; what fails to compile or to pass, crashes or hangs is refused
//! with its reason, and the program fails only when nothing is left. Those that pass are then measured by turns, as whole
//! programs and as they will run, in one process and while the build does nothing else. The first way is kept unless another
//! is faster by more than [`GAIN`] and in so many rounds that chance would hardly have it so ([`merit`]): anything less is
//! noise, and a choice that flips from build to build explains nothing. The table goes into the program's receipt as `tuned`.

use precast_store::{
    Digest, Store, StoreError,
    record::{
        Step, Tried,
        receipt::{Gate, Other},
    },
};

use super::{
    BuildError,
    gate::{self, Candidate},
    merit,
    progress::Event,
    ways::Way,
    work::{Action, Work},
};

/// The share of the first way's latency that another must stay below.
const GAIN: f64 = 0.98;

/// What passed its gate.
struct Passed {
    way: usize,
    steps: Vec<Step>,
    report: Gate,
}

/// A program that passed its gate.
pub(super) struct Judged {
    pub steps: Vec<Step>,
    pub report: Gate,
    /// A row for each way; empty where there is only one.
    pub tuned: Vec<Tried>,
}

impl Work<'_> {
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
            let mut row = Tried {
                options: way.set.name.clone(),
                seconds: seconds(self.options.store, &way.keys)?,
                latency: None,
                max_abs: None,
                chosen: false,
                refused: None,
                other: Other::default(),
            };
            let verdict = match &way.refused {
                Some(why) => Err(why.clone()),
                None => {
                    candidate.program.steps = steps(&way.keys);
                    match self.gate_one(number, Action::Gate, &way.of(name, ways.len()), &candidate)
                    {
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
            let verdict = verdict.and_then(|report| match report.padding_refused() {
                Some(why) if index > 0 => Err(why.to_owned()),
                _ => Ok(report),
            });
            match verdict {
                Ok(report) => {
                    row.latency = report.artifact_us.get().copied().map(in_seconds);
                    row.max_abs = worst(&report);
                    passed.push(Passed {
                        way: index,
                        steps: std::mem::take(&mut candidate.program.steps),
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
            _ => self.race(number, name, candidate, &mut passed, &mut rows)?,
        };
        let best = passed.swap_remove(best);
        if !several {
            rows.clear();
        } else {
            rows[best.way].chosen = true;
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
        action: Action,
        name: &str,
        candidate: &Candidate,
    ) -> Result<Gate, BuildError> {
        let check = || {
            gate::in_child(
                &self.options.gate,
                candidate,
                &self.workers.limits,
                self.limit(gate::LIMIT),
                &self.workers.stop,
            )
        };
        let (verdict, _) = match action {
            Action::Measure => self.exclusive(|| self.timed(number, action, name, check)),
            _ => self.retried(number, action, name, check, |verdict| {
                verdict.as_ref().err()
            }),
        };
        verdict
    }

    /// Measures what passed by turns, and returns which is the best.
    fn race(
        &self,
        number: usize,
        name: &str,
        mut candidate: Candidate,
        passed: &mut [Passed],
        rows: &mut [Tried],
    ) -> Result<usize, BuildError> {
        candidate.alone = true;
        candidate.program.steps.clone_from(&passed[0].steps);
        candidate.rivals = passed[1..]
            .iter()
            .map(|rival| rival.steps.clone())
            .collect();
        let report = match self.gate_one(number, Action::Measure, name, &candidate) {
            Ok(report) => report,
            Err(error) if error.ends_build() => return Err(error),
            // Each was measured alone, which is no reason to choose another than the first.
            Err(_) => return Ok(0),
        };
        let rivals = report.rivals_us.get().into_iter().flatten();
        let all: Vec<f64> = report
            .artifact_us
            .get()
            .into_iter()
            .chain(rivals)
            .copied()
            .collect();
        for (index, (one, taken)) in passed.iter_mut().zip(&all).enumerate() {
            rows[one.way].latency = Some(in_seconds(*taken));
            merit::put(&mut one.report, &report, index, true);
        }
        let runs = report.artifact_runs.get().copied().unwrap_or(0);
        let wins = report.rivals_wins.get().into_iter().flatten();
        // The first is to be beaten, where it is there.
        let clear: Vec<bool> = std::iter::once(true)
            .chain(wins.map(|wins| passed[0].way != 0 || merit::by_merit(*wins, runs)))
            .collect();
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
