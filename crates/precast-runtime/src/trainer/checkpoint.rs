//! Checkpoints: one file with every state of a training step, and how far the training came. Its form is that of
//! [`crate::saved`].
//!
//! A trainer that loads a file continues as if it had not ended: the same programs on the same states give the same
//! losses, bit for bit, on the same CPU with the same number of threads.

use std::{collections::BTreeMap, path::Path};

use precast_store::Digest;

use super::steps::Steps;
use crate::{
    RuntimeError, Tensor,
    saved::{self, Header, Holds, SavedError, Training},
};

/// How far a training came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The number of updates.
    pub step: u64,
    /// The position in the data, as [`Trainer::set_position`](crate::Trainer::set_position) got it.
    pub position: u64,
    /// The seed of the data's order, as [`Trainer::set_position`](crate::Trainer::set_position) got it.
    pub seed: u64,
    /// The caller's notes by name, as [`Trainer::set_note`](crate::Trainer::set_note) got them.
    pub notes: BTreeMap<String, String>,
}

/// Writes a file, whole or not at all, also if the machine stops. `frozen` is the digest of the weights that the programs
/// read beside the states.
pub fn write(
    path: &Path,
    steps: &Steps<'_>,
    frozen: Option<Digest>,
    progress: &Progress,
    states: &[(String, Tensor)],
) -> Result<(), RuntimeError> {
    let header = header(steps, frozen, progress).map_err(|problem| wrong(path, problem))?;
    saved::write(path, &header, states, true).map_err(|error| failed(path, error))
}

/// A file that was read.
pub struct Checkpoint {
    pub states: BTreeMap<String, Tensor>,
    pub progress: Progress,
    /// Whether the programs are those that wrote it.
    pub same: bool,
}

/// Reads a file, if it is whole and of these programs and weights.
pub fn read(
    path: &Path,
    steps: &Steps<'_>,
    frozen: Option<Digest>,
) -> Result<Checkpoint, RuntimeError> {
    let wrong = |problem: String| wrong(path, problem);
    let own = header(steps, frozen, &Progress::default()).map_err(wrong)?;
    let fits = |header: &Header| header.fits(&own).and_then(|()| header.within(None));
    let (header, states) = saved::read(path, fits).map_err(|error| failed(path, error))?;
    check(steps, &states).map_err(wrong)?;
    let Holds::Checkpoint(training) = header.holds else {
        return Err(wrong("it is no checkpoint".to_owned()));
    };
    Ok(Checkpoint {
        states,
        same: training.programs == steps.digest(),
        progress: Progress {
            step: training.step,
            position: header.position.unsigned_abs(),
            seed: training.seed,
            notes: training.notes,
        },
    })
}

fn header(
    steps: &Steps<'_>,
    frozen: Option<Digest>,
    progress: &Progress,
) -> Result<Header, String> {
    let position = i64::try_from(progress.position)
        .map_err(|_| format!("the position {} is beyond {}", progress.position, i64::MAX))?;
    let training = Training {
        module: steps.module.clone(),
        optimizer: steps.train.optimizer.clone(),
        programs: steps.digest(),
        step: progress.step,
        seed: progress.seed,
        notes: progress.notes.clone(),
    };
    let holds = Holds::Checkpoint(Box::new(training));
    Ok(Header::new(steps.model.name(), frozen, position, holds))
}

/// Compares the tensors of a file with the states of the programs.
fn check(steps: &Steps<'_>, states: &BTreeMap<String, Tensor>) -> Result<(), String> {
    let programs = steps.programs();
    let mut wanted = BTreeMap::new();
    for state in programs.iter().flat_map(|program| &program.states) {
        wanted.insert(&state.name, &state.layout);
    }
    if let Some(name) = states.keys().find(|name| !wanted.contains_key(name)) {
        return Err(format!(
            "it has the state `{name}`, and the module has none of that name"
        ));
    }
    for (name, layout) in wanted {
        let Some(tensor) = states.get(name) else {
            return Err(format!("it lacks the state `{name}`"));
        };
        if tensor.dtype() != Some(layout.dtype) || tensor.shape() != layout.shape {
            return Err(format!(
                "its state `{name}` is {} {:?}, not {} {:?}",
                tensor.dtype_name(),
                tensor.shape(),
                layout.dtype,
                layout.shape
            ));
        }
    }
    Ok(())
}

fn wrong(path: &Path, problem: String) -> RuntimeError {
    RuntimeError::Checkpoint {
        path: path.to_owned(),
        problem,
    }
}

fn failed(path: &Path, error: SavedError) -> RuntimeError {
    match error {
        SavedError::Unfit(problem) => wrong(path, problem),
        SavedError::Io(source) => RuntimeError::CheckpointFile {
            path: path.to_owned(),
            source,
        },
    }
}
