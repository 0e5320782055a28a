//! The gates of a program's candidates, and the choice of the fastest candidate that passes.
//!
//! A [candidate](super::candidates) is an option set for all segments of a program. `--tune` adds a few to the module's
//! own. A `mode` that autotunes has two candidates. Torch autotunes each kernel separately, which does not measure the
//! program (on an H200 such a choice made a whole block a fifth slower), so its choice competes with `mode =
//! "default"`.
//!
//! Every candidate has separate artifacts, with ordinary keys: a segment is compiled once per option set. Each
//! candidate is gated in a separate process. A candidate that fails to compile, fails its gate, crashes or hangs is
//! refused with the reason. The program fails only if all are refused. The others are then measured in alternating
//! calls, as whole programs, in one process and with no other task running.
//!
//! The first candidate is kept unless another one is faster by more than [`GAIN`], by a [sign test](super::sign_test).
//! A smaller difference is noise, and the choice would change from build to build. The table goes into the program's
//! receipt as `tuned`.

use precast_store::{
    Digest, Store, StoreError,
    record::{Step, Tried, receipt::Gate},
};

use super::{GateProcess, GateRequest, LIMIT, candidates::Candidate, sign_test};
use crate::{
    BuildError,
    progress::Event,
    slot::Slot,
    task::{Action, Job},
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
pub(crate) struct Fastest {
    pub steps: Vec<Step>,
    pub report: Gate,
    /// A row for each candidate; empty if there is only one.
    pub tuned: Vec<Tried>,
}

/// Gates every candidate that is not refused, and returns the fastest one. `steps` returns the steps of a candidate
/// from its artifacts.
pub(crate) fn fastest(
    slot: &Slot<'_>,
    job: &Job<'_>,
    mut request: GateRequest,
    candidates: &[Candidate],
    steps: &dyn Fn(&[Digest]) -> Vec<Step>,
) -> Result<Fastest, BuildError> {
    let several = candidates.len() > 1;
    let store = slot.context.options().store;
    let mut rows = Vec::new();
    let mut passed: Vec<Passed> = Vec::new();
    let mut failed = None;
    for (index, candidate) in candidates.iter().enumerate() {
        request.program.steps = steps(&candidate.keys);
        let name = candidate.of(&job.name, candidates.len());
        let gated = match &candidate.refused {
            Some(why) => Err(why.clone()),
            None => match gate(slot, &name, &request) {
                Err(error) if error.ends_build() || !several => return Err(error),
                Err(error) => {
                    let why = error.to_string();
                    failed.get_or_insert(error);
                    Err(why)
                }
                // The first candidate may be for exact sizes only. Another one must not lose padding that the first one
                // has.
                Ok(report) => match lost_padding(passed.first(), &report) {
                    Some(why) if index > 0 => Err(why),
                    _ => Ok(report),
                },
            },
        };
        rows.push(row(store, candidate, &gated)?);
        if let Ok(report) = gated {
            passed.push(Passed {
                candidate: index,
                steps: std::mem::take(&mut request.program.steps),
                report,
            });
        }
    }
    let best = match passed.len() {
        0 => {
            let nothing = || BuildError::Gate {
                message: "no option set could be compiled".to_owned(),
                log: String::new(),
                far: false,
            };
            return Err(failed.unwrap_or_else(nothing));
        }
        1 => 0,
        _ => measure(slot, &job.name, request, &mut passed, &mut rows)?,
    };
    let best = passed.swap_remove(best);
    if several {
        rows[best.candidate].chosen = true;
        slot.context.event(&Event::Tuned {
            module: &job.module.name,
            bucket: &job.bucket,
            tried: &rows,
        });
    } else {
        rows.clear();
    }
    Ok(Fastest {
        steps: best.steps,
        report: best.report,
        tuned: rows,
    })
}

/// Measures a program that seemed slower than eager again, with no other task running: that decides which of them
/// answers. Returns whether it did.
pub(crate) fn measure_again(
    slot: &Slot<'_>,
    name: &str,
    request: &mut GateRequest,
    report: &mut Gate,
) -> Result<bool, BuildError> {
    let shared = report
        .sign_test
        .as_ref()
        .is_some_and(|test| !test.exclusive);
    if !sign_test::eager_seems_faster(report) || !shared {
        return Ok(false);
    }
    slot.again(Action::Measure, name, &sign_test::describe(report));
    request.exclusive = true;
    let measured = measure_once(slot, name, request)?;
    sign_test::put(report, &measured, 0, true);
    Ok(true)
}

/// Returns the row of a candidate in the table.
fn row(
    store: &Store,
    candidate: &Candidate,
    gated: &Result<Gate, String>,
) -> Result<Tried, StoreError> {
    let report = gated.as_ref().ok();
    Ok(Tried {
        options: candidate.set.name.clone(),
        seconds: seconds(store, &candidate.keys)?,
        latency: report.and_then(|report| report.artifact_us.map(in_seconds)),
        max_abs: report.and_then(worst),
        chosen: false,
        refused: gated.as_ref().err().cloned(),
    })
}

/// Returns why a candidate can't be padded where the first one can.
fn lost_padding(first: Option<&Passed>, report: &Gate) -> Option<String> {
    let first = first.map(|first| first.report.exact());
    let mut lost = report.exact().into_iter();
    let lost = lost.find(|(dim, _)| !first.iter().any(|exact| exact.contains_key(dim)));
    lost.map(|(_, why)| why)
}

fn process<'a>(slot: &Slot<'a>) -> GateProcess<'a> {
    let options = slot.context.options();
    GateProcess {
        command: &options.gate,
        limits: &slot.context.workers.limits,
        limit: options.timeout.unwrap_or(LIMIT),
        stop: &slot.context.workers.stop,
    }
}

/// Runs the gate of one candidate.
fn gate(slot: &Slot<'_>, name: &str, request: &GateRequest) -> Result<Gate, BuildError> {
    let gate = || process(slot).ask(request);
    let mut report = slot.retried(Action::Gate, name, gate)?;
    let measured = report.clone();
    sign_test::put(&mut report, &measured, 0, false);
    Ok(report)
}

/// Runs a gate that measures, with no other task running.
fn measure_once(slot: &Slot<'_>, name: &str, request: &GateRequest) -> Result<Gate, BuildError> {
    slot.exclusive(Action::Measure, name, || process(slot).ask(request))
}

/// Measures the candidates that passed in alternating calls, and returns the index of the fastest.
fn measure(
    slot: &Slot<'_>,
    name: &str,
    mut request: GateRequest,
    passed: &mut [Passed],
    rows: &mut [Tried],
) -> Result<usize, BuildError> {
    request.exclusive = true;
    request.program.steps.clone_from(&passed[0].steps);
    request.others = (passed[1..].iter())
        .map(|other| other.steps.clone())
        .collect();
    let report = match measure_once(slot, name, &request) {
        Ok(report) => report,
        Err(error) if error.ends_build() => return Err(error),
        // The measurements of their gates are no reason to choose another than the first.
        Err(_) => return Ok(0),
    };
    let others = report.others_us.iter().flatten();
    let own = report.artifact_us.iter();
    let all: Vec<f64> = own.chain(others).copied().collect();
    for (index, (one, micros)) in passed.iter_mut().zip(&all).enumerate() {
        rows[one.candidate].latency = Some(in_seconds(*micros));
        sign_test::put(&mut one.report, &report, index, true);
    }
    let runs = report.artifact_runs.unwrap_or(0);
    let wins = report.others_wins.iter().flatten();
    // If the first candidate passed, another one must be faster.
    let clear: Vec<bool> = std::iter::once(true)
        .chain(wins.map(|wins| passed[0].candidate != 0 || sign_test::significant(*wins, runs)))
        .collect();
    Ok(index_of_fastest(&all, &clear, passed[0].candidate == 0))
}

/// Returns the index of the lowest of the `clear` latencies. If `first` is set, returns the first one unless another is
/// lower by enough.
fn index_of_fastest(latencies: &[f64], clear: &[bool], first: bool) -> usize {
    let left = (0..latencies.len()).filter(|index| clear.get(*index) == Some(&true));
    let fastest = left.min_by(|a, b| latencies[*a].total_cmp(&latencies[*b]));
    match fastest {
        Some(fastest) if !first || latencies[fastest] < latencies[0] * GAIN => fastest,
        _ => 0,
    }
}

/// Returns the compile time of the artifacts of a candidate, each counted once; none if one of them is missing.
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
    let outputs = report.outputs.iter().flatten();
    outputs.filter_map(|row| row.max_abs).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_no_reason_to_choose_another() {
        let all = [true; 3];
        assert_eq!(index_of_fastest(&[100.0, 99.0, 130.0], &all, true), 0);
        assert_eq!(index_of_fastest(&[100.0, 99.0, 97.0], &all, true), 2);
        assert_eq!(
            index_of_fastest(&[100.0, 97.0, 90.0], &[true, true, false], true),
            1
        );
        assert_eq!(index_of_fastest(&[100.0, 99.0, 130.0], &all, false), 1);
        assert_eq!(index_of_fastest(&[], &[], false), 0);
    }
}
