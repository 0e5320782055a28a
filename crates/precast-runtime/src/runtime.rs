//! The builder that loads models: devices, a source, options, and the weights that models share.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
    sync::{Arc, Mutex, OnceLock, RwLock},
    time::{Duration, Instant},
};

use precast_store::{
    Device, Digest, Store, Target,
    record::{self, Padding, Shim},
};

use super::{
    RuntimeError,
    devices::Devices,
    ending::{self, Entered},
    error::in_store,
    ffi::{Libtorch, cuda, open_libtorch},
    graphs::Lends,
    host::host,
    layout::volume,
    loader::{Held, Loader},
    model::Model,
    options::{Graphs, Inputs, Loading},
    program::Program,
    replica::Replica,
    source::Source,
    states::most_bytes,
    trial::{Trial, Trials},
    variant::Variant,
    weight_set::WeightSet,
    weights::Weights,
};

mod release;

/// The devices of models, and the source of their artifacts and weights.
///
/// A builder: [`Self::new`], then options, then [`Self::load`] for each model. Models of a runtime and of its clones
/// share their weights.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = example();
/// # let artifacts = folder.path();
/// use precast_runtime::{Device, Runtime, Store, Inputs, Loading};
///
/// let store = Store::open(artifacts)?;
/// let runtime = Runtime::new(&store, Device::Cpu)?
///     .instances(8) // callers at once of one program
///     .inputs(Inputs::MayCopy)
///     .loading(Loading::Background);
/// let model = runtime.load("tiny")?;
/// model.warm_up()?;
/// assert_eq!(model.modules(), ["double"]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Runtime {
    source: Arc<dyn Source>,
    devices: Vec<Device>,
    /// The target of this host, for each device.
    hosts: Vec<Target>,
    instances: usize,
    sessions: usize,
    session_limit: Option<u64>,
    inputs: Inputs,
    wait: Option<Duration>,
    /// The trials of first loads, for each device; empty without trials.
    trials: Vec<Arc<Trials>>,
    graphs: Graphs,
    lends: Lends,
    limit: Option<u64>,
    eager: bool,
    pads: bool,
    loading: Loading,
    priority: Priority,
    held: Arc<Held>,
}

/// Returns the priority of a program for loading. The highest is loaded first.
type Priority = Arc<dyn Fn(&record::Program) -> i64 + Send + Sync>;

impl Runtime {
    /// Opens libtorch for this process: the copy that the process has loaded, for example in a Python with torch, or
    /// else the copy in `folder`, which is the package `torch` or the folder with its libraries.
    ///
    /// Without this call a runtime uses the libtorch of the process. A version of torch newer than the tried ones is
    /// refused, unless `untried` is set. Fails with [`RuntimeError::Libtorch`], also if the process has loaded another
    /// one than that of `folder`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use precast_runtime::{Device, Runtime, Store};
    ///
    /// Runtime::libtorch(Some("/opt/venv/lib/python3.11/site-packages/torch".as_ref()), false)?;
    /// let model = Runtime::new(&Store::open("artifacts")?, Device::Cpu)?.load("minilm")?;
    /// # Ok(()) }
    /// ```
    pub fn libtorch(
        folder: Option<&Path>,
        untried: bool,
    ) -> Result<&'static Libtorch, RuntimeError> {
        open_libtorch(folder, untried).map_err(|reason| RuntimeError::Libtorch { reason })
    }

    /// Creates a runtime over a store on one or several devices, as `Device::Cpu` or `[Device::Cuda(0),
    /// Device::Cuda(1)]`.
    ///
    /// A model has a replica on each device. A call whose inputs are on one of the devices is answered there. Any other
    /// call goes to the replica with the fewest running calls ([`Model::devices`] counts them); equally busy replicas
    /// are used in rotation. The CPU may be named several times, each a replica with separate slots; all of them share
    /// one copy of the weights.
    ///
    /// Fails with [`RuntimeError::NoDevice`] if one is missing, where CUDA ordinals are those of this process
    /// (`CUDA_VISIBLE_DEVICES`), and with [`RuntimeError::Devices`] for an empty list, or for a CUDA device that is
    /// named twice. The caller's current CUDA device does not change, here and in every call.
    pub fn new(store: &Store, devices: impl Into<Devices>) -> Result<Self, RuntimeError> {
        Self::over(Arc::new(store.clone()), devices)
    }

    /// Creates a runtime over another source than a store, as a build does for unpublished artifacts.
    pub fn over(
        source: Arc<dyn Source>,
        devices: impl Into<Devices>,
    ) -> Result<Self, RuntimeError> {
        let devices = devices.into().checked()?;
        let hosts = devices
            .iter()
            .map(|&device| host(device))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            source,
            devices,
            hosts,
            instances: 4,
            sessions: 16,
            session_limit: None,
            inputs: Inputs::default(),
            wait: None,
            trials: Vec::new(),
            graphs: Graphs::default(),
            lends: Lends::Nothing,
            limit: None,
            eager: true,
            pads: true,
            loading: Loading::default(),
            priority: Arc::new(|program| volume(program).saturating_neg()),
            held: Arc::default(),
        })
    }

    /// Sets the number of slots of one program on one device: so many calls run at once, and others wait. The same
    /// number can be held by [`Model::fixed`]. A program that runs as a CUDA graph answers one call at a time. The
    /// default is 4.
    pub fn instances(mut self, instances: usize) -> Self {
        self.instances = instances.max(1);
        self
    }

    /// Sets the maximum number of open sessions of a model on one device: each has separate states, of
    /// [`Model::session_bytes`]. The default is 16.
    pub fn sessions(mut self, sessions: usize) -> Self {
        self.sessions = sessions.max(1);
        self
    }

    /// Limits the states of all open sessions of a model on one device to so many bytes. The number of sessions is then
    /// the lower one of [`Self::sessions`] and of those that fit. A session counts with the tensors of every bucket that
    /// it can grow into, because smaller ones are kept. A load fails with [`RuntimeError::SessionLimit`] if not even one
    /// session fits. There is no limit by default.
    pub fn session_limit(mut self, bytes: u64) -> Self {
        self.session_limit = Some(bytes);
        self
    }

    /// Sets whether inputs may be copied to fit.
    pub fn inputs(mut self, inputs: Inputs) -> Self {
        self.inputs = inputs;
        self
    }

    /// Sets the longest wait of a call for a slot, while others have all of them: then it fails with
    /// [`RuntimeError::Busy`]. Without end, unless set.
    ///
    /// A call that hangs inside an artifact keeps its slot for ever. With a limit the calls that wait for it fail, and
    /// other programs answer.
    pub fn wait_limit(mut self, limit: Duration) -> Self {
        self.wait = Some(limit);
        self
    }

    /// Sets that a separate process first loads, once, every artifact and shim that was never loaded on this kind of
    /// host. An artifact that crashes or hangs in it is set aside; such a shim is an error. There is no trial by
    /// default. The command line uses it.
    ///
    /// ```no_run
    /// # use precast_runtime::{Device, Runtime, Store, Trial};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = Store::open("artifacts")?;
    /// let trial = Trial::with("/usr/local/bin/precast").remember("/var/cache/app/loads");
    /// let model = Runtime::new(&store, Device::Cpu)?.trial(trial).load("minilm")?;
    /// # Ok(()) }
    /// ```
    pub fn trial(mut self, trial: Trial) -> Self {
        let trials = |host| Arc::new(Trials::new(trial.clone(), host));
        self.trials = self.hosts.iter().map(trials).collect();
        self
    }

    /// Sets which programs run as CUDA graphs.
    pub fn graphs(mut self, graphs: Graphs) -> Self {
        self.graphs = graphs;
        self
    }

    /// Lets CUDA graphs give their outputs without a copy, in the memory that they write: for programs whose outputs the
    /// caller drops before the next call, as a training step does. Those that the caller still holds keep their values,
    /// and cost that call three copies. With `pairs` each graph has its own memory, and lends always. For the Python
    /// package.
    #[doc(hidden)]
    pub fn lending(mut self, pairs: bool) -> Self {
        self.lends = match pairs {
            true => Lends::Pairs,
            false => Lends::Outputs,
        };
        self
    }

    /// Sets whether the exported graph of a compiled program may answer instead: if its artifact does not load, or was
    /// slower at its build. The default is true.
    pub fn eager_fallback(mut self, allowed: bool) -> Self {
        self.eager = allowed;
        self
    }

    /// Sets whether a bucket answers smaller requests, where its build allows it. The default is true.
    pub fn padding(mut self, allowed: bool) -> Self {
        self.pads = allowed;
        self
    }

    /// Sets when programs are loaded. All of them before [`Self::load`] returns, unless set.
    ///
    /// A program that runs as a CUDA graph is loaded and captured before in any case.
    pub fn loading(mut self, loading: Loading) -> Self {
        self.loading = loading;
        self
    }

    /// Sets the order of loading: the highest `priority` first. The smallest programs, unless set.
    pub fn priority(
        mut self,
        priority: impl Fn(&record::Program) -> i64 + Send + Sync + 'static,
    ) -> Self {
        self.priority = Arc::new(priority);
        self
    }

    /// Limits uploads of weights to so many bytes a second, for loads next to a model that serves.
    pub fn upload_limit(mut self, bytes_per_second: u64) -> Self {
        self.limit = Some(bytes_per_second.max(1));
        self
    }

    /// Loads the newest release of a model that was built for this kind of host and may run under this torch, or a
    /// named one as `model@release`. If there is none for this host, the error is that of the newest release.
    pub fn load(&self, model: &str) -> Result<Model, RuntimeError> {
        let started = Instant::now();
        let (name, release, hold) = self.release(model)?;
        let seq = release.seq;
        let programs = self.programs(&release)?;
        let hosts = self.fit(&programs, &release.shims)?;
        let weights = self.weights_for(release.weights, &programs)?;
        let aliases = Arc::new(release.aliases);
        let model = self.load_with(started, name, &programs, hosts, &weights, &aliases)?;
        Ok(model.of_release(seq, hold))
    }

    /// Loads programs that no release has yet, as a build does before it publishes them, with the shims of the release
    /// to be.
    pub fn load_programs(
        &self,
        model: &str,
        programs: Vec<record::Program>,
        shims: &[Shim],
        weights: Option<Digest>,
        aliases: BTreeMap<String, String>,
    ) -> Result<Model, RuntimeError> {
        let started = Instant::now();
        let programs: Vec<Arc<record::Program>> = programs.into_iter().map(Arc::new).collect();
        let hosts = self.fit(&programs, shims)?;
        let weights = self.weights_for(weights, &programs)?;
        self.load_with(
            started,
            model,
            &programs,
            hosts,
            &weights,
            &Arc::new(aliases),
        )
    }

    /// Loads the newest release of a model, or a named one, with another weight set than its own: a fine-tune runs on
    /// the same artifacts.
    pub fn load_on(&self, model: &str, weights: &WeightSet) -> Result<Model, RuntimeError> {
        let started = Instant::now();
        let (name, release, hold) = self.release(model)?;
        let seq = release.seq;
        let programs = self.programs(&release)?;
        let hosts = self.fit(&programs, &release.shims)?;
        let aliases = Arc::new(release.aliases);
        let model = self.load_with(started, name, &programs, hosts, weights, &aliases)?;
        Ok(model.of_release(seq, hold))
    }

    /// Puts the weights of a model's newest release, or of a named one, on every device, for [`Model::swap`].
    pub fn weights_of(&self, model: &str) -> Result<WeightSet, RuntimeError> {
        let (_, release, _hold) = self.release(model)?;
        self.open_shims(&release.shims)?;
        // Programs only set the order of tensors on a device: without it, concatenated matrices are copied.
        let programs = self.programs(&release).unwrap_or_default();
        self.weights_for(release.weights, &programs)
    }

    /// Puts a weight set on every device. A set of a loaded model is shared.
    ///
    /// Matrices that artifacts concatenate are copied when a model is loaded with it. [`Self::weights_of`] knows them
    /// and makes them contiguous, so that they need no copy.
    pub fn weights(&self, digest: Option<Digest>) -> Result<WeightSet, RuntimeError> {
        self.weights_for(digest, &[])
    }

    /// Copies a weight set to every device, in the order of `programs`.
    fn weights_for(
        &self,
        digest: Option<Digest>,
        programs: &[Arc<record::Program>],
    ) -> Result<WeightSet, RuntimeError> {
        let _work = self.work()?;
        let on = self
            .devices
            .iter()
            .map(|&device| Ok((device, self.weights_on(digest, device, programs)?)));
        Ok(WeightSet::new(
            digest,
            on.collect::<Result<_, RuntimeError>>()?,
        ))
    }

    /// Returns the devices of its models.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Releases the unused device memory of torch's allocator: for another process, or for memory outside the
    /// allocator, such as the code of artifacts, CUDA graphs and libraries.
    ///
    /// Like `torch.cuda.empty_cache()`: it concerns all CUDA devices of the process, tensors keep their memory, and the
    /// next calls are slower, because they allocate from the driver again. Call it before loading a large model next to
    /// a model that had a peak. The runtime also does it after an out-of-memory error
    /// ([`RuntimeError::is_out_of_memory`]). Does nothing on the CPU.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
    /// # use precast_runtime::{Device, Runtime, Store};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// let runtime = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?;
    /// drop(runtime.load("tiny")?);
    /// runtime.release_cached_memory()?;
    /// # Ok(()) }
    /// ```
    pub fn release_cached_memory(&self) -> Result<(), RuntimeError> {
        let cuda_device = |device: &&Device| matches!(device, Device::Cuda(_));
        let Some(&device) = self.devices.iter().find(cuda_device) else {
            return Ok(());
        };
        cuda()
            .and_then(|cuda| cuda.release_cached())
            .map_err(|reason| RuntimeError::NoDevice { device, reason })
    }

    fn load_with(
        &self,
        started: Instant,
        model: &str,
        programs: &[Arc<record::Program>],
        hosts: Vec<Arc<Target>>,
        weights: &WeightSet,
        aliases: &Arc<BTreeMap<String, String>>,
    ) -> Result<Model, RuntimeError> {
        let sessions = self.sessions_of(model, programs)?;
        let _work = self.work()?;
        let mut replicas = Vec::with_capacity(self.devices.len());
        for (i, (&device, host)) in self.devices.iter().zip(hosts).enumerate() {
            let loader = Arc::new(Loader {
                source: self.source.clone(),
                device,
                instances: self.instances,
                host,
                trials: self.trials.get(i).cloned(),
                graphs: self.graphs,
                lends: self.lends,
                limit: self.limit,
                eager: self.eager,
                aliases: aliases.clone(),
                held: self.held.clone(),
                weights: RwLock::new(weights.on(device)?),
                quarantined: Mutex::default(),
                shared: OnceLock::new(),
            });
            let mut modules: BTreeMap<String, Vec<Program>> = BTreeMap::new();
            for program in programs {
                let mut program = program.clone();
                if !self.pads {
                    let why = "the model is loaded without padding".to_owned();
                    let padded = Vec::new();
                    Arc::make_mut(&mut program).padding = Padding::Refused { why, padded };
                }
                modules
                    .entry(program.module.clone())
                    .or_default()
                    .push(Program::new(program));
            }
            let modules = modules
                .into_iter()
                .map(|(name, programs)| Ok((name, Variant::group(programs, &loader)?)));
            let modules = modules.collect::<Result<HashMap<_, _>, RuntimeError>>()?;
            let replica = Replica::new(device, modules, loader, sessions);
            let loaded = self.load_before(&replica);
            if let Some(damage) = weights.on(device)?.damage() {
                return Err(in_store(format!("the weights of model `{model}`"))(damage));
            }
            loaded?;
            replicas.push(replica);
        }
        let model = Model::new(
            model.to_owned(),
            replicas,
            self.inputs,
            self.wait,
            weights.clone(),
            started,
        );
        Ok(if self.loading == Loading::Background {
            model.load_rest(&*self.priority)
        } else {
            model
        })
    }

    /// Returns the maximum number of open sessions of a model on one device.
    fn sessions_of(
        &self,
        model: &str,
        programs: &[Arc<record::Program>],
    ) -> Result<usize, RuntimeError> {
        let (Some(limit), bytes @ 1..) = (self.session_limit, most_bytes(programs)) else {
            return Ok(self.sessions);
        };
        match usize::try_from(limit / bytes).unwrap_or(usize::MAX) {
            0 => Err(RuntimeError::SessionLimit {
                model: model.to_owned(),
                bytes,
                limit,
            }),
            fitting => Ok(self.sessions.min(fitting)),
        }
    }

    /// Loads the programs that must be there before the model is handed out.
    fn load_before(&self, replica: &Replica) -> Result<(), RuntimeError> {
        let loader = &replica.loader;
        // Graphs first, in order of decreasing size: the first one makes their pool as large as it must be. On demand
        // the pool grows with each larger graph.
        let wanted = |program: &&Program| {
            self.loading != Loading::OnDemand && loader.graph_wanted(&program.record)
        };
        let mut graphs: Vec<&Program> = replica.programs().filter(wanted).collect();
        graphs.sort_by_key(|program| std::cmp::Reverse(volume(&program.record)));
        graphs.iter().try_for_each(|program| program.load(loader))?;
        for variants in replica.modules.values() {
            let mut programs: Vec<&Program> = variants.iter().flat_map(|v| &v.programs).collect();
            programs.sort_by_key(|program| std::cmp::Reverse((self.priority)(&program.record)));
            match self.loading {
                Loading::Before => programs
                    .iter()
                    .try_for_each(|program| program.load(loader))?,
                Loading::Background => {
                    for program in &programs {
                        program.load(loader)?;
                        if !program.lost() {
                            break;
                        }
                    }
                }
                Loading::OnDemand => {}
            }
            // A module without a program would answer nothing: that is an error now, not at the first call.
            if let Some(first) = programs.first()
                && programs.iter().all(|program| program.lost())
                && let Some(error) = loader.take_error(&first.record.module)
            {
                return Err(error);
            }
            variants.iter().for_each(Variant::reroute);
        }
        Ok(())
    }

    /// Counts work that the end of the process waits for.
    fn work(&self) -> Result<Entered<'static>, RuntimeError> {
        let device = self.devices[0];
        ending::work().ok_or_else(|| RuntimeError::ending(device))
    }

    fn weights_on(
        &self,
        digest: Option<Digest>,
        device: Device,
        programs: &[Arc<record::Program>],
    ) -> Result<Arc<Weights>, RuntimeError> {
        self.held
            .on(&self.source, digest, device, self.limit, programs)
    }
}
