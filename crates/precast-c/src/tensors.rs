//! Tensors of the caller as inputs, without a copy.
#![allow(unsafe_code, reason = "reads memory of the caller")]

use std::{
    ffi::c_char,
    ptr::{self, NonNull},
};

use precast_runtime::{
    Tensor,
    dlpack::{Capsule, DLManagedTensorVersioned, DLPackVersion, DLTensor},
};

use crate::{
    error::Failure,
    memory::{array, text},
};

/// Inputs of a call in the order of the caller. They have names, or none has.
pub struct Inputs<'a> {
    pub tensors: Vec<Tensor>,
    pub names: Option<Vec<&'a str>>,
}

/// Returns the inputs of a call.
///
/// # Safety
/// `inputs` is null or has `count` pointers, each null or to a tensor, and `names` is null or has `count` texts. The
/// memory of the tensors is not written or freed before the tensors of the result are dropped.
pub unsafe fn inputs<'a>(
    inputs: *const *const DLTensor,
    names: *const *const c_char,
    count: usize,
) -> Result<Inputs<'a>, Failure> {
    // SAFETY: as this function requires.
    let given = unsafe { array("inputs", inputs, count) }?;
    let names = if names.is_null() {
        None
    } else {
        // SAFETY: as this function requires.
        let names = unsafe { array("names", names, count) }?;
        // SAFETY: as this function requires.
        let names = names.iter().map(|&name| unsafe { text("names", name) });
        Some(names.collect::<Result<_, _>>()?)
    };
    let tensors = given.iter().enumerate();
    // SAFETY: as this function requires.
    let tensors = tensors.map(|(at, &raw)| unsafe { borrowed(at, raw) });
    let tensors = tensors.collect::<Result<_, _>>()?;
    Ok(Inputs { tensors, names })
}

/// Returns a tensor over memory of the caller.
///
/// # Safety
/// `raw` is null or a tensor of the caller, whose memory is not written or freed before the result is dropped.
unsafe fn borrowed(at: usize, raw: *const DLTensor) -> Result<Tensor, Failure> {
    if raw.is_null() || !raw.is_aligned() {
        let problem = format!("has no tensor as input {at}");
        return Err(Failure::argument("inputs", &problem));
    }
    let managed = Box::new(DLManagedTensorVersioned {
        version: DLPackVersion { major: 1, minor: 0 },
        manager_ctx: ptr::null_mut(),
        deleter: Some(free_structure),
        flags: 0,
        // SAFETY: the caller's tensor, which is not null and aligned.
        dl_tensor: unsafe { raw.read() },
    });
    let managed = NonNull::from(Box::leak(managed));
    // SAFETY: the structure has no other owner; its tensor is the caller's, as this function requires.
    let capsule = unsafe { Capsule::from_raw(managed) };
    Tensor::from_dlpack(capsule).map_err(|error| Failure::tensor(&format!("input {at}"), &error))
}

/// Frees the structure around a borrowed tensor, but not its memory.
unsafe extern "C" fn free_structure(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: the box of `borrowed`; a capsule calls its deleter once.
    drop(unsafe { Box::from_raw(managed) });
}

/// Frees a tensor of precast_outputs_export or of another library, by its deleter. NULL and a tensor without a deleter
/// are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn precast_tensor_free(tensor: Option<NonNull<DLManagedTensorVersioned>>) {
    // SAFETY: the caller's live structure, which the caller gives away.
    drop(tensor.map(|raw| unsafe { Capsule::from_raw(raw) }));
}
