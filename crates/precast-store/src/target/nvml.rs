//! The compute capabilities of this host's GPUs, from the driver's management library.
//!
//! `libnvidia-ml.so.1` comes with the driver, needs no CUDA toolkit, makes no context and takes no device memory. It is
//! opened on first use. A machine without it has no GPU.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};

/// `nvmlReturn_t`: zero is success.
type Status = c_int;
type Handle = *mut c_void;

/// Returns the compute capability of each GPU as `90` for 9.0, in the driver's order; empty without a driver.
pub fn compute_capabilities() -> Vec<String> {
    Nvml::open()
        .map(|nvml| nvml.capabilities())
        .unwrap_or_default()
}

/// The library, initialised. Dropping it shuts it down before the library is closed.
struct Nvml {
    count: Symbol<unsafe extern "C" fn(*mut c_uint) -> Status>,
    handle: Symbol<unsafe extern "C" fn(c_uint, *mut Handle) -> Status>,
    capability: Symbol<unsafe extern "C" fn(Handle, *mut c_int, *mut c_int) -> Status>,
    shutdown: Symbol<unsafe extern "C" fn() -> Status>,
    /// Last, so that it is closed after everything else is gone.
    _library: Library,
}

impl Nvml {
    fn open() -> Option<Self> {
        // SAFETY: this is the driver's own library, whose initialisers any program may run. The signatures are those of
        // `nvml.h`, unchanged since version 2 of these functions; the symbols live as long as `_library`.
        unsafe {
            let library = Library::open(Some("libnvidia-ml.so.1"), RTLD_NOW | RTLD_LOCAL).ok()?;
            let init: Symbol<unsafe extern "C" fn() -> Status> =
                library.get(b"nvmlInit_v2\0").ok()?;
            let count = library.get(b"nvmlDeviceGetCount_v2\0").ok()?;
            let handle = library.get(b"nvmlDeviceGetHandleByIndex_v2\0").ok()?;
            let capability = library.get(b"nvmlDeviceGetCudaComputeCapability\0").ok()?;
            let shutdown = library.get(b"nvmlShutdown\0").ok()?;
            (init() == 0).then_some(Self {
                count,
                handle,
                capability,
                shutdown,
                _library: library,
            })
        }
    }

    fn capabilities(&self) -> Vec<String> {
        let mut count = 0;
        // SAFETY: the library is initialised, and `count` is writable for the length of the call.
        if unsafe { (self.count)(&raw mut count) } != 0 {
            return Vec::new();
        }
        (0..count)
            .filter_map(|index| self.capability_of(index))
            .collect()
    }

    fn capability_of(&self, index: c_uint) -> Option<String> {
        let mut handle = std::ptr::null_mut();
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is initialised; all pointers are to writable locals; `handle` is used only after the
        // library filled it in.
        let good = unsafe {
            (self.handle)(index, &raw mut handle) == 0
                && (self.capability)(handle, &raw mut major, &raw mut minor) == 0
        };
        good.then(|| format!("{major}{minor}"))
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: `open` initialised the library once, and this is its one shutdown.
        unsafe { (self.shutdown)() };
    }
}
