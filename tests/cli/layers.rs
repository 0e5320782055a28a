//! The layers of `[compile]` and their order: built in, the spec, a submodule, a module, the command line.

use crate::{
    control::{compiled_with, id, two},
    sandbox::assert_run,
};

#[test]
fn every_layer_decides_unless_a_stronger_one_does() {
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
    sandbox.ok(&["build", "-q"]);
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
fn settings_of_the_command_line_are_built_and_the_spec_comes_back() {
    let sandbox = two();
    sandbox.ok(&["build", "-q"]);
    let plain = id(&sandbox, "first");
    assert_run!(sandbox, ["plan", "--set", "first.mode=reduce-overhead"], @r#"
    exit code 0
    ----- stdout
    build  first batch=2  `mode` changed: `default` -> `reduce-overhead`
    build  first eager  never built
               answers sizes that no bucket covers; `fail_policy = "raise"` leaves it out
    hit  second batch=2  [ID]
    skip  second eager  the fake model has no dynamic dimensions
    2 of 3 programs would be built
    "#);
    sandbox.ok(&["build", "-q", "--set", "first.mode=reduce-overhead"]);
    assert_ne!(id(&sandbox, "first"), plain);
    assert_eq!(
        compiled_with(&sandbox, "first"),
        "reduce-overhead, options {\"freezing\": true}"
    );
    assert_eq!(
        compiled_with(&sandbox, "second"),
        "default, options {\"freezing\": true}"
    );
    // Nothing is missing, but the release differs: it is published without Python.
    sandbox.script("worker", "exit 1");
    assert_run!(sandbox, ["build"], @"
    exit code 0
    ----- stderr
    plan: 0 of 2 programs are missing
    left out first eager, second eager: the fake model has no dynamic dimensions; requests that no other program covers are refused
    fresh 2 of 4 programs are in the store, nothing to compile ([TIME])
    published fake release 3
    ");
    assert_eq!(id(&sandbox, "first"), plain);
    assert_run!(sandbox, ["build"], @"
    exit code 0
    ----- stderr
    plan: 0 of 2 programs are missing
    left out first eager, second eager: the fake model has no dynamic dimensions; requests that no other program covers are refused
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
}
