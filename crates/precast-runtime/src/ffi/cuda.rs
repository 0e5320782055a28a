//! CUDA, detected at run time: one binary serves machines with and without it.
//!
//! Nothing in a Rust binary uses a symbol of `libtorch_cuda` directly, so libtorch would not detect CUDA. The library
//! is loaded here, from the folder of `libtorch_cpu`, with its symbols global, before a device is requested: artifacts
//! and the CUDA half of the shim use its symbols.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    fs::File,
    path::PathBuf,
    sync::OnceLock,
};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};
use precast_store::{Digest, target::Driver};

use super::{abi::functions as declare, context, libtorch, shim};
use crate::{RuntimeError, TorchError, ending};

/// CUDA, with libtorch's half for it loaded.
pub struct Cuda {
    devices: usize,
    driver: &'static Driver,
}

/// The CUDA half of the shim, once a load has opened it.
static SHIM: OnceLock<Functions> = OnceLock::new();

/// Opens the CUDA half of a shim, if none is open: `file` gives the object. Fails as [`shim::open`](super::open_shim)
/// does.
pub fn open_shim(
    object: &Digest,
    file: impl FnOnce() -> Result<File, RuntimeError>,
) -> Result<(), RuntimeError> {
    shim::open_once(&SHIM, object, file, Functions::find)
}

/// Returns whether the CUDA half of a shim is open.
pub fn shim_is_open() -> bool {
    SHIM.get().is_some()
}

type Ptr = *mut c_void;

declare! {
    last_error: "precast_cuda_last_error" => unsafe extern "C" fn() -> *const c_char;
    health: "precast_cuda_health" => unsafe extern "C" fn(i32) -> i32;
    synchronize: "precast_cuda_synchronize" => unsafe extern "C" fn(i32) -> i32;
    memory: "precast_cuda_memory" => unsafe extern "C" fn(i32, *mut u64, *mut u64, *mut u64, *mut u64, *mut u64) -> i32;
    reset_peak: "precast_cuda_reset_peak" => unsafe extern "C" fn(i32) -> i32;
    release_cached: "precast_cuda_release_cached" => unsafe extern "C" fn() -> i32;
    stream_apart: "precast_cuda_stream_apart" => unsafe extern "C" fn(i32, *mut Ptr) -> i32;
    stream_new: "precast_cuda_stream_new" => unsafe extern "C" fn(i32, *mut Ptr) -> i32;
    stream_current: "precast_cuda_stream_current" => unsafe extern "C" fn(i32, *mut Ptr) -> i32;
    stream_current_raw: "precast_cuda_stream_current_raw" => unsafe extern "C" fn(i32, *mut Ptr) -> i32;
    stream_external: "precast_cuda_stream_external" => unsafe extern "C" fn(i32, Ptr, *mut Ptr) -> i32;
    stream_delete: "precast_cuda_stream_delete" => unsafe extern "C" fn(Ptr);
    stream_raw: "precast_cuda_stream_raw" => unsafe extern "C" fn(Ptr) -> Ptr;
    stream_sync: "precast_cuda_stream_sync" => unsafe extern "C" fn(Ptr) -> i32;
    stream_uses: "precast_cuda_stream_uses" => unsafe extern "C" fn(Ptr, *const c_void) -> i32;
    wait: "precast_cuda_wait" => unsafe extern "C" fn(Ptr, Ptr, i32) -> i32;
    slip_new: "precast_cuda_slip_new" => unsafe extern "C" fn(i32, usize, *mut Ptr) -> i32;
    slip_send: "precast_cuda_slip_send" => unsafe extern "C" fn(Ptr, *const c_void, usize, *mut bool) -> i32;
    slip_ready: "precast_cuda_slip_ready" => unsafe extern "C" fn(Ptr, *mut bool) -> i32;
    slip_read: "precast_cuda_slip_read" => unsafe extern "C" fn(Ptr, *mut i64, usize) -> i32;
    slip_delete: "precast_cuda_slip_delete" => unsafe extern "C" fn(Ptr);
    scope_enter: "precast_cuda_scope_enter" => unsafe extern "C" fn(Ptr, *mut Ptr) -> i32;
    scope_leave: "precast_cuda_scope_leave" => unsafe extern "C" fn(Ptr);
    pool_new: "precast_cuda_pool_new" => unsafe extern "C" fn(*mut u64, *mut u64) -> i32;
    workspaces: "precast_cuda_workspaces" => unsafe extern "C" fn(i32) -> i32;
    graph_begin: "precast_cuda_graph_begin" => unsafe extern "C" fn(u64, u64, i32, *mut Ptr) -> i32;
    graph_end: "precast_cuda_graph_end" => unsafe extern "C" fn(Ptr) -> i32;
    graph_replay: "precast_cuda_graph_replay" => unsafe extern "C" fn(Ptr) -> i32;
    graph_delete: "precast_cuda_graph_delete" => unsafe extern "C" fn(Ptr);
    upload: "precast_cuda_upload" => unsafe extern "C" fn(i32, *mut u8, u64, c_int, *const Piece, usize, usize, u64) -> i32;
}

/// A part of a file, and its destination in a device block.
#[repr(C)]
pub(super) struct Piece {
    pub to: u64,
    pub from: u64,
    pub bytes: u64,
}

/// Loads libtorch's CUDA half on first use; the reason when there is none.
pub fn cuda() -> Result<&'static Cuda, TorchError> {
    cuda_for(&[])
}

/// As [`cuda`], with the contexts of some devices made meanwhile.
pub fn cuda_for(devices: &[usize]) -> Result<&'static Cuda, TorchError> {
    static CUDA: OnceLock<Result<Cuda, TorchError>> = OnceLock::new();
    let load = || {
        let _span = tracing::info_span!("libtorch_cuda").entered();
        // An exit of the process waits for it.
        let _work = ending::work();
        let _contexts = context::preload(devices);
        Cuda::load()
    };
    CUDA.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// CUDA's runtime library, by its file name up to the version.
const CUDART: &str = "libcudart.so.";

/// Fails where the process has the runtime library of another CUDA than torch's.
fn one_cuda(there: &[PathBuf], torch: &str, cuda: &str) -> Result<(), TorchError> {
    let major = |version: &str| version.split('.').next().map(str::to_owned);
    let other = there.iter().find(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.strip_prefix(CUDART).and_then(major) != major(cuda)
    });
    match other {
        Some(path) => Err(TorchError::cuda(format!(
            "the process has `{}`, and torch {torch} is for CUDA {cuda}: there can be only one CUDA in a process",
            path.display()
        ))),
        None => Ok(()),
    }
}

impl Cuda {
    fn load() -> Result<Self, TorchError> {
        let open = libtorch::get()?;
        if let Some(torch) = libtorch::packaged(&open.folder)
            && let Some(cuda) = &torch.cuda
        {
            let there = libtorch::loaded(|name| name.starts_with(CUDART));
            one_cuda(&there, &torch.version, cuda)?;
        }
        let path = open.folder.join("libtorch_cuda.so");
        // SAFETY: it is libtorch's own library, of the folder the process runs libtorch from; its initialisers
        // register the CUDA backend.
        let loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
        match loaded {
            Ok(library) => std::mem::forget(library),
            Err(error) => {
                let why = std::error::Error::source(&error)
                    .map_or(error.to_string(), ToString::to_string);
                return Err(TorchError::cuda(format!(
                    "libtorch has no CUDA half here: {why}"
                )));
            }
        }
        let driver = Driver::get()
            .ok_or_else(|| TorchError::cuda("this machine has no CUDA driver (`libcuda.so.1`)"))?;
        match driver.devices() {
            0 => Err(TorchError::cuda("this machine has no CUDA device")),
            devices => Ok(Self { devices, driver }),
        }
    }

    /// Returns the number of devices, at least one.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Creates the device's context, if the process has none. The caller's current device does not change.
    pub fn context(&self, device: usize) -> Result<(), TorchError> {
        let _span = tracing::info_span!("context", device).entered();
        self.driver
            .retain_context(device)
            .map_err(|error| TorchError::cuda(error.to_string()))
    }

    /// Returns the compute capability of a device, as `90` for 9.0.
    pub fn capability(&self, device: usize) -> Result<String, TorchError> {
        self.driver
            .capability(device)
            .map_err(|error| TorchError::cuda(error.to_string()))
    }

    /// Fails with the error of an earlier operation, if the device's error is persistent.
    pub fn health(&self, device: usize) -> Result<(), TorchError> {
        let functions = self.functions()?;
        // SAFETY: the shim's own function, which only reads the state of the device.
        functions.check(unsafe { (functions.health)(ordinal(device)?) })
    }

    /// Waits until all submitted work of the device is done.
    ///
    /// A context with a persistent error still allows this wait on drop.
    pub fn synchronize(&self, device: usize) -> Result<(), TorchError> {
        let Some(functions) = SHIM.get() else {
            if !shim::is_open() {
                return self.functions().map(drop);
            }
            // SAFETY: the shim's own function; it only waits.
            return shim::checked(unsafe { shim::precast_cuda_wait_for(ordinal(device)?) });
        };
        // SAFETY: the shim's own function; it only waits.
        functions.check(unsafe { (functions.synchronize)(ordinal(device)?) })
    }

    /// Returns the use of the device's memory.
    pub fn memory(&self, device: usize) -> Result<DeviceMemory, TorchError> {
        let functions = self.functions()?;
        let mut memory = DeviceMemory::default();
        let DeviceMemory {
            allocated,
            peak,
            reserved,
            free,
            total,
        } = &mut memory;
        // SAFETY: the shim's own function, with valid out pointers.
        functions.check(unsafe {
            (functions.memory)(ordinal(device)?, allocated, peak, reserved, free, total)
        })?;
        Ok(memory)
    }

    /// Sets the maximum in use by tensors back to the present use.
    pub fn reset_peak(&self, device: usize) -> Result<(), TorchError> {
        let functions = self.functions()?;
        // SAFETY: the shim's own function; it touches counters of torch's allocator, under its lock.
        functions.check(unsafe { (functions.reset_peak)(ordinal(device)?) })
    }

    /// Gives the unused memory of torch's allocator back to all devices.
    pub fn release_cached(&self) -> Result<(), TorchError> {
        let functions = self.functions()?;
        // SAFETY: the shim's own function; the allocator frees unused memory only, under its lock.
        functions.check(unsafe { (functions.release_cached)() })
    }

    /// Returns the raw stream torch works on now on this thread; null is the default stream.
    pub fn current_stream(&self, device: usize) -> Result<RawStream, TorchError> {
        let Some(functions) = SHIM.get() else {
            // Without the shim only code of the caller changes torch's stream.
            return Ok(RawStream(std::ptr::null_mut()));
        };
        let mut stream = std::ptr::null_mut();
        let ordinal = ordinal(device)?;
        // SAFETY: the shim's own function, with a valid out pointer.
        let code = unsafe { (functions.stream_current_raw)(ordinal, &mut stream) };
        functions.check(code)?;
        Ok(RawStream(stream))
    }

    /// Makes later work of `waiter` wait for the current work of `other`.
    ///
    /// Both are live raw streams of `device`. Torch's own streams live as long as the process.
    pub(crate) fn wait(
        &self,
        waiter: RawStream,
        other: RawStream,
        device: usize,
    ) -> Result<(), TorchError> {
        let functions = self.functions()?;
        // SAFETY: both came from torch's current stream or from a `Stream`, whose makers say that they live.
        functions.check(unsafe { (functions.wait)(waiter.0, other.0, ordinal(device)?) })
    }

    /// Returns the shim's functions, or why there are none.
    pub(super) fn functions(&self) -> Result<&'static Functions, TorchError> {
        SHIM.get().ok_or_else(|| {
            TorchError::cuda("no shim for CUDA is open: loading a model opens one, if the build that made it found CUDA's headers")
        })
    }
}

/// A raw `cudaStream_t`, as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawStream(pub(super) *mut c_void);

impl RawStream {
    /// The stream for the CPU, and CUDA's default stream.
    pub const NONE: Self = Self(std::ptr::null_mut());
}

// SAFETY: a `cudaStream_t` is a name that CUDA's runtime API takes from any thread ("thread safe" in the CUDA C++
// programming guide); this type never dereferences it.
unsafe impl Send for RawStream {}

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In use by tensors.
    pub allocated: u64,
    /// The maximum in use by tensors.
    pub peak: u64,
    /// Held by torch's allocator.
    pub reserved: u64,
    /// Unused by any process, according to the driver.
    pub free: u64,
    /// All memory of the device.
    pub total: u64,
}

pub(super) fn ordinal(device: usize) -> Result<i32, TorchError> {
    Ok(i32::try_from(device)?)
}

impl Functions {
    pub fn check(&self, code: i32) -> Result<(), TorchError> {
        match code {
            0 => Ok(()),
            // SAFETY: a NUL-terminated thread-local string, copied at once.
            _ => Err(TorchError::cuda(
                unsafe { CStr::from_ptr((self.last_error)()) }.to_string_lossy(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_has_one_cuda() {
        let check = |names: &[&str]| {
            let there: Vec<_> = names.iter().map(Into::into).collect();
            super::one_cuda(&there, "2.11.0+cu130", "13.0")
        };
        assert_eq!(check(&[]), Ok(()));
        let both = ["/a/libcudart.so.13", "/b/libcudart.so.13.0.96"];
        assert_eq!(check(&both), Ok(()));
        for other in ["/a/libcudart.so.12", "/a/libcudart.so.130"] {
            let error = check(&["/b/libcudart.so.13", other]).unwrap_err();
            let says = format!("the process has `{other}`, and torch");
            assert!(error.to_string().starts_with(&says), "{error}");
        }
    }

    #[test]
    fn the_shim_asks_the_loader_for_nothing_special() {
        let compiled = precast_shim::testing::compiled();
        // Without CUDA's headers there is no half for CUDA.
        for file in [&compiled.file].into_iter().chain(&compiled.cuda) {
            let bytes = std::fs::read(file).unwrap();
            let elf = precast_store::elf::Elf::parse(&*bytes).unwrap();
            assert_eq!(elf.hazards().unwrap(), []);
        }
    }
}
