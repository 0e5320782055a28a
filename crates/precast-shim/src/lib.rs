//! The shim: the C++ between the runtime and one version of torch.
//!
//! It has the functions without a C ABI: exceptions that are caught before they reach Rust, boxed calls of operators, CUDA
//! graphs and streams. Only libtorch of the version that it was compiled with can run it. So it is no part of the program: the worker
//! of a build compiles [`SOURCES`] with the torch that the artifacts are for, the store keeps the shared objects, and a
//! release names them ([`precast_store::record::Shim`]). The runtime loads the one for its libtorch, if that was compiled
//! from these sources.
//!
//! | file | contents |
//! |---|---|
//! | `shim_cpu.cpp` | includes the three files below: one shared object |
//! | `shim.cpp` | exceptions, messages, a tensor's metadata, calls of an artifact |
//! | `operators.cpp` | operators that artifacts call by name (the proxy executor) |
//! | `eager.cpp` | eager's list of calls |
//! | `shim_cuda.cpp` | CUDA graphs, streams, memory, uploads: the second shared object |

use std::sync::LazyLock;

use precast_store::Digest;

#[cfg(feature = "testing")]
pub mod testing;

macro_rules! sources {
    ($($name:literal),*) => { &[$(($name, include_str!(concat!("../cpp/", $name)))),*] };
}

/// Names and texts of all files, sorted by name.
pub const SOURCES: &[(&str, &str)] = sources!(
    "arguments.h",
    "eager.cpp",
    "eager.h",
    "numbers.h",
    "operators.cpp",
    "operators.h",
    "shim.cpp",
    "shim_cpu.cpp",
    "shim_cuda.cpp",
    "upload.h"
);

/// Returns the digest of the sources: names and texts, each behind its length.
pub fn source() -> Digest {
    static SOURCE: LazyLock<Digest> = LazyLock::new(|| {
        let mut bytes = Vec::new();
        for text in SOURCES.iter().flat_map(|(name, text)| [name, text]) {
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        Digest::of(&bytes)
    });
    *SOURCE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_a_source() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/cpp");
        let entries = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let known: Vec<_> = SOURCES.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, known);
    }
}
