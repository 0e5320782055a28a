//! A module of a model, and its calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use precast_runtime::cuda::{self, Stream};
use precast_store::Device;
use pyo3::{
    prelude::*,
    sync::PyOnceLock,
    types::{PyDict, PyList, PyTuple},
};

use crate::{
    ending::Inside,
    errors,
    inputs::{self, Inputs},
    loaded::{Held, Loaded},
    tensors::Library,
};

/// A module of a model, to be called: `model.encode(x)`.
#[pyclass(frozen, weakref, module = "precast")]
pub struct Module {
    pub name: String,
    pub held: Arc<Held>,
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
        let _inside = Inside::enter(py)?;
        let loaded = self.loaded()?;
        let (inputs, library) = loaded.inputs(&self.name, args, kwargs)?;
        let call = Call {
            streams: streams_of(&loaded)?,
            held: Mutex::new(Some((loaded, inputs))),
            module: self.name.clone(),
            library,
        };
        submit.call1(py, (call,))
    }

    /// Runs the module on the tensors of a list, in order, and empties the list. A tensor that nothing else refers to is
    /// freed as soon as the module has read it.
    ///
    /// Returns the outputs, and the device's notes of the call's values, if there are any: the call does not wait for
    /// them.
    fn _run_taking(
        &self,
        py: Python<'_>,
        tensors: &Bound<'_, PyList>,
    ) -> PyResult<(Py<PyAny>, Option<Notes>)> {
        let inside = Inside::enter(py)?;
        let loaded = self.loaded()?;
        let (inputs, library) = inputs::taken(tensors, loaded.variants(&self.name)?)?;
        let outputs = inside.detach(py, || loaded.model.run_taking(&self.name, inputs));
        let mut outputs = outputs.map_err(|error| errors::runtime(&error))?;
        let notes = outputs.take_notes().map(Notes);
        Ok((loaded.answer(py, outputs, library)?, notes))
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

    /// The shape of each flat input in its first program, by name.
    #[getter]
    fn shapes(&self) -> PyResult<BTreeMap<String, Vec<i64>>> {
        let loaded = self.loaded()?;
        let programs = loaded.model.programs(&self.name);
        let inputs = programs.first().map(|program| &program.inputs);
        Ok(inputs
            .into_iter()
            .flatten()
            .map(|input| (input.name.clone(), input.layout.shape.clone()))
            .collect())
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
pub fn call(
    py: Python<'_>,
    loaded: &Loaded,
    module: &str,
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
) -> PyResult<Py<PyAny>> {
    let inside = Inside::enter(py)?;
    let (inputs, library) = loaded.inputs(module, args, kwargs)?;
    let outputs = inside.detach(py, || loaded.run(module, &inputs, library));
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

/// The device's notes of one call's values.
#[pyclass(frozen, module = "precast")]
pub struct Notes(cuda::Notes);

#[pymethods]
impl Notes {
    /// Waits for them, and raises the error of a value that was out of bounds.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let inside = Inside::enter(py)?;
        let checked = inside.detach(py, || self.0.check());
        checked.map_err(|error| errors::runtime(&error))
    }
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
        let inside = Inside::enter(py)?;
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
        let outputs = inside.detach(py, || loaded.run(&self.module, &inputs, self.library));
        drop(inputs);
        let outputs = outputs.map_err(|error| errors::runtime(&error))?;
        loaded.answer(py, outputs, self.library)
    }
}

/// Returns a module with its inputs and buckets, for people.
pub fn describe(loaded: &Loaded, module: &str) -> String {
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
