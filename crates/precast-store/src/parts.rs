//! Checks of single parts of a plain object, when their bytes are needed.
//!
//! A process whose matrices are prepacked reads little of a weight set. A check of all of it would take as long as that
//! of the prepacked weights. A part is hashed once: parts that were sound are remembered.

use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{
    chunks,
    error::{At, StoreError},
    object,
};
use crate::Digest;

/// The parts of a mapped object, and those that were checked.
pub struct CheckedParts {
    file: File,
    digest: Digest,
    path: PathBuf,
    size: u64,
    hashes: Vec<u8>,
    sound: Vec<AtomicBool>,
}

impl CheckedParts {
    /// Reads the hashes of an object's parts. Returns none if its file has none, or other ones than it was written with.
    pub(crate) fn of(
        file: &File,
        digest: &Digest,
        path: &Path,
    ) -> Result<Option<Self>, StoreError> {
        let Some((size, hashes)) = chunks::parts(file, digest).at("read", path)? else {
            return Ok(None);
        };
        let count = chunks::parts_of(0..usize::try_from(size).unwrap_or(usize::MAX)).len();
        Ok(Some(Self {
            file: file.try_clone().at("read", path)?,
            digest: *digest,
            path: path.to_owned(),
            size,
            hashes,
            sound: (0..count).map(|_| AtomicBool::new(false)).collect(),
        }))
    }

    /// Returns the size of the object's content.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Fails if a byte of this range, or of the parts in which it lies, has changed. The bytes must not be used before.
    pub fn check(&self, range: Range<usize>) -> Result<(), StoreError> {
        let parts = chunks::parts_of(range);
        let unknown = |part: &usize| {
            let sound = self.sound.get(*part);
            !sound.is_some_and(|sound| sound.load(Relaxed))
        };
        let wanted: Vec<usize> = parts.filter(unknown).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let same = wanted.iter().all(|&part| part < self.sound.len())
            && chunks::same(&self.file, self.size, &self.hashes, &wanted).at("read", &self.path)?;
        if !same {
            let why = "its checksum does not match its content";
            return Err(object::damaged(&self.digest, &self.path, why));
        }
        let found = wanted.iter().filter_map(|&part| self.sound.get(part));
        found.for_each(|sound| sound.store(true, Relaxed));
        Ok(())
    }
}
