//! A loaded model: what answers calls.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use precast_store::{
    Hold,
    record::{Program, Sizes, bucket_name},
};
use smallvec::SmallVec;

use super::{
    RuntimeError,
    arrays::{self, Argument},
    background::Behind,
    ending,
    ffi::TensorRef,
    graphs::Session,
    host::now,
    loader::Slot,
    options::Inputs,
    outputs::Outputs,
    pool::Wait,
    program::Ready,
    replica::{self, Replica},
    variant::{Call, Variant},
    weights::WeightSet,
};

/// A model of one release, ready on one or more devices.
///
/// `Send + Sync`, and every method takes `&self`: share it between threads. A call takes one of the program's execution contexts for
/// its time and waits when all are taken.
pub struct Model {
    pub(super) name: String,
    /// The names of its modules, sorted.
    known: Arc<[String]>,
    pub(super) replicas: Arc<Vec<Replica>>,
    policy: Inputs,
    /// How long a call waits for an execution context.
    limit: Option<Duration>,
    /// Counts calls where there are several replicas: of equally busy ones the next has its turn.
    turn: AtomicUsize,
    /// When it was loaded, in seconds since 1970.
    pub(super) since: i64,
    pub(super) started: Instant,
    /// From the beginning of the load.
    pub(super) loaded: Duration,
    pub(super) first_answer: OnceLock<Duration>,
    pub(super) complete: Arc<OnceLock<Duration>>,
    /// Loads the rest behind the model.
    behind: Option<Behind>,
    /// The weight set of each replica; held while one is swapped for another.
    pub(super) weights: Mutex<WeightSet>,
    /// Keeps gc from what it was loaded from: some of it is read when it is first needed.
    _hold: Option<Hold>,
}

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
        if replicas.iter().flat_map(Replica::slots).all(Slot::settled) {
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
            turn: AtomicUsize::new(0),
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
        self.behind = Behind::start(&self.replicas, &self.complete, self.started, priority);
        self
    }

    /// Loads every program that is not loaded yet, and runs each once on padding, so that no request pays for what is
    /// done only once.
    pub fn warm_up(&self) -> Result<(), RuntimeError> {
        for replica in &*self.replicas {
            let _work = ending::work().ok_or_else(|| RuntimeError::ending(replica.device))?;
            let mut slots = replica.slots();
            slots.try_for_each(|slot| slot.load(&replica.loader))?;
            replica
                .modules
                .values()
                .flatten()
                .for_each(Variant::reroute);
            replica.programs().try_for_each(Ready::warm_up)?;
        }
        let _ = self.complete.set(self.started.elapsed());
        Ok(())
    }

    /// Returns the model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the names of its modules, sorted.
    pub fn modules(&self) -> Vec<&str> {
        self.known.iter().map(String::as_str).collect()
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
    /// Takes [`Value`](super::Value)s, or [`Tensor`](super::Tensor)s, which may be on the device already. Every input is checked before
    /// anything foreign sees it: see [`RuntimeError::BadInput`] and the variants after it for what can be wrong. The
    /// outputs are new tensors on the model's device, cut to the request's sizes where a larger bucket was padded. On
    /// CUDA they are handed out when the work is in the stream of the calling thread, before it is done.
    ///
    /// # Inputs that change
    ///
    /// Another thread may give a clone of an input another storage during the call, or other sizes of up to five axes within its
    /// storage: the call keeps to the sizes that it checked. The caller sees to it that no thread does more. A clone of more
    /// axes, or a storage that grows, frees memory that the call reads. A write to the input's memory is a data race.
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
        self.run_in(module, inputs, self.wait())
    }

    /// Runs a module as [`Self::run`] does, and fails with [`RuntimeError::Busy`] instead of waiting for another call to end.
    pub fn try_run<A: Argument>(
        &self,
        module: &str,
        inputs: &[A],
    ) -> Result<Outputs, RuntimeError> {
        self.run_in(module, inputs, Wait::no())
    }

    /// Runs a module as [`Self::run`] does, and fails with [`RuntimeError::Busy`] when no execution context is free before
    /// `deadline`.
    ///
    /// What runs can't be cancelled: a call that got its context before the deadline is answered when it is done.
    pub fn run_until<A: Argument>(
        &self,
        module: &str,
        inputs: &[A],
        deadline: Instant,
    ) -> Result<Outputs, RuntimeError> {
        self.run_in(module, inputs, Wait::Until(deadline))
    }

    fn wait(&self) -> Wait {
        self.limit.map_or(Wait::Forever, Wait::up_to)
    }

    fn run_in<A: Argument>(
        &self,
        module: &str,
        inputs: &[A],
        wait: Wait,
    ) -> Result<Outputs, RuntimeError> {
        let call = Call {
            inputs: self.policy(inputs),
            wait,
        };
        let inputs: SmallVec<[TensorRef<'_>; 8]> = inputs.iter().map(arrays::tensor).collect();
        let replica = self.replica(&inputs);
        let variants = self.variants(replica, module)?;
        let variant = variants
            .iter()
            .find(|variant| variant.signature.inputs.len() == inputs.len());
        let Some(variant) = variant else {
            return Err(RuntimeError::InputCount {
                module: variants[0].module.clone(),
                expected: variants[0].names.len(),
                got: inputs.len(),
                names: variants[0].names.clone(),
            });
        };
        self.answer(replica, variant, &inputs, call)
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
        let call = Call {
            inputs: self.policy(inputs.iter().map(|(_, input)| input)),
            wait: self.wait(),
        };
        let tensors: SmallVec<[TensorRef<'_>; 8]> = inputs
            .iter()
            .map(|(_, input)| arrays::tensor(input))
            .collect();
        let replica = self.replica(&tensors);
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
            Some((variant, ordered)) => self.answer(replica, variant, &ordered, call),
            None => Err(RuntimeError::InputNames {
                module: variants[0].module.clone(),
                given: inputs.iter().map(|(name, _)| (*name).into()).collect(),
                variants: variants
                    .iter()
                    .map(|variant| variant.names.clone())
                    .collect(),
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
            None => Err(RuntimeError::NoModule {
                model: self.name.clone(),
                module: module.to_owned(),
                known: self.known.clone(),
            }),
        }
    }

    /// Returns the replica that a call goes to.
    fn replica(&self, inputs: &[TensorRef<'_>]) -> &Replica {
        match &self.replicas[..] {
            [only] => only,
            several => {
                let at = inputs.first().and_then(|input| input.meta().device());
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                replica::choose(several, at, turn)
            }
        }
    }

    fn answer(
        &self,
        replica: &Replica,
        variant: &Variant,
        inputs: &[TensorRef<'_>],
        call: Call,
    ) -> Result<Outputs, RuntimeError> {
        let result = replica.answer(variant, inputs, call);
        if result.is_ok() && self.first_answer.get().is_none() {
            let _ = self.first_answer.set(self.started.elapsed());
        }
        result
    }

    /// Returns the static tensors and the launch of a bucket's program, for calls without copies. None where it does not run as a
    /// CUDA graph on the first device.
    pub fn session(&self, module: &str, sizes: &Sizes) -> Option<Session<'_>> {
        let variants = self.replicas.first()?.modules.get(module)?;
        variants
            .iter()
            .find_map(|variant| variant.exactly(sizes))?
            .session()
    }
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
