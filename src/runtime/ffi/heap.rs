//! The C library's heap, which libtorch's CPU allocator takes from.

/// The largest block whose size glibc's heap still learns from (malloc.c, `DEFAULT_MMAP_THRESHOLD_MAX`), less what rounding
/// to pages may add.
const LEARNT: usize = (32 << 20) - (64 << 10);

/// Has the heap keep blocks of up to 32 MiB that are freed, and up to 64 MiB of them in each of its arenas.
///
/// glibc takes large blocks from the system, gives them back when they are freed, and stops doing so for sizes that it
/// saw freed. A process that never freed a larger one gives the memory of a call's results between steps back at the end
/// of every call, and pays for every page again in the next. So here is such a block, which nobody writes to. Who set
/// thresholds of their own keeps them: then it learns nothing.
pub fn keep() {
    // SAFETY: a new block of the C library, which nobody else has, is freed where it came from; null may be freed.
    unsafe { libc::free(std::hint::black_box(libc::malloc(LEARNT))) };
}

/// Gives pages of the heap that nothing uses back to the system, so that using them again can be seen.
pub fn give_back() {
    // SAFETY: takes no pointer and frees only what the allocator holds unused; any thread may call it (man 3 malloc_trim,
    // MT-Safe).
    unsafe { libc::malloc_trim(0) };
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    /// Takes, fills and frees some blocks, and returns how many page faults this thread had so far.
    fn faults_after_a_call() -> i64 {
        const SIZE: usize = 1 << 20;
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: blocks are written within their bounds before they are freed; the usage is zeroed, or what the call wrote.
        unsafe {
            let blocks = [(); 8].map(|()| libc::malloc(SIZE));
            for block in blocks {
                assert!(!block.is_null());
                libc::memset(block, 1, SIZE);
            }
            for block in blocks {
                libc::free(std::hint::black_box(block));
            }
            libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr());
            usage.assume_init().ru_minflt
        }
    }

    #[test]
    fn what_a_call_frees_is_there_for_the_next() {
        keep();
        let first = faults_after_a_call();
        let mut last = first;
        for _ in 0..100 {
            last = faults_after_a_call();
        }
        // 2048 pages each time, if the blocks came from the system.
        assert!(last - first < 8192, "{} page faults", last - first);
    }
}
