//! Custom operators: the libraries that register them, and the description of an artifact's calls.
//!
//! An artifact calls an operator that has no C entry point by its number in a JSON description, which is an object of
//! the store like the operator's library. Both are verified like all executed code: the library is loaded from the
//! sealed memory in which it was hashed, once per digest and process, before the artifact; the description has the
//! operators and their arguments.
//!
//! libtorch ends the process when a second library registers an operator. So a library is not loaded if another one has
//! registered its operators: that is an error of the artifact, and the ladder answers.

use std::sync::Arc;

use memchr::memmem;
use precast_store::{Device, Digest, Mapped, record::Artifact};
use serde_json::Value as Json;

use super::{
    RuntimeError, TorchError,
    ffi::{Call, Libraries, OperatorArgument, Operators, registered, sealed_bytes},
    source::Source,
};

/// Loads an artifact's operator libraries and resolves its calls; none for an artifact without.
pub(super) fn prepare(
    source: &Arc<dyn Source>,
    artifact: &Artifact,
    device: Device,
) -> Result<Option<Arc<Operators>>, RuntimeError> {
    let refused = |reason| RuntimeError::Operators {
        artifact: artifact.id,
        reason,
    };
    let calls = match &artifact.proxy {
        Some(description) => {
            calls(&read(source, description)?).map_err(|reason| refused(reason.into()))?
        }
        None => Vec::new(),
    };
    if !artifact.libraries.is_empty() {
        let mut loading = Libraries::begin();
        if !artifact
            .libraries
            .iter()
            .any(|library| loading.has(library))
        {
            unclaimed(source, artifact)?.map_err(refused)?;
        }
        for library in &artifact.libraries {
            if !loading.has(library) {
                loading.load(library, file(source, library)?)?;
            }
        }
    }
    if artifact.proxy.is_none() {
        return Ok(None);
    }
    let operators = Operators::new(&calls, device).map_err(refused)?;
    Ok(Some(Arc::new(operators)))
}

/// Fails if an artifact's library seems to register an operator that the process has from another library.
///
/// A library contains the names of the operators that it registers. A library that only extends operators of another
/// one is recognised by its symbols, unless they were stripped.
fn unclaimed(
    source: &Arc<dyn Source>,
    artifact: &Artifact,
) -> Result<Result<(), TorchError>, RuntimeError> {
    let taken = match registered() {
        Ok(names) => names,
        Err(reason) => return Ok(Err(reason)),
    };
    let foreign = taken
        .iter()
        .filter_map(|full| {
            full.split_once("::")
                .map(|(space, name)| (full, space, name))
        })
        .filter(|(_, space, _)| !TORCHS_OWN.contains(space));
    let foreign: Vec<_> = foreign.collect();
    if foreign.is_empty() {
        return Ok(Ok(()));
    }
    for library in &artifact.libraries {
        let bytes = read(source, library)?;
        let has = |text: &str| memmem::find(&bytes, text.as_bytes()).is_some();
        let owns = has("TORCH_LIBRARY_init_");
        if !owns && (has("TORCH_LIBRARY_FRAGMENT_init_") || has("TORCH_LIBRARY_IMPL_init_")) {
            continue;
        }
        let twice = foreign
            .iter()
            .find(|(_, space, name)| has(space) && has(name));
        if let Some((full, ..)) = twice {
            let reason = format!(
                "operator `{full}` is registered in this process already, by another library"
            );
            return Ok(Err(TorchError::Registered(reason.into())));
        }
    }
    Ok(Ok(()))
}

/// Namespaces that libtorch itself registers.
const TORCHS_OWN: &[&str] = &[
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "_quantized",
    "_test",
    "aten",
    "c10d",
    "inductor",
    "mkl",
    "mkldnn",
    "mkldnn_prepacked",
    "onednn",
    "prepacked",
    "prim",
    "prims",
    "profiler",
    "quantization",
    "quantized",
    "sparse",
    "static_runtime",
    "symm_mem",
];

fn file(source: &Arc<dyn Source>, object: &Digest) -> Result<std::fs::File, RuntimeError> {
    let object = *object;
    let unreadable = |source| RuntimeError::Unreadable { object, source };
    source.memfd(&object).map_err(unreadable)
}

/// Returns an object's bytes, verified.
pub(super) fn read(source: &Arc<dyn Source>, object: &Digest) -> Result<Mapped, RuntimeError> {
    sealed_bytes(object, &file(source, object)?)
}

/// Reads torch's description of an artifact's calls (`ExternKernelNodes` of torch/_export/serde/schema.py).
fn calls(description: &[u8]) -> Result<Vec<Call>, String> {
    let parsed: Json = serde_json::from_slice(description)
        .map_err(|error| format!("their description is no JSON: {error}"))?;
    let nodes = parsed["nodes"]
        .as_array()
        .ok_or("their description has no `nodes`")?;
    nodes.iter().map(|node| call(&node["node"])).collect()
}

fn call(node: &Json) -> Result<Call, String> {
    let target = node["target"]
        .as_str()
        .ok_or("an operator call has no `target`")?;
    let (name, overload) = target.split_once('.').unwrap_or((target, ""));
    let mut arguments = Vec::new();
    for argument in node["inputs"].as_array().into_iter().flatten() {
        let name = argument["name"].as_str().unwrap_or_default();
        let one = argument["arg"]
            .as_object()
            .and_then(|arg| arg.iter().next());
        let value = one.and_then(|(kind, value)| self::value(kind, value));
        let value = value.ok_or_else(|| {
            let kind = one.map_or("nothing", |(kind, _)| kind.trim_start_matches("as_"));
            format!(
                "operator `{target}`: argument `{name}` is {kind}, which an artifact can't pass"
            )
        })?;
        arguments.push((name.to_owned(), value));
    }
    Ok(Call {
        name: name.to_owned(),
        overload: overload.to_owned(),
        arguments,
    })
}

fn value(kind: &str, value: &Json) -> Option<OperatorArgument> {
    let list = || value.as_array();
    Some(match kind {
        "as_none" => OperatorArgument::None,
        "as_tensor" => OperatorArgument::Tensor,
        "as_tensors" => OperatorArgument::Tensors(list()?.len()),
        "as_optional_tensor" => match value.get("as_tensor") {
            Some(_) => OperatorArgument::Tensor,
            None => OperatorArgument::None,
        },
        "as_optional_tensors" => {
            let there = list()?.iter().map(|one| one.get("as_tensor").is_some());
            OperatorArgument::OptionalTensors(there.collect())
        }
        "as_int" | "as_sym_int" => OperatorArgument::Int,
        "as_ints" | "as_sym_ints" => OperatorArgument::Ints(list()?.len()),
        "as_float" => OperatorArgument::Float(float(value)?),
        "as_floats" => OperatorArgument::Floats(list()?.iter().map(float).collect::<Option<_>>()?),
        "as_bool" => OperatorArgument::Bool(value.as_bool()?),
        "as_bools" => {
            OperatorArgument::Bools(list()?.iter().map(Json::as_bool).collect::<Option<_>>()?)
        }
        "as_string" => OperatorArgument::String(value.as_str()?.to_owned()),
        "as_scalar_type" => OperatorArgument::ScalarType(value.as_i64()?),
        "as_layout" => OperatorArgument::Layout(value.as_i64()?),
        "as_memory_format" => OperatorArgument::MemoryFormat(value.as_i64()?),
        "as_device" => {
            let name = value["type"].as_str()?;
            OperatorArgument::Device(match value["index"].as_i64() {
                Some(index) => format!("{name}:{index}"),
                None => name.to_owned(),
            })
        }
        _ => return None,
    })
}

/// JSON has no infinities; torch writes them as text.
fn float(value: &Json) -> Option<f64> {
    match value.as_str() {
        Some("Infinity") => Some(f64::INFINITY),
        Some("-Infinity") => Some(f64::NEG_INFINITY),
        Some("NaN") => Some(f64::NAN),
        Some(_) => None,
        None => value.as_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_says_what_is_fixed_and_what_comes_with_the_call() {
        let text = br#"{"nodes": [{"name": "buf0", "node": {"target": "lab::mix.out", "inputs": [
            {"name": "x", "arg": {"as_tensor": {"name": "a"}}, "kind": 1},
            {"name": "xs", "arg": {"as_optional_tensors": [{"as_none": true}, {"as_tensor": {"name": "b"}}]}},
            {"name": "k", "arg": {"as_float": "-Infinity"}},
            {"name": "n", "arg": {"as_ints": [3, 4]}},
            {"name": "dtype", "arg": {"as_scalar_type": 7}},
            {"name": "where", "arg": {"as_device": {"type": "cuda", "index": 0}}}
        ], "outputs": [], "metadata": {}}}]}"#;
        let [call] = &calls(text).unwrap()[..] else {
            panic!()
        };
        assert_eq!((&*call.name, &*call.overload), ("lab::mix", "out"));
        let values: Vec<OperatorArgument> = call.arguments.iter().map(|(_, v)| v.clone()).collect();
        let expected = [
            OperatorArgument::Tensor,
            OperatorArgument::OptionalTensors(vec![false, true]),
            OperatorArgument::Float(f64::NEG_INFINITY),
            OperatorArgument::Ints(2),
            OperatorArgument::ScalarType(7),
            OperatorArgument::Device("cuda:0".to_owned()),
        ];
        assert_eq!(values, expected);
    }

    #[test]
    fn what_can_not_be_passed_is_named() {
        let text = br#"{"nodes": [{"node": {"target": "lab::f", "inputs": [
            {"name": "state", "arg": {"as_custom_obj": {"name": "s", "class_fqn": "C"}}}]}}]}"#;
        insta::assert_snapshot!(calls(text).unwrap_err(), @"operator `lab::f`: argument `state` is custom_obj, which an artifact can't pass");
        assert!(calls(b"{}").unwrap_err().contains("`nodes`"));
        assert!(calls(b"nonsense").unwrap_err().contains("no JSON"));
    }

    #[test]
    fn every_operator_of_libtorch_is_in_a_namespace_of_its_own() {
        let names = registered().unwrap();
        assert!(names.len() > 1000);
        let spaces = names.iter().filter_map(|name| name.split("::").next());
        let foreign: std::collections::BTreeSet<&str> =
            spaces.filter(|space| !TORCHS_OWN.contains(space)).collect();
        assert_eq!(foreign.into_iter().collect::<Vec<_>>(), [""; 0]);
    }

    #[test]
    fn operators_are_resolved_against_their_schemas() {
        let call = |name: &str, arguments: &[(&str, OperatorArgument)]| Call {
            name: name.to_owned(),
            overload: String::new(),
            arguments: arguments
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect(),
        };
        let told = |call: Call| {
            let error = Operators::new(&[call], Device::Cpu).err().unwrap();
            error.to_string()
        };
        let x = ("self", OperatorArgument::Tensor);
        let right = call("aten::relu", std::slice::from_ref(&x));
        assert!(Operators::new(&[right], Device::Cpu).is_ok());
        insta::assert_snapshot!(told(call("lab::none", &[])), @"operator `lab::none`: no loaded library registers it");
        insta::assert_snapshot!(told(call("aten::relu", &[])), @"operator `aten::relu`: argument `self`: it has no value");
        insta::assert_snapshot!(told(call("aten::relu", &[("self", OperatorArgument::Int)])), @"operator `aten::relu`: argument `self`: it was compiled with another type than `Tensor`");
        insta::assert_snapshot!(told(call("aten::relu", &[x, ("k", OperatorArgument::Int)])), @"operator `aten::relu`: it was compiled with arguments that its schema does not have");
    }
}
