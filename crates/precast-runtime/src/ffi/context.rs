//! The CUDA driver: its devices, and their contexts, which are made while libtorch's CUDA half is loaded.
//!
//! A process needs both before its first call on a device. Each takes about 100 ms, and neither needs the other, but both
//! need the dynamic loader, which has one lock. libtorch holds it while its initialisers run. The driver takes it only at
//! the beginning of `cuInit`, and of making a context. So [`preload`] returns when the driver is initialised and has had
//! time to begin the context, and the caller then loads libtorch's CUDA half beside the rest. To begin earlier, while libtorch
//! itself is opened, brought nothing: 1.153 s and 1.154 s to an answer, medians of 21 starts each in turns
//! (`benches/results/gpu-tests-h100.json`).

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{OnceLock, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use crate::TorchError;

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
        let driver = Driver::get();
        // The receiver is gone when it no longer wants to know.
        let _ = tell.send(driver.is_some());
        if let Some(driver) = driver {
            for &device in &devices {
                // What can't be made is reported when the device is used.
                let _ = driver.context(device);
            }
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
pub(super) struct Driver {
    init: unsafe extern "C" fn(u32) -> c_int,
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
}

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `…_MINOR` of cuda.h.
const CAPABILITY: [c_int; 2] = [75, 76];

impl Driver {
    /// Returns the driver, loaded and initialised; none where there is no driver, or no device that it works with.
    pub(super) fn get() -> Option<&'static Self> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        let ready = || Self::load().filter(Self::initialise);
        DRIVER.get_or_init(ready).as_ref()
    }

    fn load() -> Option<Self> {
        // SAFETY: it is the driver, whose initialisers libtorch's CUDA half would run as well.
        let library = unsafe { Loaded::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the signatures of cuda.h, where a `CUdevice`, an enum and a `CUresult` are an `int`.
        let driver = unsafe {
            Self {
                init: *library.get(b"cuInit\0").ok()?,
                count: *library.get(b"cuDeviceGetCount\0").ok()?,
                device: *library.get(b"cuDeviceGet\0").ok()?,
                attribute: *library.get(b"cuDeviceGetAttribute\0").ok()?,
                retain: *library.get(b"cuDevicePrimaryCtxRetain\0").ok()?,
            }
        };
        std::mem::forget(library);
        Some(driver)
    }

    /// Initialises it; returns whether there is a device.
    fn initialise(&self) -> bool {
        // SAFETY: it may be called from any thread, and again.
        unsafe { (self.init)(0) == 0 }
    }

    /// Returns how many devices there are: those of `CUDA_VISIBLE_DEVICES`.
    pub(super) fn devices(&self) -> usize {
        let mut count = 0;
        // SAFETY: a valid out pointer.
        let code = unsafe { (self.count)(&mut count) };
        usize::try_from(count)
            .ok()
            .filter(|_| code == 0)
            .unwrap_or(0)
    }

    /// Returns the compute capability of a device, as `90` for 9.0.
    pub(super) fn capability(&self, ordinal: usize) -> Result<String, TorchError> {
        let device = self.find(ordinal)?;
        let mut numbers = [0; 2];
        for (number, attribute) in numbers.iter_mut().zip(CAPABILITY) {
            // SAFETY: a valid out pointer, and a device that the driver has given.
            succeeded(unsafe { (self.attribute)(number, attribute, device) })?;
        }
        let [major, minor] = numbers;
        Ok(format!("{major}{minor}"))
    }

    /// Makes the context that libtorch will use, and keeps it; returns once it is there. No thread's current context changes.
    pub(super) fn context(&self, ordinal: usize) -> Result<(), TorchError> {
        let device = self.find(ordinal)?;
        let mut context = ptr::null_mut();
        // SAFETY: a valid out pointer, and a device that the driver has given.
        succeeded(unsafe { (self.retain)(&mut context, device) })
    }

    fn find(&self, ordinal: usize) -> Result<c_int, TorchError> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal)?;
        // SAFETY: a valid out pointer.
        succeeded(unsafe { (self.device)(&mut device, ordinal) })?;
        Ok(device)
    }
}

fn succeeded(code: c_int) -> Result<(), TorchError> {
    match code {
        0 => Ok(()),
        2 => Err(TorchError::cuda("CUDA driver error: out of memory")),
        code => Err(TorchError::cuda(format!("CUDA driver error {code}"))),
    }
}
