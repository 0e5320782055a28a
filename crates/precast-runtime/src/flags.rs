//! The check of values on a device: inputs that the caller passes on the device, and indices that a program computes.
//!
//! An index beyond a table ends the kernel that reads by it, and CUDA's context with it: the device then gives no more
//! answers to this process. The host can't check such values before the call without waiting for the device. So the
//! program clamps its inputs and the indices that it computes (its record's `checks`), and has floats that follow from
//! a bad value be NaN. A small tensor on the device notes what was out of bounds:
//!
//! | noted | by | read as |
//! |---|---|---|
//! | whether a check failed | the program's steps | [`Problem::Value`] for an input, else [`RuntimeError::CheckFailed`] |
//! | minimum and maximum of an input with bounds that no check of the program has | the runtime, which clamps it before the first step | [`Problem::Value`] |
//!
//! The call does not wait for the notes: they are copied to pinned memory behind it, and read when they are there.
//! [`Outputs::check`](super::Outputs::check) waits for them, and so does [`Outputs::array`](super::Outputs::array).
//! Where neither is called, the first later call of the model that finds them there fails with
//! [`RuntimeError::EarlierCall`], and so does [`Model::check`](super::Model::check) ([`late`](super::late)). A program
//! without such inputs and checks has no notes.
//!
//! The inputs of a graph may be padded: there the pad value is within the bounds as well. Inputs from the host's memory
//! were checked there, and are also clamped: another thread may have written to them since.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicU8, Ordering},
};

use precast_store::{
    Device,
    record::{Dtype, Input, Pad, Program},
};
use smallvec::SmallVec;

use super::{
    RuntimeError, TorchError,
    ffi::{Handle, Handles, Slip, contiguous, note_outcomes, note_range},
    problem::Problem,
};

/// The values of one program that are noted.
#[derive(Clone)]
pub(super) struct Watch {
    program: Arc<Program>,
    module: Arc<str>,
    /// Inputs that the runtime clamps.
    inputs: SmallVec<[Watched; 4]>,
    /// The input of each check, if it has one.
    checked: SmallVec<[Option<Watched>; 4]>,
    /// Pinned memory of calls whose notes were read.
    spare: Arc<Mutex<Vec<Slip>>>,
}

/// An input with bounds: its number, and the lowest and highest value that it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Watched {
    input: usize,
    low: i64,
    high: i64,
}

/// The notes of one call.
pub(super) struct Flags {
    watch: Watch,
    /// Two numbers for each of the inputs that the runtime clamps, then one for each check.
    notes: Place,
    /// The caller's inputs, for the position of a value: those that the runtime clamps, and those of the checks.
    given: SmallVec<[Option<Handle>; 8]>,
    state: AtomicU8,
}

/// Where the notes of a call are.
enum Place {
    Tensor(Handle),
    /// Under way to the host.
    Slip(Option<Slip>),
}

/// Nobody has read the notes yet.
const UNREAD: u8 = 0;
/// They were read, and nothing was out of bounds.
const GOOD: u8 = 1;
/// The caller reads them, or has read them.
const CLAIMED: u8 = 2;

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
                let by_program = |input: &Input| {
                    let mut checks = program.checks.iter();
                    checks.any(|check| check.input.as_ref() == Some(&input.name))
                };
                let inputs = program.inputs.iter().enumerate();
                inputs
                    .filter(|(_, input)| !by_program(input))
                    .filter_map(|(at, input)| Watched::new(at, input, padded))
                    .collect()
            }
        };
        let any = !inputs.is_empty() || !program.checks.is_empty();
        let checked = program.checks.iter().map(|check| {
            let name = check.input.as_ref()?;
            let at = program
                .inputs
                .iter()
                .position(|input| input.name == *name)?;
            Watched::new(at, &program.inputs[at], padded)
        });
        any.then(|| Self {
            program: program.clone(),
            module: module.clone(),
            inputs,
            checked: checked.collect(),
            spare: Arc::default(),
        })
    }

    /// Replaces inputs with bounds by clamped ones.
    pub fn clamp(&self, inputs: &mut Handles, device: Device) -> Result<Flags, TorchError> {
        let room = (2 * self.inputs.len() + self.program.checks.len()) as i64;
        let notes = Handle::empty(&[room], &[1], Dtype::Int64, device)?;
        let given = self.given(inputs);
        for (at, watched) in (0..).step_by(2).zip(&self.inputs) {
            let clamped = note_range(
                &inputs[watched.input],
                &notes,
                at,
                [watched.low, watched.high],
            )?;
            inputs[watched.input] = clamped;
        }
        Ok(Flags {
            watch: self.clone(),
            notes: Place::Tensor(notes),
            given,
            state: AtomicU8::new(UNREAD),
        })
    }

    /// Returns the caller's inputs that a note may be about.
    fn given(&self, inputs: &Handles) -> SmallVec<[Option<Handle>; 8]> {
        let own = self
            .inputs
            .iter()
            .map(|watched| Some(inputs[watched.input].share()));
        let checked = self.checked.iter();
        let checked = checked.map(|watched| watched.map(|watched| inputs[watched.input].share()));
        own.chain(checked).collect()
    }

    /// Takes the outcomes of a program's checks off its results, and notes them.
    pub fn outcomes(&self, results: &mut Handles, flags: &mut Flags) -> Result<(), RuntimeError> {
        let outputs = self.program.outputs.len().min(results.len());
        let outcomes: Handles = results.drain(outputs..).collect();
        for outcome in &outcomes {
            let meta = outcome.meta();
            if !meta.defined() || !meta.dense() {
                return Err(RuntimeError::Malformed {
                    program: self.program.id,
                    reason: "the outcome of a check is no dense tensor".to_owned(),
                });
            }
        }
        flags.notes = match (&flags.notes, &outcomes[..]) {
            // The outcome itself.
            (_, [only]) if self.inputs.is_empty() && is_number(only) => Place::Tensor(only.share()),
            (Place::Tensor(notes), several) if !several.is_empty() => {
                let begin = 2 * self.inputs.len();
                note_outcomes(several, notes, begin).map_err(|error| self.tensor(error))?;
                return Ok(());
            }
            _ => return Ok(()),
        };
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
    /// Sends the notes to the host, behind the call's work on the thread's current stream. Returns none where that is
    /// being captured: then nothing is known of this call.
    pub fn sent(mut self, device: Device) -> Result<Option<Self>, TorchError> {
        let Place::Tensor(notes) = &self.notes else {
            return Ok(Some(self));
        };
        Ok(self.watch.send(notes, device)?.map(|notes| {
            self.notes = notes;
            self
        }))
    }

    /// Returns a graph's notes for one call with the inputs `given`, on their way to the host: the next replay
    /// overwrites them.
    pub fn of_call(&self, given: &Handles, device: Device) -> Result<Option<Self>, TorchError> {
        let Place::Tensor(notes) = &self.notes else {
            return Ok(None);
        };
        let sent = self.watch.send(notes, device)?;
        Ok(sent.map(|notes| Self {
            watch: self.watch.clone(),
            given: self.watch.given(given),
            notes,
            state: AtomicU8::new(UNREAD),
        }))
    }

    /// Waits for the notes and reads them: fails with the value that was out of bounds.
    pub fn check(&self) -> Result<(), RuntimeError> {
        if self.state.load(Ordering::Relaxed) == GOOD {
            return Ok(());
        }
        let notes = match &self.notes {
            Place::Tensor(notes) => notes.read(),
            Place::Slip(slip) => slip.as_ref().map_or(Ok(vec![]), Slip::read),
        };
        let notes = notes.map_err(|error| self.watch.tensor(error))?;
        let judged = self.judge(&notes);
        let state = if judged.is_ok() { GOOD } else { CLAIMED };
        self.state.store(state, Ordering::Relaxed);
        judged
    }

    /// Returns whether the notes are there.
    pub fn ready(&self) -> Result<bool, RuntimeError> {
        match &self.notes {
            Place::Slip(Some(slip)) => slip.ready().map_err(|error| self.watch.tensor(error)),
            _ => Ok(true),
        }
    }

    /// Returns whether nobody has read the notes, nor wants to.
    pub fn is_unread(&self) -> bool {
        self.state.load(Ordering::Relaxed) == UNREAD
    }

    /// Notes that the caller reads them: no later call does.
    pub fn claim(&self) {
        let claimed = (UNREAD, CLAIMED);
        let order = Ordering::Relaxed;
        let _ = (self.state).compare_exchange(claimed.0, claimed.1, order, order);
    }

    /// Fails with the value that was out of bounds.
    fn judge(&self, notes: &[i64]) -> Result<(), RuntimeError> {
        let (inputs, outcomes) = notes.split_at((2 * self.watch.inputs.len()).min(notes.len()));
        let given = |at: usize| self.given.get(at).and_then(Option::as_ref);
        for (at, (watched, noted)) in self.watch.inputs.iter().zip(inputs.chunks(2)).enumerate() {
            if let Some(&value) = noted.iter().find(|value| !watched.holds(**value)) {
                return Err(self.out_of_bounds(*watched, given(at), Some(value)));
            }
        }
        let mut checks = self.watch.program.checks.iter().zip(outcomes).enumerate();
        let Some((at, (check, _))) = checks.find(|(_, (_, outcome))| **outcome != 0) else {
            return Ok(());
        };
        if let Some(Some(watched)) = self.watch.checked.get(at) {
            return Err(self.out_of_bounds(*watched, given(self.watch.inputs.len() + at), None));
        }
        Err(RuntimeError::CheckFailed {
            module: self.watch.module.clone(),
            bucket: self.watch.program.bucket(),
            check: match &check.location {
                Some(location) => format!("{} ({location})", check.text),
                None => check.text.clone(),
            },
        })
    }

    fn out_of_bounds(
        &self,
        watched: Watched,
        given: Option<&Handle>,
        value: Option<i64>,
    ) -> RuntimeError {
        let input = &self.watch.program.inputs[watched.input];
        // It may have been written over since.
        let found = given.and_then(|given| position(given, |value| watched.holds(*value)));
        let (position, value) = match found {
            Some((position, value)) => (Some(position), Some(value)),
            None => (None, value),
        };
        let bounds = input.bounds.unwrap_or([watched.low, watched.high]);
        RuntimeError::BadInput {
            module: self.watch.module.clone(),
            input: input.name.as_str().into(),
            problem: Problem::value(input, bounds, value, position),
        }
    }
}

impl Drop for Flags {
    fn drop(&mut self) {
        if let Place::Slip(slip) = &mut self.notes
            && let Some(slip) = slip.take()
            && slip.ready().unwrap_or(false)
        {
            let mut spare = self
                .watch
                .spare
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            spare.push(slip);
        }
    }
}

impl Watch {
    /// Copies notes to the host, unless the stream is being captured.
    fn send(&self, notes: &Handle, device: Device) -> Result<Option<Place>, TorchError> {
        let Device::Cuda(device) = device else {
            return Ok(Some(Place::Tensor(notes.copied()?)));
        };
        let spare = self
            .spare
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let mut slip = match spare {
            Some(slip) => slip,
            None => Slip::new(device, 2 * self.inputs.len() + self.checked.len())?,
        };
        let sent = slip.send(notes)?;
        Ok(sent.then_some(Place::Slip(Some(slip))))
    }
}

impl Watched {
    fn holds(&self, value: i64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

impl std::fmt::Debug for Flags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flags")
            .field("inputs", &self.watch.inputs)
            .finish_non_exhaustive()
    }
}

/// Returns whether a tensor is one number as the notes have it.
fn is_number(tensor: &Handle) -> bool {
    let meta = tensor.meta();
    meta.dtype() == Some(Dtype::Int64) && meta.sizes().iter().product::<i64>() == 1
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
