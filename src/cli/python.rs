//! Which Python builds, and with which torch: `--python`, else a `.venv`, else the one on the path.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::build::Launcher;

/// What the worker is started with.
#[derive(clap::Args)]
pub(super) struct PythonArgs {
    /// Python interpreter that has torch [default: `.venv/bin/python` beside the spec or in the current folder, else
    /// `python3`]
    #[arg(
        long,
        env = "PRECAST_PYTHON",
        value_name = "PATH",
        hide_env_values = true
    )]
    python: Option<PathBuf>,
    /// Build also with a torch that is newer than what was tried
    #[arg(long)]
    untried_torch: bool,
    /// A program to start instead of Python with the built-in worker
    #[arg(long, env = "PRECAST_WORKER", value_name = "PROGRAM", hide = true)]
    worker: Option<PathBuf>,
    /// A program to start instead of this one to check a candidate
    #[arg(long, env = "PRECAST_GATE", value_name = "PROGRAM", hide = true)]
    pub(super) gate: Option<PathBuf>,
}

impl PythonArgs {
    /// Returns the interpreter that was named.
    pub(super) fn named(&self) -> Option<&Path> {
        self.python.as_deref()
    }

    /// As [`Self::launcher`], where no interpreter is named with the one of the environment that a libtorch lies in.
    pub(super) fn launcher_beside(&self, libtorch: &Path) -> Launcher {
        // <environment>/lib/python3.11/site-packages/torch/lib
        let real = libtorch.canonicalize().ok();
        let environment = real.as_deref().and_then(|folder| folder.ancestors().nth(5));
        let python = environment.map(|environment| environment.join("bin/python"));
        let mut launcher = self.launcher(Path::new(""));
        if let (Some(python), None, false) = (python, &self.python, launcher.replaces_worker)
            && python.exists()
        {
            launcher.program = python;
        }
        launcher
    }

    /// Chooses the interpreter: the one named, else a `.venv` in the folder of the spec or here, else the one on the path.
    pub(super) fn launcher(&self, root: &Path) -> Launcher {
        let chosen = match (&self.worker, &self.python) {
            (Some(worker), _) => Launcher::program(worker),
            (None, Some(python)) => Launcher::python(python),
            (None, None) => Launcher::python(python_of(&[root, Path::new("")])),
        };
        // A worker that replaces the interpreter may speak for one that is named.
        let python = match chosen.replaces_worker {
            true => self.python.as_ref(),
            false => Some(&chosen.program),
        };
        Launcher {
            torch: python.and_then(|python| in_environment(python)),
            untried: self.untried_torch,
            headers: cache_folder("headers"),
            bytecode: cache_folder("bytecode"),
            ..chosen
        }
    }
}

/// Returns the Python in use where no spec says more.
pub(super) fn in_use() -> PathBuf {
    let named = std::env::var_os("PRECAST_PYTHON").filter(|name| !name.is_empty());
    named.map_or_else(|| python_of(&[Path::new("")]), PathBuf::from)
}

/// Returns the interpreter of the first of these folders that has a `.venv`, else the one on the path.
fn python_of(folders: &[&Path]) -> PathBuf {
    let beside = folders.iter().map(|folder| folder.join(".venv/bin/python"));
    let mut found = beside.filter(|python| python.exists());
    found.next().unwrap_or_else(|| PathBuf::from("python3"))
}

/// Where something is kept between builds: in the user's cache folder, if there is one.
fn cache_folder(what: &str) -> Option<PathBuf> {
    let absolute = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("precast").join(what))
}

/// Returns the folder of the package `torch` of a Python; none without one.
pub(super) fn torch_of(python: &Path) -> Option<PathBuf> {
    in_environment(python).or_else(|| asked(python))
}

/// Returns the folder of the package `torch` in the environment of a Python, without starting it.
fn in_environment(python: &Path) -> Option<PathBuf> {
    let beside = python.parent().and_then(Path::parent);
    let lib = beside.map(|root| root.join("lib"));
    let versions = lib.and_then(|lib| std::fs::read_dir(lib).ok());
    let names = versions.into_iter().flatten().flatten();
    let mut found = names.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let torch = entry.path().join("site-packages/torch");
        (name.starts_with("python3") && torch.join("lib/libtorch_cpu.so").exists()).then_some(torch)
    });
    found.next()
}

/// Asks a Python where its torch is; nothing of torch is imported.
fn asked(python: &Path) -> Option<PathBuf> {
    const ASK: &str = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')";
    let output = Command::new(python).args(["-c", ASK]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let folder = PathBuf::from(text.trim());
    folder
        .join("lib/libtorch_cpu.so")
        .exists()
        .then_some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_torch_of_an_environment_is_found_without_its_python() {
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("bin/python");
        assert_eq!(torch_of(&python), None);
        let torch = folder.path().join("lib/python3.12/site-packages/torch");
        std::fs::create_dir_all(torch.join("lib")).unwrap();
        assert_eq!(
            torch_of(&python),
            None,
            "a package without libtorch is none"
        );
        std::fs::write(torch.join("lib/libtorch_cpu.so"), "").unwrap();
        assert_eq!(torch_of(&python), Some(torch));
    }
}
