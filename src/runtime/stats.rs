//! What a model counts while it runs, for metrics, for `precast why`, and for choosing between buckets.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use serde::Serialize;

use crate::record::Sizes;

/// One program's counters. Reading them stops nobody.
#[derive(Default)]
pub(super) struct Counters {
    exact: AtomicU64,
    padded: AtomicU64,
    failed: AtomicU64,
    /// Time of the calls that were answered, where an answer means that the work is done.
    nanos: AtomicU64,
    timed: AtomicU64,
    /// Requested and computed elements of padded calls, to tell what padding wastes.
    asked: AtomicU64,
    computed: AtomicU64,
}

impl Counters {
    pub fn exact(&self, took: Option<Duration>) {
        self.exact.fetch_add(1, Relaxed);
        self.time(took);
    }

    pub fn padded(&self, took: Option<Duration>, asked: u64, computed: u64) {
        self.padded.fetch_add(1, Relaxed);
        self.asked.fetch_add(asked, Relaxed);
        self.computed.fetch_add(computed, Relaxed);
        self.time(took);
    }

    pub fn failed(&self) {
        self.failed.fetch_add(1, Relaxed);
    }

    fn time(&self, took: Option<Duration>) {
        if let Some(took) = took {
            self.nanos
                .fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
            self.timed.fetch_add(1, Relaxed);
        }
    }

    /// Returns the mean time of a call in seconds, once there were enough to tell.
    pub fn measured(&self) -> Option<f64> {
        const ENOUGH: u64 = 16;
        let timed = self.timed.load(Relaxed);
        (timed >= ENOUGH).then(|| self.nanos.load(Relaxed) as f64 / timed as f64 / 1e9)
    }

    /// Returns the counters as one bucket's row.
    pub fn row(&self, bucket: &Sizes, runner: &'static str) -> BucketStats {
        let (asked, computed) = (self.asked.load(Relaxed), self.computed.load(Relaxed));
        BucketStats {
            bucket: bucket.clone(),
            runner,
            exact: self.exact.load(Relaxed),
            padded: self.padded.load(Relaxed),
            failed: self.failed.load(Relaxed),
            mean_seconds: self.measured(),
            padding_waste: (computed > 0).then(|| 1.0 - asked as f64 / computed as f64),
        }
    }
}

/// Requests that no bucket answered, by their sizes.
#[derive(Default)]
pub(super) struct Misses(Mutex<BTreeMap<Sizes, u64>>);

impl Misses {
    /// How many different requests are told apart. Later ones are not recorded.
    const LIMIT: usize = 1024;

    pub fn add(&self, request: Sizes) {
        let mut misses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if misses.len() < Self::LIMIT || misses.contains_key(&request) {
            *misses.entry(request).or_default() += 1;
        }
    }

    pub fn all(&self) -> Vec<Miss> {
        let misses = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        misses
            .iter()
            .map(|(request, &count)| Miss {
                request: request.clone(),
                count,
            })
            .collect()
    }
}

/// What one module did since it was loaded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModuleStats {
    pub module: String,
    /// The device, as `cpu` or `cuda:0`.
    pub device: String,
    pub buckets: Vec<BucketStats>,
    /// Requests that no bucket answered: what the next build could cover.
    pub misses: Vec<Miss>,
}

/// What one bucket did since it was loaded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BucketStats {
    pub bucket: Sizes,
    /// What runs it: `artifact`, `graph` or `eager`.
    pub runner: &'static str,
    /// Calls of exactly its sizes.
    pub exact: u64,
    /// Smaller calls, padded.
    pub padded: u64,
    /// Calls that were refused by what runs it.
    pub failed: u64,
    /// Mean time of a call on the CPU. A CUDA call returns before it is done, so it has none.
    pub mean_seconds: Option<f64>,
    /// Of the elements that padded calls computed, the part nobody asked for.
    pub padding_waste: Option<f64>,
}

/// A request that no bucket answered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Miss {
    pub request: Sizes,
    pub count: u64,
}
