//! Load artifacts and run them: safe, in process, with no Python.
//!
//! ```text
//! call ─▶ validate (safe Rust, on metadata) ─▶ dispatch (which bucket) ─▶ execution context (one per caller) ─▶ steps ─▶ cut
//!                                                                           │
//!                                             containers, one per step ─────┘ bound by pointer to one weight set
//! ```
//!
//! **Ownership.** Shared objects are loaded once per digest and process, and nothing is ever unloaded: their code may
//! be needed by thread-local destructors, OpenMP workers and CUDA's own teardown after the last call. Containers are
//! owned by execution contexts, contexts by programs, programs by the model; dropping a [`Model`] frees all of it but the
//! code. Weights are shared by their readers and freed with the last one. Outputs are the caller's alone: an output in the
//! memory of an input, a padding buffer or a weight is copied first.
//!
//! **Threads.** [`Model`] is `Send + Sync`. A call has an execution context of its program to itself, so an artifact's code never
//! runs twice at once on one container, and one caller's failure never meets another's. Callers beyond the number of
//! execution contexts wait, up to the limit that they set. Programs may be loaded by a thread of the model's, or by the first
//! call of one. A swap of weights waits for loads under way; later loads have the new weights.
//!
//! **Failure.** A program that can't be read, verified or loaded is set aside once ([`Model::quarantined`]); a request goes to the next
//! rung of the ladder: a covering bucket, a dynamic artifact, eager. Where the host was at fault for a moment, a later call tries
//! again. With a [`Trial`] a process of its own is the first to load an object, which may crash.
//!
//! **Ending.** libtorch's destructors must not meet a call. A process that exits while its threads are in calls first calls
//! [`shut_down`].
//!
//! **Trust.** Code is hashed in the memory that it is executed from, and its target is compared with this
//! host before. Inputs are checked completely before a foreign call. This is no sandbox: an artifact that was built
//! to do harm can.
//!
//! **Watching it.** [`Model::stats`] has counters by module, bucket and device, [`Model::counts`] what was asked for, both
//! to be read at any time and written as JSON; [`Model::timings`] says how long loading took. Spans of the crate
//! `tracing`, at the level info: `libtorch_cuda`, `context`, `shim`, `weights` and in it `map`, `records` and `upload`, `load` and in it `artifact`, `container`, `bind`
//! and `graph`, and in that `warm_up`. At the level trace: `run` with its bucket and rung, and within it `pad` and `eager`. They cost nothing
//! that can be measured while nobody subscribes.
//!
//! ## Layers
//!
//! A module uses those of earlier lines only; a test holds it.
//!
//! ```text
//! dispatch, ending, layout, options, pool, problem, source
//! error
//! ffi, identity
//! calls, devices, exit, flags, host, operators, packing, pad, tensor, threads, validate
//! dlpack, outputs, peak, tensors, trial
//! weights
//! arrays, prepacked, shims, stats
//! context
//! eager, graphs, wiring
//! program
//! loader
//! variant
//! replica
//! background
//! model
//! runtime, swap, watch
//! ```

// Unit tests share the fakes of tests/, which name the crate.
#[cfg(test)]
extern crate self as precast_runtime;

mod arrays;
mod background;
mod calls;
mod context;
mod devices;
mod dispatch;
pub mod dlpack;
mod eager;
mod ending;
mod error;
mod exit;
mod ffi;
mod flags;
mod graphs;
mod host;
mod identity;
mod layout;
mod loader;
mod model;
mod operators;
mod options;
mod outputs;
mod packing;
mod pad;
mod peak;
mod pool;
mod prepacked;
mod problem;
mod program;
mod replica;
mod runtime;
mod shims;
mod source;
mod stats;
mod swap;
mod tensor;
mod tensors;
mod threads;
mod trial;
mod validate;
mod variant;
mod watch;
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
pub use outputs::{Outputs, Rung, Served};
pub use runtime::Runtime;
pub use tensor::{Element, Tensor};
pub use trial::Trial;
pub use weights::WeightSet;

/// Counts and times of a model: the rows of [`Model::stats`], [`Model::devices`] and [`Model::timings`].
pub mod counters {
    pub use crate::stats::{BucketStats, ModuleStats};
    pub use crate::watch::{DeviceStats, Timings};
}

/// CUDA devices: their streams and memory, and programs as CUDA graphs.
pub mod cuda {
    pub use crate::ffi::{DeviceMemory, Scope, Stream, TensorRef};
    pub use crate::graphs::Session;
    pub use crate::host::{device_memory, synchronize};
    pub use crate::options::Graphs;
}

/// The parts of a [`RuntimeError`], and the error of libtorch and CUDA.
pub mod errors {
    pub use crate::error::{NoFit, Quarantined, TorchError};
    pub use crate::problem::Problem;
    pub use crate::source::NoRelease;
}

/// Sources of records and objects, for [`Runtime::over`]. A [`Store`] is one.
pub mod sources {
    pub use crate::source::{Source, SourceError};
}

/// Items for the command `precast` alone. They may change with every version.
#[doc(hidden)]
pub mod command {
    pub use crate::exit::exit;
    pub use crate::host::host;
    pub use crate::peak::peak;
    pub use crate::source::sealed;
    pub use crate::trial::{ARGUMENT as TRIAL, answer as answer_trial, memory as trial_memory};

    /// Files of tensors.
    pub mod tensors {
        pub use crate::tensors::*;
    }
}
