//! Files with states: those of a session, and the checkpoints of a training.
//!
//! Both are safetensors files with one header, a text of their metadata:
//!
//! | field | compared with |
//! |---|---|
//! | `digest` | every other byte of the file: a changed bit is found, wherever it is |
//! | `format` | the format of this version |
//! | `model` | the name of the model |
//! | `weights` | the digest of the weights that the programs read beside the states |
//! | `position` | its bounds: the context of a session, a number from 0 on of a training |
//! | `holds` | a session, or a checkpoint with the fields of [`Training`] |
//!
//! The digest is that of the file with zeros in its own place, and is put there last. It is the first field, so that its
//! place is found. The file gets its name when it is complete: a process that is killed at any moment leaves the earlier
//! file or the new one. Tensors are written and read one after the other: states may be most of the memory.
//!
//! Not promised: that nobody has made a file with other states and their digest. There is no key.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::{self, Seek as _},
    ops::Range,
    os::unix::fs::FileExt as _,
    path::Path,
};

use precast_store::{Digest, digest::Hasher};
use serde::{Deserialize, Serialize};

use super::{
    Tensor,
    tensors::{Draft, TensorFile, TensorFileError},
};

/// The format of the header. 1 was that of checkpoints whose digest left out the header.
const FORMAT: u32 = 2;
/// The key of the header in the file's metadata.
const KEY: &str = "precast.states";
/// What the files of earlier versions have instead: the key of a checkpoint's header, and a session's position.
const OLD_KEY: &str = "precast.checkpoint";
const OLD_POSITION: &str = "precast.position";
/// The number of hex digits of a digest.
const DIGITS: usize = 64;

/// The header of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    digest: String,
    format: u32,
    pub model: String,
    /// None if the programs read none, or the caller's own tensors.
    pub weights: Option<Digest>,
    /// The tokens of a session, or the position in the data of a training.
    pub position: i64,
    pub holds: Holds,
}

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holds {
    Session,
    Checkpoint(Box<Training>),
}

/// The fields of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Training {
    pub module: String,
    pub optimizer: String,
    /// The digest of the programs' IDs.
    pub programs: Digest,
    /// The number of updates.
    pub step: u64,
    /// The seed of the data's order.
    pub seed: u64,
    /// Notes of the caller, by name.
    pub notes: BTreeMap<String, String>,
}

impl Header {
    pub fn new(model: &str, weights: Option<Digest>, position: i64, holds: Holds) -> Self {
        Self {
            digest: "0".repeat(DIGITS),
            format: FORMAT,
            model: model.to_owned(),
            weights,
            position,
            holds,
        }
    }

    /// Fails with the difference if the file is of another model or other weights, or holds something else.
    pub fn fits(&self, own: &Self) -> Result<(), String> {
        let (held, wanted) = (&self.holds, &own.holds);
        if held.name() != wanted.name() {
            return Err(format!("it has {held}, not {wanted}"));
        }
        differ("model", &own.model, &self.model)?;
        if let (Holds::Checkpoint(held), Holds::Checkpoint(wanted)) = (held, wanted) {
            differ("module", &wanted.module, &held.module)?;
            differ("optimizer", &wanted.optimizer, &held.optimizer)?;
        }
        if self.weights != own.weights {
            let name = |weights: &Option<Digest>| match weights {
                Some(digest) => format!("the weights `{}`", digest.short()),
                None => "no weights of a release".to_owned(),
            };
            let (held, wanted) = (name(&self.weights), name(&own.weights));
            return Err(format!(
                "it was written with {held}, and these are {wanted}"
            ));
        }
        Ok(())
    }

    /// Fails if the position is below 0 or above `most`.
    pub fn within(&self, most: Option<i64>) -> Result<(), String> {
        let position = self.position;
        match most {
            _ if position < 0 => Err(format!("its position is {position}, below 0")),
            Some(most) if position > most => Err(format!(
                "its position is {position}, and its context has {most}"
            )),
            _ => Ok(()),
        }
    }
}

impl Holds {
    fn name(&self) -> &'static str {
        match self {
            Self::Session => "the states of a session",
            Self::Checkpoint(_) => "a checkpoint of a training",
        }
    }
}

impl fmt::Display for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn differ(what: &str, own: &str, other: &str) -> Result<(), String> {
    if own == other {
        return Ok(());
    }
    Err(format!("it is of {what} `{other}`, not of `{own}`"))
}

/// An error of a file.
#[derive(Debug)]
pub enum SavedError {
    /// The operating system refused to read or write it.
    Io(io::Error),
    /// The file can't be used, for this reason.
    Unfit(String),
}

impl From<TensorFileError> for SavedError {
    fn from(error: TensorFileError) -> Self {
        match error {
            TensorFileError::Read(source) | TensorFileError::Write(source) => Self::Io(source),
            TensorFileError::Format(error) => Self::Unfit(format!(
                "it is no safetensors file, or was cut off: {error}"
            )),
            error => Self::Unfit(error.to_string()),
        }
    }
}

impl From<io::Error> for SavedError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Writes a file, whole or not at all; with `durable`, also if the machine stops.
pub fn write(
    path: &Path,
    header: &Header,
    states: &[(String, Tensor)],
    durable: bool,
) -> Result<(), SavedError> {
    if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        // A rename into its place would remove a device or a pipe.
        return Err(SavedError::Unfit("it is there, and no file".to_owned()));
    }
    let text = serde_json::to_string(header)
        .map_err(|error| SavedError::Unfit(format!("its header can't be written: {error}")))?;
    let draft = Draft::write(path, states, Some([(KEY.to_owned(), text)].into()))?;
    seal(draft.path())?;
    Ok(draft.publish(path, durable)?)
}

/// Puts the digest of a file in its place, where it has zeros.
fn seal(path: &Path) -> Result<(), SavedError> {
    let mut file = File::options().read(true).write(true).open(path)?;
    let head = TensorFile::open(&file)?.head().to_vec();
    let place = place(&head).ok_or_else(|| SavedError::Unfit(unplaced()))?;
    file.rewind()?;
    let (digest, _) = Digest::of_reader(&mut file)?;
    Ok(file.write_all_at(digest.hex().as_bytes(), place.start as u64)?)
}

/// Reads the header and the states of a file that is whole, and that `fits`.
pub fn read(
    path: &Path,
    fits: impl FnOnce(&Header) -> Result<(), String>,
) -> Result<(Header, BTreeMap<String, Tensor>), SavedError> {
    let file = TensorFile::open(File::open(path)?)?;
    let header = header(&file).map_err(SavedError::Unfit)?;
    fits(&header).map_err(SavedError::Unfit)?;
    let mut head = file.head().to_vec();
    let place = place(&head).ok_or_else(|| SavedError::Unfit(unplaced()))?;
    head[place].fill(b'0');
    let mut hasher = Hasher::default();
    hasher.update(&head);
    let states = file.tensors_and(|bytes| hasher.update(bytes))?;
    if hasher.finish().hex() != header.digest {
        let problem = "it was changed after it was written: its digest is another";
        return Err(SavedError::Unfit(problem.to_owned()));
    }
    Ok((header, states))
}

/// Returns the place of the digest in the bytes before the tensors.
fn place(head: &[u8]) -> Option<Range<usize>> {
    let before = format!(r#""{KEY}":"{{\"digest\":\""#);
    let start = memchr::memmem::find(head, before.as_bytes())? + before.len();
    (start + DIGITS <= head.len()).then_some(start..start + DIGITS)
}

fn unplaced() -> String {
    "its header has no place for a digest".to_owned()
}

/// Reads the header of a file.
fn header<R: io::Read>(file: &TensorFile<R>) -> Result<Header, String> {
    let Some(text) = file.text(KEY) else {
        return Err(
            match file.text(OLD_KEY).is_some() || file.has(OLD_POSITION) {
                true => format!(
                    "an earlier version of Precast wrote it, without a digest of its header, and this one reads format {FORMAT}"
                ),
                false => "it has neither the states of a session nor a checkpoint".to_owned(),
            },
        );
    };
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

#[cfg(test)]
mod tests;
