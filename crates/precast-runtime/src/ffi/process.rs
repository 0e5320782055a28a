//! The whole process: the C library's heap, for measurements of memory, and the end.

/// Gives pages of the heap that nothing uses back to the system, so that using them again can be seen.
pub fn give_back() {
    // SAFETY: takes no pointer and frees unused memory only; any thread may call it (man 3 malloc_trim,
    // MT-Safe).
    unsafe { libc::malloc_trim(0) };
}

/// Ends the process without running any destructor or exit handler.
pub fn exit(code: i32) -> ! {
    // SAFETY: a null stream means all of them (man 3 fflush); `_exit` only ends the process.
    unsafe {
        libc::fflush(std::ptr::null_mut());
        libc::_exit(code)
    }
}
