//! A loaded model, which answers calls.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use precast_store::{
    Device, Digest, Hold,
    record::{self, Sizes, bucket_name},
};
use smallvec::SmallVec;

use super::{
    RuntimeError,
    arrays::{self, Argument},
    background::Background,
    deferred::DeferredChecks,
    ending,
    ffi::TensorRef,
    fixed::Fixed,
    host::now,
    loaded::Loaded,
    options::Inputs,
    outputs::Outputs,
    pool::Wait,
    program::Program,
    replica::{self, Replica},
    states::States,
    tensor::Tensor,
    variant::Variant,
    weight_set::WeightSet,
};

/// A model of one release, ready on one or more devices.
///
/// `Send + Sync`, and every method takes `&self`: share it between threads. A call takes one of the program's slots for
/// its time, and waits when all are taken.
pub struct Model {
    pub(super) name: String,
    /// The names of its modules, sorted.
    known: Arc<[String]>,
    pub(super) replicas: Arc<Vec<Replica>>,
    policy: Inputs,
    /// The longest wait of a call for a slot.
    limit: Option<Duration>,
    /// Counts calls if there are several replicas, so that equally busy replicas are used in rotation.
    calls: AtomicUsize,
    /// The time of the load, in seconds since 1970.
    pub(super) since: i64,
    pub(super) started: Instant,
    /// The time from the beginning of the load.
    pub(super) loaded: Duration,
    pub(super) first_answer: OnceLock<Duration>,
    pub(super) complete: Arc<OnceLock<Duration>>,
    /// Loads the remaining programs while the model answers.
    background: Option<Background>,
    /// The weight set. Locked during a swap.
    pub(super) weights: Mutex<WeightSet>,
    deferred: DeferredChecks,
    /// The number of its release.
    release: Option<u64>,
    /// Keeps gc from the release: parts of it are read when they are first needed.
    _hold: Option<Hold>,
}

/// The replica and the states of a session.
pub(super) type InSession<'a> = (&'a Replica, &'a mut States);

impl Model {
    pub(super) fn new(
        name: String,
        replicas: Vec<Replica>,
        policy: Inputs,
        limit: Option<Duration>,
        weights: WeightSet,
        started: Instant,
    ) -> Self {
        let loaded = started.elapsed();
        let complete = OnceLock::new();
        if replicas
            .iter()
            .flat_map(Replica::programs)
            .all(Program::settled)
        {
            let _ = complete.set(loaded);
        }
        let first = replicas.first().into_iter();
        let mut known: Vec<String> = first.flat_map(|r| r.modules.keys().cloned()).collect();
        known.sort_unstable();
        Self {
            name,
            known: known.into(),
            replicas: Arc::new(replicas),
            policy,
            limit,
            calls: AtomicUsize::new(0),
            since: now(),
            started,
            loaded,
            first_answer: OnceLock::new(),
            complete: Arc::new(complete),
            background: None,
            weights: Mutex::new(weights),
            deferred: DeferredChecks::default(),
            release: None,
            _hold: None,
        }
    }

    /// Notes the number of the release, and lets `hold` live as long as the model.
    pub(super) fn of_release(self, seq: u64, hold: Option<Hold>) -> Self {
        Self {
            release: Some(seq),
            _hold: hold,
            ..self
        }
    }

    /// Starts the thread that loads the remaining programs, in order of priority.
    pub(super) fn load_rest(mut self, priority: &dyn Fn(&record::Program) -> i64) -> Self {
        self.background = Background::start(&self.replicas, &self.complete, self.started, priority);
        self
    }

    /// Waits for the device's checks of the values of all calls so far, and fails with [`RuntimeError::EarlierCall`] if
    /// one was out of bounds and nobody has learnt of it. See [`Outputs::check`].
    pub fn check(&self) -> Result<(), RuntimeError> {
        self.deferred.settle()
    }

    /// Loads every program that is not loaded yet, and runs each once on padding, so that no request pays for work that
    /// is done only once.
    pub fn warm_up(&self) -> Result<(), RuntimeError> {
        for replica in &*self.replicas {
            let _work = ending::work().ok_or_else(|| RuntimeError::ending(replica.device))?;
            let mut programs = replica.programs();
            programs.try_for_each(|program| program.load(&replica.loader))?;
            replica
                .modules
                .values()
                .flatten()
                .for_each(Variant::reroute);
            replica.loaded().try_for_each(Loaded::warm_up)?;
        }
        let _ = self.complete.set(self.started.elapsed());
        Ok(())
    }

    /// Returns the model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the release that was loaded; none for programs that are in no release. [`Self::swap`] does
    /// not change it.
    pub fn release(&self) -> Option<u64> {
        self.release
    }

    /// Returns the names of its modules, sorted.
    pub fn modules(&self) -> Vec<&str> {
        self.known.iter().map(String::as_str).collect()
    }

    /// Returns the records of a module's programs.
    pub fn programs(&self, module: &str) -> Vec<&record::Program> {
        let variants = self
            .replicas
            .first()
            .and_then(|replica| replica.modules.get(module));
        variants
            .into_iter()
            .flatten()
            .flat_map(|variant| variant.programs.iter().map(|program| &*program.record))
            .collect()
    }

    /// Runs a module on inputs in the module's order.
    ///
    /// Takes [`Value`](super::Value)s, or [`Tensor`](super::Tensor)s, also on the device. Every input
    /// is checked before any call of an artifact: see [`RuntimeError::BadInput`] and the variants after it. The outputs are
    /// new tensors on the model's device, cut to the request's sizes where a larger bucket was padded. On CUDA they are
    /// handed out when the work is in the stream of the calling thread, before it is done.
    ///
    /// # Inputs that change
    ///
    /// Another thread may give a clone of an input another storage during the call, or other sizes of up to five axes
    /// within its storage: the call keeps to the sizes that it checked. The caller sees to it that no thread does more.
    /// A clone of more axes, or a storage that grows, frees memory that the call reads. A write to the input's memory
    /// is a data race.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
    /// # use precast_runtime::{Device, Runtime, Store, Tensor, Value};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
    /// let x = Value::new(&[1.0_f32, 2.0, 3.0], &[1, 3])?;
    /// let out = model.run("double", &[x])?;
    /// assert_eq!(out.array::<f32>(0)?.data(), [2.0, 4.0, 6.0]);
    /// assert_eq!(out.served().bucket(), Some(&[("batch".into(), 1), ("seq".into(), 4)].into()));
    ///
    /// // Or with tensors.
    /// let out = model.run("double", &[Tensor::from_slice(&[1.0_f32, 2.0], &[1, 2])?])?;
    /// assert_eq!(out[0].shape(), [1, 2]);
    /// # Ok(()) }
    /// ```
    pub fn run<A: Argument>(&self, module: &str, inputs: &[A]) -> Result<Outputs, RuntimeError> {
        self.run_for(None, self.wait(), module, inputs)
    }

    /// Runs a module as [`Self::run`] does, and fails with [`RuntimeError::Busy`] instead of waiting for another call
    /// to end.
    pub fn try_run<A: Argument>(
        &self,
        module: &str,
        inputs: &[A],
    ) -> Result<Outputs, RuntimeError> {
        self.run_for(None, Wait::no(), module, inputs)
    }

    /// Runs a module as [`Self::run`] does, and fails with [`RuntimeError::Busy`] when no slot is free before
    /// `deadline`.
    ///
    /// A running call can't be cancelled: a call that got its slot before the deadline is answered when it is done.
    pub fn run_until<A: Argument>(
        &self,
        module: &str,
        inputs: &[A],
        deadline: Instant,
    ) -> Result<Outputs, RuntimeError> {
        self.run_for(None, Wait::Until(deadline), module, inputs)
    }

    pub(super) fn wait(&self) -> Wait {
        self.limit.map_or(Wait::Forever, Wait::up_to)
    }

    /// Runs a module for a caller, on inputs in the module's order.
    pub(super) fn run_for<A: Argument>(
        &self,
        session: Option<InSession<'_>>,
        wait: Wait,
        module: &str,
        inputs: &[A],
    ) -> Result<Outputs, RuntimeError> {
        let policy = self.policy_for(inputs.iter().any(arrays::is_plain));
        let inputs = lent(inputs);
        let (replica, states) = self.place(session, &inputs);
        let variant = self.variant(replica, module, inputs.len(), states.is_some())?;
        self.answered(replica, || {
            variant.answer(variant.check(&inputs, policy)?, wait, states)
        })
    }

    /// Fails if [`Self::run_for`] would refuse these inputs in a session, after calls of the modules `before`. Changes no
    /// state.
    pub(super) fn check_for<A: Argument>(
        &self,
        (replica, states): InSession<'_>,
        module: &str,
        inputs: &[A],
        before: &[&str],
    ) -> Result<(), RuntimeError> {
        let policy = self.policy_for(inputs.iter().any(arrays::is_plain));
        let variant = self.variant(replica, module, inputs.len(), true)?;
        replica.admit(|| {
            let checked = variant.check(&lent(inputs), policy)?;
            variant.check_call(checked, self.wait(), states, before)
        })
    }

    /// Runs a module as [`Self::run`] does, on tensors that the call takes: one that nothing else refers to is freed as
    /// soon as the module's programs have read it, and its memory serves the rest of the call.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
    /// # use precast_runtime::{Device, Runtime, Store, Tensor};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let model = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?.load("tiny")?;
    /// let x = Tensor::from_slice(&[1.0_f32, 2.0, 3.0], &[1, 3])?;
    /// let out = model.run_taking("double", vec![x])?;
    /// assert_eq!(out.array::<f32>(0)?.data(), [2.0, 4.0, 6.0]);
    /// # Ok(()) }
    /// ```
    pub fn run_taking(&self, module: &str, inputs: Vec<Tensor>) -> Result<Outputs, RuntimeError> {
        let replica = self.replica(&lent(&inputs));
        let variant = self.variant(replica, module, inputs.len(), false)?;
        self.answered(replica, || {
            let checked = variant.check(&lent(&inputs), self.policy)?;
            drop(inputs);
            variant.answer(checked, self.wait(), None)
        })
    }

    /// Runs a module on inputs by name, in any order. Of a module with several variants, the names pick one.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
    /// # use precast_runtime::{Device, Runtime, Store, Value};
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
        self.run_named_for(None, self.wait(), module, inputs)
    }

    /// Runs a module for a caller, on inputs by name.
    pub(super) fn run_named_for<A: Argument>(
        &self,
        session: Option<InSession<'_>>,
        wait: Wait,
        module: &str,
        inputs: &[(&str, A)],
    ) -> Result<Outputs, RuntimeError> {
        let policy = self.policy_for(inputs.iter().any(|(_, input)| arrays::is_plain(input)));
        let tensors: SmallVec<[TensorRef<'_>; 8]> = inputs
            .iter()
            .map(|(_, input)| arrays::tensor(input))
            .collect();
        let (replica, states) = self.place(session, &tensors);
        let variants = self.variants(replica, module)?;
        let order = |variant: &Variant| -> Option<SmallVec<[TensorRef<'_>; 8]>> {
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
            Some((variant, ordered)) => self.answered(replica, || {
                variant.answer(variant.check(&ordered, policy)?, wait, states)
            }),
            None => Err(unfit(variants, states.is_some(), || {
                RuntimeError::InputNames {
                    module: variants[0].module.clone(),
                    given: inputs.iter().map(|(name, _)| (*name).into()).collect(),
                    variants: variants
                        .iter()
                        .map(|variant| variant.names.clone())
                        .collect(),
                }
            })),
        }
    }

    /// Makes every call that begins after it returns use another weight set. Calls under way finish with the one they
    /// began with, and sessions and fixed programs keep theirs; none sees both, and none fails.
    ///
    /// Changes nothing if a loaded program does not accept the set.
    pub fn swap(&self, weights: &WeightSet) -> Result<(), RuntimeError> {
        let _work = ending::work().ok_or_else(|| {
            let devices = self.replicas.iter().map(|replica| replica.device);
            RuntimeError::ending(devices.last().unwrap_or(Device::Cpu))
        })?;
        // One swap at a time; calls do not take this lock.
        let mut held = self.weights.lock().unwrap_or_else(PoisonError::into_inner);
        let pairs = self
            .replicas
            .iter()
            .map(|replica| Ok((replica, weights.on(replica.device)?)));
        let pairs: Vec<_> = pairs.collect::<Result<_, RuntimeError>>()?;
        // Nothing is loaded meanwhile, so that all programs have the same weights.
        let mut next: Vec<_> = self
            .replicas
            .iter()
            .map(|replica| {
                let weights = &replica.loader.weights;
                weights.write().unwrap_or_else(PoisonError::into_inner)
            })
            .collect();
        for (replica, weights) in &pairs {
            let mut loaded = replica.loaded();
            loaded.try_for_each(|program| program.accepts(weights))?;
        }
        for (i, (replica, new)) in pairs.iter().enumerate() {
            if let Err(error) = replica.loaded().try_for_each(|program| program.swap(new)) {
                // A graph could not be captured again: back to the old set everywhere, which was captured before.
                for (replica, _) in &pairs[..=i] {
                    let old = held.on(replica.device)?;
                    replica.loaded().for_each(|program| {
                        if let Err(error) = program.swap(&old) {
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

    /// Returns the replica and the states of a call: a session's own, or no states and the replica for these inputs.
    fn place<'a>(
        &'a self,
        session: Option<InSession<'a>>,
        inputs: &[TensorRef<'_>],
    ) -> (&'a Replica, Option<&'a mut States>) {
        match session {
            Some((replica, states)) => (replica, Some(states)),
            None => (self.replica(inputs), None),
        }
    }

    /// Returns the replica for a call with these inputs.
    pub(super) fn replica(&self, inputs: &[TensorRef<'_>]) -> &Replica {
        match &self.replicas[..] {
            [only] => only,
            several => {
                let at = inputs.first().and_then(|input| input.meta().device());
                let call = self.calls.fetch_add(1, Ordering::Relaxed);
                replica::choose(several, at, call)
            }
        }
    }

    pub(super) fn variants<'m>(
        &self,
        replica: &'m Replica,
        module: &str,
    ) -> Result<&'m [Variant], RuntimeError> {
        let variants = replica.modules.get(module);
        let variants = variants.ok_or_else(|| RuntimeError::NoModule {
            model: self.name.clone(),
            module: module.to_owned(),
            known: self.known.clone(),
        })?;
        Ok(variants)
    }

    /// Returns the variant of a module that takes so many inputs.
    fn variant<'m>(
        &self,
        replica: &'m Replica,
        module: &str,
        inputs: usize,
        in_session: bool,
    ) -> Result<&'m Variant, RuntimeError> {
        let variants = self.variants(replica, module)?;
        let takes = |variant: &&Variant| variant.signature.inputs.len() == inputs;
        let found = variants.iter().find(takes);
        found.ok_or_else(|| {
            unfit(variants, in_session, || RuntimeError::InputCount {
                module: variants[0].module.clone(),
                expected: variants[0].names.len(),
                got: inputs,
                names: variants[0].names.clone(),
            })
        })
    }

    /// Returns what to do with inputs that need a copy. Plain ones are copied to the device in any case.
    fn policy_for(&self, plain: bool) -> Inputs {
        if plain { Inputs::MayCopy } else { self.policy }
    }

    /// Runs a call on a replica, and notes the time of the first answer.
    fn answered(
        &self,
        replica: &Replica,
        call: impl FnOnce() -> Result<Outputs, RuntimeError>,
    ) -> Result<Outputs, RuntimeError> {
        let result = replica.admit(|| {
            self.deferred.poll()?;
            call()
        });
        if let Ok(outputs) = &result
            && let Some(flags) = &outputs.flags
        {
            self.deferred.add(flags);
        }
        if result.is_ok() && self.first_answer.get().is_none() {
            let _ = self.first_answer.set(self.started.elapsed());
        }
        result
    }

    /// Holds the program of exactly these sizes, on the device with the fewest running calls. It does not delay other
    /// calls, because it has a separate slot until it is dropped.
    ///
    /// A new slot of a program that runs as a CUDA graph is captured here, which takes milliseconds; later holders
    /// reuse it. Fails with [`RuntimeError::Busy`] if all [`Runtime::instances`](super::Runtime::instances) of it are
    /// held, with [`RuntimeError::NoBucket`] if no program has these sizes, and with [`RuntimeError::NeedsSession`] for
    /// a module with states.
    pub fn fixed(&self, module: &str, sizes: &Sizes) -> Result<Fixed<'_>, RuntimeError> {
        let replica = self.replica(&[]);
        let variants = self.variants(replica, module)?;
        let mut known = variants.iter();
        let variant = known.find(|variant| variant.has(sizes));
        let variant = variant.unwrap_or(&variants[0]);
        variant.without_session()?;
        Fixed::open(replica, variant.exactly(sizes)?)
    }
}

/// Returns the error of a call that no variant fits: a module with states has other arguments in a session.
fn unfit(
    variants: &[Variant],
    in_session: bool,
    error: impl FnOnce() -> RuntimeError,
) -> RuntimeError {
    let mut alone = variants.iter().map(Variant::without_session);
    match alone.find_map(Result::err) {
        Some(needs) if !in_session => needs,
        _ => error(),
    }
}

fn lent<A: Argument>(inputs: &[A]) -> SmallVec<[TensorRef<'_>; 8]> {
    inputs.iter().map(arrays::tensor).collect()
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
