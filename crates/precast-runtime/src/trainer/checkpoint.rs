//! Checkpoints: one safetensors file with every state of a training step, and how far the training came.
//!
//! A file is written whole: under a temporary name in its folder, flushed to the disk, then renamed over an earlier one.
//! So a process that is killed at any moment leaves the earlier file or the new one. The header has a digest of all
//! tensors: a changed byte is found. Tensors are written and read one after the other: states may be most of the memory.
//!
//! A trainer that loads a file continues as if it had not ended: the same programs on the same states give the same
//! losses, bit for bit, on the same CPU with the same number of threads.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    path::Path,
};

use precast_store::Digest;
use serde::{Deserialize, Serialize};

use super::steps::Steps;
use crate::{
    RuntimeError, Tensor, TorchError,
    arrays::refused,
    tensors::{self, TensorFile, TensorFileError},
};

/// The format of the header.
const FORMAT: u32 = 1;

/// The key of the header in the file's metadata.
const KEY: &str = "precast.checkpoint";

/// How far a training came.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The number of updates.
    pub step: u64,
    /// The position in the data, as [`Trainer::set_position`](crate::Trainer::set_position) got it.
    pub position: u64,
    /// The seed of the data's order, as [`Trainer::set_position`](crate::Trainer::set_position) got it.
    pub seed: u64,
}

/// The header of a file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    format: u32,
    model: String,
    module: String,
    optimizer: String,
    pub progress: Progress,
    /// The digest of the programs' IDs.
    pub programs: Digest,
    /// The digest of all tensors.
    content: Digest,
}

impl Header {
    /// Returns the header of a file with these states.
    pub fn new(
        steps: &Steps<'_>,
        progress: &Progress,
        states: &[(String, Tensor)],
    ) -> Result<Self, TorchError> {
        Ok(Self {
            format: FORMAT,
            model: steps.model.name().to_owned(),
            module: steps.module.clone(),
            optimizer: steps.train.optimizer.clone(),
            progress: progress.clone(),
            programs: steps.digest(),
            content: content(states)?,
        })
    }

    fn fits(&self, steps: &Steps<'_>) -> Result<(), String> {
        let own = [
            ("model", steps.model.name(), &self.model),
            ("module", &steps.module, &self.module),
            ("optimizer", &steps.train.optimizer, &self.optimizer),
        ];
        for (what, own, other) in own {
            if own != *other {
                return Err(format!("it is of {what} `{other}`, not of `{own}`"));
            }
        }
        Ok(())
    }
}

/// Writes a file, whole or not at all.
pub fn write(
    path: &Path,
    header: &Header,
    states: &[(String, Tensor)],
) -> Result<(), RuntimeError> {
    let text = serde_json::to_string(header)
        .map_err(|error| wrong(path, format!("its header can't be written: {error}")))?;
    let texts = HashMap::from([(KEY.to_owned(), text)]);
    tensors::write_durably(path, states, texts).map_err(|error| failed(path, error))
}

/// Reads the header and the states of a file, if it is whole and of these programs.
pub fn read(
    path: &Path,
    steps: &Steps<'_>,
) -> Result<(Header, BTreeMap<String, Tensor>), RuntimeError> {
    let file = File::open(path).map_err(|source| unusable(path, source))?;
    let file = TensorFile::open(file).map_err(|error| failed(path, error))?;
    let header = header(file.text(KEY)).map_err(|problem| wrong(path, problem))?;
    header.fits(steps).map_err(|problem| wrong(path, problem))?;
    let read = file.tensors().map_err(|error| failed(path, error))?;
    let states: Vec<(String, Tensor)> = read.into_iter().collect();
    if content(&states).map_err(refused)? != header.content {
        let problem = "its tensors were changed after it was written";
        return Err(wrong(path, problem.to_owned()));
    }
    let states: BTreeMap<String, Tensor> = states.into_iter().collect();
    check(steps, &states).map_err(|problem| wrong(path, problem))?;
    Ok((header, states))
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

fn failed(path: &Path, error: TensorFileError) -> RuntimeError {
    match error {
        TensorFileError::Read(source) | TensorFileError::Write(source) => unusable(path, source),
        TensorFileError::Format(error) => wrong(
            path,
            format!("it is no safetensors file, or was cut off: {error}"),
        ),
        error => wrong(path, error.to_string()),
    }
}

fn unusable(path: &Path, source: std::io::Error) -> RuntimeError {
    RuntimeError::CheckpointFile {
        path: path.to_owned(),
        source,
    }
}

/// Reads the header of a file.
fn header(text: Option<&str>) -> Result<Header, String> {
    let text = text.ok_or("it is no checkpoint")?;
    #[derive(Deserialize)]
    struct Format {
        format: u32,
    }
    let bad = |error: serde_json::Error| format!("its header can't be read: {error}");
    let Format { format } = serde_json::from_str(text).map_err(bad)?;
    if format != FORMAT {
        return Err(format!(
            "it has format {format}, and this version reads {FORMAT}"
        ));
    }
    serde_json::from_str(text).map_err(bad)
}

/// Returns the digest of tensors, sorted by name.
fn content(states: &[(String, Tensor)]) -> Result<Digest, TorchError> {
    let mut all = String::new();
    for (name, tensor) in states {
        let digest = Digest::of(&tensor.to_bytes()?);
        all += &format!("{name} {digest}\n");
    }
    Ok(Digest::of(all.as_bytes()))
}
