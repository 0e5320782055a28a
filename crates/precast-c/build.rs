//! Names the library for the loader, and points it at the libtorch that a build with the feature `tch` links.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Versions with one soname are compatible. Until 1.0 a minor version may break the interface.
    let version = ["MAJOR", "MINOR"].map(|part| std::env::var(format!("CARGO_PKG_VERSION_{part}")));
    let [Ok(major), Ok(minor)] = version else {
        return;
    };
    let abi = if major == "0" {
        format!("0.{minor}")
    } else {
        major
    };
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libprecast.so.{abi}");
    // Artifacts and threads of the runtime stay in the process.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    if let Ok(lib) = std::env::var("DEP_PRECAST_RUNTIME_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
}
