//! A tree of tiny shared objects in the layout of torch's wheels.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::sandbox::Sandbox;

/// Links an empty shared object that needs `needed`, with the linker's options `flags`.
pub fn link(path: &Path, needed: &[&str], flags: &[&str]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let stubs = tempfile::tempdir().unwrap();
    let run = |to: &Path, more: &[String]| {
        let name = to.file_name().unwrap().to_str().unwrap();
        let soname = format!("-Wl,--no-as-needed,-soname,{name}");
        let mut command = Command::new("g++");
        command.args(["-shared", "-nostdlib", &soname, "-o"]);
        command
            .arg(to)
            .args(["-x", "c", "/dev/null", "-x", "none"])
            .args(more);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    let mut more: Vec<String> = flags.iter().map(|flag| format!("-Wl,{flag}")).collect();
    for name in needed {
        let stub = stubs.path().join(name);
        run(&stub, &[]);
        more.push(stub.display().to_string());
    }
    run(path, &more);
}

/// Makes `site-packages` with a libtorch for the CPU and its CUDA runtime; returns the folder of the package `torch`.
/// Its version is that of the checkout, with which sandboxes are built.
pub fn wheels(sandbox: &Sandbox) -> PathBuf {
    let site = sandbox.path("site-packages");
    let (torch, cuda) = (site.join("torch"), site.join("nvidia/cu13/lib"));
    let rpath = "-rpath,$ORIGIN/../../nvidia/cu13/lib:$ORIGIN";
    let flags = ["--disable-new-dtags", rpath];
    let needed = ["libc10.so", "libcudart.so.13", "libc.so.6"];
    link(&torch.join("lib/libtorch_cpu.so"), &needed, &flags);
    link(&torch.join("lib/libc10.so"), &["libm.so.6"], &flags);
    // No library needs it.
    link(&torch.join("lib/libtorch_python.so"), &[], &flags);
    link(&cuda.join("libcudart.so.13"), &[], &[]);
    let version = Path::new(crate::sandbox::LIBTORCH).join("version.py");
    fs::copy(version, torch.join("version.py")).unwrap();
    torch
}
