//! Compiles the runtime's C++ shim, where there is a torch to compile it with.
//!
//! Both halves become shared objects that are embedded in the crate and loaded at run time, so one binary runs everywhere
//! and links nothing of torch. A half is left out, with a note that the runtime repeats, where its headers are missing.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    if let Ok(lib) = env::var("DEP_TCH_LIBTORCH_LIB") {
        // With the feature `tch`, torch-sys links libtorch. A build script that wants a runtime path of its own reads
        // `DEP_PRECAST_SHIM_LIBTORCH_LIB`: link arguments of a library reach no other package's programs.
        println!("cargo:libtorch_lib={lib}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    }
    let made = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    // Clippy has folders of its own for what is built, and links nothing of it.
    let clippy = env::var_os("RUSTC_WORKSPACE_WRAPPER").is_some_and(is_clippy);
    let torch = env::var_os("LIBTORCH").map(PathBuf::from);
    let torch = torch
        .filter(|torch| !clippy && torch.join("include/ATen/core/Tensor.h").exists())
        .ok_or_else(|| "no headers of torch in `LIBTORCH`".to_owned());
    let version = torch.as_deref().ok().and_then(version);
    println!(
        "cargo:rustc-env=PRECAST_SHIM_TORCH={}",
        version.unwrap_or_default()
    );
    let half = |name: &str, what: &str, result: Result<(), String>| {
        if let Err(why) = result {
            if !clippy {
                println!("cargo:warning=built without {what}: {why}");
            }
            fs::write(made.join(name), []).expect("OUT_DIR is writable");
        }
    };
    let shim = torch.clone().and_then(|torch| {
        let sources = ["shim.cpp", "operators.cpp", "eager.cpp", "archive.cpp"];
        shared_object(&sources, &[torch.join("include")], &made.join("shim.so"))
    });
    half("shim.so", "a shim", shim);
    let cuda = torch.and_then(|torch| {
        let mut include = cuda_headers(&torch)?;
        include.insert(0, torch.join("include"));
        shared_object(&["shim_cuda.cpp"], &include, &made.join("shim_cuda.so"))
    });
    half("shim_cuda.so", "CUDA graphs and streams", cuda);
}

/// Returns the version of a torch, as `2.11.0`.
fn version(torch: &Path) -> Option<String> {
    let text = fs::read_to_string(torch.join("version.py")).ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("__version__ ="))?;
    let version = line.split('\'').nth(1)?;
    version.split('+').next().map(str::to_owned)
}

fn is_clippy(wrapper: OsString) -> bool {
    Path::new(&wrapper).file_stem() == Some("clippy-driver".as_ref())
}

/// Returns the folders with the CUDA headers that torch's own headers include.
///
/// They come with the wheels torch depends on (`nvidia/cu13/include` beside torch) or a toolkit at `CUDA_HOME`. The
/// runtime wheel has no `crt/`; that is in `nvidia-cuda-crt`, and a copy of it in triton's.
fn cuda_headers(torch: &Path) -> Result<Vec<PathBuf>, String> {
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    let mut found = Vec::new();
    if let Some(home) = env::var_os("CUDA_HOME") {
        found.push(PathBuf::from(home).join("include"));
    }
    if let Ok(real) = torch.canonicalize() {
        let site = real.parent().unwrap_or(Path::new("/"));
        found.push(site.join("nvidia/cu13/include"));
        found.push(site.join("triton/backends/nvidia/include"));
    }
    for header in ["cuda_runtime_api.h", "crt/host_defines.h"] {
        if !found.iter().any(|dir| dir.join(header).exists()) {
            return Err(format!("no `{header}` beside torch or under CUDA_HOME"));
        }
    }
    Ok(found)
}

/// Compiles files of `shim/` to a shared object whose undefined symbols libtorch has.
fn shared_object(sources: &[&str], include: &[PathBuf], out: &Path) -> Result<(), String> {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .pic(true)
        .opt_level(2)
        .warnings(false)
        .includes(include);
    let compiler = build
        .try_get_compiler()
        .map_err(|error| error.to_string())?;
    let status = compiler
        .to_command()
        .args(["-shared", "-o"])
        .arg(out)
        .args(sources.iter().map(|name| Path::new("shim").join(name)))
        .status()
        .map_err(|error| error.to_string())?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{sources:?} do not compile")),
    }
}
