//! The libtorch of a command: the named one, else that of the Python in use.

use std::path::{Path, PathBuf};

use super::python;

/// The folder of a libtorch.
#[derive(clap::Args)]
pub(super) struct LibtorchFolder {
    /// The folder of the libtorch to run with, that of the package `torch` [default: torch of the Python in use:
    /// `.venv/bin/python` in the current folder, else `python3`]
    #[arg(long, env = "LIBTORCH", value_name = "DIR", hide_env_values = true)]
    libtorch: Option<PathBuf>,
}

impl LibtorchFolder {
    /// Returns the folder that is named, else that of the torch of the Python in use. Opens nothing.
    pub(super) fn find(&self) -> Option<PathBuf> {
        self.find_beside(None)
    }

    /// As [`Self::find`], where this Python is in use.
    fn find_beside(&self, used: Option<&Path>) -> Option<PathBuf> {
        let named = self.libtorch.clone();
        named.or_else(|| match used {
            Some(python) => python::torch_of(python),
            None => python::torch_of(&python::in_use()),
        })
    }
}

/// The libtorch to open.
#[derive(clap::Args)]
pub(super) struct LibtorchArgs {
    #[command(flatten)]
    pub(super) folder: LibtorchFolder,
    /// Accept a torch that is newer than the tried versions
    #[arg(long)]
    pub(super) untried_libtorch: bool,
}

impl LibtorchArgs {
    /// Opens libtorch for this process.
    pub(super) fn open(&self) -> anyhow::Result<&'static crate::runtime::Libtorch> {
        self.open_for(None)
    }

    /// Opens the libtorch of the Python `named`, if that is named and has one, else as [`Self::open`].
    pub(super) fn open_for(
        &self,
        named: Option<&Path>,
    ) -> anyhow::Result<&'static crate::runtime::Libtorch> {
        let folder = named.and_then(python::torch_of);
        self.open_in(folder.or_else(|| self.folder.find()))
    }

    /// Opens the libtorch that is named, else that of this Python, else of the one in use.
    pub(super) fn open_beside(
        &self,
        used: Option<&Path>,
    ) -> anyhow::Result<&'static crate::runtime::Libtorch> {
        self.open_in(self.folder.find_beside(used))
    }

    fn open_in(
        &self,
        folder: Option<PathBuf>,
    ) -> anyhow::Result<&'static crate::runtime::Libtorch> {
        let open = crate::Runtime::libtorch(folder.as_deref(), self.untried_libtorch);
        open.map_err(Into::into)
    }
}
