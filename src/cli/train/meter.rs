//! The time of steps and the memory of one.

use std::time::Instant;

use crate::{Device, inspect::training::Figures, runtime::command::peak};

/// Measures the steps of a run.
pub(super) struct Meter {
    started: Instant,
    /// Seconds from the start to the end of the first step.
    first: Option<f64>,
    /// Seconds of the steps after it.
    later: Vec<f64>,
    bytes: Option<u64>,
}

impl Meter {
    pub fn new() -> Self {
        Self {
            started: Instant::now(),
            first: None,
            later: vec![],
            bytes: None,
        }
    }

    /// Makes a step. The second one's memory is measured, which gives free memory back before it; on a GPU also the
    /// first one's, in which a CUDA graph takes the memory of all later ones.
    pub fn step<T>(&mut self, device: Device, step: impl FnOnce() -> T) -> T {
        if self.first.is_none() {
            let (result, bytes) = match device {
                Device::Cpu => (step(), None),
                Device::Cuda(_) => peak(device, step),
            };
            self.bytes = bytes;
            self.first = Some(self.started.elapsed().as_secs_f64());
            return result;
        }
        let began = Instant::now();
        let (result, bytes) = match self.later.is_empty() {
            true => peak(device, step),
            false => (step(), None),
        };
        self.bytes = self.bytes.max(bytes);
        self.later.push(began.elapsed().as_secs_f64());
        result
    }

    pub fn figures(&self) -> Figures {
        let mut sorted = self.later.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied();
        Figures {
            first_step_seconds: self.first,
            steps_per_second: median.filter(|&median| median > 0.0).map(f64::recip),
            peak_bytes: self.bytes,
        }
    }
}
