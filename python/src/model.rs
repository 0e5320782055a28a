//! A loaded model.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use precast_runtime::Model as Inner;
use precast_store::record::Program;
use pyo3::{
    prelude::*,
    types::{PyDict, PyList, PyTuple},
};

use crate::{
    ending::Inside,
    errors,
    fork::Process,
    loaded::{Held, Loaded, own_weights},
    module::{Module, call, describe},
    session::Session,
    tensors, values,
};

/// A model of one release, ready on one or more devices. `precast.load` returns it.
///
/// Its modules are attributes: `model.encode(x)`. Share it between threads.
#[pyclass(frozen, weakref, module = "precast")]
pub struct Model {
    modules: Vec<String>,
    held: Arc<Held>,
    /// The modules that were asked for.
    known: Mutex<HashMap<String, Py<Module>>>,
    /// The function that loads it again, for `pickle`.
    again: Option<Py<PyAny>>,
}

impl Model {
    pub fn new(loaded: Loaded, again: Option<Py<PyAny>>) -> Self {
        let model = &loaded.model;
        let modules = model.modules().into_iter().map(str::to_owned).collect();
        let held = Held {
            name: model.name().to_owned(),
            loaded: RwLock::new(Some(Arc::new(loaded))),
            process: Process::this(),
        };
        Self {
            modules,
            held: Arc::new(held),
            known: Mutex::default(),
            again,
        }
    }

    fn loaded(&self) -> PyResult<Arc<Loaded>> {
        self.held.loaded()
    }

    /// Returns one of its modules, the same object each time.
    fn module(&self, py: Python<'_>, name: &str) -> PyResult<Py<Module>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = known.get(name) {
            return Ok(module.clone_ref(py));
        }
        let made = Module {
            name: name.to_owned(),
            held: self.held.clone(),
        };
        let made = Py::new(py, made)?;
        known.insert(name.to_owned(), made.clone_ref(py));
        Ok(made)
    }
}

#[pymethods]
impl Model {
    /// The model's name.
    #[getter]
    fn name(&self) -> &str {
        &self.held.name
    }

    /// The names of its modules, sorted.
    #[getter]
    fn modules<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, &self.modules)
    }

    /// The digest of its weight set; `None` for a model without weights, and for one with the caller's own tensors.
    #[getter]
    fn weights(&self) -> PyResult<Option<String>> {
        Ok(self
            .loaded()?
            .model
            .weights()
            .map(|digest| digest.to_string()))
    }

    /// Counters by module and bucket, the requests, and the programs that are slower than eager, which answers for them.
    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let loaded = self.loaded()?;
        let inside = Inside::enter(py)?;
        let stats = inside.detach(py, || {
            serde_json::json!({
                "modules": loaded.model.stats(),
                "devices": loaded.model.devices(),
                "seconds": seconds(&loaded.model),
                "requests": loaded.model.counts().calls,
                "slower": slower(&loaded.model),
            })
        });
        values::object(py, &stats)
    }

    /// Waits for the device's checks of the values of all calls so far, and raises what an unread one found.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let loaded = self.loaded()?;
        let inside = Inside::enter(py)?;
        let checked = inside.detach(py, || loaded.model.check());
        checked.map_err(|error| errors::runtime(&error))
    }

    /// Loads every program, and runs each once on padding.
    fn warm_up(&self, py: Python<'_>) -> PyResult<()> {
        let loaded = self.loaded()?;
        let inside = Inside::enter(py)?;
        let done = inside.detach(py, || loaded.model.warm_up());
        done.map_err(|error| errors::runtime(&error))
    }

    /// Runs a module, as `model.<module>(...)` does.
    #[pyo3(signature = (module, /, *args, **kwargs))]
    fn run(
        &self,
        py: Python<'_>,
        module: &str,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let loaded = self.loaded()?;
        call(py, &loaded, module, args, kwargs)
    }

    /// Opens a session: states that are kept from call to call.
    fn session(&self, py: Python<'_>) -> PyResult<Session> {
        Session::open(py, self.loaded()?, self.held.process)
    }

    /// The bytes of the states of one session.
    #[getter]
    fn session_bytes(&self) -> PyResult<u64> {
        Ok(self.loaded()?.model.session_bytes())
    }

    /// Makes every later call use other weights: those of a release, as `"minilm@7"`, or the caller's own tensors by
    /// name, as `load` takes them.
    fn swap(&self, py: Python<'_>, weights: &Bound<'_, PyAny>) -> PyResult<()> {
        let inside = Inside::enter(py)?;
        let loaded = self.loaded()?;
        let swapped = match weights.cast::<PyDict>() {
            Ok(own) => {
                let own = own_weights(own, &loaded.devices)?;
                inside.detach(py, || loaded.model.swap(&own))
            }
            Err(_) => {
                let release: String = weights.extract()?;
                inside.detach(py, || {
                    let weights = loaded.runtime.weights_of(&release)?;
                    loaded.model.swap(&weights)
                })
            }
        };
        swapped.map_err(|error| errors::runtime(&error))
    }

    /// Frees the model when its running calls are done. Later calls are refused.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let inside = Inside::enter(py)?;
        let inner = self
            .held
            .loaded
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        inside.detach(py, || drop(inner));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __getattr__(slf: &Bound<'_, Self>, name: &str) -> PyResult<Py<Module>> {
        let own = slf.get();
        if name.starts_with("__") || !own.modules.iter().any(|module| module == name) {
            let modules = own.modules.join(", ");
            return Err(tensors::no_attribute(format!(
                "the model `{}` has no module `{name}`; it has {modules}",
                own.held.name
            )));
        }
        own.module(slf.py(), name)
    }

    fn __getitem__(slf: &Bound<'_, Self>, name: &str) -> PyResult<Py<Module>> {
        let own = slf.get();
        own.loaded()?.variants(name)?;
        own.module(slf.py(), name)
    }

    fn __dir__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyList>> {
        let names = slf.get_type().dir()?;
        for module in &slf.get().modules {
            names.append(module)?;
        }
        Ok(names)
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }

    fn __reduce__(&self, py: Python<'_>) -> PyResult<(Py<PyAny>, Py<PyTuple>)> {
        match &self.again {
            Some(again) => Ok((again.clone_ref(py), PyTuple::empty(py).unbind())),
            None => Err(pyo3::exceptions::PyTypeError::new_err(format!(
                "the model `{}` can't be pickled: its weights are tensors of this process; load it in the other one",
                self.held.name
            ))),
        }
    }

    fn __repr__(&self) -> String {
        let name = &self.held.name;
        let Ok(loaded) = self.loaded() else {
            return format!("<precast.Model {name}, closed>");
        };
        let mut text = format!("<precast.Model {name}");
        for module in &self.modules {
            text.push_str("\n  ");
            text.push_str(&describe(&loaded, module));
        }
        text.push('>');
        text
    }
}

/// Returns the programs that eager answers because it was faster in the build, and by how many times.
fn slower(model: &Inner) -> Vec<serde_json::Value> {
    let row = |program: &Program| {
        let times = program.seconds(false).zip(program.seconds(true));
        serde_json::json!({
            "module": program.module,
            "bucket": program.bucket(),
            "sizes": program.dynamic.is_none().then_some(&program.sizes),
            "times": times.map(|(artifact, eager)| artifact / eager),
        })
    };
    model.faster_as_eager().into_iter().map(row).collect()
}

/// Returns the times from the beginning of a model's load.
fn seconds(model: &Inner) -> serde_json::Value {
    let times = model.timings();
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    serde_json::json!({
        "loaded": times.loaded.as_secs_f64(),
        "first_answer": seconds(times.first_answer),
        "complete": seconds(times.complete),
    })
}
