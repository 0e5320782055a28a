//! The exceptions of the package, and their causes.
//!
//! The classes are Python's (`precast/errors.py`): a hierarchy under `precast.Error`, with a hint and a code.

use precast_runtime::{
    RuntimeError,
    errors::{ErrorKind, TorchError, whole},
};
use precast_store::StoreError;
use pyo3::{prelude::*, sync::PyOnceLock, types::PyDict};

/// Returns an exception of the class `class` of `precast.errors`.
fn raise(class: &str, code: &str, message: &str, hint: &str) -> PyErr {
    Python::attach(|py| {
        let made = || -> PyResult<PyErr> {
            let class = classes(py)?.as_any().get_item(class)?;
            Ok(PyErr::from_value(class.call1((message, hint, code))?))
        };
        made().unwrap_or_else(|error| error)
    })
}

/// Returns the classes by name. Kept: at the end of the process no module can be imported.
fn classes(py: Python<'_>) -> PyResult<&Bound<'_, PyDict>> {
    static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let classes = CLASSES.get_or_try_init(py, || {
        let module = py.import("precast.errors")?;
        Ok::<_, PyErr>(module.dict().copy()?.unbind())
    })?;
    Ok(classes.bind(py))
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
    raise(class_of(reason.into()), "Torch", &reason.to_string(), "")
}

pub fn store(error: &StoreError) -> PyErr {
    raise(class_of(error.into()), "Store", &whole(error), error.hint())
}

pub fn runtime(error: &RuntimeError) -> PyErr {
    let class = class_of(error.kind());
    raise(class, error.name(), &whole(error), &error.hint())
}

/// Returns the class of a kind of errors.
fn class_of(kind: ErrorKind) -> &'static str {
    use ErrorKind as K;
    match kind {
        K::BadArgument | K::BadInput => "BadInput",
        K::NotFound => "NotFound",
        K::NoFit => "NoFit",
        K::Busy => "Busy",
        K::LoadFailed => "LoadError",
        K::OutOfMemory => "OutOfMemory",
        K::CallFailed | K::Unready => "CallFailed",
        _ => "Error",
    }
}
