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
//! owned by execution contexts, execution contexts by programs, programs by the model; dropping a [`Model`] frees all of it but the code. Weights
//! are held by whoever may read them and freed with the last. Outputs are the caller's alone: one that would share
//! memory with an input, a padding buffer or a weight is copied first.
//!
//! **Threads.** [`Model`] is `Send + Sync`. A call has an execution context of its program to itself, so an artifact's code never
//! runs twice at once on one container, and one caller's failure never meets another's. Callers beyond the number of
//! execution contexts wait, as long as they say. Programs may be loaded by a thread behind the model, or by the call that needs one; a swap of weights waits
//! for loads under way, and what is loaded after it has the new ones.
//!
//! **Failure.** What can't be read, verified or loaded is set aside once ([`Model::quarantined`]); a request goes to the next
//! rung of the ladder: a covering bucket, a dynamic artifact, eager. Where the host was at fault for a moment, a later call tries
//! again. With a [`Trial`] a process of its own is the first to load an object, which may crash.
//!
//! **Ending.** libtorch's destructors must not meet a call. A process that exits while its threads are in calls first calls
//! [`shut_down`].
//!
//! **Trust.** What is executed was hashed in the memory it is executed from, and its target was compared with this
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
//! error, prefetched
//! ffi, identity
//! calls, devices, exit, flags, host, operators, packing, pad, tensor, threads, validate
//! dlpack, outputs, peak, tensors, trial, weights
//! arrays, prepacked, shims, stats
//! context
//! eager, graphs, wiring
//! program
//! loader
//! cost
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
mod cost;
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
mod prefetched;
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
pub mod tensors;
mod threads;
mod trial;
mod validate;
mod variant;
mod watch;
mod weights;
mod wiring;

pub use precast_store::{Device, Store};

pub use arrays::{Argument, Array, Value};
pub use devices::Devices;
pub use ending::shut_down;
pub use error::{NoFit, Quarantined, RuntimeError, TorchError};
pub use exit::exit;
pub use ffi::{DeviceMemory, Libtorch, Scope, Stream, TensorRef};
pub use graphs::Session;
pub use host::{device_memory, host, synchronize};
pub use model::Model;
pub use options::{Graphs, Inputs, Loading};
pub use outputs::{Outputs, Rung, Served};
pub use peak::peak;
pub use prefetched::Prefetched;
pub use problem::Problem;
pub use runtime::Runtime;
pub use source::{NoRelease, Source, SourceError, sealed};
pub use stats::{BucketStats, ModuleStats};
pub use tensor::{Element, Tensor};
pub use trial::Trial;
pub use trial::{ARGUMENT as TRIAL, answer as answer_trial, memory as trial_memory};
pub use watch::{DeviceStats, Timings};
pub use weights::WeightSet;
