//! The weight set of a release: the parameters of the model, or a file that the spec names.
//!
//! That file is put into the store first ([`FromFile`]). Workers and gates map the object, so that all processes of a
//! build have its pages once, and the gate uses the weights that will be served. An unreadable file is an error before
//! Python starts. The model decides about its tensors: a missing tensor, another dtype or shape, and an unknown tensor
//! are errors as soon as the model exists.
//!
//! If only the values of the file changed, the build needs no Python, because programs hold no weights: a file with the
//! tensors of the last one fits the model as well. A file with other tensors is loaded into the model again.
//!
//! Existing programs were compared with eager under other weights. They pass a smoke run with the new file
//! ([`SmokeRequest`]) before a release has it. A refused file leaves nothing in the store.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use precast_store::{
    Digest, Store,
    record::{Release, Shim},
};

use super::{
    BuildError,
    checkpoint::Checkpoint,
    gate::{GateProcess, LIMIT, SmokeRequest, StoredWeights},
    limits::{Limits, Stop},
    options::Options,
    progress::{Event, Progress},
    protocol::SavedWeights,
    weight_file::{same_tensors, spoilt},
};
use crate::plan::{Item, Plan};

/// The weights that the spec names, in the store. Nothing but this value holds them until they are accepted.
pub(super) struct FromFile {
    /// Its lease is separate from that of the build.
    store: Store,
    checkpoint: Checkpoint,
    pub object: Digest,
}

impl FromFile {
    /// Puts the weights that the spec names into the store; none if it names none. A file that has not changed since it
    /// was put is not read.
    pub fn put(options: &Options<'_>) -> Result<Option<Self>, BuildError> {
        let Some(path) = options.spec.model.weights.file() else {
            return Ok(None);
        };
        let checkpoint = Checkpoint::open(path)?;
        let store = Store::open_with(options.store.path(), options.store.options())?;
        let object = checkpoint.put_once(&store)?;
        Ok(Some(Self {
            store,
            checkpoint,
            object,
        }))
    }

    /// Returns the files that a worker maps: the object, if the store has it unpacked.
    pub fn files(&self) -> Vec<PathBuf> {
        let own = || self.checkpoint.files().to_vec();
        (self.store.objects().unpacked_file(&self.object)).map_or_else(own, |file| vec![file])
    }

    /// Removes refused weights, unless a release has them.
    pub fn discard(self, options: &Options<'_>) -> Result<(), BuildError> {
        drop(self.store);
        Ok(options.store.collector().discard(&self.object)?)
    }
}

/// Puts the weight set into the store, and its bytes where the gates will look for them. A file that a worker wrote
/// into `scratch` is removed.
pub(super) fn put(
    options: &Options<'_>,
    written: &SavedWeights,
    from_file: Option<&FromFile>,
    progress: &dyn Progress,
    scratch: &Path,
) -> Result<StoredWeights, BuildError> {
    let objects = options.store.objects();
    let object = match (from_file, &written.file) {
        (Some(file), _) => {
            options.store.leases().keep(&[file.object])?;
            Some((file.object, objects.map(&file.object)?.len() as u64))
        }
        (None, Some(file)) => {
            let copy = &mut |out: &mut File| io::copy(&mut File::open(file)?, out).map(drop);
            let (object, bytes) = objects.put_unpacked(file, copy)?;
            objects.map(&object)?;
            Some((object, bytes))
        }
        (None, None) => None,
    };
    if let Some((object, bytes)) = object {
        progress.event(&Event::Weights { object, bytes });
    }
    if let Some(file) = written
        .file
        .as_ref()
        .filter(|file| file.starts_with(scratch))
    {
        // If this fails, the file is removed with its folder.
        let _ = fs::remove_file(file);
    }
    Ok(StoredWeights {
        object: object.map(|(object, _)| object),
        aliases: written.aliases.clone(),
    })
}

/// Returns whether the weight set of a release is in the store. Restores a lost one from its unpacked file or from the
/// file of the spec. Only the model can create other weight sets again.
pub(super) fn restored(options: &Options<'_>, release: &Release) -> Result<bool, BuildError> {
    let Options { spec, store, .. } = options;
    let Some(object) = &release.weights else {
        return Ok(true);
    };
    if store.objects().restore(object)? {
        return Ok(true);
    }
    let Some(file) = spec.model.weights.file() else {
        return Ok(false);
    };
    let file = Checkpoint::open(file)?;
    Ok(file.digest(store)? == *object && file.put(store)?.0 == *object)
}

/// Returns the weight set for a release with complete programs, without Python. If the file of the spec has changed, it
/// is tested. Returns none if only the model can show whether the file fits.
pub(super) fn kept(
    options: &Options<'_>,
    plan: &Plan,
    last: &Release,
    shim: &Shim,
) -> Result<Option<StoredWeights>, BuildError> {
    let mut kept = StoredWeights {
        object: last.weights,
        aliases: last.aliases.clone(),
    };
    if let Some(path) = options.spec.model.weights.file() {
        let file = Checkpoint::open(path)?;
        if Some(file.digest(options.store)?) == last.weights {
            return Ok(Some(kept));
        }
        if !same_tensors(options.store, &file, last)? {
            return Ok(None);
        }
        if let Some(file) = FromFile::put(options)? {
            let aliases = &last.aliases;
            match try_file(options, plan, &file, Some(last), aliases, Some(shim)) {
                Ok(tried) => kept.object = tried.or(kept.object),
                Err(error) => {
                    file.discard(options)?;
                    return Err(error);
                }
            }
        }
    }
    Ok(Some(kept))
}

/// Accepts the weights of a file after a smoke run with the existing programs. Returns their digest; none for the
/// weights of before. `same` is the release that has the programs. Without a shim nothing is run.
pub(super) fn try_file(
    options: &Options<'_>,
    plan: &Plan,
    file: &FromFile,
    same: Option<&Release>,
    aliases: &BTreeMap<String, String>,
    shim: Option<&Shim>,
) -> Result<Option<Digest>, BuildError> {
    let (store, object) = (options.store, file.object);
    let before = same.or(plan.release.as_ref());
    if before.is_some_and(|before| before.weights == Some(object)) {
        return Ok(None);
    }
    // Lost weights can't be compared.
    let before = match before.and_then(|before| before.weights) {
        Some(before) if store.objects().restore(&before)? => Some(before),
        _ => None,
    };
    let same = same.filter(|same| same.weights == before);
    let after = StoredWeights {
        object: Some(object),
        aliases: aliases.clone(),
    };
    let refused = match before {
        Some(before) if plan.items.iter().any(checked) => spoilt(store, &before, &object)?,
        _ => None,
    };
    let tried = match (refused, shim) {
        (Some(message), _) => Err(message),
        (None, Some(shim)) => smoke(options, plan, same, after, shim)?,
        (None, None) => Ok(()),
    };
    match tried {
        Ok(()) => {
            store.leases().keep(&[object])?;
            Ok(Some(object))
        }
        Err(message) => Err(BuildError::Weights {
            path: file.checkpoint.path().to_owned(),
            message,
        }),
    }
}

fn checked(item: &Item) -> bool {
    item.settings.compile.healthcheck
}

/// Runs the existing programs with the old weights and with new ones. The inner error is the reason for a refusal.
fn smoke(
    options: &Options<'_>,
    plan: &Plan,
    same: Option<&Release>,
    after: StoredWeights,
    shim: &Shim,
) -> Result<Result<(), String>, BuildError> {
    let Options { spec, store, .. } = options;
    let unchecked = |module: &String| {
        let mut own = plan.items.iter();
        own.any(|item| spec.modules[item.module].name == *module && !checked(item))
    };
    let mut ids = plan.hits();
    ids.extend(same.iter().flat_map(|same| &same.programs));
    ids.sort_unstable();
    ids.dedup();
    let mut programs = Vec::new();
    for id in ids {
        let program = store.records().program(&id)?;
        programs.extend(program.filter(|program| !unchecked(&program.module)));
    }
    if programs.is_empty() {
        return Ok(Ok(()));
    }
    let request = SmokeRequest {
        store: store.path().to_owned(),
        programs,
        shim: shim.clone(),
        before: same.map(|same| StoredWeights {
            object: same.weights,
            aliases: same.aliases.clone(),
        }),
        after,
    };
    let process = GateProcess {
        command: &options.gate,
        limits: &Limits::new(options.memory),
        limit: options.timeout.unwrap_or(LIMIT),
        stop: &Stop::new(&options.cancel),
    };
    match process.ask(&request) {
        Ok(_) => Ok(Ok(())),
        Err(BuildError::Gate { message, .. }) => Ok(Err(message)),
        Err(error) => Err(error),
    }
}
