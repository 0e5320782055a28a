//! Reading a store that can't be written: as another user, and on a read-only mount. The shim counts what is tried.

use std::{
    fs::{self, Permissions},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::Command,
};

use crate::{actor, scene};

pub const WAYS: [&str; 3] = ["another user", "read-only mount", "no write permission"];

const NOBODY: u32 = 65534;

/// Runs everything that only reads in one of the [`WAYS`]; returns how many write-class calls it made.
pub fn reads(store: &Path, how: &str) -> Result<u64, String> {
    let dir = scene::scratch();
    // Another user has to come to it.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let root = dir.path().join("store");
    scene::copy(store, &root);
    let out = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
    fs::set_permissions(out.path(), Permissions::from_mode(0o777)).unwrap();
    let (count, shim) = (out.path().join("count"), out.path().join("shim.so"));
    let exe = out.path().join("actor");
    fs::copy(actor::shim(), &shim).unwrap();
    fs::copy(std::env::current_exe().unwrap(), &exe).unwrap();
    let root_user = rustix_uid() == 0;
    let mut command = match how {
        "read-only mount" => {
            if !root_user {
                return Err("skipped: only root can mount".into());
            }
            let mut command = Command::new("unshare");
            let script =
                "mount --bind \"$0\" \"$0\" && mount -o remount,ro,bind \"$0\" && exec \"$@\"";
            command
                .args(["--mount", "sh", "-c", script])
                .arg(&root)
                .arg(&exe);
            command
        }
        _ => Command::new(&exe),
    };
    command.args(["actor", "--exact", "--nocapture", "--test-threads=1"]);
    command
        .env("PRECAST_ACTOR", "read")
        .env("PRECAST_ACTOR_STORE", &root);
    command.env("LD_PRELOAD", &shim).env("SHIM_ROOT", &root);
    command.env("SHIM_MODE", "count").env("SHIM_OUT", &count);
    match how {
        "another user" if !root_user => return Err("skipped: only root can be another user".into()),
        "another user" => drop(command.uid(NOBODY).gid(NOBODY)),
        "no write permission" if root_user => {
            // Root may write everything; another user owns it and may not.
            let done = Command::new("chown")
                .args(["-R", "nobody"])
                .arg(&root)
                .status()
                .unwrap();
            assert!(done.success());
            let done = Command::new("chmod")
                .args(["-R", "a-w"])
                .arg(&root)
                .status()
                .unwrap();
            assert!(done.success());
            command.uid(NOBODY).gid(NOBODY);
        }
        "no write permission" => {
            let done = Command::new("chmod")
                .args(["-R", "a-w"])
                .arg(&root)
                .status()
                .unwrap();
            assert!(done.success());
        }
        _ => {}
    }
    let output = command
        .output()
        .map_err(|e| format!("skipped: {how}: {e}"))?;
    if how != "another user" && root_user {
        let _ = Command::new("chmod")
            .args(["-R", "u+w"])
            .arg(&root)
            .status();
    }
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if stderr.contains("unshare:") || stderr.contains("mount:") {
        return Err(format!("skipped: no mount: {stderr}"));
    }
    if !output.status.success() {
        return Err(format!("{}: {stderr}", output.status));
    }
    let text = fs::read_to_string(count).map_err(|e| format!("no count: {e}"))?;
    text.trim().parse().map_err(|_| text)
}

fn rustix_uid() -> u32 {
    let made = tempfile::tempfile().unwrap();
    std::os::unix::fs::MetadataExt::uid(&made.metadata().unwrap())
}
