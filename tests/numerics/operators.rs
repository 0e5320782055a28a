//! Custom operators: a model whose operators are C++ is built and run with no Python.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    ATOL, RTOL,
    lab::{checkout, libtorch, shared, states},
};

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
    let failed = states(&built).iter().any(|(_, state)| state == "failed");
    assert!(!failed, "{built}");
    for (module, batch, by) in [
        ("mix", 4, "batch=4 exact"),
        ("mix", 1, "batch=1 exact"),
        ("mix", 3, "batch=4 padded"),
        ("shifted", 4, "exact"),
        ("eager", 4, "eager"),
        ("eager", 2, "eager"),
    ] {
        let case = format!("batch={batch}");
        let (bucket, rung) = lab.agrees(spec, "operators", module, &case, RTOL, ATOL);
        let served = format!("{bucket} {rung}");
        assert!(served.ends_with(by), "{module} {case}: {served}");
    }
}
