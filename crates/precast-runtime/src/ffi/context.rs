//! Makes CUDA contexts while libtorch's CUDA half is loaded.
//!
//! A process needs both before its first call on a device. Each takes about 100 ms, and neither needs the other, but both
//! need the dynamic loader, which has one lock. libtorch holds it while its initialisers run. The driver takes it only at
//! the beginning of `cuInit`, and of making a context. So [`preload`] returns when the driver is initialised and has had
//! time to begin the context, and the caller then loads libtorch beside the rest.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::mpsc,
    thread::{self, JoinHandle},
    time::Duration,
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

/// How long the driver needs the loader's lock after a context was begun, with a margin.
const BEGINNING: Duration = Duration::from_millis(5);

/// A thread that makes contexts. It is waited for on drop, so that no exit of the process meets it.
pub(super) struct Preload(Option<JoinHandle<()>>);

impl Drop for Preload {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // A context that could not be made is reported by libtorch when it is used.
            let _ = thread.join();
        }
    }
}

/// Begins to make the contexts of these devices. A missing device or driver is reported by libtorch, not here.
pub(super) fn preload(devices: &[usize]) -> Preload {
    if devices.is_empty() {
        return Preload(None);
    }
    let devices = devices.to_vec();
    let (tell, initialised) = mpsc::channel();
    let work = move || {
        let driver = Driver::load().filter(Driver::initialise);
        // The receiver is gone when it no longer wants to know.
        let _ = tell.send(driver.is_some());
        if let Some(driver) = driver {
            devices.iter().for_each(|&device| driver.context(device));
        }
    };
    let thread = thread::Builder::new().name("precast-context".to_owned());
    let Ok(thread) = thread.spawn(work) else {
        return Preload(None);
    };
    if initialised.recv() == Ok(true) {
        thread::sleep(BEGINNING);
    }
    Preload(Some(thread))
}

/// The driver's own library, for as long as the process lives.
struct Driver {
    init: unsafe extern "C" fn(u32) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
}

impl Driver {
    /// Loads it; none where there is no driver.
    fn load() -> Option<Self> {
        // SAFETY: it is the driver, whose initialisers libtorch's CUDA half would run as well.
        let library = unsafe { Loaded::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the signatures of cuda.h, where a `CUdevice` and a `CUresult` are an `int`.
        let (init, device, retain) = unsafe {
            (
                *library.get(b"cuInit\0").ok()?,
                *library.get(b"cuDeviceGet\0").ok()?,
                *library.get(b"cuDevicePrimaryCtxRetain\0").ok()?,
            )
        };
        std::mem::forget(library);
        Some(Self {
            init,
            device,
            retain,
        })
    }

    /// Initialises it; returns whether there is a device.
    fn initialise(&self) -> bool {
        // SAFETY: it may be called from any thread, and again.
        unsafe { (self.init)(0) == 0 }
    }

    /// Makes the context that libtorch will use, and keeps it. No thread's current context changes.
    fn context(&self, ordinal: usize) {
        let (mut device, mut context) = (0, ptr::null_mut());
        let Ok(ordinal) = c_int::try_from(ordinal) else {
            return;
        };
        // SAFETY: valid out pointers, and the second gets a device only if the first found it.
        unsafe {
            if (self.device)(&mut device, ordinal) == 0 {
                (self.retain)(&mut context, device);
            }
        }
    }
}
