//! The error of a function, and the guard that every function runs in.
#![allow(
    unsafe_code,
    reason = "functions with C names; the texts of an error are C strings that it owns"
)]

use std::{
    any::Any,
    error::Error as Cause,
    ffi::{CString, c_char},
    mem::MaybeUninit,
    panic::{AssertUnwindSafe, catch_unwind},
};

use precast_runtime::{RuntimeError, errors::TorchError};
use precast_store::StoreError;

use crate::kept::text_of;

/// The kind of an error. Later versions may add kinds.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// An argument is null or out of range, a text is not UTF-8, or an object can't be used so.
    BadArgument = 1,
    /// There is no store, model, release, module or output of this name.
    NotFound = 2,
    /// The module does not take an input: its number, name, shape, dtype, device or a value.
    BadInput = 3,
    /// The module has no bucket for the sizes of the inputs.
    NoFit = 4,
    /// All slots or sessions are in use, for longer than the caller waits.
    Busy = 5,
    /// The store, an artifact, the weights, libtorch or a device can't be used.
    LoadFailed = 6,
    /// A call failed while it ran. The model can still be called.
    CallFailed = 7,
    /// There is too little memory, on the host or on the device.
    OutOfMemory = 8,
    /// The device answers no more calls in this process, or the process is ending.
    Unready = 9,
    /// A bug of Precast. Report it.
    Bug = 70,
}

/// An error. The caller frees it with precast_error_free. Later versions may append fields.
#[repr(C)]
#[derive(Debug)]
pub struct Error {
    /// The kind of the error.
    code: Code,
    /// The message, never NULL.
    message: *const c_char,
    /// A remedy, or an empty text.
    hint: *const c_char,
}

impl Drop for Error {
    fn drop(&mut self) {
        for text in [self.message, self.hint] {
            // SAFETY: both are from `CString::into_raw`, and a C host may only read them.
            drop(unsafe { CString::from_raw(text.cast_mut()) });
        }
    }
}

/// Frees an error. NULL is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn precast_error_free(error: Option<Box<Error>>) {
    drop(error);
}

/// An error before it is an object of the caller.
#[derive(Debug)]
pub struct Failure {
    code: Code,
    message: String,
    hint: String,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>, hint: impl Into<String>) -> Self {
        let (message, hint) = (message.into(), hint.into());
        Self {
            code,
            message,
            hint,
        }
    }

    /// Returns the failure of an argument.
    pub fn argument(name: &str, problem: &str) -> Self {
        let message = format!("argument `{name}` {problem}");
        Self::new(Code::BadArgument, message, "")
    }

    pub fn null(name: &str) -> Self {
        Self::argument(name, "is NULL")
    }

    /// Returns the failure of a tensor at a place, as `input 0`.
    pub fn tensor(place: &str, error: &TorchError) -> Self {
        let code = match error {
            TorchError::Memory(_) => Code::OutOfMemory,
            TorchError::Refused(_) => Code::BadInput,
            _ => Code::CallFailed,
        };
        Self::new(code, format!("{place}: {error}"), "")
    }

    fn into_error(self) -> Box<Error> {
        let text = |text: String| text_of(text).into_raw().cast_const();
        Box::new(Error {
            code: self.code,
            message: text(self.message),
            hint: text(self.hint),
        })
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        let names = NAMES.iter();
        let hint = names.fold(error.hint(), |hint, (rust, c)| hint.replace(rust, c));
        Self::new(code(&error), message(&error), hint)
    }
}

/// The names of hints in Rust, and in C.
const NAMES: [(&str, &str); 8] = [
    (
        "`Model::session`, and call `run`",
        "`precast_session_open`, and call `precast_session_run`",
    ),
    ("Device::Cpu", "kDLCPU"),
    ("Inputs::MayCopy", "precast_options.copy_inputs"),
    ("Runtime::instances", "precast_options.instances"),
    ("Runtime::libtorch", "precast_libtorch"),
    ("Runtime::session_limit", "precast_options.session_limit"),
    ("Runtime::sessions", "precast_options.sessions"),
    ("Session::reset", "precast_session_reset"),
];

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::new(code_of_store(&error), message(&error), error.hint())
    }
}

/// Returns the kind of an error of a store.
fn code_of_store(error: &StoreError) -> Code {
    match error {
        StoreError::BadName(_) => Code::BadArgument,
        StoreError::NotAStore { .. } => Code::NotFound,
        StoreError::Busy { .. } => Code::Busy,
        _ => Code::LoadFailed,
    }
}

/// Returns the kind of an error of the runtime.
fn code(error: &RuntimeError) -> Code {
    use RuntimeError as E;
    match error {
        error if error.is_out_of_memory() => Code::OutOfMemory,
        E::Store { source, .. } => source
            .downcast_ref()
            .map_or(Code::LoadFailed, code_of_store),
        E::Devices | E::NeedsSession { .. } | E::NoStep { .. } | E::State { .. } => {
            Code::BadArgument
        }
        E::NoRelease(_) | E::NoModule { .. } | E::NoOutput { .. } => Code::NotFound,
        E::BadInput { .. } | E::InputCount { .. } | E::InputNames { .. } | E::Shape { .. } => {
            Code::BadInput
        }
        E::NoBucket { .. } => Code::NoFit,
        E::Busy { .. } | E::SessionsBusy { .. } => Code::Busy,
        E::Unready { .. } => Code::Unready,
        E::Failed { .. }
        | E::CheckFailed { .. }
        | E::BadOutput { .. }
        | E::NothingLeft { .. }
        | E::SessionFailed { .. }
        | E::NoThreads { .. }
        | E::OutputDtype { .. }
        | E::Tensor { .. }
        | E::Array { .. } => Code::CallFailed,
        _ => Code::LoadFailed,
    }
}

/// Returns the text of an error and of its causes.
fn message(error: &dyn Cause) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let own = error.to_string();
        // A transparent error has the text of its cause.
        if !text.contains(&own) {
            text = format!("{text}: {own}");
        }
        cause = error.source();
    }
    text
}

/// Runs the body of a function. Returns its failure or its panic as an error for the caller, or null.
pub fn guarded(body: impl FnOnce() -> Result<(), Failure>) -> Option<Box<Error>> {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.err()?,
        Err(panic) => {
            let hint = "this is a bug of Precast: please report it";
            Failure::new(Code::Bug, panicked(&*panic), hint)
        }
    };
    Some(failure.into_error())
}

/// Runs the body of a function that makes an object. After a failure the caller's pointer is null.
pub fn made<T>(
    out: Option<&mut MaybeUninit<Option<Box<T>>>>,
    body: impl FnOnce() -> Result<T, Failure>,
) -> Option<Box<Error>> {
    guarded(|| {
        let out = out.ok_or_else(|| Failure::null("out"))?;
        let out = out.write(None);
        *out = Some(Box::new(body()?));
        Ok(())
    })
}

/// Runs the body of a function without errors. Returns the default after a panic.
pub fn quiet<T>(default: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(default)
}

/// Returns the message of a panic.
fn panicked(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use std::{ffi::CStr, fs, io, path::PathBuf};

    use super::*;

    fn texts(error: &Error) -> [&str; 2] {
        // SAFETY: texts of a live error.
        [error.message, error.hint].map(|text| unsafe { CStr::from_ptr(text) }.to_str().unwrap())
    }

    #[test]
    fn a_panic_is_an_error() {
        let error = guarded(|| panic!("at {}", 7)).unwrap();
        assert_eq!(error.code, Code::Bug);
        assert_eq!(texts(&error)[0], "at 7");
        let mut out = MaybeUninit::new(Some(Box::new(5)));
        let error = made(Some(&mut out), || panic!("in a constructor")).unwrap();
        assert_eq!(texts(&error)[0], "in a constructor");
        // SAFETY: `made` writes it first.
        assert_eq!(unsafe { out.assume_init() }, None);
        assert_eq!(quiet(3, || panic!("in a getter")), 3);
    }

    #[test]
    fn hints_have_the_names_of_c() {
        let busy = Failure::from(RuntimeError::SessionsBusy {
            model: "chat".to_owned(),
            sessions: 2,
        });
        assert!(
            busy.hint.contains("`precast_options.sessions`"),
            "{}",
            busy.hint
        );
        // Every name of Rust in the hints of the runtime has one in C.
        let runtime = concat!(env!("CARGO_MANIFEST_DIR"), "/../precast-runtime/src");
        for file in ["error/hint.rs", "problem.rs"] {
            let text = fs::read_to_string(format!("{runtime}/{file}")).unwrap();
            for name in text
                .split('`')
                .skip(1)
                .step_by(2)
                .filter(|name| name.contains("::"))
            {
                let known = NAMES.iter().any(|(rust, _)| rust.contains(name));
                assert!(known || name.starts_with("torch::"), "{name}");
            }
        }
    }

    #[test]
    fn a_message_has_its_causes_and_no_nul() {
        let denied = StoreError::Io {
            what: "read",
            path: PathBuf::from("a\0b"),
            source: io::Error::other("no right to"),
        };
        let failure = Failure::from(denied);
        assert_eq!(failure.code, Code::LoadFailed);
        assert!(
            failure.message.ends_with(": no right to"),
            "{}",
            failure.message
        );
        let error = failure.into_error();
        assert!(texts(&error)[0].ends_with('a'), "{error:?}");
        assert!(!texts(&error)[1].is_empty());
    }
}
