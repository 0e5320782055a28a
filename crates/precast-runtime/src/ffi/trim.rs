//! Gives unused pages of the C library's heap back, for measurements of memory.

/// Gives pages of the heap that nothing uses back to the system, so that using them again can be seen.
pub fn give_back() {
    // SAFETY: takes no pointer and frees only what the allocator holds unused; any thread may call it (man 3 malloc_trim,
    // MT-Safe).
    unsafe { libc::malloc_trim(0) };
}
