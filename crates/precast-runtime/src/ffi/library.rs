//! An artifact's shared object: verified, loaded once per digest and process, never unloaded.

use std::{
    collections::HashMap,
    fs::File,
    sync::{Arc, Mutex, PoisonError},
};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL};
use precast_store::{Digest, elf::Elf};

use super::{
    abi::{Bind, CountOf, Create, Delete, DtypeOf, FailedCheck, Flag, Name, Run, Size},
    libtorch, shim,
    verified::{open_file, verified},
};
use crate::{RuntimeError, TorchError};

/// The functions of an artifact that the runtime calls. A [`Library`] has all of them.
pub(super) struct Abi {
    pub create: Create,
    pub delete: Delete,
    pub run: Run,
    pub num_inputs: CountOf,
    pub num_outputs: CountOf,
    pub num_constants: CountOf,
    pub constant_name: Name,
    pub constant_fqn: Name,
    pub constant_folded: Flag,
    pub constant_dtype: DtypeOf,
    pub constant_bytes: Size,
    pub bind: Bind,
    /// Takes the text of the check that failed in this thread's last run, null if none did.
    pub failed_check: Option<FailedCheck>,
}

/// A loaded artifact.
pub struct Library {
    pub(super) abi: Abi,
    object: Digest,
}

/// The libraries that this process loaded or refused. Nothing is ever removed.
///
/// The map is locked for a look-up. Each object has a separate lock, held while it is loaded: an initialiser that hangs
/// delays only callers of the same object, apart from the system's loader, which has one lock for all.
static LOADED: Mutex<Option<HashMap<Digest, Arc<Mutex<FirstLoad>>>>> = Mutex::new(None);

/// None before the first load.
type FirstLoad = Option<Result<Arc<Library>, Refused>>;

/// The reason that verified bytes are no artifact. It does not change, and another try would map the bytes again.
enum Refused {
    NotLoadable(TorchError),
    MissingSymbol(String),
    Lacking(Vec<String>, String),
}

/// Returns the entry of an object.
fn entry(object: &Digest) -> Arc<Mutex<FirstLoad>> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    loaded
        .get_or_insert_default()
        .entry(*object)
        .or_default()
        .clone()
}

impl Library {
    /// Returns whether this process has loaded the object with this digest, or was refused it. Waits for no load.
    pub fn known(object: &Digest) -> bool {
        entry(object).try_lock().is_ok_and(|known| known.is_some())
    }

    /// Loads the object with this digest, or returns it if the process has loaded it before. A refused object stays
    /// refused.
    ///
    /// `file` is called only for an object that the process has not loaded; `built_with` is the torch in its record,
    /// for a message. Fails if the bytes do not match the digest, if they import a function that libtorch lacks, if
    /// `dlopen` refuses them, or if a function of the ABI is missing. No code of a refused object has run, except in
    /// the last case, in which `dlopen` has run its initialisers.
    pub fn load(
        object: &Digest,
        built_with: &str,
        file: impl FnOnce() -> Result<File, RuntimeError>,
    ) -> Result<Arc<Self>, RuntimeError> {
        let entry = entry(object);
        // Held while loading, so that two threads can't load one object twice.
        let mut known = entry.lock().unwrap_or_else(PoisonError::into_inner);
        match &*known {
            Some(Ok(library)) => return Ok(library.clone()),
            Some(Err(Refused::NotLoadable(reason))) => {
                let (object, reason) = (*object, reason.clone());
                return Err(RuntimeError::NotLoadable { object, reason });
            }
            Some(Err(Refused::MissingSymbol(name))) => {
                let (object, name) = (*object, name.clone());
                return Err(RuntimeError::MissingSymbol { object, name });
            }
            Some(Err(Refused::Lacking(functions, torch))) => {
                return Err(RuntimeError::LackingLibtorch {
                    object: *object,
                    functions: functions.clone(),
                    built_with: built_with.to_owned(),
                    torch: torch.clone(),
                });
            }
            None => {}
        }
        let opened = Self::open(object, built_with, file()?).map(Arc::new);
        *known = match &opened {
            Ok(library) => Some(Ok(library.clone())),
            Err(error) if error.is_transient() => None,
            Err(RuntimeError::NotLoadable { reason, .. }) => {
                Some(Err(Refused::NotLoadable(reason.clone())))
            }
            Err(RuntimeError::MissingSymbol { name, .. }) => {
                Some(Err(Refused::MissingSymbol(name.clone())))
            }
            Err(RuntimeError::LackingLibtorch {
                functions, torch, ..
            }) => Some(Err(Refused::Lacking(functions.clone(), torch.clone()))),
            // Other bytes, or none: the store may be repaired meanwhile.
            Err(_) => None,
        };
        opened
    }

    /// Returns the digest of the shared object.
    pub fn object(&self) -> &Digest {
        &self.object
    }

    fn open(object: &Digest, built_with: &str, file: File) -> Result<Self, RuntimeError> {
        let _span = tracing::info_span!("artifact", %object).entered();
        shim::capture_messages();
        let bytes = verified(object, &file)?;
        let functions = lacking(&bytes);
        if let (false, Ok(open)) = (functions.is_empty(), libtorch::get()) {
            return Err(RuntimeError::LackingLibtorch {
                object: *object,
                functions,
                built_with: built_with.to_owned(),
                torch: open.version.clone(),
            });
        }
        drop(bytes);
        let loaded = open_file(object, file, RTLD_LOCAL)?;
        Ok(Self {
            abi: resolve(loaded, object)?,
            object: *object,
        })
    }
}

/// Returns the functions that an object imports from libtorch and that the process lacks.
///
/// The ELF file has them. The loader refuses a file that can't be read here.
fn lacking(bytes: &[u8]) -> Vec<String> {
    let mut names = Elf::parse(bytes)
        .and_then(|elf| elf.imports())
        .unwrap_or_default();
    // Its scope is the process: it includes libtorch and the libraries of operators.
    let process = Loaded::this();
    names.retain(|name| {
        // SAFETY: the symbol is looked up, and neither called nor read.
        let found = unsafe { process.get::<*const ()>(format!("{name}\0").as_bytes()) };
        found.is_err()
    });
    names
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
        // SAFETY: the worker writes the function with this type; artifacts whose kernels check nothing lack it.
        failed_check: unsafe { library.get(b"precast_take_failed_check") }
            .ok()
            .map(|symbol| *symbol),
    })
}
