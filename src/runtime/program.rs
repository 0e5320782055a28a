//! One program, loaded on one device: its steps, and the lanes that run them.
//!
//! A **lane** is one container per step, bound to one weight set. Whoever runs the program takes a lane and has it
//! alone until the call is over, so no container ever has two callers; a program with N lanes answers N callers at
//! once and makes the others wait. Lanes are made when they are first needed, up to the limit, and kept.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
};

use smallvec::SmallVec;
use tch::Tensor;

use super::{
    RuntimeError,
    ffi::{Container, Handle, Library, Meta, Stolen, Weight, cuda, share},
    pad,
    source::{Source, SourceError},
    weights::{Weights, same_strides},
};
use crate::{
    Device,
    record::{Artifact, Layout, Program, Sizes, Step, bucket_name},
};

/// Tensor handles of one call.
pub(super) type Handles = SmallVec<[Handle; 8]>;

/// A program that can run.
pub struct Ready {
    pub program: Arc<Program>,
    pub module: Arc<str>,
    device: Device,
    steps: Vec<ReadyStep>,
    aliases: Arc<BTreeMap<String, String>>,
    lanes: Lanes,
    limit: usize,
}

struct ReadyStep {
    artifact: Arc<Artifact>,
    library: Arc<Library>,
    /// For each input of the step: its value number, and whether nobody reads it afterwards.
    inputs: Vec<(usize, bool)>,
}

struct Lane {
    // Before the weights, which the containers point to.
    containers: Vec<Container>,
    weights: Arc<Weights>,
    /// Bucket-sized inputs for padded calls, made on first use.
    buffers: Vec<Option<Tensor>>,
}

struct Lanes {
    state: Mutex<LaneState>,
    returned: Condvar,
}

struct LaneState {
    idle: Vec<Lane>,
    made: usize,
    weights: Arc<Weights>,
}

/// Runs of a program never share a lane; this gives it back, also when a run fails.
struct Taken<'a> {
    lanes: &'a Lanes,
    lane: Option<Lane>,
}

impl Ready {
    /// Loads a program: checks its shape, loads its artifacts, makes and binds the first lane.
    pub fn load(
        source: &dyn Source,
        program: Arc<Program>,
        device: Device,
        weights: Arc<Weights>,
        aliases: Arc<BTreeMap<String, String>>,
        limit: usize,
    ) -> Result<Self, RuntimeError> {
        let malformed = |reason: String| RuntimeError::Malformed {
            program: program.id,
            reason,
        };
        let last_use = last_uses(&program).map_err(malformed)?;
        let mut steps = Vec::with_capacity(program.steps.len());
        let mut artifacts: BTreeMap<_, Arc<Artifact>> = BTreeMap::new();
        for (i, step) in program.steps.iter().enumerate() {
            let artifact = match artifacts.get(&step.artifact) {
                Some(artifact) => artifact.clone(),
                None => {
                    let read = source
                        .artifact(&step.artifact)
                        .map_err(in_store(format!("artifact `{}`", step.artifact.short())))?;
                    artifacts
                        .entry(step.artifact)
                        .or_insert(Arc::new(read))
                        .clone()
                }
            };
            let library = Library::load(&artifact.object, || {
                source
                    .memfd(&artifact.object)
                    .map_err(in_store(format!("object `{}`", artifact.object.short())))
            })?;
            let inputs = step
                .inputs
                .iter()
                .map(|&value| (value, last_use[value] == Some(i)))
                .collect();
            steps.push(ReadyStep {
                artifact,
                library,
                inputs,
            });
        }
        check_layouts(&program, &steps).map_err(|reason| RuntimeError::Malformed {
            program: program.id,
            reason,
        })?;
        let lanes = Lanes {
            state: Mutex::new(LaneState {
                idle: Vec::new(),
                made: 0,
                weights: weights.clone(),
            }),
            returned: Condvar::new(),
        };
        let module = program.module.as_str().into();
        let ready = Self {
            program,
            module,
            device,
            steps,
            aliases,
            lanes,
            limit: limit.max(1),
        };
        // The first lane is made now, so that what can't be bound fails at load and not at a call.
        let lane = ready.make_lane(weights)?;
        let mut state = ready.lanes.lock();
        state.idle.reserve(ready.limit);
        state.idle.push(lane);
        state.made = 1;
        drop(state);
        Ok(ready)
    }

    /// Returns the program's sizes as `batch=8 seq=128`.
    pub fn bucket(&self) -> String {
        bucket_name(&self.program.sizes)
    }

    /// Runs it on inputs that were checked. With `request`, they are smaller than the bucket and are padded into it.
    pub fn run(
        &self,
        inputs: Handles,
        request: Option<&Sizes>,
    ) -> Result<SmallVec<[Tensor; 4]>, RuntimeError> {
        let mut taken = self.take()?;
        let lane = taken.lane()?;
        let program = &*self.program;
        let text = |error: tch::TchError| RuntimeError::Tensor {
            module: self.module.clone(),
            message: error.to_string(),
        };
        let mut values: SmallVec<[Option<Handle>; 16]> = SmallVec::new();
        values.resize_with(program.values, || None);
        for (i, given) in inputs.into_iter().enumerate() {
            let input = &program.inputs[i];
            values[i] = Some(match request {
                Some(_) if given.meta().sizes() != input.layout.shape.as_slice() => {
                    let buffer = match &mut lane.buffers[i] {
                        Some(buffer) => buffer,
                        none => none.insert(pad::buffer(&input.layout, self.device).map_err(text)?),
                    };
                    pad::fill(buffer, &given.into_tensor(), input).map_err(text)?;
                    share(buffer)
                }
                _ => given,
            });
        }
        // Kept for the check that no output is an input's memory.
        let sources: SmallVec<[usize; 8]> = values[..program.inputs.len()]
            .iter()
            .flatten()
            .map(|handle| handle.meta().storage())
            .collect();
        let stream = match self.device {
            Device::Cpu => std::ptr::null_mut(),
            Device::Cuda(ordinal) => cuda()
                .and_then(|cuda| cuda.current_stream(ordinal))
                .map_err(|reason| RuntimeError::NoDevice {
                    device: self.device,
                    reason,
                })?,
        };
        for (i, step) in self.steps.iter().enumerate() {
            let mut stolen = Stolen::default();
            for &(value, last) in &step.inputs {
                let handle = match last {
                    true => values[value].take(),
                    false => values[value].as_ref().map(Handle::share),
                };
                stolen.push(handle.ok_or_else(|| {
                    self.malformed(format!("value {value} is used before it is written"))
                })?);
            }
            let mut made = Handles::new();
            let record = &program.steps[i];
            lane.containers[i]
                .run(stolen, stream, &mut made)
                .map_err(|message| self.failed(record, message))?;
            for (&value, handle) in record.outputs.iter().zip(made) {
                values[value] = Some(handle);
            }
        }
        let mut outputs = SmallVec::new();
        for (i, (&value, output)) in program.results.iter().zip(&program.outputs).enumerate() {
            // A value may be given back twice; then both are handles of one tensor, as in eager.
            let repeated = program.results[i + 1..].contains(&value);
            let handle = match repeated {
                true => values[value].as_ref().map(Handle::share),
                false => values[value].take(),
            };
            let handle =
                handle.ok_or_else(|| self.malformed(format!("result {value} is never written")))?;
            self.check_output(i, &handle.meta(), &output.layout)?;
            let storage = handle.meta().storage();
            let mut tensor = handle.into_tensor();
            if lane.weights.contains(storage) || sources.contains(&storage) {
                // Outputs are the caller's: never the memory of an input, a padding buffer or a weight.
                tensor = copy(&tensor).map_err(text)?;
            }
            outputs.push(match request {
                Some(request) => pad::cut(tensor, output, &program.sizes, request).map_err(text)?,
                None => tensor,
            });
        }
        Ok(outputs)
    }

    fn check_output(
        &self,
        output: usize,
        meta: &Meta<'_>,
        layout: &Layout,
    ) -> Result<(), RuntimeError> {
        let right = meta.defined()
            && meta.dense()
            && meta.dtype() == Some(layout.dtype)
            && meta.sizes() == layout.shape.as_slice()
            && meta.device() == Some(self.device);
        if right {
            return Ok(());
        }
        let got = match (meta.defined() && meta.dense(), meta.dtype()) {
            (false, _) => "no dense tensor".to_owned(),
            (true, Some(dtype)) => format!("{dtype} {:?}", meta.sizes()),
            (true, None) => format!("of an unknown dtype, {:?}", meta.sizes()),
        };
        let expected = format!("{} {:?}", layout.dtype, layout.shape);
        Err(RuntimeError::BadOutput {
            module: self.module.clone(),
            bucket: self.bucket(),
            output,
            expected,
            got,
        })
    }

    fn take(&self) -> Result<Taken<'_>, RuntimeError> {
        let mut state = self.lanes.lock();
        loop {
            if let Some(lane) = state.idle.pop() {
                return Ok(Taken {
                    lanes: &self.lanes,
                    lane: Some(lane),
                });
            }
            if state.made < self.limit {
                state.made += 1;
                let weights = state.weights.clone();
                drop(state);
                let made = self.make_lane(weights);
                if made.is_err() {
                    self.lanes.lock().made -= 1;
                    self.lanes.returned.notify_one();
                }
                return made.map(|lane| Taken {
                    lanes: &self.lanes,
                    lane: Some(lane),
                });
            }
            state = self
                .lanes
                .returned
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn make_lane(&self, weights: Arc<Weights>) -> Result<Lane, RuntimeError> {
        let mut containers = Vec::with_capacity(self.steps.len());
        for (step, record) in self.steps.iter().zip(&self.program.steps) {
            let artifact = &step.artifact;
            let none = |reason| RuntimeError::NoContainer {
                artifact: artifact.id,
                reason,
            };
            let mut container = Container::new(&step.library, self.device).map_err(none)?;
            let count = |what, expected, got| match expected == got {
                true => Ok(()),
                false => Err(RuntimeError::WrongCount {
                    artifact: artifact.id,
                    what,
                    expected,
                    got,
                }),
            };
            count("inputs", artifact.inputs.len(), container.inputs())?;
            count("outputs", artifact.outputs.len(), container.outputs())?;
            let bound = self.constants(artifact, record, &container, &weights)?;
            container.bind(bound).map_err(none)?;
            containers.push(container);
        }
        let buffers = self.program.inputs.iter().map(|_| None).collect();
        Ok(Lane {
            containers,
            weights,
            buffers,
        })
    }

    /// Returns the weight of each constant of a container; every one must be there with equal dtype and shape.
    fn constants(
        &self,
        artifact: &Artifact,
        step: &Step,
        container: &Container,
        weights: &Weights,
    ) -> Result<Vec<Arc<Weight>>, RuntimeError> {
        let find = |constant: &super::ffi::Constant| {
            let layout = &artifact
                .constants
                .iter()
                .find(|known| known.name == constant.fqn);
            let layout = &layout
                .ok_or("the artifact's record does not have it")?
                .layout;
            let bytes = layout.shape.iter().product::<i64>() * layout.dtype.size() as i64;
            if constant.dtype != Some(layout.dtype) || usize::try_from(bytes) != Ok(constant.bytes)
            {
                return Err(format!(
                    "the record says {} {:?}, the artifact has {} bytes of {}",
                    layout.dtype,
                    layout.shape,
                    constant.bytes,
                    constant
                        .dtype
                        .map_or("an unknown dtype", |dtype| dtype.name())
                ));
            }
            let name = step
                .binding
                .get(&constant.fqn)
                .ok_or("the program's binding does not name it")?;
            weights.get(name, &self.aliases, layout)
        };
        let unbound = |constant: &super::ffi::Constant, reason| RuntimeError::Unbound {
            artifact: artifact.id,
            constant: constant.fqn.clone(),
            reason,
        };
        container
            .constants()
            .iter()
            .map(|constant| find(constant).map_err(|reason| unbound(constant, reason)))
            .collect()
    }

    fn malformed(&self, reason: String) -> RuntimeError {
        RuntimeError::Malformed {
            program: self.program.id,
            reason,
        }
    }

    fn failed(&self, step: &Step, message: String) -> RuntimeError {
        RuntimeError::Failed {
            module: self.module.clone(),
            bucket: self.bucket(),
            step: step.name.clone(),
            message,
        }
    }
}

impl Lanes {
    fn lock(&self) -> std::sync::MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken<'_> {
    fn lane(&mut self) -> Result<&mut Lane, RuntimeError> {
        // It is there until `drop`.
        self.lane.as_mut().ok_or(RuntimeError::Devices)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            self.lanes.lock().idle.push(lane);
            self.lanes.returned.notify_one();
        }
    }
}

/// Returns, for each value, the step that reads it last; none for results and for what nobody reads.
///
/// Fails on value numbers out of range, values read before they are written or written twice, and a step that reads
/// one value twice as its last (it is shared then, not moved).
fn last_uses(program: &Program) -> Result<Vec<Option<usize>>, String> {
    let mut written = vec![false; program.values];
    if program.inputs.len() > program.values {
        return Err(format!(
            "{} inputs and {} values",
            program.inputs.len(),
            program.values
        ));
    }
    if program.results.len() != program.outputs.len() {
        return Err(format!(
            "{} results and {} outputs",
            program.results.len(),
            program.outputs.len()
        ));
    }
    written[..program.inputs.len()].fill(true);
    let mut last = vec![None; program.values];
    for (i, step) in program.steps.iter().enumerate() {
        for &value in &step.inputs {
            if !written.get(value).copied().unwrap_or(false) {
                return Err(format!(
                    "step `{}` reads value {value}, which nothing wrote",
                    step.name
                ));
            }
            last[value] = Some(i);
        }
        for &value in &step.outputs {
            match written.get_mut(value) {
                Some(seen) if !*seen => *seen = true,
                _ => {
                    return Err(format!(
                        "step `{}` writes value {value}, which it may not",
                        step.name
                    ));
                }
            }
        }
        for &value in &step.inputs {
            if step.inputs.iter().filter(|&&other| other == value).count() > 1 {
                last[value] = None;
            }
        }
    }
    for &value in &program.results {
        if !written.get(value).copied().unwrap_or(false) {
            return Err(format!("result {value} is never written"));
        }
        last[value] = None;
    }
    Ok(last)
}

/// Checks that what a step gets is what its artifact was compiled for.
fn check_layouts(program: &Program, steps: &[ReadyStep]) -> Result<(), String> {
    let mut layouts: Vec<Option<&Layout>> = vec![None; program.values];
    for (value, input) in program.inputs.iter().enumerate() {
        layouts[value] = Some(&input.layout);
    }
    for (step, record) in steps.iter().zip(&program.steps) {
        let artifact = &step.artifact;
        if artifact.inputs.len() != record.inputs.len()
            || artifact.outputs.len() != record.outputs.len()
        {
            return Err(format!(
                "step `{}` has other numbers of inputs or outputs than its artifact",
                record.name
            ));
        }
        for (&value, wants) in record.inputs.iter().zip(&artifact.inputs) {
            if !layouts[value].is_some_and(|has| fits(has, wants)) {
                return Err(format!(
                    "step `{}` gets value {value}, which its artifact was not compiled for",
                    record.name
                ));
            }
        }
        for (&value, layout) in record.outputs.iter().zip(&artifact.outputs) {
            layouts[value] = Some(layout);
        }
    }
    for (&value, output) in program.results.iter().zip(&program.outputs) {
        if !layouts[value]
            .is_some_and(|has| has.dtype == output.layout.dtype && has.shape == output.layout.shape)
        {
            return Err(format!(
                "output `{}` is not what value {value} is",
                output.name
            ));
        }
    }
    Ok(())
}

fn fits(has: &Layout, wants: &Layout) -> bool {
    has.dtype == wants.dtype
        && has.shape == wants.shape
        && same_strides(&has.shape, &has.stride, &wants.stride)
}

fn copy(tensor: &Tensor) -> Result<Tensor, tch::TchError> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Names what could not be read.
pub(super) fn in_store(what: String) -> impl FnOnce(SourceError) -> RuntimeError {
    move |source| RuntimeError::Store { what, source }
}
