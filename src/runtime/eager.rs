//! The last rung of the ladder: a program's exported graph, run by libtorch's interpreter.
//!
//! It serves a program whose artifact does not load or was never made. The archive holds no weights: they are passed
//! as inputs, so they are those every other program uses. It is read and loaded when the first call needs it.

use std::sync::{Arc, Mutex, PoisonError};

use super::{
    RuntimeError,
    ffi::{Handle, Interpreter, Weight},
    lane::Handles,
    operators,
    program::in_store,
    source::Source,
    weights::Weights,
};
use crate::{
    Device, Digest,
    record::{Eager as Archive, Program},
};

type Aliases = std::collections::BTreeMap<String, String>;

pub(super) struct Eager {
    program: Arc<Program>,
    module: Arc<str>,
    archive: Archive,
    aliases: Arc<Aliases>,
    extras: Option<Arc<Weights>>,
    object: Digest,
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
        archive: &Archive,
        device: Device,
        weights: Arc<Weights>,
        aliases: Arc<Aliases>,
        extras: Option<Arc<Weights>>,
    ) -> Result<Self, RuntimeError> {
        let key = archive.artifact;
        let record = source
            .artifact(&key)
            .map_err(in_store(format!("artifact `{}`", key.short())))?;
        operators::prepare(source, &record, device)?;
        let object = record.object;
        let module = program.module.as_str().into();
        let bound = bind(archive, weights, &aliases, extras.as_deref())?;
        Ok(Self {
            program: program.clone(),
            module,
            archive: archive.clone(),
            object,
            aliases,
            extras,
            source: source.clone(),
            interpreter: Mutex::new(None),
            bound: Mutex::new(bound),
        })
    }

    /// Makes every call that begins from now on use `weights`.
    pub fn swap(&self, weights: Arc<Weights>) -> Result<(), RuntimeError> {
        *self.bound.lock().unwrap_or_else(PoisonError::into_inner) = bind(
            &self.archive,
            weights,
            &self.aliases,
            self.extras.as_deref(),
        )?;
        Ok(())
    }

    /// Finds out whether `weights` can be bound.
    pub fn accepts(&self, weights: Arc<Weights>) -> Result<(), RuntimeError> {
        bind(
            &self.archive,
            weights,
            &self.aliases,
            self.extras.as_deref(),
        )
        .map(drop)
    }

    /// Runs it on inputs of the bucket's sizes. Returns the outputs and the weights they were made with.
    pub fn run(&self, inputs: &Handles) -> Result<(Handles, Arc<Weights>), RuntimeError> {
        let failed = |message| RuntimeError::Failed {
            module: self.module.clone(),
            bucket: self.program.bucket(),
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
                let object = &self.object;
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
    archive: &Archive,
    weights: Arc<Weights>,
    aliases: &Aliases,
    extras: Option<&Weights>,
) -> Result<Arc<Bound>, RuntimeError> {
    let find = |name: &String| {
        let found = weights
            .any(name, aliases)
            .or_else(|| extras?.any(name, aliases));
        found.ok_or_else(|| RuntimeError::Unbound {
            artifact: archive.artifact,
            constant: name.clone(),
            reason: format!("the weight set has no tensor `{name}`"),
        })
    };
    let tensors = archive.weights.iter().map(find).collect::<Result<_, _>>()?;
    Ok(Arc::new(Bound { weights, tensors }))
}
