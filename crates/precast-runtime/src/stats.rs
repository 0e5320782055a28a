//! Counters of a model while it runs.
//!
//! `Model::stats` returns those of programs, for metrics. `Model::counts` returns those of requests, for
//! `precast stats`. `watch.rs` has both methods. A slot has no counters: the slots of a program share its `Counters`.

use std::{
    collections::HashMap,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use precast_store::record::{Calls, Sizes};
use serde::Serialize;

use super::{outputs::Rung, validate::Request};

/// One program's counters. Reading them does not block calls.
#[derive(Default)]
pub(super) struct Counters {
    exact: AtomicU64,
    padded: AtomicU64,
    failed: AtomicU64,
    /// Moving mean of the seconds of the calls that were timed, as bits; where an answer means that the work is done.
    mean: AtomicU64,
    timed: AtomicU64,
    /// Requested and computed elements of padded calls, to measure the waste of padding.
    asked: AtomicU64,
    computed: AtomicU64,
}

impl Counters {
    /// Timed calls before the mean counts; from then on, the weight of a new call is one part in so many.
    const ENOUGH: u64 = 16;

    /// Returns whether the next call should be timed: the first ones, then one of eight.
    pub fn due(&self) -> bool {
        const ONE_OF: u64 = 8;
        let calls = self.exact.load(Relaxed) + self.padded.load(Relaxed);
        calls.is_multiple_of(ONE_OF) || calls < Self::ENOUGH
    }

    pub fn whole(&self, took: Option<Duration>) {
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
            // Two threads may overwrite each other's sample: it is a mean of many.
            let parts = (self.timed.fetch_add(1, Relaxed) + 1).min(Self::ENOUGH);
            let mean = f64::from_bits(self.mean.load(Relaxed));
            let moved = mean + (took.as_secs_f64() - mean) / parts as f64;
            self.mean.store(moved.to_bits(), Relaxed);
        }
    }

    /// Returns the mean time of a call in seconds, after enough calls.
    fn measured(&self) -> Option<f64> {
        let enough = self.timed.load(Relaxed) >= Self::ENOUGH;
        enough.then(|| f64::from_bits(self.mean.load(Relaxed)))
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

/// Requests by their sizes, and the programs that answered them.
#[derive(Default)]
pub(super) struct Seen(RwLock<HashMap<Request, Asked>>);

#[derive(Default)]
struct Asked {
    /// By rung, in the ladder's order.
    answered: [AtomicU64; RUNGS.len()],
    refused: AtomicU64,
    /// The last program of padded calls of this size.
    bucket: AtomicUsize,
}

const RUNGS: [Rung; 4] = [Rung::Exact, Rung::Padded, Rung::Dynamic, Rung::Eager];

impl Seen {
    /// The number of different requests that are recorded. Later ones are not.
    const LIMIT: usize = 4096;

    /// Counts a request. Allocates only the first time it sees its sizes.
    pub fn add(&self, request: &Request, answer: Option<(usize, Rung)>) {
        let count = |asked: &Asked| match answer {
            None => drop(asked.refused.fetch_add(1, Relaxed)),
            Some((bucket, rung)) => {
                asked.bucket.store(bucket, Relaxed);
                let at = RUNGS.iter().position(|known| *known == rung).unwrap_or(0);
                asked.answered[at].fetch_add(1, Relaxed);
            }
        };
        let seen = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(asked) = seen.get(request) {
            return count(asked);
        }
        if seen.len() >= Self::LIMIT {
            return;
        }
        drop(seen);
        let mut seen = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if seen.len() < Self::LIMIT || seen.contains_key(request) {
            count(seen.entry(request.clone()).or_default());
        }
    }

    /// Returns rows of sizes, bucket, rung and count. `dims` name the sizes; `buckets` are those of the programs, none
    /// for a program that takes every size.
    pub fn rows(&self, module: &str, dims: &[String], buckets: &[Option<&Sizes>]) -> Vec<Calls> {
        let mut rows = Vec::new();
        for (request, asked) in self.0.read().unwrap_or_else(PoisonError::into_inner).iter() {
            let sizes: Sizes = dims.iter().cloned().zip(request.iter().copied()).collect();
            let mut row = |rung: &str, count: u64, bucket: Option<Sizes>| {
                if count > 0 {
                    let (module, sizes, rung) = (module.to_owned(), sizes.clone(), rung.to_owned());
                    rows.push(Calls {
                        module,
                        sizes,
                        bucket,
                        rung,
                        count,
                    });
                }
            };
            let last = buckets.get(asked.bucket.load(Relaxed));
            let last = last.copied().flatten().cloned();
            for (rung, count) in RUNGS.iter().zip(&asked.answered) {
                let bucket = match rung {
                    Rung::Exact | Rung::Dynamic => Some(sizes.clone()),
                    Rung::Padded | Rung::Eager => last.clone(),
                };
                row(rung.name(), count.load(Relaxed), bucket);
            }
            row("refused", asked.refused.load(Relaxed), None);
        }
        rows.sort_by(|a, b| (&a.sizes, &a.rung).cmp(&(&b.sizes, &b.rung)));
        rows
    }
}

/// The counters of one module since it was loaded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModuleStats {
    /// Its name in the spec.
    pub module: String,
    /// The device, as `cpu` or `cuda:0`.
    pub device: String,
    /// A row for each program, loaded or not.
    pub buckets: Vec<BucketStats>,
}

/// The counters of one bucket since it was loaded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BucketStats {
    /// Its sizes; of a program for every size within bounds, those of its samples.
    pub bucket: Sizes,
    /// The kind of its program: `artifact`, `graph` or `eager`.
    pub runner: &'static str,
    /// Calls of exactly its sizes, or within its bounds.
    pub exact: u64,
    /// Smaller calls, padded.
    pub padded: u64,
    /// Calls that failed in the program.
    pub failed: u64,
    /// Moving mean of the seconds of a call on the CPU, of a sample of the calls. None on CUDA, where a call returns
    /// before its work is done.
    pub mean_seconds: Option<f64>,
    /// The share of padding in the elements that padded calls computed.
    pub padding_waste: Option<f64>,
}
