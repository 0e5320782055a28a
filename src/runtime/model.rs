//! A loaded model: what answers calls.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use smallvec::SmallVec;
use tch::Tensor;

use super::{
    RuntimeError,
    dispatch::{Bucket, Route, Table},
    error::NoFit,
    ffi::{Handle, Meta, share},
    lane::Handles,
    program::{Ready, Sizes as Fill},
    validate::{Fit, Request, Signature},
    weights::tch_device,
};
use crate::{
    Device,
    record::{Padding, Program, Sizes, bucket_name},
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
    replicas: Vec<Replica>,
    policy: Inputs,
}

pub(super) struct Replica {
    pub device: Device,
    pub modules: HashMap<String, Vec<Variant>>,
    pub running: AtomicUsize,
}

/// The programs of one module that take the same inputs.
pub(super) struct Variant {
    module: Arc<str>,
    signature: Signature,
    table: Table,
    programs: Vec<Ready>,
}

/// Which rung of the ladder answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    /// The bucket of exactly the request's sizes.
    Exact,
    /// A larger bucket, padded.
    Padded,
}

impl Rung {
    /// Returns the rung's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Padded => "padded",
        }
    }
}

/// What answered a call.
#[derive(Clone, Debug)]
pub struct Served {
    program: Arc<Program>,
    rung: Rung,
    device: Device,
    request: Request,
}

impl Served {
    /// Returns the program that ran.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Returns the sizes it was compiled for.
    pub fn bucket(&self) -> &Sizes {
        &self.program.sizes
    }

    pub fn rung(&self) -> Rung {
        self.rung
    }

    /// Returns the device it ran on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the sizes that were asked for.
    pub fn request(&self) -> Sizes {
        self.program
            .sizes
            .keys()
            .cloned()
            .zip(self.request.iter().copied())
            .collect()
    }
}

/// The outputs of one call, in the module's order. They belong to the caller.
#[derive(Debug)]
pub struct Outputs {
    tensors: SmallVec<[Tensor; 4]>,
    served: Served,
}

impl Outputs {
    /// Returns what answered the call.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Returns name and tensor of each output.
    pub fn named(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.served
            .program
            .outputs
            .iter()
            .map(|output| output.name.as_str())
            .zip(&self.tensors)
    }

    /// Returns the tensors.
    pub fn into_vec(self) -> Vec<Tensor> {
        self.tensors.into_vec()
    }
}

impl Deref for Outputs {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        &self.tensors
    }
}

impl IntoIterator for Outputs {
    type Item = Tensor;
    type IntoIter = smallvec::IntoIter<[Tensor; 4]>;

    fn into_iter(self) -> Self::IntoIter {
        self.tensors.into_iter()
    }
}

impl Model {
    pub(super) fn new(name: String, replicas: Vec<Replica>, policy: Inputs) -> Self {
        Self {
            name,
            replicas,
            policy,
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
            .flat_map(|variant| variant.programs.iter().map(|ready| &*ready.plan.program))
            .collect()
    }

    /// Runs a module on inputs in the module's order.
    ///
    /// Every input is checked before anything foreign sees it; see [`RuntimeError`] for what can be wrong. The outputs
    /// are new tensors on the model's device, cut to the request's sizes where a larger bucket was padded.
    pub fn run(&self, module: &str, inputs: &[Tensor]) -> Result<Outputs, RuntimeError> {
        let inputs: SmallVec<[&Tensor; 8]> = inputs.iter().collect();
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
        self.answer(replica, variant, &inputs)
    }

    /// Runs a module on inputs by name, in any order. Of a module with several variants, the names pick one.
    pub fn run_named(
        &self,
        module: &str,
        inputs: &[(&str, &Tensor)],
    ) -> Result<Outputs, RuntimeError> {
        let tensors: SmallVec<[&Tensor; 8]> = inputs.iter().map(|(_, tensor)| *tensor).collect();
        let replica = self.replica(&tensors)?;
        let variants = self.variants(replica, module)?;
        let order = |variant: &Variant| -> Option<SmallVec<[&Tensor; 8]>> {
            let wanted = &variant.signature.inputs;
            if wanted.len() != inputs.len() {
                return None;
            }
            let find = |name: &str| {
                inputs
                    .iter()
                    .find(|(given, _)| *given == name)
                    .map(|(_, tensor)| *tensor)
            };
            wanted.iter().map(|spec| find(&spec.name)).collect()
        };
        match variants
            .iter()
            .find_map(|variant| order(variant).map(|ordered| (variant, ordered)))
        {
            Some((variant, ordered)) => self.answer(replica, variant, &ordered),
            None => Err(RuntimeError::InputNames {
                module: variants[0].module.clone(),
                given: inputs.iter().map(|(name, _)| format!("`{name}`")).collect(),
                variants: variants.iter().map(Variant::names).collect(),
            }),
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

    fn answer(
        &self,
        replica: &Replica,
        variant: &Variant,
        inputs: &[&Tensor],
    ) -> Result<Outputs, RuntimeError> {
        let device = replica.device;
        let signature = &variant.signature;
        let mut request: Request = SmallVec::from_elem(0, signature.dims.len());
        let mut handles = Handles::new();
        for (i, tensor) in inputs.iter().enumerate() {
            let meta = Meta::of(tensor);
            let bad = |problem| RuntimeError::BadInput {
                module: variant.module.clone(),
                input: signature.inputs[i].name.clone(),
                problem,
            };
            handles.push(
                match signature
                    .check(i, &meta, device, &mut request)
                    .map_err(bad)?
                {
                    Fit::AsIs => share(tensor),
                    Fit::NeedsCopy if self.policy == Inputs::AsGiven => {
                        return Err(bad(signature.inputs[i].misfit(&meta, device)));
                    }
                    Fit::NeedsCopy => variant.copied(i, tensor, device)?,
                },
            );
        }
        let route = variant
            .table
            .route(&request)
            .ok_or_else(|| variant.no_bucket(&request))?;
        let ready = &variant.programs[route.bucket()];
        replica.running.fetch_add(1, Ordering::Relaxed);
        let result = match route {
            Route::Exact(_) => ready.run(handles, Fill::Exact),
            Route::Padded(_) => ready.run(handles, Fill::Padded(&request)),
        };
        replica.running.fetch_sub(1, Ordering::Relaxed);
        let rung = match route {
            Route::Exact(_) => Rung::Exact,
            Route::Padded(_) => Rung::Padded,
        };
        let served = Served {
            program: ready.plan.program.clone(),
            rung,
            device,
            request,
        };
        Ok(Outputs {
            tensors: result?,
            served,
        })
    }
}

impl Variant {
    /// Groups one module's programs by the inputs they take and builds a table for each group.
    pub fn group(programs: Vec<Ready>) -> Result<Vec<Self>, RuntimeError> {
        let mut variants: Vec<Self> = Vec::new();
        for ready in programs {
            let dims: Vec<String> = ready.plan.program.sizes.keys().cloned().collect();
            let malformed = |reason| RuntimeError::Malformed {
                program: ready.plan.program.id,
                reason,
            };
            let signature = Signature::new(&ready.plan.program.inputs, &dims).map_err(malformed)?;
            match variants
                .iter_mut()
                .find(|variant| variant.signature.agrees(&signature))
            {
                Some(variant) => variant.programs.push(ready),
                None => variants.push(Self {
                    module: ready.plan.module.clone(),
                    signature,
                    table: Table::new(Vec::new()),
                    programs: vec![ready],
                }),
            }
        }
        for variant in &mut variants {
            variant.table = Table::new(
                variant
                    .programs
                    .iter()
                    .map(|ready| bucket(&ready.plan.program))
                    .collect(),
            );
        }
        Ok(variants)
    }

    fn names(&self) -> Vec<String> {
        self.signature
            .inputs
            .iter()
            .map(|spec| spec.name.to_string())
            .collect()
    }

    fn sizes(&self, request: &[i64]) -> Sizes {
        self.signature
            .dims
            .iter()
            .cloned()
            .zip(request.iter().copied())
            .collect()
    }

    fn copied(
        &self,
        input: usize,
        tensor: &Tensor,
        device: Device,
    ) -> Result<Handle, RuntimeError> {
        let text = |error: tch::TchError| RuntimeError::Tensor {
            module: self.module.clone(),
            message: error.to_string(),
        };
        let strides = self.signature.inputs[input].strides(&tensor.size());
        let mut copy =
            Tensor::f_empty_strided(tensor.size(), strides, (tensor.kind(), tch_device(device)))
                .map_err(text)?;
        copy.f_copy_(tensor).map_err(text)?;
        Ok(copy.into())
    }

    fn no_bucket(&self, request: &[i64]) -> RuntimeError {
        let known = self
            .programs
            .iter()
            .map(|ready| ready.plan.program.sizes.clone())
            .collect();
        let nearest = self.table.nearest(request);
        RuntimeError::NoBucket {
            module: self.module.clone(),
            request: self.sizes(request),
            known,
            nearest: nearest.map(|(bucket, _)| self.programs[bucket].plan.program.sizes.clone()),
            why: match nearest {
                Some((_, true)) => NoFit::PaddingRefused,
                _ => NoFit::TooLarge,
            },
        }
    }
}

fn bucket(program: &Program) -> Bucket {
    let volume = program
        .inputs
        .iter()
        .map(|input| {
            input
                .layout
                .shape
                .iter()
                .map(|&size| size as f64)
                .product::<f64>()
        })
        .sum();
    Bucket {
        sizes: program.sizes.values().copied().collect(),
        paddable: program.padding == Padding::Allowed,
        cost: volume,
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
