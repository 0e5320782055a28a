//! CUDA streams as torch has them, and the thread's current one as a scope.

use std::{
    ffi::c_void,
    marker::PhantomData,
    ptr::NonNull,
    sync::{Mutex, PoisonError},
};

use super::{
    TensorRef,
    cuda::{Functions, RawStream, cuda, ordinal},
};
use crate::TorchError;

/// A CUDA stream on which torch and the runtime can work.
///
/// A call runs on the stream that is current on its thread: the default one, or that of the innermost
/// [`Stream::enter`]. Work on two streams is ordered only by [`Stream::wait_for`].
pub struct Stream {
    handle: NonNull<c_void>,
    functions: &'static Functions,
    device: usize,
    /// Whether it is kept in [`SPARE`] after a drop.
    exclusive: bool,
}

/// Unused streams outside of torch's pool. They are never destroyed: allocators may remember them.
static SPARE: Mutex<Vec<Stream>> = Mutex::new(Vec::new());

// SAFETY: the handle is a heap copy of c10's CUDAStream, a plain value that only names a stream; CUDA's runtime API
// takes streams from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; no method changes the value.
unsafe impl Sync for Stream {}

impl Stream {
    /// Returns a stream of torch's own pool on a device. The pool has 32 streams, which are used in rotation and never
    /// destroyed.
    pub fn new(device: usize) -> Result<Self, TorchError> {
        let functions = cuda()?.functions()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim's own function, with a valid out pointer.
        let code = unsafe { (functions.stream_new)(ordinal(device)?, &mut handle) };
        Self::from_handle(functions, code, handle, device)
    }

    /// Returns a stream without another user, until it is dropped. It is not from torch's pool, which creates all its
    /// streams with the first one.
    pub(crate) fn exclusive(device: usize) -> Result<Self, TorchError> {
        let spare = {
            let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
            let at = spare.iter().position(|stream| stream.device == device);
            at.map(|at| spare.swap_remove(at))
        };
        if let Some(stream) = spare {
            return Ok(stream);
        }
        let functions = cuda()?.functions()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim's own function, with a valid out pointer.
        let code = unsafe { (functions.stream_apart)(ordinal(device)?, &mut handle) };
        let mut stream = Self::from_handle(functions, code, handle, device)?;
        stream.exclusive = true;
        Ok(stream)
    }

    /// Returns the stream that is current on this thread.
    pub fn current(device: usize) -> Result<Self, TorchError> {
        let functions = cuda()?.functions()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim's own function, with a valid out pointer.
        let code = unsafe { (functions.stream_current)(ordinal(device)?, &mut handle) };
        Self::from_handle(functions, code, handle, device)
    }

    /// Wraps a `cudaStream_t` of the caller's.
    ///
    /// # Safety
    /// `raw` is a stream of this device, and is not destroyed before the runtime's last call on it is done and
    /// everything that ran on it is dropped.
    pub unsafe fn from_raw(raw: *mut c_void, device: usize) -> Result<Self, TorchError> {
        let functions = cuda()?.functions()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim's own function; the caller vouches for `raw`.
        let code = unsafe { (functions.stream_external)(ordinal(device)?, raw, &mut handle) };
        Self::from_handle(functions, code, handle, device)
    }

    fn from_handle(
        functions: &'static Functions,
        code: i32,
        handle: *mut c_void,
        device: usize,
    ) -> Result<Self, TorchError> {
        functions.check(code)?;
        let handle = NonNull::new(handle).ok_or("no stream was made")?;
        Ok(Self {
            handle,
            functions,
            device,
            exclusive: false,
        })
    }

    /// Makes this the current stream of the thread, until the scope is dropped.
    pub fn enter(&self) -> Result<Scope<'_>, TorchError> {
        let mut scope = std::ptr::null_mut();
        // SAFETY: a live stream and a valid out pointer.
        let code = unsafe { (self.functions.scope_enter)(self.handle.as_ptr(), &mut scope) };
        self.functions.check(code)?;
        let guard = NonNull::new(scope).ok_or("no scope was made")?;
        Ok(Scope {
            guard,
            functions: self.functions,
            stream: PhantomData,
        })
    }

    /// Makes later work of this stream wait for the current work of `other`.
    pub fn wait_for(&self, other: &Stream) -> Result<(), TorchError> {
        cuda()?.wait(self.raw(), other.raw(), self.device)
    }

    /// Prevents the reuse of a tensor's memory, after its last handle is dropped, until this stream has done its work
    /// up to now.
    ///
    /// Needed for a tensor of another stream that may be dropped while this stream still reads it.
    pub fn uses<'a>(&self, tensor: impl Into<TensorRef<'a>>) -> Result<(), TorchError> {
        // SAFETY: a live stream and a live tensor.
        self.functions.check(unsafe {
            (self.functions.stream_uses)(self.handle.as_ptr(), tensor.into().raw())
        })
    }

    /// Waits until everything on the stream is done.
    pub fn synchronize(&self) -> Result<(), TorchError> {
        // SAFETY: a live stream.
        self.functions
            .check(unsafe { (self.functions.stream_sync)(self.handle.as_ptr()) })
    }

    /// Returns the raw stream.
    pub(crate) fn raw(&self) -> RawStream {
        // SAFETY: a live stream; the function only reads it.
        RawStream(unsafe { (self.functions.stream_raw)(self.handle.as_ptr()) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.exclusive {
            let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
            spare.push(Self { ..*self });
            return;
        }
        // SAFETY: `self` owns the handle. The stream itself is not destroyed.
        unsafe { (self.functions.stream_delete)(self.handle.as_ptr()) }
    }
}

/// While it lives, its stream is the current one of this thread. Scopes end in the reverse order of their beginnings.
#[must_use]
pub struct Scope<'a> {
    guard: NonNull<c_void>,
    functions: &'static Functions,
    // Not `Send`: it restores the stream of this thread.
    stream: PhantomData<(&'a Stream, *mut ())>,
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        // SAFETY: `self` owns the guard, and is on the thread that made it.
        unsafe { (self.functions.scope_leave)(self.guard.as_ptr()) }
    }
}
