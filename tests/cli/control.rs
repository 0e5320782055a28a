//! Compile control: every key of `[compile]` has an effect, as a default, for one module, and from the command line.

use serde_json::Value;

use crate::sandbox::{Ran, Sandbox, assert_run};

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

fn two() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.write("precast.toml", TWO);
    sandbox
}

/// Returns a sandbox where `line` stands in `[compile]`, and one where it stands in the module `first`.
fn default_and_first(line: &str) -> [Sandbox; 2] {
    let (default, first) = (two(), two());
    default.edit(
        "precast.toml",
        "[compile]\n",
        &format!("[compile]\n{line}\n"),
    );
    let name = "name = \"first\"\n";
    first.edit("precast.toml", name, &format!("{name}{line}\n"));
    [default, first]
}

/// Builds, and returns what became of the programs that are no optional rung: `first batch=2` -> state.
fn built(sandbox: &Sandbox) -> (Ran, Vec<(String, String)>) {
    let ran = sandbox.run(&["build", "-j", "1", "--format", "json"]);
    let last: Value = serde_json::from_str(ran.stdout.lines().last().unwrap_or("null")).unwrap();
    let programs = last["programs"].as_array().into_iter().flatten();
    let states = programs
        .map(|program| {
            let text = |key: &str| program[key].as_str().unwrap().to_owned();
            (text("program"), text("state"))
        })
        .filter(|(name, _)| !name.ends_with(" eager"))
        .collect();
    (ran, states)
}

/// Returns what the worker was asked to compile with, of the program of this module.
fn compiled_with(sandbox: &Sandbox, module: &str) -> String {
    let shown = sandbox.json(&["show", &id(sandbox, module)]);
    let artifact = shown["steps"][0]["artifact"].as_str().unwrap();
    let log = sandbox.run(&["log", artifact]).stdout;
    let told = log
        .lines()
        .find_map(|line| line.strip_prefix("fake: mode "));
    told.unwrap_or_else(|| panic!("{log}")).to_owned()
}

/// Returns the newest program of a module.
fn id(sandbox: &Sandbox, module: &str) -> String {
    let listed = sandbox.json(&["ls", module, "--state", "live"]);
    let programs = listed["programs"].as_array().unwrap();
    assert!(!programs.is_empty(), "{listed}");
    programs[0]["id"].as_str().unwrap().to_owned()
}

/// Returns the plan's programs as `first batch=2`, with `*` behind those that eager runs.
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
fn what_leaves_a_module_to_eager() {
    assert_eq!(planned(&two(), &[]), COMPILED);
    for line in [
        "enabled = false",
        "backend = \"eager\"",
        "blocklist = [\"encoder.**\"]",
        "allowlist = [\"decoder.*\"]",
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
    // What is left to eager is not compiled.
    let [default, _] = default_and_first("enabled = false");
    let (ran, _) = built(&default);
    assert!(
        !ran.stdout.contains("\"what\":\"compile\""),
        "{}",
        ran.text()
    );
}

#[test]
fn rungs_of_the_ladder() {
    let [default, first] = default_and_first("dynamic = true");
    assert_eq!(
        planned(&default, &[]),
        "first batch=2, first dynamic, first eager*, second batch=2, second dynamic, second eager*"
    );
    assert_eq!(
        planned(&first, &[]),
        "first batch=2, first dynamic, first eager*, second batch=2, second eager*"
    );
    let [default, first] = default_and_first("fail_policy = \"raise\"");
    assert_eq!(planned(&default, &[]), "first batch=2, second batch=2");
    assert_eq!(
        planned(&first, &[]),
        "first batch=2, second batch=2, second eager*"
    );
    // It is also what a failure means.
    let (code, policy) = (
        |line: &str| {
            let [default, first] = default_and_first(line);
            [default, first].map(|sandbox| {
                sandbox.append("model.py", "# fake: compile fails");
                built(&sandbox).0.code
            })
        },
        "fail_policy = \"raise\"",
    );
    assert_eq!(code(policy), [1, 1]);
    assert_eq!(code("fail_policy = \"fallback_eager\""), [0, 0]);
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
    assert_eq!(
        plan("auto"),
        first.run(&["plan"]).stdout,
        "it is torch's choice anyway"
    );
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
        assert!(
            states.iter().all(|(_, state)| state == "built"),
            "{}",
            ran.text()
        );
        // A pass is a source.
        sandbox.append("passes.py", "# one more line");
        let plan = sandbox.run(&["plan"]).stdout;
        assert!(plan.contains("`passes.py` changed"), "{plan}");
    }
    let [default, first] = default_and_first("passes = [\"passes:double\"]");
    for (sandbox, second) in [(&default, "failed"), (&first, "built")] {
        sandbox.write("passes.py", passes);
        let (ran, states) = built(sandbox);
        let states: Vec<&str> = states.iter().map(|(_, state)| state.as_str()).collect();
        assert_eq!(states, ["failed", second], "{}", ran.text());
        assert!(
            ran.stdout.contains("differs from eager in"),
            "{}",
            ran.text()
        );
    }
}

#[test]
fn healthcheck_and_smoke_steps() {
    let [default, first] = default_and_first("healthcheck = false");
    for (sandbox, second) in [(&default, "built"), (&first, "failed")] {
        sandbox.append("model.py", "# fake: answers wrong");
        let (ran, states) = built(sandbox);
        let states: Vec<&str> = states.iter().map(|(_, state)| state.as_str()).collect();
        assert_eq!(states, ["built", second], "{}", ran.text());
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
fn what_cannot_be_captured_whole_is_left_out_where_the_spec_says_so() {
    let sandbox = two();
    sandbox.append("model.py", "# fake: capture fails");
    sandbox.edit(
        "precast.toml",
        "[compile]\n",
        "[compile]\nfail_policy = \"raise\"\n",
    );
    assert_run!(sandbox, ["build", "-q"], @"
    exit code 1
    ----- stderr
    error: 2 of 2 programs failed
    hint: `precast log ID` prints the log of a failed program
    ");
    let name = "name = \"first\"\n";
    sandbox.edit("precast.toml", name, &format!("{name}fullgraph = false\n"));
    let (ran, states) = built(&sandbox);
    let expected = [("first batch=2", "skipped"), ("second batch=2", "failed")];
    assert_eq!(states, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    assert_eq!(ran.code, 1);
    // For all modules, and one of them can be captured after all.
    sandbox.edit(
        "precast.toml",
        "[compile]\n",
        "[compile]\nfullgraph = false\n",
    );
    assert_run!(sandbox, ["build", "-j", "1"], @"
    exit code 0
    ----- stderr
    plan: 2 of 2 programs are missing
    worker: Python [PYTHON], torch [TORCH] ([TIME])
    model: 1 source file, 0 packages ([TIME])
    weights: [ID] ([SIZE])
    left out first batch=2, second batch=2: the fake model can't be captured
    fresh 0 of 2 programs are in the store, nothing to compile ([TIME])
    ");
    sandbox.edit("precast.toml", "batch = [2]", "batch = [2, 5]");
    sandbox.edit(
        "model.py",
        "# fake: capture fails",
        "# fake: capture fails batch=2",
    );
    assert_run!(sandbox, ["build", "-j", "1"], @"
    exit code 0
    ----- stderr
    plan: 3 of 3 programs are missing
    worker: Python [PYTHON], torch [TORCH] ([TIME])
    model: 1 source file, 0 packages ([TIME])
    weights: [ID] ([SIZE])
    capture: first batch=2 ([TIME])
    capture: first batch=5 ([TIME])
    capture: second batch=2 ([TIME])
    compile: first batch=5 encoder.layer.0 ([TIME])
    gate: first batch=5 ([TIME])
    published: first batch=5 [ID]
    left out first batch=2, second batch=2: the fake model can't be captured
    built 1 program, 1 artifact compiled, 0 there already ([TIME])
    published fake release 1
    ");
    assert_run!(sandbox, ["build"], @"
    exit code 0
    ----- stderr
    plan: 0 of 1 programs are missing
    left out first batch=2, second batch=2: the fake model can't be captured
    fresh 1 of 3 programs are in the store, nothing to compile ([TIME])
    ");
    // Anything but the capture is an error as before.
    sandbox.append("model.py", "# fake: answers wrong batch=5");
    assert_eq!(built(&sandbox).0.code, 1);
}

#[test]
fn every_layer_decides_what_no_stronger_one_does() {
    let sandbox = two();
    sandbox.append(
        "model.py",
        "DECLARED = {\"encoder.layer.0\": {\"forward\": {\"mode\": \"reduce-overhead\", \"smoketest_steps\": 4, \"options\": {\"a\": 1}}}}",
    );
    sandbox.edit(
        "precast.toml",
        "[compile]\n",
        "[compile]\nsmoketest_steps = 5\nfullgraph = false\noptions = { a = 0, b = 0 }\n",
    );
    let name = "name = \"first\"\n";
    sandbox.edit(
        "precast.toml",
        name,
        &format!("{name}mode = \"max-autotune\"\n"),
    );
    assert_eq!(sandbox.run(&["build", "-q"]).code, 0);
    assert_run!(sandbox, ["plan", "-v", "--only", "* batch=2", "--set", "fullgraph=true", "--set", "first.options.b=9", "--set", "first.fullgraph = false"], @r#"
    exit code 0
    ----- stdout
    build  first batch=2  option `b` changed: `0` -> `9`
               enabled = true  (built-in)
               backend = "inductor"  (built-in)
               mode = "max-autotune"  ([[module]])
               dynamic = false  (built-in)
               fullgraph = false  (the command line)
               passes = []  (built-in)
               allowlist = ["*"]  (built-in)
               blocklist = []  (built-in)
               healthcheck = true  (built-in)
               smoketest_steps = 4  (the submodule)
               fail_policy = "fallback_eager"  (built-in)
               options.a = 1  (the submodule)
               options.b = 9  (the command line)
               options.freezing = true  (built-in)
    hit  second batch=2  [ID]
               enabled = true  (built-in)
               backend = "inductor"  (built-in)
               mode = "default"  (built-in)
               dynamic = false  (built-in)
               fullgraph = true  (the command line)
               passes = []  (built-in)
               allowlist = ["*"]  (built-in)
               blocklist = []  (built-in)
               healthcheck = true  (built-in)
               smoketest_steps = 5  ([compile])
               fail_policy = "fallback_eager"  (built-in)
               options.a = 0  ([compile])
               options.b = 0  ([compile])
               options.freezing = true  (built-in)
    1 of 2 programs would be built
    "#);
}

#[test]
fn what_the_command_line_sets_is_built_and_what_the_spec_says_comes_back() {
    let sandbox = two();
    assert_eq!(sandbox.run(&["build", "-q"]).code, 0);
    let plain = id(&sandbox, "first");
    assert_run!(sandbox, ["plan", "--set", "first.mode=reduce-overhead"], @"
    exit code 0
    ----- stdout
    build  first batch=2  `mode` changed: `default` -> `reduce-overhead`
    build  first eager  never built
    hit  second batch=2  [ID]
    skip  second eager  the fake model has no dynamic dimensions
    2 of 3 programs would be built
    ");
    assert_eq!(
        sandbox
            .run(&["build", "-q", "--set", "first.mode=reduce-overhead"])
            .code,
        0
    );
    assert_ne!(id(&sandbox, "first"), plain);
    assert_eq!(
        compiled_with(&sandbox, "first"),
        "reduce-overhead, options {\"freezing\": true}"
    );
    assert_eq!(
        compiled_with(&sandbox, "second"),
        "default, options {\"freezing\": true}"
    );
    // Nothing is missing, and what is released is another thing: Python is not needed to say so.
    sandbox.script("worker", "exit 1");
    assert_run!(sandbox, ["build"], @"
    exit code 0
    ----- stderr
    plan: 0 of 2 programs are missing
    left out first eager, second eager: the fake model has no dynamic dimensions
    fresh 2 of 4 programs are in the store, nothing to compile ([TIME])
    published fake release 3
    ");
    assert_eq!(id(&sandbox, "first"), plain);
    assert_run!(sandbox, ["build"], @"
    exit code 0
    ----- stderr
    plan: 0 of 2 programs are missing
    left out first eager, second eager: the fake model has no dynamic dimensions
    fresh 2 of 4 programs are in the store, nothing to compile ([TIME])
    ");
}

#[test]
fn mistakes_on_the_command_line() {
    let sandbox = two();
    assert_run!(sandbox, ["plan", "--set", "mode=max-autotune", "--set", "mdoe=default"], @"
    exit code 2
    ----- stderr
    error: unknown key `mdoe` in --set
     --> --set:2:1
      |
    2 | mdoe=default
      | ^^^^
      = help: did you mean `mode`?
    ");
    assert_run!(sandbox, ["build", "--set", "smoketest_steps=three", "--set", "first.enabled=1", "--set", "mode=fast"], @"
    exit code 2
    ----- stderr
    error: `smoketest_steps` in --set must be an integer, not a string
     --> --set:1:17
      |
    1 | smoketest_steps=three
      |  ^^^^^
      = help: write its digits, without quotes

    error: `enabled` in --set must be true or false, not an integer
     --> --set:2:15
      |
    2 | first.enabled=1
      |  ^
      = help: write `true` or `false`, without quotes

    error: unknown mode `fast`
     --> --set:3:6
      |
    3 | mode=fast
      |  ^^^^
      = help: known: `default`, `reduce-overhead`, `max-autotune`, `max-autotune-no-cudagraphs`
    ");
    assert_run!(sandbox, ["plan", "--set", "frist.mode=default", "--set", "first.mdoe=default", "--set", "third.mode=default"], @"
    exit code 2
    ----- stderr
    error: unknown key `frist.mode` in --set
     --> --set:1:1
      |
    1 | frist.mode=default
      | ^^^^^^^^^^
      = help: did you mean the module `first`?

    error: unknown key `mdoe` in --set
     --> --set:2:7
      |
    2 | first.mdoe=default
      |  ^^^^
      = help: did you mean `mode`?

    error: unknown key `third.mode` in --set
     --> --set:3:1
      |
    3 | third.mode=default
      | ^^^^^^^^^^
      = help: modules: `first`, `second`
    ");
    assert_run!(sandbox, ["plan", "--set", "passes=['a:b'", "--set", "mode", "--set", "=1"], @r#"
    exit code 2
    ----- stderr
    error: invalid TOML: unclosed array, expected `]`
     --> --set:1:14
      |
    1 | passes=['a:b'
      |  ^
      = help: a value is TOML, as `true`, `["*"]` or `"max-autotune"`

    error: `mode` is not KEY=VALUE
     --> --set:2:1
      |
    2 | mode
      | ^^^^
      = help: write `mode=max-autotune`, or `encode.mode=max-autotune` for one module

    error: `=1` is not KEY=VALUE
     --> --set:3:1
      |
    3 | =1
      | ^^
      = help: write `mode=max-autotune`, or `encode.mode=max-autotune` for one module
    "#);
    assert_run!(sandbox, ["plan", "--set", "options.aot_inductor.package=true", "--set", "blocklist=['a..b']", "--set", "dynamic={batch={min=4,max=2}}"], @"
    exit code 2
    ----- stderr
    error: option `aot_inductor.package` is precast's own and can't be set
     --> --set:1:1
      |
    1 | options.aot_inductor.package=true
      | ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
      = help: leave it out

    error: the glob `a..b` has an empty component
     --> --set:2:12
      |
    2 | blocklist=['a..b']
      |  ^^^^^^
      = help: `*` is one component of a name, `**` any number of them, as in `encoder.layer.*`

    error: `dynamic.batch` goes from 4 to 2, which leaves nothing dynamic
     --> --set:3:10
      |
    3 | dynamic={batch={min=4,max=2}}
      |  ^^^^^
      = help: as in `seq = { min = 2, max = 512 }`
    ");
    assert_run!(sandbox, ["plan", "--set", "device=cuda", "--set", "first.buckets=1", "--set", "options.=1"], @"
    exit code 2
    ----- stderr
    error: unknown key `device` in --set
     --> --set:1:1
      |
    1 | device=cuda
      | ^^^^^^
      = help: known keys: `enabled`, `backend`, `mode`, `dynamic`, `fullgraph`, `passes`, `allowlist`, `blocklist`, `healthcheck`, `smoketest_steps`, `fail_policy`, `options`

    error: unknown key `buckets` in --set
     --> --set:2:7
      |
    2 | first.buckets=1
      |  ^^^^^^^
      = help: known keys: `enabled`, `backend`, `mode`, `dynamic`, `fullgraph`, `passes`, `allowlist`, `blocklist`, `healthcheck`, `smoketest_steps`, `fail_policy`, `options`

    error: unknown key `options.` in --set
     --> --set:3:1
      |
    3 | options.=1
      | ^^^^^^^^
      = help: did you mean `options`?
    ");
}
