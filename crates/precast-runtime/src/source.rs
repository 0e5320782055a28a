//! The source of the runtime's records and objects.

use std::{
    fs::File,
    io::{self, Write},
};

use rustix::fs::{MemfdFlags, memfd_create};

use precast_store::{
    CheckedParts, Checking, Digest, Hold, Mapped, Store,
    record::{Artifact, Program, Release},
    seal,
};

/// The error of a source.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// The error of [`Source::release`] for a model or a release that is not there.
#[derive(Debug, thiserror::Error)]
#[error("{}", match (release, partial) {
    (Some(release), _) => format!("there is no release `{model}@{release}`"),
    (None, Some(_)) => format!("`{model}` has only partial releases"),
    (None, None) => format!("there is no model `{model}`"),
})]
pub struct NoRelease {
    /// Name of the model.
    pub model: String,
    /// Number or name of the requested release; none for the newest.
    pub release: Option<String>,
    /// Number of the last partial release, where the model has no other ones.
    pub partial: Option<u64>,
    /// Names of all existing models.
    pub known: Vec<String>,
}

/// Records and verified objects: a store, or the unpublished artifacts of a build.
///
/// `memfd` and `map` return bytes that hash to the requested digest. The runtime hashes code again, in the sealed
/// memory from which it executes it; it trusts the source for weights.
pub trait Source: Send + Sync {
    /// Returns the newest release of `model`, or the one with this name. The error is a [`NoRelease`] if it does not
    /// exist.
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError>;

    /// Returns the newest whole release of `model` for which `is` holds. A source with one release only returns none.
    fn find_release(
        &self,
        _model: &str,
        _is: &dyn Fn(&Release) -> bool,
    ) -> Result<Option<Release>, SourceError> {
        Ok(None)
    }

    /// Protects a release's content from removal while the hold lives; none if nothing is ever removed. After an error
    /// the release can still be read.
    fn hold(&self, _release: &Release) -> Result<Option<Hold>, SourceError> {
        Ok(None)
    }

    /// Returns whether a release is still there. Called after [`Self::hold`], which does not hold a removed release.
    fn has_release(&self, _release: &Release) -> bool {
        true
    }

    /// Returns the program with this request key.
    fn program(&self, id: &Digest) -> Result<Program, SourceError>;

    /// Returns the artifact with this key.
    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError>;

    /// Returns a shared object's bytes as a sealed file in memory, as from [`sealed`].
    fn memfd(&self, object: &Digest) -> Result<File, SourceError>;

    /// Returns an object's bytes mapped, so that several processes can share them.
    fn map(&self, object: &Digest) -> Result<Mapped, SourceError>;

    /// Like [`Self::map`], but the check of the bytes may still run while they are copied to a device. They must not be
    /// used for an answer before [`Checking::wait`] has returned true.
    fn map_checking(&self, object: &Digest) -> Result<(Mapped, Checking), SourceError> {
        Ok((self.map(object)?, Checking::done()))
    }

    /// Like [`Self::map`], but with parts nothing was checked yet: the bytes of a range must not be used before
    /// [`CheckedParts::check`] has passed it.
    fn map_in_parts(&self, object: &Digest) -> Result<(Mapped, Option<CheckedParts>), SourceError> {
        Ok((self.map(object)?, None))
    }

    /// Returns prepacked weights that an earlier process kept under a key; none without them.
    fn prepacked(&self, _weights: &Digest, _key: &Digest) -> Option<Mapped> {
        None
    }

    /// Keeps prepacked weights for later processes, the parts one after the other, and returns them mapped; none if they
    /// are not kept.
    fn keep_prepacked(&self, _weights: &Digest, _key: &Digest, _parts: &[&[u8]]) -> Option<Mapped> {
        None
    }
}

impl Source for Store {
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError> {
        if let Some(found) = self.releases().get(model, name)? {
            return Ok(found);
        }
        let last = self.releases().last(model)?;
        Err(Box::new(NoRelease {
            model: model.to_owned(),
            release: name.map(str::to_owned),
            partial: last.map(|last| last.seq),
            known: self.releases().models().unwrap_or_default(),
        }))
    }

    fn find_release(
        &self,
        model: &str,
        is: &dyn Fn(&Release) -> bool,
    ) -> Result<Option<Release>, SourceError> {
        let whole = |release: &Release| !release.is_partial() && is(release);
        Ok(self.releases().find(model, whole)?)
    }

    fn hold(&self, release: &Release) -> Result<Option<Hold>, SourceError> {
        Ok(Some(self.releases().hold_found(release)?.0))
    }

    fn has_release(&self, release: &Release) -> bool {
        self.releases().has(&release.model, release.seq)
    }

    fn program(&self, id: &Digest) -> Result<Program, SourceError> {
        self.records()
            .program(id)?
            .ok_or_else(|| "there is no such record".into())
    }

    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError> {
        self.records()
            .artifact(key)?
            .ok_or_else(|| "there is no such record".into())
    }

    fn memfd(&self, object: &Digest) -> Result<File, SourceError> {
        Ok(self.objects().memfd(object)?)
    }

    fn map(&self, object: &Digest) -> Result<Mapped, SourceError> {
        Ok(self.objects().map(object)?)
    }

    fn map_checking(&self, object: &Digest) -> Result<(Mapped, Checking), SourceError> {
        Ok(self.objects().map_checking(object)?)
    }

    fn map_in_parts(&self, object: &Digest) -> Result<(Mapped, Option<CheckedParts>), SourceError> {
        Ok(self.objects().map_in_parts(object)?)
    }

    fn prepacked(&self, weights: &Digest, key: &Digest) -> Option<Mapped> {
        // Without a file they are computed.
        let found = Store::prepacked(self).get(weights, key);
        found.unwrap_or_else(|error| {
            tracing::warn!(%error, "prepacked weights can't be read");
            None
        })
    }

    fn keep_prepacked(&self, weights: &Digest, key: &Digest, parts: &[&[u8]]) -> Option<Mapped> {
        let kept = Store::prepacked(self).put(weights, key, parts);
        kept.unwrap_or_else(|error| {
            tracing::warn!(%error, "prepacked weights can't be kept");
            None
        })
    }
}

/// Returns `bytes` as a file in memory that can't be changed.
pub fn sealed(name: &str, bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.write_all(bytes)?;
    seal(&file)?;
    Ok(file)
}
