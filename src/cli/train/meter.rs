//! The time of steps and the memory of one.

use std::time::Instant;

use crate::{
    Device,
    inspect::training::Figures,
    runtime::{command::peak, cuda::device_memory},
};

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

    /// Makes a step. On a CPU the second one's memory is measured, which gives free memory back before it.
    pub fn step<T>(&mut self, device: Device, step: impl FnOnce() -> T) -> T {
        if self.first.is_none() {
            let result = step();
            self.first = Some(self.started.elapsed().as_secs_f64());
            return result;
        }
        let began = Instant::now();
        let (result, bytes) = match device == Device::Cpu && self.later.is_empty() {
            true => peak(device, step),
            false => (step(), None),
        };
        self.bytes = self.bytes.or(bytes);
        self.later.push(began.elapsed().as_secs_f64());
        result
    }

    /// Notes the memory of a GPU's steps: the most that the process had there, with that of a CUDA graph's capture, less
    /// the bytes of the states, which are kept from step to step.
    pub fn held(&mut self, device: Device, states: u64) {
        if let Device::Cuda(_) = device {
            let memory = device_memory(device).ok();
            self.bytes = memory.map(|memory| memory.peak.saturating_sub(states));
        }
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
