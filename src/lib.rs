//! Ahead-of-time compiled PyTorch artifacts: built once, kept by content, run without Python.
//!
//! Folders are stages and data goes one way: [`spec`] (what the user asked for) → [`plan`] (what must exist) →
//! [`build`] (make it exist) → [`store`] (keep it) → `runtime` (load it and run it). [`inspect`] reads everything
//! and changes nothing. [`cli`] is the only stage that prints, reads the environment or exits.
//!
//! ```no_run
//! # #[cfg(feature = "torch")] {
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = precast::Store::open("artifacts")?;
//! let model = precast::Runtime::new(&store, precast::Device::Cpu)?.load("minilm")?;
//! let ids = tch::Tensor::zeros([1, 32], (tch::Kind::Int64, tch::Device::Cpu));
//! let mask = ids.ones_like();
//! let out = model.run("encode", &[ids, mask])?;
//! # Ok(()) }
//! # }
//! ```
#![deny(unsafe_code)]

pub mod build;
pub mod cli;
pub mod digest;
pub mod inspect;
mod mapped;
pub mod plan;
pub mod record;
#[cfg(feature = "torch")]
pub mod runtime;
pub mod spec;
pub mod store;
pub mod target;

pub use digest::Digest;
pub use mapped::Mapped;
#[cfg(feature = "torch")]
pub use runtime::{Model, Runtime};
pub use store::{Store, StoreError};
pub use target::{Device, Target};
