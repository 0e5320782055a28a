//! A copy of a small tensor of a CUDA device in pinned memory of the host: it is there some time after the call that
//! asked for it, and nobody has to wait for the device to learn that it is.

use std::{ffi::c_void, ptr::NonNull};

use super::{
    Handle,
    cuda::{Functions, cuda, ordinal},
};
use crate::{TorchError, ending};

/// Pinned memory for some numbers, and the event of the copy that is under way.
pub struct Slip {
    raw: NonNull<c_void>,
    functions: &'static Functions,
    count: usize,
}

// SAFETY: the memory and the event are this value's own, and CUDA's runtime API takes them from any thread.
unsafe impl Send for Slip {}
// SAFETY: shared references only ask for the event and read memory that no copy writes.
unsafe impl Sync for Slip {}

impl Slip {
    /// Makes one for `count` numbers of a device.
    pub fn new(device: usize, count: usize) -> Result<Self, TorchError> {
        let functions = cuda()?.functions()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the shim's own function, with a valid out pointer.
        functions.check(unsafe { (functions.slip_new)(ordinal(device)?, count, &mut raw) })?;
        let raw = NonNull::new(raw).ok_or("no pinned memory was made")?;
        Ok(Self {
            raw,
            functions,
            count,
        })
    }

    /// Copies a tensor of `int64` on the thread's current stream, without a wait. Returns whether it does: a stream that
    /// is being captured copies nothing now.
    pub fn send(&mut self, tensor: &Handle) -> Result<bool, TorchError> {
        let mut sent = false;
        let (raw, from, count) = (self.raw.as_ptr(), tensor.raw(), self.count);
        // SAFETY: a live tensor and a valid out pointer; the shim checks dtype and size.
        let code = unsafe { (self.functions.slip_send)(raw, from, count, &mut sent) };
        self.functions.check(code)?;
        Ok(sent)
    }

    /// Returns whether the copy is there.
    pub fn ready(&self) -> Result<bool, TorchError> {
        let mut ready = false;
        // SAFETY: the shim's own function, with a valid out pointer.
        let code = unsafe { (self.functions.slip_ready)(self.raw.as_ptr(), &mut ready) };
        self.functions.check(code)?;
        Ok(ready)
    }

    /// Waits for the copy, and returns the numbers.
    pub fn read(&self) -> Result<Vec<i64>, TorchError> {
        let mut numbers = vec![0; self.count];
        // SAFETY: the shim's own function; it writes `count` numbers.
        let code = unsafe {
            (self.functions.slip_read)(self.raw.as_ptr(), numbers.as_mut_ptr(), self.count)
        };
        self.functions.check(code)?;
        Ok(numbers)
    }
}

impl Drop for Slip {
    fn drop(&mut self) {
        // The driver may be gone, and gives the memory back itself.
        if !ending::ended() {
            // SAFETY: `self` owns it. The shim waits for the copy.
            unsafe { (self.functions.slip_delete)(self.raw.as_ptr()) }
        }
    }
}
