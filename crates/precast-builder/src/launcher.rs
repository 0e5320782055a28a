//! The start of a worker: its program, files and environment.

use std::{
    ffi::OsString,
    fs::{DirBuilder, File},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{
    BuildError,
    lifeline::{self, Lifeline},
};

/// The worker's program, as paths from its folder and texts; written out where Python can run it.
const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/worker.rs"));

/// OpenMP's threads spin while they wait, by default. With more workers and compilers than cores that
/// made eager runs seven times as slow as need be.
pub(super) const WAIT_POLICY: &str = "passive";

/// The command and the environment of a worker.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The interpreter, or with `replaces_worker` the whole worker program.
    pub program: PathBuf,
    /// Arguments before the worker's own path; none is the usual case.
    pub args: Vec<OsString>,
    /// Start `program` itself, instead of the embedded worker under it.
    pub replaces_worker: bool,
    /// The folder of the interpreter's package `torch`, where it is known: the plan is for this one. Without it the
    /// plan is for the torch of the last build.
    pub torch: Option<PathBuf>,
    /// Also take a torch that is newer than the tried versions.
    pub untried: bool,
    /// A folder that outlives builds, for precompiled C++ headers. Without one, each build compiles its own.
    pub headers: Option<PathBuf>,
    /// Start workers as forks of a process that has imported torch: see the worker's `torch_private/forks.py`. Without it a build of
    /// several workers has a process of its own for that, which ends with it.
    pub forks: Option<Forks>,
}

/// Where workers find the process that they are forked from.
#[derive(Clone, Debug)]
pub struct Forks {
    /// The folder of its socket, which nobody else may enter.
    pub folder: PathBuf,
    /// The process that it ends with.
    pub owner: Option<u32>,
}

/// A Python program that prints, as JSON, a list of [`Off`](crate::protocol::Off) for the version of torch that is its
/// argument. It imports torch only if that is newer than the tried versions.
pub const WHAT_IS_OFF: &str = include_str!("../worker/torch_private/versions.py");

/// The command of a gate's process: see [`gate`](super::gate).
#[derive(Clone, Debug)]
pub struct GateCommand {
    /// The program to start.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
}

impl Launcher {
    /// Runs the embedded worker with this interpreter.
    pub fn python(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: vec![],
            replaces_worker: false,
            torch: None,
            untried: false,
            headers: None,
            forks: None,
        }
    }

    /// Runs `program` as the worker.
    pub fn program(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: vec![],
            replaces_worker: true,
            torch: None,
            untried: false,
            headers: None,
            forks: None,
        }
    }

    /// Starts a worker with its private files in `private`, in a separate process group.
    pub(super) fn spawn(&self, private: &Path) -> Result<(Child, Lifeline), BuildError> {
        let scratch_error = |source| BuildError::Scratch {
            path: private.to_owned(),
            source,
        };
        let mut command = self.command(private)?;
        for (variable, folder) in [
            ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
            ("TRITON_CACHE_DIR", "triton"),
            ("TMPDIR", "tmp"),
        ] {
            let folder = private.join(folder);
            std::fs::create_dir_all(&folder).map_err(scratch_error)?;
            command.env(variable, folder);
        }
        let stderr = File::create(log(private)).map_err(scratch_error)?;
        command
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("OMP_WAIT_POLICY", WAIT_POLICY)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr);
        lifeline::spawn(&mut command).map_err(|source| BuildError::NoPython {
            program: self.program.clone(),
            source,
        })
    }

    fn command(&self, private: &Path) -> Result<Command, BuildError> {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        if let Some(headers) = &self.headers {
            command.env("PRECAST_HEADER_DIR", headers);
        }
        if self.replaces_worker {
            return Ok(command);
        }
        let worker = unpack(private)?;
        match &self.forks {
            Some(Forks { folder, owner }) if self.args.is_empty() => {
                let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
                made.map_err(|source| BuildError::Scratch {
                    path: folder.clone(),
                    source,
                })?;
                command
                    .args(["-I", "-S", "-u"])
                    .arg(worker.join("torch_private/forks.py"));
                command.arg(folder).arg(worker);
                if let Some(owner) = owner {
                    command.env("PRECAST_FORKS_OWNER", owner.to_string());
                }
            }
            _ => {
                command.args(["-P", "-u"]).arg(worker);
            }
        }
        Ok(command)
    }
}

/// Writes the embedded worker into `private` and returns its folder. Each worker has its own copy: rewriting a shared
/// copy would truncate files while another worker reads them.
fn unpack(private: &Path) -> Result<PathBuf, BuildError> {
    let folder = private.join("precast_worker");
    let write = || {
        FILES.iter().try_for_each(|(name, text)| {
            let path = folder.join(name);
            path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(path, text)
        })
    };
    write().map_err(|source| BuildError::Scratch {
        path: folder.clone(),
        source,
    })?;
    Ok(folder)
}

/// Returns the path of a worker's log.
pub(super) fn log(private: &Path) -> PathBuf {
    private.join("log")
}

#[cfg(test)]
mod tests {
    use precast_store::target::TRIED;

    use super::*;

    #[test]
    fn the_worker_was_tried_with_the_versions_that_are_used() {
        let [(a, b), (c, d)] = TRIED;
        for line in [
            format!("\nOLDEST: Version = ({a}, {b})\n"),
            format!("\nNEWEST: Version = ({c}, {d})\n"),
        ] {
            assert!(WHAT_IS_OFF.contains(&line), "{line}");
        }
    }

    #[test]
    fn starting_a_worker_leaves_the_files_of_the_others_alone() {
        let scratch = tempfile::tempdir().unwrap();
        let launcher = Launcher::python("true");
        let [first, second] = ["worker-1", "worker-2"].map(|name| scratch.path().join(name));
        launcher.spawn(&first).unwrap().0.wait().unwrap();
        let mine = first.join("precast_worker").join(FILES[0].0);
        std::fs::write(&mine, "as it was").unwrap();
        launcher.spawn(&second).unwrap().0.wait().unwrap();
        assert_eq!(std::fs::read_to_string(mine).unwrap(), "as it was");
        assert!(second.join("precast_worker").join(FILES[0].0).exists());
    }

    #[test]
    fn every_file_of_the_worker_is_embedded() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("worker");
        let entries = walkdir::WalkDir::new(&folder)
            .into_iter()
            .map(Result::unwrap);
        let names = entries.map(|entry| {
            let name = entry.path().strip_prefix(&folder).unwrap();
            name.to_str().unwrap().to_owned()
        });
        let mut there: Vec<String> = names.filter(|name| name.ends_with(".py")).collect();
        there.sort();
        let mut embedded: Vec<&str> = FILES.iter().map(|(name, _)| *name).collect();
        embedded.sort();
        assert_eq!(there, embedded);
        assert!(embedded.contains(&"torch_private/__init__.py"));
    }

    #[test]
    fn the_worker_is_written_out_with_its_folders() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = unpack(scratch.path()).unwrap();
        for (name, text) in FILES {
            let written = std::fs::read_to_string(folder.join(name)).unwrap();
            assert_eq!(written, *text, "{name}");
        }
    }
}
