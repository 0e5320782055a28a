//! Operators without a C entry point: the libraries that register them, and the executor that artifacts call.

use std::{
    collections::HashSet,
    ffi::{CStr, CString, c_char, c_void},
    fs::File,
    ptr::{self, NonNull},
    sync::{Mutex, MutexGuard, PoisonError},
};

use libloading::os::unix::RTLD_GLOBAL;
use precast_store::{Device, Digest};

use super::{
    Handle,
    abi::RawArgument,
    shim::{self, checked},
    verified::open_verified,
};
use crate::{RuntimeError, TorchError};

/// One operator call of an artifact: fixed arguments, and those of the call.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// As `namespace::name`.
    pub name: String,
    /// `""` for most.
    pub overload: String,
    pub arguments: Vec<(String, OperatorArgument)>,
}

/// One argument. Tensors and integers come with the call; their number is fixed.
#[derive(Clone, Debug, PartialEq)]
pub enum OperatorArgument {
    None,
    Tensor,
    Tensors(usize),
    /// Which of the tensors exist.
    OptionalTensors(Vec<bool>),
    Int,
    Ints(usize),
    Float(f64),
    Floats(Vec<f64>),
    Bool(bool),
    Bools(Vec<bool>),
    String(String),
    /// By the number in torch's export schema, as the next two.
    ScalarType(i64),
    Layout(i64),
    MemoryFormat(i64),
    /// As `cpu` or `cuda:0`.
    Device(String),
}

/// The operators of one artifact on one device: a `torch::aot_inductor::ProxyExecutor`.
pub struct Operators(NonNull<c_void>);

// SAFETY: it is the shim's own class; after `new` nothing writes to it, and a call works on a copy of its arguments.
// `c10::OperatorHandle::callBoxed` may be called from any thread (ATen/core/dispatch/Dispatcher.h).
unsafe impl Send for Operators {}
// SAFETY: as above.
unsafe impl Sync for Operators {}

impl Operators {
    /// Resolves every call. If an operator is not registered or has another schema, fails with its name.
    pub fn new(calls: &[Call], device: Device) -> Result<Self, TorchError> {
        let device = CString::new(device.to_string())?;
        let mut raw = ptr::null_mut();
        // SAFETY: a C string and a valid out pointer.
        checked(unsafe { shim::precast_operators_new(device.as_ptr(), &mut raw) })?;
        let made = Self(NonNull::new(raw).ok_or("no executor was made")?);
        for call in calls {
            made.add(call)
                .map_err(|error| error.at(&format!("operator `{}`", call.name)))?;
        }
        Ok(made)
    }

    /// Returns the pointer for an artifact's run.
    pub(super) fn raw(&self) -> *mut c_void {
        self.0.as_ptr()
    }

    /// Runs the first call and returns its one result. `ints` and `tensors` are its arguments, in the order of the
    /// operator's schema.
    pub fn call(&self, ints: &[i64], tensors: &[Handle]) -> Result<Handle, TorchError> {
        let raw: Vec<_> = tensors.iter().map(Handle::raw).collect();
        let mut made = ptr::null_mut();
        // SAFETY: an executor of the shim; arrays and handles outlive the call, which borrows them; a valid out
        // pointer.
        checked(unsafe {
            shim::precast_operators_call(
                self.raw(),
                ints.as_ptr(),
                ints.len(),
                raw.as_ptr(),
                raw.len(),
                &mut made,
            )
        })?;
        // SAFETY: a new `at::Tensor` that is the caller's.
        unsafe { Handle::from_raw(made) }.ok_or_else(|| "it gave no tensor".into())
    }

    fn add(&self, call: &Call) -> Result<(), TorchError> {
        let (name, overload) = (CString::new(&*call.name)?, CString::new(&*call.overload)?);
        let flat: Vec<Flat> = call
            .arguments
            .iter()
            .map(|(name, value)| Flat::new(name, value))
            .collect::<Result<_, _>>()?;
        let raw: Vec<RawArgument> = flat.iter().map(Flat::raw).collect();
        // SAFETY: `self.0` is an executor of the shim; everything pointed to outlives the call, which copies it.
        checked(unsafe {
            shim::precast_operators_add(
                self.raw(),
                name.as_ptr(),
                overload.as_ptr(),
                raw.as_ptr(),
                raw.len(),
            )
        })
    }
}

impl Drop for Operators {
    fn drop(&mut self) {
        // SAFETY: `self` owns it, and containers that use it hold an `Arc` of it.
        unsafe { shim::precast_operators_delete(self.raw()) }
    }
}

/// An argument's parts, held while the shim reads them.
struct Flat {
    name: CString,
    kind: i32,
    ints: Vec<i64>,
    floats: Vec<f64>,
    text: CString,
}

impl Flat {
    fn new(name: &str, value: &OperatorArgument) -> Result<Self, TorchError> {
        let bits = |bits: &[bool]| bits.iter().map(|&bit| i64::from(bit)).collect();
        let (mut ints, mut floats, mut words) = (Vec::new(), Vec::new(), "");
        let kind = match value {
            OperatorArgument::None => 0,
            OperatorArgument::Tensor => 1,
            OperatorArgument::Tensors(n) => {
                ints.push(i64::try_from(*n)?);
                2
            }
            OperatorArgument::OptionalTensors(given) => {
                ints = bits(given);
                3
            }
            OperatorArgument::Int => {
                ints.push(0);
                4
            }
            // Their values come with the call; the shim takes their number.
            OperatorArgument::Ints(n) => {
                ints = vec![0; *n];
                5
            }
            OperatorArgument::Float(value) => {
                floats.push(*value);
                6
            }
            OperatorArgument::Floats(values) => {
                floats.clone_from(values);
                7
            }
            OperatorArgument::Bool(value) => {
                ints.push(i64::from(*value));
                8
            }
            OperatorArgument::Bools(values) => {
                ints = bits(values);
                9
            }
            OperatorArgument::String(value) => {
                words = value;
                10
            }
            OperatorArgument::ScalarType(number) => {
                ints.push(*number);
                11
            }
            OperatorArgument::Layout(number) => {
                ints.push(*number);
                12
            }
            OperatorArgument::MemoryFormat(number) => {
                ints.push(*number);
                13
            }
            OperatorArgument::Device(name) => {
                words = name;
                14
            }
        };
        Ok(Self {
            name: CString::new(name)?,
            kind,
            ints,
            floats,
            text: CString::new(words)?,
        })
    }

    fn raw(&self) -> RawArgument {
        RawArgument {
            name: self.name.as_ptr(),
            kind: self.kind,
            ints: self.ints.as_ptr(),
            n_ints: self.ints.len(),
            floats: self.floats.as_ptr(),
            n_floats: self.floats.len(),
            text: self.text.as_ptr(),
        }
    }
}

/// The operator libraries this process has loaded. Nothing is ever removed.
static LOADED: Mutex<Option<HashSet<Digest>>> = Mutex::new(None);

/// The right to load operator libraries: one caller at a time has it.
pub struct Libraries(MutexGuard<'static, Option<HashSet<Digest>>>);

impl Libraries {
    /// Waits for the right.
    pub fn begin() -> Self {
        Self(LOADED.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns whether the process has loaded this library.
    pub fn has(&self, object: &Digest) -> bool {
        self.0
            .as_ref()
            .is_some_and(|loaded| loaded.contains(object))
    }

    /// Loads a library whose initialisers register operators, once per digest and process. Its symbols are visible to
    /// later loads, as under `torch.ops.load_library`.
    pub fn load(&mut self, object: &Digest, file: File) -> Result<(), RuntimeError> {
        if !self.has(object) {
            open_verified(object, file, RTLD_GLOBAL)?;
            self.0.get_or_insert_default().insert(*object);
        }
        Ok(())
    }
}

/// Returns the names of the operators of this process, as `namespace::name`.
pub fn registered() -> Result<Vec<String>, TorchError> {
    extern "C" fn each(names: *mut c_void, name: *const c_char) {
        // SAFETY: the shim passes back the vector it was given, and a C string.
        let (names, name) = unsafe { (&mut *names.cast::<Vec<String>>(), CStr::from_ptr(name)) };
        names.push(name.to_string_lossy().into_owned());
    }
    let mut names: Vec<String> = Vec::new();
    // SAFETY: `each` takes this vector, and only during the call.
    checked(unsafe { shim::precast_operator_names(each, (&raw mut names).cast()) })?;
    Ok(names)
}
