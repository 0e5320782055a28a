//! A source that asks before it gives an object.

use std::{fs::File, sync::Arc};

use precast::{
    Digest, Mapped,
    record::{Artifact, Program, Release},
    runtime::sources::{Source, SourceError},
};

use crate::fake::Memory;

type Hook = dyn Fn(&Digest) -> Result<(), SourceError> + Send + Sync;

/// A memory with a hook that is called before a shared object or an exported graph is read.
pub struct Hooked {
    memory: Memory,
    hook: Box<Hook>,
}

impl Hooked {
    pub fn over(
        memory: Memory,
        hook: impl Fn(&Digest) -> Result<(), SourceError> + Send + Sync + 'static,
    ) -> Arc<dyn Source> {
        let hook = Box::new(hook);
        Arc::new(Self { memory, hook })
    }
}

impl Source for Hooked {
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError> {
        self.memory.release(model, name)
    }

    fn program(&self, id: &Digest) -> Result<Program, SourceError> {
        self.memory.program(id)
    }

    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError> {
        self.memory.artifact(key)
    }

    fn memfd(&self, object: &Digest) -> Result<File, SourceError> {
        (self.hook)(object)?;
        self.memory.memfd(object)
    }

    fn map(&self, object: &Digest) -> Result<Mapped, SourceError> {
        self.memory.map(object)
    }
}
