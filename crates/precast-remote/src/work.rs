//! Several transfers at a time.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use tokio::runtime::Runtime;

use crate::error::RemoteError;

/// Requests for small files at a time: they wait for the other side.
pub const SMALL: usize = 16;
/// Large files at a time.
pub const BIG: usize = 4;

/// Returns a few threads for the requests of a carrier, whose callers wait, each in a thread of its own. `name` is the
/// place.
pub fn runtime(name: &str) -> Result<Runtime, RemoteError> {
    let mut threads = tokio::runtime::Builder::new_multi_thread();
    let threads = threads.worker_threads(2).thread_name("precast-remote");
    threads
        .enable_all()
        .build()
        .map_err(|e| RemoteError::Storage {
            what: "start threads for",
            name: name.to_owned(),
            why: e.to_string(),
        })
}

/// Calls `work` with each of some things in `width` threads. Returns the results in order, or the first error, after
/// which nothing new is begun.
pub fn all<T: Sync, R: Send>(
    things: &[T],
    width: usize,
    work: impl Fn(&T) -> Result<R, RemoteError> + Sync,
) -> Result<Vec<R>, RemoteError> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results = Mutex::new(Vec::new());
    let each = || {
        while !stop.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(thing) = things.get(at) else { break };
            let result = work(thing);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            if let Ok(mut results) = results.lock() {
                results.push((at, result));
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..width.min(things.len()) {
            scope.spawn(each);
        }
    });
    let mut results = results.into_inner().unwrap_or_else(|e| e.into_inner());
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_and_the_first_error_ends_it() {
        let numbers: Vec<u64> = (0..100).collect();
        let doubled = all(&numbers, 7, |n| Ok(n * 2)).unwrap();
        assert_eq!(doubled, (0..100).map(|n| n * 2).collect::<Vec<_>>());
        let begun = AtomicUsize::new(0);
        let failed = all(&numbers, 3, |n| {
            begun.fetch_add(1, Ordering::Relaxed);
            if *n == 5 {
                Err(RemoteError::Interrupted)
            } else {
                Ok(())
            }
        });
        assert!(matches!(failed, Err(RemoteError::Interrupted)));
        assert!(begun.load(Ordering::Relaxed) < 20);
        assert_eq!(all(&[] as &[u64], 3, |n| Ok(*n)).unwrap(), [0u64; 0]);
    }
}
