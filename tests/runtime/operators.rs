//! Libraries of custom operators at load: verified, once per process, and never two that register the same.
//!
//! Loaded libraries stay in the process. `tests/numerics/operators.rs` has the numbers.

use std::{fs, path::PathBuf};

use precast::{Model, Value, runtime::RuntimeError};

use crate::fake::{Fake, Memory, compiled};

/// Returns a shared object of `code`.
fn library(code: &str, arguments: &[&str]) -> Vec<u8> {
    let torch = PathBuf::from(std::env::var_os("LIBTORCH").unwrap());
    let source = tempfile::Builder::new().suffix(".cpp").tempfile().unwrap();
    fs::write(source.path(), code).unwrap();
    let [include, lib] = [("-I", "include"), ("-L", "lib")]
        .map(|(flag, folder)| format!("{flag}{}", torch.join(folder).display()));
    let mut options = vec!["-std=c++17".to_owned(), include, lib];
    options.extend(arguments.iter().map(ToString::to_string));
    fs::read(compiled(source.path(), &options)).unwrap()
}

fn registers(operators: &str) -> Vec<u8> {
    let code = format!(
        "#include <torch/library.h>\nTORCH_LIBRARY(precast_lab, m) {{ m.def(\"{operators}\"); }}\n"
    );
    library(&code, &["-ltorch_cpu", "-lc10"])
}

/// Loads a model of one artifact, `salt` telling it from others, with this operator library and these calls.
fn load(salt: u32, library: Vec<u8>, calls: Option<&str>) -> Result<Model, RuntimeError> {
    let mut memory = Memory::with(&[Fake::default().salted(salt)]);
    let digest = memory.put(library);
    let calls = calls.map(|calls| memory.put(calls.as_bytes().to_vec()));
    let memory = memory.each_artifact(|artifact| {
        artifact.libraries = vec![digest];
        artifact.proxy = calls;
    });
    crate::load(memory)
}

fn report(error: &RuntimeError) -> String {
    let text = error.to_string();
    let id = text.split('`').nth(1).unwrap_or_default();
    let hint = error.hint();
    format!("{}\n{hint}", text.replace(id, "[id]"))
}

#[test]
fn operator_libraries_are_loaded_before_their_artifact_and_only_once() {
    let calls = r#"{"nodes": [{"node": {"target": "precast_lab::twice", "inputs": [
        {"name": "x", "arg": {"as_tensor": {"name": "a"}}}]}}]}"#;

    // Without the library nothing registers the operator; a library that needs Python does not load.
    let python = library("", &["-Wl,--no-as-needed", "-ltorch_python"]);
    insta::assert_snapshot!(report(&load(11, python, None).unwrap_err()), @"
object `[id]` is not loadable: libtorch_python.so: cannot open shared object file: No such file or directory
link the operators' library without libtorch_python (`is_python_module=False` in torch.utils.cpp_extension.load), and build again
");

    let first = registers("twice(Tensor x) -> Tensor");
    for salt in [12, 13] {
        let model = load(salt, first.clone(), Some(calls)).unwrap();
        let x = Value::new(&[1.0_f32; 32], &[8, 4]).unwrap();
        let out = model.run("f", &[x]).unwrap();
        assert_eq!(out.array::<f32>(0).unwrap().data()[0], 2.0);
    }

    // A later version of it would end the process: libtorch lets nobody register an operator twice.
    let later = registers("twice(Tensor x, int n=2) -> Tensor");
    for (salt, calls) in [(14, Some(calls)), (15, None)] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(report(&load(salt, later.clone(), calls).unwrap_err()), @"
            artifact `[id]` calls operators that can't be called: operator `precast_lab::twice` is registered in this process already, by another library
            a process can hold one version of an operator's library: load this model in another one
            ");
        }
    }

    // Arguments that the schema lacks are an error at load, not at a call.
    let wrong = calls.replace("\"x\"", "\"y\"");
    insta::assert_snapshot!(report(&load(16, first, Some(&wrong)).unwrap_err()), @"
    artifact `[id]` calls operators that can't be called: operator `precast_lab::twice`: argument `x`: it has no value
    build the program again; `precast verify` says whether its objects are whole
    ");
}

#[test]
fn a_damaged_library_is_not_loaded() {
    let mut memory = Memory::with(&[Fake::default().salted(17)]);
    let digest = memory.put(b"a library".to_vec());
    memory.objects.insert(digest, b"another".to_vec());
    let memory = memory.each_artifact(|artifact| artifact.libraries = vec![digest]);
    assert_eq!(crate::load(memory).unwrap_err().name(), "WrongBytes");
}
