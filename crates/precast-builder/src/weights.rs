//! The weight set of a release: the parameters of the model, or a file that the spec names.
//!
//! A worker loads that file into the model before it captures, so that the gate uses the weights that will be served. An
//! unreadable file is an error before Python starts; a tensor that the model needs and the file lacks is one as soon as the
//! model exists. If only the file changed, the build needs no Python, because programs hold no weights. The new file must
//! have the tensors of the last one, with the same dtypes and shapes.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Read},
    path::Path,
};

use precast_store::{Digest, Store, record::Release};
use safetensors::{SafeTensors, tensor::Metadata};

use super::{
    BuildError,
    options::Options,
    progress::{Event, Progress},
    protocol::SavedWeights,
};
use crate::plan;

/// The weight set of this build, as the store has it.
pub(super) struct StoredWeights {
    pub object: Option<Digest>,
    pub aliases: BTreeMap<String, String>,
}

/// Checks that a file can be a weight set, by its header: that needs no model and no Python.
pub(super) fn check(path: &Path) -> Result<(), BuildError> {
    check_header(path).map_err(|message| BuildError::BadWeights {
        path: path.to_owned(),
        message,
    })
}

fn check_header(path: &Path) -> Result<(), String> {
    /// The format's own limit.
    const HEADER_LIMIT: u64 = 100_000_000;
    const LENGTH: u64 = 8;
    let no_safetensors = || "it is no safetensors file".to_owned();
    let mut file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => "it is not there".to_owned(),
        _ => error.to_string(),
    })?;
    let meta = file.metadata().map_err(|error| error.to_string())?;
    if !meta.is_file() {
        return Err("it is a folder or another special file".to_owned());
    }
    let mut length = [0; LENGTH as usize];
    file.read_exact(&mut length).map_err(|_| no_safetensors())?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT || length > meta.len() - LENGTH {
        return Err(no_safetensors());
    }
    let mut header = Vec::new();
    (file.take(length).read_to_end(&mut header)).map_err(|error| error.to_string())?;
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| format!("{}: {error}", no_safetensors()))?;
    let ends = LENGTH + length + header.data_len() as u64;
    if ends != meta.len() {
        let has = meta.len();
        let cut = if has < ends { "it was cut off: " } else { "" };
        return Err(format!(
            "{cut}its tensors end at byte {ends}, the file at byte {has}"
        ));
    }
    use safetensors::Dtype as D;
    let known = [
        D::F64,
        D::F32,
        D::F16,
        D::BF16,
        D::I64,
        D::I32,
        D::I16,
        D::I8,
        D::U8,
        D::BOOL,
    ];
    let mut tensors: Vec<_> = header.tensors().into_iter().collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    match tensors
        .iter()
        .find(|(_, info)| !known.contains(&info.dtype))
    {
        Some((name, info)) => Err(format!(
            "tensor `{name}` is {}, which no weight set can hold",
            info.dtype
        )),
        None => Ok(()),
    }
}

/// Puts the weight set into the store, and its bytes where the gates will look for them.
pub(super) fn put(
    options: &Options<'_>,
    written: &SavedWeights,
    progress: &dyn Progress,
) -> Result<StoredWeights, BuildError> {
    let named = options.spec.model.weights.file();
    let file = named.or(written.file.as_deref());
    let put = |file| options.store.put_file_unpacked(file);
    let object = file.map(put).transpose()?;
    if let Some((object, bytes)) = object {
        progress.event(&Event::Weights { object, bytes });
        options.store.map(&object)?;
    }
    Ok(StoredWeights {
        object: object.map(|(object, _)| object),
        aliases: written.aliases.clone(),
    })
}

/// Returns the weight set of a release of the same model. A file that the spec names may be another one by now.
pub(super) fn kept(options: &Options<'_>, last: &Release) -> Result<StoredWeights, BuildError> {
    let object = match options.spec.model.weights.file() {
        Some(path) => {
            let now = plan::file_digest(path, options.store)?;
            if Some(now) == last.weights {
                last.weights
            } else {
                let (put, _) = options.store.put_file(path)?;
                if let Some(last) = &last.weights {
                    alike(options.store, path, last, &put)?;
                }
                Some(put)
            }
        }
        None => last.weights,
    };
    Ok(StoredWeights {
        object,
        aliases: last.aliases.clone(),
    })
}

/// Checks that the file at `path`, which is the object `now`, can take the place of the weights `before`.
fn alike(store: &Store, path: &Path, before: &Digest, now: &Digest) -> Result<(), BuildError> {
    let wrong = |message: String| BuildError::Weights {
        path: path.to_owned(),
        message,
    };
    let (before, now) = (store.map(before)?, store.map(now)?);
    let read = |bytes| SafeTensors::deserialize(bytes).map_err(|e| wrong(e.to_string()));
    let (before, now) = (read(&before)?, read(&now)?);
    for (name, old) in before.iter() {
        let new = now
            .tensor(name)
            .map_err(|_| wrong(format!("it has no tensor `{name}`")))?;
        if (old.dtype(), old.shape()) != (new.dtype(), new.shape()) {
            return Err(wrong(format!(
                "tensor `{name}` is {:?} {:?}, and the programs are compiled for {:?} {:?}",
                new.dtype(),
                new.shape(),
                old.dtype(),
                old.shape()
            )));
        }
    }
    Ok(())
}
