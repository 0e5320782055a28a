//! The shim: opened once a process, its functions.
//!
//! It is an object of the store, verified and loaded like an artifact. A load opens it. Before a
//! load there are plain tensors only, for which libtorch's C ABI is enough.

use std::{
    ffi::{CStr, c_char, c_void},
    fs::File,
    sync::{Mutex, OnceLock, PoisonError},
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL};
use precast_store::Digest;

use super::{
    abi::{
        Bind, CountOf, Create, Delete, DtypeOf, Flag, Name, Pair, RawArgument, RawContainer,
        RawGiven, RawMeta, RawTensor, RawWrap, Run, Size, imports,
    },
    libtorch::{self, numbers},
    verified::open_verified,
};
use crate::{RuntimeError, TorchError};

imports! { table;
    /// The `TORCH_ABI_VERSION` that it was compiled with.
    pub fn precast_abi_version() -> u64;
    pub fn precast_operator_names(
        each: extern "C" fn(*mut c_void, *const c_char),
        context: *mut c_void,
    ) -> i32;
    pub fn precast_operators_new(device: *const c_char, out: *mut *mut c_void) -> i32;
    pub fn precast_operators_add(
        executor: *mut c_void,
        name: *const c_char,
        overload: *const c_char,
        given: *const RawArgument,
        n: usize,
    ) -> i32;
    pub fn precast_operators_call(
        executor: *mut c_void,
        ints: *const i64,
        n_ints: usize,
        tensors: *const RawTensor,
        n_tensors: usize,
        out: *mut RawTensor,
    ) -> i32;
    pub fn precast_operators_delete(executor: *mut c_void);
    pub fn precast_capture_messages(report: extern "C" fn(*const c_char));
    pub fn precast_capture_begin() -> *mut c_void;
    pub fn precast_capture_end(before: *mut c_void, code: i32);
    pub fn precast_last_error() -> *const c_char;
    pub fn precast_tensor_meta(tensor: *const c_void, out: *mut RawMeta) -> i32;
    pub fn precast_tensor_own(tensor: *const c_void) -> RawTensor;
    pub fn precast_tensor_take(tensor: *const c_void) -> RawTensor;
    pub fn precast_tensor_give(tensor: *const c_void, wrap: RawWrap) -> *mut c_void;
    pub fn precast_tensor_over(
        data: *mut c_void,
        bytes: i64,
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        dtype: i32,
        owner: *mut c_void,
        release: unsafe extern "C" fn(*mut c_void),
    ) -> RawTensor;
    pub fn precast_tensors_copy(to: *const RawTensor, from: *const RawTensor, n: usize) -> i32;
    pub fn precast_tensor_uses(tensor: RawTensor) -> i64;
    pub fn precast_tensor_is_sole(tensor: RawTensor) -> bool;
    pub fn precast_note_range(
        tensor: *const c_void,
        notes: *const c_void,
        at: i64,
        low: i64,
        high: i64,
        clamped: *mut RawTensor,
    ) -> i32;
    pub fn precast_note_outcomes(
        outcomes: *const *mut c_void,
        count: usize,
        notes: *const c_void,
        at: i64,
    ) -> i32;
    pub fn precast_cuda_wait_for(device: i32) -> i32;
    pub fn precast_create(
        f: Create,
        out: *mut RawContainer,
        device_name: *const c_char,
        device: i32,
    ) -> i32;
    pub fn precast_delete(f: Delete, container: RawContainer) -> i32;
    pub fn precast_run(
        f: Run,
        container: RawContainer,
        inputs: *mut RawTensor,
        n_inputs: usize,
        outputs: *mut RawTensor,
        n_outputs: usize,
        stream: *mut c_void,
        proxy: *mut c_void,
    ) -> i32;
    pub fn precast_count(f: CountOf, container: RawContainer, out: *mut usize) -> i32;
    pub fn precast_name(f: Name, container: RawContainer, i: usize, out: *mut *const c_char)
    -> i32;
    pub fn precast_flag(f: Flag, container: RawContainer, i: usize, out: *mut bool) -> i32;
    pub fn precast_dtype(f: DtypeOf, container: RawContainer, i: usize, out: *mut i32) -> i32;
    pub fn precast_size(f: Size, container: RawContainer, i: usize, out: *mut usize) -> i32;
    pub fn precast_bind(f: Bind, container: RawContainer, pairs: *const Pair, n: usize) -> i32;
    pub fn precast_calls_new(device: *const c_char, inputs: usize, out: *mut *mut c_void) -> i32;
    pub fn precast_calls_add(
        calls: *mut c_void,
        name: *const c_char,
        overload: *const c_char,
        given: *const RawGiven,
        n: usize,
        results: *const i64,
        n_results: usize,
    ) -> i32;
    pub fn precast_calls_add_cond(
        calls: *mut c_void,
        yes: *mut c_void,
        no: *mut c_void,
        given: *const RawGiven,
        n: usize,
        results: *const i64,
        n_results: usize,
    ) -> i32;
    pub fn precast_calls_finish(calls: *mut c_void, outputs: *const i64, n: usize) -> i32;
    pub fn precast_calls_run(
        calls: *mut c_void,
        inputs: *const *mut c_void,
        n_in: usize,
        outputs: *mut *mut c_void,
        n_out: usize,
    ) -> i32;
    pub fn precast_calls_delete(calls: *mut c_void);
}

/// The functions of the shim that is open.
static OPEN: OnceLock<Functions> = OnceLock::new();

/// Returns whether a shim is open.
pub fn is_open() -> bool {
    opened().is_some()
}

/// Opens a shim that was compiled for the libtorch of this process, if none is open: `file` gives the object.
///
/// Fails where the object's bytes are not its digest's, where it does not load, or where it was compiled with another
/// torch.
pub fn open(
    object: &Digest,
    file: impl FnOnce() -> Result<File, RuntimeError>,
) -> Result<(), RuntimeError> {
    if OPEN.get().is_some() {
        return Ok(());
    }
    let _span = tracing::info_span!("shim", %object).entered();
    let libtorch = libtorch::get().map_err(|reason| RuntimeError::Libtorch { reason })?;
    open_once(&OPEN, object, file, |loaded| {
        let functions = Functions::find(loaded)?;
        // SAFETY: it takes nothing and returns a number.
        let own = numbers(unsafe { (functions.precast_abi_version)() });
        if own != libtorch.version {
            let libtorch = &libtorch.version;
            return Err(format!("it is a shim for torch {own}, and libtorch is {libtorch}").into());
        }
        Ok(functions)
    })
}

/// Opens one half of a shim, if `open` is empty, and fills it with the functions that `find` looks up.
pub(super) fn open_once<T>(
    open: &OnceLock<T>,
    object: &Digest,
    file: impl FnOnce() -> Result<File, RuntimeError>,
    find: impl FnOnce(&Loaded) -> Result<T, TorchError>,
) -> Result<(), RuntimeError> {
    static LOCK: Mutex<()> = Mutex::new(());
    let _lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    if open.get().is_some() {
        return Ok(());
    }
    let found = find(open_verified(object, file()?, RTLD_LOCAL)?);
    let found = found.map_err(|reason| RuntimeError::NotLoadable {
        object: *object,
        reason,
    })?;
    open.get_or_init(|| found);
    Ok(())
}

#[cfg(not(test))]
fn opened() -> Option<&'static Functions> {
    OPEN.get()
}

/// Unit tests load no release.
#[cfg(test)]
fn opened() -> Option<&'static Functions> {
    if OPEN.get().is_none() {
        let compiled = precast_shim::testing::compiled();
        let bytes = std::fs::read(&compiled.file).unwrap();
        let file = || Ok(crate::source::sealed("shim", &bytes).unwrap());
        open(&compiled.shim.object, file).unwrap();
    }
    OPEN.get()
}

/// Returns the functions of the shim that is open. The callers have objects of a load, which has opened it.
fn table() -> &'static Functions {
    match opened() {
        Some(open) => open,
        None => panic!("no shim is open: loading a model opens one"),
    }
}

/// Lets nothing that libtorch prints in a call reach the terminal: an error's text belongs to the error, the rest, such
/// as a warning, goes to `tracing`. Does nothing before a shim is open.
pub fn capture_messages() {
    if !is_open() {
        return;
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    // SAFETY: it sets a buffer under std::cerr, once and permanently; `report` lives as long.
    ONCE.call_once(|| unsafe { precast_capture_messages(report) });
}

extern "C" fn report(text: *const c_char) {
    // SAFETY: the shim passes a NUL-terminated string that lives until this returns.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A subscriber may panic, which must not cross C++.
    let _ = std::panic::catch_unwind(|| {
        tracing::warn!(target: "precast::libtorch", "libtorch: {}", text.trim());
    });
}

/// Returns the text of this thread's last error.
pub fn last_error() -> String {
    // SAFETY: the shim returns a NUL-terminated thread-local string that stays valid until this thread's next failing
    // call, and it is copied here.
    unsafe { CStr::from_ptr(precast_last_error()) }
        .to_string_lossy()
        .into_owned()
}

/// Maps a shim's return code to its text.
pub fn checked(code: i32) -> Result<(), TorchError> {
    match code {
        0 => Ok(()),
        _ => Err(TorchError::libtorch(last_error())),
    }
}
