//! The shared libraries that a host needs to run releases, found by reading ELF files. Nothing is opened by the loader.
//!
//! The walk begins at the libraries that the runtime opens and at the objects of the store. It follows `DT_NEEDED` as
//! glibc's loader does, breadth first, each name once. A name is looked for in these folders, in this order:
//!
//! 1. `DT_RPATH` of the library, then of the libraries that asked for it; skipped by a library that has `DT_RUNPATH`
//! 2. the folders of `LD_LIBRARY_PATH`, which the caller passes
//! 3. `DT_RUNPATH` of the library
//! 4. the folders of the system
//!
//! A library found by 1 to 3 is a file that the host must be given. A library that only the system has is the host's
//! own, and so are those of [`HOST`] wherever they are: they belong to the host's C library or to its driver.
//!
//! Some libraries are opened while a program runs, so that no `DT_NEEDED` names them. [`OPENED`] lists the ones for
//! calls. NVSHMEM's transports and CUPTI's helpers are not in it: the runtime uses neither.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use precast_store::{
    Digest, Store, StoreError,
    elf::DynamicSection,
    record::{ArtifactKind, Release},
    target::{DeviceKind, Torch},
};
use serde::Serialize;

mod dynamic;
mod walk;

use walk::{Search, needs};

/// libtorch's library for the CPU, which the runtime opens first.
pub const CPU: &str = "libtorch_cpu.so";
/// Its CUDA half, which the runtime opens for programs on a GPU.
const CUDA: &str = "libtorch_cuda.so";
/// Has no code, and needs all of libtorch. The runtime opens it for objects that need it by name.
const WHOLE: &str = "libtorch.so";

/// Libraries that no export contains: of the host's C library, and of its NVIDIA driver.
pub const HOST: [&str; 10] = [
    "ld-linux*",
    "libc.so.*",
    "libm.so.*",
    "libdl.so.*",
    "librt.so.*",
    "libpthread.so.*",
    "libutil.so.*",
    "libresolv.so.*",
    "libcuda.so.*",
    "libnvidia-*",
];

/// Libraries that open others while a program runs, and the files that they open, in their own folder.
///
/// From the strings in the libraries of torch 2.11.0+cu130: cuDNN opens its parts, cuBLASLt and cuFFT compile kernels,
/// libtorch opens its linear algebra and NVRTC on first use.
pub const OPENED: [(&str, &[&str]); 5] = [
    (CUDA, &["libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so"]),
    ("libcudnn.so.*", &["libcudnn_*.so.*"]),
    ("libcublasLt.so.*", &["libnvrtc.so.*"]),
    ("libcufft.so.*", &["libnvrtc.so.*", "libnvJitLink.so.*"]),
    ("libnvrtc.so.*", &["libnvrtc-builtins.so.*"]),
];

/// The reason why a library or an object can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// The operating system refused to read a file or a folder.
    #[error("can't read `{}`", path.display())]
    Io {
        /// Path of the file or folder.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The file is no shared object, or a damaged one.
    #[error("{name} is not a sound 64-bit shared object: {why}")]
    Malformed {
        /// Path of the file in backticks, or name of the object.
        name: String,
        /// The broken rule, as a fragment of a sentence.
        why: String,
    },
    /// The store can't be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl LibraryError {
    /// Returns what to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Io { .. } => "check the path, and who may read it",
            Self::Malformed { .. } => {
                "install torch again, or name another libtorch with `--libtorch DIR`; for an object of the store, `precast verify`"
            }
            Self::Store(error) => error.hint(),
        }
    }
}

/// A library that the host must be given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Library {
    /// The name that the loader looks for, which is the file's name.
    pub name: String,
    /// Where it lies on this machine.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: u64,
    /// Libraries and objects that need it.
    pub needed_by: Vec<String>,
    /// True if it is opened while a program runs, and no library has it in `DT_NEEDED`.
    pub opened: bool,
}

/// A library that is the host's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HostLibrary {
    /// The name that the loader looks for.
    pub name: String,
    /// Its path on this machine, if it is installed.
    pub path: Option<PathBuf>,
    /// Libraries and objects that need it.
    pub needed_by: Vec<String>,
}

/// A library that was not found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MissingLibrary {
    /// The name that the loader looks for.
    pub name: String,
    /// Libraries and objects that need it.
    pub needed_by: Vec<String>,
    /// The folders that were searched, except those of the system.
    pub searched: Vec<PathBuf>,
}

/// All libraries that releases need.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Needs {
    /// Files that the host must be given, in the order in which the loader finds them.
    pub files: Vec<Library>,
    /// Libraries of the host, sorted by name.
    pub host: Vec<HostLibrary>,
    /// Libraries that were not found.
    pub missing: Vec<MissingLibrary>,
}

impl Needs {
    /// Returns the bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// A shared object of a store.
#[derive(Clone, Debug)]
pub struct Object {
    /// As `artifact 0123456789ab`.
    name: String,
    dynamic: DynamicSection,
}

/// The requirements of releases.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Whether a program runs on a GPU.
    pub cuda: bool,
    /// Versions of torch that the releases run with, sorted.
    pub torches: Vec<String>,
    /// Shared objects of the releases, each once.
    objects: Vec<Object>,
}

/// Reads the requirements of releases on a host with this version of torch.
fn asked(store: &Store, releases: &[Release], torch: Option<&str>) -> Result<Asked, LibraryError> {
    let mut asked = Asked::default();
    let mut torches = BTreeSet::new();
    let mut objects: Vec<(&str, Digest)> = Vec::new();
    let mut artifacts = BTreeSet::new();
    for release in releases {
        for id in &release.programs {
            let what = format!("release {} of `{}`", release.seq, release.model);
            let program = store.records().program(id)?;
            let program = program.ok_or_else(|| dangling(what, "program", id))?;
            asked.cuda |= program.target.device == DeviceKind::Cuda;
            torches.insert(program.target.torch.clone());
            let steps = program.steps.iter().map(|step| step.artifact);
            artifacts.extend(steps.chain(program.eager.iter().map(|eager| eager.artifact)));
        }
        for shim in &release.shims {
            torches.insert(shim.torch.clone());
            if torch.is_none_or(|torch| torch == shim.torch) {
                objects.extend(shim.objects().map(|object| ("shim", object)));
            }
        }
    }
    for id in artifacts {
        let artifact = store.records().artifact(&id)?;
        let artifact = artifact.ok_or_else(|| dangling("a program".to_owned(), "artifact", &id))?;
        let operators = artifact.libraries.iter();
        objects.extend(operators.map(|id| ("operator library", *id)));
        if artifact.kind == ArtifactKind::Library {
            objects.push(("artifact", artifact.object));
        }
    }
    let mut seen = BTreeSet::new();
    objects.retain(|(_, id)| seen.insert(*id));
    for (kind, id) in objects {
        let name = format!("{kind} {}", id.short());
        let bytes = store.objects().read(&id)?;
        let dynamic = dynamic::of_bytes(&bytes, &name)?;
        asked.objects.push(Object { name, dynamic });
    }
    asked.torches = torches.into_iter().collect();
    Ok(asked)
}

fn dangling(what: String, kind: &'static str, id: &Digest) -> StoreError {
    let id = *id;
    StoreError::Dangling { what, kind, id }
}

/// Returns the folder that has libtorch, of the package `torch` or the folder itself.
pub fn torch_folder(named: &Path) -> Option<PathBuf> {
    let places = [named.join("lib"), named.to_owned()];
    let found = places.iter().find(|place| place.join(CPU).exists())?;
    found.canonicalize().ok()
}

/// Releases' needs, with the libtorch that they were looked up in.
#[derive(Clone, Debug)]
pub struct Deps {
    /// The folder with libtorch.
    pub folder: PathBuf,
    /// The content of its `version.py`.
    pub torch: Option<Torch>,
    /// The releases' requirements.
    pub asked: Asked,
    /// The libraries that meet them.
    pub needs: Needs,
}

/// The Python environment that torch is in.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Environment {
    /// Its `site-packages`.
    pub folder: PathBuf,
    /// Bytes of all files in it.
    pub bytes: u64,
}

impl Deps {
    /// Finds the libraries for releases, with libtorch in `folder` (see [`torch_folder`]) and the folders of
    /// `LD_LIBRARY_PATH`.
    pub fn find(
        store: &Store,
        releases: &[Release],
        folder: PathBuf,
        library_path: Vec<PathBuf>,
    ) -> Result<Self, LibraryError> {
        let site: Vec<_> = folder.ancestors().nth(2).into_iter().collect();
        let torch = Torch::find(&site);
        let version = torch.as_ref().map(|torch| torch.version.as_str());
        let asked = asked(store, releases, version)?;
        let search = Search {
            library_path,
            system: system_folders(),
            within: None,
        };
        let needs = needs(&folder, &asked, &search)?;
        Ok(Self {
            folder,
            torch,
            asked,
            needs,
        })
    }

    /// Searches again in the copy below `root`, and returns the first library that is not found there.
    pub fn lost_in(&self, root: &Path) -> Result<Option<&Library>, LibraryError> {
        let io = |source| LibraryError::Io {
            path: root.to_owned(),
            source,
        };
        let root = root.canonicalize().map_err(io)?;
        let search = Search {
            library_path: vec![],
            system: system_folders(),
            within: Some(root.clone()),
        };
        let copies = needs(&root.join("torch/lib"), &self.asked, &search)?;
        let found: BTreeSet<_> = copies.files.iter().map(|file| &file.name).collect();
        let mut files = self.needs.files.iter();
        Ok(files.find(|file| !found.contains(&file.name)))
    }

    /// Returns the version of torch if the releases are for others.
    pub fn wrong_torch(&self) -> Option<&str> {
        let version = self.torch.as_ref().map(|torch| torch.version.as_str());
        version.filter(|version| !self.asked.torches.iter().any(|own| own == version))
    }

    /// Returns the environment that torch is in, with its size.
    pub fn environment(&self) -> Option<Environment> {
        let site = self.folder.ancestors().nth(2)?;
        let name = site.file_name()?.to_str()?;
        matches!(name, "site-packages" | "dist-packages").then(|| Environment {
            folder: site.to_owned(),
            bytes: folder_bytes(site),
        })
    }

    /// Returns the place of a library in an exported folder. The libraries of wheels find each other by paths relative
    /// to the package `torch`, so they keep their places. All others go into libtorch's folder.
    pub fn place(&self, library: &Library) -> PathBuf {
        let packages = self.folder.ancestors().nth(2);
        let packages = packages.filter(|folder| folder.join("torch/lib") == self.folder);
        let inside = packages.and_then(|folder| library.path.strip_prefix(folder).ok());
        let other = || Path::new("torch/lib").join(&library.name);
        inside.map_or_else(other, Path::to_owned)
    }
}

/// Returns the folders of this machine in which the loader looks last.
fn system_folders() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/ld.so.conf")];
    let more = fs::read_dir("/etc/ld.so.conf.d").into_iter().flatten();
    files.extend(more.flatten().map(|entry| entry.path()));
    files.sort();
    let texts = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok());
    let text = texts.collect::<Vec<_>>().join("\n");
    let named = text
        .lines()
        .map(str::trim)
        .filter(|line| line.starts_with('/'));
    let triple = format!("{}-linux-gnu", std::env::consts::ARCH);
    let usual = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"].map(PathBuf::from);
    // Debian's loader knows these without a file.
    let more = ["/lib", "/usr/lib"].map(|folder| Path::new(folder).join(&triple));
    named.map(PathBuf::from).chain(usual).chain(more).collect()
}

/// Returns the bytes of all files in a folder and below it; unreadable files count nothing.
fn folder_bytes(folder: &Path) -> u64 {
    let entries = walkdir::WalkDir::new(folder).into_iter().flatten();
    let files = entries.filter(|entry| entry.file_type().is_file());
    files
        .filter_map(|entry| entry.metadata().ok())
        .map(|meta| meta.len())
        .sum()
}

#[cfg(test)]
mod tests;
