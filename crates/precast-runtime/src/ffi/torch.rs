//! libtorch's C ABI, from `torch/csrc/inductor/aoti_torch/c/shim.h` and `torch/csrc/stable/c/shim.h`.
//!
//! Its functions return 0 or print the reason on `std::cerr`: [`call`] takes it from there, with the shim.

use std::ffi::c_void;

use super::{
    libtorch::{self, imports},
    shim::{self, RawTensor, precast_capture_begin, precast_capture_end},
};
use crate::TorchError;

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
        made: *mut RawTensor,
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
        made: *mut RawTensor,
        layout: i32,
        opaque_metadata: *const u8,
        opaque_metadata_size: i64,
    ) -> i32;
    /// `deleter` is called with `data` and `context` when the memory has no more users.
    pub fn torch_from_blob(
        data: *mut c_void,
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        storage_offset: i64,
        dtype: i32,
        device_type: i32,
        device_index: i32,
        made: *mut RawTensor,
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
        made: *mut RawTensor,
    ) -> i32;
    /// `tensor` begins where its storage does.
    pub fn aoti_torch__alloc_from_pool(
        tensor: RawTensor,
        offset_bytes: i64,
        dtype: i32,
        rank: i64,
        sizes: *const i64,
        strides: *const i64,
        made: *mut RawTensor,
    ) -> i32;
    pub fn aoti_torch_copy_(to: RawTensor, from: RawTensor, non_blocking: i32) -> i32;
    pub fn aoti_torch_zero_(tensor: RawTensor) -> i32;
    pub fn aoti_torch_new_tensor_handle(tensor: RawTensor, made: *mut RawTensor) -> i32;
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
    &libtorch::opened().torch
}

/// Runs one call of libtorch's C ABI and returns the reason if it fails.
pub fn call(f: impl FnOnce() -> i32) -> Result<(), TorchError> {
    libtorch::get()?;
    if !shim::is_open() {
        return match f() {
            0 => Ok(()),
            code => Err(TorchError::libtorch(format!(
                "libtorch says why on stderr (code {code})"
            ))),
        };
    }
    shim::capture_messages();
    // SAFETY: both set a thread-local of the shim; `f` only calls libtorch, which returns.
    let code = unsafe {
        let before = precast_capture_begin();
        let code = f();
        precast_capture_end(before, code);
        code
    };
    match code {
        0 => Ok(()),
        _ => Err(TorchError::libtorch(reason(&shim::last_error()))),
    }
}

/// Returns the reason in a message of libtorch, as `[E1123 20:21:32.000 f.cpp:1] Exception in aoti_torch: reason`. The
/// lines after the first are the frames of its C++ stack.
fn reason(printed: &str) -> &str {
    const BEFORE: &str = "Exception in aoti_torch: ";
    let from = printed.find(BEFORE).map_or(0, |at| at + BEFORE.len());
    let line = printed[from..].lines().next().unwrap_or_default();
    line.trim_end()
}

/// Returns the number of threads of libtorch's parallel loops.
pub fn threads() -> usize {
    let mut threads = 1;
    // SAFETY: a valid out pointer.
    let asked = call(|| unsafe { torch_get_num_threads(&mut threads) });
    asked.map_or(1, |()| threads as usize)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_reason_is_taken_from_what_was_printed() {
        let printed = "[E1123 20:21:32.123456 shim_common.cpp:9] Exception in aoti_torch: no memory \nException raised from x";
        assert_eq!(super::reason(printed), "no memory");
        assert_eq!(super::reason("another text\n"), "another text");
    }
}
