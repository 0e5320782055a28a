//! Custom operators: a model whose operators are C++ is built and run with no Python.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::lab::{checkout, libtorch, precast, shared, states};

const RTOL: f64 = 1e-4;
const ATOL: f64 = 1e-5;

/// Compiles `source` to the library `to`, as a project would.
fn compile(source: &Path, to: &Path) {
    let torch = libtorch();
    let include = torch.join("include");
    let status = Command::new("g++")
        .args(["-std=c++20", "-O1", "-shared", "-fPIC", "-o"])
        .arg(to)
        .arg(source)
        .arg(format!("-I{}", include.display()))
        .arg(format!("-L{}", torch.join("lib").display()))
        .args(["-ltorch", "-ltorch_cpu", "-lc10"])
        .status()
        .unwrap();
    assert!(status.success(), "g++ compiles the operators");
}

/// Copies the project to `folder` and compiles its library; returns the spec's path.
fn project(folder: &Path) -> PathBuf {
    let from = checkout().join("tests/numerics/operators");
    for name in ["model.py", "precast.toml"] {
        fs::copy(from.join(name), folder.join(name)).unwrap();
    }
    compile(&from.join("lab.cpp"), &folder.join("lab.so"));
    folder.join("precast.toml")
}

#[test]
fn operators_in_cpp_answer_like_eager_compiled_and_interpreted() {
    let root = tempfile::tempdir().unwrap();
    let spec = project(root.path());
    let spec = spec.to_str().unwrap();
    let lab = shared();
    let built = lab.json(&["build", "-f", spec]);
    assert!(
        states(&built).iter().all(|(_, state)| state != "failed"),
        "{built}"
    );
    let agrees = |module, case| lab.agrees(spec, "operators", module, case, RTOL, ATOL);
    assert_eq!(agrees("mix", "batch=4"), ("batch=4".into(), "exact".into()));
    assert_eq!(agrees("mix", "batch=1"), ("batch=1".into(), "exact".into()));
    assert_eq!(
        agrees("mix", "batch=3"),
        ("batch=4".into(), "padded".into())
    );
    assert_eq!(agrees("shifted", "batch=4").1, "exact");
    assert_eq!(agrees("eager", "batch=4").1, "eager");
    assert_eq!(agrees("eager", "batch=2").1, "eager");
}

#[test]
fn an_operator_whose_python_can_not_be_traced_is_refused_with_a_way_out() {
    let root = tempfile::tempdir().unwrap();
    let model = r#"
import torch

@torch.library.custom_op("lab_python::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() / 2)

@half.register_fake
def _(x):
    return torch.empty_like(x)

class Model(torch.nn.Module):
    def forward(self, x):
        return half(x) + 1

def load():
    return Model()
"#;
    fs::write(root.path().join("model.py"), model).unwrap();
    let spec = "schema = 1\n[model]\nname = \"m\"\nentry = \"model:load\"\n[target]\ndevice = \"cpu\"\n[[module]]\n\
                name = \"f\"\n[module.inputs]\nx = { dtype = \"float32\", shape = [\"n\", 2], pad = 0 }\n\
                [module.buckets]\nn = [2]\n";
    let path = root.path().join("precast.toml");
    fs::write(&path, spec).unwrap();
    let store = root.path().join("store");
    let output = precast(&store, &["build", "-j1", "-f", path.to_str().unwrap()])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    for told in [
        "operator `lab_python::half`, called by the model, has no C++ kernel for cpu, only Python",
        "TORCH_LIBRARY_IMPL",
        "model.py:14",
    ] {
        assert!(stderr.contains(told), "{told}: {stderr}");
    }
}
