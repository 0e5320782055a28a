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
mod sums;

use precast_store::record::{Program, Train, TrainPart};

use super::{
    Model, RuntimeError, Session, Tensor, Value,
    arrays::{self, Argument, refused},
    outputs::Outputs,
};

pub use checkpoint::Progress;
pub use sums::{Sums, sum};

/// The input with the learning rate.
const RATE: &str = "lr";

/// The state with the seed of random numbers, of a module that draws them.
const SEED: &str = "random.seed";

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
    model: &'m Model,
    // Before the sessions, whose tensors it reads and writes.
    /// The way from device to device.
    between: sums::Between,
    /// One on each device. The first has the values of the training, the others copies of the parameters.
    sessions: Vec<Session<'m>>,
    /// Whether several devices were compared with one.
    compared: bool,
    /// The module, as the spec names it.
    module: String,
    train: Train,
    lr: f32,
    /// Free for the caller, and kept in checkpoints.
    progress: Progress,
}

impl<'m> Trainer<'m> {
    pub(super) fn new(model: &'m Model, module: &str) -> Result<Self, RuntimeError> {
        let first = |part| part_of(model, module, part);
        let train = first(TrainPart::Step).or_else(|| first(TrainPart::Gradients));
        let Some(train) = train.and_then(|program| program.train.clone()) else {
            let halves = format!(".{}", TrainPart::Gradients.name());
            let steps = model.modules().into_iter().filter_map(|name| {
                let name = name.strip_suffix(&halves).unwrap_or(name);
                let either = part_of(model, name, TrainPart::Step)
                    .or_else(|| part_of(model, name, TrainPart::Gradients));
                either.map(|_| name.to_owned())
            });
            return Err(RuntimeError::NoStep {
                module: module.to_owned(),
                known: steps.collect(),
            });
        };
        let sessions = Session::on_each(model)?;
        let gradients = first(TrainPart::Gradients);
        let states = gradients.iter().flat_map(|program| &program.states);
        let sums = states.filter(|state| devices::is_sum(&state.name));
        let mut made = Self {
            model,
            between: sums::Between::new(&sessions, sums.map(|state| state.layout.dtype)),
            sessions,
            compared: false,
            module: module.to_owned(),
            train,
            lr: 1e-3,
            progress: Progress::default(),
        };
        made.may_be_split()?;
        made.set_seed(0)?;
        Ok(made)
    }

    /// Sets the learning rate of the next steps. It is an input: nothing is compiled again.
    pub fn set_lr(&mut self, lr: f32) {
        self.lr = lr;
    }

    /// Sets the seed of dropout and of other random numbers of the loss. It is a state: checkpoints keep it, with the
    /// number of calls that have drawn numbers. A module that draws none ignores it.
    pub fn set_seed(&mut self, seed: u64) -> Result<(), RuntimeError> {
        if !self.has_state(SEED) {
            return Ok(());
        }
        for (index, session) in self.sessions.iter_mut().enumerate() {
            let own = devices::seed_of(seed, index).cast_signed();
            session.set_state(SEED, &Value::new(&[own], &[])?)?;
        }
        Ok(())
    }

    /// Returns the number of updates, and the caller's own data position and seed.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Sets the position in the data and the seed of its order, which checkpoints keep.
    pub fn set_position(&mut self, position: u64, seed: u64) {
        self.progress.position = position;
        self.progress.seed = seed;
    }

    /// Makes one step on a batch, by the names of the module's inputs: loss, gradients, update. With `accumulate` in the
    /// spec, the update has the mean of these gradients and of those of earlier [`Self::accumulate`] calls.
    ///
    /// A refused batch (another size, a missing input, an index out of range) changes nothing. A loss that is no number
    /// is returned: the parameters are then spoilt, and [`Self::load`] brings back the last checkpoint.
    pub fn step<A: Argument>(&mut self, batch: &[(&str, A)]) -> Result<Losses, RuntimeError> {
        if self.train.part == TrainPart::Gradients {
            let losses = self.accumulate(batch)?;
            let grad_norm = self.update()?;
            return Ok(Losses {
                grad_norm: Some(grad_norm),
                ..losses
            });
        }
        let mut inputs = shared(batch);
        inputs.push((RATE, Value::new(&[self.lr], &[])?));
        let out = self.sessions[0].run_named(&self.module, &inputs)?;
        self.progress.step += 1;
        losses(&out)
    }

    /// Adds the gradients of a batch to those of the next update, for a module with `accumulate` in the spec.
    pub fn accumulate<A: Argument>(&mut self, batch: &[(&str, A)]) -> Result<Losses, RuntimeError> {
        let parts = self.parts(TrainPart::Gradients, &shared(batch))?;
        if self.sessions.len() > 1 && !self.compared {
            self.compare(&parts)?;
        }
        self.on_each(TrainPart::Gradients, &parts)
    }

    /// Returns the loss of a batch in eval mode. It changes nothing.
    pub fn eval_step<A: Argument>(&mut self, batch: &[(&str, A)]) -> Result<Losses, RuntimeError> {
        let parts = self.parts(TrainPart::Eval, &shared(batch))?;
        self.on_each(TrainPart::Eval, &parts)
    }

    /// Updates the parameters with the mean of the accumulated gradients. Returns their norm.
    fn update(&mut self) -> Result<f64, RuntimeError> {
        self.gather()?;
        let module = name_of(&self.module, TrainPart::Update);
        let rate = [(RATE, Value::new(&[self.lr], &[])?)];
        let losses = losses(&self.sessions[0].run_named(&module, &rate)?)?;
        self.spread()?;
        self.progress.step += 1;
        Ok(losses.grad_norm.unwrap_or(f64::NAN))
    }

    /// Returns whether a program has this state.
    fn has_state(&self, name: &str) -> bool {
        let mut programs = self.programs().into_iter();
        programs.any(|program| program.states.iter().any(|state| state.name == name))
    }

    /// Returns one program of each part.
    fn programs(&self) -> Vec<&'m Program> {
        let parts = [
            TrainPart::Step,
            TrainPart::Gradients,
            TrainPart::Update,
            TrainPart::Eval,
        ];
        let found = parts.iter();
        found
            .filter_map(|part| part_of(self.model, &self.module, *part))
            .collect()
    }
}

/// Returns a batch without copies.
fn shared<'a, A: Argument>(batch: &[(&'a str, A)]) -> Vec<(&'a str, Value)> {
    let inputs = batch.iter();
    inputs
        .map(|(name, value)| (*name, arrays::value(value)))
        .collect()
}

/// Returns the name of a part of a module.
fn name_of(module: &str, part: TrainPart) -> String {
    match part {
        TrainPart::Step => module.to_owned(),
        part => format!("{module}.{}", part.name()),
    }
}

/// Returns a program of a part of a training step.
fn part_of<'m>(model: &'m Model, module: &str, part: TrainPart) -> Option<&'m Program> {
    let programs = model.programs(&name_of(module, part)).into_iter();
    let is = |program: &&Program| {
        program
            .train
            .as_ref()
            .is_some_and(|train| train.part == part)
    };
    programs.into_iter().find(is)
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
