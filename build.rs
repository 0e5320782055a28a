//! Points every linked target at libtorch.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The runtime says where libtorch is; without the `torch` feature there is none.
    let Ok(lib) = std::env::var("DEP_PRECAST_RUNTIME_LIBTORCH_LIB") else {
        return;
    };
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    // `precast` calls nothing of libtorch, and nor do most tests. Without this, lld, the linker of most builds, keeps what
    // libtorch could use of their archives, and so libtorch: a quarter of a second at each start.
    for target in ["bin=precast", "tests"] {
        println!("cargo:rustc-link-arg-{target}=-Wl,--exclude-libs,ALL");
    }
}
