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
//! as the statistics of a batch norm, are those of the first device. The sums pass through the host's memory, and are
//! added in the order of the devices: a run gives the same numbers as another.
//!
//! Before the first batch, the devices are compared with one. The first device alone computes the gradients of all
//! parts, one part after the other; their sum is that of the devices, within rounding, or the training ends with
//! [`RuntimeError::WrongSum`]. For a loss that is a mean over rows, it is also the gradient of all rows at once.

use std::{ops::Add as Plus, panic, thread};

use precast_store::record::{Dtype, TrainPart};

use super::{Losses, SEED, Trainer, losses, name_of, part_of};
use crate::{
    Element, RuntimeError, Tensor, TorchError, Value,
    arrays::{self, refused},
    ffi::outside,
    problem::Problem,
};

/// Returns the sum of the tensors of all devices.
pub type Add = fn(&[Tensor]) -> Result<Tensor, TorchError>;

/// A part of a batch, for one device.
pub type Part<'a> = Vec<(&'a str, Value)>;

/// The sums of gradients, and the number of batches in them.
const SUMS: &str = "optimizer.gradient.";
const BATCHES: &str = "optimizer.batches";

/// Seed and counter of random numbers.
const RANDOM: &str = "random.";

/// The largest distance of a sum from that of one device, relative to the latter. A device that is left out, or counted
/// twice, is far beyond it.
const TOLERANCE: f64 = 1e-3;
const TOLERANCE_OF_HALVES: f64 = 2e-2;

impl Trainer<'_> {
    /// Replaces the sum of the devices' gradients: for a test of the comparison with one device.
    #[doc(hidden)]
    pub fn adding(mut self, add: Add) -> Self {
        self.add = add;
        self
    }

    /// Fails for a module that several devices can't share.
    pub(super) fn may_be_split(&self) -> Result<(), RuntimeError> {
        if self.sessions.len() > 1 && self.train.part == TrainPart::Step {
            return Err(self.several("gradients and update are one program".to_owned()));
        }
        Ok(())
    }

    /// Returns the part of a batch for each device: as many rows for each. Refuses values that a device would refuse,
    /// so that no device has added gradients when another one refuses its part.
    pub(super) fn parts<'a>(
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
        let program = part_of(self.model, &self.module, part);
        for input in program.iter().flat_map(|program| &program.inputs) {
            let given = batch.iter().find(|(name, _)| *name == input.name);
            if let (Some(bounds), Some((_, value))) = (input.bounds, given)
                && let Some(found) = outside(&arrays::tensor(value).meta(), bounds)
            {
                return Err(RuntimeError::BadInput {
                    module: name_of(&self.module, part).into(),
                    input: input.name.as_str().into(),
                    problem: Problem::Value {
                        position: Some(found.position),
                        value: Some(found.value),
                        bounds,
                    },
                });
            }
        }
        Ok(())
    }

    /// Runs a program on every device, each on its part, at the same time. Returns the means of the results.
    pub(super) fn on_each(
        &mut self,
        part: TrainPart,
        parts: &[Part<'_>],
    ) -> Result<Losses, RuntimeError> {
        let module = name_of(&self.module, part);
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
    pub(super) fn gather(&mut self) -> Result<(), RuntimeError> {
        if self.sessions.len() == 1 {
            return Ok(());
        }
        for name in self.sums() {
            let all = self.sessions.iter_mut().map(|one| one.shared(&name));
            let mut all = all.collect::<Result<Vec<_>, _>>()?;
            let total = (self.add)(&all).map_err(refused)?;
            all[0].copy_from(&total).map_err(refused)?;
            let others = &mut all[1..];
            others
                .iter_mut()
                .try_for_each(Tensor::zero)
                .map_err(refused)?;
        }
        Ok(())
    }

    /// Copies parameters and buffers of the first device to the others.
    pub(super) fn spread(&mut self) -> Result<(), RuntimeError> {
        let own = |name: &String| !is_sum(name) && !name.starts_with(RANDOM);
        let names = self.states_of(TrainPart::Gradients);
        self.copy(names.into_iter().filter(own))
    }

    /// Copies a loaded checkpoint to the other devices. Each gets its own seed.
    pub(super) fn spread_all(&mut self) -> Result<(), RuntimeError> {
        if self.sessions.len() == 1 {
            return Ok(());
        }
        let names = self.states_of(TrainPart::Gradients).into_iter();
        self.copy(names.filter(|name| !is_sum(name)))?;
        if self.has_state(SEED) {
            let seed = self.sessions[0].shared(SEED)?;
            let seed = seed.to_vec::<i64>().map_err(refused)?;
            self.set_seed(seed[0].cast_unsigned())?;
        }
        Ok(())
    }

    fn copy(&mut self, names: impl Iterator<Item = String>) -> Result<(), RuntimeError> {
        let Some((first, others)) = self.sessions.split_first_mut() else {
            return Ok(());
        };
        if others.is_empty() {
            return Ok(());
        }
        for name in names {
            let value = first.shared(&name)?;
            for other in &mut *others {
                other.set_state(&name, &value)?;
            }
        }
        Ok(())
    }

    /// Compares the sums of all devices with those of the first one alone, on the parts of a batch. Changes nothing.
    pub(super) fn compare(&mut self, parts: &[Part<'_>]) -> Result<(), RuntimeError> {
        let before = self.written()?;
        let module = name_of(&self.module, TrainPart::Gradients);
        for (part, own) in parts.iter().zip(&before) {
            let random = own.iter().filter(|(name, _)| name.starts_with(RANDOM));
            for (name, value) in random {
                self.sessions[0].set_state(name, value)?;
            }
            losses(&self.sessions[0].run_named(&module, part)?)?;
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
                    module: self.module.clone(),
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
        let parameters = self.states_of(TrainPart::Update);
        let mut names = self.states_of(TrainPart::Gradients);
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
        let names = self.sums().into_iter();
        let copied = names.map(|name| {
            let value = self.sessions[0].state(&name)?;
            Ok((name, value))
        });
        copied.collect()
    }

    fn sums(&self) -> Vec<String> {
        let mut names = self.states_of(TrainPart::Gradients);
        names.retain(|name| is_sum(name));
        names
    }

    fn states_of(&self, part: TrainPart) -> Vec<String> {
        let program = part_of(self.model, &self.module, part);
        let states = program.iter().flat_map(|program| &program.states);
        states.map(|state| state.name.clone()).collect()
    }

    fn several(&self, problem: String) -> RuntimeError {
        RuntimeError::SeveralDevices {
            module: self.module.clone(),
            devices: self.sessions.len(),
            problem,
        }
    }
}

/// Returns the seed of a device's random numbers: the training's own on the first one.
pub fn seed_of(seed: u64, device: usize) -> u64 {
    seed ^ (device as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn is_sum(state: &str) -> bool {
    state == BATCHES || state.starts_with(SUMS)
}

/// Returns the sum of tensors of one shape, in their order. Halves are added in single precision.
pub fn sum(all: &[Tensor]) -> Result<Tensor, TorchError> {
    fn of<T: Element + Copy + Plus<Output = T>>(all: &[Tensor]) -> Result<Tensor, TorchError> {
        let mut total = all[0].to_vec::<T>()?;
        for other in &all[1..] {
            let other = other.to_vec::<T>()?;
            for (total, other) in total.iter_mut().zip(other) {
                *total = *total + other;
            }
        }
        Tensor::from_slice(&total, &all[0].shape())
    }
    match all[0].dtype() {
        Some(Dtype::Int64) => of::<i64>(all),
        Some(Dtype::Float64) => of::<f64>(all),
        Some(Dtype::Float32) => of::<f32>(all),
        dtype => {
            let single = all.iter().map(|one| one.to_dtype(Dtype::Float32));
            let total = of::<f32>(&single.collect::<Result<Vec<_>, _>>()?)?;
            dtype.map_or(Ok(total.share()), |dtype| total.to_dtype(dtype))
        }
    }
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
    fn tensors_are_added_in_their_own_dtype() {
        for dtype in [
            Dtype::Float32,
            Dtype::Float64,
            Dtype::Bfloat16,
            Dtype::Int64,
        ] {
            let all = [[1.0, 2.0], [3.0, -2.0], [5.0, 7.0]].map(|one| tensor(&one, dtype));
            let total = sum(&all).unwrap();
            assert_eq!(total.dtype(), Some(dtype));
            let total = total.to_dtype(Dtype::Float32).unwrap();
            assert_eq!(total.to_vec::<f32>().unwrap(), [9.0, 7.0]);
        }
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
