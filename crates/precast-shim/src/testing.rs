//! The shim for tests: compiled by the worker's own code, once for its sources and the torch at `LIBTORCH`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use precast_store::{Digest, Store, record::Shim, target::Torch};

use super::{SOURCES, source};

/// A compiled shim, in files.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The record, as a release has it.
    pub shim: Shim,
    /// The file with the worker's answer, for a fake worker to repeat.
    pub answer: PathBuf,
    /// The shared object.
    pub file: PathBuf,
    /// The shared object for CUDA; none where CUDA's headers are missing.
    pub cuda: Option<PathBuf>,
}

impl Compiled {
    /// Puts its objects into a store.
    pub fn put(&self, store: &Store) {
        for file in [&self.file].into_iter().chain(&self.cuda) {
            store
                .objects()
                .put_file(file)
                .expect("the store can be written");
        }
    }

    /// Returns the file of one of its objects.
    pub fn file_of(&self, object: &Digest) -> Option<&Path> {
        match *object {
            object if object == self.shim.object => Some(&self.file),
            object if Some(object) == self.shim.cuda => self.cuda.as_deref(),
            _ => None,
        }
    }
}

/// Returns the shim for the torch at `LIBTORCH`. Compiles it the first time, which takes half a minute.
///
/// Panics where there is no torch, or where the shim does not compile.
pub fn compiled() -> &'static Compiled {
    static COMPILED: LazyLock<Compiled> = LazyLock::new(|| {
        let torch = std::env::var_os("LIBTORCH").expect("LIBTORCH is set by .cargo/config.toml");
        compiled_with(Path::new(&torch))
    });
    &COMPILED
}

/// As [`compiled`], for the torch of an environment: `.venv/libtorch` or its package `torch`.
pub fn compiled_with(torch: &Path) -> Compiled {
    let real = torch.canonicalize().expect("there is a torch");
    let site = real.parent().expect("torch lies in a folder");
    let version = Torch::find(&[site]).expect("torch has a version.py");
    // <environment>/lib/python3.11/site-packages
    let environment = site.ancestors().nth(3).expect("torch is in an environment");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder =
        (root.join("target/shim")).join(format!("{}-{}", version.version, source().short()));
    let answer = folder.join("answer.json");
    if !answer.exists() {
        compile(&environment.join("bin/python"), &root, &folder, &answer);
    }
    let text = fs::read_to_string(&answer).expect("the answer can be read");
    // `{"file": "…", "cuda": "…" or null, …}`, written by `tests/compile_shim.py`.
    let [file, cuda] = ["file", "cuda"].map(|key| value(&text, key));
    let file = PathBuf::from(file.expect("the answer names a file"));
    let digest = |path: &Path| Digest::of(&fs::read(path).expect("the shim can be read"));
    let cuda = cuda.map(PathBuf::from);
    Compiled {
        shim: Shim {
            arch: std::env::consts::ARCH.to_owned(),
            torch: version.version,
            torch_git: version.git,
            source: source(),
            object: digest(&file),
            cuda: cuda.as_deref().map(digest),
        },
        answer,
        file,
        cuda,
    }
}

fn compile(python: &Path, root: &Path, folder: &Path, answer: &Path) {
    let sources = folder.join("sources");
    fs::create_dir_all(&sources).expect("target can be written");
    for (name, text) in SOURCES {
        let file = sources.join(name);
        // Another test may read it.
        if fs::read_to_string(&file).is_ok_and(|there| there == *text) {
            continue;
        }
        fs::write(&file, text).expect("target can be written");
    }
    let done = Command::new(python)
        .arg(root.join("tests/compile_shim.py"))
        .args([folder, answer])
        .status();
    let done = done.unwrap_or_else(|error| panic!("`{}`: {error}", python.display()));
    assert!(done.success(), "the shim does not compile");
}

/// Returns a text of a flat JSON object.
fn value<'a>(json: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = json.split_once(&format!("\"{key}\": \""))?;
    rest.split_once('"').map(|(value, _)| value)
}
