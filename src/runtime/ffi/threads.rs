//! How many threads an operator of libtorch uses on the CPU.

use super::shim;

/// Returns how many threads an operator may use that the calling thread calls.
pub fn threads() -> usize {
    // SAFETY: takes nothing; the shim catches what libtorch throws.
    let threads = unsafe { shim::precast_threads() };
    usize::try_from(threads).unwrap_or(1)
}

/// Makes operators that the calling thread calls use no other thread, for as long as it lives. Returns whether they do.
pub fn alone() -> bool {
    // SAFETY: takes nothing; it sets what OpenMP keeps for each thread apart.
    unsafe { shim::precast_alone() == 1 }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_is_alone_leaves_others_what_they_have() {
        let before = threads();
        let within = thread::spawn(|| (alone(), threads())).join().unwrap();
        assert_eq!(within, (true, 1));
        assert_eq!(threads(), before);
        assert_eq!(thread::spawn(threads).join().unwrap(), before);
    }
}
