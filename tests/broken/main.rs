//! Broken models: each failure is reported with the operator or the line of the model, its log with the Python stack is
//! kept, and no failure stops the other programs. These tests use the real worker; `cli` has the same with the fake one, at
//! any moment of a build.
//!
//! | build | broken |
//! |---|---|
//! | `project/` | modules that can't be captured, compiled or trusted |
//! | `worker/` ([`process`]) | modules that take the worker with them: it dies, hangs, eats memory |
//! | [`entry`] | models that can't be made at all |
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod entry;
mod process;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use serde_json::Value;

struct Built {
    store: PathBuf,
    code: Option<i32>,
    /// Module -> the state of its program.
    programs: BTreeMap<String, Value>,
}

fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn precast(store: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command
        .args(args)
        .current_dir(checkout())
        .env("PRECAST_STORE", store)
        .env("PRECAST_PYTHON", checkout().join(".venv/bin/python"))
        .env_remove("PRECAST_WORKER");
    command
}

/// Builds the broken project once, with one worker: a broken program must not harm the next one.
fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        // The other build mostly waits for hangs.
        std::thread::spawn(process::built);
        let store = Path::new(env!("CARGO_TARGET_TMPDIR")).join("broken");
        let _ = fs::remove_dir_all(&store);
        let spec = "tests/broken/project/precast.toml";
        let args = ["build", "-f", spec, "-j", "1", "--format", "json"];
        let output = precast(&store, &args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text
            .lines()
            .last()
            .unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        let last: Value = serde_json::from_str(last).unwrap();
        let programs = last["programs"].as_array().unwrap().iter();
        let module = |program: &Value| {
            program["program"]
                .as_str()
                .unwrap()
                .split(' ')
                .next()
                .unwrap()
                .to_owned()
        };
        Built {
            store,
            code: output.status.code(),
            programs: programs
                .map(|program| (module(program), program.clone()))
                .collect(),
        }
    })
}

/// Returns `model.py:N` for the line that the model marks with `# line: NAME`.
fn line(mark: &str) -> String {
    let text = fs::read_to_string(checkout().join("tests/broken/project/model.py")).unwrap();
    let ends = format!("# line: {mark}");
    let at = text.lines().position(|line| line.ends_with(&ends));
    format!(
        "model.py:{}",
        at.unwrap_or_else(|| panic!("no line is marked `{mark}`")) + 1
    )
}

/// Asserts that a module failed with this in its message, at this place, and that its log says more.
fn failed(module: &str, message: &str, place: Option<String>) {
    let built = built();
    let program = &built.programs[module];
    assert_eq!(program["state"], "failed", "{program}");
    let reported = program["message"].as_str().unwrap();
    assert!(reported.contains(message), "{reported}");
    assert!(!reported.contains('\n'), "{reported}");
    if let Some(place) = place {
        assert_eq!(program["location"], *place, "{reported}");
    }
    let id = &program["id"].as_str().unwrap()[..12];
    let log = precast(&built.store, &["log", id]).output().unwrap();
    let text = String::from_utf8_lossy(&log.stdout);
    assert!(log.status.success() && text.contains(reported), "{text}");
}

fn is_built(module: &str) -> &'static Value {
    let program = &built().programs[module];
    assert_eq!(program["state"], "built", "{program}");
    program
}

fn shown(module: &str) -> Value {
    let id = &is_built(module)["id"].as_str().unwrap()[..12];
    let output = precast(&built().store, &["show", id, "--format", "json"])
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn sound_modules_are_built_among_broken_ones() {
    is_built("good");
    assert_eq!(built().code, Some(1), "nothing answers for what failed");
}

#[test]
fn a_branch_on_data() {
    failed(
        "branch",
        "a branch or a loop depends on values",
        Some(line("branch")),
    );
}

#[test]
fn a_loop_as_often_as_the_data_says() {
    failed(
        "loop",
        "a branch or a loop depends on values",
        Some(line("loop")),
    );
}

#[test]
fn an_output_of_a_dtype_that_nothing_can_hold() {
    failed("complex", "complex64", None);
}

#[test]
fn a_forward_that_raises() {
    failed(
        "raises",
        "ValueError: this module does not work",
        Some(line("raises")),
    );
}

#[test]
fn inputs_of_another_shape() {
    failed("shapes", "[3, 4] X [8, 8]", Some(line("shapes")));
}

#[test]
fn inputs_of_another_dtype() {
    failed(
        "dtype",
        "must have the same dtype, but got Long and Float",
        None,
    );
}

#[test]
fn inputs_of_other_names() {
    failed("names", "can't be called with `y`, `z`", None);
}

#[test]
fn an_output_that_is_text() {
    failed("text", "returns no tensor", None);
}

#[test]
fn an_output_that_is_an_object() {
    failed("object", "returns a `Strange`", None);
}

#[test]
fn a_buffer_that_is_written() {
    failed(
        "writes",
        "writes into its own tensor `seen`",
        Some(line("writes")),
    );
}

#[test]
fn an_input_that_is_written() {
    failed(
        "writesinput",
        "writes into one of its inputs",
        Some(line("writes_input")),
    );
}

#[test]
fn an_operator_that_only_python_has() {
    failed(
        "pythononly",
        "operator `broken::python_only`",
        Some(line("python_only")),
    );
}

#[test]
fn an_operator_that_the_compiler_fails_on() {
    failed(
        "lowering",
        "operator `aten.special_i0e.default`: ",
        Some(line("lowering")),
    );
}

#[test]
fn a_compiler_that_fails() {
    failed("flags", "unrecognized command-line option", None);
}

#[test]
fn a_pass_that_raises() {
    failed(
        "pass",
        "pass `model:pass_that_raises` raised RuntimeError: the pass gave up",
        None,
    );
}

#[test]
fn a_kernel_with_wrong_numbers() {
    failed(
        "kernel",
        "output `output` differs from eager in 12 of 12 elements",
        None,
    );
}

#[test]
fn a_graph_with_wrong_numbers() {
    failed("wrong", "differs from eager in 48 of 48 elements", None);
}

#[test]
fn nan_where_eager_has_none() {
    failed("nan", "has NaN or infinity where eager has none", None);
}

#[test]
fn a_model_that_is_another_one_each_time() {
    failed("random", "differs from eager", None);
}

#[test]
fn a_module_that_padding_leaks_into_is_never_padded() {
    let program = shown("mean");
    assert_eq!(program["padding"], "refused", "{program}");
    let why = program["why"].as_str().unwrap();
    assert!(
        why.starts_with("`mean` reads the padding of `rows`, which holds 0 (model.py:"),
        "{why}"
    );
}

#[test]
fn an_output_that_is_an_input_becomes_the_callers_own() {
    is_built("alias");
}

#[test]
fn a_part_inside_autocast_is_captured_with_its_casts() {
    is_built("autocast");
}

#[test]
fn a_float32_answer_of_bfloat16_kernels_is_as_near_as_bfloat16() {
    let program = shown("narrow");
    let output = &program["receipt"]["gate"]["outputs"][0];
    assert_eq!(output["rtol"], 4e-2, "{output}");
    assert!(output["cosine"].as_f64().unwrap() > 0.9999, "{output}");
}
