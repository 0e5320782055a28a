//! The releases of a repository, and the files in them. What was read is kept.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use precast_store::Digest;

use super::{
    documents::{self, Blob, Files, Found},
    registry::Registry,
    tags,
};
use crate::{error::RemoteError, work};

/// More files than the releases of a repository of use have.
const MOST: usize = 2_000_000;

/// The releases of a repository.
pub struct Releases {
    pub registry: Registry,
    /// Those that were read, by tag; the one that was asked for last comes first.
    known: Mutex<Vec<(String, Arc<Tagged>)>>,
    /// Whether all were read.
    all: Mutex<bool>,
}

/// A release under a tag.
pub struct Tagged {
    /// The digest of what the tag names.
    top: Digest,
    pub files: Files,
}

/// What a tag names.
pub enum Named {
    /// There is no such tag.
    Nothing,
    /// Something that precast did not write.
    Foreign,
    /// A release.
    Release(Arc<Tagged>),
}

impl Releases {
    pub fn new(registry: Registry) -> Self {
        Self {
            registry,
            known: Mutex::default(),
            all: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, Vec<(String, Arc<Tagged>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tags of releases.
    pub fn tags(&self) -> Result<Vec<String>, RemoteError> {
        let mut all = self.registry.tags()?;
        all.retain(|tag| tags::release_of(tag).is_some());
        Ok(all)
    }

    /// Reads what a tag names now. From now on, files are looked for in this release first.
    pub fn read(&self, tag: &str) -> Result<Named, RemoteError> {
        self.load(tag, true)
    }

    fn load(&self, tag: &str, first: bool) -> Result<Named, RemoteError> {
        let Some(text) = self.registry.document(tag)? else {
            self.forget(tag);
            return Ok(Named::Nothing);
        };
        let top = Digest::of(&text);
        let known = self.known().iter().find_map(|(other, release)| {
            (other == tag && release.top == top).then(|| release.clone())
        });
        let release = match known {
            Some(known) => known,
            None => match self.files(tag, &text)? {
                Some(files) => Arc::new(Tagged { top, files }),
                None => return Ok(Named::Foreign),
            },
        };
        let mut all = self.known();
        all.retain(|(other, _)| other != tag);
        let files = all.iter().map(|(_, other)| other.files.len());
        if files.sum::<usize>() + release.files.len() > MOST {
            let why = format!("with the other releases, it has more than {MOST} files");
            return Err(RemoteError::damaged(tag, why));
        }
        let at = if first { 0 } else { all.len() };
        all.insert(at, (tag.to_owned(), release.clone()));
        Ok(Named::Release(release))
    }

    /// Returns the files of a release, from the document that its tag names; none if it is no release.
    fn files(&self, tag: &str, text: &[u8]) -> Result<Option<Files>, RemoteError> {
        let digests = match documents::parse(text, tag)? {
            Found::Foreign => return Ok(None),
            Found::Manifest(files) => return Ok(Some(files)),
            Found::Index(digests) => digests,
        };
        let damaged = |why: String| RemoteError::damaged(tag, why);
        let (mut files, mut is_own) = (Files::new(), false);
        for digest in digests {
            let name = documents::name(&digest);
            let text = self.registry.document(&name)?;
            let text = text.ok_or_else(|| damaged(format!("its manifest `{name}` is missing")))?;
            match documents::parse(&text, tag)? {
                Found::Foreign => {}
                Found::Index(_) => return Err(damaged("an index is in its index".to_owned())),
                Found::Manifest(more) => {
                    is_own = true;
                    for (name, blob) in more {
                        documents::add(&mut files, &name, blob, tag)?;
                    }
                }
            }
        }
        Ok(is_own.then_some(files))
    }

    /// Finds a file in the releases that were read.
    pub fn find(&self, name: &str) -> Option<Blob> {
        let known = self.known();
        let found = known
            .iter()
            .find_map(|(_, release)| release.files.get(name));
        found.copied()
    }

    /// Reads releases until one has a file. If none has it, a damaged release is the error.
    pub fn read_one_with(&self, name: &str) -> Result<(), RemoteError> {
        let mut damaged = Ok(());
        for tag in self.tags()?.iter().rev() {
            match self.read(tag) {
                Ok(Named::Release(release)) if release.files.contains_key(name) => return Ok(()),
                Ok(_) => {}
                Err(error @ RemoteError::Damaged { .. }) => damaged = Err(error),
                Err(error) => return Err(error),
            }
        }
        damaged
    }

    /// Reads all releases, once. A damaged one has no files for others.
    pub fn read_all(&self) -> Result<(), RemoteError> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if *all {
            return Ok(());
        }
        let mut tags = self.tags()?;
        tags.retain(|tag| !self.known().iter().any(|(other, _)| other == tag));
        work::all(&tags, work::SMALL, |tag| match self.load(tag, false) {
            Ok(_) | Err(RemoteError::Damaged { .. }) => Ok(()),
            Err(error) => Err(error),
        })?;
        *all = true;
        Ok(())
    }

    /// Returns the names of all files in a folder, in the releases that were read.
    pub fn names(&self, folder: &str) -> Vec<String> {
        let is_in = |name: &&String| {
            let rest = name.strip_prefix(folder);
            rest.is_some_and(|rest| folder.is_empty() || rest.starts_with('/'))
        };
        let known = self.known();
        let names = known.iter().flat_map(|(_, release)| release.files.keys());
        let mut names: Vec<String> = names.filter(is_in).cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    pub fn forget(&self, tag: &str) {
        self.known().retain(|(other, _)| other != tag);
    }
}
