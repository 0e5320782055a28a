//! The shim of a build: from an earlier release of the model, or compiled by a worker.
//!
//! The shim depends only on the torch, the architecture and its sources, so most builds find it. The worker keeps
//! compiled shims next to the precompiled headers, so another model with the same torch gets one at once.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use precast_store::{
    Digest, Store, StoreError, Target,
    elf::Elf,
    record::{Release, Shim},
};
use serde::{Deserialize, Serialize};

use super::{BuildError, protocol::Request};

/// Maximum time of its compilation.
pub(super) const LIMIT: Duration = Duration::from_secs(1800);

/// A worker's answer to [`Request::Shim`].
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct CompiledShim {
    pub file: PathBuf,
    /// Absent for the CPU, and without CUDA's headers.
    pub cuda: Option<PathBuf>,
    /// The reason why there is none for CUDA.
    pub why: Option<String>,
}

/// Returns whether a shim fits a target and the current sources. One without a CUDA half is compiled again for CUDA:
/// its headers may be there by now.
pub(super) fn fits(shim: &Shim, target: &Target) -> bool {
    shim.source == precast_shim::source()
        && shim.arch == target.arch
        && shim.torch == target.torch
        && shim.torch_git == target.torch_git
        && shim.cuda.is_some() >= (target.device == precast_store::target::DeviceKind::Cuda)
}

/// Returns the shim for a target that an earlier release of the model has.
pub(super) fn known(
    store: &Store,
    model: &str,
    target: &Target,
) -> Result<Option<Shim>, StoreError> {
    let own = |release: &Release| {
        let mut shims = release.shims.iter();
        // An unreadable or lost shim is compiled again.
        let sound = |object: Digest| store.objects().restore(&object).unwrap_or(false);
        let there = |shim: &&Shim| fits(shim, target) && shim.objects().all(sound);
        shims.find(there).cloned()
    };
    let release = store
        .releases()
        .find(model, |release| own(release).is_some())?;
    Ok(release.as_ref().and_then(own))
}

/// Returns the shims of a release: its own first, then those of the release before it, if that has the same content. Of
/// other sources only an earlier version of Precast would load them.
pub(super) fn of_release(own: Shim, release: &Release, before: Option<&Release>) -> Vec<Shim> {
    let before = before.filter(|before| before.same_content(release));
    let others = before.into_iter().flat_map(|before| before.shims.clone());
    let others = others.filter(|shim| shim.source == own.source && !shim.same_subject(&own));
    let others: Vec<Shim> = others.collect();
    [vec![own], others].concat()
}

/// Returns the request that compiles it.
pub(super) fn request(target: &Target, scratch: &Path) -> Request {
    Request::Shim {
        sources: precast_shim::SOURCES.iter().copied().collect(),
        device: target.device.to_string(),
        out: scratch.join("shim"),
    }
}

/// Puts a compiled shim into the store.
pub(super) fn put(
    store: &Store,
    target: &Target,
    compiled: &CompiledShim,
) -> Result<Shim, BuildError> {
    let put = |file: &PathBuf| {
        let (object, _) = store.objects().put_file(file)?;
        harmless("shim", &store.objects().read(&object)?)?;
        Ok::<_, BuildError>(object)
    };
    Ok(Shim {
        arch: target.arch.clone(),
        torch: target.torch.clone(),
        torch_git: target.torch_git.clone(),
        source: precast_shim::source(),
        object: put(&compiled.file)?,
        cuda: compiled.cuda.as_ref().map(put).transpose()?,
    })
}

/// Refuses a shared object of an artifact or a shim with hazards. A file of another format passes here and fails at the
/// gate.
pub(super) fn harmless(of: &'static str, bytes: &[u8]) -> Result<(), BuildError> {
    if !bytes.starts_with(b"\x7fELF") {
        return Ok(());
    }
    let what = match Elf::parse(bytes).and_then(|elf| elf.hazards()) {
        Ok(hazards) if hazards.is_empty() => return Ok(()),
        Ok(hazards) => {
            let all: Vec<String> = hazards.iter().map(ToString::to_string).collect();
            all.join(", ")
        }
        Err(error) => format!("it can't be read: {error}"),
    };
    Err(BuildError::UnsafeObject { of, what })
}
