//! The one error of the code below the safe part: libtorch, CUDA, the dynamic loader, and the checks before them.

use std::{ffi::NulError, io, num::TryFromIntError};

use precast_store::out_of_memory::says_out_of_memory;

/// Errors of the system that may pass: a short resource, a failed read.
pub(super) const PASSING: [i32; 7] = [
    libc::EMFILE,
    libc::ENFILE,
    libc::ENOMEM,
    libc::EIO,
    libc::EAGAIN,
    libc::EINTR,
    libc::EBUSY,
];

/// An error of libtorch, CUDA or the dynamic loader, or of a check before them. The text is the whole message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
#[non_exhaustive]
pub enum TorchError {
    /// There is too little memory, on the device or on the host. The same may work later.
    Memory(Box<str>),
    /// The system has no file handle or no thread left, or a read failed. The same may work later.
    Busy(Box<str>),
    /// oneDNN can't make machine code in this process.
    NoCode(Box<str>),
    /// libtorch or the code of an artifact refused it.
    Libtorch(Box<str>),
    /// There is no CUDA, or CUDA refused it.
    Cuda(Box<str>),
    /// The dynamic loader refused a library, or the library lacks a function.
    Loader(Box<str>),
    /// Another library of this process has registered the operator.
    Registered(Box<str>),
    /// A check before the call failed.
    Refused(Box<str>),
}

impl TorchError {
    /// Returns the error for a message of libtorch's or an artifact's.
    pub(crate) fn libtorch(text: impl Into<Box<str>>) -> Self {
        Self::sorted(text.into(), Self::Libtorch)
    }

    /// Returns the error for a message of CUDA's.
    pub(crate) fn cuda(text: impl Into<Box<str>>) -> Self {
        Self::sorted(text.into(), Self::Cuda)
    }

    /// Returns the error for a message of the dynamic loader, which ends with the message of the system.
    pub(crate) fn loader(text: impl Into<Box<str>>) -> Self {
        let text = text.into();
        let has = |number: &i32| {
            let words = io::Error::from_raw_os_error(*number).to_string();
            words
                .split_once(" (os error")
                .is_some_and(|(words, _)| text.ends_with(words))
        };
        let short = PASSING.iter().any(has);
        Self::sorted(text, if short { Self::Busy } else { Self::Loader })
    }

    /// Classifies a message by its text, only here: torch, CUDA and the system give no error code with it.
    fn sorted(text: Box<str>, other: fn(Box<str>) -> Self) -> Self {
        /// The message of oneDNN.
        const NO_CODE: &str = "could not create a primitive";
        if says_out_of_memory(&text) {
            Self::Memory(text)
        } else if text.contains(NO_CODE) {
            Self::NoCode(text)
        } else {
            other(text)
        }
    }

    /// Puts a place before the reason, as ``operator `f`: reason``.
    pub(crate) fn at(mut self, place: &str) -> Self {
        let (Self::Memory(text)
        | Self::Busy(text)
        | Self::NoCode(text)
        | Self::Libtorch(text)
        | Self::Cuda(text)
        | Self::Loader(text)
        | Self::Registered(text)
        | Self::Refused(text)) = &mut self;
        *text = format!("{place}: {text}").into();
        self
    }
}

macro_rules! refused {
    ($($type:ty),*) => {$(
        impl From<$type> for TorchError {
            fn from(reason: $type) -> Self {
                Self::Refused(reason.to_string().into())
            }
        }
    )*};
}

refused!(&str, String, NulError, TryFromIntError);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RuntimeError;
    use precast_store::Digest;

    #[test]
    fn a_message_is_sorted_by_its_words_once() {
        let short = "CUDA out of memory. Tried to allocate 2.00 GiB";
        assert!(matches!(TorchError::cuda(short), TorchError::Memory(_)));
        let other = TorchError::cuda("an illegal memory access was encountered");
        assert!(matches!(other, TorchError::Cuda(_)));
        let other = TorchError::libtorch("size mismatch");
        assert!(matches!(other, TorchError::Libtorch(_)));
        let made = TorchError::libtorch("could not create a primitive").at("operator `f`");
        assert!(matches!(made, TorchError::NoCode(_)));
        let said = made.to_string();
        assert_eq!(said, "operator `f`: could not create a primitive");
    }

    #[test]
    fn a_refusal_of_the_loader_passes_where_the_system_is_short() {
        let transient = |reason: &str| {
            let (object, reason) = (Digest::of(b"x"), TorchError::loader(reason));
            RuntimeError::NotLoadable { object, reason }.is_transient()
        };
        for passing in [
            "cannot open shared object file: Too many open files",
            "failed to map segment from shared object: Cannot allocate memory",
            "cannot read file data: Input/output error",
        ] {
            assert!(transient(passing), "{passing}");
        }
        assert!(!transient("cannot allocate memory in static TLS block"));
        assert!(!transient("undefined symbol: f"));
    }

    #[test]
    fn what_is_foreign_fails_with_this_error_and_with_no_text() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ffi");
        for file in std::fs::read_dir(folder).unwrap() {
            let file = file.unwrap().path();
            if let Ok(text) = std::fs::read_to_string(&file) {
                let flat = text.split_whitespace().collect::<String>();
                let typed = !flat.replace("Vec<String>", "").contains(",String>");
                assert!(typed, "{}", file.display());
            }
        }
    }
}
