//! CUDA graphs: recorded work of a stream, launched as a whole.

use std::{ffi::c_void, ptr::NonNull};

use super::cuda::{Functions, cuda, ordinal};
use crate::TorchError;

/// Names the memory that graphs captured into it share.
///
/// A graph uses the memory that earlier graphs freed during their capture. So no two graphs of a pool may run at the
/// same time, and a replay may overwrite the outputs of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphPool(u64, u64);

impl GraphPool {
    pub fn new() -> Result<Self, TorchError> {
        let functions = cuda()?.functions()?;
        let mut pool = Self(0, 0);
        // SAFETY: the shim's own function, with valid out pointers.
        functions.check(unsafe { (functions.pool_new)(&mut pool.0, &mut pool.1) })?;
        Ok(pool)
    }
}

/// A captured graph.
pub struct Graph {
    handle: NonNull<c_void>,
    functions: &'static Functions,
}

// SAFETY: at::cuda::CUDAGraph is a plain object without thread affinity; torch captures and replays it from any thread.
// `replay` takes `&mut self`, so it is never entered twice.
unsafe impl Send for Graph {}

impl Graph {
    /// Makes cuBLAS's workspaces of this thread and its current stream, in memory that nothing else gets, also after they
    /// are freed: graphs that are captured on this thread and stream write there.
    pub fn workspaces(device: usize) -> Result<(), TorchError> {
        let functions = cuda()?.functions()?;
        // SAFETY: the shim's own function; torch makes workspaces on any thread.
        functions.check(unsafe { (functions.workspaces)(ordinal(device)?) })
    }

    /// Captures the launches of `work` on the thread's current stream, which must not be the default one.
    ///
    /// When `work` or the capture fails, the capture is ended and the reason returned; the stream can be used again.
    pub fn capture<T>(
        pool: GraphPool,
        device: usize,
        work: impl FnOnce() -> Result<T, TorchError>,
    ) -> Result<(Self, T), TorchError> {
        let functions = cuda()?.functions()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim's own function, with a valid out pointer.
        functions.check(unsafe {
            (functions.graph_begin)(pool.0, pool.1, ordinal(device)?, &mut handle)
        })?;
        let graph = Self {
            handle: NonNull::new(handle).ok_or("no graph was made")?,
            functions,
        };
        let worked = work();
        // SAFETY: a live graph whose capture has begun on this thread.
        let ended = functions.check(unsafe { (functions.graph_end)(graph.handle.as_ptr()) });
        // The error of the work comes first: it is usually the reason why the capture could not end.
        let made = worked?;
        ended?;
        Ok((graph, made))
    }

    /// Launches the graph on the thread's current stream.
    pub fn replay(&mut self) -> Result<(), TorchError> {
        // SAFETY: a live, captured graph; `&mut self` keeps other callers out.
        self.functions
            .check(unsafe { (self.functions.graph_replay)(self.handle.as_ptr()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: `self` owns the graph.
        unsafe { (self.functions.graph_delete)(self.handle.as_ptr()) }
    }
}
