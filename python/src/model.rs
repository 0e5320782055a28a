//! A loaded model, its modules, and their calls.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use precast_runtime::{
    Inputs as Copies, Loading, Model as Inner, Runtime, WeightSet,
    cuda::{Graphs, Stream},
};
use precast_store::{Device, Store};
use pyo3::{
    intern,
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyList, PyTuple},
};

use crate::{
    ending::Inside,
    errors,
    fork::Process,
    inputs::{self, Inputs},
    loaded::{Loaded, device},
    session::Session,
    tensors::{self, Library},
};

/// Loads a release. `precast.load` is the documented form.
#[pyfunction]
#[pyo3(signature = (store, model, *, devices, libtorch, untried, instances, sessions, loading, graphs, copy, wait, weights, again))]
#[allow(clippy::too_many_arguments)]
pub fn load(
    py: Python<'_>,
    store: PathBuf,
    model: String,
    devices: Vec<String>,
    libtorch: Option<PathBuf>,
    untried: bool,
    instances: usize,
    sessions: usize,
    loading: &str,
    graphs: &str,
    copy: bool,
    wait: Option<f64>,
    weights: Option<&Bound<'_, PyDict>>,
    again: Option<Py<PyAny>>,
) -> PyResult<Model> {
    let devices: Vec<Device> = devices
        .iter()
        .map(|name| device(name))
        .collect::<PyResult<_>>()?;
    let inside = Inside::enter(py);
    let loading = match loading {
        "before" => Loading::Before,
        "background" => Loading::Background,
        "on-demand" => Loading::OnDemand,
        other => {
            return Err(errors::bad_input(
                format!("loading=`{other}` is unknown"),
                "it is before, background or on-demand",
            ));
        }
    };
    let graphs = match graphs {
        "as-built" => Graphs::AsBuilt,
        "always" => Graphs::Always,
        "never" => Graphs::Never,
        other => {
            return Err(errors::bad_input(
                format!("graphs=`{other}` is unknown"),
                "it is as-built, always or never",
            ));
        }
    };
    let wait = wait.map(Duration::try_from_secs_f64).transpose();
    let wait =
        wait.map_err(|error| errors::bad_input(format!("wait: {error}"), "seconds, from 0 on"))?;
    let open = || -> Result<(Runtime, Store), PyErr> {
        let store = Store::open(&store).map_err(|error| errors::store(&error))?;
        Runtime::libtorch(libtorch.as_deref(), untried).map_err(|error| errors::runtime(&error))?;
        let runtime =
            Runtime::new(&store, devices.clone()).map_err(|error| errors::runtime(&error))?;
        Ok((runtime, store))
    };
    let (runtime, store) = inside.detach(py, open)?;
    let mut runtime = runtime
        .instances(instances)
        .sessions(sessions)
        .loading(loading)
        .graphs(graphs)
        .inputs(if copy {
            Copies::MayCopy
        } else {
            Copies::AsGiven
        });
    if let Some(wait) = wait {
        runtime = runtime.wait_limit(wait);
    }
    let loaded = match weights {
        None => inside.detach(py, || runtime.load(&model)),
        Some(weights) => {
            let weights = own_weights(weights, &devices)?;
            inside.detach(py, || runtime.load_on(&model, &weights))
        }
    };
    let loaded = loaded.map_err(|error| errors::runtime(&error))?;
    let loaded = Loaded::of(loaded, devices, runtime, store);
    Ok(Model::new(loaded, again))
}

/// Returns a weight set of the caller's tensors on the first of these devices.
fn own_weights(weights: &Bound<'_, PyDict>, devices: &[Device]) -> PyResult<WeightSet> {
    let mut tensors = BTreeMap::new();
    for (name, tensor) in weights {
        let name: String = name.extract()?;
        let tensor = tensors::take_weight(&tensor, &name)?;
        tensors.insert(name, tensor);
    }
    let device = devices.first().copied().unwrap_or(Device::Cpu);
    WeightSet::of(tensors, device).map_err(|error| errors::runtime(&error))
}

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

/// A model until it is closed, for the object and its modules.
struct Held {
    name: String,
    /// None after `close`.
    loaded: RwLock<Option<Arc<Loaded>>>,
    process: Process,
}

impl Held {
    /// Returns the model, unless it is closed or a parent's.
    fn loaded(&self) -> PyResult<Arc<Loaded>> {
        self.process
            .check(|| format!("the model `{}`", self.name))?;
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        loaded.clone().ok_or_else(|| {
            errors::unready(
                format!("the model `{}` is closed", self.name),
                "load it again with `precast.load`",
            )
        })
    }
}

impl Model {
    fn new(loaded: Loaded, again: Option<Py<PyAny>>) -> Self {
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

    /// Counters by module and bucket, and the requests.
    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let loaded = self.loaded()?;
        let inside = Inside::enter(py);
        let stats = inside.detach(py, || {
            serde_json::json!({
                "modules": loaded.model.stats(),
                "devices": loaded.model.devices(),
                "seconds": seconds(&loaded.model),
            })
        });
        let text = stats.to_string();
        let json = py.import(intern!(py, "json"))?;
        Ok(json.call_method1(intern!(py, "loads"), (text,))?.unbind())
    }

    /// Loads every program, and runs each once on padding.
    fn warm_up(&self, py: Python<'_>) -> PyResult<()> {
        let loaded = self.loaded()?;
        let inside = Inside::enter(py);
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
        let inside = Inside::enter(py);
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
    fn close(&self, py: Python<'_>) {
        let inner = self
            .held
            .loaded
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        Inside::enter(py).detach(py, || drop(inner));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
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

/// Returns a module with its inputs and buckets, for people.
fn describe(loaded: &Loaded, module: &str) -> String {
    let programs = loaded.model.programs(module);
    let inputs = loaded.variants.get(module).map(|variants| {
        let each = variants.iter().map(|variant| variant.arguments.join(", "));
        each.collect::<Vec<_>>().join(" | ")
    });
    let mut buckets: Vec<String> = programs
        .iter()
        .filter(|program| program.dynamic.is_none() && !program.steps.is_empty())
        .map(|program| precast_store::record::bucket_name(&program.sizes))
        .collect();
    buckets.dedup();
    if programs.iter().any(|program| program.dynamic.is_some()) {
        buckets.push("any size within bounds".to_owned());
    }
    let buckets = buckets.join("; ");
    format!("{module}({}) [{buckets}]", inputs.unwrap_or_default())
}

/// A module of a model, to be called: `model.encode(x)`.
#[pyclass(frozen, weakref, module = "precast")]
pub struct Module {
    name: String,
    held: Arc<Held>,
}

impl Module {
    fn loaded(&self) -> PyResult<Arc<Loaded>> {
        self.held.loaded()
    }
}

#[pymethods]
impl Module {
    /// Runs the module on tensors, in order or by name, and returns its outputs as it nests them.
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__(
        &self,
        py: Python<'_>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let loaded = self.loaded()?;
        call(py, &loaded, &self.name, args, kwargs)
    }

    /// Runs the module in a thread of the event loop's executor: `await model.encode.aio(x)`.
    ///
    /// The inputs are taken, and the current CUDA stream is noted, before it returns.
    #[pyo3(signature = (*args, **kwargs))]
    fn aio(
        &self,
        py: Python<'_>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        static SUBMIT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let submit = SUBMIT.get_or_try_init(py, || {
            let module = py.import("precast.aio")?;
            Ok::<_, PyErr>(module.getattr("submit")?.unbind())
        })?;
        let _inside = Inside::enter(py);
        let loaded = self.loaded()?;
        let (inputs, library) = inputs::of(args, kwargs, loaded.variants(&self.name)?)?;
        let call = Call {
            streams: streams_of(&loaded)?,
            held: Mutex::new(Some((loaded, inputs))),
            module: self.name.clone(),
            library,
        };
        submit.call1(py, (call,))
    }

    /// The module's name.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The names of its flat inputs, in order; of the first variant if there are several.
    #[getter]
    fn inputs(&self) -> PyResult<Vec<String>> {
        let loaded = self.loaded()?;
        Ok(loaded.variants(&self.name)?[0].inputs.clone())
    }

    /// The names of its outputs, in order.
    #[getter]
    fn outputs(&self) -> PyResult<Vec<String>> {
        let loaded = self.loaded()?;
        let programs = loaded.model.programs(&self.name);
        let outputs = programs.first().map(|program| &program.outputs);
        Ok(outputs
            .into_iter()
            .flatten()
            .map(|output| output.name.clone())
            .collect())
    }

    /// The names of the parameters and buffers that its programs read, sorted.
    #[getter]
    fn weights(&self) -> PyResult<Vec<String>> {
        let loaded = self.loaded()?;
        let programs = loaded.model.programs(&self.name);
        let bindings = programs.iter().flat_map(|program| &program.steps);
        let names = bindings.flat_map(|step| step.binding.values().cloned());
        Ok(names.collect::<BTreeSet<_>>().into_iter().collect())
    }

    /// The sizes of its compiled buckets.
    #[getter]
    fn buckets<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let loaded = self.loaded()?;
        let buckets = PyList::empty(py);
        for program in loaded.model.programs(&self.name) {
            if program.dynamic.is_none() && !program.steps.is_empty() {
                let bucket = PyDict::new(py);
                for (dimension, size) in &program.sizes {
                    bucket.set_item(dimension, size)?;
                }
                if !buckets.contains(&bucket)? {
                    buckets.append(bucket)?;
                }
            }
        }
        Ok(buckets)
    }

    fn __repr__(&self) -> String {
        match self.loaded() {
            Ok(loaded) => format!("<precast.Module {}>", describe(&loaded, &self.name)),
            Err(_) => format!("<precast.Module {}, closed>", self.name),
        }
    }
}

/// Runs a module of a model: without the GIL, on the current stream.
fn call(
    py: Python<'_>,
    loaded: &Loaded,
    module: &str,
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
) -> PyResult<Py<PyAny>> {
    let inside = Inside::enter(py);
    let (inputs, library) = inputs::of(args, kwargs, loaded.variants(module)?)?;
    let outputs = inside.detach(py, || loaded.run(module, &inputs));
    // Freed with the GIL: their memory is Python's.
    drop(inputs);
    let outputs = outputs.map_err(|error| errors::runtime(&error))?;
    loaded.answer(py, outputs, library)
}

/// Returns the streams that are current on this thread, for the CUDA devices of a model.
fn streams_of(loaded: &Loaded) -> PyResult<Vec<Stream>> {
    let mut streams = Vec::new();
    for device in &loaded.devices {
        if let Device::Cuda(ordinal) = device {
            streams.push(Stream::current(*ordinal).map_err(|reason| errors::torch(&reason))?);
        }
    }
    Ok(streams)
}

/// A call whose inputs are taken, for another thread.
#[pyclass(frozen, module = "precast")]
pub struct Call {
    streams: Vec<Stream>,
    held: Mutex<Option<(Arc<Loaded>, Inputs)>>,
    module: String,
    library: Library,
}

#[pymethods]
impl Call {
    /// Runs it once, on the streams that were current where it was made.
    fn run(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let inside = Inside::enter(py);
        let held = self
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let Some((loaded, inputs)) = held else {
            return Err(errors::bad_input("the call ran already", "make a new one"));
        };
        let entered: Result<Vec<_>, _> = self.streams.iter().map(Stream::enter).collect();
        let _entered = entered.map_err(|reason| errors::torch(&reason))?;
        let outputs = inside.detach(py, || loaded.run(&self.module, &inputs));
        drop(inputs);
        let outputs = outputs.map_err(|error| errors::runtime(&error))?;
        loaded.answer(py, outputs, self.library)
    }
}
