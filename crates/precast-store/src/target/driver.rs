//! The CUDA driver: the one source of a GPU's compute capability, for builds and for the runtime.
//!
//! `libcuda.so.1` needs no CUDA toolkit. It is opened on first use, and a machine without it has no GPU. It lists the
//! devices of `CUDA_VISIBLE_DEVICES`, in the order that torch uses. Its initialisation takes 0.2 s on an H100 host.
//! That of the management library takes 0.02 s, but knows neither that order nor that choice. No context is made,
//! except by [`Driver::retain_context`].
#![allow(unsafe_code)]

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr,
    sync::OnceLock,
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `…_MINOR` of cuda.h.
const CAPABILITY: [c_int; 2] = [75, 76];
/// `CUDA_ERROR_INVALID_DEVICE` of cuda.h.
const INVALID_DEVICE: c_int = 101;

/// An error of the driver, by its `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("CUDA driver error{}", if *.0 == 2 { ": out of memory".to_owned() } else { format!(" {}", .0) })]
pub struct DriverError(c_int);

/// The driver's library, for the life of the process.
pub struct Driver {
    init: unsafe extern "C" fn(c_uint) -> c_int,
    count: unsafe extern "C" fn(*mut c_int) -> c_int,
    device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
}

impl Driver {
    /// Returns the driver, initialised. None without a driver, and for a driver that works with no device.
    pub fn get() -> Option<&'static Self> {
        static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
        // SAFETY: `cuInit` may be called from any thread, and repeatedly.
        let ready = || Self::load().filter(|driver| unsafe { (driver.init)(0) } == 0);
        DRIVER.get_or_init(ready).as_ref()
    }

    fn load() -> Option<Self> {
        // SAFETY: this is the driver's own library, whose initialisers any program may run.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the signatures of cuda.h, where a `CUdevice`, an enum and a `CUresult` are an `int`.
        let driver = unsafe {
            Self {
                init: *library.get(b"cuInit\0").ok()?,
                count: *library.get(b"cuDeviceGetCount\0").ok()?,
                device: *library.get(b"cuDeviceGet\0").ok()?,
                attribute: *library.get(b"cuDeviceGetAttribute\0").ok()?,
                retain: *library.get(b"cuDevicePrimaryCtxRetain\0").ok()?,
                name: *library.get(b"cuDeviceGetName\0").ok()?,
            }
        };
        // The functions are used until the process ends.
        std::mem::forget(library);
        Some(driver)
    }

    /// Returns the number of devices.
    pub fn devices(&self) -> usize {
        let mut count = 0;
        // SAFETY: a valid out pointer.
        let code = unsafe { (self.count)(&mut count) };
        let count = usize::try_from(count).ok().filter(|_| code == 0);
        count.unwrap_or(0)
    }

    /// Returns the compute capability of a device, as `90` for 9.0.
    pub fn capability(&self, ordinal: usize) -> Result<String, DriverError> {
        let device = self.find(ordinal)?;
        let mut numbers = [0; 2];
        for (number, attribute) in numbers.iter_mut().zip(CAPABILITY) {
            // SAFETY: a valid out pointer, and a device that the driver has given.
            succeeded(unsafe { (self.attribute)(number, attribute, device) })?;
        }
        let [major, minor] = numbers;
        Ok(format!("{major}{minor}"))
    }

    /// Returns the name of a device, as `NVIDIA H200`.
    pub fn name(&self, ordinal: usize) -> Result<String, DriverError> {
        let device = self.find(ordinal)?;
        let mut text = [0_u8; 256];
        // SAFETY: room for as many bytes, and a device that the driver has given.
        succeeded(unsafe { (self.name)(text.as_mut_ptr().cast(), 256, device) })?;
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(0);
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    /// Makes the device's primary context, which libtorch uses, and keeps it. No thread's current context changes.
    pub fn retain_context(&self, ordinal: usize) -> Result<(), DriverError> {
        let device = self.find(ordinal)?;
        let mut context = ptr::null_mut();
        // SAFETY: a valid out pointer, and a device that the driver has given.
        succeeded(unsafe { (self.retain)(&mut context, device) })
    }

    fn find(&self, ordinal: usize) -> Result<c_int, DriverError> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal).map_err(|_| DriverError(INVALID_DEVICE))?;
        // SAFETY: a valid out pointer.
        succeeded(unsafe { (self.device)(&mut device, ordinal) })?;
        Ok(device)
    }
}

/// Returns the compute capability of each GPU that the process may use, in torch's order. Empty without a driver.
pub fn compute_capabilities() -> Vec<String> {
    let Some(driver) = Driver::get() else {
        return Vec::new();
    };
    let ordinals = 0..driver.devices();
    ordinals
        .filter_map(|ordinal| driver.capability(ordinal).ok())
        .collect()
}

fn succeeded(code: c_int) -> Result<(), DriverError> {
    if code == 0 {
        Ok(())
    } else {
        Err(DriverError(code))
    }
}
