//! Published weights: the weight set of a release, with the trained values in their places.
//!
//! The trained model and the published one may be two, as when one spec has the step and another one the modules that
//! answer: they agree by the names of their weights. Every weight keeps its dtype and shape. The new file has the order
//! of [`TensorLayout`], whatever that of the old one is, and is written tensor by tensor: only one of them is copied at
//! a time.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    ops::Range,
};

use precast_store::{
    Mapped, Store, TensorLayout,
    record::{First, Provenance, Release, State},
};
use safetensors::{SafeTensors, tensor::TensorInfo};

use super::steps::Steps;
use crate::{
    Device, RuntimeError, Tensor,
    arrays::refused,
    error::in_store,
    source::{Source as _, SourceError},
    tensors,
};

/// A release whose weights can be replaced by trained ones.
pub struct Target {
    release: Release,
    /// Its weight set.
    old: Mapped,
    /// The bytes of the new file before its tensors.
    head: Vec<u8>,
    /// The tensors of the new file, in its order.
    parts: Vec<Part>,
}

/// A tensor of a weight set.
struct Part {
    /// Its place in the old file.
    range: Range<usize>,
    /// The state with its new value, and its dtype; none for a tensor that stays.
    state: Option<(String, safetensors::Dtype)>,
}

impl Target {
    /// Finds the newest release of a model, and the places of the trained values in its weight set.
    pub fn find(steps: &Steps<'_>, store: &Store, model: &str) -> Result<Self, RuntimeError> {
        let what = || in_store(format!("model `{model}`"));
        let release = store.release(model, None);
        let release = release.map_err(|error| match error.downcast() {
            Ok(missing) => RuntimeError::NoRelease(*missing),
            Err(error) => what()(error),
        })?;
        let Some(weights) = release.weights else {
            return Err(unfit(model, "its newest release has no weights to replace"));
        };
        let old = store.map(&weights).map_err(what())?;
        let (header, metadata) = SafeTensors::read_metadata(&old)
            .map_err(|error| what()(SourceError::from(error.to_string())))?;
        let known: BTreeMap<String, &TensorInfo> = metadata.tensors().into_iter().collect();
        let states = replacing(steps, &known, &release)?;
        let data = 8 + header;
        let layouts = known.iter().map(|(name, info)| {
            let layout = (info.dtype, info.shape.clone());
            (name.clone(), layout)
        });
        let texts = metadata.metadata().clone();
        let texts = texts.map(|texts| texts.into_iter().collect());
        let layout = TensorLayout::new(layouts.collect(), texts);
        let layout = layout.map_err(|error| what()(SourceError::from(error.to_string())))?;
        let part = |name: &String| {
            let info = known.get(name)?;
            let (begin, end) = info.data_offsets;
            let state = states.get(name);
            Some(Part {
                range: data + begin..data + end,
                state: state.map(|state| (state.name.clone(), info.dtype)),
            })
        };
        let parts = layout.order.iter().filter_map(part).collect();
        Ok(Self {
            release,
            old,
            head: layout.head,
            parts,
        })
    }

    /// Publishes a release with the trained values; `value` returns that of a state.
    pub fn publish(
        self,
        store: &Store,
        mut value: impl FnMut(&str) -> Result<Tensor, RuntimeError>,
    ) -> Result<Release, RuntimeError> {
        let Self {
            release,
            old,
            head,
            parts,
        } = self;
        let mut refusal = None;
        let write = &mut |file: &mut std::fs::File| {
            file.write_all(&head)?;
            for Part { range, state } in &parts {
                let Some((name, dtype)) = state else {
                    file.write_all(&old[range.clone()])?;
                    continue;
                };
                match value(name).and_then(|value| bytes(name, &value, *dtype)) {
                    Ok(value) => file.write_all(&value)?,
                    Err(error) => {
                        refusal = Some(error);
                        return Err(io::ErrorKind::InvalidData.into());
                    }
                }
            }
            Ok(())
        };
        let put = store.objects().put_unpacked(store.path(), write);
        if let Some(error) = refusal {
            return Err(error);
        }
        let model = release.model.clone();
        let failed = || in_store(format!("model `{model}`"));
        let (weights, _) = put.map_err(|error| failed()(error.into()))?;
        let release = Release {
            name: None,
            rollback: None,
            weights: Some(weights),
            provenance: Provenance::now(),
            ..release
        };
        let put = store.releases().put(&release);
        put.map(|(release, _)| release)
            .map_err(|error| failed()(error.into()))
    }
}

/// Returns the bytes of a state's tensor, if all of its elements are numbers.
fn bytes(state: &str, value: &Tensor, dtype: safetensors::Dtype) -> Result<Vec<u8>, RuntimeError> {
    let value = value.to_device(Device::Cpu).map_err(refused)?;
    let bytes = value.to_bytes().map_err(refused)?;
    if !tensors::is_finite(dtype, &bytes) {
        return Err(unfit(
            state,
            "it has NaN or infinity, so it is not published",
        ));
    }
    Ok(bytes)
}

/// Returns the trained state for each weight of a release that gets one. A tensor that the trained model knows under
/// several names replaces all weights of these names.
fn replacing<'m>(
    steps: &Steps<'m>,
    known: &BTreeMap<String, &TensorInfo>,
    release: &Release,
) -> Result<BTreeMap<String, &'m State>, RuntimeError> {
    let aliases = &steps.model.replicas[0].loader.aliases;
    let mut found: BTreeMap<String, &State> = BTreeMap::new();
    let programs = steps.programs();
    for state in programs.into_iter().flat_map(|program| &program.states) {
        let First::Tensor(own) = &state.first else {
            continue;
        };
        let others = aliases.iter().filter(|(_, holder)| *holder == own);
        let names = others.map(|(name, _)| name).chain([own]);
        let fitting = names.filter_map(|name| {
            let held = if known.contains_key(name) {
                name
            } else {
                release.aliases.get(name)?
            };
            let info = known.get(held)?;
            fits(state, info).then(|| held.clone())
        });
        let fitting: Vec<String> = fitting.collect();
        if fitting.is_empty() {
            let model = &release.model;
            let problem = format!(
                "the newest release of `{model}` has no weight of its name, dtype and shape"
            );
            return Err(unfit(&state.name, &problem));
        }
        for name in fitting {
            let before = found.insert(name.clone(), state);
            if let Some(before) = before.filter(|before| before.name != state.name) {
                let model = &release.model;
                let problem = format!(
                    "`{name}` of `{model}` would be it and `{}`, which are two in the training",
                    before.name
                );
                return Err(unfit(&state.name, &problem));
            }
        }
    }
    Ok(found)
}

/// Returns whether a state has the dtype and the shape of a weight.
fn fits(state: &State, info: &TensorInfo) -> bool {
    let shape = info.shape.iter().map(|&size| i64::try_from(size).ok());
    let own = state.layout.shape.iter().map(|&size| Some(size));
    tensors::dtype_of(info.dtype) == Some(state.layout.dtype) && shape.eq(own)
}

fn unfit(state: &str, problem: &str) -> RuntimeError {
    RuntimeError::State {
        state: state.to_owned(),
        problem: problem.to_owned(),
    }
}
