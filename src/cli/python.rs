//! The Python of builds and its torch: `--python`, else a `.venv`, else `python3` of the path.
//!
//! A `.venv` is found by its place: another user may have put it there. It is used only if no other user can change its
//! interpreter and libraries, by the rules for stores. A named interpreter is trusted.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use super::{exit, folders};
use crate::{
    build::{Forks, Launcher},
    store::{StoreError, check_path},
};

/// The interpreter of the worker.
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
    /// Accept a torch that is newer than the tried versions
    #[arg(long)]
    pub(super) untried_torch: bool,
    /// A program to start instead of Python with the built-in worker
    #[arg(long, env = "PRECAST_WORKER", value_name = "PROGRAM", hide = true)]
    worker: Option<PathBuf>,
    /// The folder of a process that workers are forks of, for as long as it is used
    #[arg(long, env = "PRECAST_FORKS", value_name = "FOLDER", hide = true)]
    forks: Option<PathBuf>,
    /// A program to start instead of this one to check a candidate
    #[arg(long, env = "PRECAST_GATE", value_name = "PROGRAM", hide = true)]
    pub(super) gate: Option<PathBuf>,
}

impl PythonArgs {
    /// Returns the interpreter that was named.
    pub(super) fn named(&self) -> Option<&Path> {
        self.python.as_deref()
    }

    /// Chooses the interpreter as [`Self::launcher`] does, also where another program replaces the worker.
    pub(super) fn interpreter(&self, root: &Path) -> PathBuf {
        let named = self.python.clone();
        named.unwrap_or_else(|| python_of(&[root, Path::new("")]))
    }

    /// Like [`Self::launcher`]. If no interpreter is named, uses that of the environment of a libtorch.
    pub(super) fn launcher_beside(&self, libtorch: &Path) -> Launcher {
        // <environment>/lib/python3.11/site-packages/torch/lib
        let real = libtorch.canonicalize().ok();
        let environment = real.as_deref().and_then(|folder| folder.ancestors().nth(5));
        let python = match (&self.python, &self.worker) {
            (None, None) => environment.and_then(python_in),
            _ => None,
        };
        match python {
            Some(program) => Launcher {
                program,
                ..self.launcher(Path::new(""))
            },
            None => self.launcher(Path::new("")),
        }
    }

    /// Chooses the interpreter: the one named, else a `.venv` in the folder of the spec or here, else the one on the
    /// path.
    pub(super) fn launcher(&self, root: &Path) -> Launcher {
        let chosen = match (&self.worker, &self.python) {
            (Some(worker), _) => Launcher::program(worker),
            (None, Some(python)) => Launcher::python(python),
            (None, None) => Launcher::python(python_of(&[root, Path::new("")])),
        };
        // A program that replaces the worker may use the named interpreter.
        let python = if chosen.replaces_worker {
            self.python.as_ref()
        } else {
            Some(&chosen.program)
        };
        Launcher {
            torch: python.and_then(|python| in_environment(python)),
            untried: self.untried_torch,
            headers: folders::cache().map(|folder| folder.join("headers")),
            forks: (self.forks.clone()).map(|folder| Forks {
                folder,
                owner: None,
            }),
            ..chosen
        }
    }
}

/// Returns the Python in use, without a spec.
pub(super) fn in_use() -> PathBuf {
    let named = std::env::var_os("PRECAST_PYTHON").filter(|name| !name.is_empty());
    named.map_or_else(|| python_of(&[Path::new("")]), PathBuf::from)
}

/// Returns the interpreter of the environment that this program was installed into by `pip`, else of the first of these
/// folders that has a safe `.venv`, else the one on the path.
fn python_of(folders: &[&Path]) -> PathBuf {
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(environment_of);
    let beside = folders.iter().map(|folder| folder.join(".venv"));
    let found = own.into_iter().chain(beside);
    let found = found.into_iter().find_map(|folder| python_in(&folder));
    found.unwrap_or_else(|| PathBuf::from("python3"))
}

/// Returns the environment of a program that is a script of the wheel: the package `precast` is in it.
fn environment_of(program: &Path) -> Option<PathBuf> {
    let environment = program.parent()?.parent()?;
    let versions = entries(&environment.join("lib"));
    let has_package = |version: PathBuf| version.join("site-packages/precast/py.typed").exists();
    (versions.into_iter().any(has_package)).then(|| environment.to_owned())
}

/// Returns the interpreter of an environment, if it is safe. Warns once for each unsafe one.
fn python_in(environment: &Path) -> Option<PathBuf> {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let python = environment.join("bin/python");
    if !python.exists() {
        return None;
    }
    let Err(error) = check(environment) else {
        return Some(python);
    };
    let place = fs::canonicalize(environment).unwrap_or_default();
    if WARNED.lock().is_ok_and(|mut warned| warned.insert(place)) {
        let (environment, python) = (environment.display(), python.display());
        let hint = format!(
            "its code would run as this user: `PRECAST_PYTHON={python}` uses it all the same"
        );
        let warning = format!("`{environment}` is not used: {error}");
        exit::tell_warning(&warning, Some(&hint));
    }
    None
}

/// Refuses an environment that another user could change: its folders, its interpreter, its torch.
fn check(environment: &Path) -> Result<(), StoreError> {
    let own = ["", "bin", "bin/python", "pyvenv.cfg", "lib", "lib64"];
    let mut paths: Vec<PathBuf> = own.iter().map(|name| environment.join(name)).collect();
    for version in entries(&environment.join("lib")) {
        let site = version.join("site-packages");
        let torch = site.join("torch");
        let libraries = torch.join("lib");
        paths.extend(entries(&libraries));
        paths.extend([version, site, torch, libraries]);
    }
    let there = paths.iter().filter(|path| path.symlink_metadata().is_ok());
    there.into_iter().try_for_each(|path| check_path(path))
}

/// Returns the paths in a folder; empty if it can't be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Returns the folder of the package `torch` of a Python; none without one.
pub(super) fn torch_of(python: &Path) -> Option<PathBuf> {
    in_environment(python).or_else(|| asked(python))
}

/// Returns the folder of the package `torch` in the environment of a Python, without starting it.
fn in_environment(python: &Path) -> Option<PathBuf> {
    let bin = python.parent()?;
    // `python3` and `./python3` are in no environment: `lib` of the current folder is not theirs.
    bin.file_name()?;
    let versions = entries(&bin.parent()?.join("lib"));
    versions.into_iter().find_map(|version| {
        let name = version.file_name()?.to_str()?;
        let torch = version.join("site-packages/torch");
        (name.starts_with("python3") && has_libtorch(&torch)).then_some(torch)
    })
}

fn has_libtorch(torch: &Path) -> bool {
    torch.join("lib/libtorch_cpu.so").exists()
}

/// Runs a Python to find its torch. It imports nothing of torch, and nothing from the current folder (`-P`).
fn asked(python: &Path) -> Option<PathBuf> {
    const ASK: &str = "import importlib.util as u; s = u.find_spec('torch')\n\
        print(s.submodule_search_locations[0] if s else '')";
    let output = Command::new(python).args(["-P", "-c", ASK]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(text.trim())).filter(|folder| has_libtorch(folder))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_environment_of_a_wheel_is_that_of_its_package() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("bin/precast");
        assert_eq!(environment_of(&program), None);
        let package = folder.path().join("lib/python3.12/site-packages/precast");
        std::fs::create_dir_all(&package).unwrap();
        assert_eq!(environment_of(&program), None);
        std::fs::write(package.join("py.typed"), "").unwrap();
        assert_eq!(environment_of(&program).as_deref(), Some(folder.path()));
    }

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
        assert_eq!(in_environment(Path::new("python3")), None);
        assert_eq!(in_environment(Path::new("./python3")), None);
    }

    #[test]
    fn an_environment_is_used_only_if_no_other_user_can_change_what_is_loaded_from_it() {
        let folder = tempfile::tempdir().unwrap();
        let environment = folder.path().join(".venv");
        let libraries = environment.join("lib/python3.12/site-packages/torch/lib");
        fs::create_dir_all(&libraries).unwrap();
        fs::create_dir(environment.join("bin")).unwrap();
        let target = folder.path().join("interpreter");
        let python = environment.join("bin/python");
        std::os::unix::fs::symlink(&target, &python).unwrap();
        let library = libraries.join("libtorch_cpu.so");
        let [settings, bin] = ["pyvenv.cfg", "bin"].map(|name| environment.join(name));
        for file in [&target, &settings, &library] {
            fs::write(file, "").unwrap();
        }
        let mut places = vec![target.as_path()];
        places.extend(library.ancestors().take(8));
        places.extend([settings.as_path(), &bin]);
        assert_eq!(places[8], folder.path());
        for place in places {
            assert_eq!(python_in(&environment).as_ref(), Some(&python));
            let sound = fs::metadata(place).unwrap().permissions();
            // A sticky bit keeps others from replacing the environment, and not from writing inside it.
            let inside = place.starts_with(&environment);
            let modes = [0o777, 0o1777, 0o757];
            for &mode in &modes[..if inside { 3 } else { 1 }] {
                fs::set_permissions(place, fs::Permissions::from_mode(mode)).unwrap();
                assert_eq!(python_in(&environment), None, "{place:?} {mode:o}");
            }
            fs::set_permissions(place, sound).unwrap();
        }
    }
}
