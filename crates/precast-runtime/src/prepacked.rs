//! Prepacked constants: computed when weights are bound, once for each weight set.
//!
//! An artifact may need a weight in another form: a matrix in the order of oneDNN's kernels, or a filter multiplied by
//! the following batch norm. Its record has the recipe, as calls of torch's operators on constants
//! ([`precast_store::record::Prepared`]), and the first program that needs the result runs it. The result is kept with
//! the weight set, under the recipe and the names of its tensors: buckets, steps and slots share it, another weight set
//! has a separate one, and it is dropped with its weights.
//!
//! Recipes run in sequence, with all threads that an operator may use: the order that oneDNN chooses for a filter
//! depends on their number, and in the order for one thread a call took twice as long on four.
//!
//! A recipe calls only operators of torch itself that write nothing: weights are mapped read-only.
//!
//! On the CPU, results of [`KEPT`] bytes and more are kept in the store ([`precast_store::Prepacked`]), for this kind of
//! machine, and mapped: later processes compute nothing, and share the pages. Where the store can't be written each process
//! has its own. The original weights are the mapped object; the pages that a recipe read are given back, since nothing
//! reads them again. On a device, concatenated matrices are views ([`super::packing`]), and filters take their
//! memory twice.

use std::{collections::BTreeMap, sync::Arc};

use precast_store::{
    Digest, Target, canon,
    record::{Artifact, Layout, Operand, Prepared, Recipe},
};
use serde_json::json;

use super::{
    TorchError,
    ffi::{Call, Handle, Meta, OperatorArgument, Operators, Weight, threads},
    layout::{bytes_of, same_strides},
    packing,
    weights::Weights,
};

/// The operators that a recipe may call: libtorch registers them itself.
const NAMESPACES: [&str; 3] = ["aten", "mkldnn", "onednn"];

/// Bytes from which a result is kept in a file.
const KEPT: usize = 1 << 20;

/// The constants of one step.
pub(super) struct Bound<'a> {
    pub weights: &'a Weights,
    /// Tensors that the program's code creates.
    pub extras: Option<&'a Weights>,
    pub aliases: &'a BTreeMap<String, String>,
    pub artifact: &'a Artifact,
    pub binding: &'a BTreeMap<String, String>,
    pub host: &'a Target,
}

impl Bound<'_> {
    /// Returns the layout of a constant in the artifact's record.
    pub fn layout(&self, constant: &str) -> Result<&Layout, TorchError> {
        let mut known = self.artifact.constants.iter();
        let found = known.find(|known| known.name == constant);
        let found = found.ok_or("the artifact's record does not have it")?;
        Ok(&found.layout)
    }

    /// Returns the tensor that is bound to a constant.
    pub fn weight(&self, constant: &str, keep: bool) -> Result<Arc<Weight>, TorchError> {
        let layout = self.layout(constant)?;
        let (set, name) = self.place(constant)?;
        set.get(name, self.aliases, layout, keep)
    }

    /// Returns the result of a recipe, which is followed unless the weight set has the result.
    pub fn prepared(&self, wanted: &Prepared) -> Result<Arc<Weight>, TorchError> {
        let mut call = wanted.call.clone();
        self.rename(&mut call)?;
        let key = serde_json::to_string(&call).map_err(|error| error.to_string())?;
        let bytes = bytes_of(&wanted.shape, wanted.dtype);
        let kept = (bytes >= KEPT).then(|| kept_key(&call, self.host));
        let result = self.weights.get_or_compute(key, || {
            if let Some(weight) = (kept.as_ref()).and_then(|key| self.weights.kept(key, wanted)) {
                return Ok((weight, bytes));
            }
            let mut of = Vec::new();
            let handle = self.make(&wanted.call, &mut of)?;
            let read = of.clone();
            // Most results are copies; a view needs the viewed tensors.
            let viewed = |weight: &Arc<Weight>| {
                let (result, of) = (handle.meta(), weight.handle().meta());
                result.dense() && result.storage() == of.storage()
            };
            of.retain(viewed);
            if !of.is_empty() {
                return Ok((Weight::derived(handle, of), 0));
            }
            let file = kept.and_then(|key| self.weights.keep(&key, wanted, &handle));
            if file.is_some() {
                read.iter().for_each(|weight| weight.release());
            }
            Ok((file.unwrap_or_else(|| Weight::owned(handle)), bytes))
        })?;
        check(&result.handle().meta(), wanted)?;
        Ok(result)
    }

    fn place(&self, constant: &str) -> Result<(&Weights, &str), TorchError> {
        let name = self.binding.get(constant);
        let name = name.ok_or("the program's binding does not name it")?;
        let set = match self.extras {
            Some(extras) if !self.weights.has(name, self.aliases) => extras,
            _ => self.weights,
        };
        Ok((set, set.own_name(name, self.aliases)))
    }

    /// Replaces names of constants by the names and layouts of their tensors.
    fn rename(&self, call: &mut Recipe) -> Result<(), TorchError> {
        let mut operands = call.arguments.iter_mut();
        operands.try_for_each(|(_, operand)| self.rename_in(operand))
    }

    fn rename_in(&self, operand: &mut Operand) -> Result<(), TorchError> {
        match operand {
            Operand::Constant(name) => {
                let layout = self.layout(name);
                let renamed = layout.and_then(|layout| {
                    let (_, own) = self.place(name)?;
                    let Layout {
                        dtype,
                        shape,
                        stride,
                    } = layout;
                    Ok(format!("{own} {dtype} {shape:?} {stride:?}"))
                });
                *name = renamed.map_err(|error| error.at(&format!("`{name}`")))?;
                Ok(())
            }
            Operand::Call(call) => self.rename(call),
            Operand::Tensors(list) => list.iter_mut().try_for_each(|one| self.rename_in(one)),
            _ => Ok(()),
        }
    }

    /// Runs a call after the calls that it needs. `of` receives the tensors of its constants.
    fn make(&self, call: &Recipe, of: &mut Vec<Arc<Weight>>) -> Result<Handle, TorchError> {
        let known = call.operator.split_once("::");
        if !known.is_some_and(|(space, _)| NAMESPACES.contains(&space)) {
            return Err(format!(
                "operator `{}`: a recipe calls only torch's own",
                call.operator
            )
            .into());
        }
        let (mut ints, mut tensors, mut arguments) = (Vec::new(), Vec::new(), Vec::new());
        for (name, operand) in &call.arguments {
            let value = match operand {
                Operand::Constant(_) | Operand::Call(_) => {
                    tensors.push(self.tensor(operand, of)?);
                    OperatorArgument::Tensor
                }
                Operand::Tensors(list) => {
                    for operand in list {
                        tensors.push(self.tensor(operand, of)?);
                    }
                    OperatorArgument::Tensors(list.len())
                }
                Operand::None(()) => OperatorArgument::None,
                Operand::Bool(value) => OperatorArgument::Bool(*value),
                Operand::Int(value) => {
                    ints.push(*value);
                    OperatorArgument::Int
                }
                Operand::Ints(values) => {
                    ints.extend(values);
                    OperatorArgument::Ints(values.len())
                }
                Operand::Float(value) => OperatorArgument::Float(*value),
                Operand::ScalarType(number) => OperatorArgument::ScalarType(*number),
                Operand::MemoryFormat(number) => OperatorArgument::MemoryFormat(*number),
            };
            arguments.push((name.clone(), value));
        }
        if let Some(view) = packing::as_one(call, &tensors) {
            return Ok(view);
        }
        let (name, overload) = call
            .operator
            .split_once('.')
            .unwrap_or((&call.operator, ""));
        let operator = Call {
            name: name.to_owned(),
            overload: overload.to_owned(),
            arguments,
        };
        Operators::new(&[operator], self.weights.device())?
            .call(&ints, &tensors)
            .map_err(|error| error.at(&format!("operator `{}`", call.operator)))
    }

    fn tensor(&self, operand: &Operand, of: &mut Vec<Arc<Weight>>) -> Result<Handle, TorchError> {
        match operand {
            Operand::Call(call) => self.make(call, of),
            Operand::Constant(name) => {
                let weight = self.weight(name, false)?;
                let handle = weight.handle().share();
                of.push(weight);
                Ok(handle)
            }
            other => Err(format!("{other:?} is no tensor").into()),
        }
    }
}

/// Returns the key of a file for the result of a recipe. oneDNN chooses an order by the instructions of the machine and by
/// the number of threads, and torch's version is that of oneDNN.
fn kept_key(call: &Recipe, host: &Target) -> Digest {
    canon::digest(&json!({
        "kind": "prepacked",
        "call": call,
        "host": canon::target(host),
        "threads": threads(),
    }))
}

/// Returns an error if a result does not have the form that the artifact was compiled for.
fn check(result: &Meta<'_>, wanted: &Prepared) -> Result<(), TorchError> {
    let right = match &wanted.stride {
        // Only its operators can read the data, and check it.
        None => !result.dense(),
        Some(stride) => {
            result.dense()
                && result.sizes() == wanted.shape
                && same_strides(&wanted.shape, result.strides(), stride)
        }
    };
    if right && result.dtype() == Some(wanted.dtype) {
        return Ok(());
    }
    let (dtype, shape) = (wanted.dtype, &wanted.shape);
    Err(
        format!("its recipe does not give {dtype} {shape:?} in the order it was compiled for")
            .into(),
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_worker_has_the_same_namespaces() {
        let worker = include_str!("../../precast-builder/worker/passes/prepacked.py");
        let mut lines = worker.lines();
        let theirs = lines.find_map(|line| line.strip_prefix("_NAMESPACES = "));
        let names = theirs.unwrap().split('"').skip(1).step_by(2);
        assert_eq!(names.collect::<Vec<_>>(), super::NAMESPACES);
    }
}
