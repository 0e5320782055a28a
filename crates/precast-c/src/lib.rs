//! The runtime as a C library: `libprecast`, and `include/precast.h`, which cbindgen writes from these sources.
//!
//! ```text
//! precast_runtime ─▶ precast_model ─┬▶ precast_outputs ─▶ DLTensor (borrowed), DLManagedTensorVersioned (owned)
//!                                   └▶ precast_session ─▶ precast_outputs
//! ```
//!
//! **Errors.** A function that can fail returns a [`error::Error`], or null. It is an object of the caller, not one of
//! the thread: a goroutine or a virtual thread can continue on another thread before it reads its error.
//!
//! **Tensors.** Inputs are borrowed `DLTensor`s, the part that both managed structures of DLPack have. A host with
//! plain memory fills one in on its stack, and nothing is copied or counted. Outputs are exported as
//! `DLManagedTensorVersioned`: since DLPack 1.0 it is the structure with a version, so that a consumer can refuse a
//! layout that it does not know.
//!
//! **Ownership.** An opaque object is a `Box` of its caller. Objects hold their models by `Arc`, so they can be freed
//! in any order.
//!
//! **Panics** end in [`error::guarded`], and never reach C.
//!
//! ## Layers
//!
//! ```text
//! kept
//! error
//! memory, streams
//! describe, tensors
//! options, outputs
//! model
//! runtime, session
//! ```

mod describe;
mod error;
mod kept;
mod memory;
mod model;
mod options;
mod outputs;
mod runtime;
mod session;
mod streams;
mod tensors;
