//! Loads the programs of one model on one device: before a model is handed out, behind it, or when they are needed.
//!
//! A program whose artifact does not load or verify is set aside once: the reason is kept and the ladder answers in its
//! place for the life of the model. Nothing is written to the store, which may be read-only or another host's: bytes that
//! are right and no artifact are remembered by the process, damage is looked for again with the next load.
//!
//! Where the host was at fault for a moment (no file handle, no memory, a read that failed), the program rests: the ladder
//! answers meanwhile, and a later call tries again, first after a tenth of a second, then after twice as long each time.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak},
    thread,
    time::{Duration, Instant},
};

use precast_store::{Checking, Device, Digest, Mapped, Target, record::Program};

use super::{
    RuntimeError, TorchError,
    context::With,
    error::{Quarantined, in_store},
    graphs::Shared,
    host::make_room,
    identity,
    options::Graphs,
    packing::Joined,
    pool::{self, Wait},
    program::Ready,
    source::Source,
    stats::Counters,
    threads,
    trial::Trials,
    weights::Weights,
};

/// The weights that this runtime brought to its devices, for as long as somebody uses them.
#[derive(Default)]
pub(super) struct Held(Mutex<HashMap<(Digest, Device), Weak<Weights>>>);

impl Held {
    /// Returns a weight set on a device, in the order that `programs` want; one that is there is shared in its own order.
    pub fn on(
        &self,
        source: &dyn Source,
        digest: Option<Digest>,
        device: Device,
        limit: Option<u64>,
        programs: &[Arc<Program>],
    ) -> Result<Arc<Weights>, RuntimeError> {
        let Some(digest) = digest else {
            return Ok(Arc::new(Weights::none(device)));
        };
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weights) = held.get(&(digest, device)).and_then(Weak::upgrade) {
            return Ok(weights);
        }
        let _span = tracing::info_span!("weights", %digest, %device).entered();
        let map = |checked: bool| {
            let _span = tracing::info_span!("map").entered();
            match (device, checked) {
                // An upload takes as long as looking at the bytes.
                (Device::Cuda(_), false) => source.map_checking(&digest),
                _ => source.map(&digest).map(|bytes| (bytes, Checking::done())),
            }
            .map_err(in_store(format!("weight set `{}`", digest.short())))
        };
        let (bytes, checking) = map(false)?;
        // On the CPU tensors are in the order of the file.
        let joined = match device {
            Device::Cpu => Joined::default(),
            Device::Cuda(_) => {
                let _span = tracing::info_span!("records").entered();
                Joined::of(source, programs)
            }
        };
        let new = |bytes: &Mapped| Weights::new(digest, bytes, device, limit, &joined);
        let mut weights = new(&bytes);
        if !checking.wait() {
            // Unpacked again, from the object.
            let (bytes, _) = map(true)?;
            drop(weights);
            weights = new(&bytes);
        }
        let weights = Arc::new(weights?);
        if device != Device::Cpu {
            unmap(bytes);
        }
        held.retain(|_, weights| weights.strong_count() > 0);
        held.insert((digest, device), Arc::downgrade(&weights));
        Ok(weights)
    }

    #[cfg(test)]
    pub fn known(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// Gives up a map that was read, in a thread of its own: where it is all of a file in memory, that takes milliseconds for
/// each GB.
fn unmap(bytes: Mapped) {
    let _ = thread::Builder::new().spawn(move || drop(bytes));
}

/// Everything that a program of one model is loaded with on one device.
pub(super) struct Loader {
    pub source: Arc<dyn Source>,
    pub device: Device,
    pub instances: usize,
    pub host: Arc<Target>,
    pub trials: Option<Arc<Trials>>,
    pub graphs: Graphs,
    pub limit: Option<u64>,
    /// Whether eager may answer for what was compiled.
    pub eager: bool,
    pub aliases: Arc<BTreeMap<String, String>>,
    pub held: Arc<Held>,
    /// What new programs are bound to. Read for the time of a load, written by a swap.
    pub weights: RwLock<Arc<Weights>>,
    pub quarantined: Mutex<Vec<Arc<Quarantined>>>,
    /// The pool of the device's graphs, made when the first one is wanted.
    pub shared: OnceLock<Result<Arc<Shared>, TorchError>>,
}

impl Loader {
    /// Loads a program.
    fn load(&self, program: &Arc<Program>, weights: &Arc<Weights>) -> Result<Loaded, RuntimeError> {
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
            // Never compiled: its exported graph is all there is.
            return eager().map(Loaded::For);
        }
        if self.eager && program.slower_than_eager() && !self.graph_wanted(program) {
            // Only where it is known to run: the artifact is there and right, if slower.
            if let Ok(Some(mut ready)) = eager()
                && ready.interpret().is_ok()
            {
                ready.preferred = true;
                return Ok(Loaded::For(Some(ready)));
            }
        }
        let ready =
            Ready::load(&self.source, program.clone(), with.clone()).and_then(|mut ready| {
                self.capture(&mut ready, weights);
                ready.prepare().map(|()| ready)
            });
        match ready {
            Ok(ready) => {
                self.forget(program);
                Ok(Loaded::For(Some(ready)))
            }
            Err(error) if error.is_transient() && !error.is_out_of_memory() => {
                let instead = eager().ok().flatten();
                let instead = instead.filter(|ready| ready.interpret().is_ok());
                self.set_aside(program, error);
                Ok(Loaded::Meanwhile(instead))
            }
            Err(error) if error.is_artifacts() => {
                let ready = eager()?;
                self.set_aside(program, error);
                Ok(Loaded::For(ready))
            }
            Err(error) => Err(error),
        }
    }

    /// Forgets why a program was set aside: it is there now.
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

    /// Returns why a module's program was set aside, and forgets it.
    pub fn take_error(&self, module: &str) -> Option<RuntimeError> {
        let mut quarantined = self
            .quarantined
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let at = quarantined.iter().position(|lost| lost.module == module)?;
        Arc::into_inner(quarantined.swap_remove(at)).map(|lost| lost.error)
    }

    /// Returns why a program was set aside.
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

    fn capture(&self, ready: &mut Ready, weights: &Arc<Weights>) {
        let Device::Cuda(ordinal) = self.device else {
            return;
        };
        if !self.graph_wanted(&ready.plan.program) {
            return;
        }
        match self
            .shared
            .get_or_init(|| Shared::new(ordinal).map(Arc::new))
        {
            Ok(shared) => ready.capture(weights.clone(), shared),
            Err(reason) => ready.refused = Some(reason.to_string()),
        }
    }

    /// Returns the tensors that a program's code makes itself.
    fn extras(&self, key: &Digest) -> Result<Arc<Weights>, RuntimeError> {
        let record = identity::artifact(&*self.source, key, (self.device, &*self.host))?;
        let object = Some(record.object);
        self.held
            .on(&*self.source, object, self.device, self.limit, &[])
    }

    /// Returns a program as its exported graph, where it has one. For a program that was compiled it must be allowed.
    fn eager(&self, program: &Arc<Program>, with: &With) -> Result<Option<Ready>, RuntimeError> {
        let allowed = self.eager || program.steps.is_empty();
        let (Some(exported), true) = (&program.eager, allowed) else {
            return Ok(None);
        };
        let ready = Ready::eager(&self.source, program.clone(), exported, with.clone());
        match ready {
            Ok(ready) => Ok(Some(ready)),
            // An operator's library that does not load: then nothing runs it.
            Err(error) if error.is_artifacts() && !program.steps.is_empty() => Ok(None),
            Err(error) if error.is_artifacts() => {
                self.set_aside(program, error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// What came of a load; none where nothing runs it.
enum Loaded {
    /// For the life of the model.
    For(Option<Ready>),
    /// Until it is tried again.
    Meanwhile(Option<Ready>),
}

/// How long a program rests at first, and at most, before it is tried again.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

/// A program that is to be tried again.
struct Rest {
    until: Instant,
    pause: Duration,
}

/// One program of a model, loaded or not.
pub(super) struct Slot {
    pub program: Arc<Program>,
    pub counters: Counters,
    /// None when it was set aside and nothing runs in its place.
    loaded: OnceLock<Option<Ready>>,
    /// What answers while it rests; not used any more when it is loaded.
    meanwhile: OnceLock<Ready>,
    rest: Mutex<Option<Rest>>,
    loading: Mutex<()>,
}

impl Slot {
    pub fn new(program: Arc<Program>) -> Self {
        Self {
            program,
            counters: Counters::default(),
            loaded: OnceLock::new(),
            meanwhile: OnceLock::new(),
            rest: Mutex::default(),
            loading: Mutex::default(),
        }
    }

    /// Returns whether it was loaded or set aside.
    pub fn settled(&self) -> bool {
        self.loaded.get().is_some()
    }

    /// Returns the program, when it is loaded.
    pub fn ready(&self) -> Option<&Ready> {
        match self.loaded.get() {
            Some(loaded) => loaded.as_ref(),
            None => self.meanwhile.get(),
        }
    }

    /// Returns whether it was set aside, also for a while, and nothing runs in its place.
    pub fn lost(&self) -> bool {
        match self.loaded.get() {
            Some(loaded) => loaded.is_none(),
            None => self.meanwhile.get().is_none() && self.rests(),
        }
    }

    /// Returns whether it is to be tried again.
    pub fn rests(&self) -> bool {
        !self.settled() && self.rest().is_some()
    }

    /// Returns whether it is time to try it again.
    pub fn rested(&self) -> bool {
        let over = |rest: &Rest| rest.until <= Instant::now();
        !self.settled() && self.rest().as_ref().is_some_and(over)
    }

    fn rest(&self) -> MutexGuard<'_, Option<Rest>> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets it rest, longer each time.
    fn set_resting(&self) {
        let mut rest = self.rest();
        let pause = rest.as_ref().map_or(PAUSES[0], |rest| rest.pause * 2);
        let pause = pause.min(PAUSES[1]);
        let until = Instant::now() + pause;
        *rest = Some(Rest { until, pause });
    }

    /// Returns whether eager runs it, for want of anything that could be loaded.
    pub fn substituted(&self) -> bool {
        self.ready()
            .is_some_and(|ready| ready.is_eager() && !ready.preferred)
            && !self.program.steps.is_empty()
    }

    /// Returns whether eager runs it, or will.
    pub fn is_eager(&self) -> bool {
        match self.ready() {
            Some(ready) => ready.is_eager(),
            None => self.program.steps.is_empty(),
        }
    }

    /// Loads it if nobody has, and if it does not rest. An error that is not its artifact's leaves it as it was.
    pub fn load(&self, loader: &Loader) -> Result<(), RuntimeError> {
        self.load_in(loader, Wait::Forever)
    }

    /// As [`Self::load`], and waits so long for another caller that loads it.
    pub fn load_in(&self, loader: &Loader, wait: Wait) -> Result<(), RuntimeError> {
        if self.settled() {
            return Ok(());
        }
        let _alone = pool::lock(&self.loading, wait).ok_or_else(|| RuntimeError::Busy {
            module: self.program.module.as_str().into(),
            bucket: self.program.bucket(),
            contexts: 1,
        })?;
        if self.settled() || (self.rests() && !self.rested()) {
            return Ok(());
        }
        // Held until it is there: a swap finds it, or it is loaded with what was swapped in.
        let weights = loader
            .weights
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let loaded = loader.load(&self.program, &weights).inspect_err(|error| {
            make_room(loader.device, error);
            if self.rests() {
                self.set_resting();
            }
        })?;
        match loaded {
            Loaded::For(ready) => {
                let _ = self.loaded.set(ready);
            }
            Loaded::Meanwhile(ready) => {
                if let Some(ready) = ready {
                    let _ = self.meanwhile.set(ready);
                }
                self.set_resting();
            }
        }
        Ok(())
    }
}
