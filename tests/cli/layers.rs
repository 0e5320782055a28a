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
    let mode = format!("{name}mode = \"max-autotune\"\n");
    sandbox.edit("precast.toml", name, &mode);
    sandbox.ok(&["build", "-q"]);
    let sets = [
        "fullgraph=true",
        "first.options.b=9",
        "first.fullgraph = false",
    ];
    let sets = sets.map(|set| ["--set", set]).concat();
    let plan = sandbox.ok(&[&["plan", "-v", "--only", "* batch=2"], &sets[..]].concat());
    plan.prints("  option `b` changed: `0` -> `9`\n");
    let (first, second) = plan.stdout.split_once("second batch=2").unwrap();
    for (module, lines) in [
        (
            first,
            [
                "enabled = true  (built-in)",
                "mode = \"max-autotune\"  ([[module]])",
                "fullgraph = false  (the command line)",
                "smoketest_steps = 4  (the submodule)",
                "options.a = 1  (the submodule)",
                "options.b = 9  (the command line)",
            ],
        ),
        (
            second,
            [
                "enabled = true  (built-in)",
                "mode = \"default\"  (built-in)",
                "fullgraph = true  (the command line)",
                "smoketest_steps = 5  ([compile])",
                "options.a = 0  ([compile])",
                "options.b = 0  ([compile])",
            ],
        ),
    ] {
        for line in lines {
            assert!(
                module.contains(&format!("  {line}\n")),
                "`{line}` is not in\n{}",
                plan.text()
            );
        }
    }
}

#[test]
fn settings_of_the_command_line_are_built_and_the_spec_comes_back() {
    let sandbox = two();
    sandbox.ok(&["build", "-q"]);
    let plain = id(&sandbox, "first");
    let plan = sandbox.ok(&["plan", "--set", "first.mode=reduce-overhead"]);
    plan.prints("`mode` changed: `default` -> `reduce-overhead`\n");
    plan.prints("\n2 of 3 programs would be built\n");
    sandbox.ok(&["build", "-q", "--set", "first.mode=reduce-overhead"]);
    assert_ne!(id(&sandbox, "first"), plain);
    for (module, mode) in [("first", "reduce-overhead"), ("second", "default")] {
        let compiled = format!("{mode}, options {{\"freezing\": true}}");
        assert_eq!(compiled_with(&sandbox, module), compiled);
    }
    // Nothing is missing, but the release differs: it is published without Python.
    sandbox.script("worker", "exit 1");
    sandbox.ok(&["build"]).says("\npublished fake release 3\n");
    assert_eq!(id(&sandbox, "first"), plain);
    sandbox.ok(&["build"]);
    assert_eq!(sandbox.releases(), 3);
}

#[test]
fn mistakes_on_the_command_line() {
    let sandbox = two();
    assert_run!(sandbox, ["plan", "--set", "mode=max-autotune", "--set", "mdoe=default"], @"
    exit code 2, stderr
    error: unknown key `mdoe` in --set
     --> --set:2:1
      |
    2 | mdoe=default
      | ^^^^
      = help: did you mean `mode`?
    ");
}
