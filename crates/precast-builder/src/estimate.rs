//! The estimate of a build's remaining time: for each kind of task, the mean time × the remaining tasks, divided by the
//! number of workers.
//!
//! Means are those of this build. Until a kind has one, its mean comes from receipts of the programs that are replaced,
//! or of the last release. Without either there is no estimate.

use precast_store::{Digest, Store};

use crate::plan::{Plan, State};

use super::{
    schedule::Schedule,
    task::{Kind, Task},
};

/// Maximum number of receipts to read: a release may have thousands.
const SAMPLE: usize = 32;

/// A sum of seconds, and the number of tasks in it.
#[derive(Clone, Copy, Default)]
struct Mean {
    seconds: f64,
    count: u32,
}

impl Mean {
    fn add(&mut self, seconds: f64) {
        self.seconds += seconds;
        self.count += 1;
    }

    fn get(self) -> Option<f64> {
        (self.count > 0).then(|| self.seconds / f64::from(self.count))
    }
}

/// The times of tasks, by [`Kind`].
#[derive(Default)]
pub(super) struct Estimate {
    receipts: [Mean; 5],
    measured: [Mean; 5],
    /// Number of artifacts of each program in the receipts, and number of artifacts that each capture of this build
    /// lacked.
    artifacts: Mean,
    lacked: Mean,
}

impl Estimate {
    /// Reads receipts of earlier builds; damaged ones are left out.
    pub fn new(plan: &Plan, store: &Store) -> Self {
        let mut estimate = Self::default();
        let before = plan.missing().filter_map(|item| match &item.state {
            State::Miss { before, .. } => *before,
            _ => None,
        });
        let last = plan.release.iter().flat_map(|release| &release.programs);
        for id in before.chain(last.copied()).take(SAMPLE) {
            estimate.read(&id, store);
        }
        estimate
    }

    fn read(&mut self, id: &Digest, store: &Store) {
        let Ok(Some(program)) = store.records().program(id) else {
            return;
        };
        let phases = program.receipt.seconds.clone();
        for (kind, name) in [(Kind::Capture, "capture"), (Kind::Gate, "gate")] {
            if let Some(seconds) = phases.get(name) {
                self.receipts[kind as usize].add(*seconds);
            }
        }
        let mut artifacts: Vec<Digest> = program.steps.iter().map(|step| step.artifact).collect();
        artifacts.sort_unstable();
        artifacts.dedup();
        self.artifacts.add(artifacts.len() as f64);
        for artifact in artifacts {
            if let Ok(Some(artifact)) = store.records().artifact(&artifact) {
                self.receipts[Kind::Compile as usize].add(artifact.compile_seconds());
            }
        }
    }

    /// Adds the time of a task.
    pub fn took(&mut self, kind: Kind, seconds: f64) {
        self.measured[kind as usize].add(seconds);
    }

    /// Adds the number of artifacts that a captured program lacked.
    pub fn lacked(&mut self, artifacts: usize) {
        self.lacked.add(artifacts as f64);
    }

    /// Returns the estimated seconds of a build of so many programs and artifacts; none without receipts of earlier
    /// builds.
    pub fn of(&self, programs: usize, artifacts: u64, workers: usize) -> Option<f64> {
        let mean = |kind: Kind| self.receipts[kind as usize].get();
        let mut seconds =
            programs as f64 * (mean(Kind::Capture)? + mean(Kind::Gate).unwrap_or(0.0));
        if artifacts > 0 {
            seconds += artifacts as f64 * mean(Kind::Compile)?;
        }
        Some(seconds / workers.max(1) as f64)
    }

    /// Returns the number of artifact receipts behind the estimate.
    pub fn receipts(&self) -> u32 {
        self.receipts[Kind::Compile as usize].count
    }

    /// Returns the estimated remaining seconds with so many workers; none without any measurement.
    pub fn remaining(&self, schedule: &Schedule<Task>, workers: usize) -> Option<f64> {
        let mean = |kind: Kind| {
            let measured = self.measured[kind as usize].get();
            measured.or(self.receipts[kind as usize].get())
        };
        let captures = schedule.remaining(Kind::Capture as usize);
        let to_come = match captures {
            0 => 0.0,
            _ => captures as f64 * self.lacked.get().or(self.artifacts.get())?,
        };
        let compiles = schedule.remaining(Kind::Compile as usize) as f64 + to_come;
        let mut seconds =
            schedule.remaining(Kind::Gate as usize) as f64 * mean(Kind::Gate).unwrap_or(0.0);
        for (count, kind) in [(captures as f64, Kind::Capture), (compiles, Kind::Compile)] {
            if count > 0.0 {
                seconds += count * mean(kind)?;
            }
        }
        Some(seconds / workers.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Able, Captures};
    use precast_store::testing;

    #[test]
    fn nothing_to_go_by_is_no_estimate() {
        let mut schedule = Schedule::of_build(2, false, false);
        let mut estimate = Estimate::default();
        assert_eq!(estimate.remaining(&schedule, 2), None);
        let able = Able {
            captures: Captures::Holds,
            worker: true,
        };
        schedule.next(able, false, 0);
        estimate.took(Kind::Capture, 4.0);
        estimate.lacked(1);
        schedule.lacks(0..1, Digest::of(b"a"), 1);
        schedule.ended(Task::Capture(0), true);
        let no_compile_has_ended = estimate.remaining(&schedule, 2);
        assert_eq!(no_compile_has_ended, None);
        estimate.took(Kind::Compile, 10.0);
        // One capture and two compiles: a known one, and one of the second capture.
        assert_eq!(estimate.remaining(&schedule, 1), Some(24.0));
        assert_eq!(estimate.remaining(&schedule, 2), Some(12.0));
        estimate.took(Kind::Gate, 1.0);
        assert_eq!(estimate.remaining(&schedule, 1), Some(26.0));
    }

    #[test]
    fn means_are_read_from_receipts() {
        let (_dir, store) = testing::store();
        let mut artifact = testing::artifact(&store, "block");
        let seconds = serde_json::json!({"seconds": {"lower": 1.0, "cpp": 2.0}});
        artifact.receipt = testing::read(seconds);
        let artifact = store.records().put_artifact(&artifact).unwrap();
        let mut program = testing::program("m", 8, &[artifact.id]);
        program.receipt = testing::read(serde_json::json!({"seconds": {"capture": 4.0}}));
        let program = store.records().put_program(&program).unwrap();
        let mut estimate = Estimate::default();
        estimate.read(&program.id, &store);
        estimate.read(&Digest::of(b"gone"), &store);
        let schedule = Schedule::of_build(1, false, false);
        assert_eq!(estimate.remaining(&schedule, 1), Some(7.0));
        assert_eq!(estimate.of(2, 3, 1), Some(17.0));
        assert_eq!(estimate.of(2, 3, 2), Some(8.5));
        assert_eq!(estimate.receipts(), 1);
        assert_eq!(Estimate::default().of(1, 1, 1), None);
        // A measurement of this build is the better estimate.
        estimate.took(Kind::Compile, 5.0);
        assert_eq!(estimate.remaining(&schedule, 1), Some(9.0));
    }
}
