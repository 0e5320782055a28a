//! The error of a function, and the guard that every function runs in.
#![allow(
    unsafe_code,
    reason = "functions with C names; the texts of an error are C strings that it owns"
)]

use std::{
    any::Any,
    ffi::{CString, c_char},
    mem::MaybeUninit,
    panic::{AssertUnwindSafe, catch_unwind},
};

use precast_runtime::{
    RuntimeError,
    errors::{ErrorKind, TorchError, whole},
};
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
        let kind = ErrorKind::from(error);
        Self::new(kind.into(), format!("{place}: {error}"), "")
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
        Self::new(error.kind().into(), whole(&error), error.hint())
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        let kind = ErrorKind::from(&error);
        Self::new(kind.into(), whole(&error), error.hint())
    }
}

impl From<ErrorKind> for Code {
    fn from(kind: ErrorKind) -> Self {
        use ErrorKind as K;
        match kind {
            K::BadArgument => Self::BadArgument,
            K::NotFound => Self::NotFound,
            K::BadInput => Self::BadInput,
            K::NoFit => Self::NoFit,
            K::Busy => Self::Busy,
            K::LoadFailed => Self::LoadFailed,
            K::OutOfMemory => Self::OutOfMemory,
            K::Unready => Self::Unready,
            // Kinds of later versions.
            _ => Self::CallFailed,
        }
    }
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
    use std::{ffi::CStr, io, path::PathBuf};

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
    fn a_message_has_its_causes_and_no_nul() {
        let denied = StoreError::Io {
            what: "read",
            path: PathBuf::from("a\0b"),
            source: io::Error::other("no right to"),
        };
        let failure = Failure::from(denied);
        assert_eq!(failure.code, Code::LoadFailed);
        let message = &failure.message;
        assert!(message.ends_with(": no right to"), "{message}");
        let error = failure.into_error();
        assert!(texts(&error)[0].ends_with('a'), "{error:?}");
        assert!(!texts(&error)[1].is_empty());
    }
}
