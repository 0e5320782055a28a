//! Runs many small trials on a few threads.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// How many threads try things at once: `PRECAST_TORTURE_JOBS`, or one.
pub fn jobs() -> usize {
    let jobs = std::env::var("PRECAST_TORTURE_JOBS").ok();
    jobs.and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
}

/// Tries every item, and returns the failures in the order of the items.
pub fn each<T: Sync>(
    items: &[T],
    attempt: impl Fn(&T) -> Result<(), String> + Sync,
) -> Vec<String> {
    over(jobs(), items, attempt)
}

/// The same with so many threads.
pub fn over<T: Sync>(
    threads: usize,
    items: &[T],
    attempt: impl Fn(&T) -> Result<(), String> + Sync,
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
                        let mut bad = bad.lock().unwrap_or_else(PoisonError::into_inner);
                        bad.push((at, why));
                    }
                }
            });
        }
    });
    let mut bad = bad.into_inner().unwrap_or_else(PoisonError::into_inner);
    bad.sort();
    bad.into_iter().map(|(_, why)| why).collect()
}
