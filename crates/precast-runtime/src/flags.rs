//! The check of values on a device: inputs that the caller passes on the device, and indices that a program computes.
//!
//! An index beyond a table ends the kernel that reads by it, and CUDA's context with it: the device then gives no more
//! answers to this process. The host can't check such values before the call without waiting for the device. So an
//! input is clamped to its bounds on the device, and the program clamps the indices that it computes (its record's
//! `checks`). A small tensor on the device notes both, and is returned with the outputs:
//!
//! | noted | by | read as |
//! |---|---|---|
//! | minimum and maximum of each input with bounds | the runtime, before the first step; captured into a graph | [`Problem::Value`] |
//! | whether a check failed | the program's steps | [`RuntimeError::CheckFailed`] |
//!
//! [`Outputs::check`](super::Outputs::check) waits for the tensor and reads it;
//! [`Outputs::array`](super::Outputs::array) also calls it first. Callers that keep outputs on the device or take them
//! as tensors must call `check`, or take the tensor ([`Outputs::take_notes`](super::Outputs::take_notes)) and judge a
//! copy of it later, without a wait. The call itself does not wait, and a program without such inputs and checks has no
//! notes.
//!
//! The inputs of a graph may be padded: there the pad value is within the bounds as well. Inputs from the host's memory
//! were checked there, and are also clamped: another thread may have written to them since.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use precast_store::{
    Device,
    record::{Dtype, Input, Pad, Program},
};
use smallvec::SmallVec;

use super::{
    RuntimeError, TorchError,
    ffi::{Handle, Handles, contiguous, note_failed, note_range},
    problem::Problem,
};

/// The values of one program that are noted.
#[derive(Clone)]
pub(super) struct Watch {
    program: Arc<Program>,
    module: Arc<str>,
    inputs: SmallVec<[Watched; 4]>,
}

/// An input that is clamped: its number, and the lowest and highest value that it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Watched {
    input: usize,
    low: i64,
    high: i64,
}

/// The notes of one call.
pub(super) struct Flags {
    watch: Watch,
    /// On the device: two numbers for each of the inputs, then one for each check.
    notes: Handle,
    /// The caller's inputs, for the position of a value.
    given: SmallVec<[Handle; 4]>,
    good: AtomicBool,
}

impl Watch {
    /// Watches a program's inputs where they can be on a device, and its checks; none where there is nothing to note.
    /// `padded` is for inputs that hold the pad value beside the caller's.
    pub fn new(
        program: &Arc<Program>,
        module: &Arc<str>,
        device: Device,
        padded: bool,
    ) -> Option<Self> {
        let inputs: SmallVec<[Watched; 4]> = match device {
            // They are looked at before the call.
            Device::Cpu => SmallVec::new(),
            Device::Cuda(_) => {
                let inputs = program.inputs.iter().enumerate();
                inputs
                    .filter_map(|(at, input)| Watched::new(at, input, padded))
                    .collect()
            }
        };
        let any = !inputs.is_empty() || !program.checks.is_empty();
        any.then(|| Self {
            program: program.clone(),
            module: module.clone(),
            inputs,
        })
    }

    /// Replaces inputs with bounds by clamped ones.
    pub fn clamp(&self, inputs: &mut Handles, device: Device) -> Result<Flags, TorchError> {
        let room = (2 * self.inputs.len() + self.program.checks.len()) as i64;
        let notes = Handle::empty(&[room], &[1], Dtype::Int64, device)?;
        let mut given = SmallVec::new();
        for (at, watched) in (0..).step_by(2).zip(&self.inputs) {
            let clamped = note_range(
                &inputs[watched.input],
                &notes,
                at,
                [watched.low, watched.high],
            )?;
            let own = std::mem::replace(&mut inputs[watched.input], clamped);
            given.push(own);
        }
        Ok(Flags {
            watch: self.clone(),
            notes,
            given,
            good: AtomicBool::new(false),
        })
    }

    /// Takes the outcomes of a program's checks off its results, and notes them.
    pub fn outcomes(&self, results: &mut Handles, flags: &mut Flags) -> Result<(), RuntimeError> {
        let outputs = self.program.outputs.len().min(results.len());
        let outcomes: Handles = results.drain(outputs..).collect();
        let begin = 2 * self.inputs.len();
        for (at, outcome) in (begin..).zip(outcomes) {
            let meta = outcome.meta();
            if !meta.defined() || !meta.dense() {
                return Err(RuntimeError::Malformed {
                    program: self.program.id,
                    reason: "the outcome of a check is no dense tensor".to_owned(),
                });
            }
            note_failed(&outcome, &flags.notes, at).map_err(|error| self.tensor(error))?;
        }
        Ok(())
    }

    fn tensor(&self, message: TorchError) -> RuntimeError {
        RuntimeError::Tensor {
            module: self.module.clone(),
            message,
        }
    }
}

impl Watched {
    /// Returns none for an input with all values of its dtype.
    fn new(at: usize, input: &Input, padded: bool) -> Option<Self> {
        let [low, past] = input.bounds?;
        let (least, most) = limits(input.layout.dtype)?;
        let (mut low, mut high) = (low.max(least), past.saturating_sub(1).min(most));
        if padded && let Pad::Int(pad) = input.pad {
            (low, high) = (low.min(pad), high.max(pad));
        }
        let any = low <= least && high >= most;
        (!any && low <= high).then_some(Self {
            input: at,
            low,
            high,
        })
    }
}

impl Flags {
    /// Returns a graph's notes for one call with the inputs `given`: the next replay overwrites them.
    pub fn of_call(&self, given: &Handles) -> Result<Self, TorchError> {
        let notes = self.notes.copied()?;
        let inputs = self.watch.inputs.iter();
        let given = inputs.map(|watched| given[watched.input].share());
        Ok(Self {
            watch: self.watch.clone(),
            notes,
            given: given.collect(),
            good: AtomicBool::new(false),
        })
    }

    /// Waits for the notes and reads them: fails with the value that was out of bounds.
    pub fn check(&self) -> Result<(), RuntimeError> {
        if !self.good.load(Ordering::Relaxed) {
            self.read()?;
            self.good.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// As [`Self::check`], for notes that are written again and again.
    pub fn read(&self) -> Result<(), RuntimeError> {
        let notes: Result<Vec<i64>, TorchError> = self.notes.read();
        self.judge(&notes.map_err(|error| self.watch.tensor(error))?)
    }

    /// Returns the tensor on the device.
    pub fn notes(&self) -> &Handle {
        &self.notes
    }

    /// Fails with the value that was out of bounds, by a copy of the notes.
    pub fn judge(&self, notes: &[i64]) -> Result<(), RuntimeError> {
        let (inputs, outcomes) = notes.split_at((2 * self.watch.inputs.len()).min(notes.len()));
        for ((watched, noted), given) in self
            .watch
            .inputs
            .iter()
            .zip(inputs.chunks(2))
            .zip(&self.given)
        {
            let inside = |value: &i64| (watched.low..=watched.high).contains(value);
            let Some(&value) = noted.iter().find(|value| !inside(value)) else {
                continue;
            };
            let input = &self.watch.program.inputs[watched.input];
            // It may have been written over since.
            let found = position(given, inside);
            let (position, value) = match found {
                Some((position, value)) => (Some(position), value),
                None => (None, value),
            };
            let bounds = input.bounds.unwrap_or([watched.low, watched.high]);
            return Err(RuntimeError::BadInput {
                module: self.watch.module.clone(),
                input: input.name.as_str().into(),
                problem: Problem::value(input, bounds, value, position),
            });
        }
        let mut checks = self.watch.program.checks.iter().zip(outcomes);
        match checks.find(|(_, outcome)| **outcome != 0) {
            None => Ok(()),
            Some((check, _)) => Err(RuntimeError::CheckFailed {
                module: self.watch.module.clone(),
                bucket: self.watch.program.bucket(),
                check: match &check.location {
                    Some(location) => format!("{} ({location})", check.text),
                    None => check.text.clone(),
                },
            }),
        }
    }
}

impl std::fmt::Debug for Flags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flags")
            .field("inputs", &self.watch.inputs)
            .finish_non_exhaustive()
    }
}

/// Returns the first element that is not `inside`, row by row.
fn position(given: &Handle, inside: impl Fn(&i64) -> bool) -> Option<(Vec<i64>, i64)> {
    let sizes = given.meta().sizes();
    let wide = Handle::empty(sizes, &contiguous(sizes), Dtype::Int64, Device::Cpu).ok()?;
    wide.copy_from(given).ok()?;
    let values: Vec<i64> = wide.read().ok()?;
    let at = values.iter().position(|value| !inside(value))?;
    let mut rest = at as i64;
    let mut position: Vec<i64> = Vec::new();
    for &size in sizes.iter().rev() {
        position.insert(0, rest % size);
        rest /= size;
    }
    Some((position, values[at]))
}

/// Returns the lowest and highest value of an integer dtype.
fn limits(dtype: Dtype) -> Option<(i64, i64)> {
    Some(match dtype {
        Dtype::Int64 => (i64::MIN, i64::MAX),
        Dtype::Int32 => (i32::MIN.into(), i32::MAX.into()),
        Dtype::Int16 => (i16::MIN.into(), i16::MAX.into()),
        Dtype::Int8 => (i8::MIN.into(), i8::MAX.into()),
        Dtype::Uint8 => (0, u8::MAX.into()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
