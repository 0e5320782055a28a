//! The threads of a call's parallel loops, found out before the call.
//!
//! Generated loops and libtorch's own run on OpenMP, whose library ends the process when it can't make a thread: at the limit
//! of a user (`ulimit -u`) or of a container (`pids.max`). So before the first call on each calling thread, which is when
//! OpenMP makes that thread's team, as many threads are really made, held until all are there, and ended: what fails is an
//! error then. The team stays with its thread, so later calls compare two numbers.
//!
//! What it does not promise: others may take the threads between this and the first loop.

use std::{
    cell::Cell,
    fs, io,
    path::PathBuf,
    sync::{Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use precast_store::Device;

use super::{RuntimeError, ffi};

thread_local! {
    /// How many threads, with itself, the calling thread was found to have.
    static FOUND: Cell<usize> = const { Cell::new(1) };
}

/// What OpenMP asks for where nobody says otherwise: the usual `ulimit -s`. It is room, not memory.
const STACK: usize = 8 << 20;

/// Fails where the parallel loops of a call on this thread would find too few threads.
pub(super) fn find(device: Device) -> Result<(), RuntimeError> {
    if device != Device::Cpu {
        return Ok(());
    }
    let wanted = ffi::threads();
    if wanted <= FOUND.get() {
        return Ok(());
    }
    match make(wanted - 1) {
        Ok(()) => {
            FOUND.set(wanted);
            Ok(())
        }
        Err((made, source)) => Err(RuntimeError::NoThreads {
            wanted,
            found: made + 1,
            source,
        }),
    }
}

/// Makes so many threads, all there at once. Fails with the number that could be made.
fn make(count: usize) -> Result<(), (usize, io::Error)> {
    // One thread after the other finds out, or they would find each other's.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (held, ended) = (Mutex::new(true), Condvar::new());
    let mut failed = None;
    let mut entries: Vec<PathBuf> = Vec::with_capacity(count);
    thread::scope(|scope| {
        let hold = || {
            let entry = fs::read_link("/proc/thread-self");
            let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
            while *held {
                held = ended.wait(held).unwrap_or_else(PoisonError::into_inner);
            }
            entry
        };
        let mut threads = Vec::with_capacity(count);
        for made in 0..count {
            match thread::Builder::new()
                .stack_size(STACK)
                .spawn_scoped(scope, hold)
            {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    failed = Some((made, error));
                    break;
                }
            }
        }
        *held.lock().unwrap_or_else(PoisonError::into_inner) = false;
        ended.notify_all();
        let joined = threads.into_iter().filter_map(|thread| thread.join().ok());
        entries.extend(joined.filter_map(Result::ok));
    });
    gone(&entries);
    failed.map_or(Ok(()), Err)
}

/// Waits until the system counts threads no longer that have ended: it does so for a moment.
fn gone(entries: &[PathBuf]) {
    const LONGEST: Duration = Duration::from_millis(50);
    let begun = Instant::now();
    for entry in entries {
        let path = PathBuf::from("/proc").join(entry);
        while path.exists() && begun.elapsed() < LONGEST {
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_there_together_and_gone_afterwards() {
        assert!(make(0).is_ok());
        assert!(make(12).is_ok());
        let named = |path: &PathBuf| path.exists();
        let own = fs::read_link("/proc/thread-self").unwrap();
        assert!(
            named(&PathBuf::from("/proc").join(own)),
            "what `gone` asks is there"
        );
    }

    #[test]
    fn a_thread_is_asked_once_and_again_when_more_are_wanted() {
        assert_eq!(FOUND.get(), 1);
        find(Device::Cuda(0)).unwrap();
        assert_eq!(FOUND.get(), 1, "a device has no such loops");
        find(Device::Cpu).unwrap();
        let wanted = ffi::threads();
        assert_eq!(FOUND.get(), wanted.max(1));
        FOUND.set(usize::MAX);
        find(Device::Cpu).unwrap();
        assert_eq!(FOUND.get(), usize::MAX, "nothing is asked any more");
    }
}
