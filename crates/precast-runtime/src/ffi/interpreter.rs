//! What runs an exported graph without Python: Precast's own list of calls, or libtorch's interpreter for the archives of
//! stores that earlier versions built.

use std::{
    ffi::{CString, c_void},
    fs::File,
    os::fd::AsRawFd,
    ptr::NonNull,
};

use smallvec::SmallVec;

use super::{
    Calls, Handle,
    shim::{self, RawTensor, checked},
};

/// One exported graph, loaded.
pub enum Interpreter {
    Calls(Calls),
    Archive(Archive),
}

impl Interpreter {
    /// Runs it once and returns `outputs` tensors. The inputs are the caller's still.
    pub fn run(
        &mut self,
        inputs: &[&Handle],
        outputs: usize,
    ) -> Result<SmallVec<[Handle; 8]>, String> {
        match self {
            Self::Calls(calls) => calls.run(inputs, outputs),
            Self::Archive(archive) => archive.run(inputs, outputs),
        }
    }
}

/// Runs an exported graph by a function of the shim, given its inputs, their number, the outputs and theirs.
///
/// # Safety
/// `run` borrows the inputs, and writes a new handle to every output, or to the first of them before it fails.
pub(super) unsafe fn run_on(
    inputs: &[&Handle],
    outputs: usize,
    run: impl FnOnce(*const RawTensor, usize, *mut RawTensor, usize) -> i32,
) -> Result<SmallVec<[Handle; 8]>, String> {
    let raw: SmallVec<[RawTensor; 32]> = inputs.iter().map(|input| input.raw()).collect();
    let mut made: SmallVec<[RawTensor; 8]> = SmallVec::from_elem(std::ptr::null_mut(), outputs);
    let result = checked(run(raw.as_ptr(), raw.len(), made.as_mut_ptr(), made.len()));
    // SAFETY: as the caller says; null is no handle.
    let made = made.into_iter().map(|raw| unsafe { Handle::from_raw(raw) });
    let made: SmallVec<[Option<Handle>; 8]> = made.collect();
    result?;
    made.into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| "an output was not written".to_owned())
}

/// One loaded `torch.export.save` archive. Only libtorch 2.11 can run it; another refuses it.
pub struct Archive {
    handle: NonNull<c_void>,
    // The interpreter may read the archive while it runs.
    _archive: File,
}

// SAFETY: `torch::nativert::ModelRunner` keeps its state on the heap and has no thread affinity; `run` takes
// `&mut self`, so it is never entered twice.
unsafe impl Send for Archive {}

impl Archive {
    /// Loads an archive from a sealed file in memory.
    pub fn new(archive: File) -> Result<Self, String> {
        let path = CString::new(format!("/proc/self/fd/{}", archive.as_raw_fd()))
            .map_err(|error| error.to_string())?;
        shim::capture_messages();
        let mut handle = std::ptr::null_mut();
        // SAFETY: a C string and a valid out pointer.
        checked(unsafe { shim::precast_archive_new(path.as_ptr(), &mut handle) })?;
        Ok(Self {
            handle: NonNull::new(handle).ok_or("no interpreter was made")?,
            _archive: archive,
        })
    }

    fn run(&mut self, inputs: &[&Handle], outputs: usize) -> Result<SmallVec<[Handle; 8]>, String> {
        let archive = self.handle.as_ptr();
        // SAFETY: an archive of the shim, whose function does as `run_on` asks.
        unsafe {
            run_on(inputs, outputs, |given, n_in, made, n_out| {
                shim::precast_archive_run(archive, given, n_in, made, n_out)
            })
        }
    }
}

impl Drop for Archive {
    fn drop(&mut self) {
        // SAFETY: `self` owns it.
        unsafe { shim::precast_archive_delete(self.handle.as_ptr()) }
    }
}

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use precast_store::record::Dtype;

    use super::*;
    use crate::{ffi::give_back, source::sealed};

    /// The archive is `torch.export.save`, without example inputs, of `x -> (x * 2, x.sum().expand(2 ** 45))` at `x` float32 [2 ** 22]: there is no
    /// memory for a second output of the caller's own.
    #[test]
    fn a_run_that_fails_leaves_no_outputs_behind() {
        // Of 1600 MiB that would be left. Other tests take some meanwhile.
        const MOST: u64 = 1 << 30;
        let archive = include_bytes!("../../../../tests/data/huge.pt2");
        let mut interpreter = Archive::new(sealed("huge", archive).unwrap()).unwrap();
        let x = Handle::of(&vec![1.0f32; 1 << 22], &[1 << 22], Dtype::Float32).unwrap();
        let mut run = || interpreter.run(&[&x], 2).unwrap_err();
        assert!(run().contains("allocate memory"), "{}", run());
        let before = resident();
        for _ in 0..100 {
            run();
        }
        give_back();
        let more = resident().saturating_sub(before);
        assert!(more < MOST, "{} MiB more", more >> 20);
    }

    fn resident() -> u64 {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find(|line| line.starts_with("RssAnon:"));
        let kib = line.unwrap().split_whitespace().nth(1).unwrap();
        kib.parse::<u64>().unwrap() << 10
    }
}
