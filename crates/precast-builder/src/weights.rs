//! The weight set of a release: the parameters of the model, or a file that the spec names.
//!
//! A worker loads that file into the model before it captures, so that the gate uses the weights that will be served. An
//! unreadable file is an error before Python starts. The model decides about its tensors: a missing tensor, another
//! dtype or shape, and an unknown tensor are errors as soon as the model exists.
//!
//! If only the values of the file changed, the build needs no Python, because programs hold no weights: a file with the
//! tensors of the last one fits the model as well. A file with other tensors is loaded into the model again.
//!
//! Existing programs were compared with eager under other weights. They pass a smoke run with the new file
//! ([`SmokeRequest`]) before a release has it. A refused file leaves nothing in the store.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Read},
    path::Path,
};

use precast_store::{
    Digest, Store,
    record::{Release, Shim},
};
use safetensors::{
    Dtype, SafeTensors,
    tensor::{Metadata, TensorInfo, TensorView},
};

use super::{
    BuildError,
    gate::{self, GateProcess, SmokeRequest, StoredWeights},
    limits::{Limits, Stop},
    options::Options,
    progress::{Event, Progress},
    protocol::SavedWeights,
};
use crate::{
    plan::{self, Item, Plan},
    spec::{Spec, glob},
};

/// Checks that a file can be a weight set, by its header: that needs no model and no Python.
pub(super) fn check(path: &Path) -> Result<(), BuildError> {
    header(path).map(drop)
}

fn header(path: &Path) -> Result<Metadata, BuildError> {
    read_header(path).map_err(|message| BuildError::BadWeights {
        path: path.to_owned(),
        message,
    })
}

fn read_header(path: &Path) -> Result<Metadata, String> {
    /// The format's own limit.
    const HEADER_LIMIT: u64 = 100_000_000;
    const LENGTH: u64 = 8;
    let no_safetensors = || "it is no safetensors file".to_owned();
    let mut file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => "it is not there".to_owned(),
        _ => error.to_string(),
    })?;
    let meta = file.metadata().map_err(|error| error.to_string())?;
    if !meta.is_file() {
        return Err("it is a folder or another special file".to_owned());
    }
    let mut length = [0; LENGTH as usize];
    file.read_exact(&mut length).map_err(|_| no_safetensors())?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT || length > meta.len() - LENGTH {
        return Err(no_safetensors());
    }
    let mut header = Vec::new();
    (file.take(length).read_to_end(&mut header)).map_err(|error| error.to_string())?;
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| format!("{}: {error}", no_safetensors()))?;
    let ends = LENGTH + length + header.data_len() as u64;
    if ends != meta.len() {
        let has = meta.len();
        let cut = if has < ends { "it was cut off: " } else { "" };
        return Err(format!(
            "{cut}its tensors end at byte {ends}, the file at byte {has}"
        ));
    }
    use safetensors::Dtype as D;
    let known = [
        D::F64,
        D::F32,
        D::F16,
        D::BF16,
        D::I64,
        D::I32,
        D::I16,
        D::I8,
        D::U8,
        D::BOOL,
    ];
    let mut tensors: Vec<_> = header.tensors().into_iter().collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    match tensors
        .iter()
        .find(|(_, info)| !known.contains(&info.dtype))
    {
        Some((name, info)) => Err(format!(
            "tensor `{name}` is {}, which no weight set can hold",
            info.dtype
        )),
        None => Ok(header),
    }
}

/// Returns the names of the tensors in the spec's file that the model may lack; none where the file can't be read.
pub(super) fn unused(spec: &Spec) -> Vec<String> {
    let file = spec.model.weights.file().map(read_header);
    let names = file.and_then(Result::ok).into_iter();
    let names = names.flat_map(|header| header.offset_keys());
    let globs = &spec.model.unused_weights;
    names
        .filter(|name| globs.iter().any(|glob| glob::matches(glob, name)))
        .collect()
}

/// Puts the weight set into the store, and its bytes where the gates will look for them.
pub(super) fn put(
    options: &Options<'_>,
    written: &SavedWeights,
    progress: &dyn Progress,
) -> Result<StoredWeights, BuildError> {
    let named = options.spec.model.weights.file();
    let file = named.or(written.file.as_deref());
    let put = |file| options.store.objects().put_file_unpacked(file);
    let object = file.map(put).transpose()?;
    if let Some((object, bytes)) = object {
        progress.event(&Event::Weights { object, bytes });
        options.store.objects().map(&object)?;
    }
    Ok(StoredWeights {
        object: object.map(|(object, _)| object),
        aliases: written.aliases.clone(),
    })
}

/// Returns whether the weight set of a release is in the store, after restoring it from its unpacked file or from the file
/// that the spec names. The model makes others again.
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

/// Returns the weight set for a release whose programs are all there, without Python. A file that the spec names may be
/// another one by now: then it is tried. Returns none where only the model can say whether the file fits.
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

/// Returns whether a file has the tensors of a release's weights: the same names, dtypes and shapes.
fn same_tensors(store: &Store, path: &Path, last: &Release) -> Result<bool, BuildError> {
    let Some(last) = &last.weights else {
        return Ok(false);
    };
    let last = store.objects().map(last)?;
    let Ok((_, last)) = SafeTensors::read_metadata(&last) else {
        return Ok(false);
    };
    let layouts = |header: &Metadata| -> BTreeMap<String, (Dtype, Vec<usize>)> {
        let layout = |(name, info): (String, &TensorInfo)| (name, (info.dtype, info.shape.clone()));
        header.tensors().into_iter().map(layout).collect()
    };
    Ok(layouts(&header(path)?) == layouts(&last))
}

/// Puts the file of weights that the spec names, after a smoke run with the existing programs. Returns its digest; none for the
/// weights of before. `same` is the release that has the programs. Without a shim nothing is run.
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
    // With a lease of its own: a refused file is held by nobody.
    let apart = store.reopened()?;
    let (object, _) = apart.objects().put_file_unpacked(path)?;
    if before.is_some_and(|before| before.weights == Some(object)) {
        return Ok(None);
    }
    // Lost weights can't be compared with.
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
        limit: options.timeout.unwrap_or(gate::LIMIT),
        stop: &Stop::new(&options.cancel),
    };
    match process.ask(&request) {
        Ok(_) => Ok(Ok(())),
        Err(BuildError::Gate { message, .. }) => Ok(Err(message)),
        Err(error) => Err(error),
    }
}

/// Returns the name of a tensor with NaN or infinity that had only numbers before, as an error: a run with sample inputs may
/// not read it.
fn spoilt(store: &Store, before: &Digest, after: &Digest) -> Result<Option<String>, BuildError> {
    let (before, after) = (store.objects().map(before)?, store.objects().map(after)?);
    let (Ok(before), Ok(after)) = (
        SafeTensors::deserialize(&before),
        SafeTensors::deserialize(&after),
    ) else {
        return Ok(None);
    };
    let was_finite = |name: &str| before.tensor(name).is_ok_and(|before| finite(&before));
    let mut spoilt = after.iter();
    let spoilt = spoilt.find(|(name, after)| !finite(after) && was_finite(name));
    Ok(spoilt.map(|(name, _)| format!("tensor `{name}` has NaN or infinity, and had none before")))
}

/// Returns whether a tensor has only numbers: no exponent has all of its bits set.
fn finite(tensor: &TensorView<'_>) -> bool {
    fn all<const N: usize>(bytes: &[u8], exponent: u64) -> bool {
        bytes.as_chunks::<N>().0.iter().all(|chunk| {
            let mut bits = [0; 8];
            bits[..N].copy_from_slice(chunk);
            u64::from_le_bytes(bits) & exponent != exponent
        })
    }
    let bytes = tensor.data();
    match tensor.dtype() {
        Dtype::F16 => all::<2>(bytes, 0x7c00),
        Dtype::BF16 => all::<2>(bytes, 0x7f80),
        Dtype::F32 => all::<4>(bytes, 0x7f80_0000),
        Dtype::F64 => all::<8>(bytes, 0x7ff0_0000_0000_0000),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_found_in_every_dtype() {
        let is_finite = |dtype, bytes: &[u8]| {
            let size = bytes.len() / 2;
            let both = [&vec![0; size][..], &bytes[..size]].concat();
            finite(&TensorView::new(dtype, vec![2], &both).unwrap())
        };
        for value in [0.0, 1.0, -2.5, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let (single, double) = ((value as f32).to_le_bytes(), value.to_le_bytes());
            // The upper half of a float32 is a bfloat16.
            for (dtype, bytes) in [
                (Dtype::F64, &double[..]),
                (Dtype::F32, &single[..]),
                (Dtype::BF16, &single[2..]),
            ] {
                let twice = [bytes, bytes].concat();
                assert_eq!(
                    is_finite(dtype, &twice),
                    value.is_finite(),
                    "{dtype:?} {value}"
                );
            }
        }
        for (bits, is) in [
            (0x3c00_u16, true),
            (0xfbff, true),
            (0x7c00, false),
            (0xfe00, false),
        ] {
            let twice = [bits.to_le_bytes(), bits.to_le_bytes()].concat();
            assert_eq!(is_finite(Dtype::F16, &twice), is, "{bits:x}");
        }
        assert!(is_finite(Dtype::I64, &[255; 16]), "a number of integers");
    }
}
