//! The outputs of one call.
#![allow(
    unsafe_code,
    reason = "functions with C names, and memory of the caller"
)]

use std::{
    ffi::{CString, c_char, c_void},
    mem::MaybeUninit,
    ptr,
    sync::{Mutex, MutexGuard, PoisonError},
};

use precast_runtime::{
    RuntimeError, Tensor,
    dlpack::{Capsule, DLManagedTensorVersioned, DLTensor},
};

use crate::{
    error::{Code, Error, Failure, guarded, quiet},
    kept::text_of,
    memory::object,
    streams::OwnStream,
};

/// The outputs of one call.
pub struct Outputs {
    /// Remembers whether the device's check is done, so it is for one thread at a time.
    outputs: Mutex<precast_runtime::Outputs>,
    /// The outputs for C. Their structures do not change.
    tensors: Vec<Capsule>,
    names: Vec<CString>,
    /// The stream of the call.
    stream: OwnStream,
}

impl Outputs {
    /// Makes a call on a stream, and returns its outputs.
    pub fn on(
        stream: OwnStream,
        call: impl FnOnce() -> Result<precast_runtime::Outputs, RuntimeError>,
    ) -> Result<Self, Failure> {
        let entered = stream.enter()?;
        let outputs = call()?;
        let tensors = outputs.iter().enumerate().map(|(at, tensor)| {
            let exported = tensor.share().into_dlpack(None);
            exported.map_err(|error| Failure::tensor(&format!("output {at}"), &error))
        });
        let tensors = tensors.collect::<Result<_, _>>()?;
        let names = outputs.named().map(|(name, _)| text_of(name)).collect();
        drop(entered);
        Ok(Self {
            outputs: Mutex::new(outputs),
            tensors,
            names,
            stream,
        })
    }

    fn lock(&self) -> MutexGuard<'_, precast_runtime::Outputs> {
        self.outputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tensor(&self, index: usize) -> Result<Tensor, Failure> {
        let outputs = self.lock();
        let beyond = || {
            let message = format!(
                "there is no output {index}: the module has {}",
                outputs.len()
            );
            Failure::new(Code::NotFound, message, "outputs are counted from 0")
        };
        outputs.get(index).map(Tensor::share).ok_or_else(beyond)
    }
}

/// Returns an output, counted from 0, in the order of the module. NULL beyond the last one.
///
/// The tensor belongs to the outputs, and is valid until they are freed. It may have gaps: use its strides, or
/// precast_outputs_copy. On CUDA it may still be computed: see precast_outputs_check.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn precast_outputs_tensor(
    outputs: *const Outputs,
    index: usize,
) -> *const DLTensor {
    quiet(ptr::null(), || {
        // SAFETY: an object of the caller.
        let outputs = unsafe { object("outputs", outputs) };
        let tensor = outputs.ok().and_then(|outputs| outputs.tensors.get(index));
        // SAFETY: a live structure, of which the capsule is the owner.
        tensor.map_or(ptr::null(), |tensor| unsafe {
            &raw const (*tensor.as_ptr().as_ptr()).dl_tensor
        })
    })
}

/// Returns the name of an output, valid until the outputs are freed. NULL beyond the last one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn precast_outputs_name(
    outputs: *const Outputs,
    index: usize,
) -> *const c_char {
    quiet(ptr::null(), || {
        // SAFETY: an object of the caller.
        let outputs = unsafe { object("outputs", outputs) };
        let name = outputs.ok().and_then(|outputs| outputs.names.get(index));
        name.map_or(ptr::null(), |name| name.as_ptr())
    })
}

/// Copies the elements of an output into memory of the caller, the last axis moving fastest, from any device.
///
/// `bytes` is the size of `data` and must be the size of all elements. On CUDA it waits for the output, on the stream of
/// its call, and checks the call as precast_outputs_check does. After an error `data` is unchanged.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_outputs_copy(
    outputs: *const Outputs,
    index: usize,
    data: *mut c_void,
    bytes: usize,
) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object of the caller.
        let outputs = unsafe { object("outputs", outputs) }?;
        let tensor = outputs.tensor(index)?;
        let size = tensor.dtype().map_or(0, |dtype| dtype.size());
        let needed = tensor.numel() * size;
        if needed != bytes {
            let problem = format!("is {bytes}, and output {index} has {needed} bytes");
            return Err(Failure::argument("bytes", &problem));
        }
        if data.is_null() && bytes > 0 {
            return Err(Failure::null("data"));
        }
        let _entered = outputs.stream.enter()?;
        outputs.lock().check()?;
        let read = tensor.to_bytes();
        let read = read.map_err(|error| Failure::tensor(&format!("output {index}"), &error))?;
        if !read.is_empty() {
            // SAFETY: the caller's memory has `bytes` bytes, and no copy of the library shares it.
            unsafe { ptr::copy_nonoverlapping(read.as_ptr(), data.cast(), read.len().min(bytes)) };
        }
        Ok(())
    })
}

/// Gives an output to the caller or to another library, without a copy.
///
/// The owner of `*out` calls its deleter once, or precast_tensor_free. The memory is freed when neither the outputs nor
/// an exported tensor use it.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_outputs_export(
    outputs: *const Outputs,
    index: usize,
    out: Option<&mut MaybeUninit<*mut DLManagedTensorVersioned>>,
) -> Option<Box<Error>> {
    guarded(|| {
        let out = out.ok_or_else(|| Failure::null("out"))?;
        let out = out.write(ptr::null_mut());
        // SAFETY: an object of the caller.
        let tensor = unsafe { object("outputs", outputs) }?
            .tensor(index)?
            .share();
        let exported: Capsule = tensor
            .into_dlpack(None)
            .map_err(|error| Failure::tensor(&format!("output {index}"), &error))?;
        *out = exported.into_raw().as_ptr();
        Ok(())
    })
}

/// Waits for the device's check of the call's values. After an error the outputs are invalid.
///
/// On CUDA, values in the device's memory are checked during the call. Call this function before the tensors of such a
/// call are used. In any other case it returns NULL at once, because precast_model_run checks all values.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn precast_outputs_check(outputs: *const Outputs) -> Option<Box<Error>> {
    guarded(|| {
        // SAFETY: an object of the caller.
        Ok(unsafe { object("outputs", outputs) }?.lock().check()?)
    })
}

/// Frees outputs, and the tensors that precast_outputs_tensor returned. NULL is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn precast_outputs_free(outputs: Option<Box<Outputs>>) {
    quiet((), || drop(outputs));
}
