//! NCCL: sums and copies between the devices of one process, without the host's memory.
//!
//! The library is the copy that the process has loaded, usually with libtorch's CUDA half; or that of the package beside
//! torch; or the loader's own. It is never closed. A process without it has no [`Nccl`].
//!
//! [`Communicators`] has one communicator for each device. One thread makes the calls of all devices, so the calls of one
//! operation are a group: NCCL begins none of them before the end of the group. They are enqueued on a stream of each
//! device; nothing waits for them but later work on that stream.
//!
//! After a failed call, every later call fails with the same error: some devices may have done their part. The
//! communicators are then left as they are, because NCCL may wait for the other devices in any call that frees them.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::{Path, PathBuf},
    ptr::null_mut,
    sync::OnceLock,
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
use precast_store::{Device, record::Dtype};

use super::{
    abi::functions as declare,
    cuda::{RawStream, cuda},
    libtorch,
    memory::contiguous,
    tensor::{Handle, Meta},
};
use crate::{RuntimeError, TorchError, layout::same_strides};

/// Name of the library for the loader.
const NAME: &str = "libnccl.so.2";

/// The sum among `ncclRedOp_t`.
const SUM: c_int = 0;
/// Bytes among `ncclDataType_t`.
const BYTES: c_int = 1;
/// The first device, which has the sums and the values to copy.
const ROOT: c_int = 0;

/// An `ncclComm_t`.
type Comm = *mut c_void;

declare! {
    error_string: "ncclGetErrorString" => unsafe extern "C" fn(c_int) -> *const c_char;
    last_error: "ncclGetLastError" => unsafe extern "C" fn(Comm) -> *const c_char;
    init_all: "ncclCommInitAll" => unsafe extern "C" fn(*mut Comm, c_int, *const c_int) -> c_int;
    destroy: "ncclCommDestroy" => unsafe extern "C" fn(Comm) -> c_int;
    group_start: "ncclGroupStart" => unsafe extern "C" fn() -> c_int;
    group_end: "ncclGroupEnd" => unsafe extern "C" fn() -> c_int;
    reduce: "ncclReduce" => unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, *mut c_void) -> c_int;
    broadcast: "ncclBroadcast" => unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int;
}

/// The library, with its functions.
pub struct Nccl(Functions);

impl Nccl {
    /// Returns the library of this process; none if there is none.
    pub fn get() -> Option<&'static Self> {
        static FOUND: OnceLock<Option<&'static Nccl>> = OnceLock::new();
        let open = |path: PathBuf| {
            let opened = Self::open(&path);
            let note = |reason: &TorchError| tracing::debug!(%reason, "no NCCL");
            opened.inspect_err(note).ok()
        };
        *FOUND.get_or_init(|| places().into_iter().find_map(open))
    }

    /// Opens the library of a path.
    pub fn open(path: &Path) -> Result<&'static Self, TorchError> {
        // SAFETY: it is NCCL, of the process, of the package beside torch or of the system, or a library that a test
        // made in its place; its initialisers prepare nothing but itself.
        let loaded = unsafe { Loaded::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let failed = |error: TorchError| error.at(&format!("`{}` can't be opened", path.display()));
        let loaded = loaded.map_err(|error| failed(TorchError::loader(error.to_string())))?;
        let functions = Functions::find(&loaded).map_err(failed)?;
        // Never closed: its threads may still run its code.
        std::mem::forget(loaded);
        Ok(Box::leak(Box::new(Self(functions))))
    }

    /// Returns whether it adds tensors of a dtype.
    pub fn adds(dtype: Dtype) -> bool {
        number_of(dtype).is_some()
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: both return NUL-terminated strings that live as long as the library, and are copied at once. No
        // communicator is needed for the last error.
        let [kind, last] = unsafe {
            [(self.0.error_string)(code), (self.0.last_error)(null_mut())].map(|text| {
                let text = (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy());
                text.unwrap_or_default().trim().to_owned()
            })
        };
        let message = match last.is_empty() {
            true => kind,
            false => format!("{kind}: {last}"),
        };
        Err(Failure { function, message })
    }
}

/// Returns the paths at which the library may be, the loaded one first.
fn places() -> Vec<PathBuf> {
    let mut places = libtorch::loaded(|name| name == NAME);
    let torch = libtorch::get().ok();
    let torch = torch.and_then(|torch| torch.folder.canonicalize().ok());
    // <site-packages>/torch/lib
    let site = torch.as_ref().and_then(|folder| folder.ancestors().nth(2));
    places.extend(site.map(|site| site.join("nvidia/nccl/lib").join(NAME)));
    places.push(NAME.into());
    places
}

/// Maps to `ncclDataType_t`; none for a dtype that it does not add.
fn number_of(dtype: Dtype) -> Option<c_int> {
    Some(match dtype {
        Dtype::Int8 => 0,
        Dtype::Uint8 => 1,
        Dtype::Int32 => 2,
        Dtype::Int64 => 4,
        Dtype::Float16 => 6,
        Dtype::Float32 => 7,
        Dtype::Float64 => 8,
        Dtype::Bfloat16 => 9,
        Dtype::Int16 | Dtype::Bool => return None,
    })
}

/// A failed call.
#[derive(Clone)]
struct Failure {
    function: &'static str,
    message: String,
}

/// A communicator for each device of a process.
pub struct Communicators {
    nccl: &'static Nccl,
    all: Vec<Comm>,
    devices: Vec<Device>,
    failed: Option<Failure>,
}

// SAFETY: NCCL ties a communicator to a device and to no thread: different threads may use it one after the other
// ("Thread Safety" in NCCL's user guide), and every method that uses it takes `&mut self`.
unsafe impl Send for Communicators {}
// SAFETY: nothing is called through `&Communicators`.
unsafe impl Sync for Communicators {}

/// The tensors of an operation: as many on each device, with the same sizes and dtypes.
type Tensors<'a> = &'a [Vec<Handle>];

impl Communicators {
    /// Connects devices. They are distinct, and the first one is the root.
    pub fn new(nccl: &'static Nccl, devices: &[Device]) -> Result<Self, RuntimeError> {
        let mut made = Self {
            nccl,
            all: vec![null_mut(); devices.len()],
            devices: devices.to_vec(),
            failed: None,
        };
        let ordinals = devices.iter().enumerate().map(|(at, device)| match device {
            Device::Cuda(ordinal) => *ordinal as c_int,
            // Memory of the host, for the library of a test.
            Device::Cpu => at as c_int,
        });
        let ordinals: Vec<c_int> = ordinals.collect();
        let count = ordinals.len() as c_int;
        // SAFETY: `all` has room for `count` communicators, and `ordinals` has as many numbers.
        let code = unsafe { (nccl.0.init_all)(made.all.as_mut_ptr(), count, ordinals.as_ptr()) };
        made.failed = nccl.check("ncclCommInitAll", code).err();
        made.usable()?;
        Ok(made)
    }

    /// Adds each tensor over all devices, in place on the first one. The others keep theirs.
    pub fn sum(&mut self, all: Tensors<'_>, streams: &[RawStream]) -> Result<(), RuntimeError> {
        self.group("ncclReduce", all, streams, |nccl, meta, comm, stream| {
            let number = meta.dtype().and_then(number_of)?;
            let (data, count) = (meta.address() as *mut c_void, elements(meta));
            // SAFETY: see `group`; on every device the result is as large as the tensor, in whose place it is written.
            Some(unsafe { (nccl.0.reduce)(data, data, count, number, SUM, ROOT, comm, stream.0) })
        })
    }

    /// Copies each tensor of the first device to the others.
    pub fn copy(&mut self, all: Tensors<'_>, streams: &[RawStream]) -> Result<(), RuntimeError> {
        self.group("ncclBroadcast", all, streams, |nccl, meta, comm, stream| {
            let bytes = elements(meta) * meta.dtype()?.size();
            let data = meta.address() as *mut c_void;
            // SAFETY: see `group`; `bytes` are those of the tensor.
            Some(unsafe { (nccl.0.broadcast)(data, data, bytes, BYTES, ROOT, comm, stream.0) })
        })
    }

    /// Makes a call for each tensor of each device; they are one group. `streams` has a stream of each device.
    ///
    /// The calls are sound because the tensors are without gaps, of the communicator's device, and alike on all devices,
    /// which is checked here; because their owner keeps them until the work is done, which [`Drop`] waits for; and
    /// because other work on them is on the same streams, or ordered after them.
    fn group(
        &mut self,
        function: &'static str,
        all: Tensors<'_>,
        streams: &[RawStream],
        call: impl Fn(&Nccl, &Meta<'_>, Comm, RawStream) -> Option<c_int>,
    ) -> Result<(), RuntimeError> {
        self.usable()?;
        let nccl = self.nccl;
        let wrong = || Failure {
            function,
            message: "it does not take these tensors".to_owned(),
        };
        let calls = || -> Result<(), Failure> {
            for (at, tensors) in all.iter().enumerate() {
                for tensor in tensors {
                    let code = call(nccl, &tensor.meta(), self.all[at], streams[at]);
                    nccl.check(function, code.ok_or_else(wrong)?)?;
                }
            }
            Ok(())
        };
        let run = || -> Result<(), Failure> {
            if !self.alike(all) || streams.len() != all.len() {
                return Err(wrong());
            }
            // SAFETY: they take nothing; a group belongs to this thread.
            nccl.check("ncclGroupStart", unsafe { (nccl.0.group_start)() })?;
            let called = calls();
            // SAFETY: as above. It ends also after a failed call: the thread would stay in the group.
            let ended = nccl.check("ncclGroupEnd", unsafe { (nccl.0.group_end)() });
            called.and(ended)
        };
        self.failed = run().err();
        self.usable()
    }

    /// Returns whether every device has tensors without gaps, of the sizes and dtypes of the first device's.
    fn alike(&self, all: Tensors<'_>) -> bool {
        let fits = |(tensors, device): (&Vec<Handle>, &Device)| {
            let mut pairs = tensors.iter().zip(&all[0]);
            tensors.len() == all[0].len()
                && pairs.all(|(tensor, first)| {
                    let (meta, first) = (tensor.meta(), first.meta());
                    let sizes = meta.sizes();
                    meta.device() == Some(*device)
                        && (meta.dtype(), sizes) == (first.dtype(), first.sizes())
                        && same_strides(sizes, meta.strides(), &contiguous(sizes))
                })
        };
        all.len() == self.devices.len() && all.iter().zip(&self.devices).all(fits)
    }

    fn usable(&self) -> Result<(), RuntimeError> {
        let Some(Failure { function, message }) = self.failed.clone() else {
            return Ok(());
        };
        Err(RuntimeError::Nccl {
            devices: self.devices.len(),
            function,
            message,
        })
    }
}

/// Returns the number of elements.
fn elements(meta: &Meta<'_>) -> usize {
    let sizes = meta.sizes().iter();
    sizes
        .map(|&size| usize::try_from(size).unwrap_or(0))
        .product()
}

impl Drop for Communicators {
    fn drop(&mut self) {
        if self.failed.is_some() {
            return;
        }
        for device in &self.devices {
            if let Device::Cuda(ordinal) = device {
                // A device that can't is lost, and has no work.
                let _ = cuda().and_then(|cuda| cuda.synchronize(*ordinal));
            }
        }
        for comm in &self.all {
            // SAFETY: `self` owns it, its devices have done its work, and it is not used again.
            unsafe { (self.nccl.0.destroy)(*comm) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_beside_torch_is_found_and_says_why_it_fails() {
        let there = places().iter().any(|path| path.exists());
        let Some(nccl) = Nccl::get() else {
            assert!(!there, "{:?} can't be opened", places());
            return;
        };
        let devices = [Device::Cuda(98), Device::Cuda(99)];
        let error = Communicators::new(nccl, &devices).err().unwrap();
        let text = error.to_string();
        let why = text.strip_prefix("NCCL on 2 devices: `ncclCommInitAll` failed: ");
        assert!(why.is_some_and(|why| why.len() > 10), "{text}");
    }
}
