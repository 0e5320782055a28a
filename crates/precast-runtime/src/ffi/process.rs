//! The whole process: the C library's heap, for measurements of memory, and the end.

/// Gives pages of the heap that nothing uses back to the system, so that using them again can be seen.
pub fn give_back() {
    // SAFETY: takes no pointer and frees unused memory only; any thread may call it (man 3 malloc_trim,
    // MT-Safe).
    unsafe { libc::malloc_trim(0) };
}

/// Keeps freed memory for later use. Without it the C library gives large blocks back to the system at once, and the
/// pages of the gradients of each step are made again: a step of an encoder of MiniLM's size with one row took 69 ms
/// instead of 49 (`keeping` in `benches/results/training-cpu.json`). The highest use of memory is the same.
pub fn keep_freed() {
    // SAFETY: two settings of the heap, which take no pointer (man 3 mallopt, MT-Unsafe init: the caller has no other
    // thread that sets any).
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
    }
}

/// Ends the process without running any destructor or exit handler.
pub fn exit(code: i32) -> ! {
    // SAFETY: a null stream means all of them (man 3 fflush); `_exit` only ends the process.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(code)
    }
}
