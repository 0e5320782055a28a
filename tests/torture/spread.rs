//! Runs many small trials on a few threads.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::Result;

use crate::report::Tally;

/// How many threads try things at once: `PRECAST_TORTURE_JOBS`, or one.
pub fn jobs() -> usize {
    let jobs = std::env::var("PRECAST_TORTURE_JOBS").ok();
    jobs.and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
}

/// Tries every item, and returns the failures in the order of the items.
pub fn each<T: Sync>(items: &[T], attempt: impl Fn(&T) -> Result<()> + Sync) -> Vec<String> {
    over(jobs(), items, attempt)
}

/// Adds up the tallies of all items.
pub fn sum<T: Sync>(items: &[T], attempt: impl Fn(&T) -> Tally + Sync) -> Tally {
    let all = Mutex::new(Tally::default());
    let bad = each(items, |item| {
        let part = attempt(item);
        all.lock().unwrap().merge(part);
        Ok(())
    });
    assert_eq!(bad, [] as [String; 0]);
    all.into_inner().unwrap()
}

/// Adds up the tallies of as many shares of `count` as there are jobs; each has a seed of its own.
pub fn shares(seed: u64, count: u64, sweep: impl Fn(u64, u64) -> Tally + Sync) -> Tally {
    let jobs = jobs() as u64;
    let shares: Vec<u64> = (0..jobs).collect();
    sum(&shares, |job| sweep(seed + job, (count + job) / jobs))
}

/// The same with so many threads.
pub fn over<T: Sync>(
    threads: usize,
    items: &[T],
    attempt: impl Fn(&T) -> Result<()> + Sync,
) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let bad = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads.min(items.len()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else {
                        return;
                    };
                    if let Err(why) = attempt(item) {
                        bad.lock().unwrap().push((at, format!("{why:#}")));
                    }
                }
            });
        }
    });
    let mut bad = bad.into_inner().unwrap();
    bad.sort();
    bad.into_iter().map(|(_, why)| why).collect()
}
