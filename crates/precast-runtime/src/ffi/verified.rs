//! The load of a shared object whose bytes are known.
//!
//! The bytes go into a sealed memory file, are hashed there, and `dlopen` maps the same file: nothing can change them
//! between the check and the load, and no path on disk is trusted.

use std::{ffi::c_int, fs::File, os::fd::AsRawFd};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};
use precast_store::{Digest, Mapped, elf::Elf};

use super::libtorch;
use crate::{RuntimeError, TorchError};

/// Loads a file, once it is known to be sealed and to hold the digest's bytes. The library is never unloaded. `scope`
/// is `RTLD_LOCAL` or `RTLD_GLOBAL`.
pub(super) fn open_verified(
    object: &Digest,
    file: File,
    scope: c_int,
) -> Result<&'static Loaded, RuntimeError> {
    drop(verified(object, &file)?);
    open_file(object, file, scope)
}

/// Returns the bytes of a shared object, once they are known to be sealed, the digest's, and all of it.
pub(super) fn verified(object: &Digest, file: &File) -> Result<Mapped, RuntimeError> {
    let mapped = sealed_bytes(object, file)?;
    whole(&mapped).map_err(|reason| RuntimeError::NotLoadable {
        object: *object,
        reason,
    })?;
    Ok(mapped)
}

/// Returns the bytes of a file, once it is known to be sealed and to hold the digest's bytes.
pub fn sealed_bytes(object: &Digest, file: &File) -> Result<Mapped, RuntimeError> {
    // Sealed first: the hashed bytes can't change before, during or after a load.
    let mapped = Mapped::sealed(file).map_err(|source| RuntimeError::MemoryFile {
        object: *object,
        source,
    })?;
    let found = Digest::of(&mapped);
    if found != *object {
        return Err(RuntimeError::WrongBytes {
            object: *object,
            found,
        });
    }
    Ok(mapped)
}

/// Loads a file that was verified.
pub(super) fn open_file(
    object: &Digest,
    file: File,
    scope: c_int,
) -> Result<&'static Loaded, RuntimeError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let refused = |source: libloading::Error| RuntimeError::NotLoadable {
        object: *object,
        reason: TorchError::loader(reason(&source)),
    };
    // SAFETY: the bytes are those a record names by digest; a load runs their initialisers.
    let mut loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | scope) };
    if loaded
        .as_ref()
        .is_err_and(|error| reason(error).starts_with("libtorch.so:"))
        && load_umbrella()
    {
        // SAFETY: as above.
        loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | scope) };
    }
    let loaded = loaded.map_err(refused)?;
    // The file stays open: the loader finds objects by path, and a path of `/proc/self/fd` that came to mean another
    // file would silently give this object again.
    std::mem::forget(file);
    Ok(Box::leak(Box::new(loaded)))
}

/// Fails for a shared object that is shorter than its header says.
fn whole(bytes: &[u8]) -> Result<(), TorchError> {
    match Elf::parse(bytes).and_then(|elf| elf.is_whole(bytes.len() as u64)) {
        Ok(true) => Ok(()),
        Ok(false) => Err("the file is shorter than its header says".into()),
        Err(error) => Err(format!("it is no shared object: {error}").into()),
    }
}

/// Loads `libtorch.so`, which has no code and needs all of libtorch, CUDA too. Artifacts that precast built do not need
/// it; others name it, and a path in memory has no folder beside which the loader would find it.
fn load_umbrella() -> bool {
    let Ok(open) = libtorch::get() else {
        return false;
    };
    let path = open.folder.join("libtorch.so");
    // SAFETY: it is libtorch's own library, of the folder the process runs libtorch from.
    match unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_LOCAL) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// Returns the message of the dynamic loader, without the path of the memory file.
fn reason(error: &libloading::Error) -> String {
    let text = match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    };
    match text
        .strip_prefix("/proc/self/fd/")
        .and_then(|rest| rest.split_once(": "))
    {
        Some((_, rest)) => rest.to_owned(),
        None => text,
    }
}
