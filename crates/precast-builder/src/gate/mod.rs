//! The gate: a program is published only after a run whose outputs were compared with eager.
//!
//! The candidate runs through the same runtime that production uses. It has a separate process, so that a crash or a
//! hang affects no other candidate. Its objects and artifact records are already in the store. The program's record is
//! not; the process receives it in the request.
//!
//! An output passes when it has eager's dtype and shape, no NaN and no infinity where eager has none, and each element
//! differs from eager's by at most `atol + rtol * |eager|`. A spec may set both. Otherwise they follow the coarsest
//! dtype of the computation (a float32 output of a bfloat16 convolution has the precision of bfloat16), with `atol`
//! scaled by the largest magnitude in eager's output.
//!
//! The gate then repeats the comparison at smaller sizes, which the runtime pads into the bucket. If a padded request
//! differs from eager at its own size, the program is published for its exact size only.
//!
//! The gate of a program is one call of it. The modules `prefill` and `decode` of a release are compared once more, in
//! one session ([`ChainRequest`]).
//!
//! | file | holds |
//! |---|---|
//! | `request` | the requests to a gate's process, and its answers |
//! | `process` | the process: its start, its limits and its end |
//! | `candidates` | the option sets that a program can be compiled with |
//! | `choice` | the gates of a program's candidates, and the fastest one |
//! | `sign_test` | the faster one of two programs |
//! | `reuse` | an earlier gate with the same inputs |
//! | `chain` | the programs of `prefill` and `decode` that are compared in one session |
//! | `host` | the gates of a release under another torch |
//!
//! The code of the process is in `src/gate` of the command; the checks themselves are in `src/gate/compare.rs`.

pub(crate) mod candidates;
pub(crate) mod chain;
pub(crate) mod choice;
pub mod host;
mod process;
mod request;
pub(crate) mod reuse;
mod sign_test;

use precast_store::record::Dtype;

pub(crate) use self::process::{GateProcess, LIMIT};
pub use self::request::{
    ChainProgram, ChainRequest, GateRequest, Question, Samples, SmokeRequest, StoredWeights,
    Verdict,
};

/// Returns the default relative and absolute tolerance of an output of this dtype. The absolute tolerance must be
/// scaled.
pub fn tolerance(dtype: Dtype) -> (f64, f64) {
    match dtype {
        Dtype::Float64 => (1e-7, 1e-8),
        Dtype::Float32 => (1e-4, 1e-5),
        Dtype::Float16 => (1e-2, 4e-3),
        Dtype::Bfloat16 => (4e-2, 2e-2),
        _ => (0.0, 0.0),
    }
}
