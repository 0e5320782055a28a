//! A build as a Chrome trace: one lane per worker, with the phases of a job inside the job.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::build::progress::{Event, Progress};

/// Passes events on, and keeps their times.
pub(super) struct Traced<'a> {
    inner: &'a dyn Progress,
    started: Instant,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    slices: Vec<Value>,
    /// Worker -> its job, and the phase of that job, each with the time at which it began.
    jobs: HashMap<usize, (f64, String)>,
    phases: HashMap<usize, (f64, String)>,
}

impl<'a> Traced<'a> {
    pub(super) fn new(inner: &'a dyn Progress) -> Self {
        Self {
            inner,
            started: Instant::now(),
            kept: Mutex::default(),
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes everything so far.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let kept = self.kept();
        let document = json!({ "displayTimeUnit": "ms", "traceEvents": kept.slices });
        std::fs::write(path, document.to_string())
            .with_context(|| format!("can't write the trace `{}`", path.display()))
    }
}

impl Kept {
    /// Adds the work of a worker from `begun` to `ended`, in seconds of the build.
    fn slice(&mut self, worker: usize, name: &str, begun: f64, ended: f64) {
        let micros = |seconds: f64| (seconds * 1e6).round();
        self.slices.push(json!({
            "name": name, "ph": "X", "pid": 1, "tid": worker, "ts": micros(begun), "dur": micros(ended - begun),
        }));
    }

    fn end_phase(&mut self, worker: usize, now: f64) {
        if let Some((begun, name)) = self.phases.remove(&worker) {
            self.slice(worker, &name, begun, now);
        }
    }
}

impl Progress for Traced<'_> {
    fn event(&self, event: &Event<'_>) {
        self.inner.event(event);
        let now = self.started.elapsed().as_secs_f64();
        let mut kept = self.kept();
        match event {
            Event::Worker {
                worker, seconds, ..
            } => kept.slice(*worker, "start", now - seconds, now),
            Event::Opened { seconds, .. } => kept.slice(0, "open the model", now - seconds, now),
            Event::Begin { worker, job, what } => {
                kept.jobs.insert(*worker, (now, format!("{job} {what}")));
            }
            Event::Phase { worker, phase } => {
                kept.end_phase(*worker, now);
                kept.phases.insert(*worker, (now, (*phase).to_owned()));
            }
            Event::End { worker, .. } => {
                kept.end_phase(*worker, now);
                if let Some((begun, name)) = kept.jobs.remove(worker) {
                    kept.slice(*worker, &name, begun, now);
                }
            }
            Event::Weights { bytes, .. } => kept.slices.push(json!({
                "name": format!("weights of {bytes} bytes in the store"), "ph": "i", "pid": 1, "tid": 0, "s": "g",
                "ts": (now * 1e6).round(),
            })),
            _ => {}
        }
    }
}
