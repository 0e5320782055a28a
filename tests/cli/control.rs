//! Compile control: every key of `[compile]` has an effect, as a default, for one module, and from the command line.

use crate::sandbox::{Ran, Sandbox, assert_run, states};

/// Two modules of the fake model, each with one bucket.
const TWO: &str = r#"schema = 1

[model]
name = "fake"
entry = "model:load"

[compile]

[[module]]
name = "first"
path = "encoder.layer.0"
[module.inputs]
x = { dtype = "float32", shape = ["batch", 3], pad = 0 }
[module.buckets]
batch = [2]

[[module]]
name = "second"
path = "encoder.layer.1"
[module.inputs]
x = { dtype = "float32", shape = ["batch", 3], pad = 0 }
[module.buckets]
batch = [2]
"#;

/// Returns a sandbox with this spec.
pub fn two() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("precast.toml", TWO);
    sandbox
}

/// Returns a sandbox where `line` stands in `[compile]`, and one where it stands in the module `first`.
fn default_and_first(line: &str) -> [Sandbox; 2] {
    ["[compile]\n", FIRST].map(|place| {
        let sandbox = two();
        set(&sandbox, place, line);
        sandbox
    })
}

/// The name of the module `first` in the spec.
const FIRST: &str = "name = \"first\"\n";

/// Writes a line below another one of the spec.
fn set(sandbox: &Sandbox, place: &str, line: &str) {
    sandbox.edit("precast.toml", place, &format!("{place}{line}\n"));
}

/// The states of both programs, in a build's document.
fn both(first: &str, second: &str) -> [String; 2] {
    [
        format!("first batch=2: {first}"),
        format!("second batch=2: {second}"),
    ]
}

/// Builds, and returns the states of all programs but the eager ones.
fn built(sandbox: &Sandbox) -> (Ran, Vec<String>) {
    let ran = sandbox.run(&["build", "-j", "1", "--format", "json"]);
    let mut states = states(&ran.last());
    states.retain(|state| !state.contains(" eager: "));
    (ran, states)
}

/// Returns mode and options of the compile of a module's program.
pub fn compiled_with(sandbox: &Sandbox, module: &str) -> String {
    let shown = sandbox.json(&["show", &id(sandbox, module)]);
    let artifact = shown["steps"][0]["artifact"].as_str().unwrap();
    let log = sandbox.run(&["log", artifact]).stdout;
    let mode = log
        .lines()
        .find_map(|line| line.strip_prefix("fake: mode "));
    mode.unwrap_or_else(|| panic!("{log}")).to_owned()
}

/// Returns the newest program of a module.
pub fn id(sandbox: &Sandbox, module: &str) -> String {
    let listed = sandbox.json(&["ls", module, "--state", "live"]);
    let programs = listed["programs"].as_array().unwrap();
    assert!(!programs.is_empty(), "{listed}");
    programs[0]["id"].as_str().unwrap().to_owned()
}

/// Returns the plan's programs as `first batch=2`, with a `*` after eager ones.
fn planned(sandbox: &Sandbox, more: &[&str]) -> String {
    let plan = sandbox.json(&[&["plan"], more].concat());
    let programs = plan["programs"].as_array().unwrap().iter().map(|program| {
        let text = |key: &str| program[key].as_str().unwrap().to_owned();
        let eager = if program["compiled"] == true { "" } else { "*" };
        format!("{} {}{eager}", text("module"), text("bucket"))
    });
    programs.collect::<Vec<_>>().join(", ")
}

const COMPILED: &str = "first batch=2, first eager*, second batch=2, second eager*";
const EAGER: &str = "first batch=2*, first eager*, second batch=2*, second eager*";
const FIRST_EAGER: &str = "first batch=2*, first eager*, second batch=2, second eager*";

#[test]
fn a_pattern_that_matches_nothing_is_a_mistake() {
    for sandbox in default_and_first("blocklist = [\"encoder.layer.0\",\n  \"encodr.layer.1\"]") {
        let ran = sandbox.run(&["plan"]).exits(2);
        for part in [
            "`encodr.layer.1` of `blocklist` matches the `path` of no [[module]]",
            "|   \"encodr.layer.1\"]\n",
            "|   ^^^^^^^^^^^^^^^^",
            "did you mean `encoder.layer.1`?",
        ] {
            ran.says(part);
        }
    }
    assert_run!(two(), ["plan", "--set", "first.allowlist=['*', 'vision.*']"], @"
    exit code 2, stderr
    error: `vision.*` of `allowlist` matches the `path` of no [[module]]
     --> --set:1:23
      |
    1 | first.allowlist=['*', 'vision.*']
      |  ^^^^^^^^^^
      = help: the paths of the modules: `encoder.layer.0`, `encoder.layer.1`
    ");
    let sandbox = two();
    set(
        &sandbox,
        FIRST,
        "regions = [  # a = 1\n  \"encoder.layers.*\", # one\n]",
    );
    for command in ["build", "check"] {
        let ran = sandbox.run(&[command]).exits(2);
        ran.says("|   \"encoder.layers.*\", # one\n   |   ^^^^^^^^^^^^^^^^^^\n");
    }
}

#[test]
fn settings_that_leave_a_module_to_eager() {
    assert_eq!(planned(&two(), &[]), COMPILED);
    for line in [
        "enabled = false",
        "backend = \"eager\"",
        "blocklist = [\"encoder.**\"]",
        "allowlist = []",
        "blocklist = [\"encoder.*.0\", \"**.1\"]",
    ] {
        let [default, first] = default_and_first(line);
        assert_eq!(planned(&default, &[]), EAGER, "{line}");
        assert_eq!(planned(&first, &[]), FIRST_EAGER, "{line}");
    }
    // Globs choose among the submodules.
    let [some, _] = default_and_first("blocklist = [\"*.*.0\"]");
    assert_eq!(planned(&some, &[]), FIRST_EAGER);
    let [some, _] = default_and_first("allowlist = [\"**.1\"]");
    assert_eq!(planned(&some, &[]), FIRST_EAGER);
    assert_eq!(planned(&some, &["--set", "allowlist=['*']"]), COMPILED);
    // Eager programs are not compiled.
    let [default, _] = default_and_first("enabled = false");
    let (ran, _) = built(&default);
    assert!(
        !ran.stdout.contains("\"job\":\"compile\""),
        "{}",
        ran.text()
    );
}

#[test]
fn rungs_of_the_ladder() {
    let [default, first] = default_and_first("dynamic = true");
    assert_eq!(
        planned(&default, &[]),
        "first batch=2, first dynamic, first batch=1, first eager*, second batch=2, second dynamic, second batch=1, second eager*"
    );
    assert_eq!(
        planned(&first, &[]),
        "first batch=2, first dynamic, first batch=1, first eager*, second batch=2, second eager*"
    );
    let [default, first] = default_and_first("fail_policy = \"raise\"");
    assert_eq!(planned(&default, &[]), "first batch=2, second batch=2");
    assert_eq!(
        planned(&first, &[]),
        "first batch=2, second batch=2, second eager*"
    );
    // The policy decides the exit code too.
    let code = |policy: &str| {
        default_and_first(&format!("fail_policy = \"{policy}\"")).map(|sandbox| {
            sandbox.append("model.py", "# fake: compile fails");
            built(&sandbox).0.code
        })
    };
    assert_eq!(code("raise"), [1, 1]);
    // Eager can't be captured either, and then nothing answers.
    assert_eq!(code("fallback_eager"), [1, 1]);
}

#[test]
fn mode_and_options_reach_the_compiler() {
    let [default, first] =
        default_and_first("mode = \"reduce-overhead\"\noptions.epilogue_fusion = false");
    for sandbox in [&default, &first] {
        assert_eq!(built(sandbox).0.code, 0);
    }
    let changed = "reduce-overhead, options {\"epilogue_fusion\": false, \"freezing\": true}";
    let plain = "default, options {\"freezing\": true}";
    assert_eq!(compiled_with(&default, "first"), changed);
    assert_eq!(compiled_with(&default, "second"), changed);
    assert_eq!(compiled_with(&first, "first"), changed);
    assert_eq!(compiled_with(&first, "second"), plain);
    let plan = |kernel: &str| {
        let set = format!("options.attention={kernel}");
        first.run(&["plan", "--set", &set]).stdout
    };
    let plain = first.run(&["plan"]).stdout;
    assert_eq!(plan("auto"), plain, "it is torch's choice anyway");
    let why = "option `attention` changed: none -> `math`";
    assert_eq!(plan("math").matches(why).count(), 2, "{}", plan("math"));
}

#[test]
fn passes_run_in_order_and_the_gate_tells_of_those_that_change_the_numbers() {
    let passes = "\n\ndef halve(segment):\n    segment[\"offset\"] /= 2\n\n\ndef double(segment):\n    segment[\"offset\"] *= 2\n";
    let [default, first] = default_and_first("passes = [\"passes:halve\", \"passes:double\"]");
    for sandbox in [&default, &first] {
        sandbox.write("passes.py", passes);
        let (ran, states) = built(sandbox);
        assert_eq!(states, both("built", "built"), "{}", ran.text());
        // A pass is a source.
        sandbox.append("passes.py", "# one more line");
        sandbox.run(&["plan"]).prints("`passes.py` changed");
    }
    let [default, first] = default_and_first("passes = [\"passes:double\"]");
    for (sandbox, second) in [(&default, "failed"), (&first, "built")] {
        sandbox.write("passes.py", passes);
        let (ran, states) = built(sandbox);
        assert_eq!(states, both("failed", second), "{}", ran.text());
        ran.prints("differs from eager in");
    }
}

#[test]
fn healthcheck_and_smoke_steps() {
    let [default, first] = default_and_first("healthcheck = false");
    for (sandbox, second) in [(&default, "built"), (&first, "failed")] {
        sandbox.append("model.py", "# fake: answers wrong");
        let (ran, states) = built(sandbox);
        assert_eq!(states, both("built", second), "{}", ran.text());
    }
    let [default, first] = default_and_first("smoketest_steps = 7");
    for (sandbox, second) in [(&default, 7), (&first, 3)] {
        assert_eq!(built(sandbox).0.code, 0);
        let steps = |module: &str| {
            let shown = sandbox.json(&["show", &id(sandbox, module)]);
            shown["receipt"]["gate"]["steps"].as_u64().unwrap()
        };
        assert_eq!((steps("first"), steps("second")), (7, second));
    }
}

#[test]
fn modules_without_a_whole_capture_are_left_out_where_the_spec_allows_it() {
    let sandbox = two();
    sandbox.append("model.py", "# fake: capture fails");
    set(&sandbox, "[compile]\n", "fail_policy = \"raise\"");
    assert_run!(sandbox, ["build", "-q"], @"
    exit code 1, stderr
    error: nothing answers `first`, `second`: no release was published
    hint: the newest release stays what it was; fix what failed (`precast ls --state failed`), or publish one that has nothing for it: `precast build --without 'first' --without 'second'`
    ");
    set(&sandbox, FIRST, "fullgraph = false");
    let (ran, states) = built(&sandbox);
    assert_eq!((ran.code, &states[..]), (1, &both("skipped", "failed")[..]));
    // For all modules, and one of them can be captured after all.
    set(&sandbox, "[compile]\n", "fullgraph = false");
    assert_run!(brief sandbox, ["build", "-j", "1"], @"
    exit code 0, stderr
    plan: 2 of 2 programs are missing
    left out first batch=2, second batch=2: the fake model can't be captured
    fresh 0 of 2 programs are in the store, nothing to compile ([TIME])
    ");
    sandbox.edit("precast.toml", "batch = [2]", "batch = [2, 5]");
    sandbox.edit("model.py", "capture fails", "capture fails batch=2");
    let left_out = "\nleft out first batch=2, second batch=2: the fake model can't be captured\n";
    let ran = sandbox.ok(&["build", "-j", "1"]);
    ran.says(&format!("{left_out}built 1 program, 1 artifact compiled ("));
    let ran = sandbox.ok(&["build"]);
    ran.says(&format!(
        "plan: 0 of 1 programs are missing{left_out}fresh 1 of 3 programs are in the store"
    ));
    // A program of the newest release is not left out silently.
    sandbox.edit("model.py", "capture fails batch=2", "capture fails");
    let (ran, _) = built(&sandbox);
    assert_eq!(ran.code, 1, "{}", ran.text());
    sandbox.edit("model.py", "capture fails", "capture fails batch=2");
    // Anything but the capture is an error as before.
    sandbox.append("model.py", "# fake: answers wrong batch=5");
    assert_eq!(built(&sandbox).0.code, 1);
}
