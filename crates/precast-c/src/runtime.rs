//! The library itself, runtimes, and loads of models.
#![allow(
    unsafe_code,
    reason = "functions with C names, and memory of the caller"
)]

use std::{
    ffi::{c_char, c_int},
    mem::MaybeUninit,
};

use precast_runtime::Store;

use crate::{
    error::{Error, guarded, made, quiet},
    memory::{object, path, text},
    model::Model,
    options::{Options, flag},
};

/// A store and the devices of models.
pub struct Runtime(precast_runtime::Runtime);

/// Returns the version of the library, as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn precast_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Opens libtorch for this process: the copy that the process has loaded, or else the copy in `folder`, which is the
/// package `torch` or the folder with its libraries.
///
/// Call it before the first precast_runtime_open, unless the process has libtorch already. `folder` can be NULL.
/// A torch that is newer than the tried ones is refused, unless `untried` is 1.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_libtorch(
    folder: *const c_char,
    untried: c_int,
) -> Option<Box<Error>> {
    guarded(|| {
        let folder = if folder.is_null() {
            None
        } else {
            // SAFETY: a text of the caller.
            Some(unsafe { path("folder", folder) }?)
        };
        precast_runtime::Runtime::libtorch(folder, flag("untried", untried)?)?;
        Ok(())
    })
}

/// Opens a runtime over the store at a path.
///
/// `options` can be NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_runtime_open(
    store: *const c_char,
    options: *const Options,
    out: Option<&mut MaybeUninit<Option<Box<Runtime>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: a text and options of the caller.
        let (store, options) = unsafe { (path("store", store)?, Options::read(options)?) };
        let store = Store::open(store)?;
        // SAFETY: devices of the caller.
        Ok(Runtime(unsafe { options.runtime(&store) }?))
    })
}

/// Loads the newest release of a model that this host can run, or a named one as "model@release".
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_model_load(
    runtime: *const Runtime,
    name: *const c_char,
    out: Option<&mut MaybeUninit<Option<Box<Model>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object and a text of the caller.
        let (runtime, name) = unsafe { (object("runtime", runtime)?, text("name", name)?) };
        Ok(Model::of(runtime.0.load(name)?, runtime.0.devices()))
    })
}

/// Makes every later call of a model use the weights of a release, as "model@release" or the newest one of "model".
///
/// The release can be of another model with the same artifacts. Running calls finish with the weights that they began
/// with, and open sessions keep theirs. `runtime` has the release in its store, and the devices of the model. After an
/// error the model has the weights that it had.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_model_swap(
    model: *const Model,
    runtime: *const Runtime,
    release: *const c_char,
) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: objects and a text of the caller.
        let (model, runtime, release) = unsafe {
            let model = object("model", model)?;
            (
                model,
                object("runtime", runtime)?,
                text("release", release)?,
            )
        };
        let weights = runtime.0.weights_of(release)?;
        Ok(model.model.swap(&weights)?)
    })
}

/// Frees a runtime. NULL is ignored. Its models stay valid.
#[unsafe(no_mangle)]
pub extern "C" fn precast_runtime_free(runtime: Option<Box<Runtime>>) {
    quiet((), || drop(runtime));
}

/// Prevents new calls in this process, and waits up to five seconds for running ones. Returns 1 if all of them ended,
/// else 0.
///
/// A process whose threads may be in calls at its exit calls it before: libtorch's destructors must not run during a
/// call. Later calls fail with PRECAST_CODE_UNREADY.
#[unsafe(no_mangle)]
pub extern "C" fn precast_shut_down() -> c_int {
    quiet(0, || precast_runtime::shut_down().into())
}
