//! Ahead-of-time compiled PyTorch artifacts: built once, kept by content, run without Python.
//!
//! Its modules are stages, and data goes one way: [`spec`] (the user's request) → [`plan`] (the required programs) →
//! [`build`] (builds them) → [`store`] (stores them) → `runtime` (loads and runs them). [`inspect`] reads everything
//! and changes nothing. [`cli`] is the only stage that prints, reads the environment or exits.
//!
//! ```
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake/example.rs"));
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = example();
//! # let artifacts = folder.path();
//! use precast::{Device, Runtime, Store, Value};
//!
//! let store = Store::open(artifacts)?;
//! let model = Runtime::new(&store, Device::Cpu)?.load("tiny")?; // verified, weights there once
//! let x = Value::new(&[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
//! let out = model.run("double", &[x])?; // `Send + Sync`: call it from many threads
//!
//! let y = out.array::<f32>(0)?;
//! assert_eq!((y.shape(), y.data()), (&[2, 3][..], &[2.0, 4.0, 6.0, 8.0, 10.0, 12.0][..]));
//! assert_eq!(out.served().rung().name(), "padded"); // in the bucket of 4 by 8
//! # Ok(()) }
//! ```
//!
//! ## Layers
//!
//! A module uses those of earlier lines only; a test holds it.
//!
//! ```text
//! gate
//! cli
//! ```

pub mod cli;
pub mod gate;

pub use precast_builder::{self as build, plan, spec};
pub use precast_inspect as inspect;
pub use precast_runtime::{self as runtime, Model, Runtime, RuntimeError, Value};
pub use precast_store::{
    self as store, Device, Digest, Mapped, Store, StoreError, Target, digest, record, target,
};
