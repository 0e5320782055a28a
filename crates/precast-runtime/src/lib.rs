//! Load artifacts and run them: safe, in process, with no Python.
//!
//! ```text
//! Model: a release on one or more devices
//!   └ Variant: the programs of a module with the same inputs, and the table that selects one
//!       └ Program: one program and its load state
//!           └ Loaded: its artifacts, its CUDA graph or eager
//!               └ Slot: one caller's containers, graph and buffers, bound by pointer to one weight set
//!
//! call ─▶ validate (safe Rust, on metadata) ─▶ dispatch (the bucket) ─▶ a slot for its time ─▶ steps ─▶ cut
//! fixed program ─▶ holds a slot ─▶ steps, as often as it runs
//! session ─▶ holds states, and a slot of each program that it uses
//! ```
//!
//! **Ownership.** Shared objects are loaded once per digest and process, and nothing is ever unloaded: thread-local
//! destructors, OpenMP workers and CUDA's own teardown may run their code after the last call. Dropping a [`Model`]
//! frees everything else. Weights are shared by their readers and freed with the last one. Outputs belong only to the
//! caller: an output in the memory of an input, a padding buffer or a weight is copied first. Static tensors, whose
//! addresses a graph has, can only be written and read.
//!
//! **Threads.** [`Model`] is `Send + Sync`. A call has exclusive use of a slot of its program, so an artifact's code
//! never runs twice at once on one container, and a failure of one caller does not affect another. Callers beyond the
//! number of slots wait, up to the limit that they set. Programs are loaded before the model is returned, by a thread
//! of the model, or by the first call of one. A swap of weights waits for running loads; later loads have the new
//! weights.
//!
//! **Failure.** A program that can't be read, verified or loaded is set aside once ([`Model::quarantined`]); a request
//! goes to the next rung of the ladder: a covering bucket, a dynamic artifact, eager. If the host had a temporary
//! error, a later call tries again. With a [`Trial`] a separate process is the first to load an object, which may
//! crash.
//!
//! **Ending.** libtorch's destructors must not run during a call. A process that exits while its threads are in calls
//! first calls [`shut_down`].
//!
//! **Trust.** Before code is executed, it is hashed in the memory that it is executed from, and its target is compared
//! with this host. Inputs are checked completely before a call of an artifact. This is no sandbox: a malicious artifact
//! can do harm.
//!
//! **Monitoring.** [`Model::stats`] has counters by module, bucket and device, [`Model::counts`] the requests; both can
//! be read at any time and written as JSON. [`Model::timings`] has the times of a load. Spans of the crate `tracing`,
//! at the level info: `libtorch_cuda`, `context`, `shim`, `weights` and in it `map`, `records` and `upload`, `load` and
//! in it `artifact`, `container`, `bind` and `graph`, and in that `warm_up`. At the level trace: `run` with its bucket
//! and rung, and within it `pad` and `eager`. Without a subscriber they cost nothing measurable.
//!
//! ## Layers
//!
//! A module uses only modules of earlier lines. A test checks this.
//!
//! ```text
//! dispatch, ending, layout, options, pool, problem, source
//! error
//! ffi, identity
//! calls, devices, exit, flags, host, operators, packing, pad, tensor, threads, validate
//! deferred, dlpack, outputs, peak, tensors, trial
//! saved, weights
//! weight_set
//! arrays, prepacked, shims, stats
//! plan
//! eager, graphs, wiring
//! slot
//! loaded
//! loader
//! states
//! program
//! variant
//! replica
//! background, fixed
//! model
//! session
//! trainer
//! runtime, watch
//! ```

// Unit tests share the fakes of tests/, which name the crate.
#[cfg(test)]
extern crate self as precast_runtime;
#[cfg(test)]
#[path = "../../../tests/fake/records.rs"]
#[allow(dead_code)]
mod fake;

mod arrays;
mod background;
mod calls;
mod deferred;
mod devices;
mod dispatch;
pub mod dlpack;
mod eager;
mod ending;
mod error;
mod exit;
mod ffi;
mod fixed;
mod flags;
mod graphs;
mod host;
mod identity;
mod layout;
mod loaded;
mod loader;
mod model;
mod operators;
mod options;
mod outputs;
mod packing;
mod pad;
mod peak;
mod plan;
mod pool;
mod prepacked;
mod problem;
mod program;
mod replica;
mod runtime;
mod saved;
mod session;
mod shims;
mod slot;
mod source;
mod states;
mod stats;
mod tensor;
mod tensors;
mod threads;
mod trainer;
mod trial;
mod validate;
mod variant;
mod watch;
mod weight_set;
mod weights;
mod wiring;

use error::TorchError;

pub use precast_store::{Device, Store};

pub use arrays::{Argument, Array, Value};
pub use devices::Devices;
pub use ending::shut_down;
pub use error::RuntimeError;
pub use ffi::Libtorch;
pub use model::Model;
pub use options::{Inputs, Loading};
pub use outputs::{Outputs, Served};
pub use runtime::Runtime;
pub use session::Session;
pub use tensor::{Element, Tensor};
pub use trainer::Trainer;
pub use trial::Trial;
pub use weight_set::WeightSet;

/// Counts and times of a model: the rows of [`Model::stats`], [`Model::devices`] and [`Model::timings`]; and the levels
/// that can answer a call.
pub mod counters {
    pub use crate::outputs::Rung;
    pub use crate::stats::{BucketStats, ModuleStats};
    pub use crate::watch::{DeviceStats, Timings};
}

/// CUDA devices: their streams and memory, and programs as CUDA graphs.
pub mod cuda {
    pub use crate::ffi::{DeviceMemory, Scope, Stream, TensorRef};
    pub use crate::fixed::{Fixed, Static};
    pub use crate::host::{device_memory, synchronize};
    pub use crate::options::Graphs;
    pub use crate::outputs::Notes;
}

/// The kinds and the parts of a [`RuntimeError`], and the error of libtorch and CUDA.
pub mod errors {
    pub use crate::error::{ErrorKind, NoFit, Quarantined, TorchError, whole};
    pub use crate::problem::Problem;
    pub use crate::source::NoRelease;
}

/// Sources of records and objects, for [`Runtime::over`]. A [`Store`] is one.
pub mod sources {
    pub use crate::source::{Source, SourceError};
}

/// The results of a [`Trainer`]'s steps, and how far it came.
pub mod training {
    pub use crate::trainer::{Losses, Progress, Sums};
}

/// Items for the command `precast` only. They may change with every version.
#[doc(hidden)]
pub mod command {
    pub use crate::exit::exit;
    pub use crate::ffi::keep_freed;
    pub use crate::host::host;
    pub use crate::peak::peak;
    pub use crate::source::sealed;
    pub use crate::trainer::sum;
    pub use crate::trial::{ARGUMENT as TRIAL, answer as answer_trial, memory as trial_memory};

    /// Files of tensors.
    pub mod tensors {
        pub use crate::tensors::*;
    }
}
