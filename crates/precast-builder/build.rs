//! Lists the Python worker's files for embedding.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let made = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(made.join("worker.rs"), worker_files()).expect("OUT_DIR is writable");
}

/// Returns a Rust expression with name and text of every file of the worker: `&[("call.py", include_str!("…")), …]`. Names
/// are paths from the worker's folder.
fn worker_files() -> String {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
        .join("worker");
    let mut paths = python_files(&folder);
    paths.sort();
    // Not the folder: Python's caches come and go in it. A new file is imported by one that changes.
    for path in &paths {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    let files: Vec<String> = paths
        .iter()
        .map(|path| {
            let name = path.strip_prefix(&folder).unwrap_or(path);
            format!("({name:?}, include_str!({path:?}))")
        })
        .collect();
    format!("&[{}]", files.join(", "))
}

/// Returns the Python files of a folder and of the folders in it.
fn python_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the worker's folder can be read");
    entries
        .map(|entry| entry.expect("the worker's folder can be read").path())
        .flat_map(|path| {
            if path.is_dir() {
                python_files(&path)
            } else {
                vec![path]
            }
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "py"))
        .collect()
}
