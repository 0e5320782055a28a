//! A trainer: the states of a training step in a session, from batch to batch, and from them checkpoints and releases.
//!
//! A build makes the modules of a step (`kind = "step"` in the spec): the step itself, or its two halves, and the loss
//! alone. They share parameters, buffers and the optimizer's tensors by name, as the states of one session. A parameter
//! has its name in the weight set, so [`Trainer::publish`] only puts its value in the place of the old one.
//!
//! A model on several devices is trained on all of them: see `devices.rs`.

mod checkpoint;
mod devices;
mod publish;
mod steps;
mod sums;

use std::path::Path;

use precast_store::{
    Store,
    record::{Release, TrainPart},
};

use self::{devices::Devices, publish::Target, steps::Steps};
use super::{
    Model, RuntimeError, Tensor, Value,
    arrays::{self, Argument, refused},
    outputs::Outputs,
};

pub use self::{
    checkpoint::Progress,
    sums::{Sums, sum},
};

/// The input with the learning rate.
const RATE: &str = "lr";

/// The results of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Losses {
    /// The loss of the batch, before the update.
    pub loss: f64,
    /// The global norm of the gradients before clipping; none without an update.
    pub grad_norm: Option<f64>,
    /// The metrics of the module, by name.
    pub metrics: Vec<(String, f64)>,
}

impl Losses {
    /// Returns whether the loss and the norm are numbers.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.grad_norm.is_none_or(f64::is_finite)
    }
}

/// A module of kind `step`, trained in this process, without Python. From [`Model::trainer`].
///
/// A model on several devices is trained on all of them: a batch has rows for each, and an update takes the mean of
/// their gradients. Such a module has `accumulate` in the spec, which makes the update a program of its own. NCCL adds
/// the gradients where the process finds it: see [`Self::sums`]. After a failure of NCCL the values of the training are
/// lost: another trainer continues from the last checkpoint.
///
/// ```no_run
/// # use precast_runtime::{Device, Runtime, Store, Value};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Store::open("artifacts")?;
/// let model = Runtime::new(&store, Device::Cpu)?.load("gpt")?;
/// let mut trainer = model.trainer("train")?;
/// trainer.set_lr(1e-3);
/// let (ids, targets) = (Value::new(&[1_i64; 64], &[4, 16])?, Value::new(&[2_i64; 64], &[4, 16])?);
/// for _ in 0..100 {
///     let losses = trainer.step(&[("ids", &ids), ("targets", &targets)])?;
///     println!("{:.3}", losses.loss);
/// }
/// trainer.save("step.safetensors".as_ref())?;
/// trainer.publish(&store)?;
/// # Ok(()) }
/// ```
pub struct Trainer<'m> {
    devices: Devices<'m>,
    lr: f32,
    /// Free for the caller, and kept in checkpoints.
    progress: Progress,
}

impl<'m> Trainer<'m> {
    pub(super) fn new(model: &'m Model, module: &str) -> Result<Self, RuntimeError> {
        let mut devices = Devices::new(Steps::find(model, module)?)?;
        devices.set_seed(0)?;
        Ok(Self {
            devices,
            lr: 1e-3,
            progress: Progress::default(),
        })
    }

    /// Sets the learning rate of the next steps. It is an input: nothing is compiled again.
    pub fn set_lr(&mut self, lr: f32) {
        self.lr = lr;
    }

    /// Sets the seed of dropout and of other random numbers of the loss. It is a state: checkpoints keep it, with the
    /// number of calls that have drawn numbers. A module that draws none ignores it.
    pub fn set_seed(&mut self, seed: u64) -> Result<(), RuntimeError> {
        self.devices.set_seed(seed)
    }

    /// Returns where the gradients of several devices are added; none for one device.
    pub fn sums(&self) -> Option<Sums> {
        self.devices.sums()
    }

    /// Adds the gradients of several devices in the host's memory, in the order of the devices, also where the process
    /// finds NCCL: for the same bits on any machine, and where NCCL fails.
    pub fn without_nccl(self) -> Self {
        self.adding(sum)
    }

    /// Replaces the sum of the devices' gradients: for a test of the comparison with one device.
    #[doc(hidden)]
    pub fn adding(mut self, add: sums::Add) -> Self {
        self.devices.add_by(add);
        self
    }

    /// Takes another library for NCCL: for a test without CUDA devices.
    #[doc(hidden)]
    pub fn through(mut self, nccl: &Path) -> Result<Self, RuntimeError> {
        self.devices.add_through(nccl)?;
        Ok(self)
    }

    /// Returns the number of updates, and the caller's own data position, seed and notes.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Returns the bytes of the states on the first device: parameters, buffers and the optimizer's tensors.
    pub fn bytes(&self) -> u64 {
        self.devices.bytes()
    }

    /// Sets the position in the data and the seed of its order, which checkpoints keep.
    pub fn set_position(&mut self, position: u64, seed: u64) {
        self.progress.position = position;
        self.progress.seed = seed;
    }

    /// Sets a note of the caller, which checkpoints keep: for example the learning rates that the caller sets.
    pub fn set_note(&mut self, name: &str, value: &str) {
        self.progress
            .notes
            .insert(name.to_owned(), value.to_owned());
    }

    /// Makes one step on a batch, by the names of the module's inputs: loss, gradients, update. With `accumulate` in the
    /// spec, the update has the mean of these gradients and of those of earlier [`Self::accumulate`] calls.
    ///
    /// A refused batch (another size, a missing input, an index out of range) changes nothing. A loss that is no number
    /// is returned: the parameters are then spoilt, and [`Self::load`] brings back the last checkpoint.
    pub fn step<A: Argument>(&mut self, batch: &[(&str, A)]) -> Result<Losses, RuntimeError> {
        if self.devices.steps.train.part == TrainPart::Gradients {
            let losses = self.accumulate(batch)?;
            let grad_norm = self.update()?;
            return Ok(Losses {
                grad_norm: Some(grad_norm),
                ..losses
            });
        }
        let mut inputs = shared(batch);
        inputs.push((RATE, Value::new(&[self.lr], &[])?));
        let losses = self.devices.on_first(TrainPart::Step, &inputs)?;
        self.progress.step += 1;
        Ok(losses)
    }

    /// Adds the gradients of a batch to those of the next update, for a module with `accumulate` in the spec.
    pub fn accumulate<A: Argument>(&mut self, batch: &[(&str, A)]) -> Result<Losses, RuntimeError> {
        let part = TrainPart::Gradients;
        let parts = self.devices.parts(part, &shared(batch))?;
        self.devices.compare_once(&parts)?;
        self.devices.on_each(part, &parts)
    }

    /// Returns the loss of a batch in eval mode. It changes nothing.
    pub fn eval_step<A: Argument>(&mut self, batch: &[(&str, A)]) -> Result<Losses, RuntimeError> {
        let parts = self.devices.parts(TrainPart::Eval, &shared(batch))?;
        self.devices.on_each(TrainPart::Eval, &parts)
    }

    /// Updates the parameters with the mean of the accumulated gradients. Returns their norm.
    fn update(&mut self) -> Result<f64, RuntimeError> {
        self.devices.gather()?;
        let rate = [(RATE, Value::new(&[self.lr], &[])?)];
        let losses = self.devices.on_first(TrainPart::Update, &rate)?;
        self.devices.spread()?;
        self.progress.step += 1;
        Ok(losses.grad_norm.unwrap_or(f64::NAN))
    }

    /// Writes a checkpoint, whole or not at all.
    pub fn save(&mut self, path: &Path) -> Result<(), RuntimeError> {
        let (states, frozen) = (self.devices.states()?, self.devices.frozen()?);
        checkpoint::write(path, &self.devices.steps, frozen, &self.progress, &states)
    }

    /// Continues from a checkpoint. Returns whether the programs are those that wrote it: only then are the losses the
    /// same bit by bit.
    ///
    /// Changes nothing, and fails with [`RuntimeError::Checkpoint`], if the file is truncated or changed in any bit, of
    /// another model, module, optimizer or format, or was written with other values of the weights that are not trained.
    pub fn load(&mut self, path: &Path) -> Result<bool, RuntimeError> {
        let frozen = self.devices.frozen()?;
        let read = checkpoint::read(path, &self.devices.steps, frozen)?;
        self.devices.take(&read.states)?;
        self.progress = read.progress;
        Ok(read.same)
    }

    /// Fails if [`Self::load`] would refuse a checkpoint. Changes nothing.
    pub fn may_load(&mut self, path: &Path) -> Result<(), RuntimeError> {
        let frozen = self.devices.frozen()?;
        checkpoint::read(path, &self.devices.steps, frozen).map(drop)
    }

    /// Publishes the parameters as a new weight set of the model, in a new release with the programs of its newest one.
    /// A process that serves the model takes it with [`Runtime::weights_of`](crate::Runtime::weights_of) and
    /// [`Model::swap`](crate::Model::swap): nothing is built.
    ///
    /// Fails, and publishes nothing, if a parameter has NaN or infinity.
    pub fn publish(&mut self, store: &Store) -> Result<Release, RuntimeError> {
        let own = self.devices.steps.model.name();
        self.publish_to(store, own)
    }

    /// Publishes the parameters as [`Self::publish`] does, in a release of another model: one whose weights have the
    /// names, dtypes and shapes of the trained ones. Its other weights stay as they are.
    pub fn publish_to(&mut self, store: &Store, model: &str) -> Result<Release, RuntimeError> {
        let target = Target::find(&self.devices.steps, store, model)?;
        target.publish(store, |state| self.devices.first().shared(state))
    }

    /// Fails if [`Self::publish_to`] would refuse the model, whatever the values are: for a caller who wants to know it
    /// before the training.
    pub fn may_publish_to(&self, store: &Store, model: &str) -> Result<(), RuntimeError> {
        Target::find(&self.devices.steps, store, model).map(drop)
    }
}

/// Returns a batch without copies.
fn shared<'a, A: Argument>(batch: &[(&'a str, A)]) -> Vec<(&'a str, Value)> {
    let inputs = batch.iter();
    inputs
        .map(|(name, value)| (*name, arrays::value(value)))
        .collect()
}

/// Returns the numbers of a call.
fn losses(out: &Outputs) -> Result<Losses, RuntimeError> {
    out.check()?;
    let mut losses = Losses::default();
    for (name, tensor) in out.named() {
        let number = number(tensor).map_err(refused)?;
        match name {
            "loss" => losses.loss = number,
            "grad_norm" => losses.grad_norm = Some(number),
            metric => losses.metrics.push((metric.to_owned(), number)),
        }
    }
    Ok(losses)
}

fn number(tensor: &Tensor) -> Result<f64, super::TorchError> {
    let tensor = tensor.to_device(super::Device::Cpu)?;
    let values = tensor.to_dtype(precast_store::record::Dtype::Float64)?;
    Ok(values.to_vec::<f64>()?.first().copied().unwrap_or(f64::NAN))
}
