//! The kinds of errors: the one table for the interfaces in other languages.

use std::error::Error;

use precast_store::StoreError;

use super::{RuntimeError, TorchError};

/// The kind of an error: the part that a caller acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is out of range, or an object can't be used so.
    BadArgument,
    /// There is no store, release, module or output of this name.
    NotFound,
    /// The module does not take an input: its number, name, shape, dtype, device or a value.
    BadInput,
    /// The module has no bucket for the sizes of the inputs.
    NoFit,
    /// All slots or sessions are in use, for longer than the caller waits.
    Busy,
    /// The store, an artifact, the weights, libtorch or a device can't be used.
    LoadFailed,
    /// A call failed while it ran. The model can still be called.
    CallFailed,
    /// There is too little memory, on the host or on the device.
    OutOfMemory,
    /// The device answers no more calls in this process, or the process is ending.
    Unready,
}

macro_rules! table {
    ($($kind:ident: $($variant:ident)+;)*) => {
        /// Returns the kind and the name of the variant of an error.
        fn row(error: &RuntimeError) -> (ErrorKind, &'static str) {
            match error {
                $($(RuntimeError::$variant { .. } => (ErrorKind::$kind, stringify!($variant)),)+)*
            }
        }
    };
}

table! {
    BadArgument: Devices NeedsSession NoStep OutputDtype SessionFile SeveralDevices State;
    NotFound: NoRelease NoModule NoOutput;
    BadInput: BadInput EarlierCall Checkpoint CheckpointFile InputCount InputNames Shape;
    NoFit: NoBucket;
    Busy: Busy SessionsBusy;
    LoadFailed: Store NoDevice UnknownHost Libtorch NoShim WrongTarget WrongArtifact WrongRecord Unreadable
        MemoryFile WrongBytes NotLoadable Crashes Untried Interrupted MissingSymbol LackingLibtorch NoContainer
        WrongCount Operators Malformed BadWeights Unbound Unprepared ComputedFromWeights NotAWeight Upload
        SessionLimit;
    CallFailed: NoThreads SessionFailed Failed CheckFailed BadOutput NothingLeft Tensor Array WrongSum
        Nccl;
    Unready: Unready;
}

impl RuntimeError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Store { source, .. } => source
                .downcast_ref::<StoreError>()
                .map_or(ErrorKind::LoadFailed, ErrorKind::from),
            error if error.is_out_of_memory() => ErrorKind::OutOfMemory,
            error => row(error).0,
        }
    }

    /// Returns the name of the error's variant, as `NoBucket`.
    pub fn name(&self) -> &'static str {
        row(self).1
    }
}

impl From<&StoreError> for ErrorKind {
    fn from(error: &StoreError) -> Self {
        match error {
            StoreError::BadName(_) => Self::BadArgument,
            StoreError::NotAStore { .. } => Self::NotFound,
            StoreError::Busy { .. } => Self::Busy,
            _ => Self::LoadFailed,
        }
    }
}

impl From<&TorchError> for ErrorKind {
    fn from(error: &TorchError) -> Self {
        match error {
            TorchError::Memory(_) => Self::OutOfMemory,
            TorchError::Refused(_) => Self::BadInput,
            _ => Self::CallFailed,
        }
    }
}

/// Returns the message of an error and of its causes.
pub fn whole(error: &dyn Error) -> String {
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

#[cfg(test)]
mod tests {
    use std::io;

    use precast_store::Device;

    use super::*;

    #[test]
    fn a_lack_of_memory_is_a_kind_of_its_own() {
        let upload = |reason| RuntimeError::Upload {
            device: Device::Cpu,
            reason,
        };
        let short = upload(TorchError::cuda("CUDA out of memory"));
        assert_eq!(short.name(), "Upload");
        assert_eq!(short.kind(), ErrorKind::OutOfMemory);
        let other = upload(TorchError::cuda("an illegal memory access was encountered"));
        assert_eq!(other.kind(), ErrorKind::LoadFailed);
    }

    #[test]
    fn an_error_of_the_store_keeps_its_kind_and_its_causes() {
        let missing = StoreError::NotAStore {
            path: "a".into(),
            why: "has no marker",
        };
        let of = |source: StoreError| RuntimeError::Store {
            what: "release 3".to_owned(),
            source: source.into(),
        };
        assert_eq!(of(missing).kind(), ErrorKind::NotFound);
        let denied = StoreError::Io {
            what: "read",
            path: "b".into(),
            source: io::Error::other("no right to"),
        };
        let error = of(denied);
        assert_eq!(error.kind(), ErrorKind::LoadFailed);
        insta::assert_snapshot!(whole(&error), @"release 3 can't be read from the store: can't read `b`: no right to");
    }
}
