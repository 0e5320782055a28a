//! A loaded model: what answers calls.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use smallvec::SmallVec;
use tch::Tensor;

use super::{
    RuntimeError,
    arrays::{self, Argument},
    ffi::{Meta, cuda},
    graphs::Session,
    loader::{Loader, Slot},
    outputs::Outputs,
    program::Ready,
    stats::ModuleStats,
    variant::Variant,
    weights::WeightSet,
};
use crate::{
    Device, Digest,
    inspect::stats::Counts,
    record::{Program, SCHEMA, Sizes, bucket_name},
    store::Hold,
};

/// Whether the runtime may copy an input that is right but for strides, alignment or device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inputs {
    /// Such an input is an error.
    #[default]
    AsGiven,
    /// Such an input is copied.
    MayCopy,
}

/// A model of one release, ready on one or more devices.
///
/// `Send + Sync`, and every method takes `&self`: share it between threads. A call takes one of the program's lanes for
/// its time and waits when all are taken.
pub struct Model {
    name: String,
    replicas: Arc<Vec<Replica>>,
    policy: Inputs,
    /// When it was loaded, in seconds since 1970.
    since: i64,
    started: Instant,
    /// From the beginning of the load.
    loaded: Duration,
    first_answer: OnceLock<Duration>,
    complete: Arc<OnceLock<Duration>>,
    /// Loads the rest behind the model.
    behind: Option<Behind>,
    /// The weight set of each replica; held while one is swapped for another.
    weights: Mutex<WeightSet>,
    /// Keeps gc from what it was loaded from: some of it is read when it is first needed.
    _hold: Option<Hold>,
}

/// A model on one device.
pub(super) struct Replica {
    pub device: Device,
    pub modules: HashMap<String, Vec<Variant>>,
    pub loader: Arc<Loader>,
    /// Calls under way.
    running: AtomicUsize,
    /// Why its device answers nothing right any more.
    broken: OnceLock<String>,
}

/// How long it took from the beginning of a load until a model was of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timings {
    /// Until the model was handed out.
    pub loaded: Duration,
    /// Until the first call was answered. On CUDA an answer is handed out when its work is in the stream.
    pub first_answer: Option<Duration>,
    /// Until every program was loaded or set aside, where they are loaded without being asked for.
    pub complete: Option<Duration>,
}

/// The thread that loads behind a model; it ends with the model, after the program it is at.
struct Behind {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A program that could not be loaded. Requests go to the model's other buckets.
#[derive(Debug)]
pub struct Quarantined {
    pub program: Digest,
    pub module: String,
    pub bucket: Sizes,
    pub device: Device,
    pub error: RuntimeError,
}

impl Replica {
    pub fn new(
        device: Device,
        modules: HashMap<String, Vec<Variant>>,
        loader: Arc<Loader>,
    ) -> Self {
        Self {
            device,
            modules,
            loader,
            running: AtomicUsize::new(0),
            broken: OnceLock::new(),
        }
    }

    /// Returns every program, loaded or not.
    pub fn slots(&self) -> impl Iterator<Item = &Slot> {
        let variants = self.modules.values().flatten();
        variants.flat_map(|variant| &variant.programs)
    }

    /// Returns the programs that are loaded.
    fn programs(&self) -> impl Iterator<Item = &Ready> {
        self.slots().filter_map(Slot::ready)
    }
}

impl Model {
    pub(super) fn new(
        name: String,
        replicas: Vec<Replica>,
        policy: Inputs,
        weights: WeightSet,
        started: Instant,
    ) -> Self {
        let loaded = started.elapsed();
        let complete = OnceLock::new();
        if replicas.iter().flat_map(Replica::slots).all(Slot::settled) {
            let _ = complete.set(loaded);
        }
        Self {
            name,
            replicas: Arc::new(replicas),
            policy,
            since: now(),
            started,
            loaded,
            first_answer: OnceLock::new(),
            complete: Arc::new(complete),
            behind: None,
            weights: Mutex::new(weights),
            _hold: None,
        }
    }

    /// Lets `hold` live as long as the model.
    pub(super) fn holding(self, hold: Option<Hold>) -> Self {
        Self {
            _hold: hold,
            ..self
        }
    }

    /// Starts the thread that loads what is not loaded yet, what has the highest priority first.
    pub(super) fn load_behind(mut self, priority: &dyn Fn(&Program) -> i64) -> Self {
        let mut order: Vec<(usize, Digest, i64)> = Vec::new();
        for (replica, on) in self.replicas.iter().enumerate() {
            let rest = on.slots().filter(|slot| !slot.settled());
            order.extend(rest.map(|slot| (replica, slot.program.id, priority(&slot.program))));
        }
        order.sort_by_key(|(replica, _, priority)| (std::cmp::Reverse(*priority), *replica));
        let (replicas, complete) = (self.replicas.clone(), self.complete.clone());
        let (stop, started) = (Arc::new(AtomicBool::new(false)), self.started);
        let stopped = stop.clone();
        let work = move || {
            for (replica, id, _) in order {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let on = &replicas[replica];
                let mut variants = on.modules.values().flatten();
                let Some(variant) =
                    variants.find(|v| v.programs.iter().any(|s| s.program.id == id))
                else {
                    continue;
                };
                for slot in variant.programs.iter().filter(|s| s.program.id == id) {
                    if let Err(error) = slot.load(&on.loader) {
                        // The call that needs it tries again, and tells its caller.
                        tracing::warn!(program = %id.short(), %error, "a program was not loaded");
                    }
                }
                variant.refine();
            }
            let _ = complete.set(started.elapsed());
        };
        let thread = std::thread::Builder::new()
            .name("precast-load".to_owned())
            .spawn(work);
        match thread {
            Ok(thread) => {
                let thread = Some(thread);
                self.behind = Some(Behind { stop, thread });
            }
            // Each is loaded by the first call that needs it.
            Err(error) => tracing::warn!(%error, "no thread to load programs with"),
        }
        self
    }

    /// Returns how long it took to be of use.
    pub fn timings(&self) -> Timings {
        Timings {
            loaded: self.loaded,
            first_answer: self.first_answer.get().copied(),
            complete: self.complete.get().copied(),
        }
    }

    /// Returns the model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the names of its modules, sorted.
    pub fn modules(&self) -> Vec<&str> {
        let first = self.replicas.first();
        let mut names: Vec<&str> = first
            .into_iter()
            .flat_map(|replica| replica.modules.keys().map(String::as_str))
            .collect();
        names.sort_unstable();
        names
    }

    /// Returns the programs of one module, as their records have them.
    pub fn programs(&self, module: &str) -> Vec<&Program> {
        let variants = self
            .replicas
            .first()
            .and_then(|replica| replica.modules.get(module));
        variants
            .into_iter()
            .flatten()
            .flat_map(|variant| variant.programs.iter().map(|slot| &*slot.program))
            .collect()
    }

    /// Runs a module on inputs in the module's order.
    ///
    /// Takes `tch` tensors, or [`Value`](super::Value)s where the caller does not use tch. Every input is checked before
    /// anything foreign sees it: see [`RuntimeError::BadInput`] and the variants after it for what can be wrong. The
    /// outputs are new tensors on the model's device, cut to the request's sizes where a larger bucket was padded. On
    /// CUDA they are handed out when the work is in the stream of the calling thread, before it is done.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake/example.rs"));
    /// # use precast::{Device, Runtime, Store, Value};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
    /// let x = Value::new(&[1.0_f32, 2.0, 3.0], &[1, 3])?;
    /// let out = model.run("double", &[x])?;
    /// assert_eq!(out.array::<f32>(0)?.data(), [2.0, 4.0, 6.0]);
    /// assert_eq!(out.served().bucket(), &[("batch".into(), 1), ("seq".into(), 4)].into());
    ///
    /// // Or with tch.
    /// let out = model.run("double", &[tch::Tensor::from_slice(&[1.0_f32, 2.0]).view([1, 2])])?;
    /// assert_eq!(out[0].size(), [1, 2]);
    /// # Ok(()) }
    /// ```
    pub fn run<A: Argument>(&self, module: &str, inputs: &[A]) -> Result<Outputs, RuntimeError> {
        let policy = self.policy(inputs);
        let inputs: SmallVec<[&Tensor; 8]> = inputs.iter().map(arrays::tensor).collect();
        let replica = self.replica(&inputs)?;
        let variants = self.variants(replica, module)?;
        let variant = variants
            .iter()
            .find(|variant| variant.signature.inputs.len() == inputs.len());
        let Some(variant) = variant else {
            let signature = &variants[0].signature;
            return Err(RuntimeError::InputCount {
                module: variants[0].module.clone(),
                expected: signature.inputs.len(),
                got: inputs.len(),
                names: signature
                    .inputs
                    .iter()
                    .map(|spec| spec.name.to_string())
                    .collect(),
            });
        };
        self.answer(replica, variant, &inputs, policy)
    }

    /// Runs a module on inputs by name, in any order. Of a module with several variants, the names pick one.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake/example.rs"));
    /// # use precast::{Device, Runtime, Store, Value};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
    /// let x = Value::new(&[1.0_f32; 6], &[2, 3])?;
    /// let out = model.run_named("double", &[("x", &x)])?;
    /// assert_eq!(out.array_named::<f32>("y")?.data(), [2.0; 6]);
    ///
    /// let error = model.run_named("double", &[("ids", &x)]).unwrap_err();
    /// assert_eq!(error.to_string(), "module `double` has no variant with the inputs `ids`");
    /// assert_eq!(error.hint(), "it takes x");
    /// # Ok(()) }
    /// ```
    pub fn run_named<A: Argument>(
        &self,
        module: &str,
        inputs: &[(&str, A)],
    ) -> Result<Outputs, RuntimeError> {
        let policy = self.policy(inputs.iter().map(|(_, input)| input));
        let tensors: SmallVec<[&Tensor; 8]> = inputs
            .iter()
            .map(|(_, input)| arrays::tensor(input))
            .collect();
        let replica = self.replica(&tensors)?;
        let variants = self.variants(replica, module)?;
        let order = |variant: &Variant| -> Option<SmallVec<[&Tensor; 8]>> {
            let wanted = &variant.signature.inputs;
            if wanted.len() != inputs.len() {
                return None;
            }
            let find = |name: &str| {
                let at = inputs.iter().position(|(given, _)| *given == name)?;
                Some(tensors[at])
            };
            wanted.iter().map(|spec| find(&spec.name)).collect()
        };
        match variants
            .iter()
            .find_map(|variant| order(variant).map(|ordered| (variant, ordered)))
        {
            Some((variant, ordered)) => self.answer(replica, variant, &ordered, policy),
            None => Err(RuntimeError::InputNames {
                module: variants[0].module.clone(),
                given: inputs.iter().map(|(name, _)| format!("`{name}`")).collect(),
                variants: variants.iter().map(Variant::names).collect(),
            }),
        }
    }

    /// Returns what may be done to inputs: plain ones are brought to the device in any case.
    fn policy<'a, A: Argument + 'a>(&self, inputs: impl IntoIterator<Item = &'a A>) -> Inputs {
        match inputs.into_iter().any(arrays::is_plain) {
            true => Inputs::MayCopy,
            false => self.policy,
        }
    }

    fn variants<'a>(
        &self,
        replica: &'a Replica,
        module: &str,
    ) -> Result<&'a [Variant], RuntimeError> {
        match replica.modules.get(module) {
            Some(variants) => Ok(variants),
            None => {
                let known: Vec<String> = self.modules().into_iter().map(str::to_owned).collect();
                let distance = |name: &String| strsim::damerau_levenshtein(name, module);
                let nearest = known
                    .iter()
                    .min_by_key(|name| distance(name))
                    .filter(|name| distance(name) <= 3)
                    .cloned();
                Err(RuntimeError::NoModule {
                    model: self.name.clone(),
                    module: module.to_owned(),
                    known,
                    nearest,
                })
            }
        }
    }

    /// Returns the replica on the inputs' device, or else the one with the fewest calls.
    fn replica(&self, inputs: &[&Tensor]) -> Result<&Replica, RuntimeError> {
        if self.replicas.len() > 1 {
            let here = |replica: &&Replica| {
                inputs
                    .first()
                    .is_some_and(|input| Meta::of(input).device() == Some(replica.device))
            };
            if let Some(replica) = self.replicas.iter().find(here) {
                return Ok(replica);
            }
        }
        let load = |replica: &&Replica| replica.running.load(Ordering::Relaxed);
        self.replicas
            .iter()
            .min_by_key(load)
            .ok_or(RuntimeError::Devices)
    }

    /// Runs on a replica, which counts the call while it lasts.
    ///
    /// When a call fails on CUDA, the device is asked whether its error is one that stays (an illegal access, a failed
    /// assertion). From then on every call is refused: what such a context answers can't be trusted.
    fn answer(
        &self,
        replica: &Replica,
        variant: &Variant,
        inputs: &[&Tensor],
        policy: Inputs,
    ) -> Result<Outputs, RuntimeError> {
        if let Some(reason) = replica.broken.get() {
            let (device, reason) = (replica.device, reason.clone());
            return Err(RuntimeError::Unready { device, reason });
        }
        replica.running.fetch_add(1, Ordering::Relaxed);
        let result = variant.answer(inputs, policy);
        replica.running.fetch_sub(1, Ordering::Relaxed);
        if let (
            Err(RuntimeError::Failed { .. } | RuntimeError::Tensor { .. }),
            Device::Cuda(ordinal),
        ) = (&result, replica.device)
            && let Err(reason) = cuda().and_then(|cuda| cuda.health(ordinal))
        {
            tracing::error!(device = %replica.device, reason, "a device answers no more calls in this process");
            let _ = replica.broken.set(reason);
        }
        if result.is_ok() && self.first_answer.get().is_none() {
            let _ = self.first_answer.set(self.started.elapsed());
        }
        result
    }

    /// Returns whether calls are answered: no device has an error that stays.
    pub fn is_ready(&self) -> bool {
        self.replicas
            .iter()
            .all(|replica| replica.broken.get().is_none())
    }

    /// Loads every program that is not loaded yet, and runs each once on padding, so that no request pays for what is
    /// done only once.
    pub fn warm_up(&self) -> Result<(), RuntimeError> {
        for replica in &*self.replicas {
            let mut slots = replica.slots();
            slots.try_for_each(|slot| slot.load(&replica.loader))?;
            replica.modules.values().flatten().for_each(Variant::refine);
            replica.programs().try_for_each(Ready::warm_up)?;
        }
        let _ = self.complete.set(self.started.elapsed());
        Ok(())
    }

    /// Makes every call that begins after it returns use another weight set. Calls under way finish with the one they
    /// began with; none sees both, and none fails.
    ///
    /// Every program that is loaded is asked first whether it accepts the set. When one does not, nothing is changed.
    pub fn swap(&self, weights: &WeightSet) -> Result<(), RuntimeError> {
        // One swap at a time; calls do not take this lock.
        let mut held = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = self
            .replicas
            .iter()
            .map(|replica| Ok((replica, weights.on(replica.device)?)));
        let pairs: Vec<_> = pairs.collect::<Result<_, RuntimeError>>()?;
        // Nothing is loaded meanwhile, so that every program has the one or the other.
        let mut next: Vec<_> = self
            .replicas
            .iter()
            .map(|replica| {
                let weights = &replica.loader.weights;
                weights.write().unwrap_or_else(PoisonError::into_inner)
            })
            .collect();
        for (replica, weights) in &pairs {
            replica
                .programs()
                .try_for_each(|ready| ready.accepts(weights))?;
        }
        for (i, (replica, new)) in pairs.iter().enumerate() {
            if let Err(error) = replica.programs().try_for_each(|ready| ready.swap(new)) {
                // A graph could not be captured again: back to the old set everywhere, which was captured before.
                for (replica, _) in &pairs[..=i] {
                    let old = held.on(replica.device)?;
                    replica.programs().for_each(|ready| {
                        if let Err(error) = ready.swap(&old) {
                            tracing::error!(%error, "a program has no graph after a swap that failed");
                        }
                    });
                }
                return Err(error);
            }
        }
        for (next, (_, weights)) in next.iter_mut().zip(&pairs) {
            **next = weights.clone();
        }
        *held = weights.clone();
        Ok(())
    }

    /// Returns the digest of the weight set that new calls use; none for a model without one.
    pub fn weights(&self) -> Option<Digest> {
        self.weights
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .digest()
    }

    /// Returns a program's static tensors and its launch, where it runs as a CUDA graph on the first device.
    pub fn session(&self, module: &str, sizes: &Sizes) -> Option<Session<'_>> {
        let variants = self.replicas.first()?.modules.get(module)?;
        variants
            .iter()
            .find_map(|variant| variant.exactly(sizes))?
            .session()
    }

    /// Returns the programs that could not be loaded so far, and why.
    pub fn quarantined(&self) -> Vec<Arc<Quarantined>> {
        let lost = self.replicas.iter().flat_map(|replica| {
            let quarantined = replica.loader.quarantined.lock();
            quarantined.unwrap_or_else(PoisonError::into_inner).clone()
        });
        lost.collect()
    }

    /// Returns the programs that eager answers because, when they were built, it was faster than their artifacts.
    pub fn faster_as_eager(&self) -> Vec<&Program> {
        let ready = self.replicas.iter().flat_map(Replica::programs);
        ready
            .filter(|ready| ready.preferred)
            .map(|ready| &*ready.plan.program)
            .collect()
    }

    /// Returns the reason of each program that was to run as a CUDA graph and does not.
    pub fn without_graph(&self) -> Vec<(&Program, &str)> {
        let ready = self.replicas.iter().flat_map(Replica::programs);
        ready
            .filter_map(|ready| Some((&*ready.plan.program, ready.refused.as_deref()?)))
            .collect()
    }

    /// Returns what was asked for since the model was loaded and what answered it, for `precast stats` and the planner.
    pub fn counts(&self) -> Counts {
        let variants = self
            .replicas
            .iter()
            .flat_map(|replica| replica.modules.values().flatten());
        Counts {
            schema: SCHEMA,
            model: self.name.clone(),
            since: self.since,
            until: now(),
            calls: variants.flat_map(Variant::counts).collect(),
        }
    }

    /// Returns what was counted since the model was loaded, by module and device. Counting goes on meanwhile.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake/example.rs"));
    /// # use precast::{Device, Runtime, Store, Value};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
    /// model.run("double", &[Value::new(&[1.0_f32; 3], &[1, 3])?])?;
    /// let stats = model.stats();
    /// assert_eq!((stats[0].module.as_str(), stats[0].device.as_str()), ("double", "cpu"));
    /// let padded: u64 = stats[0].buckets.iter().map(|bucket| bucket.padded).sum();
    /// assert_eq!(padded, 1);
    /// # Ok(()) }
    /// ```
    pub fn stats(&self) -> Vec<ModuleStats> {
        let variants = self
            .replicas
            .iter()
            .flat_map(|replica| replica.modules.values().flatten());
        let mut stats: Vec<ModuleStats> = variants.map(Variant::stats).collect();
        stats.sort_by(|a, b| (&a.module, &a.device).cmp(&(&b.module, &b.device)));
        stats
    }
}

fn now() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut buckets: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for module in self.modules() {
            let names = self
                .programs(module)
                .iter()
                .map(|program| bucket_name(&program.sizes))
                .collect();
            buckets.insert(module, names);
        }
        f.debug_struct("Model")
            .field("name", &self.name)
            .field("modules", &buckets)
            .finish()
    }
}
