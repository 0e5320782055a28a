//! The weight set of a release: the parameters of the model, or a file that the spec names.
//!
//! A worker loads that file into the model before it captures, so that the gate uses the weights that will be served.
//! An unreadable file is an error before Python starts. The model decides about its tensors: a missing tensor, another
//! dtype or shape, and an unknown tensor are errors as soon as the model exists.
//!
//! If only the values of the file changed, the build needs no Python, because programs hold no weights: a file with the
//! tensors of the last one fits the model as well. A file with other tensors is loaded into the model again.
//!
//! Existing programs were compared with eager under other weights. They pass a smoke run with the new file
//! ([`SmokeRequest`]) before a release has it. A refused file leaves nothing in the store.

use std::{collections::BTreeMap, fs, path::Path};

use precast_store::{
    Digest, Store,
    record::{Release, Shim},
};

use super::{
    BuildError,
    gate::{GateProcess, LIMIT, SmokeRequest, StoredWeights},
    limits::{Limits, Stop},
    options::Options,
    progress::{Event, Progress},
    protocol::SavedWeights,
    weight_file::{same_tensors, spoilt},
};
use crate::plan::{self, Item, Plan};

/// Puts the weight set into the store, and its bytes where the gates will look for them. A file that a worker wrote
/// into `scratch` is removed.
pub(super) fn put(
    options: &Options<'_>,
    written: &SavedWeights,
    progress: &dyn Progress,
    scratch: &Path,
) -> Result<StoredWeights, BuildError> {
    let named = options.spec.model.weights.file();
    let file = named.or(written.file.as_deref());
    let put = |file| options.store.objects().put_file_unpacked(file);
    let object = file.map(put).transpose()?;
    if let Some((object, bytes)) = object {
        progress.event(&Event::Weights { object, bytes });
        options.store.objects().map(&object)?;
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
    match spec.model.weights.file() {
        Some(file) if plan::file_digest(file, store)? == *object => {
            Ok(store.objects().put_file(file)?.0 == *object)
        }
        _ => Ok(false),
    }
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
    if let Some(path) = options.spec.model.weights.file()
        && Some(plan::file_digest(path, options.store)?) != last.weights
    {
        if !same_tensors(options.store, path, last)? {
            return Ok(None);
        }
        let aliases = &last.aliases;
        let tried = try_file(options, plan, Some(last), aliases, Some(shim))?;
        kept.object = tried.or(kept.object);
    }
    Ok(Some(kept))
}

/// Puts the file of weights that the spec names, after a smoke run with the existing programs. Returns its digest; none
/// for the weights of before. `same` is the release that has the programs. Without a shim nothing is run.
pub(super) fn try_file(
    options: &Options<'_>,
    plan: &Plan,
    same: Option<&Release>,
    aliases: &BTreeMap<String, String>,
    shim: Option<&Shim>,
) -> Result<Option<Digest>, BuildError> {
    let Options { spec, store, .. } = options;
    let Some(path) = spec.model.weights.file() else {
        return Ok(None);
    };
    let before = same.or(plan.release.as_ref());
    // With a separate lease: nothing holds a refused file.
    let apart = Store::open_with(store.path(), store.options())?;
    let (object, _) = apart.objects().put_file_unpacked(path)?;
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
        Err(message) => {
            drop(apart);
            store.collector().discard(&object)?;
            Err(BuildError::Weights {
                path: path.to_owned(),
                message,
            })
        }
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
