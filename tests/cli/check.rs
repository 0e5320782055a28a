//! `precast check`: its output, its exit codes, and the findings that a spec allows. tests/check has the findings
//! themselves, on real torch.

use crate::{
    sandbox::{Sandbox, assert_run, count},
    schemas::check,
};

fn faulty() -> Sandbox {
    Sandbox::steered(&[
        "finds print medium",
        "finds control-flow high",
        "finds expand low",
    ])
}

#[test]
fn findings_by_severity_and_then_in_full() {
    let sandbox = faulty();
    assert_run!(sandbox, ["check"], @r#"
    exit code 1, stdout
    SEVERITY  FINDING  WHERE  MODULE  FUNCTION
    high  control-flow  model.py:8  affine  Model.forward
    medium  print  model.py:7  affine  Model.forward
    low  expand  model.py:9  affine  Model.forward

    model.py:8: control-flow: the fake model has a `control-flow`
        # fake: finds control-flow high
      fix: leave it out
        pass

    model.py:7: print: the fake model has a `print`
        # fake: finds print medium
      fix: leave it out
        pass

    model.py:9: expand: the fake model has a `expand`
        # fake: finds expand low
      fix: leave it out
        pass

    affine batch=1: can't be captured
      compiles  1 artifact in 2 steps for each of 2 buckets
      sizes  `batch` is free from 1 on
      repeated  2 `Layer` could share 1 artifact: regions = ["encoder.layer.*"]
      not known:  how it answers at `batch` = 1
    a build: makes no program: none of the 3 missing ones can be captured
    ----- stderr
    failed: 1 finding stops a build; 1 medium, 1 low
    "#);
    assert!(!sandbox.path("artifacts").exists());
}

#[test]
fn the_spec_is_named_by_its_place_or_by_an_option() {
    let sandbox = Sandbox::new();
    std::fs::rename(sandbox.path("precast.toml"), sandbox.path("other.toml")).unwrap();
    for command in ["check", "plan"] {
        for args in [&["other.toml"][..], &["-f", "other.toml"]] {
            sandbox.ok(&[&[command], args].concat());
        }
        let both = sandbox.run(&[command, "other.toml", "-f", "other.toml"]);
        both.exits(2).says("cannot be used with");
    }
    sandbox.ok(&["build", "-q", "other.toml"]);
}

#[test]
fn a_build_is_predicted_for_capturable_modules_only() {
    let sandbox = crate::control::two();
    sandbox.append("model.py", "# fake: finds control-flow high");
    let ran = sandbox.run(&["check"]);
    ran.prints("\na build: makes no program: none of the 4 missing ones can be captured\n");
    let build = &sandbox.json(&["check"])["build"];
    assert_eq!(
        (&build["missing"], &build["stopped"]),
        (&4.into(), &4.into())
    );
}

#[test]
fn a_clean_model() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["check", "precast.toml"], @r#"
    affine batch=1: can be captured
      compiles  1 artifact in 2 steps for each of 2 buckets
      sizes  `batch` is free from 1 on
      repeated  2 `Layer` could share 1 artifact: regions = ["encoder.layer.*"]
      not known:  how it answers at `batch` = 1
    a build: makes 3 of 3 programs, compiles up to 2 artifacts; how long is not known: no earlier build is in the store
    ----- stderr
    passed: nothing found
    "#);
}

#[test]
fn the_exit_code_follows_the_severity_that_was_asked_for() {
    let sandbox = Sandbox::steered(&["finds print medium"]);
    for (severity, code) in [("high", 0), ("medium", 1), ("low", 1)] {
        assert_eq!(sandbox.run(&["check", "--fail-on", severity]).code, code);
    }
    sandbox.run(&["check", "--fail-on", "worst"]).exits(2);
    faulty().run(&["check"]).exits(1);
}

#[test]
fn a_module_that_may_be_left_out_stops_no_build() {
    let sandbox = faulty();
    sandbox.module("fullgraph = false");
    sandbox.ok(&["check"]);
}

#[test]
fn an_allowed_finding_is_listed_with_its_reason() {
    let sandbox = faulty();
    for (finding, function) in [
        ("control-flow", "Model.forward"),
        ("print", "Model.forward"),
        ("expand", "Other.forward"),
    ] {
        let allowed =
            format!("finding = \"{finding}\"\nfunction = \"{function}\"\nreason = \"it is known\"");
        sandbox.append("precast.toml", &format!("[[check.allow]]\n{allowed}"));
    }
    // An allowed finding that stops builds is reported still.
    let ran = sandbox.run(&["check"]).exits(1);
    ran.prints("\nallowed print at model.py:7: it is known\n");
    ran.says("failed: 1 finding stops a build; 0 medium, 1 low\n");
    ran.says("nothing is found that `expand` in `Other.forward` of [[check.allow]] allows\n");
    let document = sandbox.json(&["check"]);
    check("check", &document);
    let findings = &document["modules"][0]["findings"];
    assert!(findings[0]["allowed"].is_null());
    assert_eq!(findings[1]["allowed"], "it is known");
    assert_eq!(document["unused"][0]["function"], "Other.forward");
    assert_eq!(document["failed"], true);
}

#[test]
fn a_model_that_can_not_be_made_is_an_error() {
    let sandbox = Sandbox::new();
    sandbox.edit("model.py", "def load", "def other");
    sandbox
        .run(&["check"])
        .exits(2)
        .says("error: `model` has no `load`\n --> precast.toml:5:9\n");
    assert_run!(sandbox, ["check", "nothing.toml"], @"
    exit code 2, stderr
    error: cannot read the spec `nothing.toml`: No such file or directory (os error 2)
      = help: name a spec with `-f`, or run where `precast.toml` is
    ");
}

#[test]
fn recompiles_and_costs_on_request() {
    let sandbox = Sandbox::new();
    sandbox.write("sizes.json", "[1, 1, 2, 3, 9]");
    let args = ["check", "--recompiles", "--cost", "--sizes", "sizes.json"];
    let ran = sandbox.ok(&args);
    for line in [
        " 1 graph, compiled again in 1 of 2 calls: batch=4\n",
        "batch=4: 2.0 MFLOP, ",
        "of this machine: 2.0 GFLOP/s and 4.0 GB/s, by nobody\n",
        "\npadding: 30.0 % of the work in `batch` is padding, at the buckets [1, 4]; 1 of 5 sizes are larger than all of \
         them; [3, 9] would waste 23.8 %\n",
    ] {
        ran.prints(line);
    }
    let document = sandbox.json(&args);
    check("check", &document);
    assert_eq!(document["padding"][0]["uncovered"], 1);
    assert_eq!(document["modules"][0]["recompiles"]["limit"], 8);
    let plain = sandbox.json(&["check"]);
    assert!(plain["modules"][0]["cost"].is_null() && plain["modules"][0]["recompiles"].is_null());
}

#[test]
fn sizes_of_an_unknown_dimension_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("sizes.json", "{\"seq\": [3]}");
    let ran = sandbox.run(&["check", "--sizes", "sizes.json"]).exits(2);
    ran.says("no input has the dimension `seq`");
}

#[test]
fn a_build_is_predicted_from_earlier_ones() {
    let sandbox = Sandbox::built();
    let document = sandbox.json(&["check"]);
    check("check", &document);
    assert_eq!(document["build"]["missing"], 0);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    let document = sandbox.json(&["check"]);
    assert_eq!(document["build"]["missing"], 3);
    assert_eq!(document["build"]["artifacts"], 2);
    assert!(document["build"]["seconds"].as_f64().unwrap() > 0.0);
    assert!(document["build"]["receipts"].as_u64().unwrap() > 0);
}

#[test]
fn a_failed_build_prints_the_finding_that_stops_it() {
    let sandbox = faulty();
    sandbox.append("model.py", "# fake: capture fails");
    let ran = sandbox.run(&["build", "-j", "1"]).exits(1);
    ran.says(
        "\n\nmodel.py:8: control-flow: the fake model has a `control-flow`\n    # fake: finds control-flow high\n  \
         fix: leave it out\n    pass\n\nnote: affine: `precast check` says what else it finds\n",
    );
    let last = sandbox
        .run(&["build", "-j", "1", "--format", "json"])
        .last();
    check("build", &last);
    let findings = &last["findings"][0]["findings"];
    assert_eq!(
        (count(findings), &findings[0]["category"]),
        (1, &"control-flow".into())
    );
}

#[test]
fn a_report_has_the_findings_of_a_check() {
    let sandbox = faulty();
    let reason = "it is known & meant";
    let allowed = format!("[[check.allow]]\nfinding = \"print\"\nreason = \"{reason}\"");
    sandbox.append("precast.toml", &allowed);
    let found = sandbox.run(&["check", "--format", "json"]);
    sandbox.write("check.json", &found.stdout);
    sandbox.edit("model.py", "# fake: finds control-flow high\n", "");
    sandbox.ok(&["build", "-q"]);
    sandbox.ok(&["report", "--check", "check.json"]);
    let page = std::fs::read_to_string(sandbox.path("report.html")).unwrap();
    for part in [
        "What checks found",
        "the fake model has a `control-flow`",
        "leave it out",
        "it is known &amp; meant",
        "Not known of affine",
    ] {
        assert!(page.contains(part), "{part}");
    }
    let document = sandbox.json(&["report", "--check", "check.json"]);
    check("report", &document);
    assert_eq!(document["checks"][0]["model"], "fake");
    sandbox.write("check.json", "{\"schema\": 1}");
    sandbox.run(&["report", "--check", "check.json"]).exits(2);
}

#[test]
fn every_submodule_when_asked() {
    let sandbox = faulty();
    let document = sandbox.json(&["check", "--all"]);
    check("check", &document);
    let modules = document["modules"].as_array().unwrap().iter();
    let names: Vec<_> = modules.map(|one| one["module"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        ["affine", "encoder", "encoder.layer.0", "encoder.layer.1"]
    );
    assert_eq!(document["modules"][1]["needed"], false);
}
