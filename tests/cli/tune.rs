//! `build --tune`, and modes that autotune: programs compiled with several option sets, of which the fastest is kept.

use serde_json::Value;

use crate::{
    sandbox::{Sandbox, assert_run, count},
    schemas::check,
};

/// The bucket that these tests look at.
const ONE: &str = "affine batch=1";

/// Returns a sandbox whose default artifact takes 4 ms a run, with more `# fake:` lines in the model's file. Faster
/// option sets win by more than the noise of a busy machine.
fn slow(lines: &[&str]) -> Sandbox {
    let sandbox = Sandbox::steered(&["mode=default takes 4000"]);
    for line in lines {
        sandbox.append("model.py", &format!("# fake: {line}"));
    }
    sandbox
}

/// Returns the record of the program that the last release has, be it a partial one.
fn record(sandbox: &Sandbox) -> Value {
    let listed = sandbox.json(&["release", "ls"]);
    let id = listed["releases"][0]["programs"][0].as_str();
    sandbox.json(&["show", id.unwrap()])
}

/// Returns the option sets of a record as `options: kept` or `options: why it was refused`.
fn rows(record: &Value) -> Vec<String> {
    let row = |row: &Value| {
        let why = row["refused"].as_str().unwrap_or_default();
        let kept = if row["chosen"] == true { "kept" } else { why };
        format!("{}: {kept}", row["options"].as_str().unwrap())
    };
    let rows = record["receipt"]["tuned"].as_array();
    rows.into_iter().flatten().map(row).collect()
}

fn artifacts(record: &Value) -> Vec<&str> {
    let steps = record["steps"].as_array().unwrap().iter();
    steps
        .map(|step| step["artifact"].as_str().unwrap())
        .collect()
}

#[test]
fn the_fastest_option_set_that_passes_is_kept_and_found_again() {
    let sandbox = slow(&[
        "epilogue_fusion=false takes 200",
        "coordinate_descent_tuning=true takes 100",
        "coordinate_descent_tuning=true answers wrong",
        "max_autotune=true fails",
    ]);
    assert_run!(brief sandbox, ["build", "-j", "1", "--tune", "--only", ONE], @"
    exit code 0, stderr
    plan: 1 of 1 programs are missing
    tuned: affine batch=1: kept `epilogue_fusion=false`, [RATIO]× as fast as `mode=default` (5 option sets, 2 refused)
    published: affine batch=1 [ID]
    built 1 program, 4 artifacts compiled ([TIME])
    published fake release 1, a partial one
            it lacks affine batch=4: only `fake@1` loads it, until `precast build` makes the rest
    ");
    let tuned = record(&sandbox);
    assert_eq!(tuned["request"]["tuned"], true);
    let shown = sandbox.run(&["show", tuned["id"].as_str().unwrap()]).stdout;
    let table = shown.split("\ntuned\n").nth(1).unwrap();
    let table = table.split("\ntarget\n").next().unwrap();
    insta::with_settings!({ filters => crate::sandbox::FILTERS.to_vec() }, {
        insta::assert_snapshot!(table, @"
        kept `epilogue_fusion=false`, [RATIO]× as fast as `mode=default` (5 option sets, 2 refused)

        OPTIONS  COMPILE  LATENCY  SPEED  MAX ABS
        mode=default  [TIME]  [TIME]  [RATIO]×  0.00e0
        coordinate_descent_tuning=true  [TIME]  refused
        epilogue_fusion=false  [TIME]  [TIME]  [RATIO]×  0.00e0  kept
        max_autotune=true  refused
        freezing=false  [TIME]  [TIME]  [RATIO]×  0.00e0

        coordinate_descent_tuning=true was refused: the artifact failed its gate: output `out` differs from eager in 3 of 3 elements (largest difference 1.000e0, rtol 1.0e-4, atol 2.4e-5, cosine [NUMBER])
        max_autotune=true was refused: the C++ compiler does not like this option
        ");
    });
    let why = ["why", tuned["id"].as_str().unwrap()];
    sandbox
        .ok(&why)
        .prints("\n  it replaced nothing\n  kept `epilogue_fusion=false`, ");
    check("why", &sandbox.json(&why));
    check("show", &tuned);
    check("report", &sandbox.json(&["report"]));
    // Neither needs a worker.
    sandbox.script("worker", "exit 1");
    for args in [
        &["build", "--tune", "--only", ONE][..],
        &["build", "--only", ONE],
    ] {
        sandbox
            .ok(args)
            .says("\nfresh 1 of 1 programs are in the store, nothing to compile (");
    }
    assert_eq!(record(&sandbox)["id"], tuned["id"]);
}

#[test]
fn tuning_after_a_plain_build_compiles_only_the_other_option_sets() {
    let sandbox = slow(&["epilogue_fusion=false takes 200"]);
    sandbox.ok(&["build", "-q"]);
    let plain = record(&sandbox);
    let plan = sandbox.ok(&["plan", "--tune", "--only", ONE]);
    plan.prints("affine batch=1  `tuned` changed: `false` -> `true`\n");
    let ran = sandbox.ok(&["build", "-j", "1", "--tune", "--only", ONE]);
    ran.says("\nbuilt 1 program, 4 artifacts compiled (");
    ran.says("\npublished fake release 2\n");
    let tuned = record(&sandbox);
    assert_ne!(tuned["id"], plain["id"]);
    assert_ne!(artifacts(&tuned), artifacts(&plain));
    let live = sandbox.json(&["ls", "--state", "live"]);
    assert_eq!(
        count(&live["programs"]),
        2,
        "the other program stays in the release"
    );
    // A rollback stays.
    let built = || {
        sandbox.ok(&["build", "-q"]);
        record(&sandbox)["id"].clone()
    };
    assert_eq!(built(), tuned["id"]);
    sandbox.ok(&["release", "rollback", "fake"]);
    assert_eq!(built(), plain["id"]);
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_choice_outlives_a_change_that_leaves_the_graph_as_it_was() {
    let sandbox = slow(&["epilogue_fusion=false takes 200"]);
    sandbox.ok(&["build", "-q", "--tune", "--only", ONE]);
    let tuned = record(&sandbox);
    for args in [&["build", "--tune"][..], &["build"], &["build"]] {
        sandbox.append("model.py", "# one more line");
        let ran = sandbox.run(&[args, &["-j", "1", "--only", ONE]].concat());
        ran.says("built 1 program, 0 artifacts compiled");
        let again = record(&sandbox);
        assert_ne!(again["id"], tuned["id"]);
        assert_eq!(artifacts(&again), artifacts(&tuned));
        assert_eq!(rows(&again), rows(&tuned));
        assert_eq!(again["receipt"]["tuned_by"], tuned["id"]);
    }
    // Another graph is another matter.
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 2.0");
    sandbox.ok(&["build", "-q", "--only", ONE]);
    assert_eq!(rows(&record(&sandbox)), [] as [&str; 0]);
}

#[test]
fn a_crash_or_failure_with_one_option_set_leaves_the_others() {
    let sandbox = slow(&[
        "coordinate_descent_tuning=true crashes",
        "epilogue_fusion=false takes 200",
        "max_autotune=true takes 4000",
    ]);
    let ran = sandbox.ok(&["build", "--tune", "--only", ONE, "--format", "json"]);
    let events = ran.events();
    events.iter().for_each(|event| check("build", event));
    let tried = events.iter().find(|event| event["event"] == "tuned");
    assert_eq!(
        tried.unwrap()["tried"],
        record(&sandbox)["receipt"]["tuned"]
    );
    insta::assert_snapshot!(rows(&record(&sandbox)).join("\n"), @"
    mode=default: 
    coordinate_descent_tuning=true: the artifact failed its gate: it ended its process with signal 6
    epilogue_fusion=false: kept
    max_autotune=true: 
    freezing=false: 
    ");
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_compile_that_dies_or_hangs_with_one_option_set_leaves_the_others_and_the_build() {
    let sandbox = slow(&[
        "coordinate_descent_tuning=true dies",
        "epilogue_fusion=false hangs",
        "max_autotune=true takes 200",
    ]);
    // Two programs; each loses two workers.
    let ran = sandbox.ok(&["build", "-j", "2", "--tune", "--timeout", "15"]);
    ran.says("built 2 programs, 6 artifacts compiled");
    for program in [ONE, "affine batch=4"] {
        let record = sandbox.json(&["show", program]);
        insta::allow_duplicates! { insta::assert_snapshot!(rows(&record).join("\n"), @"
        mode=default: 
        coordinate_descent_tuning=true: the worker ended in the middle of a request (signal: 9 (SIGKILL))
        epilogue_fusion=false: the worker did not answer within 15 s
        max_autotune=true: kept
        freezing=false: 
        ") };
    }
    assert!(sandbox.files("tmp").is_empty());
}

#[test]
fn a_program_fails_when_no_option_set_is_left() {
    let sandbox = slow(&["mode=default answers wrong"]);
    let build = [
        "build",
        "-q",
        "--tune",
        "--only",
        ONE,
        "--set",
        "fail_policy=raise",
    ];
    let ran = sandbox.run(&build).exits(1);
    ran.says("error: 1 of 1 programs failed\nhint: `precast log ID` prints the log of a failed program\n");
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_mode_that_autotunes_must_beat_the_default() {
    for (takes, kept) in [(8000, "default"), (200, "max-autotune")] {
        let sandbox = slow(&[&format!("mode=max-autotune takes {takes}")]);
        sandbox.module("mode = \"max-autotune\"");
        let ran = sandbox.ok(&["build", "-j", "1", "--only", ONE]);
        ran.says(&format!("tuned: affine batch=1: kept `mode={kept}`"));
        let record = record(&sandbox);
        let asked = &record["request"]["mode"];
        assert_eq!(asked, "max-autotune", "it still asks for CUDA graphs");
        let artifact = sandbox.json(&["show", artifacts(&record)[0]]);
        assert_eq!(artifact["key"]["mode"], kept);
        assert_eq!(rows(&record).len(), 2);
    }
}

#[test]
fn modules_without_a_healthcheck_are_not_tuned() {
    let sandbox = slow(&[]);
    sandbox.module("healthcheck = false");
    sandbox.ok(&["build", "-q", "--tune", "--only", ONE]);
    let plain = record(&sandbox);
    assert_eq!(plain["request"]["tuned"], false);
    assert_eq!(rows(&plain), [] as [&str; 0]);
}

#[test]
fn passes_that_packages_offer_are_tried_and_name_their_artifacts() {
    let sandbox = slow(&[
        "offers kernels:fast epilogue_fusion=false",
        "offers kernels:slow",
        "segments of own:pass",
        "epilogue_fusion=false takes 2000",
        "pass=kernels:fast takes 200",
    ]);
    sandbox.write("own.py", "");
    let passes = |record: &Value| {
        let shown = sandbox.json(&["show", artifacts(record)[0]]);
        let passes = shown["key"]["passes"].as_array().unwrap().iter();
        let names = passes.map(|pass| pass["callable"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    // A module's own pass for segments is in the key; offered passes are tried by tuning alone.
    let own = ["build", "-q", "--only", ONE, "--set", "passes=['own:pass']"];
    sandbox.ok(&own);
    let plain = record(&sandbox);
    assert_eq!(passes(&plain), ["own:pass"]);
    sandbox.ok(&[&own[..], &["--tune"]].concat());
    let tuned = record(&sandbox);
    let tried = rows(&tuned);
    let offers = ["kernels:fast epilogue_fusion=false: kept", "kernels:slow: "];
    assert_eq!(tried[tried.len() - 2..], offers);
    assert_eq!(passes(&tuned), ["own:pass", "kernels:fast"]);
}
