//! `kill -9` of a build, at every kind of moment: the next build finishes from what is there.

use std::{os::unix::process::ExitStatusExt, path::Path, process::Command};

use crate::sandbox::Sandbox;

/// Compiles the shim of the torture tests, which kills at the N-th call that would write.
fn shim(sandbox: &Sandbox) -> std::path::PathBuf {
    let library = sandbox.path("shim.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torture/shim.c");
    let flags = ["-O2", "-shared", "-fPIC", "-o"];
    let cc = Command::new("cc")
        .args(flags)
        .arg(&library)
        .arg(source)
        .arg("-ldl")
        .status();
    assert!(cc.unwrap().success());
    library
}

/// Returns `precast build` under the shim.
fn build(sandbox: &Sandbox, mode: &str, at: u64) -> Command {
    let mut command = sandbox.command(&["build", "-q"]);
    command
        .env("LD_PRELOAD", shim(sandbox))
        .env("SHIM_ROOT", sandbox.path("artifacts"))
        .env("SHIM_MODE", mode)
        .env("SHIM_AT", at.to_string());
    command
}

#[test]
fn a_killed_build_is_finished_by_the_next_one() {
    let sandbox = Sandbox::new();
    let mut count = build(&sandbox, "count", 0);
    count.env("SHIM_OUT", sandbox.path("count"));
    assert!(count.status().unwrap().success());
    // The gate is a process of its own that only reads the store; the last one to end is the build.
    let text = std::fs::read_to_string(sandbox.path("count")).unwrap();
    let calls: u64 = text.trim().parse().unwrap();
    assert!(calls > 50, "{calls}");
    let mut killed = 0;
    for at in (1..=calls).step_by((calls / 7) as usize) {
        let sandbox = Sandbox::new();
        let status = build(&sandbox, "kill", at).status().unwrap();
        killed += u32::from(status.signal() == Some(9));
        let next = sandbox.run(&["build", "-q"]);
        assert_eq!(next.code, 0, "killed at {at} of {calls}: {}", next.text());
        let verified = sandbox.run(&["verify"]);
        assert_eq!(verified.code, 0, "killed at {at}: {}", verified.text());
        let again = sandbox.run(&["plan"]);
        assert!(
            again.stdout.contains("0 of 2 programs"),
            "killed at {at}: {}",
            again.text()
        );
    }
    assert!(killed >= 6, "{killed}");
}
