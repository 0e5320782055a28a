//! A session: states that stay from call to call, for one caller.

use std::path::Path;

use precast_store::record;

use super::{
    Model, RuntimeError, Tensor,
    arrays::{self, Argument},
    ffi::Handle,
    layout::bytes_of,
    model::Caller,
    outputs::Outputs,
    pool::Place,
    replica::Replica,
    states::States,
    tensors,
};

/// The states of a model for one caller, from [`Model::session`].
///
/// A module that keeps something from call to call, as a cache of keys and values, runs in a session. Modules share
/// states by name: one fills what another reads. Sessions never see each other's states, and all of them use one copy of
/// the weights: those that the model had when the session was opened, also after [`Model::swap`].
///
/// A call that is refused (an error about its inputs or its sizes) leaves the states as they were. After one that fails
/// while it runs, the states may be half written: every later call fails with [`RuntimeError::SessionFailed`], until
/// [`Self::reset`] or [`Self::load`].
pub struct Session<'m> {
    model: &'m Model,
    replica: &'m Replica,
    place: Place<'m, States>,
}

impl<'m> Session<'m> {
    fn open(
        model: &'m Model,
        replica: &'m Replica,
        mut place: Place<'m, States>,
    ) -> Result<Self, RuntimeError> {
        let states = place
            .item
            .get_or_insert_with(|| States::new(&replica.loader));
        let reopened = states.reopen();
        reopened.map_err(|reason| RuntimeError::Array { reason })?;
        Ok(Self {
            model,
            replica,
            place,
        })
    }

    /// Runs a module on inputs in the module's order, as [`Model::run`] does, and on the states of this session.
    ///
    /// A module without states runs as it does without a session.
    pub fn run<A: Argument>(
        &mut self,
        module: &str,
        inputs: &[A],
    ) -> Result<Outputs, RuntimeError> {
        let model = self.model;
        model.run_for(self.caller(), module, inputs)
    }

    /// Runs a module on inputs by name, as [`Model::run_named`] does, and on the states of this session.
    pub fn run_named<A: Argument>(
        &mut self,
        module: &str,
        inputs: &[(&str, A)],
    ) -> Result<Outputs, RuntimeError> {
        let model = self.model;
        model.run_named_for(self.caller(), module, inputs)
    }

    fn caller(&mut self) -> Caller<'_> {
        Caller {
            replica: self.replica,
            states: self.place.item.as_mut(),
            wait: self.model.wait(),
        }
    }

    /// Gives every state its first value again.
    pub fn reset(&mut self) -> Result<(), RuntimeError> {
        let reset = self.place.item.as_mut().map_or(Ok(()), States::reset);
        reset.map_err(|reason| RuntimeError::Array { reason })
    }

    /// Returns a copy of a state.
    pub fn state(&mut self, name: &str) -> Result<Tensor, RuntimeError> {
        let copied = self.tensor(name)?.copied();
        copied
            .map(Tensor)
            .map_err(|reason| RuntimeError::Array { reason })
    }

    /// Writes a state, from a tensor of its shape and dtype on any device.
    pub fn set_state(&mut self, name: &str, value: &impl Argument) -> Result<(), RuntimeError> {
        let given = arrays::tensor(value).own();
        let own = self.tensor(name)?;
        same(name, &given, own)?;
        own.copy_from(&given)
            .map_err(|reason| RuntimeError::Array { reason })
    }

    /// Opens another session with copies of the states, as for several answers to one prompt.
    pub fn fork(&self) -> Result<Self, RuntimeError> {
        let mut fork = self.model.session_on(self.replica)?;
        let Some(states) = &self.place.item else {
            return Ok(fork);
        };
        states.usable()?;
        for (name, tensor) in states.tensors() {
            fork.set_state(name, &Tensor(tensor.share()))?;
        }
        Ok(fork)
    }

    /// Writes the states that calls have used to a safetensors file, whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), RuntimeError> {
        let Some(states) = &self.place.item else {
            return Ok(());
        };
        states.usable()?;
        let all = states.tensors();
        let all: Vec<_> = all
            .map(|(name, tensor)| (name.to_owned(), Tensor(tensor.share())))
            .collect();
        tensors::write(path, &all).map_err(|error| file(path, error))
    }

    /// Reads states from a file that [`Self::save`] wrote; the others get their first values. A file of another model,
    /// or one that is cut short, changes nothing.
    pub fn load(&mut self, path: &Path) -> Result<(), RuntimeError> {
        let bytes = std::fs::read(path).map_err(|error| file(path, error))?;
        let read = tensors::read(&bytes).map_err(|error| file(path, error))?;
        let mut pairs = Vec::with_capacity(read.len());
        for (name, tensor) in &read {
            let own = self.tensor(name)?;
            same(name, &tensor.0, own)?;
            pairs.push((own.share(), tensor));
        }
        self.reset()?;
        for (own, tensor) in pairs {
            let copied = own.copy_from(&tensor.0);
            copied.map_err(|reason| RuntimeError::Array { reason })?;
        }
        Ok(())
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
    fn tensor(&mut self, name: &str) -> Result<&Handle, RuntimeError> {
        let replica = self.replica;
        let unknown = || RuntimeError::State {
            state: name.to_owned(),
            problem: "the model has no state of this name".to_owned(),
        };
        let states = self.place.item.as_mut().ok_or_else(unknown)?;
        let programs = replica.programs().map(|program| &*program.record);
        states.tensor(name, programs)?.ok_or_else(unknown)
    }
}

impl Model {
    /// Opens a session, on the device with the fewest calls under way: states for one caller, with their first values.
    ///
    /// States are allocated, and CUDA graphs captured, once for each of the sessions that are open at once; later
    /// sessions take them over. As many can be open as [`Runtime::sessions`](super::Runtime::sessions) says; beyond it
    /// this waits as a call does, and fails with [`RuntimeError::SessionsBusy`].
    pub fn session(&self) -> Result<Session<'_>, RuntimeError> {
        self.session_on(self.replica(&[]))
    }

    /// Returns the bytes of a session's states, each at its largest bucket.
    pub fn session_bytes(&self) -> u64 {
        let first = self.replicas.first().into_iter();
        record::session_bytes(
            first
                .flat_map(Replica::programs)
                .map(|program| &*program.record),
        )
    }

    fn session_on<'m>(&'m self, replica: &'m Replica) -> Result<Session<'m>, RuntimeError> {
        let place = replica.sessions.take(self.wait());
        let place = place.ok_or_else(|| RuntimeError::SessionsBusy {
            model: self.name.clone(),
            sessions: replica.sessions.limit(),
        })?;
        replica.admit(|| Session::open(self, replica, place))
    }
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

fn file(path: &Path, error: impl std::error::Error) -> RuntimeError {
    RuntimeError::State {
        state: path.display().to_string(),
        problem: error.to_string(),
    }
}
