//! A carrier that is only read.

use crate::{
    carrier::{Body, Carrier, Found, How, Source},
    error::RemoteError,
};

/// Refuses every change.
pub struct ReadOnly<C> {
    pub inner: C,
    pub url: String,
    /// Why, as a fragment of a sentence.
    pub why: &'static str,
}

impl<C> ReadOnly<C> {
    fn refused<T>(&self) -> Result<T, RemoteError> {
        Err(RemoteError::ReadOnly {
            url: self.url.clone(),
            why: self.why,
        })
    }
}

impl<C: Carrier> Carrier for ReadOnly<C> {
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
        self.inner.head(name)
    }

    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
        self.inner.get(name)
    }

    fn create(&self, _: &str, _: &mut dyn Source, _: u64, _: How) -> Result<bool, RemoteError> {
        self.refused()
    }

    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
        self.inner.list(folder)
    }

    fn found(&self, folder: &str) -> Result<Option<Vec<Found>>, RemoteError> {
        self.inner.found(folder)
    }

    fn delete(&self, _: &str) -> Result<(), RemoteError> {
        self.refused()
    }
    fn refuses_twice(&self) -> Option<bool> {
        self.inner.refuses_twice()
    }

    fn is_folder(&self) -> bool {
        self.inner.is_folder()
    }
}
