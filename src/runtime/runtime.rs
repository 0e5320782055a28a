//! What loads models: the devices, the source, and the weights they share.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak, atomic::AtomicUsize},
};

use super::{
    RuntimeError,
    ffi::cuda,
    graphs::Shared,
    host::host,
    model::{Inputs, Model, Quarantined, Replica},
    program::{Ready, in_store},
    source::Source,
    variant::Variant,
    weights::{WeightSet, Weights},
};
use crate::{
    Device, Digest, Store, Target,
    record::{Program, Release, bucket_name},
};

/// The devices a runtime works on, and where it takes artifacts and weights from.
pub struct Runtime {
    source: Arc<dyn Source>,
    devices: Vec<Device>,
    /// What this host is, for each device.
    hosts: Vec<Target>,
    instances: usize,
    inputs: Inputs,
    graphs: Graphs,
    limit: Option<u64>,
    eager: bool,
    held: Mutex<HashMap<(Digest, Device), Weak<Weights>>>,
}

impl Runtime {
    /// Makes a runtime over a store on one or several devices.
    ///
    /// Fails when a device is not there: CUDA ordinals are those of this process (`CUDA_VISIBLE_DEVICES`).
    pub fn new(store: &Store, devices: impl Into<Devices>) -> Result<Self, RuntimeError> {
        Self::over(Arc::new(store.clone()), devices)
    }

    /// Makes a runtime over another source than a store, as a build does for what it has not published yet.
    pub fn over(
        source: Arc<dyn Source>,
        devices: impl Into<Devices>,
    ) -> Result<Self, RuntimeError> {
        let devices = devices.into().0;
        let twice = devices
            .iter()
            .enumerate()
            .any(|(i, device)| devices[..i].contains(device));
        if devices.is_empty() || twice {
            return Err(RuntimeError::Devices);
        }
        for &device in &devices {
            check(device)?;
        }
        let hosts = devices
            .iter()
            .map(|&device| host(device))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            source,
            devices,
            hosts,
            instances: 4,
            inputs: Inputs::default(),
            graphs: Graphs::default(),
            limit: None,
            eager: true,
            held: Mutex::default(),
        })
    }

    /// Sets how many callers one program may have at once on one device; others wait. 4 unless set.
    pub fn instances(mut self, instances: usize) -> Self {
        self.instances = instances.max(1);
        self
    }

    /// Sets whether inputs may be copied to fit.
    pub fn inputs(mut self, inputs: Inputs) -> Self {
        self.inputs = inputs;
        self
    }

    /// Sets which programs run as CUDA graphs.
    pub fn graphs(mut self, graphs: Graphs) -> Self {
        self.graphs = graphs;
        self
    }

    /// Sets whether a program whose artifact does not load is answered by its exported graph. It is, unless set.
    pub fn eager_fallback(mut self, allowed: bool) -> Self {
        self.eager = allowed;
        self
    }

    /// Throttles uploads of weights to so many bytes a second, for loading beside a model that serves.
    pub fn upload_limit(mut self, bytes_per_second: u64) -> Self {
        self.limit = Some(bytes_per_second.max(1));
        self
    }

    /// Loads the newest release of a model, or a named one as `model@release`.
    pub fn load(&self, model: &str) -> Result<Model, RuntimeError> {
        let (name, release, programs) = self.release(model)?;
        let weights = self.weights(release.weights)?;
        self.load_with(name, &programs, &weights, &Arc::new(release.aliases))
    }

    /// Loads programs that no release has yet, as a build does before it publishes them.
    pub fn load_programs(
        &self,
        model: &str,
        programs: Vec<Program>,
        weights: Option<Digest>,
        aliases: BTreeMap<String, String>,
    ) -> Result<Model, RuntimeError> {
        let weights = self.weights(weights)?;
        let programs: Vec<Arc<Program>> = programs.into_iter().map(Arc::new).collect();
        self.load_with(model, &programs, &weights, &Arc::new(aliases))
    }

    /// Loads the newest release of a model, or a named one, with another weight set than its own: a fine-tune runs on
    /// the same artifacts.
    pub fn load_on(&self, model: &str, weights: &WeightSet) -> Result<Model, RuntimeError> {
        let (name, release, programs) = self.release(model)?;
        self.load_with(name, &programs, weights, &Arc::new(release.aliases))
    }

    /// Brings the weights of a model's newest release, or of a named one, to every device, for [`Model::swap`].
    pub fn weights_of(&self, model: &str) -> Result<WeightSet, RuntimeError> {
        let (name, release) = split(model);
        let release = self
            .source
            .release(name, release)
            .map_err(in_store(format!("model `{model}`")))?;
        self.weights(release.weights)
    }

    /// Brings a weight set to every device. One that a loaded model has already is shared.
    pub fn weights(&self, digest: Option<Digest>) -> Result<WeightSet, RuntimeError> {
        let on = self
            .devices
            .iter()
            .map(|&device| Ok((device, self.weights_on(digest, device)?)));
        Ok(WeightSet::new(
            digest,
            on.collect::<Result<_, RuntimeError>>()?,
        ))
    }

    fn release<'a>(
        &self,
        model: &'a str,
    ) -> Result<(&'a str, Release, Vec<Arc<Program>>), RuntimeError> {
        let (name, release) = split(model);
        let release = self
            .source
            .release(name, release)
            .map_err(in_store(format!("model `{model}`")))?;
        let mut programs = Vec::with_capacity(release.programs.len());
        for id in &release.programs {
            let program = self
                .source
                .program(id)
                .map_err(in_store(format!("program `{}`", id.short())))?;
            programs.push(Arc::new(program));
        }
        Ok((name, release, programs))
    }

    fn load_with(
        &self,
        model: &str,
        programs: &[Arc<Program>],
        weights: &WeightSet,
        aliases: &Arc<BTreeMap<String, String>>,
    ) -> Result<Model, RuntimeError> {
        let mut quarantined = Vec::new();
        let mut replicas = Vec::with_capacity(self.devices.len());
        for (i, &device) in self.devices.iter().enumerate() {
            // Before anything is loaded: a wrong host must not get as far as `dlopen`.
            for program in programs {
                self.check_target(program, i)?;
            }
            let weights = weights.on(device)?;
            let mut loaded: Vec<Ready> = Vec::with_capacity(programs.len());
            for program in programs {
                let _span =
                    tracing::info_span!("load", program = %program.id.short(), %device).entered();
                let extras = program
                    .constants
                    .map(|key| self.extras(&key, device))
                    .transpose()?;
                let ready = match program.steps.is_empty() {
                    // Never compiled: its exported graph is all there is.
                    true => self.eager(program, device, &weights, aliases, &extras),
                    false => Ready::load(
                        &self.source,
                        program.clone(),
                        device,
                        weights.clone(),
                        aliases.clone(),
                        extras.clone(),
                        self.instances,
                    )
                    .map(Some),
                };
                match ready {
                    Ok(ready) => loaded.extend(ready),
                    Err(error) if error.is_artifacts() => {
                        tracing::warn!(program = %program.id.short(), %error, "a program is set aside");
                        loaded.extend(self.eager(program, device, &weights, aliases, &extras)?);
                        quarantined.push(Quarantined {
                            program: program.id,
                            module: program.module.clone(),
                            bucket: program.sizes.clone(),
                            device,
                            error,
                        });
                    }
                    Err(error) => return Err(error),
                }
            }
            self.capture(&mut loaded, device, &weights);
            let mut modules: BTreeMap<String, Vec<Ready>> = BTreeMap::new();
            for ready in loaded {
                modules
                    .entry(ready.plan.program.module.clone())
                    .or_default()
                    .push(ready);
            }
            // A module of which nothing is left would answer nothing: that is an error now, not at the first call.
            if let Some(lost) = quarantined
                .iter()
                .position(|lost| !modules.contains_key(&lost.module))
            {
                return Err(quarantined.swap_remove(lost).error);
            }
            let modules = modules
                .into_iter()
                .map(|(name, programs)| Ok((name, Variant::group(programs)?)));
            let modules = modules.collect::<Result<HashMap<_, _>, RuntimeError>>()?;
            replicas.push(Replica {
                device,
                modules,
                running: AtomicUsize::new(0),
                broken: OnceLock::new(),
            });
        }
        Ok(Model::new(
            model.to_owned(),
            replicas,
            self.inputs,
            quarantined,
            weights.clone(),
        ))
    }

    /// Returns the tensors that a program's code makes itself.
    fn extras(&self, key: &Digest, device: Device) -> Result<Arc<Weights>, RuntimeError> {
        let record = self
            .source
            .artifact(key)
            .map_err(in_store(format!("artifact `{}`", key.short())))?;
        self.weights_on(Some(record.object), device)
    }

    /// Returns a program as its exported graph, where it has one. For a program that was compiled this is a fallback,
    /// which must be allowed.
    fn eager(
        &self,
        program: &Arc<Program>,
        device: Device,
        weights: &Arc<Weights>,
        aliases: &Arc<BTreeMap<String, String>>,
        extras: &Option<Arc<Weights>>,
    ) -> Result<Option<Ready>, RuntimeError> {
        let allowed = self.eager || program.steps.is_empty();
        // The archive names the device it was captured on, which is the first.
        let (Some(archive), true, Device::Cpu | Device::Cuda(0)) =
            (&program.eager, allowed, device)
        else {
            return Ok(None);
        };
        let (weights, aliases, extras) = (weights.clone(), aliases.clone(), extras.clone());
        Ready::eager(
            &self.source,
            program.clone(),
            archive,
            device,
            weights,
            aliases,
            extras,
        )
        .map(Some)
    }

    /// Captures what is to run as a graph, the largest first: it makes the pool as large as it must be.
    fn capture(&self, loaded: &mut [Ready], device: Device, weights: &Arc<Weights>) {
        let Device::Cuda(ordinal) = device else {
            return;
        };
        let mut wanted: Vec<&mut Ready> = loaded
            .iter_mut()
            .filter(|ready| self.graphs.wanted(&ready.plan.program))
            .collect();
        if wanted.is_empty() {
            return;
        }
        wanted.sort_by_key(|ready| std::cmp::Reverse(volume(&ready.plan.program)));
        match Shared::new(ordinal).map(Arc::new) {
            Ok(shared) => wanted
                .into_iter()
                .for_each(|ready| ready.capture(weights.clone(), &shared)),
            Err(reason) => wanted
                .into_iter()
                .for_each(|ready| ready.refused = Some(reason.clone())),
        }
    }

    fn check_target(&self, program: &Program, i: usize) -> Result<(), RuntimeError> {
        let device = self.devices[i];
        let mismatches = program.target.mismatches(&self.hosts[i]);
        match mismatches.is_empty() {
            true => Ok(()),
            false => Err(RuntimeError::WrongTarget {
                program: program.id,
                module: program.module.clone(),
                bucket: bucket_name(&program.sizes),
                device,
                mismatches,
            }),
        }
    }

    fn weights_on(
        &self,
        digest: Option<Digest>,
        device: Device,
    ) -> Result<Arc<Weights>, RuntimeError> {
        let Some(digest) = digest else {
            return Ok(Arc::new(Weights::none(device)));
        };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weights) = held.get(&(digest, device)).and_then(Weak::upgrade) {
            return Ok(weights);
        }
        let bytes = self
            .source
            .map(&digest)
            .map_err(in_store(format!("weight set `{}`", digest.short())))?;
        let weights = Arc::new(Weights::new(digest, &bytes, device, self.limit)?);
        held.insert((digest, device), Arc::downgrade(&weights));
        Ok(weights)
    }
}

/// Which programs run as CUDA graphs, on a device that has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Graphs {
    /// Those built with `mode = "reduce-overhead"` or `"max-autotune"`.
    #[default]
    AsBuilt,
    Always,
    Never,
}

impl Graphs {
    fn wanted(self, program: &Program) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::AsBuilt => {
                let mode = program
                    .request
                    .get("mode")
                    .and_then(serde_json::Value::as_str);
                matches!(mode, Some("reduce-overhead" | "max-autotune"))
            }
        }
    }
}

/// Returns how many elements a program's inputs have.
pub(super) fn volume(program: &Program) -> i64 {
    let elements = |shape: &[i64]| shape.iter().fold(1i64, |n, &size| n.saturating_mul(size));
    program
        .inputs
        .iter()
        .map(|input| elements(&input.layout.shape))
        .fold(0, i64::saturating_add)
}

/// Splits `model@release`.
fn split(model: &str) -> (&str, Option<&str>) {
    match model.split_once('@') {
        Some((name, release)) => (name, Some(release)),
        None => (model, None),
    }
}

/// One or more devices.
pub struct Devices(Vec<Device>);

impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        Self(vec![device])
    }
}

impl<const N: usize> From<[Device; N]> for Devices {
    fn from(devices: [Device; N]) -> Self {
        Self(devices.to_vec())
    }
}

impl From<Vec<Device>> for Devices {
    fn from(devices: Vec<Device>) -> Self {
        Self(devices)
    }
}

fn check(device: Device) -> Result<(), RuntimeError> {
    let Device::Cuda(ordinal) = device else {
        return Ok(());
    };
    let no = |reason| RuntimeError::NoDevice { device, reason };
    let devices = cuda().map_err(no)?.devices();
    match ordinal < devices {
        true => Ok(()),
        false => Err(no(format!("this process sees {devices} CUDA devices"))),
    }
}
