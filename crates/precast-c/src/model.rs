//! Models: descriptions, calls and counters.
#![allow(
    unsafe_code,
    reason = "functions with C names, and memory of the caller"
)]

use std::{
    ffi::{CString, c_char},
    mem::MaybeUninit,
    ptr,
    sync::Arc,
};

use precast_runtime::{Model as Loaded, RuntimeError, dlpack::DLTensor};
use serde_json::json;

use crate::{
    describe::{Described, Module},
    error::{Error, Failure, guarded, made, quiet},
    kept::text_of,
    memory::{object, text},
    outputs::Outputs,
    tensors::{self, Inputs},
};

/// A loaded model.
pub struct Model {
    pub model: Arc<Loaded>,
    described: Described,
}

impl Model {
    pub fn of(model: Loaded) -> Self {
        let described = Described::of(&model);
        let model = Arc::new(model);
        Self { model, described }
    }
}

/// Returns a module, counted from 0, valid until the model is freed. NULL beyond the last one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn precast_model_module(model: *const Model, index: usize) -> *const Module {
    quiet(ptr::null(), || {
        // SAFETY: an object of the caller.
        let model = unsafe { object("model", model) };
        let module = model
            .ok()
            .and_then(|model| model.described.modules.get(index));
        module.map_or(ptr::null(), ptr::from_ref)
    })
}

/// Runs a module, and returns its outputs in `*out`.
///
/// `inputs` are `count` tensors on a device of the model, or on any with the option copy_inputs. With `names` they can
/// have any order, and the names choose between the sets of inputs that a module takes. Without names (NULL) they have
/// the module's order. They are only read, and can be freed when the function returns; on CUDA, when the stream of the
/// call is done.
///
/// Any number of threads can call it at once. On CUDA the call works on the default stream of its device, and returns
/// before the work is done.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_model_run(
    model: *const Model,
    module: *const c_char,
    inputs: *const *const DLTensor,
    names: *const *const c_char,
    count: usize,
    out: Option<&mut MaybeUninit<Option<Box<Outputs>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object, a text and tensors of the caller, which live until the function returns.
        let (model, module, inputs) = unsafe {
            let model = object("model", model)?;
            let module = text("module", module)?;
            (model, module, tensors::inputs(inputs, names, count)?)
        };
        let model = &model.model;
        let run = |inputs: Inputs<'_>| -> Result<precast_runtime::Outputs, RuntimeError> {
            match inputs.names {
                None => model.run(module, &inputs.tensors),
                Some(names) => {
                    let named: Vec<_> = names.into_iter().zip(&inputs.tensors).collect();
                    model.run_named(module, &named)
                }
            }
        };
        Outputs::of(run(inputs)?)
    })
}

/// Loads every program that is not loaded yet, and runs each once, so that no call pays for work that is done once.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_model_warm_up(model: *const Model) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object of the caller.
        Ok(unsafe { object("model", model) }?.model.warm_up()?)
    })
}

/// Returns the state of a model in `*out`, as a JSON document.
///
/// It has the name of the `model`, whether it is `ready`, the counters of its `modules` by bucket and device, the state
/// of its `devices`, and the programs that could not be loaded, as `quarantined`. The caller frees the text with
/// precast_string_free.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_model_stats(
    model: *const Model,
    out: Option<&mut MaybeUninit<*mut c_char>>,
) -> Option<Box<Error>> {
    guarded(|| {
        let out = out.ok_or_else(|| Failure::null("out"))?;
        let out = out.write(ptr::null_mut());
        // SAFETY: an object of the caller.
        let model = &unsafe { object("model", model) }?.model;
        let quarantined: Vec<_> = model
            .quarantined()
            .iter()
            .map(|lost| {
                json!({
                    "module": lost.module,
                    "bucket": lost.bucket,
                    "device": lost.device.to_string(),
                    "error": lost.error.to_string(),
                })
            })
            .collect();
        let stats = json!({
            "model": model.name(),
            "ready": model.is_ready(),
            "modules": model.stats(),
            "devices": model.devices(),
            "quarantined": quarantined,
        });
        *out = text_of(stats.to_string()).into_raw();
        Ok(())
    })
}

/// Frees a text that precast_model_stats returned. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn precast_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: a text of `CString::into_raw`, which the caller gives back.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Frees a model. NULL is ignored. Its sessions and outputs stay valid.
#[unsafe(no_mangle)]
pub extern "C" fn precast_model_free(model: Option<Box<Model>>) {
    quiet((), || drop(model));
}
