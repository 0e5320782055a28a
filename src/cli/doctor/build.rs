//! Checks for builds: Python, torch, a C++ compiler with OpenMP, and for a GPU the CUDA headers.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Deserialize;

use super::{Check, Need::Build, Subject, first_line};
use crate::{
    build::{Launcher, WHAT_IS_OFF, protocol::Off},
    inspect::{
        external::{self, Content},
        words,
    },
    target::{TRIED, Torch, Unfit},
};

const PYTHON: Subject = Subject(Build, "Python");
const TORCH: Subject = Subject(Build, "torch");
const BYTECODE: Subject = Subject(Build, "bytecode");
const FEATURES: Subject = Subject(Build, "features");
const HEADERS: Subject = Subject(Build, "CUDA headers");
const COMPILER: Subject = Subject(Build, "C++ compiler");
const CPP_LIBRARY: Subject = Subject(Build, "C++ library");
const SCRATCH: Subject = Subject(Build, "temporary files");

/// The oldest Python that the worker runs on.
const OLDEST: (u32, u32) = (3, 11);

/// Prints the fields of [`Python`]. It does not import torch, which takes seconds.
const PROBE: &str = "import importlib.util, json, os, sys
torch = importlib.util.find_spec('torch')
print(json.dumps({'version': list(sys.version_info[:3]), 'executable': sys.executable, 'torch': torch and torch.origin,
    'compiled': torch and torch.cached and os.path.exists(torch.cached)}))";

/// A program that needs all that artifacts need of a compiler.
const SOURCE: &str = "#include <omp.h>\n#include <stdexcept>\n\
    extern \"C\" int threads() { if (int n = omp_get_max_threads()) return n; throw std::runtime_error(\"none\"); }\n";

#[derive(Deserialize)]
pub(super) struct Python {
    version: [u32; 3],
    executable: String,
    torch: Option<PathBuf>,
    /// Whether torch was installed with bytecode.
    #[serde(default)]
    compiled: Option<bool>,
}

/// Returns all checks; `gpus` are the compute capabilities of the host's GPUs.
pub(super) fn checks(launcher: &Launcher, gpus: &[String]) -> Vec<Check> {
    let (python, first) = python(launcher);
    let mut checks = vec![first];
    if let Some(python) = python {
        let (site, check) = torch(&python, launcher.untried);
        checks.push(check);
        if let Some((site, torch)) = site {
            checks.extend(bytecode(&python, &site));
            checks.extend(features(&launcher.program, &torch));
            checks.push(headers(&site, &torch, gpus));
        }
    }
    checks.extend(compiler());
    checks.push(scratch());
    checks
}

pub(super) fn python(launcher: &Launcher) -> (Option<Python>, Check) {
    let program = launcher.program.display();
    if launcher.replaces_worker {
        let found = format!("`{program}` is the worker");
        return (None, PYTHON.note(found, "its packages can't be checked"));
    }
    let missing = |found: String| {
        let hint = "name a Python 3.11 or newer that has torch: `--python PATH`, or PRECAST_PYTHON";
        (None, PYTHON.missing(found, hint))
    };
    let mut command = Command::new(&launcher.program);
    let output = match command
        .args(["-P", "-c", PROBE])
        .stdin(Stdio::null())
        .output()
    {
        Ok(output) => output,
        Err(error) => return missing(format!("`{program}` can't be started: {error}")),
    };
    let Ok(python) = serde_json::from_slice::<Python>(&output.stdout) else {
        let error = first_line(&output.stderr);
        return missing(format!("`{program}` does not run Python code: {error}"));
    };
    let [major, minor, patch] = python.version;
    let found = format!("{major}.{minor}.{patch}, {}", python.executable);
    if (major, minor) < OLDEST {
        return missing(found);
    }
    (Some(python), PYTHON.ok(found))
}

/// Returns torch and its folder, where a build can use it.
fn torch(python: &Python, untried: bool) -> (Option<(PathBuf, Torch)>, Check) {
    let (executable, [(a, b), (c, d)]) = (&python.executable, TRIED);
    let torch = format!("torch>={a}.{b},<{c}.{}", d + 1);
    let install = format!("`{executable} -m pip install '{torch}'`, or name another Python");
    let Some(site) = python
        .torch
        .as_deref()
        .and_then(|file| file.ancestors().nth(2))
    else {
        return (
            None,
            TORCH.missing(format!("`{executable}` has none"), install),
        );
    };
    let Some(torch) = Torch::find(&[site]) else {
        let found = format!("torch/version.py in {} can't be read", site.display());
        return (None, TORCH.missing(found, install));
    };
    let found = format!("{}, {}", torch.version, site.display());
    let Err(why) = Torch::fit(&torch.version, untried) else {
        return (Some((site.to_owned(), torch)), TORCH.ok(found));
    };
    let hint = match why {
        Unfit::Untried => format!("{install}, or build with `--untried-torch`"),
        Unfit::TooOld | Unfit::NoVersion => install,
    };
    (None, TORCH.missing(format!("{found}: it {why}"), hint))
}

/// Returns a note where torch has no bytecode: a worker writes none, so each one compiles some 2,000 modules. That is 5
/// s of CPU time (torch 2.11: `python -B -c 'import torch, torch._inductor.compile_fx'` with and without bytecode).
fn bytecode(python: &Python, site: &Path) -> Option<Check> {
    if python.compiled != Some(false) {
        return None;
    }
    let (executable, site) = (&python.executable, site.display());
    Some(BYTECODE.note(
        "torch was installed without: each worker takes 5 s more to start",
        format!("`{executable} -m compileall -q -j 0 {site}`"),
    ))
}

/// Returns a note about the features that are off with this torch.
fn features(program: &Path, torch: &Torch) -> Option<Check> {
    let mut command = Command::new(program);
    command.args(["-P", "-c", WHAT_IS_OFF, &torch.version]);
    let output = command.stdin(Stdio::null()).output().ok()?;
    let off: Vec<Off> = serde_json::from_slice(&output.stdout).ok()?;
    if off.is_empty() {
        return None;
    }
    let each = off.iter().map(|one| format!("{}: {}", one.what, one.why));
    let each: Vec<String> = each.collect();
    let found = format!("off with torch {}: {}", torch.version, each.join("; "));
    Some(FEATURES.note(found, "a build does without; another torch has them"))
}

/// Checks for the headers that programs for a GPU are compiled with.
fn headers(site: &Path, torch: &Torch, gpus: &[String]) -> Check {
    let Some(version) = &torch.cuda else {
        if gpus.is_empty() {
            return HEADERS.ok("not needed: this torch is for the CPU, and there is no GPU");
        }
        let found = "this torch is for the CPU: nothing can be built for the GPU";
        return HEADERS.note(found, "install a torch with CUDA");
    };
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("include"));
    let mut folders: Vec<PathBuf> = home.into_iter().collect();
    for package in fs::read_dir(site.join("nvidia")).into_iter().flatten() {
        folders.extend(package.map(|package| package.path().join("include")));
    }
    folders.push(site.join("triton/backends/nvidia/include"));
    let needed = ["cuda.h", "cuda_runtime_api.h", "crt/host_defines.h"];
    let is_missing = |header: &&str| !folders.iter().any(|folder| folder.join(header).exists());
    let missing: Vec<&str> = needed.into_iter().filter(is_missing).collect();
    if missing.is_empty() {
        return HEADERS.ok(format!("for CUDA {version}"));
    }
    let found = format!("no {}", missing.join(", "));
    let hint = format!(
        "install `nvidia-cuda-runtime` and `nvidia-cuda-crt` of CUDA {version} beside torch, or set CUDA_HOME to a toolkit"
    );
    if gpus.is_empty() {
        HEADERS.note(found, hint)
    } else {
        HEADERS.missing(found, hint)
    }
}

/// Compiles and links [`SOURCE`] with the compiler that torch uses. Returns the compiler, and the C++ library of its
/// objects.
fn compiler() -> Vec<Check> {
    let named = env::var_os("CXX").filter(|name| !name.is_empty());
    let program = named.unwrap_or_else(|| "g++".into());
    let shown = on_path(Path::new(&program)).display().to_string();
    let mut command = Command::new(&program);
    let version = match command.arg("--version").stdin(Stdio::null()).output() {
        Ok(output) => format!("{}, `{shown}`", first_line(&output.stdout)),
        Err(error) => {
            let hint = "install g++ 10 or newer (Debian: `apt-get install g++`), or set CXX";
            return vec![COMPILER.missing(format!("`{shown}` can't be started: {error}"), hint)];
        }
    };
    let compiled = tempfile::tempdir().and_then(|folder| {
        let [source, object] = ["probe.cpp", "probe.so"].map(|name| folder.path().join(name));
        fs::write(&source, SOURCE)?;
        let output = Command::new(&program)
            .args(["-std=c++20", "-fopenmp", "-fPIC", "-shared", "-o"])
            .args([&object, &source])
            .stdin(Stdio::null())
            .output();
        Ok((output?, cpp_library(&object)))
    });
    match compiled {
        Ok((output, library)) if output.status.success() => {
            let mut checks = vec![COMPILER.ok(version)];
            checks.extend(library);
            checks
        }
        Ok((output, _)) => {
            let error = first_line(&output.stderr);
            let found = format!("{version}, but it compiles nothing: {error}");
            vec![COMPILER.missing(found, "it needs C++20, its standard library and OpenMP")]
        }
        Err(error) => {
            let hint = "free some space for temporary files, or set TMPDIR";
            vec![COMPILER.missing(error.to_string(), hint)]
        }
    }
}

/// Returns the path of a program that `PATH` finds.
fn on_path(program: &Path) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found = env::split_paths(&path).map(|folder| folder.join(program));
    let found = found.find(|file| program.components().count() == 1 && file.is_file());
    found.unwrap_or_else(|| program.to_owned())
}

/// Returns the C++ library that a shared object was linked with; none if the object can't be read.
fn cpp_library(object: &Path) -> Option<Check> {
    let report = external::inspect(object).ok()?;
    let Content::SharedObject(object) = report.content else {
        return None;
    };
    let mut needed = object.needed.iter();
    Some(match needed.find(|name| name.contains("++")) {
        Some(shared) => CPP_LIBRARY.ok(format!("{shared}, shared")),
        None => CPP_LIBRARY
            .ok("static in this compiler's objects; artifacts and shims use the library of torch"),
    })
}

/// Checks that the folder for temporary files has room for a build.
fn scratch() -> Check {
    let folder = env::temp_dir();
    let shown = folder.display();
    if let Err(error) = tempfile::tempdir() {
        let found = format!("nothing can be written to {shown}: {error}");
        return SCRATCH.missing(found, "set TMPDIR to a folder of your own");
    }
    let Ok(stat) = rustix::fs::statvfs(&folder) else {
        return SCRATCH.ok(shown.to_string());
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let found = format!("{shown}, {} free", words::bytes(free));
    if free >= 2 << 30 {
        return SCRATCH.ok(found);
    }
    let hint = "a build writes weights and objects there: set TMPDIR to a folder with more space";
    SCRATCH.note(found, hint)
}
