//! What a build needs: Python, torch, a C++ compiler with OpenMP, and for a GPU the CUDA headers.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde::Deserialize;

use super::{Check, Need::Build, first_line};
use crate::{
    build::{Launcher, WHAT_IS_OFF, protocol::Off},
    inspect::{
        external::{self, Content},
        words,
    },
    target::{TRIED, Torch, Unfit},
};

/// The oldest Python that the worker runs on.
const PYTHON: (u32, u32) = (3, 11);

/// Prints what is asked of an interpreter, without importing torch: that takes seconds.
const PROBE: &str = "import importlib.util, json, os, sys
torch = importlib.util.find_spec('torch')
print(json.dumps({'version': list(sys.version_info[:3]), 'executable': sys.executable, 'torch': torch and torch.origin,
    'compiled': torch and torch.cached and os.path.exists(torch.cached)}))";

/// A program as artifacts are compiled, in a few lines.
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

/// Looks at all of it; `gpus` are the compute capabilities of the host's GPUs.
pub(super) fn checks(launcher: &Launcher, gpus: &[String]) -> Vec<Check> {
    let (python, first) = python(launcher);
    let mut checks = vec![first];
    if let Some(python) = python {
        let (site, check) = torch(&python, launcher.untried);
        checks.push(check);
        if let Some((site, torch)) = site {
            checks.extend(bytecode(&python, &site));
            checks.extend(features(&launcher.program, &torch));
            checks.push(cuda(&site, &torch, gpus));
        }
    }
    checks.push(compiler());
    checks.push(scratch());
    checks
}

pub(super) fn python(launcher: &Launcher) -> (Option<Python>, Check) {
    let name = "Python";
    let wanted = "name a Python 3.11 or newer that has torch: `--python PATH`, or PRECAST_PYTHON";
    let program = launcher.program.display();
    if launcher.replaces_worker {
        let found = format!("`{program}` is the worker");
        return (
            None,
            Check::note(Build, name, found, "what it has can't be looked at"),
        );
    }
    let ran = Command::new(&launcher.program)
        .args(["-P", "-c", PROBE])
        .stdin(Stdio::null())
        .output();
    let output = match ran {
        Ok(output) => output,
        Err(error) => {
            let found = format!("`{program}` can't be started: {error}");
            return (None, Check::missing(Build, name, found, wanted));
        }
    };
    let Ok(python) = serde_json::from_slice::<Python>(&output.stdout) else {
        let found = format!(
            "`{program}` does not run Python code: {}",
            first_line(&output.stderr)
        );
        return (None, Check::missing(Build, name, found, wanted));
    };
    let [major, minor, patch] = python.version;
    let found = format!("{major}.{minor}.{patch}, {}", python.executable);
    if (major, minor) < PYTHON {
        return (None, Check::missing(Build, name, found, wanted));
    }
    (Some(python), Check::ok(Build, name, found))
}

/// Returns the folder that torch lies in and what it is, where it can be used.
fn torch(python: &Python, untried: bool) -> (Option<(PathBuf, Torch)>, Check) {
    let name = "torch";
    let [(a, b), (c, d)] = TRIED;
    let install = format!(
        "`{} -m pip install 'torch>={a}.{b},<{c}.{}'`, or name another Python",
        python.executable,
        d + 1
    );
    let site = python.torch.as_deref().and_then(Path::parent);
    let site = site.and_then(Path::parent).map(Path::to_owned);
    let Some(site) = site else {
        let found = format!("`{}` has none", python.executable);
        return (None, Check::missing(Build, name, found, install));
    };
    let Some(torch) = Torch::find(&[&site]) else {
        let found = format!("torch/version.py in {} can't be read", site.display());
        return (None, Check::missing(Build, name, found, install));
    };
    let found = format!("{}, {}", torch.version, site.display());
    match Torch::fit(&torch.version, untried) {
        Ok(()) => (Some((site, torch)), Check::ok(Build, name, found)),
        Err(why) => {
            let found = format!("{found}: it {why}");
            let hint = match why {
                Unfit::Untried => format!("{install}, or build with `--untried-torch`"),
                Unfit::TooOld | Unfit::NoVersion => install,
            };
            (None, Check::missing(Build, name, found, hint))
        }
    }
}

/// Returns a note where torch has no bytecode: a worker writes none, so each one compiles some 2,000 modules. That is 5 s of
/// CPU time (torch 2.11: `python -B -c 'import torch, torch._inductor.compile_fx'` with and without bytecode).
fn bytecode(python: &Python, site: &Path) -> Option<Check> {
    (python.compiled == Some(false)).then(|| {
        let found = "torch was installed without: each worker takes 5 s more to start";
        let fix = format!(
            "`{} -m compileall -q -j 0 {}`",
            python.executable,
            site.display()
        );
        Check::note(Build, "bytecode", found, fix)
    })
}

/// Returns what is off with a torch; nothing where all works, or the interpreter does not say.
fn features(program: &Path, torch: &Torch) -> Option<Check> {
    let mut command = Command::new(program);
    command.args(["-P", "-c", WHAT_IS_OFF, &torch.version]);
    let output = command.stdin(Stdio::null()).output().ok()?;
    let off: Vec<Off> = serde_json::from_slice(&output.stdout).ok()?;
    if off.is_empty() {
        return None;
    }
    let each = off.iter().map(|one| format!("{}: {}", one.what, one.why));
    let found = format!(
        "off with torch {}: {}",
        torch.version,
        each.collect::<Vec<_>>().join("; ")
    );
    Some(Check::note(
        Build,
        "features",
        found,
        "a build does without; another torch has them",
    ))
}

/// Looks for the headers that programs for a GPU are compiled with.
fn cuda(site: &Path, torch: &Torch, gpus: &[String]) -> Check {
    let name = "CUDA headers";
    let Some(version) = &torch.cuda else {
        return match gpus.is_empty() {
            true => Check::ok(
                Build,
                name,
                "not needed: this torch is for the CPU, and there is no GPU",
            ),
            false => Check::note(
                Build,
                name,
                "this torch is for the CPU: nothing can be built for the GPU",
                "install a torch with CUDA",
            ),
        };
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
        return Check::ok(Build, name, format!("for CUDA {version}"));
    }
    let found = format!("no {}", missing.join(", "));
    let hint = format!(
        "install `nvidia-cuda-runtime` and `nvidia-cuda-crt` of CUDA {version} beside torch, or set CUDA_HOME to a toolkit"
    );
    match gpus.is_empty() {
        true => Check::note(Build, name, found, hint),
        false => Check::missing(Build, name, found, hint),
    }
}

/// Compiles and links a few lines with the compiler that torch takes.
fn compiler() -> Check {
    let name = "C++ compiler";
    let named = env::var_os("CXX").filter(|name| !name.is_empty());
    let program = named.unwrap_or_else(|| "g++".into());
    let shown = on_path(Path::new(&program)).display().to_string();
    let install = "install g++ 10 or newer (Debian: `apt-get install g++`), or set CXX";
    let version = Command::new(&program)
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    let version = match version {
        Ok(output) => format!("{}, `{shown}`", first_line(&output.stdout)),
        Err(error) => {
            let found = format!("`{shown}` can't be started: {error}");
            return Check::missing(Build, name, found, install);
        }
    };
    let compiled = tempfile::tempdir().and_then(|folder| {
        let source = folder.path().join("probe.cpp");
        let object = folder.path().join("probe.so");
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
            Check::ok(Build, name, format!("{version}{library}"))
        }
        Ok((output, _)) => {
            let found = format!(
                "{version}, but it compiles nothing: {}",
                first_line(&output.stderr)
            );
            Check::missing(
                Build,
                name,
                found,
                "it needs C++20, its standard library and OpenMP",
            )
        }
        Err(error) => Check::missing(
            Build,
            name,
            error.to_string(),
            "free some space for temporary files, or set TMPDIR",
        ),
    }
}

/// Returns the path of a program that `PATH` finds.
fn on_path(program: &Path) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found = env::split_paths(&path).map(|folder| folder.join(program));
    let found = found.find(|file| program.components().count() == 1 && file.is_file());
    found.unwrap_or_else(|| program.to_owned())
}

/// Returns the C++ library that a shared object was linked with, in words; nothing if it can't be read.
fn cpp_library(object: &Path) -> String {
    let Ok(Content::SharedObject(object)) = external::inspect(object).map(|report| report.content)
    else {
        return String::new();
    };
    let mut needed = object.needed.iter();
    match needed.find(|name| name.contains("++")) {
        Some(shared) => format!(", with {shared}"),
        None => ", with its C++ library inside each object".to_owned(),
    }
}

/// Looks whether the folder for temporary files takes what a build writes.
fn scratch() -> Check {
    let name = "temporary files";
    let folder = env::temp_dir();
    let shown = folder.display();
    if let Err(error) = tempfile::tempdir() {
        let found = format!("nothing can be written to {shown}: {error}");
        return Check::missing(Build, name, found, "set TMPDIR to a folder of your own");
    }
    let Ok(stat) = rustix::fs::statvfs(&folder) else {
        return Check::ok(Build, name, shown.to_string());
    };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let found = format!("{shown}, {} free", words::bytes(free));
    match free < 2 << 30 {
        true => Check::note(
            Build,
            name,
            found,
            "a build writes weights and objects there: set TMPDIR to a folder with more space",
        ),
        false => Check::ok(Build, name, found),
    }
}
