//! Reads eager's list of operator calls, the JSON of the worker's `eager.py`.

use precast_store::Device;
use serde::Deserialize;
use serde_json::Value as Json;

use super::{
    TorchError,
    ffi::{Calls, CallsBuilder, Given, Item, Kept},
};

/// The version of the format.
const FORMAT: u32 = 1;

#[derive(Deserialize)]
struct Format {
    format: u32,
}

#[derive(Deserialize)]
struct CallGraph {
    inputs: usize,
    calls: Vec<CallRecord>,
    outputs: Vec<i64>,
}

#[derive(Deserialize)]
struct CallRecord {
    op: String,
    args: serde_json::Map<String, Json>,
    results: Vec<Json>,
    /// The two graphs of a `cond`.
    #[serde(default)]
    graphs: Vec<CallGraph>,
}

/// Reads a list and resolves its operators, whose libraries are loaded. If an operator is not registered or has another
/// schema, fails with the name of the call.
pub(super) fn read(bytes: &[u8], device: Device) -> Result<Calls, TorchError> {
    let broken = |error| format!("its list of calls is not one that this version reads: {error}");
    let Format { format } = serde_json::from_slice(bytes).map_err(broken)?;
    if format != FORMAT {
        return Err(format!(
            "its list of calls has format {format}, this version reads format {FORMAT}"
        )
        .into());
    }
    build(serde_json::from_slice(bytes).map_err(broken)?, device)
}

fn build(graph: CallGraph, device: Device) -> Result<Calls, TorchError> {
    let mut calls = CallsBuilder::new(device, graph.inputs)?;
    for call in graph.calls {
        let name = call.op.clone();
        add(&mut calls, call, device).map_err(|error| error.at(&format!("operator `{name}`")))?;
    }
    calls.finish(&graph.outputs)
}

fn add(calls: &mut CallsBuilder, call: CallRecord, device: Device) -> Result<(), TorchError> {
    let mut given = Vec::with_capacity(call.args.len());
    for (name, value) in &call.args {
        given.push(argument(name, value)?);
    }
    let kept = call.results.iter().map(kept).collect::<Option<Vec<_>>>();
    let kept = kept.ok_or("its results are no numbers")?;
    if call.op != "cond" {
        return calls.add(&call.op, &given, &kept);
    }
    // The names of its arguments are their positions, which a map has sorted as text.
    given.sort_by_key(|one| one.name.parse::<usize>().unwrap_or(usize::MAX));
    let branches = call.graphs.into_iter().map(|graph| build(graph, device));
    let branches: Vec<Calls> = branches.collect::<Result<_, _>>()?;
    let branches = <[Calls; 2]>::try_from(branches);
    let branches = branches.map_err(|graphs| format!("it has {} graphs, not 2", graphs.len()))?;
    calls.add_cond(branches, &given, &kept)
}

fn argument(name: &str, value: &Json) -> Result<Given, TorchError> {
    let items: Option<Vec<Item>> = match value {
        Json::Array(list) => list.iter().map(item).collect(),
        one => item(one).map(|one| vec![one]),
    };
    Ok(Given {
        name: name.to_owned(),
        is_list: value.is_array(),
        items: items
            .ok_or_else(|| format!("argument `{name}`: this version can't read {value}"))?,
    })
}

fn item(value: &Json) -> Option<Item> {
    let float = |value: &Json| value.as_str()?.parse::<f64>().ok();
    Some(match value {
        Json::Null => Item::None,
        Json::Bool(value) => Item::Bool(*value),
        Json::Number(number) => Item::Int(number.as_i64()?),
        Json::String(text) => Item::Text(text.clone()),
        Json::Array(_) => return None,
        Json::Object(tagged) => {
            let (kind, value) = tagged.iter().next().filter(|_| tagged.len() == 1)?;
            match kind.as_str() {
                "value" => Item::Value(value.as_i64()?),
                "float" => Item::Float(float(value)?),
                "complex" => match value.as_array()?.as_slice() {
                    [real, imaginary] => Item::Complex(float(real)?, float(imaginary)?),
                    _ => return None,
                },
                "dtype" => Item::ScalarType(value.as_i64()?),
                "layout" => Item::Layout(value.as_i64()?),
                "memory_format" => Item::MemoryFormat(value.as_i64()?),
                "device" => Item::Device(value.as_str()?.to_owned()),
                _ => return None,
            }
        }
    })
}

fn kept(result: &Json) -> Option<Kept> {
    let one = |value: &Json| match value {
        Json::Null => Some(None),
        value => Some(Some(value.as_i64().filter(|number| *number >= 0)?)),
    };
    Some(match result {
        Json::Array(list) => Kept::List(list.iter().map(one).collect::<Option<_>>()?),
        value => Kept::One(one(value)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::Handle;
    use precast_store::record::Dtype;

    fn run(text: &str, inputs: &[Handle], outputs: usize) -> Vec<Handle> {
        let inputs: Vec<&Handle> = inputs.iter().collect();
        let mut calls = read(text.as_bytes(), Device::Cpu).unwrap();
        calls.invoke(&inputs, outputs).unwrap().into_vec()
    }

    fn floats(data: &[f32], shape: &[i64]) -> Handle {
        Handle::of(data, shape, Dtype::Float32).unwrap()
    }

    #[test]
    fn arguments_of_each_kind_arrive() {
        let x = floats(&[1.0, -2.0, 3.0, 4.0], &[2, 2]);
        let text = r#"{"format": 1, "inputs": 1, "outputs": [3, 6, 7], "calls": [
            {"op": "aten::sym_size.int", "args": {"self": {"value": 0}, "dim": 1}, "results": [1]},
            {"op": "number::mul", "args": {"1": 2, "0": {"value": 1}}, "results": [2]},
            {"op": "aten::reshape", "args": {"self": {"value": 0}, "shape": [{"value": 2}]}, "results": [3]},
            {"op": "aten::split.Tensor", "args": {"self": {"value": 0}, "split_size": 1}, "results": [[4, null]]},
            {"op": "aten::native_layer_norm", "args": {"input": {"value": 4}, "normalized_shape": [2], "weight": null,
                "bias": null, "eps": {"float": "1e-5"}}, "results": [null, 5, null]},
            {"op": "aten::to.dtype", "args": {"self": {"value": 5}, "dtype": {"dtype": 8}}, "results": [6]},
            {"op": "aten::full", "args": {"size": [2], "fill_value": {"float": "-inf"}, "device": {"device": "cpu"},
                "layout": {"layout": 7}, "pin_memory": false}, "results": [7]}]}"#;
        let made = run(text, &[x], 3);
        assert_eq!(made[0].meta().sizes(), [4]);
        // The mean of the first row, in float64.
        assert_eq!(made[1].meta().dtype(), Some(Dtype::Float64));
        assert_eq!(made[1].read::<f64>().unwrap(), [-0.5]);
        assert_eq!(made[2].read::<f32>().unwrap(), [f32::NEG_INFINITY; 2]);
    }

    #[test]
    fn a_branch_is_chosen() {
        let branch = |alpha: i64| {
            format!(
                r#"{{"inputs": 1, "outputs": [1], "calls": [{{"op": "aten::add.Scalar", "args": {{"self": {{"value": 0}}, "other": {alpha}}}, "results": [1]}}]}}"#
            )
        };
        let text = format!(
            r#"{{"format": 1, "inputs": 2, "outputs": [2], "calls": [{{"op": "cond", "args": {{"1": {{"value": 1}}, "0": {{"value": 0}}}},
                "graphs": [{}, {}], "results": [2]}}]}}"#,
            branch(10),
            branch(-10)
        );
        for (chosen, wanted) in [(1.0, 11.0), (0.0, -9.0)] {
            let made = run(&text, &[floats(&[chosen], &[]), floats(&[1.0], &[])], 1);
            assert_eq!(made[0].read::<f32>().unwrap(), [wanted]);
        }
    }

    #[test]
    fn what_can_not_be_read_is_named() {
        let told = |text: &str| {
            let error = read(text.as_bytes(), Device::Cpu).err().unwrap();
            error.to_string()
        };
        let call = |call: &str| {
            told(&format!(
                r#"{{"format": 1, "inputs": 1, "outputs": [0], "calls": [{call}]}}"#
            ))
        };
        insta::assert_snapshot!(told(r#"{"format": 2, "calls": {}}"#), @"its list of calls has format 2, this version reads format 1");
        assert!(told("no JSON").contains("is not one that this version reads: expected"));
        insta::assert_snapshot!(call(r#"{"op": "lab::none", "args": {}, "results": []}"#), @"operator `lab::none`: no loaded library registers it");
        insta::assert_snapshot!(call(r#"{"op": "aten::relu", "args": {"self": {"object": 1}}, "results": [1]}"#), @r#"operator `aten::relu`: argument `self`: this version can't read {"object":1}"#);
        insta::assert_snapshot!(call(r#"{"op": "aten::relu", "args": {"self": {"value": 0}}, "results": [-4]}"#), @"operator `aten::relu`: its results are no numbers");
        insta::assert_snapshot!(call(r#"{"op": "cond", "args": {}, "results": []}"#), @"operator `cond`: it has 0 graphs, not 2");
        insta::assert_snapshot!(call(r#"{"op": "aten::relu", "args": {"self": {"value": 7}}, "results": [1]}"#), @"operator `aten::relu`: argument `self`: value 7 is not made before it is read");
    }
}
