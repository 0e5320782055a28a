//! Everything that is `unsafe`: the artifact's C ABI, libtorch's handles, and the C++ shim.
//!
//! | type | owns | freed |
//! |---|---|---|
//! | [`Library`] | a `dlopen`ed artifact, one per object digest and process | never: thread-local destructors, OpenMP workers and CUDA teardown may still run its code |
//! | [`Container`] | one `AOTInductorModelContainer` with one model instance, and an `Arc` of every tensor bound to it | on drop |
//! | [`Operators`] | the operators of an artifact that have no C entry point | on drop; containers hold an `Arc` of it |
//! | [`Calls`] | eager's list of operator calls, resolved | on drop |
//! | [`Handle`] | one `at::Tensor*`, which is an `AtenTensorHandle` | on drop |
//! | [`Stolen`] | handles for a run, which steals them | on drop, exactly those that the run left |
//! | [`Communicators`] | NCCL's communicators, one for each of several devices | on drop, after their work |
//! | [`Capsule`] | one structure of DLPack's, another library's or our own | on drop, by its deleter |
//!
//! **Threads.** An artifact's own pool of model instances deadlocks when the first runs of a new container race, and
//! when a run fails while others wait. So it is not used: every container has one instance, [`Container::invoke`] takes
//! `&mut self`, and it calls the single-threaded entry point, so that the compiler prevents a second caller. For N
//! concurrent callers there are N containers; they share code and weights by pointer.
//!
//! **Ownership in a run.** The callee steals input handles and nulls the entries that it took, on success and on
//! failure. [`Stolen`] passes new handles of the same tensors and frees the rest. Outputs belong to the caller,
//! including outputs that were written before a failure.
//!
//! **Errors.** Every error is a [`TorchError`](crate::TorchError), classified by its text when it is created. An
//! artifact prints an exception's text on `std::cerr` and returns a code; some entry points let it through `extern
//! "C"`. The shim catches it, and captures the text of `std::cerr` for the calling thread only. Other text of a call,
//! such as a warning of libtorch, is a `tracing` event.
#![allow(unsafe_code)]

mod abi;
mod aten;
mod calls;
mod container;
mod context;
mod cuda;
mod dlpack;
mod graph;
mod kept;
mod library;
mod libtorch;
mod memory;
mod nccl;
mod operators;
mod process;
mod shim;
mod slip;
mod stream;
#[cfg(feature = "tch")]
mod tch;
mod tensor;
mod torch;
mod upload;
mod values;
mod verified;
mod weight;

pub use aten::Wrap;
pub use calls::{Builder as CallsBuilder, Calls, Given, Item, Kept};
pub use container::{Constant, Container, RunError};
pub use cuda::{
    DeviceMemory, RawStream, cuda, cuda_for, open_shim as open_cuda_shim,
    shim_is_open as cuda_shim_is_open,
};
pub use dlpack::{
    Capsule, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
    DLTensor, Managed, stream_number,
};
pub use graph::{Graph, GraphPool};
pub use kept::{Parts, restored};
pub use library::Library;
pub use libtorch::{Libtorch, get as libtorch, open as open_libtorch};
pub use memory::contiguous;
pub use nccl::{Communicators, Nccl};
pub use operators::{Call, Libraries, OperatorArgument, Operators, registered};
pub use process::{exit, give_back, keep_freed};
pub use shim::{is_open as shim_is_open, open as open_shim};
pub use slip::Slip;
pub use stream::{Scope, Stream};
pub use tensor::{Handle, Handles, Meta, Placement, Stolen, TensorRef};
pub use torch::threads;
pub use upload::{UploadError, can_upload, upload};
pub use values::{note_outcomes, note_range, outside};
pub use verified::sealed_bytes;
pub use weight::Weight;
