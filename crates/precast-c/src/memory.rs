//! Arguments of the caller: texts, arrays and opaque objects.
#![allow(unsafe_code, reason = "reads memory of the caller")]

use std::{
    ffi::{CStr, OsStr, c_char},
    os::unix::ffi::OsStrExt,
    path::Path,
    slice,
};

use crate::error::Failure;

/// Returns the bytes of a text of the caller.
///
/// # Safety
/// `start` is null or points to a text that ends with NUL and is not changed during `'a`.
pub unsafe fn bytes<'a>(name: &str, start: *const c_char) -> Result<&'a [u8], Failure> {
    if start.is_null() {
        return Err(Failure::null(name));
    }
    // SAFETY: the caller's text, which is not null.
    Ok(unsafe { CStr::from_ptr(start) }.to_bytes())
}

/// Returns a path of the caller: bytes of the file system.
///
/// # Safety
/// As [`bytes`].
pub unsafe fn path<'a>(name: &str, start: *const c_char) -> Result<&'a Path, Failure> {
    // SAFETY: as this function requires.
    let bytes = unsafe { bytes(name, start) }?;
    Ok(OsStr::from_bytes(bytes).as_ref())
}

/// Returns a text of the caller in UTF-8.
///
/// # Safety
/// As [`bytes`].
pub unsafe fn text<'a>(name: &str, start: *const c_char) -> Result<&'a str, Failure> {
    // SAFETY: as this function requires.
    let bytes = unsafe { bytes(name, start) }?;
    str::from_utf8(bytes).map_err(|_| Failure::argument(name, "is not UTF-8"))
}

/// Returns an array of the caller. Without elements its pointer is not read.
///
/// # Safety
/// `start` is null or points to `count` elements that are not changed during `'a`.
pub unsafe fn array<'a, T>(name: &str, start: *const T, count: usize) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if start.is_null() {
        return Err(Failure::null(name));
    }
    if !start.is_aligned() {
        return Err(Failure::argument(name, "is not aligned"));
    }
    let bytes = count.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(Failure::argument(name, "is longer than any memory"));
    }
    // SAFETY: the caller's array; it is not null, aligned, and no longer than memory can be.
    Ok(unsafe { slice::from_raw_parts(start, count) })
}

/// Returns an opaque object of the caller.
///
/// # Safety
/// `object` is null or an object of this library that is not freed during `'a`.
pub unsafe fn object<'a, T>(name: &str, object: *const T) -> Result<&'a T, Failure> {
    // SAFETY: null or the caller's live object. Objects are only read: their fields have locks where they change.
    unsafe { object.as_ref() }.ok_or_else(|| Failure::null(name))
}
