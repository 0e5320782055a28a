//! A weight set as callers have it: on every device of a runtime, from the store or of the caller's own tensors.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use precast_store::{Device, Digest};

use super::{RuntimeError, Tensor, weights::Weights};

/// One weight set on every device of a runtime. Cloning shares it.
#[derive(Clone)]
pub struct WeightSet {
    digest: Option<Digest>,
    on: Vec<(Device, Arc<Weights>)>,
}

impl WeightSet {
    pub(super) fn new(digest: Option<Digest>, on: Vec<(Device, Arc<Weights>)>) -> Self {
        Self { digest, on }
    }

    /// Makes a weight set of the caller's own tensors on one device, for [`Runtime::load_on`](crate::Runtime::load_on)
    /// and [`Model::swap`](crate::Model::swap).
    ///
    /// Artifacts read the tensors where they are: there is no copy and no digest. A call sees every change in place
    /// before it, such as a step of an optimizer, `copy_`, or a `load_state_dict` into the same parameters. On CUDA the
    /// change must be earlier on the call's stream. A change during a call is a data race, which the caller must
    /// prevent. The set keeps the memory that a tensor has now: a tensor that gets other memory, as by `.data = …` or
    /// `.to(…)`, needs another set.
    ///
    /// Names are those of the model's parameters and buffers; of tied ones, one is enough. Tensors without a constant
    /// of that name are not used. A load fails with [`RuntimeError::Unbound`] where a tensor is missing, or has another
    /// dtype, shape or strides than its constant. It fails with [`RuntimeError::ComputedFromWeights`] where an artifact
    /// needs prepacked constants: models are built for such sets with `options = { freezing = false }` in `[compile]`.
    ///
    /// Fails with [`RuntimeError::NotAWeight`] for a tensor on another device, that is not dense, has a dtype that no
    /// module takes, or starts at an address that kernels can't read from (on CUDA a multiple of 16 bytes).
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fake/example.rs"));
    /// # use precast_runtime::{Device, Runtime, Store, Tensor, Value, WeightSet};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = example();
    /// # let runtime = Runtime::new(&Store::open(folder.path())?, Device::Cpu)?;
    /// let mut scale = Tensor::from_slice(&[3.0_f32], &[1])?;
    /// let set = WeightSet::of([("scale".to_owned(), scale.share())].into(), Device::Cpu)?;
    /// let model = runtime.load_on("tiny", &set)?;
    /// # let x = Value::new(&[1.0_f32; 8], &[2, 4])?;
    /// let three = model.run("double", &[&x])?.array::<f32>(0)?.data()[0];
    /// scale.copy_from(&Tensor::from_slice(&[4.0_f32], &[1])?)?;
    /// let four = model.run("double", &[&x])?.array::<f32>(0)?.data()[0];
    /// assert_eq!((three, four), (3.0, 4.0));
    /// # Ok(()) }
    /// ```
    pub fn of(tensors: BTreeMap<String, Tensor>, device: Device) -> Result<Self, RuntimeError> {
        let weights = Arc::new(Weights::of(tensors, device)?);
        Ok(Self::new(None, vec![(device, weights)]))
    }

    /// Returns the digest of the safetensors object; none for a model without parameters and buffers, and for a set of
    /// the caller's own tensors.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Returns the bytes of the weights on each device. On the CPU they are the mapped object's pages. The caller's own
    /// tensors count with all of their storages.
    pub fn bytes(&self) -> usize {
        self.on.first().map_or(0, |(_, weights)| weights.bytes())
    }

    /// Returns the bytes of prepacked constants on each device, in addition to the weights: a matrix in the order of
    /// its kernel, or a filter multiplied by the following batch norm. Each is computed once.
    pub fn prepared_bytes(&self) -> usize {
        let first = self.on.first();
        first.map_or(0, |(_, weights)| weights.prepared_bytes())
    }

    /// Returns the total time of the copies from the file to the devices; none without a copy, as on the CPU.
    pub fn upload_time(&self) -> Option<Duration> {
        let took = self
            .on
            .iter()
            .filter_map(|(_, weights)| weights.upload_time());
        took.reduce(|a, b| a + b)
    }

    /// Gives back the memory of mapped pages, those of prepacked constants too. A later call reads them again: from the
    /// system's cache of files, in some milliseconds for each GiB, or from the disk.
    pub fn release(&self) {
        self.on.iter().for_each(|(_, weights)| weights.release());
    }

    /// Returns a copy of one tensor in the host's memory, read from the first device; none without an undamaged tensor
    /// of that name.
    pub fn read(&self, name: &str) -> Option<Tensor> {
        let (_, weights) = self.on.first()?;
        let held = Tensor(weights.checked(name)?.handle().share());
        held.converted(held.dtype()?, Device::Cpu).ok()
    }

    pub(super) fn on(&self, device: Device) -> Result<Arc<Weights>, RuntimeError> {
        let found = self.on.iter().find(|(known, _)| *known == device);
        let missing = || RuntimeError::NoDevice {
            device,
            reason: "the weight set has no tensors on it".into(),
        };
        found
            .map(|(_, weights)| weights.clone())
            .ok_or_else(missing)
    }
}
