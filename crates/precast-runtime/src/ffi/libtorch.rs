//! The libtorch of this process: it is found, opened and checked, and its functions are resolved, once.
//!
//! Nothing of libtorch is linked. It is the copy that the process has loaded, or else the copy in the caller's folder
//! ([`open`]); a second one is never opened. Its version must be one of [`TRIED`](precast_store::target::TRIED): first
//! the version in `version.py` of the torch package, before any code of it runs, then the version of the open libtorch.
//!
//! The functions are those of its C ABI, from `torch/csrc/inductor/aoti_torch/c/shim.h` and
//! `torch/csrc/stable/c/shim.h`.

use std::{
    ffi::{CStr, OsStr, c_char, c_void},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};
use precast_store::target::Torch;

use super::abi::{RawTensor, imports};
use crate::TorchError;

/// Name of libtorch's library for the loader.
const CPU: &str = "libtorch_cpu.so";

imports! { table;
    /// Returns which `TORCH_ABI_VERSION` it is.
    pub fn aoti_torch_abi_version() -> u64;
    pub fn aoti_torch_empty_strided(
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        dtype: i32,
        device_type: i32,
        device_index: i32,
        out: *mut RawTensor,
    ) -> i32;
    pub fn aoti_torch_create_tensor_from_blob_v2(
        data: *mut c_void,
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        storage_offset: i64,
        dtype: i32,
        device_type: i32,
        device_index: i32,
        out: *mut RawTensor,
        layout: i32,
        opaque_metadata: *const u8,
        opaque_metadata_size: i64,
    ) -> i32;
    /// `deleter` is called with `data` and `context` when nobody has the memory any more.
    pub fn torch_from_blob(
        data: *mut c_void,
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        storage_offset: i64,
        dtype: i32,
        device_type: i32,
        device_index: i32,
        out: *mut RawTensor,
        layout: i32,
        opaque_metadata: *const u8,
        opaque_metadata_size: i64,
        deleter: unsafe extern "C" fn(*mut c_void, *mut c_void),
        context: *mut c_void,
    ) -> i32;
    /// `offset` counts elements from where `tensor` begins.
    pub fn aoti_torch__reinterpret_tensor(
        tensor: RawTensor,
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        offset: i64,
        out: *mut RawTensor,
    ) -> i32;
    /// `tensor` begins where its storage does.
    pub fn aoti_torch__alloc_from_pool(
        tensor: RawTensor,
        offset_bytes: i64,
        dtype: i32,
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        out: *mut RawTensor,
    ) -> i32;
    pub fn aoti_torch_copy_(to: RawTensor, from: RawTensor, non_blocking: i32) -> i32;
    pub fn aoti_torch_zero_(tensor: RawTensor) -> i32;
    pub fn aoti_torch_new_tensor_handle(tensor: RawTensor, out: *mut RawTensor) -> i32;
    pub fn aoti_torch_is_defined(tensor: RawTensor, defined: *mut bool) -> i32;
    pub fn aoti_torch_get_layout(tensor: RawTensor, layout: *mut i32) -> i32;
    pub fn aoti_torch_get_dtype(tensor: RawTensor, dtype: *mut i32) -> i32;
    pub fn aoti_torch_get_device_type(tensor: RawTensor, device_type: *mut i32) -> i32;
    pub fn aoti_torch_get_device_index(tensor: RawTensor, device_index: *mut i32) -> i32;
    pub fn aoti_torch_get_dim(tensor: RawTensor, rank: *mut i64) -> i32;
    pub fn aoti_torch_get_sizes(tensor: RawTensor, sizes: *mut *const i64) -> i32;
    pub fn aoti_torch_get_strides(tensor: RawTensor, strides: *mut *const i64) -> i32;
    pub fn aoti_torch_get_data_ptr(tensor: RawTensor, data: *mut *mut u8) -> i32;
    pub fn aoti_torch_get_storage_offset(tensor: RawTensor, elements: *mut i64) -> i32;
    pub fn aoti_torch_get_storage_size(tensor: RawTensor, bytes: *mut i64) -> i32;
    pub fn aoti_torch_delete_tensor_object(tensor: RawTensor) -> i32;
    pub fn torch_get_num_threads(threads: *mut u32) -> i32;
}

fn table() -> &'static Functions {
    &opened().torch
}

/// The libtorch of this process.
pub struct Libtorch {
    /// The folder of `libtorch_cpu.so`.
    pub folder: PathBuf,
    /// Its version, as `2.11.0`.
    pub version: String,
    pub(super) torch: Functions,
}

static OPEN: OnceLock<Libtorch> = OnceLock::new();

/// Returns the open libtorch, or opens the copy that the process has loaded.
pub fn get() -> Result<&'static Libtorch, TorchError> {
    match OPEN.get() {
        Some(open) => Ok(open),
        None => open(default_folder().as_deref(), false),
    }
}

/// Returns the libtorch that is open. Its callers have a tensor or an object of the shim, which need it.
pub(super) fn opened() -> &'static Libtorch {
    match get() {
        Ok(open) => open,
        // A tensor of tch, in a process whose libtorch is refused.
        Err(reason) => panic!("{reason}"),
    }
}

/// Opens libtorch: the process's own, or that of `folder` (torch's, or the one with the library). With `untried` also a
/// newer version than the tried ones.
pub fn open(folder: Option<&Path>, untried: bool) -> Result<&'static Libtorch, TorchError> {
    static LOCK: Mutex<()> = Mutex::new(());
    let _lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(open) = OPEN.get() {
        same(&open.folder, folder)?;
        return Ok(open);
    }
    let libtorch = Libtorch::open(folder, untried)?;
    Ok(OPEN.get_or_init(|| libtorch))
}

/// Unit tests use the torch of the checkout.
fn default_folder() -> Option<PathBuf> {
    #[cfg(test)]
    return std::env::var_os("LIBTORCH").map(PathBuf::from);
    #[cfg(not(test))]
    None
}

/// Returns the folder with the library for the folder of a caller.
fn inside(folder: &Path) -> Option<PathBuf> {
    let places = [folder.join("lib"), folder.to_owned()];
    places.into_iter().find(|place| place.join(CPU).exists())
}

/// Fails where a caller named another libtorch than the process has.
fn same(own: &Path, named: Option<&Path>) -> Result<(), TorchError> {
    let Some(named) = named else { return Ok(()) };
    let real = |path: &Path| path.join(CPU).canonicalize();
    match inside(named) {
        Some(folder) if real(&folder).ok() == real(own).ok() => Ok(()),
        _ => Err(TorchError::libtorch(format!(
            "the process has the libtorch in `{}` already, and `{}` was named: there can be only one",
            own.display(),
            named.display()
        ))),
    }
}

impl Libtorch {
    fn open(named: Option<&Path>, untried: bool) -> Result<Self, TorchError> {
        let loaded = match already()? {
            Some(loaded) => loaded,
            None => {
                let Some(named) = named else {
                    return Err(TorchError::libtorch(
                        "no libtorch: the process has none, and no folder was named",
                    ));
                };
                let folder = inside(named).ok_or_else(|| {
                    let (lib, own) = (named.join("lib"), named.display());
                    TorchError::libtorch(format!(
                        "no libtorch: there is no `{CPU}` in `{}` or `{own}`",
                        lib.display()
                    ))
                })?;
                // The version first: nothing of a libtorch that is refused has run then.
                if let Some(torch) = packaged(&folder) {
                    checked(&torch.version, &folder, untried)?;
                }
                let path = folder.join(CPU);
                // SAFETY: it is libtorch's own library, of the folder that the caller named; its initialisers register
                // its operators. Artifacts and the shim take their symbols from it.
                let loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
                loaded.map_err(|error| not_opened(&path, &error))?
            }
        };
        // Never closed: its destructors belong to the end of the process.
        let loaded: &'static Loaded = Box::leak(Box::new(loaded));
        let torch =
            Functions::find(loaded).map_err(|error| error.at("this libtorch is not supported"))?;
        let folder = folder_of(torch.aoti_torch_abi_version as *const c_void)
            .ok_or("the loader does not say where libtorch is")?;
        same(&folder, named)?;
        // SAFETY: it takes nothing and returns a number.
        let version = numbers(unsafe { (torch.aoti_torch_abi_version)() });
        checked(&version, &folder, untried)?;
        Ok(Self {
            folder,
            version,
            torch,
        })
    }
}

/// Returns the libtorch that the process has loaded, and makes its symbols visible to later loads. Fails if there are
/// two.
fn already() -> Result<Option<Loaded>, TorchError> {
    let mut found = loaded(|name| name == CPU);
    if let [one, other, ..] = &found[..] {
        return Err(TorchError::libtorch(format!(
            "the process has two copies of libtorch, `{}` and `{}`: there can be only one",
            one.display(),
            other.display()
        )));
    }
    let Some(path) = found.pop() else {
        return Ok(None);
    };
    // SAFETY: it is loaded; nothing of it is run again.
    let loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_GLOBAL | libc::RTLD_NOLOAD) };
    loaded.map(Some).map_err(|error| not_opened(&path, &error))
}

/// Returns the files of the libraries that the process has loaded and whose file names `is` takes, sorted.
pub(super) fn loaded(is: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        _: usize,
        found: *mut c_void,
    ) -> libc::c_int {
        // SAFETY: the loader passes a valid entry, whose name is a C string, and the vector that this call passed.
        let (name, found) = unsafe {
            let name: *const c_char = (*info).dlpi_name;
            if name.is_null() {
                return 0;
            }
            (CStr::from_ptr(name), &mut *found.cast::<Vec<PathBuf>>())
        };
        found.push(PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        0
    }
    let mut found: Vec<PathBuf> = Vec::new();
    // SAFETY: `each` takes this vector, and only during the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut found).cast()) };
    found.retain(|path| path.file_name().and_then(OsStr::to_str).is_some_and(&is));
    found.sort();
    found.dedup();
    found
}

/// Returns the version in a `TORCH_ABI_VERSION`, whose highest bytes are major, minor and patch number.
pub(super) fn numbers(abi: u64) -> String {
    let [major, minor, patch, ..] = abi.to_be_bytes();
    format!("{major}.{minor}.{patch}")
}

/// Returns the torch package around a folder with libtorch.
pub(super) fn packaged(folder: &Path) -> Option<Torch> {
    // <site-packages>/torch/lib
    let folder = folder.canonicalize().ok()?;
    let site: Vec<_> = folder.ancestors().nth(2).into_iter().collect();
    Torch::find(&site)
}

/// Fails for a version that is not supported.
fn checked(version: &str, folder: &Path, untried: bool) -> Result<(), TorchError> {
    Torch::fit(version, untried).map_err(|why| {
        TorchError::libtorch(format!("torch {version} in `{}` {why}", folder.display()))
    })
}

/// Returns the folder of the library that contains an address.
fn folder_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the loader only looks the address up, and `info` is a valid out pointer.
    let found = unsafe { libc::dladdr(address, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader gives a NUL-terminated path that lives as long as the library.
    let path = unsafe { CStr::from_ptr(info.dli_fname) };
    Path::new(OsStr::from_bytes(path.to_bytes()))
        .parent()
        .map(Path::to_owned)
}

fn not_opened(path: &Path, error: &libloading::Error) -> TorchError {
    let cause = std::error::Error::source(error).map_or(error.to_string(), ToString::to_string);
    TorchError::loader(cause).at(&format!("`{}` can't be opened", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(version: &str, untried: bool) -> String {
        let checked = checked(version, Path::new("/opt/torch/lib"), untried);
        checked.map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn versions_are_those_that_were_tried() {
        insta::assert_snapshot!(message("2.15.0a0+git123", false), @"");
        insta::assert_snapshot!(message("2.10.1", true), @"torch 2.10.1 in `/opt/torch/lib` is too old: 2.11 is the least");
        insta::assert_snapshot!(message("2.16.0+cu132", false), @"torch 2.16.0+cu132 in `/opt/torch/lib` is newer than what was tried: 2.11 to 2.15");
        insta::assert_snapshot!(message("", false), @"torch  in `/opt/torch/lib` is no version");
        assert_eq!(numbers(0x020b_0100_0000_0000), "2.11.1");
    }

    #[test]
    fn there_is_one_and_another_one_is_refused() {
        let own = get().unwrap();
        assert!(own.folder.join(CPU).exists());
        assert_eq!(loaded(|name| name == CPU).len(), 1);
        assert!(std::ptr::eq(own, open(Some(&own.folder), false).unwrap()));
        assert!(std::ptr::eq(own, open(own.folder.parent(), false).unwrap()));
        let other = open(Some(Path::new("/nowhere")), false).err().unwrap();
        let end = "and `/nowhere` was named: there can be only one";
        assert!(other.to_string().ends_with(end), "{other}");
    }

    #[test]
    fn a_folder_without_libtorch_says_what_was_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(inside(folder.path()), None);
        let lib = folder.path().join("lib");
        std::fs::create_dir(&lib).unwrap();
        std::fs::write(lib.join(CPU), "").unwrap();
        for path in [folder.path(), &lib] {
            assert_eq!(inside(path).as_ref(), Some(&lib));
        }
    }
}
