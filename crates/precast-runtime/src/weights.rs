//! A weight set on one device: mapped or uploaded once, bound everywhere by pointer.
//!
//! On the CPU every tensor is a view of the mapped safetensors object, and processes share its pages. Prepacked constants
//! are copies ([`super::prepacked`]), in files that processes share too. On CUDA all tensors are views of one
//! allocation, except those that only begin a training, which stay in the file ([`super::packing`]). A program holds an
//! `Arc` of each bound weight, so weights live as long as a call may read them.
//!
//! A set of the caller's own tensors ([`WeightSet::of`](super::WeightSet::of)) is bound where it is. The caller changes
//! its values between calls, so nothing is computed from them: neither a prepacked constant nor a copy with other strides.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use precast_store::{
    CheckedParts, Device, Digest, Mapped, StoreError,
    record::{Dtype, Layout, Prepared},
};
use safetensors::SafeTensors;

use super::{
    RuntimeError, Tensor, TorchError,
    error::in_store,
    ffi::{self, Handle, Parts, UploadError, Weight, can_upload, contiguous, cuda},
    layout::{bytes_of, same_strides},
    packing::Placement,
    source::{Source, SourceError},
    tensors::dtype_of,
    validate::aligned,
};

/// One weight set on one device.
pub struct Weights {
    /// The digest of the object; none for tensors of the caller, and without weights.
    digest: Option<Digest>,
    device: Device,
    tensors: HashMap<String, Entry>,
    /// Prepacked constants by recipe and tensors, and tensors with other strides.
    cache: Mutex<HashMap<String, Arc<Weight>>>,
    /// Bytes of the copies in `cache`.
    cached_bytes: AtomicUsize,
    /// Addresses of the memory that the tensors view, sorted, without overlaps.
    memory: Vec<Range<usize>>,
    /// Whether the tensors are the caller's own, with values that change.
    live: bool,
    /// Duration of the upload.
    took: Option<Duration>,
    /// The source that keeps prepacked constants, and the digest of the weights; none where they are not kept.
    keeper: Option<(Arc<dyn Source>, Digest)>,
    /// The checks of the mapped object, part by part; none where all of it was checked.
    parts: Option<CheckedParts>,
    /// A range of the object that turned out to be damaged.
    damaged: OnceLock<Range<usize>>,
}

struct Entry {
    dtype: Dtype,
    shape: Vec<i64>,
    stride: Vec<i64>,
    weight: Arc<Weight>,
}

impl Entry {
    /// Returns an entry of a tensor without gaps, in row-major order.
    fn dense(dtype: Dtype, shape: Vec<i64>, weight: Weight) -> Self {
        Self {
            dtype,
            stride: contiguous(&shape).to_vec(),
            shape,
            weight: Arc::new(weight),
        }
    }

    /// Returns an entry of a caller's tensor, and the addresses of its storage.
    fn live(tensor: &Tensor, device: Device) -> Result<(Self, Range<usize>), TorchError> {
        let meta = tensor.0.meta();
        let dtype = meta.dtype().filter(|_| meta.dense());
        let dtype = dtype.ok_or_else(|| match meta.dtype() {
            None => format!("it has {}", meta.dtype_name()),
            Some(_) => "it is not dense".to_owned(),
        })?;
        if meta.device() != Some(device) {
            let found = meta.device().map(|device| format!("`{device}`"));
            let found = found.unwrap_or_else(|| "another kind of device".to_owned());
            return Err(format!("it is on {found}, and the weight set on `{device}`").into());
        }
        let (shape, stride) = (meta.sizes().to_vec(), meta.strides().to_vec());
        if meta.address() == 0 && !shape.contains(&0) {
            return Err("it has no memory".into());
        }
        if !aligned(&meta, device, dtype) {
            return Err("it starts at an address that kernels can't read from".into());
        }
        // A tensor of its own over the same storage: that of the caller may get other sizes or another storage.
        let own = tensor.0.view(&shape, &stride, 0, dtype)?;
        let start = meta.storage();
        let after = usize::try_from(meta.room())? + (meta.address() - start);
        let entry = Self {
            dtype,
            shape,
            stride,
            weight: Arc::new(Weight::owned(own)),
        };
        Ok((entry, start..start + after))
    }
}

impl Weights {
    /// Makes the tensors of a mapped safetensors object usable on `device`. `placement` sets the order of an upload and
    /// leaves tensors on the host, `limit` sets its maximum bytes a second. With `parts`, the bytes of a tensor are
    /// checked when it is asked for.
    pub fn new(
        digest: Digest,
        bytes: &Mapped,
        parts: Option<CheckedParts>,
        device: Device,
        limit: Option<u64>,
        placement: &Placement,
    ) -> Result<Self, RuntimeError> {
        let bad = |reason: String| RuntimeError::BadWeights {
            weights: digest,
            reason,
        };
        match &parts {
            Some(parts) => check_header(bytes, parts).map_err(|error| {
                in_store(format!("weight set `{}`", digest.short()))(error.into())
            })?,
            None => bytes.read_ahead(),
        }
        let file = SafeTensors::deserialize(bytes).map_err(|error| bad(error.to_string()))?;
        let mut views = Vec::new();
        for (name, view) in file.iter() {
            let dtype = dtype_of(view.dtype())
                .ok_or_else(|| bad(format!("`{name}` has dtype {:?}", view.dtype())))?;
            let shape = view
                .shape()
                .iter()
                .map(|&size| i64::try_from(size))
                .collect::<Result<Vec<_>, _>>();
            let shape = shape.map_err(|_| bad(format!("`{name}` has an absurd shape")))?;
            let start = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
            views.push((
                name.to_owned(),
                dtype,
                shape,
                start..start + view.data().len(),
            ));
        }
        // In file order, except for concatenated tensors, so that an upload reads the file from front to back.
        views.sort_by_key(|(.., range)| range.start);
        let stays = |(name, ..): &View| device == Device::Cpu || placement.on_host.contains(name);
        let (host, views): (Views, Views) = views.into_iter().partition(stays);
        let mut tensors = over(bytes, host).map_err(|error| bad(error.to_string()))?;
        let (memory, took) = match device {
            Device::Cpu => (range_of(bytes), None),
            Device::Cuda(ordinal) => {
                let uploaded = upload(bytes, views, ordinal, limit, placement);
                let (there, memory, took) = uploaded.map_err(|error| match error {
                    UploadError::Device(reason) => RuntimeError::Upload { device, reason },
                    UploadError::File(error) => {
                        in_store(format!("weight set `{}`", digest.short()))(error.into())
                    }
                })?;
                tensors.extend(there);
                (memory, took)
            }
        };
        Ok(Self {
            digest: Some(digest),
            device,
            tensors,
            cache: Mutex::default(),
            cached_bytes: AtomicUsize::new(0),
            memory: vec![memory],
            live: false,
            took,
            keeper: None,
            parts,
            damaged: OnceLock::new(),
        })
    }

    /// Keeps prepacked constants of the weights with this digest in a source, for later processes. On the CPU only: a
    /// device has no use for a file.
    pub fn kept_in(mut self, source: &Arc<dyn Source>, digest: Digest) -> Self {
        if self.device == Device::Cpu {
            self.keeper = Some((source.clone(), digest));
        }
        self
    }

    /// Returns a prepacked constant that an earlier process kept; none without it.
    pub fn kept(&self, key: &Digest, wanted: &Prepared) -> Option<Weight> {
        let (source, digest) = self.keeper.as_ref()?;
        self.restored(&source.prepacked(digest, key)?, wanted)
    }

    /// Keeps a prepacked constant for later processes. Returns it over the mapped file; none if it is not kept.
    pub fn keep(&self, key: &Digest, wanted: &Prepared, computed: &Handle) -> Option<Weight> {
        let (source, digest) = self.keeper.as_ref()?;
        let parts = Parts::of(computed).map_err(|error| not_kept(wanted, &error));
        let file = source.keep_prepacked(digest, key, &parts.ok()?.in_order())?;
        self.restored(&file, wanted)
    }

    fn restored(&self, file: &Mapped, wanted: &Prepared) -> Option<Weight> {
        let restored = ffi::restored(file, wanted.dtype, &wanted.shape, wanted.stride.as_deref());
        restored.map_err(|error| not_kept(wanted, &error)).ok()
    }

    /// Makes a set of the caller's tensors, each another handle of the same storage.
    pub fn of(tensors: BTreeMap<String, Tensor>, device: Device) -> Result<Self, RuntimeError> {
        let mut set = Self::none(device);
        set.live = true;
        for (name, tensor) in tensors {
            match Entry::live(&tensor, device) {
                Ok((entry, storage)) => {
                    set.memory.push(storage);
                    set.tensors.insert(name, entry);
                }
                Err(reason) => return Err(RuntimeError::NotAWeight { name, reason }),
            }
        }
        set.memory.sort_unstable_by_key(|range| range.start);
        set.memory.dedup_by(|next, range| {
            let overlaps = next.start < range.end;
            if overlaps {
                range.end = range.end.max(next.end);
            }
            overlaps
        });
        Ok(set)
    }

    /// Creates an empty weight set, for a model without parameters and buffers.
    pub fn none(device: Device) -> Self {
        Self {
            digest: None,
            device,
            tensors: HashMap::new(),
            cache: Mutex::default(),
            cached_bytes: AtomicUsize::new(0),
            memory: Vec::new(),
            live: false,
            took: None,
            keeper: None,
            parts: None,
            damaged: OnceLock::new(),
        }
    }

    /// Returns the bytes of its memory.
    pub fn bytes(&self) -> usize {
        self.memory.iter().map(ExactSizeIterator::len).sum()
    }

    /// Returns the bytes of prepacked constants and other copies.
    pub fn prepared_bytes(&self) -> usize {
        self.cached_bytes.load(Relaxed)
    }

    /// Returns the duration of the upload; none without one.
    pub fn upload_time(&self) -> Option<Duration> {
        self.took
    }

    /// Returns the tensor of this name; none if it is damaged.
    pub fn checked(&self, name: &str) -> Option<&Weight> {
        let entry = self.tensors.get(name)?;
        self.check(name, entry).ok()?;
        Some(&entry.weight)
    }

    /// Gives back the memory of mapped pages.
    pub fn release(&self) {
        let own = self.tensors.values().map(|entry| &entry.weight);
        own.for_each(|weight| weight.release());
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.values().for_each(|weight| weight.release());
    }

    /// Returns whether an address lies in the weights' memory.
    pub fn contains(&self, address: usize) -> bool {
        let after = self.memory.partition_point(|range| range.start <= address);
        (self.memory[..after].last()).is_some_and(|range| range.contains(&address))
    }

    /// Returns whether the tensors are the caller's, so that nothing may be computed from them.
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// Returns the tensor `name` in the layout `layout`, or the reason why there is none. With `keep`, a necessary copy
    /// is kept for later calls.
    pub fn get(
        &self,
        name: &str,
        aliases: &BTreeMap<String, String>,
        layout: &Layout,
        keep: bool,
    ) -> Result<Arc<Weight>, TorchError> {
        let Some(entry) = self.entry(name, aliases) else {
            return Err(format!("the weight set has no tensor `{name}`").into());
        };
        if entry.dtype != layout.dtype || entry.shape != layout.shape {
            return Err(format!(
                "it is {} {:?}, and `{name}` in the weight set is {} {:?}",
                layout.dtype, layout.shape, entry.dtype, entry.shape
            )
            .into());
        }
        self.check(name, entry)?;
        if self.live && entry.weight.handle().meta().lazy() {
            return Err("a negation of it is pending".into());
        }
        if same_strides(&layout.shape, &layout.stride, &entry.stride) && self.is_here(entry) {
            return Ok(entry.weight.clone());
        }
        if self.live {
            let (own, wanted) = (&entry.stride, &layout.stride);
            return Err(format!(
                "it has strides {wanted:?}, and the caller's `{name}` has {own:?}"
            )
            .into());
        }
        let name = self.own_name(name, aliases);
        let copy = || self.restride(name, entry, layout);
        if keep {
            self.get_or_compute(format!("{name} {:?}", layout.stride), || {
                Ok((copy()?, bytes_of(&layout.shape, layout.dtype)))
            })
        } else {
            copy().map(Arc::new)
        }
    }

    /// Returns the result under this key. Without one, `make` computes it and returns its bytes.
    pub fn get_or_compute(
        &self,
        key: String,
        make: impl FnOnce() -> Result<(Weight, usize), TorchError>,
    ) -> Result<Arc<Weight>, TorchError> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(weight) = cache.get(&key) {
            return Ok(weight.clone());
        }
        let (weight, bytes) = make()?;
        // A view needs no kernel.
        if let (Device::Cuda(ordinal), 1..) = (self.device, bytes) {
            // Later callers may use it on another stream.
            cuda().and_then(|cuda| cuda.synchronize(ordinal))?;
        }
        let weight = Arc::new(weight);
        self.cached_bytes.fetch_add(bytes, Relaxed);
        cache.insert(key, weight.clone());
        Ok(weight)
    }

    /// Returns the name under which the set holds a tensor that may be known under another.
    pub fn own_name<'a>(&self, name: &'a str, aliases: &'a BTreeMap<String, String>) -> &'a str {
        if self.tensors.contains_key(name) {
            return name;
        }
        let holder = aliases.get(name).map_or(name, String::as_str);
        if self.tensors.contains_key(holder) {
            return holder;
        }
        // The caller may know a tied tensor by another of its names.
        let mut others = aliases.iter().filter(|(_, of)| *of == holder);
        let known = others.find(|(other, _)| self.tensors.contains_key(*other));
        known.map_or(holder, |(other, _)| other)
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the digest of the object; none for tensors of the caller, and without weights.
    pub fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Returns the tensor `name` with any dtype and layout, on the device or on the host.
    pub fn any(
        &self,
        name: &str,
        aliases: &BTreeMap<String, String>,
    ) -> Result<Option<Arc<Weight>>, TorchError> {
        let Some(entry) = self.entry(name, aliases) else {
            return Ok(None);
        };
        self.check(name, entry)?;
        Ok(Some(entry.weight.clone()))
    }

    /// Checks the bytes of a tensor, unless they were checked before.
    fn check(&self, name: &str, entry: &Entry) -> Result<(), TorchError> {
        let (Some(parts), Some(range)) = (&self.parts, entry.weight.range()) else {
            return Ok(());
        };
        parts.check(range.clone()).map_err(|error| {
            let _ = self.damaged.set(range);
            format!("the bytes of `{name}` can't be used: {error}").into()
        })
    }

    /// Returns the error of the store for a tensor whose bytes were damaged.
    pub fn damage(&self) -> Option<SourceError> {
        let range = self.damaged.get()?.clone();
        Some(self.parts.as_ref()?.check(range).err()?.into())
    }

    /// Returns whether there is a tensor of this name.
    pub fn has(&self, name: &str, aliases: &BTreeMap<String, String>) -> bool {
        self.entry(name, aliases).is_some()
    }

    fn entry(&self, name: &str, aliases: &BTreeMap<String, String>) -> Option<&Entry> {
        self.tensors.get(self.own_name(name, aliases))
    }

    /// Returns whether a tensor is on the device of the set.
    fn is_here(&self, entry: &Entry) -> bool {
        entry.weight.handle().meta().device() == Some(self.device)
    }

    fn restride(&self, name: &str, entry: &Entry, layout: &Layout) -> Result<Weight, TorchError> {
        let copy = Handle::empty(&layout.shape, &layout.stride, layout.dtype, self.device)
            .and_then(|copy| copy.copy_from(entry.weight.handle()).map(|()| copy))
            .map_err(|error| {
                let stride = &layout.stride;
                error.at(&format!(
                    "`{name}` can't be laid out with strides {stride:?}"
                ))
            })?;
        Ok(Weight::owned(copy))
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        if let (Device::Cuda(ordinal), false) = (self.device, self.tensors.is_empty()) {
            // Launched kernels may still read them, on streams that the allocator does not know. A device that fails to
            // synchronize runs nothing more.
            let _ = cuda().and_then(|cuda| cuda.synchronize(ordinal));
        }
    }
}

/// Checks the header of a safetensors object: its length in 8 bytes, and a text of that length.
fn check_header(bytes: &Mapped, parts: &CheckedParts) -> Result<(), StoreError> {
    let Some(length) = bytes.first_chunk::<8>() else {
        return Ok(());
    };
    parts.check(0..8)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    parts.check(0..length.saturating_add(8).min(bytes.len()))
}

fn not_kept(wanted: &Prepared, error: &TorchError) {
    tracing::debug!(constant = wanted.name, %error, "a prepacked constant is not kept");
}

/// Name, dtype, shape, and range of the map.
type View = (String, Dtype, Vec<i64>, Range<usize>);
type Views = Vec<View>;

fn over(bytes: &Mapped, views: Views) -> Result<HashMap<String, Entry>, TorchError> {
    let mut tensors = HashMap::with_capacity(views.len());
    for (name, dtype, shape, range) in views {
        let stride = contiguous(&shape);
        let weight = Weight::over(bytes, range, &shape, &stride, dtype)
            .map_err(|error| error.at(&format!("`{name}`")))?;
        tensors.insert(name, Entry::dense(dtype, shape, weight));
    }
    Ok(tensors)
}

/// The tensors, the addresses of their block, and the time of the upload.
type Uploaded = (HashMap<String, Entry>, Range<usize>, Option<Duration>);

fn upload(
    bytes: &Mapped,
    views: Views,
    ordinal: usize,
    limit: Option<u64>,
    placement: &Placement,
) -> Result<Uploaded, UploadError> {
    if views.is_empty() {
        return Ok((HashMap::new(), 0..0, None));
    }
    let _span = tracing::info_span!("upload", device = ordinal, bytes = bytes.len()).entered();
    let named: Vec<_> = (views.iter())
        .map(|(name, .., range)| (name.as_str(), range.len()))
        .collect();
    let (offsets, total) = placement.concatenated.places(&named);
    let block = Handle::empty(
        &[i64::try_from(total)?],
        &[1],
        Dtype::Uint8,
        Device::Cuda(ordinal),
    )?;
    let ranges = views.iter().map(|(.., range)| range.clone());
    let mut parts: Vec<_> = offsets.iter().copied().zip(ranges).collect();
    parts.sort_by_key(|(to, _)| *to);
    let begin = Instant::now();
    if can_upload() {
        ffi::upload(&block, bytes, &parts, limit)?
    } else {
        for (to, range) in parts {
            let length = i64::try_from(range.len())?;
            let source = Weight::over(bytes, range, &[length], &[1], Dtype::Uint8)?;
            let place = block.view(&[length], &[1], to, Dtype::Uint8)?;
            place.copy_from(source.handle())?;
        }
    }
    let took = begin.elapsed();
    tracing::debug!(
        bytes = total,
        seconds = took.as_secs_f64(),
        "weights are on the device"
    );
    let mut tensors = HashMap::with_capacity(views.len());
    for ((name, dtype, shape, _), offset) in views.into_iter().zip(offsets) {
        let tensor = block.view(&shape, &contiguous(&shape), offset, dtype)?;
        tensors.insert(name, Entry::dense(dtype, shape, Weight::owned(tensor)));
    }
    let start = block.meta().storage();
    Ok((tensors, start..start + total, Some(took)))
}

fn range_of(bytes: &Mapped) -> Range<usize> {
    let start = bytes.as_ptr() as usize;
    start..start + bytes.len()
}
