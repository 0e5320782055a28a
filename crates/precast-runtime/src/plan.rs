//! The steps of a program, and the containers that run them.
//!
//! Each container loads the GPU code of its artifact separately. A caller with its own containers has one per step,
//! bound once to one weight set. The containers for the capture of a graph run a few times only, so one per artifact
//! serves all its steps, bound again before each of them: 24 equal blocks load their code once.

use std::{collections::BTreeMap, sync::Arc};

use precast_store::{
    Device, Digest, Target,
    record::{Artifact, Program, State, Step},
};
use smallvec::SmallVec;

use super::{
    RuntimeError, TorchError,
    ffi::{
        Container, Handle, Handles, Library, Meta, Operators, RawStream, RunError, Stolen, Weight,
        outside,
    },
    layout::bytes_of,
    prepacked::Bound,
    problem::Problem,
    trial::Trials,
    weights::Weights,
};

/// The surroundings of a load: device, weights, host, limits.
#[derive(Clone)]
pub(super) struct With {
    pub device: Device,
    pub weights: Arc<Weights>,
    pub aliases: Arc<BTreeMap<String, String>>,
    /// Tensors that the program's code creates.
    pub extras: Option<Arc<Weights>>,
    /// The number of slots for calls, and that of slots for fixed programs.
    pub instances: usize,
    pub host: Arc<Target>,
    /// The trial of first loads.
    pub trials: Option<Arc<Trials>>,
}

/// A program's steps on one device.
pub(super) struct Plan {
    pub program: Arc<Program>,
    pub module: Arc<str>,
    pub device: Device,
    pub steps: Vec<PlanStep>,
    pub aliases: Arc<BTreeMap<String, String>>,
    /// Tensors that the program's code creates: bindings may name them, like those of the weight set.
    pub extras: Option<Arc<Weights>>,
    /// The machine, which decides the form of prepacked constants.
    pub host: Arc<Target>,
}

/// One step with its artifact loaded.
pub(super) struct PlanStep {
    pub artifact: Arc<Artifact>,
    pub library: Arc<Library>,
    /// The operators that have no C entry point.
    pub operators: Option<Arc<Operators>>,
    /// For each input of the step: its value number, and whether this step is its last reader.
    pub inputs: Vec<(usize, bool)>,
}

/// Containers for the steps of a program. They point to the weights that they are bound to.
pub(super) struct Containers {
    containers: Vec<Container>,
    /// The binding of each step, where steps share containers.
    shared: Option<Bindings>,
    /// The addresses of prepacked constants, sorted.
    prepared: Vec<usize>,
}

/// For each step its container and the weights that the container is bound to before the step.
pub(super) type Bindings = Arc<[(usize, Vec<Arc<Weight>>)]>;

impl Plan {
    /// Creates one container per step. They must be bound before they run.
    pub fn containers(&self) -> Result<Containers, RuntimeError> {
        let containers = self.steps.iter().map(|step| self.container(step));
        Ok(Containers {
            containers: containers.collect::<Result<_, _>>()?,
            shared: None,
            prepared: Vec::new(),
        })
    }

    /// Creates one container per artifact, for a caller that runs them a few times only. They must be bound before they
    /// run.
    pub fn shared_containers(&self) -> Result<Containers, RuntimeError> {
        let mut containers = Vec::new();
        let mut known: BTreeMap<Digest, usize> = BTreeMap::new();
        let mut bindings = Vec::with_capacity(self.steps.len());
        for (step, record) in self.steps.iter().zip(&self.program.steps) {
            let container = match known.get(&record.artifact) {
                Some(&container) => container,
                None => {
                    containers.push(self.container(step)?);
                    known.insert(record.artifact, containers.len() - 1);
                    containers.len() - 1
                }
            };
            bindings.push((container, Vec::new()));
        }
        Ok(Containers {
            containers,
            shared: Some(bindings.into()),
            prepared: Vec::new(),
        })
    }

    fn container(&self, step: &PlanStep) -> Result<Container, RuntimeError> {
        let artifact = &step.artifact;
        let _span = tracing::info_span!("container", object = %artifact.object.short()).entered();
        let container = Container::new(&step.library, step.operators.clone(), self.device);
        let container = container.map_err(|reason| self.no_container(artifact, reason))?;
        let count = |what, expected, got| {
            let artifact = artifact.id;
            let wrong = RuntimeError::WrongCount {
                artifact,
                what,
                expected,
                got,
            };
            if expected == got { Ok(()) } else { Err(wrong) }
        };
        count("inputs", artifact.inputs.len(), container.inputs())?;
        count("outputs", artifact.outputs.len(), container.outputs())?;
        Ok(container)
    }

    /// Returns new tensors of zeros for the states of the program.
    pub fn scratch(&self) -> Result<Handles, TorchError> {
        let states = self.program.states.iter();
        states.map(|state| self.zeros(state)).collect()
    }

    /// Returns states that a warm-up may write: these themselves, and new ones for those that are written.
    pub fn writable(&self, states: &Handles, written: &[bool]) -> Result<Handles, TorchError> {
        let given = self.program.states.iter().zip(states).zip(written);
        let one = |((state, own), &written): ((&State, &Handle), &bool)| match written {
            true => self.zeros(state),
            false => Ok(own.share()),
        };
        given.map(one).collect()
    }

    fn zeros(&self, state: &State) -> Result<Handle, TorchError> {
        let layout = &state.layout;
        let made = Handle::empty(&layout.shape, &layout.stride, layout.dtype, self.device)?;
        made.zero().map(|()| made)
    }

    /// Binds containers to a weight set. On failure they must not be used.
    pub fn bind(&self, containers: &mut Containers, weights: &Weights) -> Result<(), RuntimeError> {
        let steps = self.steps.iter().zip(&self.program.steps);
        if let Some(shared) = &containers.shared {
            let bindings = steps.zip(&**shared).map(|((step, record), &(at, _))| {
                let container = &containers.containers[at];
                let bound = self.constants(&step.artifact, record, container, weights)?;
                Ok((at, bound))
            });
            containers.shared = Some(bindings.collect::<Result<_, RuntimeError>>()?);
            return Ok(());
        }
        let mut prepared = Vec::new();
        for ((step, record), container) in steps.zip(&mut containers.containers) {
            let bound = self.constants(&step.artifact, record, container, weights)?;
            let dense = bound.iter().map(|weight| weight.handle().meta());
            let places = dense.filter(Meta::dense).map(|meta| meta.storage());
            prepared.extend(places.filter(|&place| !self.owns(weights, place)));
            container
                .bind(bound)
                .map_err(|reason| self.no_container(&step.artifact, reason))?;
        }
        prepared.sort_unstable();
        prepared.dedup();
        containers.prepared = prepared;
        Ok(())
    }

    /// Returns the weight of each constant of a container. Fails unless all exist with equal dtype and shape.
    fn constants(
        &self,
        artifact: &Artifact,
        step: &Step,
        container: &Container,
        weights: &Weights,
    ) -> Result<Vec<Arc<Weight>>, RuntimeError> {
        let _span = tracing::info_span!("bind", object = %artifact.object.short()).entered();
        let bound = Bound {
            weights,
            extras: self.extras.as_deref(),
            aliases: &self.aliases,
            artifact,
            binding: &step.binding,
            host: &self.host,
        };
        let find = |constant: &super::ffi::Constant| {
            let layout = bound.layout(&constant.fqn)?;
            let bytes = bytes_of(&layout.shape, layout.dtype);
            // An artifact for the CPU declares the next multiple of 64 (`_align(data_size)` in torch's
            // codegen/cpp_wrapper_cpu.py). It reads the tensor's own bytes only.
            let fits = [Some(bytes), bytes.checked_next_multiple_of(64)];
            if constant.dtype != Some(layout.dtype) || !fits.contains(&Some(constant.bytes)) {
                return Err(format!(
                    "the record says {} {:?}, the artifact has {} bytes of {}",
                    layout.dtype,
                    layout.shape,
                    constant.bytes,
                    constant
                        .dtype
                        .map_or("an unknown dtype", |dtype| dtype.name())
                )
                .into());
            }
            bound.weight(&constant.fqn, true)
        };
        let unbound = |constant: &super::ffi::Constant, reason| RuntimeError::Unbound {
            artifact: artifact.id,
            constant: constant.fqn.clone(),
            reason,
        };
        let unprepared = |constant: &super::ffi::Constant, reason| RuntimeError::Unprepared {
            artifact: artifact.id,
            constant: constant.fqn.clone(),
            reason,
        };
        let constants = container.constants().iter();
        constants
            .map(|constant| {
                let mut prepared = artifact.prepared.iter();
                match prepared.find(|tensor| tensor.name == constant.fqn) {
                    Some(_) if weights.is_live() => Err(RuntimeError::ComputedFromWeights {
                        artifact: artifact.id,
                        constant: constant.fqn.clone(),
                    }),
                    Some(tensor) => bound
                        .prepared(tensor)
                        .map_err(|reason| unprepared(constant, reason)),
                    None => find(constant).map_err(|reason| unbound(constant, reason)),
                }
            })
            .collect()
    }

    /// Runs the steps. Returns the program's results in order, then the outcomes of its checks.
    ///
    /// Every value is dropped after the last step that reads it.
    pub fn execute(
        &self,
        containers: &mut Containers,
        inputs: Handles,
        stream: RawStream,
    ) -> Result<Handles, RuntimeError> {
        let mut values: SmallVec<[Option<Handle>; 16]> = SmallVec::new();
        values.resize_with(self.program.values, || None);
        for (value, input) in values.iter_mut().zip(inputs) {
            *value = Some(input);
        }
        for (i, (step, record)) in self.steps.iter().zip(&self.program.steps).enumerate() {
            let container = match &containers.shared {
                None => &mut containers.containers[i],
                Some(bindings) => {
                    let (at, weights) = &bindings[i];
                    let container = &mut containers.containers[*at];
                    let bound = container.bind(weights.clone());
                    bound.map_err(|reason| self.no_container(&step.artifact, reason))?;
                    container
                }
            };
            let mut stolen = Stolen::default();
            for &(value, last) in &step.inputs {
                let handle = if last {
                    values[value].take()
                } else {
                    values[value].as_ref().map(Handle::share)
                };
                stolen.push(handle.ok_or_else(|| {
                    self.malformed(format!("value {value} is read before it is written"))
                })?);
            }
            let mut made = Handles::new();
            container
                .invoke(stolen, stream, &mut made)
                .map_err(|error| match error {
                    RunError::Failed(message) => self.failed(&record.name, message),
                    RunError::Check(check) => self.check_failed(check),
                })?;
            for (&value, handle) in record.outputs.iter().zip(made) {
                values[value] = Some(handle);
            }
        }
        let mut results = Handles::new();
        let checks = self.program.checks.iter().map(|check| check.value);
        let wanted: SmallVec<[usize; 8]> =
            self.program.results.iter().copied().chain(checks).collect();
        for (i, &value) in wanted.iter().enumerate() {
            // A value that is returned twice becomes two handles of one tensor, as in eager.
            let handle = if wanted[i + 1..].contains(&value) {
                values[value].as_ref().map(Handle::share)
            } else {
                values[value].take()
            };
            results.push(
                handle.ok_or_else(|| self.malformed(format!("result {value} is never written")))?,
            );
        }
        Ok(results)
    }

    /// Returns whether an address lies in the weights or in the program's own constants.
    pub fn owns(&self, weights: &Weights, address: usize) -> bool {
        weights.contains(address)
            || self
                .extras
                .as_ref()
                .is_some_and(|extras| extras.contains(address))
    }

    /// Returns the name of the program's bucket.
    pub fn bucket(&self) -> String {
        self.program.bucket()
    }

    fn no_container(&self, artifact: &Artifact, reason: TorchError) -> RuntimeError {
        RuntimeError::NoContainer {
            artifact: artifact.id,
            reason,
        }
    }

    fn malformed(&self, reason: String) -> RuntimeError {
        RuntimeError::Malformed {
            program: self.program.id,
            reason,
        }
    }

    /// Returns the error of a caller that waited too long for one of `slots` slots.
    pub fn busy(&self, slots: usize) -> RuntimeError {
        RuntimeError::Busy {
            module: self.module.clone(),
            bucket: self.bucket(),
            slots,
        }
    }

    /// Refuses inputs in host memory with values that the program does not take, on every device.
    pub fn check_values(&self, inputs: &Handles) -> Result<(), RuntimeError> {
        for (given, input) in inputs.iter().zip(&self.program.inputs) {
            if let Some(bounds) = input.bounds
                && let Some(found) = outside(&given.meta(), bounds)
            {
                return Err(RuntimeError::BadInput {
                    module: self.module.clone(),
                    input: input.name.as_str().into(),
                    problem: Problem::value(input, bounds, Some(found.value), Some(found.position)),
                });
            }
        }
        Ok(())
    }

    /// Returns libtorch's error about a tensor of the program as an error of the module.
    pub fn tensor(&self, message: TorchError) -> RuntimeError {
        RuntimeError::Tensor {
            module: self.module.clone(),
            message,
        }
    }

    pub fn check_failed(&self, check: String) -> RuntimeError {
        RuntimeError::CheckFailed {
            module: self.module.clone(),
            bucket: self.bucket(),
            check,
        }
    }

    pub fn failed(&self, step: &str, message: TorchError) -> RuntimeError {
        RuntimeError::Failed {
            module: self.module.clone(),
            bucket: self.bucket(),
            step: step.to_owned(),
            message,
        }
    }
}

impl Containers {
    /// Returns whether an address belongs to a prepacked constant.
    pub fn prepared(&self, address: usize) -> bool {
        self.prepared.binary_search(&address).is_ok()
    }

    /// Returns the bindings of containers that steps share. A captured graph reads the weights in them.
    pub fn bindings(&self) -> Option<Bindings> {
        self.shared.clone()
    }
}

#[cfg(test)]
mod tests;
