//! A training on several devices: each computes the gradients of a part of every batch.
//!
//! ```text
//! batch ─┬▶ part 0 ─▶ gradients on device 0 ─┬▶ sum, mean ─▶ update on device 0 ─┐
//!        └▶ part 1 ─▶ gradients on device 1 ─┘                                   │
//!                                 parameters on device 1 ◀───────────────────────┘
//! ```
//!
//! Every device has a session. The first one makes the updates and has all values of the training: the others have
//! parameters, sums of gradients, and a seed of their own, so that no two devices draw the same numbers. Buffers, such
//! as the statistics of a batch norm, are those of the first device. `sums.rs` adds the sums and copies the parameters.
//!
//! Before the first batch, the devices are compared with one. The first device alone computes the gradients of all
//! parts, one part after the other; their sum is that of the devices, within rounding, or the training ends with
//! [`RuntimeError::WrongSum`]. For a loss that is a mean over rows, it is also the gradient of all rows at once.

use std::{cell::OnceCell, collections::BTreeMap, panic, path::Path, thread};

use precast_store::{
    Digest,
    record::{Dtype, TrainPart},
};

use super::{
    Losses, losses,
    steps::Steps,
    sums::{Add, Between, Sums},
};
use crate::{
    Device, RuntimeError, Session, Tensor, TorchError, Value,
    arrays::{self, refused},
    ffi::outside,
    problem::Problem,
};

/// A part of a batch, for one device.
pub type Part<'a> = Vec<(&'a str, Value)>;

/// The sums of gradients, and the number of batches in them.
const SUMS: &str = "optimizer.gradient.";
const BATCHES: &str = "optimizer.batches";

/// Seed and counter of random numbers, of a module that draws them.
const RANDOM: &str = "random.";
const SEED: &str = "random.seed";

/// The largest distance of a sum from that of one device, relative to the latter. A device that is left out, or counted
/// twice, is far beyond it.
const TOLERANCE: f64 = 1e-3;
const TOLERANCE_OF_HALVES: f64 = 2e-2;

/// A session on each device of a model, and the programs that train.
pub struct Devices<'m> {
    pub steps: Steps<'m>,
    // Before the sessions, whose tensors it reads and writes.
    /// The way from device to device.
    between: Between,
    /// The first has the values of the training, the others copies of the parameters.
    sessions: Vec<Session<'m>>,
    /// Whether several devices were compared with one.
    compared: bool,
    /// The digest of the weights that are not trained, once it was asked for.
    frozen: OnceCell<Option<Digest>>,
}

impl<'m> Devices<'m> {
    /// Opens the sessions. Fails for a module that several devices can't share.
    pub fn new(steps: Steps<'m>) -> Result<Self, RuntimeError> {
        let sessions = Session::on_each(steps.model)?;
        let gradients = steps.program(TrainPart::Gradients).into_iter();
        let states = gradients.flat_map(|program| &program.states);
        let sums = states.filter(|state| is_sum(&state.name));
        let mut made = Self {
            between: Between::new(&sessions, sums.map(|state| state.layout.dtype)),
            steps,
            sessions,
            compared: false,
            frozen: OnceCell::new(),
        };
        if made.sessions.len() > 1 && made.steps.train.part == TrainPart::Step {
            return Err(made.several("gradients and update are one program".to_owned()));
        }
        made.prepare()?;
        Ok(made)
    }

    /// Captures the CUDA graphs of a step. Parameters and moments have no values yet, so that a training that continues
    /// from a checkpoint takes no more memory than one that begins.
    fn prepare(&mut self) -> Result<(), RuntimeError> {
        for (index, session) in self.sessions.iter_mut().enumerate() {
            // Moments are on the first device alone.
            let parts: &[TrainPart] = match index {
                0 => &[TrainPart::Step, TrainPart::Gradients, TrainPart::Update],
                _ => &[TrainPart::Gradients],
            };
            for part in parts {
                session.prepare(&self.steps.name_of(*part))?;
            }
        }
        Ok(())
    }

    /// Returns where gradients are added; none for one device.
    pub fn sums(&self) -> Option<Sums> {
        (self.sessions.len() > 1).then_some(self.between.sums())
    }

    /// Adds gradients in the host's memory.
    pub fn add_by(&mut self, add: Add) {
        self.between = Between::memory(add);
    }

    /// Adds gradients by this library.
    pub fn add_through(&mut self, nccl: &Path) -> Result<(), RuntimeError> {
        self.between.take_nccl(nccl)
    }

    /// Returns the session with the values of the training.
    pub fn first(&mut self) -> &mut Session<'m> {
        &mut self.sessions[0]
    }

    /// Returns the bytes of the first device's states.
    pub fn bytes(&self) -> u64 {
        self.sessions[0].bytes()
    }

    /// Returns the digest of the weights that the programs read beside the states; none if they read none. It reads all
    /// of them once.
    pub fn frozen(&self) -> Result<Option<Digest>, RuntimeError> {
        if let Some(known) = self.frozen.get() {
            return Ok(*known);
        }
        let read = self.sessions[0].digest_of(&self.steps.weights())?;
        Ok(*self.frozen.get_or_init(|| read))
    }

    /// Sets the seed of random numbers, another one on each device.
    pub fn set_seed(&mut self, seed: u64) -> Result<(), RuntimeError> {
        if !self.steps.has_state(SEED) {
            return Ok(());
        }
        for (index, session) in self.sessions.iter_mut().enumerate() {
            let own = seed_of(seed, index).cast_signed();
            session.set_state(SEED, &Value::new(&[own], &[])?)?;
        }
        Ok(())
    }

    /// Runs a program on the first device.
    pub fn on_first(
        &mut self,
        part: TrainPart,
        inputs: &[(&str, Value)],
    ) -> Result<Losses, RuntimeError> {
        let module = self.steps.name_of(part);
        losses(&self.sessions[0].run_named(&module, inputs)?)
    }

    /// Returns copies of all states, by name.
    pub fn states(&mut self) -> Result<Vec<(String, Tensor)>, RuntimeError> {
        self.gather()?;
        let programs = self.steps.programs();
        let states = programs.iter().flat_map(|program| &program.states);
        let mut names: Vec<&String> = states.map(|state| &state.name).collect();
        names.sort_unstable();
        names.dedup();
        let copy = |name: &String| {
            let state = self.sessions[0].state(name)?;
            let state = state.to_device(Device::Cpu).map_err(refused)?;
            Ok((name.clone(), state))
        };
        names.into_iter().map(copy).collect()
    }

    /// Takes the states of a checkpoint.
    pub fn take(&mut self, states: &BTreeMap<String, Tensor>) -> Result<(), RuntimeError> {
        for session in &mut self.sessions {
            session.reset();
        }
        for (name, value) in states {
            self.sessions[0].set_state(name, value)?;
        }
        self.spread_all()
    }

    /// Returns the part of a batch for each device: as many rows for each. Refuses values that a device would refuse,
    /// so that no device has added gradients when another one refuses its part.
    pub fn parts<'a>(
        &self,
        part: TrainPart,
        batch: &[(&'a str, Value)],
    ) -> Result<Vec<Part<'a>>, RuntimeError> {
        let count = self.sessions.len();
        if count == 1 {
            let all = batch.iter().map(|(name, value)| (*name, value.share()));
            return Ok(vec![all.collect()]);
        }
        self.check_values(part, batch)?;
        let rows = |(name, value): &(&str, Value)| match value.shape().first() {
            Some(rows) if rows % count != 0 => {
                let problem = format!("input `{name}` has {rows} rows");
                Err(self.several(problem))
            }
            _ => Ok(()),
        };
        batch.iter().try_for_each(rows)?;
        let part = |index: usize| -> Result<Part<'a>, RuntimeError> {
            let inputs = batch.iter().map(|(name, value)| {
                let own = match value.shape().first() {
                    None => value.share(),
                    Some(rows) => value.rows(index * rows / count, rows / count)?,
                };
                Ok((*name, own))
            });
            inputs.collect()
        };
        (0..count).map(part).collect()
    }

    fn check_values(&self, part: TrainPart, batch: &[(&str, Value)]) -> Result<(), RuntimeError> {
        let program = self.steps.program(part);
        for input in program.iter().flat_map(|program| &program.inputs) {
            let given = batch.iter().find(|(name, _)| *name == input.name);
            if let (Some(bounds), Some((_, value))) = (input.bounds, given)
                && let Some(found) = outside(&arrays::tensor(value).meta(), bounds)
            {
                return Err(RuntimeError::BadInput {
                    module: self.steps.name_of(part).into(),
                    input: input.name.as_str().into(),
                    problem: Problem::value(input, bounds, Some(found.value), Some(found.position)),
                });
            }
        }
        Ok(())
    }

    /// Runs a program on every device, each on its part, at the same time. Returns the means of the results.
    pub fn on_each(&mut self, part: TrainPart, parts: &[Part<'_>]) -> Result<Losses, RuntimeError> {
        let module = self.steps.name_of(part);
        let pairs = self.sessions.iter_mut().zip(parts);
        let results: Vec<Result<Losses, RuntimeError>> = thread::scope(|scope| {
            let mut calls = pairs.map(|(session, part)| {
                let module = &module;
                move || losses(&session.run_named(module, part)?)
            });
            let first = calls.next();
            let others: Vec<_> = calls.map(|call| scope.spawn(call)).collect();
            let first = first.map(|mut call| call()).into_iter();
            let joined = others.into_iter().map(|thread| {
                let joined = thread.join();
                joined.unwrap_or_else(|panicked| panic::resume_unwind(panicked))
            });
            first.chain(joined).collect()
        });
        Ok(mean(&results.into_iter().collect::<Result<Vec<_>, _>>()?))
    }

    /// Adds the sums of all devices on the first one. The others begin new sums.
    pub fn gather(&mut self) -> Result<(), RuntimeError> {
        let names = self.names_of_sums();
        self.between.gather(&mut self.sessions, &names)
    }

    /// Copies parameters and buffers of the first device to the others.
    pub fn spread(&mut self) -> Result<(), RuntimeError> {
        let mut names = self.steps.states_of(TrainPart::Gradients);
        names.retain(|name| !is_sum(name) && !name.starts_with(RANDOM));
        self.between.spread(&mut self.sessions, &names)
    }

    /// Copies a loaded checkpoint to the other devices. Each gets its own seed.
    fn spread_all(&mut self) -> Result<(), RuntimeError> {
        if self.sessions.len() == 1 {
            return Ok(());
        }
        let mut names = self.steps.states_of(TrainPart::Gradients);
        names.retain(|name| !is_sum(name));
        self.between.spread(&mut self.sessions, &names)?;
        if self.steps.has_state(SEED) {
            let seed = self.sessions[0].shared(SEED)?;
            let seed = seed.to_vec::<i64>().map_err(refused)?;
            self.set_seed(seed[0].cast_unsigned())?;
        }
        Ok(())
    }

    /// Compares the sums of several devices with those of the first one alone, on the parts of a batch, unless that was
    /// done. Changes nothing.
    pub fn compare_once(&mut self, parts: &[Part<'_>]) -> Result<(), RuntimeError> {
        if self.sessions.len() == 1 || self.compared {
            return Ok(());
        }
        let before = self.written()?;
        for (part, own) in parts.iter().zip(&before) {
            let random = own.iter().filter(|(name, _)| name.starts_with(RANDOM));
            for (name, value) in random {
                self.sessions[0].set_state(name, value)?;
            }
            self.on_first(TrainPart::Gradients, part)?;
        }
        let wanted = self.first_sums()?;
        self.write(&before)?;
        self.on_each(TrainPart::Gradients, parts)?;
        self.gather()?;
        let got = self.first_sums()?;
        self.write(&before)?;
        for ((state, got), wanted) in got.into_iter().zip(&wanted) {
            let most = match wanted.1.dtype() {
                Some(Dtype::Bfloat16 | Dtype::Float16) => TOLERANCE_OF_HALVES,
                _ => TOLERANCE,
            };
            let Some(distance) = distance(&got, &wanted.1).map_err(refused)? else {
                // The gradients of this batch are no numbers: the next one is compared.
                return Ok(());
            };
            if distance.is_nan() || distance > most {
                return Err(RuntimeError::WrongSum {
                    module: self.steps.module.clone(),
                    state,
                    devices: self.sessions.len(),
                    distance,
                });
            }
        }
        self.compared = true;
        Ok(())
    }

    /// Returns copies of the states that gradients are written into, by session.
    fn written(&mut self) -> Result<Vec<Vec<(String, Tensor)>>, RuntimeError> {
        let parameters = self.steps.states_of(TrainPart::Update);
        let mut names = self.steps.states_of(TrainPart::Gradients);
        names.retain(|name| is_sum(name) || !parameters.contains(name));
        let copies = self.sessions.iter_mut().map(|session| {
            let states = names.iter();
            let copied = states.map(|name| Ok((name.clone(), session.state(name)?)));
            copied.collect::<Result<Vec<_>, _>>()
        });
        copies.collect()
    }

    fn write(&mut self, states: &[Vec<(String, Tensor)>]) -> Result<(), RuntimeError> {
        for (session, states) in self.sessions.iter_mut().zip(states) {
            for (name, value) in states {
                session.set_state(name, value)?;
            }
        }
        Ok(())
    }

    /// Returns copies of the first device's sums.
    fn first_sums(&mut self) -> Result<Vec<(String, Tensor)>, RuntimeError> {
        let names = self.names_of_sums().into_iter();
        let copied = names.map(|name| {
            let value = self.sessions[0].state(&name)?;
            Ok((name, value))
        });
        copied.collect()
    }

    /// Returns the names of the sums of gradients.
    fn names_of_sums(&self) -> Vec<String> {
        let mut names = self.steps.states_of(TrainPart::Gradients);
        names.retain(|name| is_sum(name));
        names
    }

    fn several(&self, problem: String) -> RuntimeError {
        RuntimeError::SeveralDevices {
            module: self.steps.module.clone(),
            devices: self.sessions.len(),
            problem,
        }
    }
}

/// Returns the seed of a device's random numbers: the training's own on the first one.
fn seed_of(seed: u64, device: usize) -> u64 {
    seed ^ (device as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns whether a state is a sum of gradients, or the number of batches in them.
fn is_sum(state: &str) -> bool {
    state == BATCHES || state.starts_with(SUMS)
}

/// Returns the norm of the difference of two tensors, relative to that of the second; none if that is no number.
fn distance(got: &Tensor, wanted: &Tensor) -> Result<Option<f64>, TorchError> {
    let numbers = |one: &Tensor| one.to_dtype(Dtype::Float64)?.to_vec::<f64>();
    let (got, wanted) = (numbers(got)?, numbers(wanted)?);
    let size = norm(wanted.iter().copied());
    if !size.is_finite() {
        return Ok(None);
    }
    let apart = norm(got.iter().zip(&wanted).map(|(a, b)| a - b));
    Ok(Some(if apart == 0.0 { 0.0 } else { apart / size }))
}

fn norm(all: impl Iterator<Item = f64>) -> f64 {
    all.map(|one| one * one).sum::<f64>().sqrt()
}

/// Returns the means of the results of several devices.
fn mean(all: &[Losses]) -> Losses {
    let count = all.len() as f64;
    let mut mean = all[0].clone();
    mean.loss = all.iter().map(|one| one.loss).sum::<f64>() / count;
    for (at, (_, value)) in mean.metrics.iter_mut().enumerate() {
        *value = all.iter().map(|one| one.metrics[at].1).sum::<f64>() / count;
    }
    mean
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32], dtype: Dtype) -> Tensor {
        let made = Tensor::from_slice(values, &[values.len() as i64]).unwrap();
        made.to_dtype(dtype).unwrap()
    }

    #[test]
    fn a_distance_is_relative_and_that_of_no_number_is_none() {
        let one = |values: &[f32]| tensor(values, Dtype::Float32);
        let apart = |got: &[f32], wanted: &[f32]| distance(&one(got), &one(wanted)).unwrap();
        assert_eq!(apart(&[3.0, 4.0], &[3.0, 4.0]), Some(0.0));
        assert_eq!(apart(&[0.0, 0.0], &[3.0, 4.0]), Some(1.0));
        assert_eq!(apart(&[0.0], &[0.0]), Some(0.0));
        assert_eq!(apart(&[1.0], &[0.0]), Some(f64::INFINITY));
        assert!(apart(&[f32::NAN], &[1.0]).unwrap().is_nan());
        assert_eq!(apart(&[1.0], &[f32::NAN]), None);
    }

    #[test]
    fn devices_have_seeds_of_their_own() {
        let seeds: std::collections::BTreeSet<u64> =
            (0..64).map(|device| seed_of(7, device)).collect();
        assert_eq!((seeds.len(), seed_of(7, 0)), (64, 7));
    }
}
