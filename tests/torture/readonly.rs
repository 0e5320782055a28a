//! Reads a read-only store, as another user and on a read-only mount. The shim counts attempts to write.

use std::{
    fs::{self, Permissions},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::{actor, sandbox::Sandbox, scene};

pub const WAYS: [&str; 3] = ["another user", "read-only mount", "no write permission"];

const NOBODY: u32 = 65534;

/// The commands that only read. `PROGRAM` and `RELEASED` stand for an ID and a model of the store.
const COMMANDS: &[&[&str]] = &[
    &["ls"],
    &["ls", "--format", "json", "--sort", "size-"],
    &["ls", "--artifacts"],
    &["show", "PROGRAM"],
    &["verify"],
    &["du"],
    &["why", "PROGRAM"],
    &["release", "ls"],
    &["gc", "--unreleased", "--dry-run"],
    &["report", "-o", "report.html"],
];

/// A copy of a store that can't be written, and how to run something on it.
struct Ground {
    how: &'static str,
    _dir: TempDir,
    /// Where others may write: the count of calls, and copies of programs they can run.
    out: TempDir,
    store: PathBuf,
}

impl Ground {
    /// Copies `store` to where it can be read in one of the [`WAYS`] only.
    fn new(store: &Path, how: &'static str) -> Self {
        let dir = scene::scratch();
        // Another user has to come to it.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let root = dir.path().join("store");
        scene::copy(store, &root);
        if how == "no write permission" {
            if is_root() {
                // Root may write everything; another user owns it and may not.
                change("chown", "nobody", &root);
            }
            change("chmod", "a-w", &root);
        }
        let out = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
        fs::set_permissions(out.path(), Permissions::from_mode(0o777)).unwrap();
        fs::copy(actor::shim(), out.path().join("shim.so")).unwrap();
        Self {
            how,
            _dir: dir,
            out,
            store: root,
        }
    }

    /// Copies a program to where another user can run it.
    fn program(&self, path: &Path) -> PathBuf {
        let to = self.out.path().join(path.file_name().unwrap());
        fs::copy(path, &to).unwrap();
        to
    }

    /// Runs a program, which must succeed; returns its number of write-class calls on the store, and its output.
    fn run(&self, program: &Path, args: &[&str], env: &[(&str, &Path)]) -> Result<(u64, String)> {
        let mut command = match self.how {
            "read-only mount" if !is_root() => bail!("skipped: only root can mount"),
            "read-only mount" => {
                let script =
                    "mount --bind \"$0\" \"$0\" && mount -o remount,ro,bind \"$0\" && exec \"$@\"";
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-c", script]);
                command.arg(&self.store).arg(program);
                command
            }
            "another user" if !is_root() => bail!("skipped: only root can be another user"),
            _ => Command::new(program),
        };
        if self.how != "read-only mount" && is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let count = self.out.path().join("count");
        let _ = fs::remove_file(&count);
        command
            .args(args)
            .current_dir(self.out.path())
            .envs(env.iter().copied())
            .env("LD_PRELOAD", self.out.path().join("shim.so"))
            .env("SHIM_ROOT", &self.store)
            .env("SHIM_MODE", "count")
            .env("SHIM_OUT", &count);
        let output = command
            .output()
            .with_context(|| format!("skipped: {}", self.how))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let no_mount = stderr.contains("unshare:") || stderr.contains("mount:");
        ensure!(!no_mount, "skipped: no mount: {stderr}");
        let status = output.status;
        ensure!(status.success(), "{args:?}: {status}: {stderr}");
        let text = fs::read_to_string(count).context("no count")?;
        let calls = text.trim().parse().context(text)?;
        Ok((calls, String::from_utf8_lossy(&output.stdout).into_owned()))
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        if self.how == "no write permission" {
            change("chmod", "u+w", &self.store);
        }
    }
}

/// Reads everything through the library, then with every one of the [`COMMANDS`]; returns how many things were run and
/// how many write-class calls they made.
pub fn reads(store: &Path, program: &str, how: &'static str) -> Result<(u64, u64)> {
    let ground = Ground::new(store, how);
    let actor = ground.program(&std::env::current_exe().unwrap());
    let env = [
        ("PRECAST_ACTOR", Path::new("read")),
        ("PRECAST_ACTOR_STORE", &*ground.store),
    ];
    let args = ["actor", "--exact", "--nocapture", "--test-threads=1"];
    let (mut calls, _) = ground.run(&actor, &args, &env)?;
    let precast = ground.program(Path::new(env!("CARGO_BIN_EXE_precast")));
    for args in COMMANDS {
        let named = |arg: &&'static str| if *arg == "PROGRAM" { program } else { arg };
        let args: Vec<&str> = args.iter().map(named).collect();
        let (more, out) = ground.run(&precast, &args, &[("PRECAST_STORE", &*ground.store)])?;
        ensure!(
            !out.is_empty() || args[0] == "report",
            "{args:?} printed nothing"
        );
        calls += more;
    }
    Ok((1 + COMMANDS.len() as u64, calls))
}

/// Runs a model from a store that can only be read, its artifacts and weights in memory; returns how many write-class
/// calls that made.
pub fn runs(sandbox: &Sandbox, how: &'static str) -> Result<u64> {
    let ground = Ground::new(&sandbox.path("artifacts"), how);
    let inputs = sandbox.path("x.safetensors");
    fs::copy(inputs, ground.out.path().join("x.safetensors")).unwrap();
    let precast = ground.program(Path::new(env!("CARGO_BIN_EXE_precast")));
    let libtorch = Path::new(crate::sandbox::LIBTORCH);
    let args = "run affine --inputs x.safetensors --outputs y.safetensors";
    let args: Vec<&str> = args.split(' ').collect();
    let env = [("PRECAST_STORE", &*ground.store), ("LIBTORCH", libtorch)];
    let (calls, out) = ground.run(&precast, &args, &env)?;
    let written = ground.out.path().join("y.safetensors").exists();
    ensure!(written && out.contains("affine batch=4"), out);
    Ok(calls)
}

fn is_root() -> bool {
    tempfile::tempfile().unwrap().metadata().unwrap().uid() == 0
}

fn change(tool: &str, to: &str, folder: &Path) {
    let mut change = Command::new(tool);
    let done = change.args(["-R", to]).arg(folder).status();
    assert!(done.unwrap().success());
}
