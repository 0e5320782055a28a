//! The state of a model: its sessions, its readiness, its programs, its counters, and the time of its load.

use std::{
    sync::{Arc, PoisonError, atomic::Ordering},
    time::Duration,
};

use precast_store::record::{Calls, Counts, Program, SCHEMA, session_bytes};
use serde::Serialize;

use super::{
    Model, RuntimeError, error::Quarantined, host::now, replica::Replica, session::Session,
    stats::ModuleStats, trainer::Trainer, variant::Variant,
};

/// Times from the beginning of a model's load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timings {
    /// Until the model was handed out.
    pub loaded: Duration,
    /// Until the first call was answered. On CUDA an answer is handed out when its work is in the stream.
    pub first_answer: Option<Duration>,
    /// Time until every program was loaded or set aside, if all programs are loaded without a request.
    pub complete: Option<Duration>,
}

/// The state of one device of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceStats {
    /// The device, as `cpu` or `cuda:0`.
    pub device: String,
    /// Calls under way. On CUDA a call is over when its work is in the stream.
    pub in_flight: usize,
    /// Calls since the model was loaded that a program of the device answered.
    pub answered: u64,
    /// Calls since then that failed in a program.
    pub failed: u64,
    /// The reason why it answers no more calls in this process, if it does not.
    pub broken: Option<String>,
}

impl Model {
    /// Opens a session, on the device with the fewest open sessions: states for one caller, with their first values.
    ///
    /// States are allocated, and CUDA graphs captured, once for each of the sessions that are open at once; later
    /// sessions reuse them. [`Runtime::sessions`](super::Runtime::sessions) sets the maximum of open sessions. Beyond
    /// it this method waits like a call, and fails with [`RuntimeError::SessionsBusy`].
    pub fn session(&self) -> Result<Session<'_>, RuntimeError> {
        Session::open(self)
    }

    /// Opens a session on each device, which train a module of kind `step`: see [`Trainer`]. Fails with
    /// [`RuntimeError::NoStep`] for other modules, and on several devices with [`RuntimeError::SeveralDevices`] for a
    /// module without `accumulate`.
    pub fn trainer(&self, module: &str) -> Result<Trainer<'_>, RuntimeError> {
        Trainer::new(self, module)
    }

    /// Returns the bytes of a session's states, each at its largest bucket.
    pub fn session_bytes(&self) -> u64 {
        let first = self.replicas.first().into_iter();
        let records = first.flat_map(Replica::programs);
        session_bytes(records.map(|program| &*program.record))
    }

    /// Returns the times of its load.
    pub fn timings(&self) -> Timings {
        Timings {
            loaded: self.loaded,
            first_answer: self.first_answer.get().copied(),
            complete: self.complete.get().copied(),
        }
    }

    /// Returns whether calls are answered: no device has a persistent error.
    pub fn is_ready(&self) -> bool {
        self.replicas
            .iter()
            .all(|replica| replica.broken.get().is_none())
    }

    /// Returns the programs that could not be loaded so far, and why.
    pub fn quarantined(&self) -> Vec<Arc<Quarantined>> {
        let lost = self.replicas.iter().flat_map(|replica| {
            let quarantined = replica.loader.quarantined.lock();
            quarantined.unwrap_or_else(PoisonError::into_inner).clone()
        });
        lost.collect()
    }

    /// Returns the programs that eager answers because, when they were built, it was faster than their artifacts.
    pub fn faster_as_eager(&self) -> Vec<&Program> {
        let loaded = self.replicas.iter().flat_map(Replica::loaded);
        loaded
            .filter(|program| program.preferred)
            .map(|program| &*program.plan.program)
            .collect()
    }

    /// Returns the reason of each program that was to run as a CUDA graph and does not.
    pub fn without_graph(&self) -> Vec<(&Program, &str)> {
        let loaded = self.replicas.iter().flat_map(Replica::loaded);
        loaded
            .filter_map(|program| Some((&*program.plan.program, program.refused.as_deref()?)))
            .collect()
    }

    /// Returns the requests since the model was loaded and the programs that answered them, for `precast stats` and the
    /// planner.
    pub fn counts(&self) -> Counts {
        let until = now();
        let counts = |calls| Counts {
            schema: SCHEMA,
            model: self.name.clone(),
            since: self.since,
            until,
            calls,
        };
        let of = |replica: &Replica| -> Vec<Calls> {
            let variants = replica.modules.values().flatten();
            variants.flat_map(Variant::counts).collect()
        };
        let mut replicas = self.replicas.iter().map(of);
        let mut sum = counts(replicas.next().unwrap_or_default());
        replicas.for_each(|calls| sum.add(counts(calls)));
        sum
    }

    /// Returns the counters since the model was loaded, by module and device.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
    /// # use precast_runtime::{Device, Runtime, Store, Value};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
    /// model.run("double", &[Value::new(&[1.0_f32; 3], &[1, 3])?])?;
    /// let stats = model.stats();
    /// assert_eq!((stats[0].module.as_str(), stats[0].device.as_str()), ("double", "cpu"));
    /// let padded: u64 = stats[0].buckets.iter().map(|bucket| bucket.padded).sum();
    /// assert_eq!(padded, 1);
    /// # Ok(()) }
    /// ```
    pub fn stats(&self) -> Vec<ModuleStats> {
        let variants = self
            .replicas
            .iter()
            .flat_map(|replica| replica.modules.values().flatten());
        let mut stats: Vec<ModuleStats> = variants.map(Variant::stats).collect();
        stats.sort_by(|a, b| (&a.module, &a.device).cmp(&(&b.module, &b.device)));
        stats
    }

    /// Returns the state of each device, in the order of the runtime's devices.
    pub fn devices(&self) -> Vec<DeviceStats> {
        let row = |replica: &Replica| {
            let variants = replica.modules.values().flatten();
            let buckets: Vec<_> = variants.flat_map(|v| v.stats().buckets).collect();
            DeviceStats {
                device: replica.device.to_string(),
                in_flight: replica.running.load(Ordering::Relaxed),
                answered: buckets.iter().map(|b| b.exact + b.padded).sum(),
                failed: buckets.iter().map(|b| b.failed).sum(),
                broken: replica.broken.get().cloned(),
            }
        };
        self.replicas.iter().map(row).collect()
    }
}
