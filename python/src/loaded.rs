//! A model with what its answers need: the inputs of its modules, and how their outputs nest.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use precast_runtime::{Model, Outputs, Runtime, RuntimeError, WeightSet};
use precast_store::{Device, Digest};
use pyo3::{
    prelude::*,
    types::{PyDict, PyTuple},
};

use crate::{
    errors,
    fork::Process,
    inputs::{self, Inputs, Variant},
    nesting::Nesting,
    tensors::{self, Library},
};

/// A model, and what its answers need.
pub struct Loaded {
    pub model: Model,
    pub devices: Vec<Device>,
    /// The runtime of all models of its store and devices in this process.
    pub runtime: Arc<Runtime>,
    // Few entries: a hash of the key takes longer than the comparisons.
    pub variants: BTreeMap<String, Vec<Variant>>,
    nestings: BTreeMap<Digest, Nesting>,
    /// Whether each call waits for the device's check of its values.
    now: bool,
}

impl Loaded {
    pub fn of(
        py: Python<'_>,
        model: Model,
        devices: Vec<Device>,
        runtime: Arc<Runtime>,
        now: bool,
    ) -> Self {
        let mut variants: BTreeMap<String, Vec<Variant>> = BTreeMap::new();
        let mut nestings = BTreeMap::new();
        for module in model.modules() {
            let known = variants.entry(module.to_owned()).or_default();
            for program in model.programs(module) {
                let names: Vec<String> = program
                    .inputs
                    .iter()
                    .map(|input| input.name.clone())
                    .collect();
                if known.iter().all(|variant| variant.inputs != names) {
                    known.push(Variant::of(names));
                }
                let described = &program.call_spec["outputs"];
                let nesting = Nesting::of(py, described, program.outputs.len());
                nestings.insert(program.id, nesting);
            }
        }
        Self {
            model,
            devices,
            runtime,
            variants,
            nestings,
            now,
        }
    }

    /// Returns the inputs of a module's variants.
    pub fn variants(&self, module: &str) -> PyResult<&[Variant]> {
        match self.variants.get(module) {
            Some(variants) => Ok(variants),
            None => {
                let none: [precast_runtime::Tensor; 0] = [];
                let error = self.model.run(module, &none).err();
                Err(error.map_or_else(
                    || errors::bad_input(format!("no module `{module}`"), ""),
                    |error| errors::runtime(&error),
                ))
            }
        }
    }

    /// Returns the inputs of a call without a session.
    pub fn inputs(
        &self,
        module: &str,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<(Inputs, Library)> {
        inputs::of(args, kwargs, self.variants(module)?).map_err(|error| {
            // A session has other arguments: a token, for `decode`.
            let mut programs = self.model.programs(module).into_iter();
            if programs.all(|program| program.states.is_empty()) {
                return error;
            }
            let module = module.into();
            errors::runtime(&RuntimeError::NeedsSession { module })
        })
    }

    /// Returns the answer as objects of Python.
    pub fn answer(
        &self,
        py: Python<'_>,
        outputs: Outputs,
        library: Library,
    ) -> PyResult<Py<PyAny>> {
        match self.nestings.get(&outputs.served().program().id) {
            Some(nesting) => nesting.build(py, &outputs, library),
            None => {
                let plain = Nesting::of(py, &serde_json::Value::Null, outputs.len());
                plain.build(py, &outputs, library)
            }
        }
    }

    /// Runs a module. Waits for the device's check of its values, if the model was loaded so, or where torch does not order
    /// the caller's work behind the call.
    pub fn run(
        &self,
        module: &str,
        inputs: &Inputs,
        library: Library,
    ) -> Result<Outputs, RuntimeError> {
        inputs.run(
            self.now || library != Library::Torch,
            |tensors| self.model.run(module, tensors),
            |named| self.model.run_named(module, named),
        )
    }
}

/// A model until it is closed, for the object and its modules.
pub struct Held {
    pub name: String,
    /// None after `close`.
    pub loaded: RwLock<Option<Arc<Loaded>>>,
    pub process: Process,
}

impl Held {
    /// Returns the model, unless it is closed or a parent's.
    pub fn loaded(&self) -> PyResult<Arc<Loaded>> {
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

/// Returns a weight set of the caller's tensors on the first of these devices.
pub fn own_weights(weights: &Bound<'_, PyDict>, devices: &[Device]) -> PyResult<WeightSet> {
    let mut tensors = BTreeMap::new();
    for (name, tensor) in weights {
        let name: String = name.extract()?;
        let tensor = tensors::take_weight(&tensor, &name)?;
        tensors.insert(name, tensor);
    }
    let device = devices.first().copied().unwrap_or(Device::Cpu);
    WeightSet::of(tensors, device).map_err(|error| errors::runtime(&error))
}

/// Returns the device of a name, as `cpu`, `cuda` or `cuda:1`.
pub fn device(name: &str) -> PyResult<Device> {
    let known = match name {
        "cpu" => Some(Device::Cpu),
        "cuda" => Some(Device::Cuda(0)),
        other => (other.strip_prefix("cuda:"))
            .and_then(|ordinal| ordinal.parse().ok())
            .map(Device::Cuda),
    };
    known.ok_or_else(|| {
        errors::bad_input(
            format!("`{name}` is no device"),
            "a device is cpu, cuda, or cuda:1",
        )
    })
}
