//! The last rung of the ladder: a program's exported graph, run by libtorch's interpreter.
//!
//! It serves a program whose artifact does not load or was never made. The archive holds no weights: they are passed
//! as inputs, so they are those every other program uses. It is read and loaded when the first call needs it.

use std::sync::{Arc, Mutex, PoisonError};

use super::{
    RuntimeError,
    ffi::{Handle, Interpreter, Weight},
    lane::Handles,
    program::in_store,
    source::Source,
    weights::Weights,
};
use crate::{
    Digest,
    record::{Artifact, Program},
};

pub(super) struct Eager {
    program: Arc<Program>,
    module: Arc<str>,
    archive: Artifact,
    aliases: Arc<std::collections::BTreeMap<String, String>>,
    source: Arc<dyn Source>,
    /// Loaded on first use. One call at a time.
    interpreter: Mutex<Option<Interpreter>>,
    bound: Mutex<Arc<Bound>>,
}

struct Bound {
    weights: Arc<Weights>,
    tensors: Vec<Arc<Weight>>,
}

impl Eager {
    /// Reads the archive's record and binds its weights; the archive itself is left for the first call.
    pub fn new(
        source: &Arc<dyn Source>,
        program: &Arc<Program>,
        key: &Digest,
        weights: Arc<Weights>,
        aliases: Arc<std::collections::BTreeMap<String, String>>,
    ) -> Result<Self, RuntimeError> {
        let archive = source
            .artifact(key)
            .map_err(in_store(format!("artifact `{}`", key.short())))?;
        let bound = Mutex::new(bind(&archive, weights, &aliases)?);
        let module = program.module.as_str().into();
        let (program, source, interpreter) = (program.clone(), source.clone(), Mutex::new(None));
        Ok(Self {
            program,
            module,
            archive,
            aliases,
            source,
            interpreter,
            bound,
        })
    }

    /// Makes every call that begins from now on use `weights`.
    pub fn swap(&self, weights: Arc<Weights>) -> Result<(), RuntimeError> {
        *self.bound.lock().unwrap_or_else(PoisonError::into_inner) =
            bind(&self.archive, weights, &self.aliases)?;
        Ok(())
    }

    /// Finds out whether `weights` can be bound.
    pub fn accepts(&self, weights: Arc<Weights>) -> Result<(), RuntimeError> {
        bind(&self.archive, weights, &self.aliases).map(drop)
    }

    /// Runs it on inputs of the bucket's sizes. Returns the outputs and the weights they were made with.
    pub fn run(&self, inputs: &Handles) -> Result<(Handles, Arc<Weights>), RuntimeError> {
        let failed = |message| RuntimeError::Failed {
            module: self.module.clone(),
            bucket: crate::record::bucket_name(&self.program.sizes),
            step: "eager".to_owned(),
            message,
        };
        let bound = self
            .bound
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut interpreter = self
            .interpreter
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let interpreter = match &mut *interpreter {
            Some(interpreter) => interpreter,
            none => {
                let object = &self.archive.object;
                let file = self
                    .source
                    .memfd(object)
                    .map_err(in_store(format!("object `{}`", object.short())))?;
                none.insert(Interpreter::new(file).map_err(failed)?)
            }
        };
        let weights = bound.tensors.iter().map(|weight| weight.handle());
        let flat: Vec<&Handle> = inputs.iter().chain(weights).collect();
        let outputs = interpreter
            .run(&flat, self.program.outputs.len())
            .map_err(failed)?;
        Ok((outputs, bound.weights.clone()))
    }
}

fn bind(
    archive: &Artifact,
    weights: Arc<Weights>,
    aliases: &std::collections::BTreeMap<String, String>,
) -> Result<Arc<Bound>, RuntimeError> {
    let find = |constant: &crate::record::Constant| {
        weights
            .get(&constant.name, aliases, &constant.layout)
            .map_err(|reason| RuntimeError::Unbound {
                artifact: archive.id,
                constant: constant.name.clone(),
                reason,
            })
    };
    let tensors = archive
        .constants
        .iter()
        .map(find)
        .collect::<Result<_, _>>()?;
    Ok(Arc::new(Bound { weights, tensors }))
}
