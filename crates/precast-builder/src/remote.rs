//! The remote of a build, as its caller provides it: this crate has no network code.

use precast_store::{
    Digest, PartKind,
    record::{Program, Release},
};

/// A place that has builds of other machines. Its functions report errors themselves.
pub trait Remote: Sync {
    /// Returns its name, for people.
    fn name(&self) -> &str;
    /// Returns the newest releases of a model, the newest one first, and the programs of that.
    fn releases(&self, model: &str) -> (Vec<Release>, Vec<Program>);
    /// Brings what these keys name into the store, with everything that it needs. Returns the keys of what is there now.
    fn fetch(&self, kind: PartKind, ids: &[Digest]) -> Vec<Digest>;
    /// Returns whose turn it is to make what a key names; with `wait` not before it is this build's, or another one has
    /// made it. None if this build may not write, or is to `stop`.
    fn lease(
        &self,
        kind: PartKind,
        id: &Digest,
        wait: bool,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Option<Turn>;
    /// Sends what these keys name, if this build may write.
    fn offer(&self, kind: PartKind, ids: &[Digest]);
}

/// Whose turn it is to make a program or an artifact.
pub enum Turn {
    /// It is this build's, until the value is dropped.
    Own(Box<dyn Send>),
    /// Another build makes it.
    Other,
    /// Another build has made it.
    Made,
}
