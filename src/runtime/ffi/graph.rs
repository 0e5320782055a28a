//! CUDA graphs: what a stream was given once, launched again as a whole.

use std::{ffi::c_void, ptr::NonNull};

use smallvec::SmallVec;

use super::{
    cuda::{Functions, cuda, ordinal},
    tensor::Handle,
};

/// Names the memory that graphs captured into it share.
///
/// What one graph frees while it is captured, the next one uses. So no two graphs of a pool may run at the same time,
/// and what one left in its outputs is gone when another runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool(u64, u64);

impl Pool {
    pub fn new() -> Result<Self, String> {
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
    /// How many tensors were looked for in it.
    found: usize,
    functions: &'static Functions,
}

// SAFETY: at::cuda::CUDAGraph is a plain object without thread affinity; torch captures and replays it from any thread.
// `replay` takes `&mut self`, so it is never entered twice.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `work` puts on the thread's current stream, which must not be the default one.
    ///
    /// When `work` or the capture fails, the capture is ended and the reason returned; the stream can be used again.
    pub fn capture<T>(
        pool: Pool,
        device: usize,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Result<(Self, T), String> {
        let functions = cuda()?.functions()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the shim's own function, with a valid out pointer.
        functions.check(unsafe {
            (functions.graph_begin)(pool.0, pool.1, ordinal(device)?, &mut handle)
        })?;
        let graph = Self {
            handle: NonNull::new(handle).ok_or("no graph was made")?,
            found: 0,
            functions,
        };
        let worked = work();
        // SAFETY: a live graph whose capture has begun on this thread.
        let ended = functions.check(unsafe { (functions.graph_end)(graph.handle.as_ptr()) });
        // The reason of the work comes first: it is usually why the capture could not end.
        let made = worked?;
        ended?;
        Ok((graph, made))
    }

    /// Looks for the addresses of these tensors in the graph, and returns of each whether a replay can be given another
    /// address for it, as far as can be seen: see places.h for what can't. The first `inputs` of them are its inputs, the
    /// others its outputs.
    pub fn find(&mut self, tensors: &[Handle], inputs: usize) -> Result<Vec<bool>, String> {
        let raw: Vec<*mut c_void> = tensors.iter().map(Handle::raw).collect();
        let mut movable = vec![false; raw.len()];
        // When it fails they were looked for all the same, and none of them moves.
        self.found = raw.len();
        // SAFETY: a live, captured graph, live tensors, and room for as many answers.
        self.functions.check(unsafe {
            (self.functions.graph_find)(
                self.handle.as_ptr(),
                raw.as_ptr(),
                inputs,
                raw.len(),
                movable.as_mut_ptr(),
            )
        })?;
        Ok(movable)
    }

    /// Launches the graph on the thread's current stream, on the tensors it was captured with.
    pub fn replay(&mut self) -> Result<(), String> {
        // SAFETY: a live, captured graph; `&mut self` keeps other callers out.
        self.functions
            .check(unsafe { (self.functions.graph_replay)(self.handle.as_ptr(), std::ptr::null()) })
    }

    /// Launches it with these tensors in place of those that [`Self::find`] looked for; `None` for those themselves.
    ///
    /// A tensor that takes another's place must be one like it: the caller has compared sizes, strides, dtype and device.
    pub fn replay_on(&mut self, tensors: &[Option<&Handle>]) -> Result<(), String> {
        if tensors.len() != self.found {
            return Err("as many tensors are needed as were looked for".to_owned());
        }
        let addresses: SmallVec<[*mut c_void; 16]> = tensors
            .iter()
            .map(|tensor| match tensor {
                Some(tensor) => tensor.meta().address() as *mut c_void,
                None => std::ptr::null_mut(),
            })
            .collect();
        // SAFETY: a live, captured graph; as many addresses as tensors were looked for; `&mut self` keeps others out.
        self.functions.check(unsafe {
            (self.functions.graph_replay)(self.handle.as_ptr(), addresses.as_ptr())
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: `self` owns the graph.
        unsafe { (self.functions.graph_delete)(self.handle.as_ptr()) }
    }
}
