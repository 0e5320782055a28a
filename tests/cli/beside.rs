//! Workers that make the model while the first one does, and what becomes of a build where that goes wrong.

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use crate::{
    sandbox::Sandbox,
    workers::{by, done, events, events_until},
};

/// Has the first worker make the model no sooner than another one does.
fn made_beside(sandbox: &Sandbox, failing: &str) {
    let text = r#"
import os, pathlib, time
beside = pathlib.Path(__file__).with_name("beside")
if "worker-0" in os.environ["TMPDIR"]:
    end = time.monotonic() + 300
    while not beside.exists() and time.monotonic() < end:
        time.sleep(0.01)
    FAILING
else:
    beside.touch()
SCALE"#;
    sandbox.edit("model.py", "SCALE", &text.replace("FAILING", failing));
}

/// Returns who began to make the model before the first worker had made it.
fn ahead(events: &[Value]) -> Vec<u64> {
    let before = (events.iter()).take_while(|event| event["event"] != "opened");
    let open = before.filter(|event| event["event"] == "begin" && event["job"] == "open");
    open.map(|event| event["worker"].as_u64().unwrap())
        .collect()
}

#[test]
fn one_worker_makes_the_model_while_the_first_does() {
    let sandbox = Sandbox::new();
    made_beside(&sandbox, "pass");
    sandbox.append("model.py", "# fake: capture waits");
    let captures = |events: &[Value]| by(events, "capture");
    let built = events_until(&sandbox, &["-j", "4"], |so_far| {
        let one = ahead(so_far).first().copied();
        one.is_some_and(|one| captures(so_far).contains(&one))
    });
    let [one] = ahead(&built)[..] else {
        panic!("{built:?}");
    };
    assert!(captures(&built).contains(&one), "{built:?}");
    assert_eq!(
        done(&built, "capture").len(),
        3,
        "each once, with eager's: {built:?}"
    );
}

#[test]
fn two_workers_make_the_model_while_the_first_does_where_there_are_workers_enough() {
    let sandbox = Sandbox::new();
    made_beside(&sandbox, "pass");
    sandbox.append("model.py", "# fake: capture waits");
    let built = events_until(&sandbox, &["-j", "6"], |so_far| {
        by(so_far, "capture").len() == 3
    });
    assert_eq!(by(&built, "open").len(), 2, "{built:?}");
    assert_eq!(done(&built, "capture").len(), 3, "each once: {built:?}");
}

#[test]
fn a_model_that_could_not_be_made_ahead_is_nobodys_failure() {
    for what in [
        "fails again",
        "hangs again",
        "eats again",
        "finds another source",
    ] {
        let sandbox = Sandbox::new();
        made_beside(&sandbox, "pass");
        sandbox.append(
            "model.py",
            &format!("# fake: open {what}\n# fake: capture is slow"),
        );
        let ran = sandbox.run(&["build", "--format", "json", "-j", "4", "--memory", "300MiB"]);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{what}");
        let lines = ran.stdout.lines();
        let built: Vec<Value> = lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(ahead(&built).len(), 1, "{what}: {built:?}");
        assert_eq!(
            by(&built, "capture"),
            BTreeSet::from([0]),
            "{what}: {built:?}"
        );
        assert_eq!(built.last().unwrap()["published"], true, "{built:?}");
    }
}

#[test]
fn a_model_that_another_worker_was_in_the_way_of_is_made_once_more() {
    let sandbox = Sandbox::new();
    let failing = r#"mark = pathlib.Path(__file__).with_name("mark")
    if not mark.exists():
        mark.touch()
        raise RuntimeError("the file is not whole")"#;
    made_beside(&sandbox, failing);
    let first = |events: &[Value]| {
        let starts = events.iter().filter(|event| event["event"] == "worker");
        starts.filter(|event| event["worker"] == 0).count()
    };
    let built = events(&sandbox, &["-j", "4"]);
    assert_eq!((ahead(&built).len(), first(&built)), (1, 2), "{built:?}");
    assert_eq!(built.last().unwrap()["published"], true, "{built:?}");
    // Nor is one waited for that takes for ever.
    for made in ["mark", "beside"] {
        fs::remove_file(sandbox.path(made)).unwrap();
    }
    sandbox.append("model.py", "# fake: open hangs again");
    let built = events(&sandbox, &["-j", "4", "--store", "slow"]);
    assert_eq!((ahead(&built).len(), first(&built)), (1, 2), "{built:?}");
    assert_eq!(built.last().unwrap()["published"], true, "{built:?}");
    // Alone, it is an error at once.
    fs::remove_file(sandbox.path("mark")).unwrap();
    let ran = sandbox.run(&["build", "-j", "1", "--store", "other"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("the file is not whole"),
        "{}",
        ran.stderr
    );
}
