//! libtorch's interpreter for exported graphs: eager, with no Python.

use std::{
    ffi::{CString, c_void},
    fs::File,
    os::fd::AsRawFd,
    ptr::NonNull,
};

use smallvec::SmallVec;

use super::{
    Handle,
    shim::{self, checked},
};

/// One loaded `torch.export.save` archive.
pub struct Interpreter {
    handle: NonNull<c_void>,
    // The interpreter may read the archive while it runs.
    _archive: File,
}

// SAFETY: `torch::nativert::ModelRunner` keeps its state on the heap and has no thread affinity; `run` takes
// `&mut self`, so it is never entered twice.
unsafe impl Send for Interpreter {}

impl Interpreter {
    /// Loads an archive from a sealed file in memory.
    pub fn new(archive: File) -> Result<Self, String> {
        let path = CString::new(format!("/proc/self/fd/{}", archive.as_raw_fd()))
            .map_err(|error| error.to_string())?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: a C string and a valid out pointer.
        checked(unsafe { shim::precast_eager_new(path.as_ptr(), &mut handle) })?;
        Ok(Self {
            handle: NonNull::new(handle).ok_or("no interpreter was made")?,
            _archive: archive,
        })
    }

    /// Runs it once and returns `outputs` tensors. The inputs are the caller's still.
    pub fn run(
        &mut self,
        inputs: &[&Handle],
        outputs: usize,
    ) -> Result<SmallVec<[Handle; 8]>, String> {
        let raw: SmallVec<[*mut c_void; 32]> = inputs.iter().map(|input| input.raw()).collect();
        let mut made: SmallVec<[*mut c_void; 8]> =
            SmallVec::from_elem(std::ptr::null_mut(), outputs);
        // SAFETY: inputs are live handles that are borrowed for the call; the out array has the length it is given.
        checked(unsafe {
            shim::precast_eager_run(
                self.handle.as_ptr(),
                raw.as_ptr(),
                raw.len(),
                made.as_mut_ptr(),
                made.len(),
            )
        })?;
        // SAFETY: the shim wrote a new handle to every entry.
        let made = made.into_iter().map(|raw| unsafe { Handle::from_raw(raw) });
        made.collect::<Option<_>>()
            .ok_or_else(|| "an output was not written".to_owned())
    }
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        // SAFETY: `self` owns it.
        unsafe { shim::precast_eager_delete(self.handle.as_ptr()) }
    }
}
