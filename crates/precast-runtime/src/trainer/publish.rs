//! Published weights: the weight set of a release, with the trained values in their places.
//!
//! The trained model and the published one may be two, as when one spec has the step and another one the modules that
//! answer: they agree by the names of their weights. Every weight keeps its dtype, shape and place, so the new file is
//! the old one with other bytes, and is written tensor by tensor: only one of them is copied at a time.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    ops::Range,
};

use precast_store::{
    Mapped, Store,
    record::{First, Provenance, Release, State},
};
use safetensors::{SafeTensors, tensor::TensorInfo};

use super::Trainer;
use crate::{
    Device, RuntimeError,
    arrays::refused,
    error::in_store,
    source::{Source as _, SourceError},
    tensors,
};

/// A release whose weights can be replaced by trained ones.
struct Target {
    release: Release,
    /// Its weight set.
    old: Mapped,
    /// The file of the weight set from its first byte to its last.
    parts: Vec<Part>,
}

/// A part of a weight set's file.
struct Part {
    range: Range<usize>,
    /// The state with its new value, and its dtype; none for a part that stays.
    state: Option<(String, safetensors::Dtype)>,
}

impl Trainer<'_> {
    /// Publishes the parameters as a new weight set of the model, in a new release with the programs of its newest one.
    /// A process that serves the model takes it with [`Runtime::weights_of`](crate::Runtime::weights_of) and
    /// [`Model::swap`](crate::Model::swap): nothing is built.
    ///
    /// Fails, and publishes nothing, if a parameter has NaN or infinity.
    pub fn publish(&mut self, store: &Store) -> Result<Release, RuntimeError> {
        let own = self.model.name();
        self.publish_to(store, own)
    }

    /// Publishes the parameters as [`Self::publish`] does, in a release of another model: one whose weights have the
    /// names, dtypes and shapes of the trained ones. Its other weights stay as they are.
    pub fn publish_to(&mut self, store: &Store, model: &str) -> Result<Release, RuntimeError> {
        let Target {
            release,
            old,
            parts,
        } = self.target(store, model)?;
        let mut refusal = None;
        let write = &mut |file: &mut std::fs::File| {
            for Part { range, state } in &parts {
                match state.as_ref().map(|(name, dtype)| self.value(name, *dtype)) {
                    None => file.write_all(&old[range.clone()])?,
                    Some(Ok(value)) => file.write_all(&value)?,
                    Some(Err(error)) => {
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

    /// Fails if [`Self::publish_to`] would refuse the model, whatever the values are: for a caller who wants to know it
    /// before the training.
    pub fn may_publish_to(&self, store: &Store, model: &str) -> Result<(), RuntimeError> {
        self.target(store, model).map(drop)
    }

    /// Returns a state as the bytes of its tensor, if all of its elements are numbers.
    fn value(&mut self, state: &str, dtype: safetensors::Dtype) -> Result<Vec<u8>, RuntimeError> {
        let value = self.sessions[0].shared(state)?;
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

    /// Finds the newest release of a model, and the places of the trained values in its weight set.
    fn target(&self, store: &Store, model: &str) -> Result<Target, RuntimeError> {
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
        let states = self.replacing(&known, &release)?;
        let data = 8 + header;
        let mut parts = vec![Part {
            range: 0..data,
            state: None,
        }];
        parts.extend(known.iter().map(|(name, info)| {
            Part {
                range: data + info.data_offsets.0..data + info.data_offsets.1,
                state: states
                    .get(name)
                    .map(|state| (state.name.clone(), info.dtype)),
            }
        }));
        parts.sort_by_key(|part| (part.range.start, part.range.end));
        Ok(Target {
            release,
            old,
            parts,
        })
    }

    /// Returns the trained state for each weight of a release that gets one. A tensor that the trained model knows under
    /// several names replaces all weights of these names.
    fn replacing(
        &self,
        known: &BTreeMap<String, &TensorInfo>,
        release: &Release,
    ) -> Result<BTreeMap<String, &State>, RuntimeError> {
        let aliases = &self.model.replicas[0].loader.aliases;
        let mut found: BTreeMap<String, &State> = BTreeMap::new();
        let programs = self.programs();
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
