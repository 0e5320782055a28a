//! Lets this crate's own tests, and programs that ask for it, find the libtorch that the feature `tch` links.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if let Ok(lib) = env::var("DEP_TCH_LIBTORCH_LIB") {
        // A build script that wants a runtime path of its own reads `DEP_PRECAST_RUNTIME_LIBTORCH_LIB`: link arguments of a
        // library reach no other package's programs.
        println!("cargo:libtorch_lib={lib}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    }
}
