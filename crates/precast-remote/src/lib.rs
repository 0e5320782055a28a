//! Remotes: releases between a store and the storage that people have.
//!
//! A model is compiled once, pushed to a place, and pulled wherever it runs. A remote has the files of a store under the
//! same names, so a folder, a bucket and a static web server are all one layout, and any tool can copy it. A registry of
//! containers has the same files as layers with these names.
//!
//! ```no_run
//! # fn main() -> Result<(), precast_remote::RemoteError> {
//! use precast_remote::Remote;
//! use precast_store::Store;
//!
//! // The newest release that this machine can run; `minilm@7` for that one.
//! let store = Remote::open("s3://models/precast")?.pull(&Store::create("cache")?, "minilm")?;
//! println!("release {:?}", store.releases().newest("minilm")?);
//! # Ok(())
//! # }
//! ```
//!
//! [`Remote::push_release`] and [`Remote::pull_release`] tell what moves, and can be stopped.
//!
//! **Promised**: a release is there when its last file is, and never in part; no file of a remote is replaced but the
//! list of its releases; gc takes nothing that a release needs; nothing rests on a lock; what arrives is hashed before
//! it is visible, and is no longer than its listing says. **Not promised**: that a release is from whom you think. It
//! is native code: pull from places that you trust.
//!
//! This crate has the network: clients of HTTP and TLS, about 170 crates. So `precast` does not link it. It starts the
//! program of this crate, `precast-remote`, and they exchange lines of JSON ([`precast_store::transfer`]).
//!
//! ## Layers
//!
//! A module uses only modules of earlier lines. A test checks this.
//!
//! ```text
//! error
//! carrier, host, work
//! event, hub, probe, readonly, storage
//! oci
//! place
//! remote
//! marks
//! fetch, gc, lease, mirror, pull, push, verify
//! protocol
//! ```

mod carrier;
mod error;
mod event;
mod fetch;
mod gc;
mod host;
mod hub;
mod lease;
mod marks;
mod mirror;
mod oci;
mod place;
mod probe;
pub mod protocol;
mod pull;
mod push;
mod readonly;
mod remote;
mod storage;
mod verify;
mod work;

pub use error::RemoteError;
pub use event::Tell;
pub use remote::{Numbers, Remote, Wanted};

/// Chooses the code of TLS for this process, before the first connection. No effect if another one was chosen.
pub fn use_ring() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

#[cfg(test)]
mod tests;
