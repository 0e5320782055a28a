//! The extension module `precast._native`: load a release and call it from Python.
//!
//! A thin layer over `precast-runtime`, which knows nothing of Python. Tensors come in and go out without a copy: as
//! they are, by DLPack, or as NumPy arrays. libtorch is the copy that the process has. The package `precast` in this
//! folder is the public face.
//!
//! ```text
//! Module.__call__ ─▶ inputs (tensors in) ─▶ Model::run, without the GIL ─▶ nesting ─▶ tensors out
//! ```
//!
//! **Threads.** A call holds the GIL only while it converts tensors. Every object can be used from any thread; a
//! session by one at a time.
//!
//! **End.** The interpreter does not go while a thread is inside. Exit handlers and destructors that run afterwards can
//! close and ask, and are refused calls.
//!
//! **Fork.** A model of the parent can't be called in a child: threads and CUDA do not survive a fork.
//!
//! ## Layers
//!
//! A module uses those of earlier lines only.
//!
//! ```text
//! direct, errors, values
//! ending
//! capsules, exchange, fork, log
//! numpy
//! tensors
//! inputs, nesting, watch
//! loaded
//! module, session
//! model
//! load
//! ```

// The macros of PyO3 convert errors that are errors of Python already.
#![allow(clippy::useless_conversion)]

use pyo3::prelude::*;

mod capsules;
mod direct;
mod ending;
mod errors;
mod exchange;
mod fork;
mod inputs;
mod load;
mod loaded;
mod log;
mod model;
mod module;
mod nesting;
mod numpy;
mod session;
mod tensors;
mod values;
mod watch;

/// The extension of the package `precast`.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use crate::{
        ending::shut_down,
        fork::forked,
        load::{assets, load, write_tensors},
        log::set_level,
        model::Model,
        module::{Call, Module},
        session::Session,
        tensors::Tensor,
        watch::Watch,
    };

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::log::install();
        Ok(())
    }
}
