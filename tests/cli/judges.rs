//! The processes that judge: started before there is anything to judge, as many as there will be use for, and no longer there
//! than that.

use std::process::Command;

use serde_json::Value;

use crate::{
    gate::judged_by,
    sandbox::{Sandbox, alive, wait_until},
};

/// Returns the numbers of the processes that were started to judge.
fn judges(sandbox: &Sandbox) -> Vec<String> {
    let text = std::fs::read_to_string(sandbox.path("judges")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Returns a build whose two compiles wait for a file `go`, and one process that waits for what it is to judge.
fn awaited(sandbox: &Sandbox) -> (std::process::Child, String) {
    let build = waiting(sandbox, "# fake: compile waits");
    let [one] = &judges(sandbox)[..] else {
        panic!("one at a time: {:?}", judges(sandbox));
    };
    (build, one.clone())
}

/// Returns a build that waits in a compile for a file `go`, and has started a process that judges.
fn waiting(sandbox: &Sandbox, fake: &str) -> std::process::Child {
    let build = with_judges("2", sandbox, fake);
    wait_until("nobody waits to judge what is compiled", || {
        !judges(sandbox).is_empty() && sandbox.path("waiting").exists()
    });
    build
}

/// Returns a build by so many workers that says who is started to judge.
fn with_judges(jobs: &str, sandbox: &Sandbox, fake: &str) -> std::process::Child {
    sandbox.append("model.py", fake);
    let script = format!(
        "echo $$ >> {}\nexec {} \"$@\"",
        sandbox.path("judges").display(),
        env!("CARGO_BIN_EXE_precast-torch"),
    );
    judged_by(jobs, sandbox, &script).arg("-q").spawn().unwrap()
}

/// Returns how often a program was run when it was judged.
fn judged(sandbox: &Sandbox) -> Value {
    sandbox.json(&["show", "affine", "batch=4"])["receipt"]["gate"]["steps"].clone()
}

#[test]
fn who_judges_is_started_before_there_is_anything_to_judge() {
    let sandbox = Sandbox::new();
    let (mut build, one) = awaited(&sandbox);
    assert!(alive(&one));
    sandbox.write("go", "");
    assert!(build.wait().unwrap().success());
    let judges = judges(&sandbox);
    assert_eq!(judges.len(), 2, "one for each program: {judges:?}");
    assert!(!judges.iter().any(|judge| alive(judge)), "{judges:?}");
    assert_eq!(judged(&sandbox), 3);
}

#[test]
fn where_there_are_many_workers_several_wait_to_judge() {
    let sandbox = Sandbox::new();
    let mut build = with_judges("8", &sandbox, "# fake: compile waits");
    wait_until("one waits for each program", || judges(&sandbox).len() == 2);
    assert!(judges(&sandbox).iter().all(|judge| alive(judge)));
    sandbox.write("go", "");
    assert!(build.wait().unwrap().success());
    let judges = judges(&sandbox);
    assert!(!judges.iter().any(|judge| alive(judge)), "{judges:?}");
    assert_eq!(judged(&sandbox), 3);
}

/// Returns the processes that this one has started and that run.
fn children(of: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{of}/task")).unwrap();
    let of_task = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default()
    };
    let all = tasks.map(of_task).collect::<Vec<_>>().concat();
    all.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn workers_end_where_only_gates_are_left() {
    let sandbox = Sandbox::new();
    let script = format!(
        "echo $$ >> {judges}\nif [ $(wc -l < {judges}) -gt 1 ]; then while [ ! -e {go} ]; do sleep 0.05; done; fi\n\
        exec {program} \"$@\"",
        judges = sandbox.path("judges").display(),
        go = sandbox.path("go").display(),
        program = env!("CARGO_BIN_EXE_precast-torch"),
    );
    // One after the other: nothing is compiled when the second is judged.
    let mut build = judged_by("1", &sandbox, &script).arg("-q").spawn().unwrap();
    wait_until("there is a worker beside who judges", || {
        let judges = judges(&sandbox);
        let mut others = children(build.id())
            .into_iter()
            .filter(|child| alive(child));
        judges.len() == 2 && others.all(|child| judges.contains(&child))
    });
    sandbox.write("go", "");
    assert!(build.wait().unwrap().success());
    assert_eq!(judged(&sandbox), 3);
}

#[test]
fn nobody_waits_to_judge_while_work_that_memory_was_short_for_is_done_alone() {
    let sandbox = Sandbox::new();
    // It waits when it is done again.
    let fake = "# fake: compile is short batch=4\n# fake: compile waits batch=4";
    let mut build = waiting(&sandbox, fake);
    assert!(sandbox.path("short").exists());
    let before = judges(&sandbox);
    assert!(!before.iter().any(|judge| alive(judge)), "{before:?}");
    sandbox.write("go", "");
    assert!(build.wait().unwrap().success());
    assert_eq!(judged(&sandbox), 3);
}

#[test]
fn another_one_judges_where_the_first_died_waiting() {
    let sandbox = Sandbox::new();
    let (mut build, one) = awaited(&sandbox);
    let killed = Command::new("kill").args(["-9", &one]).status();
    assert!(killed.unwrap().success());
    wait_until("it is not dead", || !alive(&one));
    sandbox.write("go", "");
    assert!(build.wait().unwrap().success());
    assert_eq!(judges(&sandbox).len(), 3);
    assert_eq!(judged(&sandbox), 3);
}

#[test]
fn who_waits_to_judge_ends_with_a_build_that_is_interrupted() {
    let sandbox = Sandbox::new();
    let (mut build, one) = awaited(&sandbox);
    let asked = Command::new("kill")
        .args(["-INT", &build.id().to_string()])
        .status();
    assert!(asked.unwrap().success());
    assert_eq!(build.wait().unwrap().code(), Some(130));
    assert!(!alive(&one));
}
