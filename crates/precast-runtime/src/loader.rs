//! Loads the programs of one model on one device.
//!
//! A program whose artifact does not load or verify is set aside once: the reason is kept, and the ladder answers
//! instead for the life of the model. Nothing is written to the store, which may be read-only or another host's. The
//! process remembers verified bytes, but no artifact; the next load checks for damage again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak},
    thread,
};

use precast_store::{CheckedParts, Checking, Device, Digest, Mapped, Target, record::Program};

use super::{
    RuntimeError, TorchError,
    error::{Quarantined, in_store},
    graphs::{Lends, Shared},
    identity,
    loaded::Loaded,
    options::Graphs,
    packing::{Placement, first_values},
    plan::With,
    source::Source,
    threads,
    trial::Trials,
    weights::Weights,
};

/// The weights that this runtime put on its devices. A set is freed with its last user.
#[derive(Default)]
pub(super) struct Held(Mutex<HashMap<Set, Weak<Weights>>>);

/// A weight set, its device, and the names of its tensors that stay on the host.
type Set = (Digest, Device, BTreeSet<String>);

impl Held {
    /// Returns a weight set on a device, in the order of `programs`. A set that the device has is shared in its
    /// existing order.
    pub fn on(
        &self,
        source: &Arc<dyn Source>,
        digest: Option<Digest>,
        device: Device,
        limit: Option<u64>,
        programs: &[Arc<Program>],
    ) -> Result<Arc<Weights>, RuntimeError> {
        let Some(digest) = digest else {
            return Ok(Arc::new(Weights::none(device)));
        };
        let on_host = match device {
            Device::Cpu => BTreeSet::new(),
            Device::Cuda(_) => first_values(programs),
        };
        let set = (digest, device, on_host);
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weights) = held.get(&set).and_then(Weak::upgrade) {
            return Ok(weights);
        }
        let _span = tracing::info_span!("weights", %digest, %device).entered();
        let map = |checked: bool| {
            let _span = tracing::info_span!("map").entered();
            let whole = |bytes| (bytes, Checking::done(), None);
            match (device, checked) {
                // Tensors are checked when they are asked for.
                (Device::Cpu, _) => (source.map_in_parts(&digest))
                    .map(|(bytes, parts)| (bytes, Checking::done(), parts)),
                // An upload takes as long as looking at the bytes.
                (Device::Cuda(_), false) => {
                    (source.map_checking(&digest)).map(|(bytes, checking)| (bytes, checking, None))
                }
                (Device::Cuda(_), true) => source.map(&digest).map(whole),
            }
            .map_err(in_store(format!("weight set `{}`", digest.short())))
        };
        let (bytes, checking, parts) = map(false)?;
        // On the CPU tensors are in the order of the file.
        let placement = match device {
            Device::Cpu => Placement::default(),
            Device::Cuda(_) => {
                let _span = tracing::info_span!("records").entered();
                Placement::of(&**source, programs, set.2.clone())
            }
        };
        let new = |bytes: &Mapped, parts: Option<CheckedParts>| {
            Weights::new(digest, bytes, parts, device, limit, &placement)
        };
        let mut weights = new(&bytes, parts);
        if !checking.wait() {
            // Unpacked again, from the object.
            let (bytes, _, parts) = map(true)?;
            drop(weights);
            weights = new(&bytes, parts);
        }
        let weights = Arc::new(weights?.kept_in(source, digest));
        if device != Device::Cpu {
            unmap(bytes);
        }
        held.retain(|_, weights| weights.strong_count() > 0);
        held.insert(set, Arc::downgrade(&weights));
        Ok(weights)
    }

    #[cfg(test)]
    pub fn known(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// Drops a map that was read, in a separate thread: for a whole file in memory, that takes milliseconds for each GB.
fn unmap(bytes: Mapped) {
    let _ = thread::Builder::new().spawn(move || drop(bytes));
}

/// Loads the programs of one model on one device.
pub(super) struct Loader {
    pub source: Arc<dyn Source>,
    pub device: Device,
    pub instances: usize,
    pub host: Arc<Target>,
    pub trials: Option<Arc<Trials>>,
    pub graphs: Graphs,
    /// Whether graphs lend their outputs.
    pub lends: Lends,
    pub limit: Option<u64>,
    /// Whether eager may answer for compiled programs.
    pub eager: bool,
    pub aliases: Arc<BTreeMap<String, String>>,
    pub held: Arc<Held>,
    /// The weights of new programs. Locked for reading during a load, for writing by a swap.
    pub weights: RwLock<Arc<Weights>>,
    pub quarantined: Mutex<Vec<Arc<Quarantined>>>,
    /// The pool of the device's graphs, made for the first of them.
    pub shared: OnceLock<Result<Arc<Shared>, TorchError>>,
}

impl Loader {
    /// Returns the weights of the next callers.
    pub fn newest(&self) -> Arc<Weights> {
        let weights = self.weights.read();
        weights.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Loads a program.
    pub fn load(
        &self,
        program: &Arc<Program>,
        weights: &Arc<Weights>,
    ) -> Result<Outcome, RuntimeError> {
        let _span =
            tracing::info_span!("load", program = %program.id.short(), module = program.module, device = %self.device)
                .entered();
        // Weights may be laid out in parallel.
        threads::find(self.device)?;
        let extras = match &program.constants {
            Some(key) => Some(self.extras(key)?),
            None => None,
        };
        let with = With {
            device: self.device,
            weights: weights.clone(),
            aliases: self.aliases.clone(),
            extras,
            instances: self.instances,
            host: self.host.clone(),
            trials: self.trials.clone(),
        };
        let eager = || self.eager(program, &with);
        if program.steps.is_empty() {
            // Never compiled: its exported graph is all that can run.
            return eager().map(Outcome::of);
        }
        if self.eager && program.slower_than_eager() && !self.graph_wanted(program) {
            // Only where eager is known to run: the artifact is right, if slower.
            if let Ok(Some(mut loaded)) = eager()
                && loaded.prepare().is_ok()
            {
                loaded.preferred = true;
                return Ok(Outcome::Loaded(loaded));
            }
        }
        match self.artifacts(program, &with) {
            Ok(loaded) => {
                self.forget(program);
                Ok(Outcome::Loaded(loaded))
            }
            Err(error) if error.is_transient() && !error.is_out_of_memory() => {
                let instead = eager().ok().flatten();
                let instead = instead.filter(|loaded| loaded.prepare().is_ok());
                self.set_aside(program, error);
                Ok(Outcome::Postponed(instead))
            }
            Err(error) if error.is_artifacts() => {
                let loaded = eager()?;
                self.set_aside(program, error);
                Ok(Outcome::of(loaded))
            }
            Err(error) => Err(error),
        }
    }

    fn artifacts(&self, program: &Arc<Program>, with: &With) -> Result<Loaded, RuntimeError> {
        let mut loaded = Loaded::load(&self.source, program.clone(), with.clone())?;
        self.capture(&mut loaded);
        loaded.prepare()?;
        Ok(loaded)
    }

    /// Forgets the reason that a program was set aside.
    fn forget(&self, program: &Program) {
        let mut quarantined = self
            .quarantined
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        quarantined.retain(|lost| lost.program != program.id);
    }

    fn set_aside(&self, program: &Program, error: RuntimeError) {
        tracing::warn!(program = %program.id.short(), %error, "a program is set aside");
        let lost = Quarantined {
            program: program.id,
            module: program.module.clone(),
            bucket: program.sizes.clone(),
            device: self.device,
            error,
        };
        let mut quarantined = self
            .quarantined
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        quarantined.retain(|earlier| earlier.program != program.id);
        quarantined.push(Arc::new(lost));
    }

    /// Returns the error for which a program of a module was set aside, and forgets it.
    pub fn take_error(&self, module: &str) -> Option<RuntimeError> {
        let mut quarantined = self
            .quarantined
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let at = quarantined.iter().position(|lost| lost.module == module)?;
        Arc::into_inner(quarantined.swap_remove(at)).map(|lost| lost.error)
    }

    /// Returns the entry of a program that was set aside.
    pub fn lost(&self, program: &Digest) -> Option<Arc<Quarantined>> {
        let quarantined = self
            .quarantined
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let lost = quarantined.iter().find(|lost| lost.program == *program);
        lost.cloned()
    }

    /// Returns whether a program is to run as a CUDA graph.
    pub fn graph_wanted(&self, program: &Program) -> bool {
        matches!(self.device, Device::Cuda(_)) && self.graphs.wanted(program)
    }

    fn capture(&self, loaded: &mut Loaded) {
        let Device::Cuda(ordinal) = self.device else {
            return;
        };
        if !self.graph_wanted(&loaded.plan.program) {
            return;
        }
        match self
            .shared
            .get_or_init(|| Shared::new(ordinal).map(Arc::new))
        {
            Ok(shared) => loaded.capture(shared, self.lends),
            Err(reason) => loaded.refused = Some(reason.to_string()),
        }
    }

    /// Returns the tensors that a program's code creates.
    fn extras(&self, key: &Digest) -> Result<Arc<Weights>, RuntimeError> {
        let record = identity::artifact(&*self.source, key, (self.device, &*self.host))?;
        let object = Some(record.object);
        self.held
            .on(&self.source, object, self.device, self.limit, &[])
    }

    /// Loads the exported graph of a program, if it has one. For a compiled program eager must be allowed.
    fn eager(&self, program: &Arc<Program>, with: &With) -> Result<Option<Loaded>, RuntimeError> {
        let allowed = self.eager || program.steps.is_empty();
        let (Some(exported), true) = (&program.eager, allowed) else {
            return Ok(None);
        };
        match Loaded::eager(&self.source, program.clone(), exported, with.clone()) {
            Ok(loaded) => Ok(Some(loaded)),
            // The library of an operator does not load.
            Err(error) if error.is_artifacts() && !program.steps.is_empty() => Ok(None),
            Err(error) if error.is_artifacts() => {
                self.set_aside(program, error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The outcome of a load.
pub(super) enum Outcome {
    Loaded(Loaded),
    /// Nothing runs the program in this model.
    Failed,
    /// The load is tried again later. Eager may answer meanwhile.
    Postponed(Option<Loaded>),
}

impl Outcome {
    fn of(loaded: Option<Loaded>) -> Self {
        loaded.map_or(Self::Failed, Self::Loaded)
    }
}
