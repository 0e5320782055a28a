//! The states of one session: tensors that programs read and write, and a slot of each program that uses them.
//!
//! A tensor is made when a program first needs it, with the layout of that program. Programs share tensors by name, as
//! one that fills a cache and one that extends it. A slot stays with its tensors: its CUDA graph has their addresses.
//! So the next session of the model takes over tensors and slots, and only writes the first values.

use std::{collections::BTreeMap, sync::Arc};

use precast_store::{
    Digest,
    record::{First, Layout, Program, Sizes, State},
};

use super::{
    RuntimeError, TorchError,
    ffi::{Handle, Handles, Weight},
    loaded::{Answer, Loaded, Sizes as Fill},
    loader::Loader,
    slot::Slot,
    weights::Weights,
};

/// Tensors and slots of one session at a time.
pub(super) struct States {
    // Before the tensors that its graphs point to.
    slots: BTreeMap<Digest, Slot>,
    tensors: BTreeMap<String, Kept>,
    /// The bucket's sizes in the dimensions of the tensors.
    sizes: Sizes,
    weights: Arc<Weights>,
    loader: Arc<Loader>,
    /// The first error of a call that may have left tensors half written.
    failed: Option<Arc<str>>,
}

/// The tensor of a state.
struct Kept {
    tensor: Handle,
    layout: Layout,
    /// The tensor with its first value; zero without one.
    first: Option<Arc<Weight>>,
}

impl States {
    /// Makes one without tensors and slots, on the newest weights.
    pub fn new(loader: &Arc<Loader>) -> Self {
        Self {
            slots: BTreeMap::new(),
            tensors: BTreeMap::new(),
            sizes: Sizes::new(),
            weights: loader.newest(),
            loader: loader.clone(),
            failed: None,
        }
    }

    /// Prepares it for another session, on the newest weights: with other ones than before, or after a failure, it starts
    /// without tensors and slots.
    pub fn reopen(&mut self) -> Result<(), TorchError> {
        if self.failed.is_some() || !Arc::ptr_eq(&self.weights, &self.loader.newest()) {
            *self = Self::new(&self.loader.clone());
        }
        self.reset()
    }

    /// Gives every tensor its first value.
    pub fn reset(&mut self) -> Result<(), TorchError> {
        self.tensors.values().try_for_each(Kept::reset)?;
        self.failed = None;
        Ok(())
    }

    /// Fails if an earlier call has left tensors half written.
    pub fn usable(&self) -> Result<(), RuntimeError> {
        match &self.failed {
            None => Ok(()),
            Some(cause) => Err(RuntimeError::SessionFailed {
                cause: cause.clone(),
            }),
        }
    }

    /// Returns the size of the tensors in a dimension, where one has it.
    pub fn size(&self, dim: &str) -> Option<i64> {
        self.sizes.get(dim).copied()
    }

    /// Returns the tensors by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Handle)> {
        let kept = self.tensors.iter();
        kept.map(|(name, kept)| (name.as_str(), &kept.tensor))
    }

    /// Returns the tensor of a state of one of these programs, made with its first value if no call has used it.
    pub fn tensor<'p>(
        &mut self,
        name: &str,
        mut programs: impl Iterator<Item = &'p Program>,
    ) -> Result<Option<&Handle>, RuntimeError> {
        if !self.tensors.contains_key(name) {
            let has = |program: &&Program| program.states.iter().any(|state| state.name == name);
            let Some(program) = programs.find(has) else {
                return Ok(None);
            };
            self.fit(program)?;
        }
        Ok(self.tensors.get(name).map(|kept| &kept.tensor))
    }

    /// Runs a program on checked inputs and its states. After a failure the session is unusable.
    pub fn serve(
        &mut self,
        loaded: &Loaded,
        inputs: Handles,
        sizes: Fill<'_>,
    ) -> Result<Answer, RuntimeError> {
        self.usable()?;
        let id = loaded.plan.program.id;
        let states = self.fit(&loaded.plan.program)?;
        let mut slot = match self.slots.remove(&id) {
            Some(slot) => slot,
            None => loaded.slot(&self.weights, states)?,
        };
        let result = loaded.run_slot(&mut slot, inputs, sizes);
        match &result {
            Ok(_) => {
                self.slots.insert(id, slot);
            }
            Err(error) => self.failed = Some(error.to_string().into()),
        }
        result
    }

    /// Returns the tensors of a program's states; those that are missing are made.
    fn fit(&mut self, program: &Program) -> Result<Handles, RuntimeError> {
        for state in &program.states {
            match self.tensors.get(&state.name) {
                Some(kept) if kept.layout == state.layout => {}
                Some(kept) => {
                    let (own, wanted) = (&kept.layout, &state.layout);
                    let (module, bucket) = (&program.module, program.bucket());
                    return Err(RuntimeError::State {
                        state: state.name.clone(),
                        problem: format!(
                            "it is {} {:?} in this session, and {} {:?} in module `{module}` at {bucket}",
                            own.dtype, own.shape, wanted.dtype, wanted.shape,
                        ),
                    });
                }
                None => {
                    let made = self.make(state).map_err(|message| RuntimeError::Tensor {
                        module: program.module.as_str().into(),
                        message,
                    });
                    self.tensors.insert(state.name.clone(), made?);
                    let dims = state.dims.iter().flatten();
                    let sizes = dims.filter_map(|dim| program.sizes.get_key_value(dim));
                    (self.sizes).extend(sizes.map(|(dim, size)| (dim.clone(), *size)));
                }
            }
        }
        let tensors = program.states.iter();
        let tensors = tensors.filter_map(|state| self.tensors.get(&state.name));
        Ok(tensors.map(|kept| kept.tensor.share()).collect())
    }

    fn make(&self, state: &State) -> Result<Kept, TorchError> {
        let (layout, device) = (&state.layout, self.loader.device);
        let first = match &state.first {
            First::Zeros => None,
            First::Tensor(name) => {
                let aliases = &self.loader.aliases;
                let lacks = || format!("the weight set has no tensor `{name}`");
                Some(self.weights.any(name, aliases).ok_or_else(lacks)?)
            }
        };
        let made = Kept {
            tensor: Handle::empty(&layout.shape, &layout.stride, layout.dtype, device)?,
            layout: layout.clone(),
            first,
        };
        made.reset()?;
        Ok(made)
    }
}

impl Kept {
    fn reset(&self) -> Result<(), TorchError> {
        match &self.first {
            None => self.tensor.zero(),
            Some(first) => self.tensor.copy_from(first.handle()),
        }
    }
}
