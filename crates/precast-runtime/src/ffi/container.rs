//! One container of an artifact with one model instance, its constants bound by pointer.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_void},
    ptr::{self, NonNull},
    sync::Arc,
};

use precast_store::{Device, record::Dtype};
use smallvec::SmallVec;

use super::{
    Handle, Library, Operators, RawStream, Stolen, Weight,
    abi::{CountOf, Name, Pair},
    shim::{self, checked},
    tensor::dtype_of,
};
use crate::TorchError;

/// A constant the container must be given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    /// The name in records and bindings.
    pub fqn: String,
    pub dtype: Option<Dtype>,
    pub bytes: usize,
    /// The name in the container.
    name: CString,
}

/// The reason why a run returned no outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunError {
    /// The artifact failed or threw; the text is its own.
    Failed(TorchError),
    /// A check in its kernels failed, as of a computed index; the text of the check.
    Check(String),
}

/// One model instance. Methods that run or bind take `&mut self`: the ABI allows one caller at a time.
pub struct Container {
    raw: NonNull<c_void>,
    library: Arc<Library>,
    constants: Vec<Constant>,
    inputs: usize,
    outputs: usize,
    /// Operators without a C entry point.
    operators: Option<Arc<Operators>>,
    /// The bound tensors. The container has the handles' addresses, so they are dropped after it (see `drop`).
    bound: Vec<Arc<Weight>>,
}

// SAFETY: a container has no thread affinity ("bare" model state on the heap, no thread-locals); torch's own
// AOTIModelContainerRunner is made on one thread and run on others. Only `&mut self` methods run or change it.
unsafe impl Send for Container {}

impl Container {
    /// Creates a container on `device`. Its constants must be bound before it runs.
    pub fn new(
        library: &Arc<Library>,
        operators: Option<Arc<Operators>>,
        device: Device,
    ) -> Result<Self, TorchError> {
        let ordinal = match device {
            Device::Cpu => -1,
            Device::Cuda(ordinal) => i32::try_from(ordinal)?,
        };
        let name = CString::new(device.to_string())?;
        let mut raw = ptr::null_mut();
        let abi = &library.abi;
        // SAFETY: the symbol has this type; `raw` and `name` outlive the call.
        checked(unsafe { shim::precast_create(abi.create, &mut raw, name.as_ptr(), ordinal) })?;
        let raw = NonNull::new(raw).ok_or("made no container")?;
        let mut made = Self {
            raw,
            library: library.clone(),
            operators,
            constants: Vec::new(),
            inputs: 0,
            outputs: 0,
            bound: Vec::new(),
        };
        made.inputs = made.count(abi.num_inputs)?;
        made.outputs = made.count(abi.num_outputs)?;
        made.constants = made.read_constants()?;
        Ok(made)
    }

    /// Returns the number of its inputs.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Returns the number of its outputs.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Returns the constants it must be given; those it folds itself are not among them.
    pub fn constants(&self) -> &[Constant] {
        &self.constants
    }

    /// Binds one tensor to each of [`Self::constants`], in that order, in place of earlier ones.
    ///
    /// The caller has checked dtype and shape. `&mut self` prevents runs at the same time.
    pub fn bind(&mut self, tensors: Vec<Arc<Weight>>) -> Result<(), TorchError> {
        if tensors.len() != self.constants.len() {
            let (expected, got) = (self.constants.len(), tensors.len());
            return Err(format!("expected {expected} constants, got {got}").into());
        }
        if tensors.is_empty() {
            return Ok(());
        }
        let pairs: Vec<Pair> = self
            .constants
            .iter()
            .zip(&tensors)
            .map(|(constant, tensor)| Pair {
                name: constant.name.as_ptr(),
                tensor: tensor.handle().raw(),
            })
            .collect();
        // SAFETY: names and handles are alive; the container keeps the handles' addresses, and `bound` keeps the
        // handles until the container is freed or bound again.
        let code = unsafe {
            shim::precast_bind(
                self.library.abi.bind,
                self.raw.as_ptr(),
                pairs.as_ptr(),
                pairs.len(),
            )
        };
        // Even a bind that failed may have taken some of them, so both sets are kept then.
        match checked(code) {
            Ok(()) => self.bound = tensors,
            Err(error) => {
                self.bound.extend(tensors);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Runs it once on `stream`, and appends its outputs.
    ///
    /// An output the artifact left null is an error, and so is a check in its kernels that failed; handles written
    /// before a failure are freed.
    pub fn invoke(
        &mut self,
        mut inputs: Stolen,
        stream: RawStream,
        outputs: &mut SmallVec<[Handle; 8]>,
    ) -> Result<(), RunError> {
        if inputs.len() != self.inputs {
            let (expected, got) = (self.inputs, inputs.len());
            let reason = format!("expected {expected} inputs, got {got}");
            return Err(RunError::Failed(reason.into()));
        }
        let mut raw: SmallVec<[*mut c_void; 8]> =
            SmallVec::from_elem(ptr::null_mut(), self.outputs);
        // SAFETY: the counts are the container's own; handles are live and owned by the list; `&mut self` keeps every
        // other caller out, as the single-threaded entry point requires.
        let code = unsafe {
            shim::precast_run(
                self.library.abi.run,
                self.raw.as_ptr(),
                inputs.as_mut_ptr(),
                inputs.len(),
                raw.as_mut_ptr(),
                raw.len(),
                stream.0,
                self.operators
                    .as_ref()
                    .map_or(ptr::null_mut(), |operators| operators.raw()),
            )
        };
        // Taken after every run, also after a failure: otherwise the next run would report the check.
        let check = self.failed_check();
        let result = checked(code).map_err(RunError::Failed);
        let result = result.and(check.map_or(Ok(()), |text| Err(RunError::Check(text))));
        let before = outputs.len();
        for (i, &raw) in raw.iter().enumerate() {
            // SAFETY: outputs belong to the caller; null means it was not written.
            match unsafe { Handle::from_raw(raw) } {
                Some(handle) => outputs.push(handle),
                None if result.is_ok() => {
                    outputs.truncate(before);
                    let reason = format!("output {i} was not written");
                    return Err(RunError::Failed(reason.into()));
                }
                None => {}
            }
        }
        if result.is_err() {
            outputs.truncate(before);
        }
        result
    }

    /// Returns the text of a failed check in its kernels, from runs on this thread since the last call.
    fn failed_check(&self) -> Option<String> {
        let take = self.library.abi.failed_check?;
        // SAFETY: the symbol has this type; it returns null or a string literal of the artifact, which is never
        // unloaded.
        let text = unsafe { take() };
        if text.is_null() {
            return None;
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }

    fn count(&self, f: CountOf) -> Result<usize, TorchError> {
        let mut n = 0;
        // SAFETY: a live container and a valid out pointer.
        checked(unsafe { shim::precast_count(f, self.raw.as_ptr(), &mut n) })?;
        Ok(n)
    }

    fn name(&self, f: Name, i: usize) -> Result<CString, TorchError> {
        let mut text = ptr::null();
        // SAFETY: `i` is below the container's own count; the out pointer is valid.
        checked(unsafe { shim::precast_name(f, self.raw.as_ptr(), i, &mut text) })?;
        if text.is_null() {
            return Err(format!("constant {i} has no name").into());
        }
        // SAFETY: the container owns a NUL-terminated string that lives as long as it does; it is copied.
        Ok(unsafe { CStr::from_ptr(text) }.to_owned())
    }

    fn read_constants(&self) -> Result<Vec<Constant>, TorchError> {
        let abi = &self.library.abi;
        let raw = self.raw.as_ptr();
        let mut found: BTreeMap<String, Constant> = BTreeMap::new();
        for i in 0..self.count(abi.num_constants)? {
            let (mut folded, mut dtype, mut bytes) = (false, -1, 0);
            // SAFETY: `i` is below the container's own count; the out pointers are valid.
            checked(unsafe { shim::precast_flag(abi.constant_folded, raw, i, &mut folded) })?;
            if folded {
                continue;
            }
            // SAFETY: as above.
            checked(unsafe { shim::precast_dtype(abi.constant_dtype, raw, i, &mut dtype) })?;
            // SAFETY: as above.
            checked(unsafe { shim::precast_size(abi.constant_bytes, raw, i, &mut bytes) })?;
            let fqn = self
                .name(abi.constant_fqn, i)?
                .to_string_lossy()
                .into_owned();
            let name = self.name(abi.constant_name, i)?;
            let dtype = i8::try_from(dtype).ok().and_then(dtype_of);
            if let Some(twice) = found.insert(
                fqn.clone(),
                Constant {
                    fqn,
                    dtype,
                    bytes,
                    name,
                },
            ) {
                return Err(format!("two constants are called `{}`", twice.fqn).into());
            }
        }
        Ok(found.into_values().collect())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if crate::ending::ended() {
            // Its code may be unloaded, and all of its memory is about to be freed.
            return;
        }
        // SAFETY: `self` owns the container; the tensors bound to it are fields and are dropped after this.
        let code = unsafe { shim::precast_delete(self.library.abi.delete, self.raw.as_ptr()) };
        if let Err(error) = checked(code) {
            tracing::warn!(object = %self.library.object().short(), %error, "a container was not deleted");
        }
    }
}
