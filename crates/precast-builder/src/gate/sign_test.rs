//! A sign test: finds the faster one of two programs from alternating calls of both.
//!
//! Two medians prove little on a machine with other work. A program counts as faster only if it was faster in more
//! rounds than chance explains and, if the choice has a cost, by more than a margin.
//!
//! **Artifact or eager.** The gate of a program runs at the same time as compiles and other gates. That noise does not
//! affect both equally: a program that uses all cores waits for the slowest one. The measurement is good enough to show
//! that an artifact is not slower, which nearly always holds. If eager seems faster, the program is measured again at
//! once, for more rounds and with no other task running; only this measurement marks it as slower. It costs a process
//! and some seconds, and the other workers wait for it after their current task. Without a decision, the artifact
//! answers.
//!
//! On a CPU it also has to be faster beside other work. Eager waits for all of its threads after each operator, and a
//! thread that another process has displaced costs that wait: a step that eager won alone, with 14 ms to 20, took it 312
//! ms beside one busy process, and the artifact 10.
//!
//! The runtime also measures calls, to choose between buckets. It does not choose between a program's artifact and
//! eager: it loads only one of them. A rebuilt program is measured again.

use precast_store::record::{Faster, SignTest, receipt::Gate};

/// Maximum probability that two equal programs count as a faster and a slower one.
const CHANCE: f64 = 0.01;

/// Minimum ratio of the artifact's time to eager's for eager to run instead.
const SLOWER: f64 = 1.1;

/// Returns whether `wins` of `rounds` are more than chance explains.
pub(crate) fn significant(wins: u64, rounds: u64) -> bool {
    // The probability of `k` wins of two equal programs, from k = 0 on.
    let mut exactly = 0.5_f64.powi(i32::try_from(rounds).unwrap_or(i32::MAX));
    let mut at_least = 0.0;
    for k in 0..=rounds {
        if k >= wins {
            at_least += exactly;
        }
        exactly *= (rounds - k) as f64 / (k + 1) as f64;
    }
    at_least < CHANCE
}

/// Returns whether eager was faster than the artifact by more than the margin.
pub(crate) fn eager_seems_faster(report: &Gate) -> bool {
    let micros = |micros: Option<f64>| micros.filter(|micros| *micros > 0.0);
    let both = micros(report.artifact_us).zip(micros(report.eager_us));
    both.is_some_and(|(artifact, eager)| artifact > eager * SLOWER)
}

/// Describes the measurement in which eager seems faster.
pub(crate) fn describe(report: &Gate) -> String {
    let micros = |micros: Option<f64>| micros.unwrap_or_default();
    let (eager, artifact) = (micros(report.eager_us), micros(report.artifact_us));
    format!("eager took {eager:.1} µs and the artifact {artifact:.1} µs beside other tasks")
}

/// Puts the measurement of a gate's own program (0), or of another candidate (from 1 on), into the report of that
/// candidate, with the result of the sign test. `exclusive`: no other task of the build was running.
pub(crate) fn put(report: &mut Gate, measured: &Gate, of: usize, exclusive: bool) {
    fn at<T: Copy>(list: &Option<Vec<T>>, other: usize) -> Option<T> {
        list.as_ref()?.get(other).copied()
    }
    let (micros, wins) = match of.checked_sub(1) {
        None => (measured.artifact_us, measured.eager_wins),
        Some(other) => (
            at(&measured.others_us, other),
            at(&measured.others_eager_wins, other),
        ),
    };
    report.artifact_us = micros;
    report.artifact_runs = measured.artifact_runs;
    report.eager_us = measured.eager_us;
    report.eager_runs = measured.eager_runs;
    report.busy_us = None;
    report.sign_test = sign_test(report, wins, exclusive, measured.busy_us);
}

/// Returns the sign test of a report; eager was faster in `wins` rounds. None if eager was not measured.
fn sign_test(
    report: &Gate,
    wins: Option<u64>,
    exclusive: bool,
    busy_us: Option<[f64; 2]>,
) -> Option<SignTest> {
    let rounds = report.eager_runs?;
    let eager_faster = wins?.min(rounds);
    let eager_leads = eager_seems_faster(report);
    let faster = if eager_leads && significant(eager_faster, rounds) {
        match busy_us {
            Some([artifact, eager]) if artifact <= eager * SLOWER => Faster::Neither,
            _ => Faster::Eager,
        }
    } else if !eager_leads && significant(rounds - eager_faster, rounds) {
        Faster::Artifact
    } else {
        Faster::Neither
    };
    Some(SignTest {
        rounds,
        eager_faster,
        exclusive,
        busy_us,
        faster,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use precast_store::testing::read;

    #[test]
    fn chance_decides_nothing() {
        for (wins, rounds) in [(10, 10), (16, 20), (7, 7), (118, 200), (200, 200)] {
            assert!(significant(wins, rounds), "{wins} of {rounds}");
        }
        for (wins, rounds) in [(9, 10), (0, 0), (15, 20), (6, 6), (110, 200)] {
            assert!(!significant(wins, rounds), "{wins} of {rounds}");
        }
    }

    /// A measurement of an artifact, of eager, and of another candidate that is twice as fast.
    fn measured(artifact: f64, eager: f64, wins: u64, rounds: u64) -> Gate {
        read(json!({
            "artifact_us": artifact, "artifact_runs": rounds, "eager_us": eager, "eager_runs": rounds,
            "eager_wins": wins, "others_us": [artifact / 2.0], "others_eager_wins": [0],
        }))
    }

    #[test]
    fn an_artifact_is_slower_by_a_margin_and_in_most_rounds() {
        let faster = |artifact: f64, eager: f64, wins: u64, rounds: u64| {
            let report = measured(artifact, eager, wins, rounds);
            sign_test(&report, Some(wins), true, None).unwrap().faster
        };
        let busy = |artifact: f64, eager: f64| {
            let report = measured(300.0, 200.0, 19, 20);
            let test = sign_test(&report, Some(19), true, Some([artifact, eager]));
            test.unwrap().faster
        };
        assert_eq!(busy(9_600.0, 312_000.0), Faster::Neither);
        assert_eq!(busy(600.0, 400.0), Faster::Eager);
        assert_eq!(faster(300.0, 200.0, 19, 20), Faster::Eager);
        // By as much in the median, but not often enough; and often enough, but by nothing that matters.
        assert_eq!(faster(300.0, 200.0, 13, 20), Faster::Neither);
        assert_eq!(faster(300.0, 200.0, 3, 3), Faster::Neither);
        assert_eq!(faster(205.0, 200.0, 20, 20), Faster::Neither);
        assert_eq!(faster(100.0, 200.0, 1, 20), Faster::Artifact);
        assert_eq!(faster(100.0, 200.0, 9, 20), Faster::Neither);
    }

    #[test]
    fn a_receipt_has_what_was_measured_of_its_own_program() {
        let measured = measured(300.0, 200.0, 20, 20);
        let mut report: Gate = read(json!({"outputs": [], "artifact_us": 9.0}));
        put(&mut report, &measured, 0, true);
        let eager = json!({"rounds": 20, "eager_faster": 20, "exclusive": true, "faster": "eager"});
        assert_eq!(json!(report.sign_test), eager);
        put(&mut report, &measured, 1, false);
        let own = (json!(report.artifact_us), json!(report.outputs));
        assert_eq!(own, (json!(150.0), json!([])));
        let artifact =
            json!({"rounds": 20, "eager_faster": 0, "exclusive": false, "faster": "artifact"});
        assert_eq!(json!(report.sign_test), artifact);
        let no_eager: Gate = read(json!({"artifact_us": 100.0, "artifact_runs": 20}));
        put(&mut report, &no_eager, 0, true);
        assert!(!eager_seems_faster(&no_eager));
        let slow = read(json!({"artifact_us": 300.0, "eager_us": 200.25}));
        assert!(eager_seems_faster(&slow));
        let text = "eager took 200.2 µs and the artifact 300.0 µs beside other tasks";
        assert_eq!(describe(&slow), text);
        assert_eq!(json!(report.sign_test), json!(null));
        let timeless = read(json!({"artifact_us": 100.0, "eager_us": 0.0}));
        assert!(!eager_seems_faster(&timeless));
    }
}
