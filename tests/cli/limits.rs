//! Limits of a worker, and its end together with all its descendants.

use std::process::Stdio;

use crate::sandbox::{Sandbox, alive, wait_until};

#[test]
fn a_worker_that_dies_or_hangs_or_takes_too_much_memory_fails_one_program() {
    for (steer, says, option) in [
        (
            "dies",
            "the worker ended in the middle of a request (signal: 9 (SIGKILL))",
            &[][..],
        ),
        (
            "hangs",
            "the worker did not answer within 15 s",
            &["--timeout", "15"],
        ),
        (
            "eats",
            "the worker took too much memory: ",
            &["--memory", "300MiB"],
        ),
    ] {
        let sandbox = Sandbox::steered(&[&format!("compile {steer} batch=1")]);
        let ran = sandbox.ok(&[&["build", "-j", "1"], option].concat());
        ran.says(&format!("\nfailed affine batch=1: {says}"));
        ran.says("\nbuilt 1 program, 1 artifact compiled (");
        ran.says("\npublished fake release 1\n");
        if steer == "eats" {
            ran.says(" of 300 MiB allowed\n");
        }
        sandbox.run(&["log", "affine", "batch=1"]).prints(says);
    }
}

#[test]
fn processes_of_a_worker_end_with_the_build() {
    let sandbox = Sandbox::new();
    // A child in a session of its own, which no signal to the worker's group reaches.
    sandbox.append("model.py", "# fake: compile spawns batch=4");
    let mut build = sandbox.command(&["build", "-q", "-j", "1"]);
    let child = build.stderr(Stdio::piped()).spawn().unwrap();
    let file = sandbox.path("spawned");
    wait_until("nothing was spawned", || file.exists());
    let pid = std::fs::read_to_string(&file).unwrap();
    assert!(alive(&pid), "{pid}");
    let interrupt = ["-INT", &child.id().to_string()];
    let status = std::process::Command::new("kill").args(interrupt).status();
    assert!(status.unwrap().success());
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130));
    wait_until("a grandchild outlived the build", || !alive(&pid));
    assert_eq!(sandbox.files("tmp"), [] as [std::path::PathBuf; 0]);
}

/// Returns all descendants of a process.
fn descendants(of: &str) -> Vec<String> {
    let mut found = vec![of.to_owned()];
    let mut at = 0;
    while let Some(next) = found.get(at).cloned() {
        at += 1;
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let pid = entry.file_name().to_string_lossy().into_owned();
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat
                .rsplit_once(") ")
                .and_then(|(_, rest)| rest.split(' ').nth(1));
            if parent == Some(&next) {
                found.push(pid);
            }
        }
    }
    found.split_off(1)
}

#[test]
fn a_killed_build_leaves_no_process_and_its_folder_goes_with_the_next_command() {
    let sandbox = Sandbox::new();
    // Several workers, one in the middle of a compile, and processes that wait to gate.
    sandbox.append("model.py", "# fake: compile waits");
    let kill = || {
        let waiting = sandbox.path("waiting");
        let _ = std::fs::remove_file(&waiting);
        let mut child = sandbox
            .command(&["build", "-q", "-j", "4"])
            .spawn()
            .unwrap();
        wait_until("nothing was compiled", || waiting.exists());
        let family = descendants(&child.id().to_string());
        assert!(family.len() > 1, "{family:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until("a worker outlived the build", || {
            !family.iter().any(|pid| alive(pid))
        });
        let left = std::fs::read_dir(sandbox.path("tmp")).unwrap().count();
        assert_eq!(left, 1);
    };
    let gone = || assert_eq!(sandbox.files("tmp").len(), 0, "{:?}", sandbox.files("tmp"));

    kill();
    let plan = sandbox.run(&["gc", "--dry-run"]);
    plan.says("would remove 1 folder of builds that were killed\n");
    assert!(!sandbox.files("tmp").is_empty());
    sandbox
        .run(&["gc"])
        .says("removed 1 folder of builds that were killed\n");
    gone();
    kill();
    sandbox.ok(&["verify", "--repair"]);
    gone();
    kill();
    sandbox.write("go", "");
    sandbox.ok(&["build", "-q"]);
    gone();
}

#[test]
fn a_trace_has_a_lane_for_each_worker() {
    let sandbox = Sandbox::new();
    sandbox.ok(&["build", "-q", "-j", "2", "--trace", "trace.json"]);
    let text = std::fs::read_to_string(sandbox.path("trace.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&text).unwrap();
    let slices = trace["traceEvents"].as_array().unwrap();
    for (name, lane) in [
        ("capture affine batch=4", None),
        ("compile affine batch=1", None),
        ("gate affine batch=4", None),
        ("open the model", Some(0)),
        ("prepare", Some(1)),
    ] {
        let is_named =
            |slice: &serde_json::Value| slice["name"].as_str().unwrap().starts_with(name);
        let mut named = slices.iter().filter(|slice| is_named(slice));
        assert!(
            named.any(|slice| lane.is_none_or(|lane| slice["tid"] == lane)),
            "{name}: {text}"
        );
    }
    assert!(
        slices
            .iter()
            .all(|slice| slice["ts"].as_f64().unwrap() >= 0.0)
    );
}
