//! A source whose artifacts are read in a thread of their own, while a process has something else to wait for.

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use precast_store::{
    Checking, Digest, Hold, Mapped,
    record::{Artifact, Program, Release, split_model},
};

use super::{
    layout::volume,
    source::{Source, SourceError},
};

/// Another source, and what a thread has read of one model's artifacts since this was made.
///
/// To be made before the [`Runtime`](super::Runtime): on a GPU that loads libtorch's CUDA half, which takes longer than
/// artifacts take to be read, unpacked and hashed. The thread begins with the smallest programs, and ends with the first
/// request for what it has not come to. What it could not read is read again when it is needed, and is an error then. What
/// nobody asks for stays in memory as long as the runtime and its models.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = example();
/// # let artifacts = folder.path();
/// use std::sync::Arc;
/// use precast_runtime::{Device, Runtime, Store, sources::Prefetched};
///
/// let store = Arc::new(Store::open(artifacts)?);
/// let source = Arc::new(Prefetched::new(store, "tiny"));
/// let model = Runtime::over(source, Device::Cpu)?.load("tiny")?;
/// assert_eq!(model.modules(), ["double"]);
/// # Ok(()) }
/// ```
pub struct Prefetched {
    source: Arc<dyn Source>,
    objects: Arc<Objects>,
}

#[derive(Default)]
struct Objects {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What was read; none while it is.
    read: HashMap<Digest, Option<File>>,
    /// Whether nothing more is to be read.
    over: bool,
}

impl Prefetched {
    /// Begins to read the artifacts of a model's newest release, or of a named one as `model@release`.
    pub fn new(source: Arc<dyn Source>, model: &str) -> Self {
        let objects = Arc::<Objects>::default();
        let (from, to, model) = (source.clone(), objects.clone(), model.to_owned());
        // Without a thread everything is read when it is needed; so it is after a failure.
        let _ = thread::Builder::new()
            .name("precast-fetch".to_owned())
            .spawn(move || read(&*from, &to, &model));
        Self { source, objects }
    }
}

/// Reads what can be, until it is over.
fn read(source: &dyn Source, objects: &Objects, model: &str) -> Result<(), SourceError> {
    let (name, release) = split_model(model);
    let release = source.release(name, release)?;
    let programs = release.programs.iter().map(|id| source.program(id));
    let mut programs: Vec<_> = programs.collect::<Result<_, _>>()?;
    programs.sort_by_key(volume);
    let mut known = BTreeSet::new();
    for step in programs.iter().flat_map(|program| &program.steps) {
        if !known.insert(step.artifact) {
            continue;
        }
        let object = source.artifact(&step.artifact)?.object;
        {
            let mut state = objects.lock();
            if state.over {
                break;
            }
            if state.read.contains_key(&object) {
                continue;
            }
            state.read.insert(object, None);
        }
        let _begun = Begun(objects, object);
        if let Ok(file) = source.memfd(&object) {
            objects.lock().read.insert(object, Some(file));
        }
    }
    Ok(())
}

/// An object that is being read. Nobody waits for it any longer when this is dropped, also by a panic.
struct Begun<'a>(&'a Objects, Digest);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let Self(objects, object) = self;
        let mut state = objects.lock();
        if let Some(None) = state.read.get(object) {
            state.read.remove(object);
        }
        objects.changed.notify_all();
    }
}

impl Objects {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what was read of an object, once; waits while it is being read.
    fn take(&self, object: &Digest) -> Option<File> {
        let mut state = self.lock();
        while let Some(None) = state.read.get(object) {
            state = (self.changed.wait(state)).unwrap_or_else(PoisonError::into_inner);
        }
        let file = state.read.remove(object).flatten();
        state.over |= file.is_none();
        file
    }
}

impl Drop for Prefetched {
    fn drop(&mut self) {
        self.objects.lock().over = true;
    }
}

impl Source for Prefetched {
    fn release(&self, model: &str, name: Option<&str>) -> Result<Release, SourceError> {
        self.source.release(model, name)
    }

    fn find_release(
        &self,
        model: &str,
        is: &dyn Fn(&Release) -> bool,
    ) -> Result<Option<Release>, SourceError> {
        self.source.find_release(model, is)
    }

    fn hold(&self, release: &Release) -> Result<Option<Hold>, SourceError> {
        self.source.hold(release)
    }

    fn has_release(&self, release: &Release) -> bool {
        self.source.has_release(release)
    }

    fn program(&self, id: &Digest) -> Result<Program, SourceError> {
        self.source.program(id)
    }

    fn artifact(&self, key: &Digest) -> Result<Artifact, SourceError> {
        self.source.artifact(key)
    }

    fn memfd(&self, object: &Digest) -> Result<File, SourceError> {
        let read = self.objects.take(object);
        read.map_or_else(|| self.source.memfd(object), Ok)
    }

    fn map(&self, object: &Digest) -> Result<Mapped, SourceError> {
        self.source.map(object)
    }

    fn map_checking(&self, object: &Digest) -> Result<(Mapped, Checking), SourceError> {
        self.source.map_checking(object)
    }
}
