//! Where the runtime takes records and objects from.

use std::sync::Arc;

use crate::{
    Digest,
    record::{Artifact, Program, Release},
};

/// Bytes that stay where they are for as long as they are held.
pub type Bytes = Arc<memmap2::Mmap>;

/// What a source answers when it can't.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// Records and verified objects: a store, or what a build has made and not published yet.
///
/// `read` and `map` return bytes that hash to the digest they were asked for. The runtime hashes what it executes once
/// more, in the memory it executes it from; it trusts the source for weights.
pub trait Source: Send + Sync {
    /// Returns the newest release of `model`, or the one with this name.
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError>;

    /// Returns the program with this request key.
    fn program(&self, id: &Digest) -> Result<Program, SourceError>;

    /// Returns the artifact with this key.
    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError>;

    /// Returns an object's bytes.
    fn read(&self, object: &Digest) -> Result<Vec<u8>, SourceError>;

    /// Returns an object's bytes mapped, so that several processes can share them.
    fn map(&self, object: &Digest) -> Result<Bytes, SourceError>;
}
