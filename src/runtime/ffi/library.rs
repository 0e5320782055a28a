//! An artifact's shared object: verified, loaded once per digest and process, never unloaded.
//!
//! The bytes go into a sealed memory file, are hashed there, and that same file is what `dlopen` maps: between the
//! check and the load nothing can change them, and no path on disk is trusted.

use std::{
    collections::HashMap,
    ffi::CString,
    fs::File,
    io::{self, Write},
    os::fd::{AsRawFd, FromRawFd},
    sync::{Arc, Mutex, PoisonError},
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use super::shim::{self, Bind, Count, Create, Delete, DtypeOf, Flag, Name, Run, Size};
use crate::{Digest, runtime::RuntimeError};

/// The functions of an artifact that the runtime calls; all of them are there once a [`Library`] exists.
pub(super) struct Abi {
    pub create: Create,
    pub delete: Delete,
    pub run: Run,
    pub num_inputs: Count,
    pub num_outputs: Count,
    pub num_constants: Count,
    pub constant_name: Name,
    pub constant_fqn: Name,
    pub constant_folded: Flag,
    pub constant_dtype: DtypeOf,
    pub constant_bytes: Size,
    pub bind: Bind,
}

/// A loaded artifact.
pub struct Library {
    pub(super) abi: Abi,
    object: Digest,
}

/// Every library this process has loaded. Nothing is ever removed.
static LOADED: Mutex<Option<HashMap<Digest, Arc<Library>>>> = Mutex::new(None);

impl Library {
    /// Loads the object with this digest, or returns it when the process has it already.
    ///
    /// `bytes` is asked for only when it has not. Fails when the bytes are not the digest's, when `dlopen` refuses
    /// them, or when a function of the ABI is missing; nothing of a refused object has run then, except that
    /// `dlopen` runs the initialisers of one that loads and lacks a function.
    pub fn load(
        object: &Digest,
        bytes: impl FnOnce() -> Result<Vec<u8>, RuntimeError>,
    ) -> Result<Arc<Self>, RuntimeError> {
        // Held while loading, so that two threads can't load one object twice.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(library) = loaded.get(object) {
            return Ok(library.clone());
        }
        let library = Arc::new(Self::open(object, &bytes()?)?);
        loaded.insert(*object, library.clone());
        Ok(library)
    }

    /// Returns the digest of the shared object.
    pub fn object(&self) -> &Digest {
        &self.object
    }

    fn open(object: &Digest, bytes: &[u8]) -> Result<Self, RuntimeError> {
        // SAFETY: no preconditions; it sets a buffer under std::cerr once.
        unsafe { shim::precast_capture_messages() };
        let loaded = open_verified(object, bytes)?;
        Ok(Self {
            abi: resolve(loaded, object)?,
            object: *object,
        })
    }
}

/// Loads `bytes`, once they are known to be the digest's. What is loaded stays for the life of the process.
pub(super) fn open_verified(
    object: &Digest,
    bytes: &[u8],
) -> Result<&'static Loaded, RuntimeError> {
    let io = |source| RuntimeError::MemoryFile {
        object: *object,
        source,
    };
    let file = sealed(object, bytes).map_err(io)?;
    // SAFETY: the file is sealed against every write, so the map can't change under the slice.
    let mapped = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
    let found = Digest::of(&mapped);
    if found != *object {
        return Err(RuntimeError::WrongBytes {
            object: *object,
            found,
        });
    }
    drop(mapped);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let refused = |source: libloading::Error| RuntimeError::NotLoadable {
        object: *object,
        reason: reason(&source),
    };
    // SAFETY: the bytes are those a record names by digest; running their initialisers is what loading means.
    let loaded = unsafe { Loaded::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(refused)?;
    // The file stays open: the loader finds objects by path, and a path of `/proc/self/fd` that came to mean another
    // file would silently give this object again.
    std::mem::forget(file);
    Ok(Box::leak(Box::new(loaded)))
}

/// Resolves every function, so that a missing one is an error here and not a crash later.
fn resolve(library: &Loaded, object: &Digest) -> Result<Abi, RuntimeError> {
    macro_rules! symbol {
        ($name:literal) => {{
            // SAFETY: the type is that of torch 2.11's aoti_runtime/interface.h, to which the target of every record
            // that is loaded is tied.
            match unsafe { library.get($name) } {
                Ok(symbol) => *symbol,
                Err(_) => {
                    let name = String::from_utf8_lossy($name).into_owned();
                    return Err(RuntimeError::MissingSymbol { object: *object, name });
                }
            }
        }};
    }
    Ok(Abi {
        create: symbol!(b"AOTInductorModelContainerCreateWithDevice"),
        delete: symbol!(b"AOTInductorModelContainerDelete"),
        run: symbol!(b"AOTInductorModelContainerRunSingleThreaded"),
        num_inputs: symbol!(b"AOTInductorModelContainerGetNumInputs"),
        num_outputs: symbol!(b"AOTInductorModelContainerGetNumOutputs"),
        num_constants: symbol!(b"AOTInductorModelContainerGetNumConstants"),
        constant_name: symbol!(b"AOTInductorModelContainerGetConstantName"),
        constant_fqn: symbol!(b"AOTInductorModelContainerGetConstantOriginalFQN"),
        constant_folded: symbol!(b"AOTInductorModelContainerGetConstantFromFolded"),
        constant_dtype: symbol!(b"AOTInductorModelContainerGetConstantDtype"),
        constant_bytes: symbol!(b"AOTInductorModelContainerGetConstantDataSize"),
        bind: symbol!(b"AOTInductorModelContainerUpdateUserManagedConstantBufferPairs"),
    })
}

/// Writes `bytes` into a memory file that nobody can change any more.
fn sealed(object: &Digest, bytes: &[u8]) -> io::Result<File> {
    let name = CString::new(format!("precast-{}", object.short())).map_err(io::Error::other)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Kernels from 6.3 on want to be told that it is to be mapped executable; older ones refuse the flag.
    const MFD_EXEC: libc::c_uint = 0x10;
    // SAFETY: `name` is a C string that outlives the call.
    let mut fd = unsafe { libc::memfd_create(name.as_ptr(), flags | MFD_EXEC) };
    if fd < 0 {
        // SAFETY: as above.
        fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    }
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and nobody else has it.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(bytes)?;
    let seals = libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;
    // SAFETY: a plain call on a descriptor this function owns.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns what the dynamic loader said, without the path of the memory file.
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
