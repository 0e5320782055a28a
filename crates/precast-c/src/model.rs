//! Models: descriptions, calls and counters.
#![allow(
    unsafe_code,
    reason = "functions with C names, and memory of the caller"
)]

use std::{
    ffi::{CString, c_char, c_void},
    mem::MaybeUninit,
    ptr,
    sync::Arc,
};

use precast_runtime::{Device, Model as Loaded, Tensor, dlpack::DLTensor};
use serde_json::json;

use crate::{
    describe::{Described, Module},
    error::{Error, Failure, guarded, made, quiet},
    kept::text_of,
    memory::{object, text},
    outputs::Outputs,
    streams::OwnStream,
    tensors,
};

/// A loaded model.
pub struct Model {
    pub model: Arc<Loaded>,
    devices: Vec<Device>,
    described: Described,
}

impl Model {
    pub fn of(model: Loaded, devices: &[Device]) -> Self {
        let described = Described::of(&model);
        let (model, devices) = (Arc::new(model), devices.to_vec());
        Self {
            model,
            devices,
            described,
        }
    }

    /// Returns the CUDA device of a call: that of an input, or else the only one of the model. The CPU if there is none.
    fn cuda_device(&self, inputs: &[Tensor]) -> Device {
        let is_cuda = |device: &Device| *device != Device::Cpu;
        let mut given = inputs.iter().filter_map(Tensor::device);
        let mut own = self.devices.iter().copied().filter(is_cuda);
        let only = match (own.next(), own.next()) {
            (Some(only), None) => Some(only),
            _ => None,
        };
        given.find(is_cuda).or(only).unwrap_or(Device::Cpu)
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
    // SAFETY: as of this function; null is no stream.
    unsafe { precast_model_run_on(model, module, inputs, names, count, ptr::null_mut(), out) }
}

/// Runs a module as precast_model_run does, on a CUDA stream of the caller: a `cudaStream_t`, or NULL for the default
/// stream.
///
/// The stream is of the device of the inputs; with inputs on the CPU, of the only CUDA device of the model. The caller
/// does not destroy it before the outputs are freed. precast_outputs_copy of these outputs works on the same stream.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_model_run_on(
    model: *const Model,
    module: *const c_char,
    inputs: *const *const DLTensor,
    names: *const *const c_char,
    count: usize,
    stream: *mut c_void,
    out: Option<&mut MaybeUninit<Option<Box<Outputs>>>>,
) -> Option<Box<Error>> {
    made(out, || {
        // SAFETY: an object, a text and tensors of the caller, which live until the function returns.
        let (model, module, inputs) = unsafe {
            let model = object("model", model)?;
            let module = text("module", module)?;
            (model, module, tensors::inputs(inputs, names, count)?)
        };
        // SAFETY: the caller's stream, which lives until the outputs are freed.
        let stream = unsafe { OwnStream::new(stream, model.cuda_device(&inputs.tensors)) }?;
        let model = &model.model;
        Outputs::on(stream, || match inputs.names {
            None => model.run(module, &inputs.tensors),
            Some(names) => {
                let named: Vec<_> = names.into_iter().zip(&inputs.tensors).collect();
                model.run_named(module, &named)
            }
        })
    })
}

/// Waits for the calls of a model on CUDA, and returns the error of a value that was out of bounds in one of them, where
/// nobody has looked: see precast_outputs_check. Without this call a later one returns the error, in place of its own.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_model_check(model: *const Model) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object of the caller.
        Ok(unsafe { object("model", model) }?.model.check()?)
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
