//! The weight set of a release: what the model's entry made, or a file that the spec names.
//!
//! A worker gives the model the values of that file before anything is captured, so that eager and artifact are compared
//! with the weights that will be served. A file that changed alone needs no Python: programs hold no weights. It must
//! have what the last one had, of the same dtypes and shapes.

use std::{collections::BTreeMap, path::Path};

use safetensors::SafeTensors;

use super::{
    BuildError,
    engine::Options,
    progress::{Event, Progress},
    protocol::Weights,
};
use crate::{Digest, plan, record::Release, store::Store};

/// The weight set of this build, as the store has it.
pub(super) struct StoredWeights {
    pub object: Option<Digest>,
    pub aliases: BTreeMap<String, String>,
}

/// Puts the weight set into the store, and its bytes where the gates will look for them.
pub(super) fn put(
    options: &Options<'_>,
    written: &Weights,
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
