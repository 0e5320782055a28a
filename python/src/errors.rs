//! The exceptions of the package, and their causes.
//!
//! The classes are Python's (`precast/errors.py`): a hierarchy under `precast.Error`, with a hint and a code.

use precast_runtime::{RuntimeError, errors::TorchError};
use precast_store::StoreError;
use pyo3::{prelude::*, types::PyType};

/// Returns an exception of the class `class` of `precast.errors`.
fn raise(class: &str, code: &str, message: &str, hint: &str) -> PyErr {
    Python::attach(|py| {
        let made = || -> PyResult<PyErr> {
            let class = py
                .import("precast.errors")?
                .getattr(class)?
                .cast_into::<PyType>()?;
            Ok(PyErr::from_value(class.call1((message, hint, code))?))
        };
        made().unwrap_or_else(|error| error)
    })
}

/// Returns the message of an error and of its causes.
fn whole(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

/// An argument that is not one.
pub fn bad_input(message: impl Into<String>, hint: &str) -> PyErr {
    raise("BadInput", "BadInput", &message.into(), hint)
}

/// Something that can't answer now.
pub fn unready(message: impl Into<String>, hint: &str) -> PyErr {
    raise("CallFailed", "Unready", &message.into(), hint)
}

/// A session that another thread uses.
pub fn busy(message: impl Into<String>, hint: &str) -> PyErr {
    raise("Busy", "Busy", &message.into(), hint)
}

/// A tensor that can't be taken or given.
pub fn tensor(name: &str, reason: &TorchError) -> PyErr {
    let hint = "inputs are dense tensors with strides, on the CPU or a CUDA device of this process";
    bad_input(format!("`{name}` can't be used: {reason}"), hint)
}

pub fn torch(reason: &TorchError) -> PyErr {
    raise("CallFailed", "Torch", &reason.to_string(), "")
}

pub fn store(error: &StoreError) -> PyErr {
    raise("LoadError", "Store", &whole(error), error.hint())
}

pub fn runtime(error: &RuntimeError) -> PyErr {
    let (class, code) = class_of(error);
    raise(class, code, &whole(error), &error.hint())
}

/// Returns the class of an error and its name in Rust.
fn class_of(error: &RuntimeError) -> (&'static str, &'static str) {
    use RuntimeError as E;
    macro_rules! classes {
        ($($class:literal: $($variant:ident)+;)*) => {
            match error {
                $($(E::$variant { .. } => ($class, stringify!($variant)),)+)*
                _ => ("Error", "Runtime"),
            }
        };
    }
    classes! {
        "NotFound": NoRelease NoModule NoOutput;
        "BadInput": BadInput InputCount InputNames Shape Array OutputDtype State NoStep Checkpoint CheckpointFile;
        "NoFit": NoBucket;
        "Busy": Busy SessionsBusy;
        "LoadError": Store NoDevice UnknownHost Libtorch NoShim Devices WrongTarget WrongArtifact WrongRecord Unreadable
            MemoryFile WrongBytes NotLoadable Crashes Untried Interrupted MissingSymbol LackingLibtorch NoContainer
            WrongCount Operators Malformed BadWeights Unbound Unprepared Upload ComputedFromWeights NotAWeight
            SessionLimit;
        "CallFailed": Unready NoThreads NeedsSession SessionFailed Failed CheckFailed BadOutput NothingLeft Tensor;
    }
}
