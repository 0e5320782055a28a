//! Builds the runtime's C++ shim, points the tests at libtorch, and tells dependants where it is.
//!
//! The CUDA half of the shim becomes a shared object that is embedded in the crate and loaded only on machines with CUDA, so
//! one binary runs everywhere; it is left out, with a note that the runtime repeats, where the CUDA headers are missing.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // torch-sys found libtorch; its `links` metadata says where. A build script that wants a runtime path of its own reads
    // `DEP_PRECAST_SHIM_LIBTORCH_LIB`: link arguments of a library reach no other package's programs.
    let lib =
        PathBuf::from(env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys says where libtorch is"));
    println!("cargo:libtorch_lib={}", lib.display());
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());

    let made = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let shim = Path::new("shim");
    println!("cargo:rerun-if-changed={}", shim.display());
    let shim_cuda = made.join("shim_cuda.so");
    // Clippy has folders of its own for what is built, and links nothing of it.
    if env::var_os("RUSTC_WORKSPACE_WRAPPER").is_some_and(is_clippy) {
        fs::write(&shim_cuda, []).expect("OUT_DIR is writable");
        return;
    }
    let include = lib.with_file_name("include");

    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .pic(true)
        .opt_level(2)
        .warnings(false)
        .include(&include)
        .file(shim.join("shim.cpp"))
        .file(shim.join("operators.cpp"))
        .file(shim.join("eager.cpp"))
        .file(shim.join("archive.cpp"))
        .compile("precast_shim");
    // shim.cpp names symbols of both; the linker drops what nothing needs.
    println!("cargo:rustc-link-lib=torch_cpu");
    println!("cargo:rustc-link-lib=c10");

    let note = match cuda_headers(&lib) {
        Err(why) => Err(why),
        Ok(headers) => shared_object(&shim.join("shim_cuda.cpp"), &include, &headers, &shim_cuda),
    };
    if let Err(why) = note {
        println!("cargo:warning=built without CUDA graphs and streams: {why}");
        fs::write(&shim_cuda, []).expect("OUT_DIR is writable");
    }
}

fn is_clippy(wrapper: OsString) -> bool {
    Path::new(&wrapper).file_stem() == Some("clippy-driver".as_ref())
}

/// Returns the folders with the CUDA headers that torch's own headers include.
///
/// They come with the wheels torch depends on (`nvidia/cu13/include` beside torch) or a toolkit at `CUDA_HOME`. The
/// runtime wheel has no `crt/`; that is in `nvidia-cuda-crt`, and a copy of it in triton's.
fn cuda_headers(lib: &Path) -> Result<Vec<PathBuf>, String> {
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    let mut found = Vec::new();
    if let Some(home) = env::var_os("CUDA_HOME") {
        found.push(PathBuf::from(home).join("include"));
    }
    if let Ok(real) = lib.canonicalize() {
        let site = real.ancestors().nth(2).unwrap_or(Path::new("/"));
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

/// Compiles one file to a shared object whose undefined symbols libtorch has.
fn shared_object(
    source: &Path,
    include: &Path,
    headers: &[PathBuf],
    out: &Path,
) -> Result<(), String> {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .pic(true)
        .opt_level(2)
        .warnings(false)
        .include(include);
    build.includes(headers);
    let compiler = build
        .try_get_compiler()
        .map_err(|error| error.to_string())?;
    let status = compiler
        .to_command()
        .args(["-shared", "-o"])
        .arg(out)
        .arg(source)
        .status()
        .map_err(|error| error.to_string())?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("`{}` does not compile", source.display())),
    }
}
