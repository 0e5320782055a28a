//! A check that the threads of a call's parallel loops can be started.
//!
//! Generated loops and libtorch's own run on OpenMP, whose library ends the process when it can't start a thread: at
//! the limit of a user (`ulimit -u`) or of a container (`pids.max`). OpenMP creates the team of a thread in the first
//! call on it. So that call first starts as many threads, ends them, and returns an error if that fails. The team is
//! kept for the thread: later calls compare two numbers.
//!
//! Other code may use up the threads between this check and the first loop.

use std::{
    cell::Cell,
    fs, io,
    path::Path,
    sync::{Mutex, PoisonError, RwLock},
    thread,
    time::{Duration, Instant},
};

use precast_store::Device;

use super::{RuntimeError, ffi};

thread_local! {
    /// Threads that the calling thread is known to get, itself included.
    static FOUND: Cell<usize> = const { Cell::new(1) };
}

/// The stack of an OpenMP thread without other settings: the usual `ulimit -s`. It is address space, not memory.
const STACK: usize = 8 << 20;

/// Returns an error if the parallel loops of a call on this thread would find too few threads.
pub(super) fn find(device: Device) -> Result<(), RuntimeError> {
    let wanted = ffi::threads();
    if device != Device::Cpu || wanted <= FOUND.get() {
        return Ok(());
    }
    start(wanted - 1).map_err(|(started, source)| RuntimeError::NoThreads {
        wanted,
        found: started + 1,
        source,
    })?;
    FOUND.set(wanted);
    Ok(())
}

/// Starts `count` threads that exist at the same time. Fails with the number of threads that were started.
fn start(count: usize) -> Result<(), (usize, io::Error)> {
    // Otherwise two callers would count each other's threads.
    static LOCK: Mutex<()> = Mutex::new(());
    let _lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let gate = RwLock::new(());
    let hold = || {
        let entry = fs::read_link("/proc/thread-self");
        drop(gate.read());
        entry
    };
    thread::scope(|scope| {
        let mut threads = Vec::with_capacity(count);
        let closed = gate.write();
        let builder = || thread::Builder::new().stack_size(STACK);
        let all = (0..count).try_for_each(|started| {
            let thread = builder().spawn_scoped(scope, hold);
            threads.push(thread.map_err(|error| (started, error))?);
            Ok(())
        });
        drop(closed);
        let entries = threads.into_iter().filter_map(|thread| thread.join().ok());
        entries
            .filter_map(Result::ok)
            .for_each(|entry| wait_for_end(&entry));
        all
    })
}

/// Waits until the system no longer counts a thread that was joined, at most 50 ms.
fn wait_for_end(entry: &Path) {
    let begun = Instant::now();
    while Path::new("/proc").join(entry).exists() && begun.elapsed() < Duration::from_millis(50) {
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_checked_once_and_again_when_it_wants_more_threads() {
        assert_eq!(FOUND.get(), 1);
        find(Device::Cuda(0)).unwrap();
        assert_eq!(FOUND.get(), 1, "a device has no such loops");
        find(Device::Cpu).unwrap();
        assert_eq!(FOUND.get(), ffi::threads().max(1));
        FOUND.set(usize::MAX);
        find(Device::Cpu).unwrap();
        assert_eq!(FOUND.get(), usize::MAX);
        assert!(start(0).is_ok() && start(12).is_ok());
    }
}
