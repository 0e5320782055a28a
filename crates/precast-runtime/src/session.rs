//! A session: states that are kept from call to call, for one caller.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use precast_store::{
    Device, Digest,
    record::{self, Sizes},
};

use super::{
    Model, RuntimeError, Tensor, Value,
    arrays::{self, Argument, refused},
    ffi::Handle,
    layout::bytes_of,
    model::InSession,
    outputs::Outputs,
    pool::Place,
    program::Program,
    replica::{self, Fill, Replica},
    saved::{self, Header, Holds, SavedError},
    states::States,
};

const NO_STATE: &str = "the model has no state of this name";

/// The states of a model for one caller, from [`Model::session`].
///
/// A module with states, such as a cache of keys and values, runs in a session. Modules share states by name: one
/// module fills a state that another reads. Sessions never see each other's states. All of them use one copy of the
/// weights: the weights of the model when the session was opened, also after [`Model::swap`].
///
/// A state whose first value is an output of a module has none before the session has run that module, which is a call
/// as any other: a call that reads it before is refused.
///
/// A refused call (an error about its inputs or its sizes) does not change the states. After a call that fails during
/// its run, the states may be partly written: every later call fails with [`RuntimeError::SessionFailed`], until
/// [`Self::reset`] or [`Self::load`].
///
/// ```no_run
/// # use precast_runtime::{Device, Runtime, Store};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let model = Runtime::new(&Store::open("artifacts")?, Device::Cpu)?.load("decoder")?;
/// let mut session = model.session()?;
/// let mut out = session.prefill(&[5, 17, 3, 80], &[])?;
/// for _ in 0..8 {
///     let logits = out.array::<f32>(0)?;
///     let last = &logits.data()[logits.data().len() - logits.shape()[2]..];
///     let token = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
///     out = session.decode(token.unwrap_or(0) as i64, &[])?;
/// }
/// # Ok(()) }
/// ```
pub struct Session<'m> {
    model: &'m Model,
    replica: &'m Replica,
    place: Place<'m, States>,
}

impl<'m> Session<'m> {
    /// Opens a session on the device with the fewest open sessions.
    pub(super) fn open(model: &'m Model) -> Result<Self, RuntimeError> {
        Self::on(model, replica::for_session(&model.replicas))
    }

    /// Opens a session on each device, in the order of the model's devices.
    pub(super) fn on_each(model: &'m Model) -> Result<Vec<Self>, RuntimeError> {
        let replicas = model.replicas.iter();
        replicas.map(|replica| Self::on(model, replica)).collect()
    }

    fn on(model: &'m Model, replica: &'m Replica) -> Result<Self, RuntimeError> {
        let place = replica.sessions.take(model.wait());
        let mut place = place.ok_or_else(|| RuntimeError::SessionsBusy {
            model: model.name().to_owned(),
            sessions: replica.sessions.limit(),
        })?;
        let states = place
            .item
            .get_or_insert_with(|| States::new(&replica.loader));
        replica.admit(|| {
            states.reopen();
            Ok(())
        })?;
        Ok(Self {
            model,
            replica,
            place,
        })
    }

    /// Runs a module on inputs in the module's order, as [`Model::run`] does, and on the states of this session.
    ///
    /// A module without states runs in the same way as without a session.
    pub fn run<A: Argument>(
        &mut self,
        module: &str,
        inputs: &[A],
    ) -> Result<Outputs, RuntimeError> {
        let model = self.model;
        let outputs = model.run_for(self.own(), model.wait(), module, inputs)?;
        self.fill(module, &outputs)?;
        Ok(outputs)
    }

    /// Runs a module on inputs by name, as [`Model::run_named`] does, and on the states of this session.
    pub fn run_named<A: Argument>(
        &mut self,
        module: &str,
        inputs: &[(&str, A)],
    ) -> Result<Outputs, RuntimeError> {
        let model = self.model;
        let outputs = model.run_named_for(self.own(), model.wait(), module, inputs)?;
        self.fill(module, &outputs)?;
        Ok(outputs)
    }

    /// Lets every state that a module fills begin with zeros, to run another module alone.
    #[doc(hidden)]
    pub fn without_fillers(&mut self) {
        if let Some(states) = &mut self.place.item {
            for fill in &self.replica.fills {
                states.set(&fill.state.name);
            }
        }
    }

    /// Writes the outputs of a module into the states that it fills. Changes nothing if one does not fit.
    fn fill(&mut self, module: &str, outputs: &Outputs) -> Result<(), RuntimeError> {
        let replica = self.replica;
        let fills = || replica.fills.iter().filter(|fill| fill.module == module);
        if fills().next().is_none() {
            return Ok(());
        }
        outputs.check()?;
        let Some(states) = &mut self.place.item else {
            return Ok(());
        };
        states.usable()?;
        let value = |fill: &Fill| outputs.get(fill.output).map(|tensor| &tensor.0);
        for fill in fills() {
            let layout = &fill.state.layout;
            let meta = value(fill).map(Handle::meta);
            let fits = meta.as_ref().is_some_and(|meta| {
                meta.dtype() == Some(layout.dtype) && meta.sizes() == layout.shape
            });
            if !fits {
                let got = meta.map_or("nothing".to_owned(), |meta| {
                    format!("{} {:?}", meta.dtype_name(), meta.sizes())
                });
                let (dtype, shape) = (layout.dtype, &layout.shape);
                return Err(RuntimeError::State {
                    state: fill.state.name.clone(),
                    problem: format!("it is {dtype} {shape:?}, and module `{module}` gave {got}"),
                });
            }
        }
        replica.admit(|| {
            for fill in fills() {
                let value = value(fill).map(|value| states.write(&fill.state, value));
                value.transpose().map_err(refused)?;
            }
            Ok(())
        })
    }

    /// Loads a module that keeps states, and captures its CUDA graphs before the states have values: see
    /// [`States::prepare`].
    pub(super) fn prepare(&mut self, module: &str) -> Result<(), RuntimeError> {
        let Some((replica, states)) = self.own() else {
            return Ok(());
        };
        let variants = replica.modules.get(module).into_iter().flatten();
        variants.into_iter().try_for_each(|variant| {
            variant.load()?;
            let programs = variant.programs.iter().filter_map(Program::loaded);
            let mut graphs = programs.filter(|loaded| loaded.is_graph());
            replica.admit(|| graphs.try_for_each(|loaded| states.prepare(loaded)))
        })
    }

    #[cfg(test)]
    pub(super) fn states(&mut self) -> &mut States {
        self.place.item.as_mut().unwrap()
    }

    fn own(&mut self) -> Option<InSession<'_>> {
        let states = self.place.item.as_mut()?;
        Some((self.replica, states))
    }

    /// Gives every state its first value again.
    pub fn reset(&mut self) {
        if let Some(states) = &mut self.place.item {
            states.reset();
        }
    }

    /// Runs the module `prefill` on the tokens of a prompt, after the tokens of the session. Returns the outputs for
    /// the last tokens.
    ///
    /// The tokens go through the buckets that they fill, the largest first, and the remaining ones through `decode` one
    /// by one. Both modules have as inputs the tokens of one sequence, their positions (an input whose `range` ends at
    /// a dimension of the states), and `more`: their other inputs, in their order. Without any of these each has its
    /// `default`.
    ///
    /// All tokens, positions and other inputs are checked before the first call: a refused prompt changes nothing. If a
    /// call after the first one fails, the session has failed, as after a call that fails during its run.
    pub fn prefill(&mut self, tokens: &[i64], more: &[Value]) -> Result<Outputs, RuntimeError> {
        let (earlier, last) = self.chunks(tokens, more)?;
        if !earlier.is_empty() {
            self.check(earlier.iter().chain([&last]))?;
        }
        let mut moved = false;
        for chunk in &earlier {
            self.feed(chunk, moved)?;
            moved = true;
        }
        self.feed(&last, moved)
    }

    /// Runs the module `decode` on the next token, as [`Self::prefill`] does.
    pub fn decode(&mut self, token: i64, more: &[Value]) -> Result<Outputs, RuntimeError> {
        let chunk = self.chunk("decode", &[token], self.at(), more)?;
        self.feed(&chunk, false)
    }

    /// Returns the number of tokens that [`Self::prefill`] and [`Self::decode`] gave it.
    pub fn position(&self) -> usize {
        usize::try_from(self.at()).unwrap_or(0)
    }

    fn at(&self) -> i64 {
        self.place.item.as_ref().map_or(0, |states| states.position)
    }

    /// Returns to an earlier position: the tokens after it are dropped.
    pub fn seek(&mut self, position: usize) -> Result<(), RuntimeError> {
        let own = self.position();
        if position > own {
            return Err(RuntimeError::State {
                state: "position".to_owned(),
                problem: format!("{position} lies beyond {own}, the tokens of the session"),
            });
        }
        if let Some(states) = &mut self.place.item {
            states.position = position as i64;
        }
        Ok(())
    }

    /// Returns the calls of a prompt: the earlier ones and the last one.
    fn chunks(&self, tokens: &[i64], more: &[Value]) -> Result<(Vec<Chunk>, Chunk), RuntimeError> {
        let sizes = self.sizes("prefill")?;
        let (mut earlier, mut rest, mut from) = (Vec::new(), tokens, self.at());
        loop {
            let size = sizes.iter().copied().find(|&size| size <= rest.len());
            let (module, size) = size.map_or(("decode", 1), |size| ("prefill", size));
            let (now, later) = rest.split_at(size.min(rest.len()));
            let chunk = self.chunk(module, now, from, more)?;
            if later.is_empty() {
                return Ok((earlier, chunk));
            }
            earlier.push(chunk);
            (rest, from) = (later, from.saturating_add(now.len() as i64));
        }
    }

    /// Returns the numbers of tokens that a module has buckets for, the largest first.
    fn sizes(&self, module: &str) -> Result<Vec<usize>, RuntimeError> {
        let variants = self.model.variants(self.replica, module)?;
        let records = variants.iter().flat_map(|variant| &variant.programs);
        let tokens = records.filter_map(|program| {
            let record = &program.record;
            let input = record.inputs.iter().find(|input| input.within.is_none())?;
            let tokens = *input.layout.shape.last()?;
            (record.dynamic.is_none()).then_some(usize::try_from(tokens).unwrap_or(1))
        });
        let mut tokens: Vec<usize> = tokens.collect();
        tokens.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
        tokens.dedup();
        Ok(tokens)
    }

    /// Returns the call of a module on tokens, their positions and its other inputs.
    fn chunk(
        &self,
        module: &'static str,
        tokens: &[i64],
        from: i64,
        more: &[Value],
    ) -> Result<Chunk, RuntimeError> {
        let variants = self.model.variants(self.replica, module)?;
        let record = &variants[0].programs[0].record;
        let positions: Vec<i64> = (from..).take(tokens.len()).collect();
        let (none, mut more) = (more.is_empty(), more.iter());
        let mut tokens_left = Some(tokens);
        let mut inputs = Vec::with_capacity(record.inputs.len());
        for input in &record.inputs {
            let values = match input.within {
                Some(_) => Some(&positions[..]),
                None => tokens_left.take(),
            };
            inputs.push(match values {
                Some(values) => {
                    let mut shape = vec![1; input.layout.shape.len()];
                    shape
                        .last_mut()
                        .into_iter()
                        .for_each(|last| *last = values.len());
                    Value::new(values, &shape)?
                }
                None => match (more.next(), input.default) {
                    (Some(value), _) => value.share(),
                    (None, Some(default)) if none => Value::filled(&input.layout, default)?,
                    (None, _) => break,
                },
            });
        }
        inputs.extend(more.map(Value::share));
        Ok(Chunk {
            module,
            inputs,
            tokens: tokens.len(),
        })
    }

    /// Fails if one of these calls, made after one another, would be refused. Changes no state.
    fn check<'c>(&mut self, chunks: impl Iterator<Item = &'c Chunk>) -> Result<(), RuntimeError> {
        let model = self.model;
        let mut before = Vec::new();
        for chunk in chunks {
            let Some(own) = self.own() else { return Ok(()) };
            model.check_for(own, chunk.module, &chunk.inputs, &before)?;
            if !before.contains(&chunk.module) {
                before.push(chunk.module);
            }
        }
        Ok(())
    }

    /// Makes a call of a prompt. A session that has `moved` in earlier calls of the prompt fails with it.
    fn feed(&mut self, chunk: &Chunk, moved: bool) -> Result<Outputs, RuntimeError> {
        let out = self.run(chunk.module, &chunk.inputs);
        if let Some(states) = &mut self.place.item {
            match &out {
                Ok(_) => states.position += chunk.tokens as i64,
                Err(error) if moved => states.fail(error),
                Err(_) => {}
            }
        }
        out
    }

    /// Returns a copy of a state.
    pub fn state(&mut self, name: &str) -> Result<Tensor, RuntimeError> {
        let copied = self.tensor(name)?.copied();
        copied.map(Tensor).map_err(refused)
    }

    /// Returns a state without a copy.
    pub(super) fn shared(&mut self, name: &str) -> Result<Tensor, RuntimeError> {
        self.tensor(name).map(Tensor)
    }

    /// Writes a state, from a tensor of its shape and dtype on any device.
    pub fn set_state(&mut self, name: &str, value: &impl Argument) -> Result<(), RuntimeError> {
        let given = arrays::tensor(value).own();
        let own = self.tensor(name)?;
        same(name, &given, &own)?;
        own.copy_from(&given).map_err(refused)?;
        if let Some(states) = &mut self.place.item {
            states.set(name);
        }
        Ok(())
    }

    /// Opens another session with copies of the states, as for several answers to one prompt.
    pub fn fork(&self) -> Result<Self, RuntimeError> {
        self.fork_on(self.model)
    }

    /// Like [`Self::fork`], with a session that borrows `model`, the model of this session: for an owner of both.
    pub fn fork_on<'n>(&self, model: &'n Model) -> Result<Session<'n>, RuntimeError> {
        let mut replicas = model.replicas.iter();
        let own = replicas.find(|replica| std::ptr::eq(*replica, self.replica));
        let replica = own.ok_or_else(|| RuntimeError::State {
            state: model.name().to_owned(),
            problem: "the session is of another model".to_owned(),
        })?;
        let mut fork = Session::on(model, replica)?;
        if let (Some(states), Some(copy)) = (&self.place.item, &mut fork.place.item) {
            states.usable()?;
            let copied = copy.take_over(states);
            copied.map_err(refused)?;
        }
        Ok(fork)
    }

    /// Writes the states that calls have used, and the position, to a safetensors file, whole or not at all.
    pub fn save(&mut self, path: &Path) -> Result<(), RuntimeError> {
        let header = self.header();
        let Some(states) = &mut self.place.item else {
            return Ok(());
        };
        states.usable()?;
        let ordered = states.order();
        ordered.map_err(refused)?;
        let all = states.tensors();
        let all: Vec<_> = all
            .map(|(name, tensor)| (name.to_owned(), Tensor(tensor.share())))
            .collect();
        saved::write(path, &header, &all, false).map_err(|error| file(path, error))
    }

    /// Reads states from a file that [`Self::save`] wrote; other states get their first values.
    ///
    /// Changes nothing, and fails with [`RuntimeError::SessionFile`], if the file is truncated or changed in any bit, of
    /// another model or format, or was written with other weights, whose states mean something else.
    pub fn load(&mut self, path: &Path) -> Result<(), RuntimeError> {
        let own = self.header();
        let read = saved::read(path, |header| header.fits(&own));
        let (header, read) = read.map_err(|error| file(path, error))?;
        let records = self.replica.programs().map(|program| &*program.record);
        let records: Vec<_> = records.collect();
        let sizes = sizes_of(&read, &records)?;
        let within = header.within(context(&sizes, &records));
        within.map_err(|problem| file(path, SavedError::Unfit(problem)))?;
        let Some(states) = &mut self.place.item else {
            return Ok(());
        };
        let filled = states.fill(&sizes, &read, &records);
        filled.map_err(refused)?;
        states.position = header.position;
        Ok(())
    }

    /// Returns the digest of those of its weights that have these names; none without any.
    pub(super) fn digest_of(&self, names: &BTreeSet<&str>) -> Result<Option<Digest>, RuntimeError> {
        let aliases = &self.replica.loader.aliases;
        let states = self.place.item.as_ref();
        let weights = states.map(|states| &states.weights);
        // Those of the caller change between calls.
        let Some(weights) = weights.filter(|weights| weights.digest().is_some()) else {
            return Ok(None);
        };
        let mut all = String::new();
        for name in names {
            let found = weights.any(name, aliases).map_err(refused)?;
            // Others are constants of the program.
            let Some(weight) = found else { continue };
            let tensor = Tensor(weight.handle().share());
            let digest = Digest::of(&tensor.to_bytes().map_err(refused)?);
            let (dtype, shape) = (tensor.dtype_name(), tensor.shape());
            all += &format!("{name} {dtype} {shape:?} {digest}\n");
        }
        Ok((!all.is_empty()).then(|| Digest::of(all.as_bytes())))
    }

    /// Returns the header of its file.
    fn header(&self) -> Header {
        let states = self.place.item.as_ref();
        let weights = states.and_then(|states| states.weights.digest());
        Header::new(self.model.name(), weights, self.at(), Holds::Session)
    }

    /// Returns the device of its calls.
    pub fn device(&self) -> Device {
        self.replica.device
    }

    /// Returns the bytes of the states that calls have used.
    pub fn bytes(&self) -> u64 {
        let states = self.place.item.iter();
        let tensors = states.flat_map(States::tensors);
        let bytes = tensors.map(|(_, tensor)| {
            let meta = tensor.meta();
            meta.dtype()
                .map_or(0, |dtype| bytes_of(meta.sizes(), dtype)) as u64
        });
        bytes.sum()
    }

    /// Returns the tensor of a state of the model.
    fn tensor(&mut self, name: &str) -> Result<Handle, RuntimeError> {
        let replica = self.replica;
        let unknown = || RuntimeError::State {
            state: name.to_owned(),
            problem: NO_STATE.to_owned(),
        };
        let states = self.place.item.as_mut().ok_or_else(unknown)?;
        let ordered = states.order();
        ordered.map_err(refused)?;
        let programs = replica.programs().map(|program| &*program.record);
        states.tensor(name, programs)?.ok_or_else(unknown)
    }
}

/// One call of a prompt: a module, its inputs, and the number of tokens in them.
struct Chunk {
    module: &'static str,
    inputs: Vec<Value>,
    tokens: usize,
}

/// Fails unless two tensors have one dtype and shape.
fn same(name: &str, given: &Handle, own: &Handle) -> Result<(), RuntimeError> {
    let (meta, own) = (given.meta(), own.meta());
    if meta.dense() && meta.dtype() == own.dtype() && meta.sizes() == own.sizes() {
        return Ok(());
    }
    Err(RuntimeError::State {
        state: name.to_owned(),
        problem: format!(
            "it is {} {:?}, not {} {:?}",
            own.dtype_name(),
            own.sizes(),
            meta.dtype_name(),
            meta.sizes()
        ),
    })
}

/// Returns the sizes of the bucketed dimensions of saved states. Fails unless each is one of these programs.
fn sizes_of(
    read: &BTreeMap<String, Tensor>,
    programs: &[&record::Program],
) -> Result<Sizes, RuntimeError> {
    let mut sizes = Sizes::new();
    for (name, tensor) in read {
        let wrong = |problem: String| RuntimeError::State {
            state: name.clone(),
            problem,
        };
        let states = programs.iter().flat_map(|program| &program.states);
        let mut known = states.filter(|state| state.name == *name).peekable();
        let Some(first) = known.peek().map(|state| &state.layout) else {
            return Err(wrong(NO_STATE.to_owned()));
        };
        let (dtype, shape) = (tensor.dtype_name(), tensor.shape());
        let fits = |state: &&record::State| {
            tensor.dtype() == Some(state.layout.dtype) && state.layout.shape == shape
        };
        let Some(record) = known.find(fits) else {
            let (expected, sizes) = (first.dtype, &first.shape);
            let problem =
                format!("it is {expected} {sizes:?} or another bucket's, not {dtype} {shape:?}");
            return Err(wrong(problem));
        };
        for (size, dim) in shape.iter().zip(&record.dims) {
            let Some(dim) = dim else { continue };
            if *sizes.entry(dim.clone()).or_insert(*size) != *size {
                return Err(wrong(format!("two states have different sizes of `{dim}`")));
            }
        }
    }
    Ok(sizes)
}

/// Returns the number of tokens that states of these sizes have room for; none if no program takes positions.
fn context(sizes: &Sizes, programs: &[&record::Program]) -> Option<i64> {
    let inputs = || {
        let each = programs.iter();
        each.flat_map(|program| program.inputs.iter().map(move |input| (program, input)))
    };
    let room = |(program, input): (&&record::Program, &record::Input)| {
        let dim = input.within.as_ref()?;
        sizes.get(dim).or_else(|| program.sizes.get(dim)).copied()
    };
    inputs().filter_map(room).max()
}

fn file(path: &Path, error: SavedError) -> RuntimeError {
    let problem = match error {
        SavedError::Unfit(problem) => problem,
        SavedError::Io(error) => error.to_string(),
    };
    RuntimeError::SessionFile {
        path: path.to_owned(),
        problem,
    }
}

#[cfg(test)]
mod tests;
