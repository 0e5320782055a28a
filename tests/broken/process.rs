//! Modules that take the worker with them.

use std::{collections::BTreeMap, fs, path::Path, sync::OnceLock};

use serde_json::Value;

use super::{checkout, precast};

/// The message of the build for a program, and its log.
pub struct Broken {
    program: Value,
    log: String,
}

/// Builds everything once, in as many workers as modules take with them, one after the other.
pub fn built() -> &'static BTreeMap<String, Broken> {
    static BUILT: OnceLock<BTreeMap<String, Broken>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join("broken-worker");
        let _ = fs::remove_dir_all(&store);
        let spec = "tests/broken/worker/precast.toml";
        // Long enough for a compile on a busy machine: the module that hangs waits for all of it.
        let limits = ["--timeout", "120", "--memory", "3GiB"];
        let args = [
            &["build", "-f", spec, "-j", "1", "--format", "json"],
            &limits[..],
        ]
        .concat();
        let output = precast(&store, &args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(
            output.status.code(),
            Some(1),
            "nothing answers for what failed"
        );
        let programs = last["programs"].as_array().unwrap().iter();
        let with_log = |program: &Value| {
            let id = &program["id"].as_str().unwrap()[..12];
            let log = precast(&store, &["log", id]).output().unwrap();
            let name = program["program"]
                .as_str()
                .unwrap()
                .split(' ')
                .next()
                .unwrap();
            let log = String::from_utf8_lossy(&log.stdout).into_owned();
            (
                name.to_owned(),
                Broken {
                    program: program.clone(),
                    log,
                },
            )
        };
        programs.map(with_log).collect()
    })
}

/// Returns `model.py:N` for the line that the model marks with `# line: NAME`.
fn line(mark: &str) -> String {
    let text = fs::read_to_string(checkout().join("tests/broken/worker/model.py")).unwrap();
    let ends = format!("# line: {mark}");
    let at = text.lines().position(|line| line.ends_with(&ends));
    format!("model.py:{}", at.unwrap() + 1)
}

/// Asserts that a module failed with this message at this line, which the Python stack in its log has too.
fn failed(module: &str, message: &str, mark: &str) {
    let Broken { program, log } = &built()[module];
    assert_eq!(program["state"], "failed", "{program}");
    let reported = program["message"].as_str().unwrap();
    assert!(reported.contains(message), "{reported}");
    let place = line(mark);
    assert_eq!(program["location"], *place, "{log}");
    let (file, number) = place.split_once(':').unwrap();
    let frame = format!("/{file}\", line {number} in ");
    assert!(log.starts_with(reported) && log.contains(&frame), "{log}");
}

#[test]
fn a_module_that_crashes_the_worker() {
    failed(
        "dies",
        "the worker ended in the middle of a request (signal: 11",
        "crash",
    );
}

#[test]
fn a_module_that_hangs() {
    failed("hangs", "the worker did not answer within 120 s", "hang");
}

#[test]
fn a_module_that_eats_memory() {
    failed("eats", "the worker took too much memory", "eat");
}

#[test]
fn sound_modules_are_built_by_a_remaining_worker() {
    let program = &built()["good"].program;
    assert_eq!(program["state"], "built", "{program}");
}
