//! `precast check`: what it prints, what it ends with, and what a spec allows. The findings themselves are tested on real
//! torch, in tests/check.

use crate::{
    sandbox::{Sandbox, assert_run},
    schemas::check,
};

fn faulty() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.append("model.py", "# fake: finds print medium");
    sandbox.append("model.py", "# fake: finds control-flow high");
    sandbox.append("model.py", "# fake: finds expand low");
    sandbox
}

#[test]
fn findings_by_severity_and_then_in_full() {
    let sandbox = faulty();
    assert_run!(sandbox, ["check"], @"
    exit code 1
    ----- stdout
    SEVERITY  FINDING  WHERE  MODULE  FUNCTION
    high  control-flow  model.py:8  affine  Model.forward
    medium  print  model.py:7  affine  Model.forward
    low  expand  model.py:9  affine  Model.forward

    model.py:8: control-flow: the fake model has a `control-flow`
        # fake: finds control-flow high
      mend: leave it out
        pass

    model.py:7: print: the fake model has a `print`
        # fake: finds print medium
      mend: leave it out
        pass

    model.py:9: expand: the fake model has a `expand`
        # fake: finds expand low
      mend: leave it out
        pass

    affine batch=1: can't be captured, 1 artifact in 2 steps for each of 2 buckets, `batch` is free from 2 on
      not known: how it answers at `batch` = 1
    ----- stderr
    failed: 1 finding stops a build; 1 medium, 1 low
    ");
    assert!(!sandbox.path("artifacts").exists());
}

#[test]
fn a_clean_model() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["check", "precast.toml"], @"
    exit code 0
    ----- stdout
    affine batch=1: can be captured, 1 artifact in 2 steps for each of 2 buckets, `batch` is free from 2 on
      not known: how it answers at `batch` = 1
    ----- stderr
    passed: nothing found
    ");
}

#[test]
fn the_exit_code_follows_the_severity_that_was_asked_for() {
    let sandbox = Sandbox::new();
    sandbox.append("model.py", "# fake: finds print medium");
    for (severity, code) in [("high", 0), ("medium", 1), ("low", 1)] {
        assert_eq!(sandbox.run(&["check", "--fail-on", severity]).code, code);
    }
    assert_eq!(sandbox.run(&["check", "--fail-on", "worst"]).code, 2);
    assert_eq!(faulty().run(&["check"]).code, 1);
}

#[test]
fn a_module_that_may_be_left_out_stops_no_build() {
    let sandbox = faulty();
    let name = "name = \"affine\"\n";
    sandbox.edit("precast.toml", name, &format!("{name}fullgraph = false\n"));
    assert_eq!(sandbox.run(&["check"]).code, 0);
}

#[test]
fn an_allowed_finding_is_listed_with_its_reason() {
    let sandbox = faulty();
    for (finding, function) in [
        ("control-flow", "Model.forward"),
        ("print", "Model.forward"),
        ("expand", "Other.forward"),
    ] {
        sandbox.append(
            "precast.toml",
            &format!("[[check.allow]]\nfinding = \"{finding}\"\nfunction = \"{function}\"\nreason = \"it is known\""),
        );
    }
    // What stops a build would stop it all the same.
    assert_run!(sandbox, ["check"], @"
    exit code 1
    ----- stdout
    SEVERITY  FINDING  WHERE  MODULE  FUNCTION
    high  control-flow  model.py:8  affine  Model.forward
    low  expand  model.py:9  affine  Model.forward

    model.py:8: control-flow: the fake model has a `control-flow`
        # fake: finds control-flow high
      mend: leave it out
        pass

    model.py:9: expand: the fake model has a `expand`
        # fake: finds expand low
      mend: leave it out
        pass

    allowed print at model.py:7: it is known
    affine batch=1: can't be captured, 1 artifact in 2 steps for each of 2 buckets, `batch` is free from 2 on
      not known: how it answers at `batch` = 1
    ----- stderr
    failed: 1 finding stops a build; 0 medium, 1 low
    warning: nothing is found that `expand` in `Other.forward` of [[check.allow]] allows
    ");
    let document = sandbox.json(&["check"]);
    check("check", &document);
    let findings = &document["modules"][0]["findings"];
    assert!(findings[0]["allowed"].is_null());
    assert_eq!(findings[1]["allowed"], "it is known");
    assert_eq!(document["unused"][0]["function"], "Other.forward");
    assert_eq!(document["failed"], true);
}

#[test]
fn json_is_what_its_schema_says() {
    let document = faulty().json(&["check"]);
    check("check", &document);
    assert_eq!(document["failed"], true);
    check("check", &Sandbox::new().json(&["check"]));
}

#[test]
fn a_model_that_can_not_be_made_is_an_error() {
    let sandbox = Sandbox::new();
    sandbox.edit("model.py", "def load", "def other");
    assert_run!(sandbox, ["check"], @r#"
    exit code 2
    ----- stderr
    error: `model` has no `load`
     --> precast.toml:5:9
      |
    5 | entry = "model:load"
      |  ^^^^^^^^^^^^
      = help: `entry` names a `module:callable` beside the spec; calling it in that Python shows the same
    "#);
    assert_run!(sandbox, ["check", "nothing.toml"], @"
    exit code 2
    ----- stderr
    error: cannot read the spec `nothing.toml`: No such file or directory (os error 2)
      = help: name a spec with `-f`, or run where `precast.toml` is
    ");
}

#[test]
fn every_submodule_when_asked() {
    let sandbox = faulty();
    let document = sandbox.json(&["check", "--all"]);
    check("check", &document);
    let names: Vec<_> = document["modules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["module"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["affine", "encoder", "encoder.layer.0", "encoder.layer.1"]
    );
    assert_eq!(document["modules"][1]["needed"], false);
}
