//! A session: states that are kept from call to call, for one caller.

use std::{
    cell::RefCell,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, TryLockError},
};

use precast_runtime::{Outputs, RuntimeError, Session as Inner, Value};
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};
use self_cell::self_cell;

use crate::{
    ending::Inside,
    errors,
    fork::Process,
    inputs,
    loaded::Loaded,
    tensors::{self, Library},
};

self_cell!(
    /// A session and the model that it borrows.
    struct Owned {
        owner: Arc<Loaded>,
        #[not_covariant]
        dependent: Inner,
    }
);

/// States of a model for one caller, from `model.session()`.
///
/// One thread at a time may use it: a second one is refused with `Busy`.
#[pyclass(frozen, weakref, module = "precast")]
pub struct Session {
    /// None after `close`.
    held: Mutex<Option<Owned>>,
    process: Process,
}

impl Session {
    pub fn open(py: Python<'_>, loaded: Arc<Loaded>, process: Process) -> PyResult<Self> {
        let opened = Inside::enter(py)?.detach(py, || {
            Owned::try_new(loaded, |loaded| loaded.model.session())
        });
        let opened = opened.map_err(|error| errors::runtime(&error))?;
        Ok(Self::of(opened, process))
    }

    fn of(held: Owned, process: Process) -> Self {
        Self {
            held: Mutex::new(Some(held)),
            process,
        }
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, Option<Owned>>> {
        self.process.check(|| "the session".to_owned())?;
        match self.held.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(guard)) => Ok(guard.into_inner()),
            Err(TryLockError::WouldBlock) => Err(errors::busy(
                "another thread uses the session",
                "give each thread its own session, or use a lock",
            )),
        }
    }

    /// Uses the session without the GIL.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Inner<'_>) -> Result<R, RuntimeError> + Send,
    ) -> PyResult<R> {
        let inside = Inside::enter(py)?;
        let mut guard = self.lock()?;
        let Some(owned) = guard.as_mut() else {
            return Err(closed());
        };
        let done = inside.detach(py, || owned.with_dependent_mut(|_, session| work(session)));
        done.map_err(|error| errors::runtime(&error))
    }

    fn answer(&self, py: Python<'_>, outputs: Outputs, library: Library) -> PyResult<Py<PyAny>> {
        let _inside = Inside::enter(py)?;
        let loaded = self.loaded()?;
        loaded.answer(py, outputs, library)
    }

    /// Takes the inputs of a module beside tokens and positions.
    fn others(
        &self,
        module: &str,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<Value>> {
        let loaded = self.loaded()?;
        let programs = loaded.model.programs(module);
        let inputs = programs.first().map_or(&[][..], |program| &program.inputs);
        inputs::others(module, inputs, args, kwargs)
    }

    fn loaded(&self) -> PyResult<Arc<Loaded>> {
        let guard = self.lock()?;
        let owned = guard.as_ref();
        owned
            .map(|owned| owned.borrow_owner().clone())
            .ok_or_else(closed)
    }
}

/// Returns the error of a closed session.
fn closed() -> PyErr {
    errors::unready(
        "the session is closed",
        "open another with `model.session()`",
    )
}

#[pymethods]
impl Session {
    /// Runs a module on tensors and on the states of this session.
    #[pyo3(signature = (module, /, *args, **kwargs))]
    fn run(
        &self,
        py: Python<'_>,
        module: &str,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let _inside = Inside::enter(py)?;
        let loaded = self.loaded()?;
        let (inputs, library) = inputs::of(args, kwargs, loaded.variants(module)?)?;
        let outputs = self.with(py, |session| {
            // Both forms borrow the session; one of them runs.
            let session = RefCell::new(session);
            inputs.run(
                true,
                |tensors| session.borrow_mut().run(module, tensors),
                |named| session.borrow_mut().run_named(module, named),
            )
        })?;
        drop(inputs);
        loaded.answer(py, outputs, library)
    }

    /// Runs the module `prefill` on the tokens of a prompt, after the tokens of the session. Returns the outputs for
    /// the last tokens. Further arguments are the module's other inputs, in order or by name: tensors, or one number
    /// for all elements.
    #[pyo3(signature = (tokens, /, *args, **kwargs))]
    fn prefill(
        &self,
        py: Python<'_>,
        tokens: Vec<i64>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let others = self.others("prefill", args, kwargs)?;
        let outputs = self.with(py, |session| session.prefill(&tokens, &others))?;
        self.answer(py, outputs, tensors::imported(py))
    }

    /// Runs the module `decode` on the next token, as `prefill` does.
    #[pyo3(signature = (token, /, *args, **kwargs))]
    fn decode(
        &self,
        py: Python<'_>,
        token: i64,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let others = self.others("decode", args, kwargs)?;
        let outputs = self.with(py, |session| session.decode(token, &others))?;
        self.answer(py, outputs, tensors::imported(py))
    }

    /// The number of tokens that `prefill` and `decode` gave it.
    #[getter]
    fn position(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, |session| Ok(session.position()))
    }

    /// Returns to an earlier position: the tokens after it are dropped.
    fn seek(&self, py: Python<'_>, position: usize) -> PyResult<()> {
        self.with(py, |session| session.seek(position))
    }

    /// Gives every state its first value again.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |session| {
            session.reset();
            Ok(())
        })
    }

    /// Opens another session with a copy of the states.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        let inside = Inside::enter(py)?;
        let mut guard = self.lock()?;
        let Some(owned) = guard.as_mut() else {
            return Err(closed());
        };
        let forked = inside.detach(py, || {
            owned.with_dependent_mut(|loaded, session| {
                Owned::try_new(loaded.clone(), |loaded| session.fork_on(&loaded.model))
            })
        });
        let forked = forked.map_err(|error: RuntimeError| errors::runtime(&error))?;
        Ok(Self::of(forked, self.process))
    }

    /// A copy of one state.
    fn state(&self, py: Python<'_>, name: &str) -> PyResult<Py<PyAny>> {
        let tensor = self.with(py, |session| session.state(name))?;
        tensors::give(py, &tensor, tensors::imported(py))
    }

    /// Writes the states to a safetensors file.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |session| session.save(&path))
    }

    /// Reads the states from a file of `save`.
    fn load(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        self.with(py, |session| session.load(&path))
    }

    /// The bytes of its states.
    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |session| Ok(session.bytes()))
    }

    /// Frees the session's place for another.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inside = Inside::enter(py)?;
        let held = self.lock()?.take();
        inside.detach(py, || drop(held));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<Py<PyAny>> {
        Err(pyo3::exceptions::PyTypeError::new_err(
            "a session can't be pickled: write its states to a file with `save`",
        ))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match (self.position(py), self.bytes(py)) {
            (Ok(position), Ok(bytes)) => format!("<precast.Session at {position}, {bytes} bytes>"),
            _ => "<precast.Session, in use or closed>".to_owned(),
        }
    }
}
