//! Which libtorch a command uses: the one that is named, else that of the Python in use.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::build::python_of;

#[derive(clap::Args)]
pub(super) struct LibtorchArgs {
    /// The folder of the libtorch to run with, that of the package `torch` [default: torch of the Python in use:
    /// `.venv/bin/python` in the current folder, else `python3`]
    #[arg(long, env = "LIBTORCH", value_name = "DIR", hide_env_values = true)]
    pub(super) libtorch: Option<PathBuf>,
    /// Run also with a torch that is newer than what was tried
    #[arg(long)]
    pub(super) untried_libtorch: bool,
}

impl LibtorchArgs {
    /// Opens libtorch for this process.
    #[cfg(feature = "torch")]
    pub(super) fn open(&self) -> anyhow::Result<&'static crate::runtime::Libtorch> {
        self.open_for(None)
    }

    /// Opens the libtorch of the Python `named`, if that is named and has one, else as [`Self::open`].
    #[cfg(feature = "torch")]
    pub(super) fn open_for(
        &self,
        named: Option<&Path>,
    ) -> anyhow::Result<&'static crate::runtime::Libtorch> {
        let folder = named
            .and_then(of_python)
            .or_else(|| self.libtorch.clone())
            .or_else(|| of_python(&python()));
        let open = crate::Runtime::libtorch(folder.as_deref(), self.untried_libtorch);
        open.map_err(Into::into)
    }
}

/// Returns the Python in use where no spec says more.
fn python() -> PathBuf {
    let named = std::env::var_os("PRECAST_PYTHON").filter(|name| !name.is_empty());
    named.map_or_else(|| python_of(&[Path::new("")]), PathBuf::from)
}

/// Returns the folder of the package `torch` of a Python; none without one.
fn of_python(python: &Path) -> Option<PathBuf> {
    in_environment(python).or_else(|| asked(python))
}

/// Returns the folder of the package `torch` in the environment of a Python, without starting it.
pub(super) fn in_environment(python: &Path) -> Option<PathBuf> {
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
        assert_eq!(of_python(&python), None);
        let torch = folder.path().join("lib/python3.12/site-packages/torch");
        std::fs::create_dir_all(torch.join("lib")).unwrap();
        assert_eq!(
            of_python(&python),
            None,
            "a package without libtorch is none"
        );
        std::fs::write(torch.join("lib/libtorch_cpu.so"), "").unwrap();
        assert_eq!(of_python(&python), Some(torch));
    }
}
