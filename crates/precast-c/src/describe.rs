//! Modules of a model, with their inputs, outputs and buckets, as structures for C.

use std::{collections::BTreeMap, ffi::c_char, ptr};

use precast_runtime::{Model, dlpack::DLDataType};
use precast_store::record::{Bounds, Layout, Program};

use crate::kept::Kept;

/// A module of a model. Later versions may append fields.
///
/// A module that can be called with different sets of inputs has one structure for each.
#[repr(C)]
pub struct Module {
    /// The name of the module.
    name: *const c_char,
    /// The number of inputs.
    input_count: usize,
    /// The inputs, in the order of a call without names.
    inputs: *const *const TensorInfo,
    /// The number of outputs.
    output_count: usize,
    /// The outputs, in the order of precast_outputs.
    outputs: *const *const TensorInfo,
    /// The number of dimensions whose size varies.
    dim_count: usize,
    /// The names of these dimensions.
    dims: *const *const c_char,
    /// The number of buckets.
    bucket_count: usize,
    /// The buckets, the smallest first; programs for many sizes come last.
    buckets: *const *const Bucket,
    /// 1 if the module keeps states from call to call: it is called in a session. 0 if not.
    has_state: i32,
}

/// An input or an output of a module. Later versions may append fields.
#[repr(C)]
pub struct TensorInfo {
    /// The name of the tensor.
    name: *const c_char,
    /// The type of its elements.
    dtype: DLDataType,
    /// The number of axes.
    ndim: i32,
    /// The size of each axis; -1 where it varies.
    shape: *const i64,
    /// The name of the dimension that the size of each axis depends on; NULL where it does not vary.
    dims: *const *const c_char,
}

/// The sizes that one program answers. Later versions may append fields.
#[repr(C)]
pub struct Bucket {
    /// The smallest size of each dimension, in the order of the module's dimensions.
    min: *const i64,
    /// The largest size of each dimension; INT64_MAX where only the model limits it. Smaller requests are padded,
    /// except in programs for many sizes.
    max: *const i64,
}

/// The structures of a model, and the owner of their memory.
pub struct Described {
    pub modules: Vec<Module>,
    _kept: Kept,
}

impl Described {
    pub fn of(model: &Model) -> Self {
        let mut kept = Kept::default();
        let mut modules = Vec::new();
        for name in model.modules() {
            let mut variants: Vec<Vec<&Program>> = Vec::new();
            for program in model.programs(name) {
                let variant = variants.iter_mut().find(|known| same(known[0], program));
                match variant {
                    Some(known) => known.push(program),
                    None => variants.push(vec![program]),
                }
            }
            modules.extend(variants.iter().map(|programs| module(&mut kept, programs)));
        }
        Self {
            modules,
            _kept: kept,
        }
    }
}

/// Returns whether two programs of a module take the same inputs.
fn same(a: &Program, b: &Program) -> bool {
    let names = |program: &Program| -> Vec<String> {
        program
            .inputs
            .iter()
            .map(|input| input.name.clone())
            .collect()
    };
    a.sizes.keys().eq(b.sizes.keys()) && names(a) == names(b)
}

/// Returns the structure of programs that take the same inputs.
fn module(kept: &mut Kept, programs: &[&Program]) -> Module {
    let first = programs[0];
    let inputs = first.inputs.iter().map(|input| {
        let dims = input.dims.iter().map(Option::as_deref).collect();
        info(kept, &input.name, &input.layout, dims)
    });
    let inputs: Vec<_> = inputs.collect();
    let outputs = first.outputs.iter().map(|output| {
        let dims = output.dims.iter();
        let dims = dims.map(|follow| follow.as_ref().map(|follow| &*follow.dim));
        info(kept, &output.name, &output.layout, dims.collect())
    });
    let outputs: Vec<_> = outputs.collect();
    let dims: Vec<_> = first.sizes.keys().map(|dim| kept.text(dim)).collect();
    let mut programs = programs.to_vec();
    programs.sort_by_key(|program| {
        (
            program.dynamic.is_some(),
            program.sizes.values().copied().collect::<Vec<_>>(),
        )
    });
    let buckets = programs.iter().map(|program| bucket(kept, program));
    let buckets: Vec<_> = buckets.collect();
    Module {
        name: kept.text(&first.module),
        input_count: inputs.len(),
        inputs: kept.array(inputs),
        output_count: outputs.len(),
        outputs: kept.array(outputs),
        dim_count: dims.len(),
        dims: kept.array(dims),
        bucket_count: buckets.len(),
        buckets: kept.array(buckets),
        has_state: programs
            .iter()
            .any(|program| !program.states.is_empty())
            .into(),
    }
}

fn info(
    kept: &mut Kept,
    name: &str,
    layout: &Layout,
    dims: Vec<Option<&str>>,
) -> *const TensorInfo {
    let shape = layout.shape.iter().zip(&dims);
    let shape: Vec<i64> = shape.map(|(&size, dim)| dim.map_or(size, |_| -1)).collect();
    let names = dims
        .iter()
        .map(|dim| dim.map_or(ptr::null(), |dim| kept.text(dim)));
    let names: Vec<_> = names.collect();
    let structure = TensorInfo {
        name: kept.text(name),
        dtype: layout.dtype.into(),
        // A tensor of libtorch has at most 64 axes.
        ndim: shape.len() as i32,
        shape: kept.array(shape),
        dims: kept.array(names),
    };
    kept.one(structure)
}

fn bucket(kept: &mut Kept, program: &Program) -> *const Bucket {
    let none = BTreeMap::new();
    let dynamic = program.dynamic.as_ref().unwrap_or(&none);
    let bounds = program.sizes.iter().map(|(dim, &size)| {
        let padded = program.dynamic.is_none() && program.padding.allows(dim);
        let min = if padded { 1 } else { size };
        dynamic
            .get(dim)
            .copied()
            .unwrap_or(Bounds { min, max: size })
    });
    let bounds: Vec<Bounds> = bounds.collect();
    let min = kept.array(bounds.iter().map(|bounds| bounds.min).collect());
    let max = kept.array(bounds.iter().map(|bounds| bounds.max).collect());
    kept.one(Bucket { min, max })
}
