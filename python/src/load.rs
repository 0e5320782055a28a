//! Loads of releases, over the runtimes that this process has open.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use precast_runtime::{
    Inputs as Copies, Loading, Runtime, command::tensors as files, cuda::Graphs,
};
use precast_store::{Device, Store, StoreError};
use pyo3::{
    exceptions::PyOSError,
    prelude::*,
    types::{PyBytes, PyDict},
};

use crate::{
    ending::Inside,
    errors,
    fork::Process,
    loaded::{Loaded, device, own_weights},
    model::Model,
    tensors,
};

/// Loads a release. `precast.load` is the documented form.
#[pyfunction]
#[pyo3(signature = (store, model, *, devices, libtorch, untried, instances, sessions, loading, graphs, lend, check, copy, pad, wait, weights, again))]
#[allow(clippy::too_many_arguments)]
pub fn load(
    py: Python<'_>,
    store: PathBuf,
    model: String,
    devices: Vec<String>,
    libtorch: Option<PathBuf>,
    untried: bool,
    instances: usize,
    sessions: usize,
    loading: &str,
    graphs: &str,
    lend: Option<&str>,
    check: &str,
    copy: bool,
    pad: bool,
    wait: Option<f64>,
    weights: Option<&Bound<'_, PyDict>>,
    again: Option<Py<PyAny>>,
) -> PyResult<Model> {
    let devices: Vec<Device> = devices
        .iter()
        .map(|name| device(name))
        .collect::<PyResult<_>>()?;
    let inside = Inside::enter(py)?;
    let loading = match loading {
        "before" => Loading::Before,
        "background" => Loading::Background,
        "on-demand" => Loading::OnDemand,
        other => {
            return Err(errors::bad_input(
                format!("loading=`{other}` is unknown"),
                "it is before, background or on-demand",
            ));
        }
    };
    let graphs = match graphs {
        "as-built" => Graphs::AsBuilt,
        "always" => Graphs::Always,
        "never" => Graphs::Never,
        other => {
            return Err(errors::bad_input(
                format!("graphs=`{other}` is unknown"),
                "it is as-built, always or never",
            ));
        }
    };
    let now = match check {
        "late" => false,
        "now" => true,
        other => {
            return Err(errors::bad_input(
                format!("check=`{other}` is unknown"),
                "it is late or now",
            ));
        }
    };
    let wait = wait.map(Duration::try_from_secs_f64).transpose();
    let wait =
        wait.map_err(|error| errors::bad_input(format!("wait: {error}"), "seconds, from 0 on"))?;
    let shared = inside.detach(py, || {
        Runtime::libtorch(libtorch.as_deref(), untried).map_err(|error| errors::runtime(&error))?;
        shared(&store, &devices)
    })?;
    let mut runtime = Runtime::clone(&shared)
        .instances(instances)
        .sessions(sessions)
        .loading(loading)
        .graphs(graphs)
        .padding(pad)
        .inputs(if copy {
            Copies::MayCopy
        } else {
            Copies::AsGiven
        });
    if let Some(wait) = wait {
        runtime = runtime.wait_limit(wait);
    }
    if let Some(what) = lend {
        runtime = runtime.lending(what == "pairs");
    }
    let loaded = match weights {
        None => inside.detach(py, || runtime.load(&model)),
        Some(weights) => {
            let weights = own_weights(weights, &devices)?;
            inside.detach(py, || runtime.load_on(&model, &weights))
        }
    };
    let loaded = loaded.map_err(|error| errors::runtime(&error))?;
    let loaded = Loaded::of(py, loaded, devices, shared, now);
    Ok(Model::new(loaded, again))
}

/// Returns the releases of a model whose names begin with `prefix`, newest first, each with one of its assets.
///
/// Leaves out an asset that is damaged: its release can't be loaded either.
#[pyfunction]
pub fn assets<'py>(
    py: Python<'py>,
    store: PathBuf,
    model: &str,
    prefix: &str,
    asset: &str,
) -> PyResult<Vec<(String, Bound<'py, PyBytes>)>> {
    let inside = Inside::enter(py)?;
    let read = || -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let store = Store::open(&store)?;
        let mut found = Vec::new();
        for release in store.releases().all(model)?.into_iter().rev() {
            let name = release.name.filter(|name| name.starts_with(prefix));
            if let (Some(name), Some(digest)) = (name, release.assets.get(asset))
                && !found.iter().any(|(known, _)| *known == name)
                && let Ok(bytes) = store.objects().read(digest)
            {
                found.push((name, bytes));
            }
        }
        Ok(found)
    };
    let found = inside
        .detach(py, read)
        .map_err(|error| errors::store(&error))?;
    let bytes = |(name, bytes): (String, Vec<u8>)| (name, PyBytes::new(py, &bytes));
    Ok(found.into_iter().map(bytes).collect())
}

/// Writes tensors of torch as a safetensors file. A tensor on a device, or with gaps, is copied for the time of its write.
#[pyfunction]
pub fn write_tensors(
    py: Python<'_>,
    path: PathBuf,
    named: &Bound<'_, PyDict>,
    libtorch: Option<PathBuf>,
) -> PyResult<()> {
    let inside = Inside::enter(py)?;
    let opened = inside.detach(py, || Runtime::libtorch(libtorch.as_deref(), false));
    opened.map_err(|error| errors::runtime(&error))?;
    let mut all = Vec::new();
    for (name, tensor) in named {
        let name: String = name.extract()?;
        let tensor = tensors::take_weight(&tensor, &name)?;
        all.push((name, tensor));
    }
    let written = inside.detach(py, || files::write(&path, &all));
    written.map_err(|error| PyOSError::new_err(format!("{}: {error}", path.display())))
}

/// A runtime of this process.
struct Open {
    /// Device and inode of the folder of its store.
    folder: (u64, u64),
    devices: Vec<Device>,
    process: Process,
    /// Models own it.
    runtime: Weak<Runtime>,
}

/// Returns the runtime over a store that models of this process have on these devices, or else a new one. Models of one
/// runtime share their weights.
fn shared(store: &Path, devices: &[Device]) -> PyResult<Arc<Runtime>> {
    static OPEN: Mutex<Vec<Open>> = Mutex::new(Vec::new());
    let store = Store::open(store).map_err(|error| errors::store(&error))?;
    let metadata = fs::metadata(store.path())?;
    let folder = (metadata.dev(), metadata.ino());
    let find = || {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|one| one.process.is_this() && one.runtime.strong_count() > 0);
        let same = |one: &&Open| one.folder == folder && one.devices == devices;
        let found = open.iter().find(same).and_then(|one| one.runtime.upgrade());
        (open, found)
    };
    if let Some(found) = find().1 {
        return Ok(found);
    }
    let new = Runtime::new(&store, devices.to_vec()).map_err(|error| errors::runtime(&error))?;
    // Another thread may have opened one meanwhile.
    let (mut open, found) = find();
    Ok(found.unwrap_or_else(|| {
        let new = Arc::new(new);
        open.push(Open {
            folder,
            devices: devices.to_vec(),
            process: Process::this(),
            runtime: Arc::downgrade(&new),
        });
        new
    }))
}
