//! The workers of a build: only as many as there are tasks, and every artifact is compiled once.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
};

use serde_json::Value;

use crate::sandbox::{Sandbox, wait_until};

/// Returns the events of a successful build.
pub fn events(sandbox: &Sandbox, args: &[&str]) -> Vec<Value> {
    sandbox
        .ok(&[&["build", "--format", "json"], args].concat())
        .events()
}

/// Returns the events of a successful build that waits for a file `go`: the file is written as soon as `enough` holds.
pub fn events_until(
    sandbox: &Sandbox,
    args: &[&str],
    enough: impl Fn(&[Value]) -> bool,
) -> Vec<Value> {
    let mut command = sandbox.command(&[&["build", "--format", "json"], args].concat());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut events: Vec<Value> = Vec::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        events.push(serde_json::from_str(&line.unwrap()).unwrap());
        if enough(&events) {
            sandbox.write("go", "");
        }
    }
    assert!(child.wait().unwrap().success(), "{events:?}");
    events
}

/// Returns the numbers of the workers that were started.
fn workers(events: &[Value]) -> BTreeSet<u64> {
    let started = events.iter().filter(|event| event["event"] == "worker");
    started
        .map(|event| event["worker"].as_u64().unwrap())
        .collect()
}

/// Returns the subjects of the finished tasks of this kind.
pub fn done<'a>(events: &'a [Value], job: &str) -> Vec<&'a str> {
    let ended = events.iter();
    let ended = ended.filter(|event| event["event"] == "end" && event["job"] == job);
    ended.map(|event| event["what"].as_str().unwrap()).collect()
}

/// Returns the state of each program.
fn states(events: &[Value]) -> Vec<&str> {
    let programs = events.last().unwrap()["programs"].as_array().unwrap();
    let states = programs.iter().map(|program| program["state"].as_str());
    states.map(Option::unwrap).collect()
}

#[test]
fn as_many_workers_as_there_is_work_for_and_no_more() {
    let sandbox = Sandbox::new();
    let built = events(&sandbox, &["-j", "16"]);
    assert_eq!(done(&built, "compile").len(), 2);
    // The first holds the model, and two start at once for the compiles. While these do something else, one more may
    // start for each task: two compiles, the shim, and two loads of the model, for captures.
    assert!((2..=8).contains(&workers(&built).len()), "{built:?}");
    // No compiles: the first holds the model, and at most two more load it for captures.
    sandbox.append("model.py", "# one more line");
    let again = events(&sandbox, &["-j", "16"]);
    assert_eq!(done(&again, "compile").len(), 0);
    assert!(workers(&again).len() <= 3, "{again:?}");
}

#[test]
fn captures_run_side_by_side() {
    let sandbox = Sandbox::steered(&["capture waits"]);
    let begun = |events: &[Value]| {
        let captures = events.iter().filter(|event| event["job"] == "capture");
        let order = captures.map(|event| event["event"].as_str().unwrap().to_owned());
        order.take(2).collect::<Vec<_>>()
    };
    let two = ["begin", "begin"];
    let built = events_until(&sandbox, &["-j", "6"], |so_far| begun(so_far) == two);
    assert_eq!(begun(&built), two, "{built:?}");
    assert_eq!(done(&built, "compile").len(), 2, "{built:?}");
}

#[test]
fn artifacts_for_a_failed_capture_alone_are_not_compiled() {
    let sandbox = Sandbox::steered(&["eager fails batch=4"]);
    let built = events(&sandbox, &["-j", "1"]);
    assert_eq!(states(&built), ["built", "failed", "skipped"], "{built:?}");
    assert_eq!(done(&built, "compile"), ["affine batch=1"], "{built:?}");
}

#[test]
fn a_compile_that_fails_before_the_capture_is_over_fails_once() {
    let sandbox = Sandbox::steered(&["eager is slow batch=4", "compile fails batch=4"]);
    let built = events(&sandbox, &["-j", "6"]);
    assert_eq!(states(&built), ["built", "failed", "skipped"], "{built:?}");
    let tried = done(&built, "compile").into_iter();
    assert_eq!(
        tried.filter(|what| what.contains("batch=4")).count(),
        1,
        "{built:?}"
    );
    let failed = built
        .iter()
        .find(|event| event["event"] == "failed")
        .unwrap();
    assert_eq!(
        failed["message"],
        "the C++ compiler failed with exit code 1"
    );
}

#[test]
fn a_task_out_of_memory_is_retried_exclusively() {
    let sandbox = Sandbox::steered(&["device is small"]);
    let mut built = events(&sandbox, &["-j", "6"]);
    // A worker that gets ready does no task, and nothing waits for it.
    built.retain(|event| event["job"] != "prepare");
    assert_eq!(states(&built), ["built", "built", "skipped"], "{built:?}");
    let of = |event: &Value| (event["job"].clone(), event["what"].clone());
    let again = built.iter().filter(|event| event["event"] == "again");
    let again: Vec<_> = again.map(of).collect();
    let two_begin_at_once = again.iter().any(|(job, _)| job == "capture");
    assert!(two_begin_at_once, "{built:?}");
    for one in &again {
        let begun = |event: &Value| event["event"] == "begin" && of(event) == *one;
        let first = built.iter().position(begun).unwrap();
        let next = built.iter().skip(first + 1).position(begun).unwrap() + first + 1;
        assert!(built.iter().skip(next + 1).all(|event| !begun(event)));
        let others = built[..next].iter();
        let open = others.fold(0, |open, event| match event["event"].as_str() {
            Some("begin") => open + 1,
            Some("end") => open - 1,
            _ => open,
        });
        assert_eq!(open, 0, "{one:?} is not alone: {built:?}");
        let ends = built[next + 1..].iter();
        let mut ends = ends.filter(|event| event["event"] == "begin" || event["event"] == "end");
        assert_eq!(ends.next().map(of).as_ref(), Some(one), "{built:?}");
    }
}

#[test]
fn a_task_out_of_memory_ends_the_loads_of_further_models() {
    let sandbox = Sandbox::steered(&["open hangs again", "capture is slow", "compile is short"]);
    sandbox.buckets("1, 2, 3, 4");
    let built = events(&sandbox, &["-j", "6"]);
    assert!(states(&built)[..4].iter().all(|state| *state == "built"));
    let is = |event: &Value, name: &str, job: &str| event["event"] == name && event["job"] == job;
    let again = built.iter().position(|event| is(event, "again", "compile"));
    let (before, after) = built.split_at(again.unwrap_or_else(|| panic!("{built:?}")));
    let same = |event: &Value| event["what"] == after[0]["what"];
    let once_more = (after.iter()).position(|event| is(event, "begin", "compile") && same(event));
    let waited = &after[..once_more.unwrap()];
    let opens = |of: &[Value], name| of.iter().filter(|event| is(event, name, "open")).count();
    assert!(opens(before, "begin") > 0, "{built:?}");
    assert_eq!(opens(before, "end"), 0, "{built:?}");
    let begun = opens(before, "begin") + opens(waited, "begin");
    assert_eq!(opens(waited, "end"), begun, "{built:?}");
}

#[test]
fn a_retry_out_of_memory_fails_and_the_next_build_tries_again() {
    let sandbox = Sandbox::new();
    // Out of memory is no property of the model: it is not left out.
    sandbox.append("precast.toml", "[compile]\nfullgraph = false\n");
    sandbox.write("steer", "# fake: device is full batch=4\n");
    for jobs in ["1", "3"] {
        let built = events(&sandbox, &["-j", jobs]);
        let tried = done(&built, "capture").into_iter();
        assert_eq!(
            tried.filter(|what| *what == "affine batch=4").count(),
            2,
            "{built:?}"
        );
        let failed = built
            .iter()
            .find(|event| event["event"] == "failed")
            .unwrap();
        assert_eq!(failed["message"], "CUDA out of memory", "{built:?}");
        assert_eq!(failed["bucket"], "batch=4");
    }
    sandbox.write("steer", "");
    let built = events(&sandbox, &["-j", "3"]);
    assert_eq!(states(&built), ["hit", "built", "skipped"], "{built:?}");
}

#[test]
fn a_build_waits_for_no_model_that_nothing_needs() {
    let sandbox = Sandbox::steered(&["open hangs again", "capture is slow"]);
    let built = events(&sandbox, &["-j", "6"]);
    assert!(!by(&built, "open").is_empty(), "{built:?}");
    assert_eq!(by(&built, "capture"), BTreeSet::from([0]), "{built:?}");
    assert_eq!(built.last().unwrap()["published"], true, "{built:?}");
}

#[test]
fn no_more_workers_than_asked_for() {
    let sandbox = Sandbox::new();
    sandbox.buckets("1, 2, 3, 4, 5, 6");
    for jobs in ["2", "3"] {
        let store = format!("store-{jobs}");
        let built = events(&sandbox, &["-j", jobs, "--store", &store]);
        assert_eq!(done(&built, "compile").len(), 6);
        assert!(workers(&built).len() <= jobs.parse().unwrap(), "{built:?}");
    }
}

#[test]
fn a_segment_that_several_programs_need_is_compiled_once() {
    let sandbox = Sandbox::new();
    let again = "\n[[module]]\nname = \"again\"\npath = \"encoder\"\n[module.inputs]\nx = { dtype = \"float32\", shape = \
        [\"batch\", 3], pad = 0 }\n[module.buckets]\nbatch = [1, 4]\n";
    sandbox.append("precast.toml", again);
    sandbox.append("model.py", "# fake: compile is slow");
    let built = events(&sandbox, &["-j", "8"]);
    assert_eq!(done(&built, "capture").len(), 6, "with eager's: {built:?}");
    assert_eq!(done(&built, "compile").len(), 2, "{built:?}");
}

#[test]
fn two_builds_of_one_spec_compile_each_artifact_once() {
    let sandbox = Sandbox::steered(&["compile waits"]);
    let start = || {
        let mut command = sandbox.command(&["build", "-j", "2", "--format", "json"]);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let first = start();
    wait_until("no compile", || sandbox.path("waiting").exists());
    let mut builds = [first, start()].map(|mut child| {
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let events = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        (child, events)
    });
    // The second build has captured: it compiles too, or waits for the compiles of the first.
    assert!(builds[1].1.any(|event: Value| event["event"] == "captured"));
    sandbox.write("go", "");
    let compiled = builds.map(|(mut child, events)| {
        let last = events.last().unwrap();
        assert!(child.wait().unwrap().success());
        last["compiled"].as_u64().unwrap()
    });
    assert_eq!(compiled.iter().sum::<u64>(), 2);
}

#[test]
fn folders_of_workers_are_private_and_not_shared() {
    let sandbox = Sandbox::steered(&["compile waits"]);
    let mut command = sandbox.command(&["build", "-q", "-j", "3"]);
    let mut child = command.spawn().unwrap();
    let folders = |path: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(path).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let started = || -> Vec<PathBuf> {
        let builds = folders(&sandbox.path("tmp")).into_iter();
        let workers = builds.flat_map(|build| folders(&build));
        workers.filter(|path| path.join("log").exists()).collect()
    };
    wait_until("no compile and no second worker", || {
        sandbox.path("waiting").exists() && started().len() > 1
    });
    let builds = folders(&sandbox.path("tmp"));
    let modes: Vec<u32> = (builds.iter())
        .map(|build| fs::metadata(build).unwrap().permissions().mode() & 0o777)
        .collect();
    let workers = started();
    let caches = ["inductor", "triton", "tmp"];
    let own = |worker: &PathBuf| caches.iter().all(|cache| worker.join(cache).is_dir());
    let each_has_its_own = workers.iter().all(own);
    sandbox.write("go", "");
    assert!(child.wait().unwrap().success());
    assert_eq!(modes, [0o700], "nobody else can look inside");
    assert!(each_has_its_own, "{workers:?}");
    assert_eq!(folders(&sandbox.path("tmp")), [] as [PathBuf; 0]);
}

#[test]
fn the_largest_is_compiled_first() {
    let sandbox = Sandbox::new();
    sandbox.buckets("1, 100, 10");
    let built = events(&sandbox, &["-j", "1"]);
    let names = ["affine batch=100", "affine batch=10", "affine batch=1"];
    assert_eq!(done(&built, "compile"), names);
}

/// Returns the workers that did a job.
pub fn by(events: &[Value], job: &str) -> BTreeSet<u64> {
    let began = events.iter();
    let began = began.filter(|event| event["event"] == "begin" && event["job"] == job);
    began
        .map(|event| event["worker"].as_u64().unwrap())
        .collect()
}

/// Returns a sandbox with eight programs that take a second to capture each.
fn much_to_capture() -> Sandbox {
    let sandbox = Sandbox::steered(&["capture is slow"]);
    sandbox.buckets("1, 2, 3, 4, 5, 6, 7, 8");
    sandbox
}

#[test]
fn compiles_run_beside_captures_and_a_worker_without_a_compile_captures() {
    let sandbox = much_to_capture();
    let built = events(&sandbox, &["-j", "3"]);
    let is = |e: &Value, event: &str, job: &str| e["event"] == event && e["job"] == job;
    let compile = built.iter().position(|event| is(event, "begin", "compile"));
    let capture = built.iter().rposition(|event| is(event, "end", "capture"));
    assert!(compile < capture, "{built:?}");
    assert!(by(&built, "capture").len() > 1, "{built:?}");
    let captured: BTreeSet<&str> = done(&built, "capture").into_iter().collect();
    assert_eq!(captured.len(), 9, "each once: {built:?}");
    assert_eq!(done(&built, "capture").len(), 9, "each once: {built:?}");
    assert_eq!(done(&built, "compile").len(), 8, "{built:?}");
}

#[test]
fn a_worker_whose_model_is_another_one_captures_nothing() {
    for (from, to) in [
        ("SCALE = 2.0", "import time\nSCALE = float(time.time_ns())"),
        ("OFFSET = 1.0", "OFFSET = 1.0\n# fake: open fails again"),
        // The same weights, of another graph.
        (
            "OFFSET = 1.0",
            "OFFSET = 1.0\n# fake: open finds another source",
        ),
    ] {
        let sandbox = much_to_capture();
        sandbox.edit("model.py", from, to);
        let built = events(&sandbox, &["-j", "3"]);
        assert!(!by(&built, "open").is_empty(), "{built:?}");
        assert_eq!(by(&built, "capture"), BTreeSet::from([0]), "{built:?}");
        assert_eq!(states(&built)[..8], ["built"; 8]);
    }
}

#[test]
fn how_long_it_will_take_is_known_from_an_earlier_build() {
    let sandbox = Sandbox::new();
    // Returns the number of compiles that had ended before the first estimate, and the number of estimates.
    let build = || {
        let built = events(&sandbox, &["-j", "1"]);
        let is = |event: &&Value| event["event"] == "left";
        let first = built.iter().position(|event| is(&event)).unwrap();
        let estimates = built.iter().filter(is);
        let estimates: Vec<_> = estimates.map(|event| event["seconds"].as_f64()).collect();
        assert!(
            estimates.iter().all(|seconds| *seconds >= Some(0.0)),
            "{estimates:?}"
        );
        (done(&built[..first], "compile").len(), estimates.len())
    };
    // Nothing is known until there was a compile; then the other one is thought to take as long.
    let (over, times) = build();
    assert_eq!(over, 1);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 2.0");
    let (over, more) = build();
    assert_eq!(over, 0);
    assert!(more > times, "{more} {times}");
}
