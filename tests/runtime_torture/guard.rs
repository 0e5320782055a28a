//! Memory whose end is the end of everything: the next byte is a page that nobody may touch.

use std::ptr;

use tch::{Kind, Tensor};

/// A mapping with a guard page behind it.
pub struct Guarded {
    start: *mut u8,
    pages: usize,
}

const PAGE: usize = 4096;

impl Guarded {
    /// Maps room for `bytes`; with `readable` false nobody may look at that either.
    pub fn new(bytes: usize, readable: bool) -> Self {
        let pages = bytes.div_ceil(PAGE).max(1);
        let length = (pages + 1) * PAGE;
        // SAFETY: a fresh anonymous mapping of this length; the protection of parts of it is changed within it.
        unsafe {
            let (none, both) = (libc::PROT_NONE, libc::PROT_READ | libc::PROT_WRITE);
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(ptr::null_mut(), length, none, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            if readable {
                assert_eq!(libc::mprotect(start, pages * PAGE, both), 0);
            }
            Self {
                start: start.cast(),
                pages,
            }
        }
    }

    /// Returns a tensor over this memory whose last byte is `short` bytes before the guard page; none where torch
    /// itself refuses.
    ///
    /// It must not outlive `self`, and where the memory is smaller than it nobody may read it.
    pub fn tensor(
        &self,
        sizes: &[i64],
        strides: &[i64],
        kind: Kind,
        short: usize,
    ) -> Option<Tensor> {
        let last: i64 = sizes.iter().zip(strides).try_fold(0i64, |last, (n, s)| {
            last.checked_add((n - 1).checked_mul(*s)?)
        })?;
        let bytes = (last + 1).checked_mul(kind.elt_size_in_bytes() as i64)? as usize;
        let end = self.start as usize + self.pages * PAGE - short;
        let start = end.checked_sub(bytes)? as *const u8;
        // SAFETY: torch reads nothing here, and the callers keep to the rules above.
        unsafe { Tensor::f_from_blob(start, sizes, strides, kind, tch::Device::Cpu) }.ok()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; tensors over it are gone.
        unsafe { libc::munmap(self.start.cast(), (self.pages + 1) * PAGE) };
    }
}
