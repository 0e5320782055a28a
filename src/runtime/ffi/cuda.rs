//! CUDA, found while running: one binary serves machines with and without it.
//!
//! tch names `libtorch_cuda` at link time, but nothing in a Rust binary uses one of its symbols directly, so the
//! linker drops it and libtorch never learns that CUDA exists. It is loaded here, from the folder `libtorch_cpu` came
//! from and with its symbols global, before anything asks for a device: artifacts and the CUDA half of the shim take
//! their symbols from it.

use std::{
    ffi::{CStr, c_char, c_void},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};

use super::{library::open_verified, shim};
use crate::runtime::source::sealed;

/// The CUDA half of the shim; empty when the crate was built without the headers.
const SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shim_cuda.so"));

/// What is known about CUDA in this process.
pub struct Cuda {
    devices: usize,
    shim: Result<Functions, String>,
}

struct Functions {
    last_error: unsafe extern "C" fn() -> *const c_char,
    current_stream: unsafe extern "C" fn(i32, *mut *mut c_void) -> i32,
    capability: unsafe extern "C" fn(i32, *mut i32, *mut i32) -> i32,
}

/// Loads libtorch's CUDA half on first use; the reason when there is none.
pub fn cuda() -> Result<&'static Cuda, String> {
    static CUDA: OnceLock<Result<Cuda, String>> = OnceLock::new();
    CUDA.get_or_init(Cuda::load).as_ref().map_err(Clone::clone)
}

impl Cuda {
    fn load() -> Result<Self, String> {
        let path = libtorch_folder()
            .unwrap_or_default()
            .join("libtorch_cuda.so");
        // SAFETY: it is libtorch's own library, of the folder the process runs libtorch from; its initialisers
        // register the CUDA backend.
        let loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
        match loaded {
            Ok(library) => std::mem::forget(library),
            Err(error) => {
                let why = std::error::Error::source(&error)
                    .map_or(error.to_string(), ToString::to_string);
                return Err(format!("libtorch has no CUDA half here: {why}"));
            }
        }
        let devices = usize::try_from(tch::Cuda::device_count()).unwrap_or(0);
        if devices == 0 {
            return Err("this machine has no CUDA device".to_owned());
        }
        Ok(Self {
            devices,
            shim: functions(),
        })
    }

    /// Returns how many devices there are; at least one.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Returns the compute capability of a device, as `90` for 9.0.
    pub fn capability(&self, device: usize) -> Result<String, String> {
        let functions = self.shim.as_ref().map_err(Clone::clone)?;
        let device = i32::try_from(device).map_err(|error| error.to_string())?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the shim's own function, with valid out pointers.
        functions.check(unsafe { (functions.capability)(device, &mut major, &mut minor) })?;
        Ok(format!("{major}{minor}"))
    }

    /// Returns the stream torch works on now on this thread.
    pub fn current_stream(&self, device: usize) -> Result<*mut c_void, String> {
        let Ok(functions) = &self.shim else {
            // Without the shim nothing in the process changes torch's stream but the caller through foreign code.
            return Ok(std::ptr::null_mut());
        };
        let mut stream = std::ptr::null_mut();
        let device = i32::try_from(device).map_err(|error| error.to_string())?;
        // SAFETY: the shim's own function, with a valid out pointer.
        functions.check(unsafe { (functions.current_stream)(device, &mut stream) })?;
        Ok(stream)
    }
}

impl Functions {
    fn check(&self, code: i32) -> Result<(), String> {
        match code {
            0 => Ok(()),
            // SAFETY: a NUL-terminated thread-local string, copied at once.
            _ => Err(unsafe { CStr::from_ptr((self.last_error)()) }
                .to_string_lossy()
                .into_owned()),
        }
    }
}

fn functions() -> Result<Functions, String> {
    if SHIM.is_empty() {
        return Err("this binary was built without the CUDA headers".to_owned());
    }
    let library = {
        let file = sealed("precast-cuda", SHIM).map_err(|error| error.to_string())?;
        open_verified(&crate::Digest::of(SHIM), file).map_err(|error| error.to_string())?
    };
    macro_rules! symbol {
        ($name:literal) => {{
            // SAFETY: the function of shim_cuda.cpp with this name has this type; both are built together.
            let found = unsafe { library.get($name) };
            *found.map_err(|error| error.to_string())?
        }};
    }
    Ok(Functions {
        last_error: symbol!(b"precast_cuda_last_error"),
        current_stream: symbol!(b"precast_cuda_current_stream"),
        capability: symbol!(b"precast_cuda_capability"),
    })
}

/// Returns the folder libtorch_cpu was loaded from.
pub fn libtorch_folder() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the address is a function of libtorch_cpu, and `info` is a valid out pointer.
    let found = unsafe { libc::dladdr(shim::libtorch_address(), &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader gives a NUL-terminated path that lives as long as the library.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(path.to_str().ok()?).parent().map(Path::to_owned)
}
