//! The states of one session: tensors that programs read and write, and a slot of each program that uses them.
//!
//! A tensor is created when a program first needs it. Programs share tensors by name, for example one that fills a
//! cache and one that extends it. A slot always has the same tensors: its CUDA graph has their addresses.
//!
//! Work on a device is asynchronous, and each call may come from a thread with another stream: a stream waits for the
//! previous stream that used the tensors.
//!
//! Tensors and slots of one bucket's sizes form a [`Level`]. A session begins at the smallest level for its first call.
//! When a call needs a larger one, every tensor is copied into its tensor there, once. Levels are kept: the next
//! session of the model reuses them, and only writes first values.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use precast_store::{
    Device, Digest,
    record::{First, Program, Sizes, State},
};

use super::{
    RuntimeError, Tensor, TorchError,
    ffi::{Handle, Handles, RawStream, Weight, cuda},
    layout::bytes_of,
    loaded::{Answer, Loaded, Sizes as Fill},
    loader::Loader,
    slot::Slot,
    weights::Weights,
};

/// Tensors and slots of one session at a time.
pub(super) struct States {
    levels: Vec<Level>,
    /// The level of the session; none before its first call.
    at: Option<usize>,
    pub weights: Arc<Weights>,
    loader: Arc<Loader>,
    /// The stream that used the tensors last.
    last: Option<RawStream>,
    /// The number of its tokens, if the session counts them.
    pub position: i64,
    /// The states that a module fills, and that have a value in this session.
    filled: BTreeSet<String>,
    /// The first error of a call that may have left tensors half written.
    failed: Option<Arc<str>>,
}

/// The tensors of one bucket's sizes, and the slots that use them.
#[derive(Default)]
struct Level {
    // Before the tensors that its graphs point to.
    /// By program; none during a call.
    slots: BTreeMap<Digest, Option<Slot>>,
    tensors: BTreeMap<String, StateTensor>,
    /// The programs that have run since the tensors had their first values.
    ran: BTreeSet<Digest>,
    /// The sizes of the tensors in their bucketed dimensions.
    sizes: Sizes,
}

/// The tensor of a state.
struct StateTensor {
    tensor: Handle,
    shape: Vec<i64>,
    record: State,
    /// The tensor with its first value; zero without one. A module's output is written later.
    first: Option<Arc<Weight>>,
    /// Whether a call or the caller may have written it since it had its first value.
    written: bool,
}

impl States {
    /// Creates a session's states without tensors and slots, on the newest weights.
    pub fn new(loader: &Arc<Loader>) -> Self {
        Self {
            levels: vec![],
            at: None,
            weights: loader.newest(),
            loader: loader.clone(),
            last: None,
            position: 0,
            filled: BTreeSet::new(),
            failed: None,
        }
    }

    /// Prepares it for another session, on the newest weights: with other ones than before, or after a failure, it
    /// starts without tensors and slots.
    pub fn reopen(&mut self) {
        if self.failed.is_some() || !Arc::ptr_eq(&self.weights, &self.loader.newest()) {
            *self = Self::new(&self.loader.clone());
        }
        self.reset();
    }

    /// Starts again: the first call gives the tensors of its level their first values.
    pub fn reset(&mut self) {
        self.at = None;
        self.position = 0;
        self.filled.clear();
        self.failed = None;
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

    /// Returns the size of the tensors in a dimension, if one of them has it.
    pub fn size(&self, dim: &str) -> Option<i64> {
        self.level()?.sizes.get(dim).copied()
    }

    /// Returns the tensors by name; none before the first call.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Handle)> {
        let kept = self.level().into_iter().flat_map(|level| &level.tensors);
        kept.map(|(name, kept)| (name.as_str(), &kept.tensor))
    }

    /// Returns the tensor of a state of one of these programs, made with its first value if no call has used it.
    pub fn tensor<'p>(
        &mut self,
        name: &str,
        mut programs: impl Iterator<Item = &'p Program>,
    ) -> Result<Option<Handle>, RuntimeError> {
        // The caller may write it.
        let find = |states: &mut Self| {
            let level = states.levels.get_mut(states.at?)?;
            let kept = level.tensors.get_mut(name)?;
            kept.written = true;
            Some(kept.tensor.share())
        };
        if let Some(found) = find(self) {
            return Ok(Some(found));
        }
        let has = |program: &&Program| program.states.iter().any(|state| state.name == name);
        let Some(program) = programs.find(has) else {
            return Ok(None);
        };
        self.fit(program)?;
        Ok(find(self))
    }

    /// Copies every tensor of another session.
    pub fn take_over(&mut self, other: &Self) -> Result<(), TorchError> {
        self.reset();
        let Some(from) = other.level() else {
            return Ok(());
        };
        self.order()?;
        self.wait_for(other.last)?;
        let at = self.begin(&from.sizes)?;
        from.copy_to(&mut self.levels[at], &self.weights, &self.loader)?;
        self.position = other.position;
        self.filled.clone_from(&other.filled);
        Ok(())
    }

    /// Starts again at these sizes, with these values for the states of programs; the others get their first values.
    pub fn fill(
        &mut self,
        sizes: &Sizes,
        values: &BTreeMap<String, Tensor>,
        programs: &[&Program],
    ) -> Result<(), TorchError> {
        self.reset();
        self.order()?;
        let at = self.begin(sizes)?;
        for state in programs.iter().flat_map(|program| &program.states) {
            if let Some(value) = values.get(&state.name) {
                let kept = self.levels[at].kept(state, &self.weights, &self.loader)?;
                kept.write(&value.0)?;
                self.filled.insert(state.name.clone());
            }
        }
        Ok(())
    }

    /// Writes an output of a module into a state, as its first value.
    pub fn write(&mut self, state: &State, value: &Handle) -> Result<(), TorchError> {
        self.order()?;
        let at = match self.at {
            Some(at) => at,
            None => self.begin(&Sizes::new())?,
        };
        let kept = self.levels[at].kept(state, &self.weights, &self.loader)?;
        kept.write(value)?;
        self.set(&state.name);
        Ok(())
    }

    /// Notes that a state has a value.
    pub fn set(&mut self, state: &str) {
        if !self.filled.contains(state) {
            self.filled.insert(state.to_owned());
        }
    }

    /// Fails if a module is to fill a state of the program, was not called yet, and is none of those called `before`.
    pub fn readable(&self, program: &Program, before: &[&str]) -> Result<(), RuntimeError> {
        let mut states = program.states.iter();
        let missing = states.find_map(|state| match &state.first {
            First::Output { module, .. } => {
                let filled = self.filled.contains(&state.name);
                (!filled && !before.contains(&module.as_str())).then_some((state, module))
            }
            _ => None,
        });
        match missing {
            None => Ok(()),
            Some((state, module)) => Err(RuntimeError::State {
                state: state.name.clone(),
                problem: format!(
                    "it has no value yet: module `{module}` fills it, and the session has not called that"
                ),
            }),
        }
    }

    /// Makes every later call fail, until the session begins again.
    pub fn fail(&mut self, error: &RuntimeError) {
        self.failed.get_or_insert_with(|| error.to_string().into());
    }

    /// Runs a program with states on checked inputs, in a session that is [usable](Self::usable). After a failure it is
    /// not usable.
    pub fn serve(
        &mut self,
        loaded: &Loaded,
        inputs: Handles,
        sizes: Fill<'_>,
    ) -> Result<Answer, RuntimeError> {
        self.readable(&loaded.plan.program, &[])?;
        let mut slot = self.take_slot(loaded)?;
        if let Some(at) = self.at {
            self.levels[at].runs(&loaded.plan.program);
        }
        let result = loaded.run_slot(&mut slot, inputs, sizes);
        match &result {
            Ok(_) => self.put_back(loaded, slot),
            Err(error) => self.failed = Some(error.to_string().into()),
        }
        result
    }

    /// Makes the slot of a program before its first call: a graph that is captured when states have values takes a
    /// second copy of them for a moment.
    pub fn prepare(&mut self, loaded: &Loaded) -> Result<(), RuntimeError> {
        let slot = self.take_slot(loaded)?;
        self.put_back(loaded, slot);
        Ok(())
    }

    /// Takes the slot of a program, made if there is none, and puts the thread's current stream after its last use.
    fn take_slot(&mut self, loaded: &Loaded) -> Result<Slot, RuntimeError> {
        self.order().map_err(|error| loaded.plan.tensor(error))?;
        match self.idle(loaded.plan.program.id) {
            Some(slot) => Ok(slot),
            None => self.slot(loaded),
        }
    }

    fn put_back(&mut self, loaded: &Loaded, slot: Slot) {
        if let Some(at) = self.at {
            let slots = &mut self.levels[at].slots;
            *slots.entry(loaded.plan.program.id).or_default() = Some(slot);
        }
    }

    /// Takes the slot of a program at the level of the session. It has the level's tensors.
    fn idle(&mut self, program: Digest) -> Option<Slot> {
        let level = self.levels.get_mut(self.at?)?;
        level.slots.get_mut(&program)?.take()
    }

    /// Moves to the level of a program, and returns its slot there, made if no earlier session has left one.
    fn slot(&mut self, loaded: &Loaded) -> Result<Slot, RuntimeError> {
        let program = &loaded.plan.program;
        let states = self.fit(program)?;
        if let Some(slot) = self.idle(program.id) {
            return Ok(slot);
        }
        let written = self.level().map(|level| level.written(program));
        let made = loaded.slot(&self.weights, states, &written.unwrap_or_default());
        let level = self.at.map(|at| &mut self.levels[at]);
        if let (true, Some(level)) = (loaded.is_graph(), level) {
            // The warm-ups of its capture have written over first values.
            let restored = level.restore(program);
            restored.map_err(|error| {
                self.failed = Some(error.to_string().into());
                loaded.plan.tensor(error)
            })?;
        }
        made
    }

    /// Makes the thread's current stream wait for the last stream that used the tensors.
    pub fn order(&mut self) -> Result<(), TorchError> {
        let Device::Cuda(ordinal) = self.loader.device else {
            return Ok(());
        };
        let now = cuda()?.current_stream(ordinal)?;
        let last = self.last.replace(now);
        self.wait_for(last)
    }

    fn wait_for(&self, last: Option<RawStream>) -> Result<(), TorchError> {
        let (Device::Cuda(ordinal), Some(last)) = (self.loader.device, last) else {
            return Ok(());
        };
        let now = cuda()?.current_stream(ordinal)?;
        if now == last {
            return Ok(());
        }
        cuda()?.wait(now, last, ordinal)
    }

    #[cfg(test)]
    pub fn levels(&self) -> usize {
        self.levels.len()
    }

    fn level(&self) -> Option<&Level> {
        self.levels.get(self.at?)
    }

    /// Begins at the level of these sizes, made if there is none, with first values. Returns its number.
    fn begin(&mut self, sizes: &Sizes) -> Result<usize, TorchError> {
        let known = self.levels.iter().position(|level| level.sizes == *sizes);
        let at = known.unwrap_or_else(|| {
            self.levels.push(Level {
                sizes: sizes.clone(),
                ..Level::default()
            });
            self.levels.len() - 1
        });
        self.levels[at].reset()?;
        self.at = Some(at);
        Ok(at)
    }

    /// Moves to the level of a program's sizes. Returns the tensors of the program's states. Creates the missing ones.
    fn fit(&mut self, program: &Program) -> Result<Handles, RuntimeError> {
        let refused = |message| RuntimeError::Tensor {
            module: program.module.as_str().into(),
            message,
        };
        let at = self.at_sizes(sizes_of(program)).map_err(refused)?;
        let (weights, loader) = (&self.weights, &self.loader);
        let level = &mut self.levels[at];
        let mut handles = Handles::new();
        for state in &program.states {
            let kept = level.kept(state, weights, loader).map_err(refused)?;
            if kept.shape != state.layout.shape || kept.record.layout.dtype != state.layout.dtype {
                let (own, wanted) = (&kept.record.layout, &state.layout);
                return Err(RuntimeError::State {
                    state: state.name.clone(),
                    problem: format!(
                        "it is {} {:?} in this session, and {} {:?} in module `{}` at {}",
                        own.dtype,
                        kept.shape,
                        wanted.dtype,
                        wanted.shape,
                        program.module,
                        program.bucket()
                    ),
                });
            }
            handles.push(kept.tensor.share());
        }
        Ok(handles)
    }

    /// Moves the session to the level of these sizes, and returns its number. The tensors of the previous level are
    /// copied into it.
    fn at_sizes(&mut self, wanted: Sizes) -> Result<usize, TorchError> {
        let Some(from) = self.at else {
            return self.begin(&wanted);
        };
        let now = &self.levels[from].sizes;
        if wanted.iter().all(|(dim, size)| now.get(dim) == Some(size)) {
            return Ok(from);
        }
        let mut sizes = now.clone();
        let more = wanted.keys().all(|dim| !now.contains_key(dim));
        sizes.extend(wanted);
        let known = self.levels.iter().any(|level| level.sizes == sizes);
        if more && !known {
            // No tensor has these dimensions yet.
            self.levels[from].sizes = sizes;
            return Ok(from);
        }
        let _span = tracing::info_span!("move", sizes = ?sizes).entered();
        let source = std::mem::take(&mut self.levels[from]);
        let to = self.begin(&sizes);
        let copied = to.and_then(|to| {
            source.copy_to(&mut self.levels[to], &self.weights, &self.loader)?;
            Ok(to)
        });
        self.levels[from] = source;
        if copied.is_err() {
            self.at = Some(from);
        }
        copied
    }
}

impl Level {
    fn reset(&mut self) -> Result<(), TorchError> {
        self.ran.clear();
        let mut tensors = self.tensors.values_mut();
        tensors.try_for_each(StateTensor::reset)
    }

    /// Returns for each state of a program whether it is written.
    fn written(&self, program: &Program) -> Vec<bool> {
        let written = |state: &State| {
            let kept = self.tensors.get(&state.name);
            kept.is_none_or(|kept| kept.written)
        };
        program.states.iter().map(written).collect()
    }

    /// Notes that a call writes the states of a program.
    fn runs(&mut self, program: &Program) {
        if self.ran.contains(&program.id) {
            return;
        }
        self.ran.insert(program.id);
        for state in &program.states {
            if let Some(kept) = self.tensors.get_mut(&state.name) {
                kept.written = true;
            }
        }
    }

    /// Gives the states of a program that are not written their first values.
    fn restore(&mut self, program: &Program) -> Result<(), TorchError> {
        for state in &program.states {
            let kept = self.tensors.get_mut(&state.name);
            if let Some(kept) = kept.filter(|kept| !kept.written) {
                kept.reset()?;
            }
        }
        Ok(())
    }

    /// Returns the tensor of a state, made with its first value if there is none.
    fn kept(
        &mut self,
        state: &State,
        weights: &Weights,
        loader: &Loader,
    ) -> Result<&mut StateTensor, TorchError> {
        if !self.tensors.contains_key(&state.name) {
            let made = StateTensor::new(state, &self.sizes, weights, loader)?;
            self.tensors.insert(state.name.clone(), made);
        }
        let kept = self.tensors.get_mut(&state.name);
        kept.ok_or_else(|| format!("there is no state `{}`", state.name).into())
    }

    /// Copies every tensor into the low corner of that of another level.
    fn copy_to(&self, to: &mut Self, weights: &Weights, loader: &Loader) -> Result<(), TorchError> {
        for kept in self.tensors.values() {
            let into = to.kept(&kept.record, weights, loader)?;
            into.written = true;
            let (meta, own) = (kept.tensor.meta(), into.tensor.meta());
            let dtype = kept.record.layout.dtype;
            let corner = into.tensor.view(meta.sizes(), own.strides(), 0, dtype)?;
            corner.copy_from(&kept.tensor)?;
        }
        Ok(())
    }
}

impl StateTensor {
    fn new(
        state: &State,
        sizes: &Sizes,
        weights: &Weights,
        loader: &Loader,
    ) -> Result<Self, TorchError> {
        let layout = &state.layout;
        let shape = shape_at(state, sizes);
        let first = match &state.first {
            First::Zeros | First::Output { .. } => None,
            First::Tensor(name) => {
                let lacks = || format!("the weight set has no tensor `{name}`");
                Some(weights.any(name, &loader.aliases)?.ok_or_else(lacks)?)
            }
        };
        let mut made = Self {
            tensor: Handle::empty(&shape, &dense(&shape), layout.dtype, loader.device)?,
            shape,
            record: state.clone(),
            first,
            written: false,
        };
        made.reset()?;
        Ok(made)
    }

    fn write(&mut self, value: &Handle) -> Result<(), TorchError> {
        self.written = true;
        self.tensor.copy_from(value)
    }

    fn reset(&mut self) -> Result<(), TorchError> {
        self.written = false;
        match &self.first {
            None => self.tensor.zero(),
            Some(first) => {
                self.tensor.copy_from(first.handle())?;
                // Nothing reads it before the next session: its pages would stay beside the state.
                first.release();
                Ok(())
            }
        }
    }
}

/// Returns the sizes of the bucketed dimensions of a program's states.
fn sizes_of(program: &Program) -> Sizes {
    let dims = program.states.iter().flat_map(|state| &state.dims);
    let sizes = dims.filter_map(|dim| program.sizes.get_key_value(dim.as_ref()?));
    sizes.map(|(dim, size)| (dim.clone(), *size)).collect()
}

/// Returns the shape of a state at the sizes of a level.
fn shape_at(state: &State, sizes: &Sizes) -> Vec<i64> {
    let axes = state.layout.shape.iter().zip(&state.dims);
    let size = |(&own, dim): (&i64, &Option<String>)| {
        let sized = dim.as_ref().and_then(|dim| sizes.get(dim));
        sized.copied().unwrap_or(own)
    };
    axes.map(size).collect()
}

/// Returns the maximum bytes of one session's tensors: those of every level that a session of these programs can reach,
/// because levels are kept.
pub(super) fn most_bytes(programs: &[Arc<Program>]) -> u64 {
    let with_states = || programs.iter().filter(|program| !program.states.is_empty());
    let wanted: BTreeSet<Sizes> = with_states().map(|program| sizes_of(program)).collect();
    let mut levels = wanted.clone();
    let filled = |state: &State| matches!(state.first, First::Output { .. });
    if with_states().any(|program| program.states.iter().any(filled)) {
        // A module fills states before the first call that has sizes.
        levels.insert(Sizes::new());
    }
    let mut new: Vec<Sizes> = wanted.iter().cloned().collect();
    while let Some(level) = new.pop() {
        for sizes in &wanted {
            let mut next = level.clone();
            next.extend(sizes.clone());
            if levels.insert(next.clone()) {
                new.push(next);
            }
        }
    }
    let level_bytes = |sizes: &Sizes| -> u64 {
        let mut largest: BTreeMap<&str, u64> = BTreeMap::new();
        for state in with_states().flat_map(|program| &program.states) {
            let bytes = bytes_of(&shape_at(state, sizes), state.layout.dtype) as u64;
            let known = largest.entry(&state.name).or_default();
            *known = bytes.max(*known);
        }
        largest.into_values().fold(0, u64::saturating_add)
    };
    levels.iter().map(level_bytes).fold(0, u64::saturating_add)
}

/// Returns the strides of a dense tensor, the last axis moving fastest.
fn dense(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis].max(1);
    }
    strides
}

#[cfg(test)]
mod tests;
