//! Broken models: each failure is reported with the operator or the line of the model, its log with the Python stack is
//! kept, and no failure stops the other programs. `cli` has the same with the fake worker, at any moment of a build.
//!
//! Here are modules that can't be captured, compiled or trusted (`tests/broken/project`). `workers` has modules that
//! end their worker (`tests/broken/worker`), `entry` models that can't be made at all.

use std::{collections::BTreeMap, fs, sync::OnceLock};

use serde_json::Value;

use crate::lab::{checkout, precast, said, shared, well};

/// The end of a build.
pub struct Built {
    pub code: Option<i32>,
    /// Module -> the state of its program.
    pub programs: BTreeMap<String, Value>,
}

impl Built {
    /// Builds `tests/broken/FOLDER` with one worker: a broken program must not harm the next one.
    pub fn build(folder: &str, more: &[&str]) -> Self {
        let store = &shared().store;
        let spec = format!("tests/broken/{folder}/precast.toml");
        let args = ["build", "-f", &spec, "-j", "1", "--format", "json"];
        let said = said(&mut precast(store, &[&args[..], more].concat()));
        let last = said.out.lines().last();
        let last = last.unwrap_or_else(|| panic!("{}", said.err));
        let last: Value = serde_json::from_str(last).unwrap();
        let programs = last["programs"].as_array().unwrap().iter();
        let named = programs.map(|program| {
            let name = program["program"].as_str().unwrap().split(' ').next();
            (name.unwrap().to_owned(), program.clone())
        });
        Self {
            code: said.code,
            programs: named.collect(),
        }
    }

    /// Returns the program of a module in this state.
    pub fn program(&self, module: &str, state: &str) -> &Value {
        let program = &self.programs[module];
        assert_eq!(program["state"], state, "{program}");
        program
    }

    /// Fails unless the module failed with this in its one-line message, and its log begins with the message. Returns
    /// place and log.
    pub fn failed(&self, module: &str, message: &str) -> (Option<&str>, String) {
        let program = self.program(module, "failed");
        let reported = program["message"].as_str().unwrap();
        let one_line = !reported.contains('\n');
        assert!(one_line && reported.contains(message), "{reported}");
        let id = &program["id"].as_str().unwrap()[..12];
        let text = well(&mut precast(&shared().store, &["log", id])).out;
        assert!(text.contains(reported), "{text}");
        (program["location"].as_str(), text)
    }
}

/// Returns `model.py:N` for the line of a project's model that is marked with `# line: NAME`.
pub fn line(folder: &str, mark: &str) -> String {
    let model = checkout().join(format!("tests/broken/{folder}/model.py"));
    let text = fs::read_to_string(model).unwrap();
    let ends = format!("# line: {mark}");
    let at = text.lines().position(|line| line.ends_with(&ends));
    let at = at.unwrap_or_else(|| panic!("no line is marked `{mark}`"));
    format!("model.py:{}", at + 1)
}

fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    BUILT.get_or_init(|| {
        // That build mostly waits for hangs.
        std::thread::spawn(crate::workers::built);
        Built::build("project", &[])
    })
}

fn shown(module: &str) -> Value {
    let id = &built().program(module, "built")["id"].as_str().unwrap()[..12];
    shared().json(&["show", id])
}

/// Module, a part of its message, and the mark of the line in its location.
#[rustfmt::skip]
const FAILURES: [(&str, &str, &str); 19] = [
    ("branch", "a branch or a loop depends on values", "branch"),
    ("loop", "a branch or a loop depends on values", "loop"),
    // No record can hold this dtype.
    ("complex", "complex64", ""),
    ("raises", "ValueError: this module does not work", "raises"),
    ("shapes", "[3, 4] X [8, 8]", "shapes"),
    ("dtype", "must have the same dtype, but got Long and Float", ""),
    ("names", "has no parameter `y`", ""),
    ("text", "returns no tensor", ""),
    ("object", "returns a `Strange`", ""),
    ("writes", "writes into its own parameter `seen`", "writes"),
    ("writesinput", "writes into its input `x`", "writes_input"),
    ("pythononly", "operator `broken::python_only`, called by the model, has no C++ kernel for cpu, only Python", "python_only"),
    ("lowering", "operator `aten.special_i0e.default`: ", "lowering"),
    // An option of the C++ compiler.
    ("flags", "unrecognized command-line option", ""),
    ("pass", "pass `model:pass_that_raises` raised RuntimeError: the pass gave up", ""),
    ("kernel", "output `output` differs from eager in 12 of 12 elements", ""),
    ("wrong", "differs from eager in 48 of 48 elements", ""),
    ("nan", "has NaN or infinity where eager has none", ""),
    // Another model each time it is made.
    ("random", "differs from eager", ""),
];

#[test]
fn each_broken_module_fails_with_its_message_and_line() {
    for (module, message, mark) in FAILURES {
        let (location, _) = built().failed(module, message);
        if !mark.is_empty() {
            assert_eq!(location, Some(&*line("project", mark)), "{module}");
        }
    }
}

#[test]
fn sound_modules_are_built_among_broken_ones() {
    for module in ["good", "alias", "autocast"] {
        built().program(module, "built");
    }
    assert_eq!(built().code, Some(1), "nothing answers for failed modules");
}

#[test]
fn a_module_that_padding_leaks_into_is_never_padded() {
    let program = shown("mean");
    assert_eq!(program["padding"], "refused", "{program}");
    let why = program["why"].as_str().unwrap();
    let expected = "`mean` reads the padding of `rows`, which holds 0 (model.py:";
    assert!(why.starts_with(expected), "{why}");
}

#[test]
fn a_float32_answer_of_bfloat16_kernels_is_as_near_as_bfloat16() {
    let program = shown("narrow");
    let output = &program["receipt"]["gate"]["outputs"][0];
    assert_eq!(output["rtol"], 4e-2, "{output}");
    assert!(output["cosine"].as_f64().unwrap() > 0.9999, "{output}");
}
