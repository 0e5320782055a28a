//! `build` and `plan`: built and found programs, and the reasons.

use std::process::{Command, Stdio};

use crate::sandbox::{Ran, Sandbox, assert_run, states, wait_until};

/// Runs a build and returns how many artifacts it compiled.
fn compiled(sandbox: &Sandbox) -> u64 {
    let last = sandbox.ok(&["build", "--format", "json"]).last();
    last["compiled"].as_u64().unwrap()
}

#[test]
fn a_build_makes_the_missing_programs_and_the_next_one_nothing() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["plan"], @r#"
    build  affine batch=1  never built
    build  affine batch=4  never built
    build  affine eager  never built
               answers sizes that no bucket covers; `fail_policy = "raise"` leaves it out
    3 of 3 programs would be built
    "#);
    assert_run!(sandbox, ["build", "-j", "1"], @"
    exit code 0, stderr
    plan: 3 of 3 programs are missing
    worker: Python [PYTHON], torch [TORCH] ([TIME])
    model: 1 source file, 0 packages ([TIME])
    weights: [ID] ([SIZE])
    capture: affine batch=1 ([TIME])
    capture: affine batch=4 ([TIME])
    capture: affine eager ([TIME])
    shim: torch [TORCH] ([TIME])
    compile: affine batch=4 ([TIME])
    gate: affine batch=4 ([TIME])
    published: affine batch=4 [ID]
    compile: affine batch=1 ([TIME])
    gate: affine batch=1 ([TIME])
    published: affine batch=1 [ID]
    left out affine eager: the fake model has no dynamic dimensions; requests that no other program covers are refused
    built 2 programs, 2 artifacts compiled ([TIME])
    published fake release 1
    ");
    // Without Python.
    sandbox.script("worker", "exit 1");
    assert_run!(sandbox, ["build"], @"
    exit code 0, stderr
    plan: 0 of 2 programs are missing
    left out affine eager: the fake model has no dynamic dimensions; requests that no other program covers are refused
    fresh 2 of 3 programs are in the store, nothing to compile ([TIME])
    ");
    assert_run!(sandbox, ["plan"], @"
    hit  affine batch=1  [ID]
    hit  affine batch=4  [ID]
    skip  affine eager  the fake model has no dynamic dimensions
    0 of 2 programs would be built
    ");
    let left = sandbox.files("tmp");
    assert!(left.is_empty(), "the build left files behind: {left:?}");
}

#[test]
fn a_build_with_nothing_to_do_writes_nothing() {
    let sandbox = Sandbox::new();
    compiled(&sandbox);
    // Folders too: a file that came and went changes the time of its folder.
    let times = || {
        let entries = walkdir::WalkDir::new(sandbox.path("artifacts")).sort_by_file_name();
        let entries = entries.into_iter().map(Result::unwrap);
        let time = |entry: &walkdir::DirEntry| entry.metadata().unwrap().modified().unwrap();
        let times = entries.map(|entry| (time(&entry), entry.into_path()));
        times.collect::<Vec<_>>()
    };
    // The digest of a fresh source is kept once its time stamp is a moment old.
    wait_until("every build writes", || {
        let before = times();
        assert_eq!(compiled(&sandbox), 0);
        times() == before
    });
}

#[test]
fn a_changed_source_is_captured_again_and_compiled_only_when_its_graph_changed() {
    let sandbox = Sandbox::built();
    sandbox.append("model.py", "# one more line");
    assert_run!(sandbox, ["plan"], @r#"
    build  affine batch=1  `model.py` changed
    build  affine batch=4  `model.py` changed
    build  affine eager  never built
               answers sizes that no bucket covers; `fail_policy = "raise"` leaves it out
    3 of 3 programs would be built
    "#);
    assert_eq!(compiled(&sandbox), 0, "the graph is the same");
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_eq!(compiled(&sandbox), 2);
    sandbox.edit("model.py", "SCALE = 2.0", "SCALE = 5.0");
    assert_eq!(compiled(&sandbox), 0, "weights are not in the artifact");
}

#[test]
fn a_model_that_goes_back_gets_its_weights_of_then_without_python() {
    let sandbox = Sandbox::built();
    let weights = || sandbox.json(&["release", "ls"])["releases"][0]["weights"].clone();
    let first = weights();
    sandbox.edit("model.py", "SCALE = 2.0", "SCALE = 10.0");
    sandbox.ok(&["build", "-q"]);
    assert_ne!(weights(), first);
    sandbox.edit("model.py", "SCALE = 10.0", "SCALE = 2.0");
    sandbox.script("worker", "exit 1");
    assert_eq!(compiled(&sandbox), 0);
    assert_eq!(weights(), first);
}

#[test]
fn locked_fails_instead_of_compiling() {
    let sandbox = Sandbox::new();
    assert_run!(sandbox, ["build", "--locked"], @"
    exit code 1, stderr
    plan: 3 of 3 programs are missing
    error: 3 of 3 programs are missing and `--locked` forbids compiling
    hint: run `precast build` where compiling is allowed, then deploy the store
    ");
    assert_eq!(compiled(&sandbox), 2);
    sandbox.ok(&["build", "--locked"]);
}

#[test]
fn a_failed_compile_leaves_the_finished_artifacts_and_a_log() {
    let sandbox = Sandbox::steered(&["compile fails batch=4"]);
    assert_run!(brief sandbox, ["build", "-j", "1"], @"
    exit code 0, stderr
    plan: 3 of 3 programs are missing
    failed: affine batch=4: the C++ compiler failed with exit code 1
    published: affine batch=1 [ID]
    failed affine batch=4: the C++ compiler failed with exit code 1
           hint: other `options` or another `mode` may do; `enabled = false` leaves the module to eager
           `precast log [ID]` prints the whole log
    left out affine eager: the fake model has no dynamic dimensions; requests that no other program covers are refused
    built 1 program, 1 artifact compiled ([TIME]), 1 failed
    published fake release 1
    ");
    assert_run!(sandbox, ["ls", "--sort", "bucket"], @"
    ID  MODEL  MODULE  BUCKET  STATE  TARGET  STEPS  SIZE  AGE  USED
    [ID]  fake  affine  batch=1  live  [TARGET]  1  [SIZE]  [TIME]  [TIME]
    [ID]  fake  affine  batch=4  failed  [TIME]
    [ID]  fake  affine  eager  failed  [TIME]
    ");
    let log = sandbox.ok(&["log", "affine", "batch=4"]);
    log.prints("kernel.cpp:12: error: this line is in the log");
    // The next build retries the failed program alone.
    sandbox.edit("model.py", "# fake: compile fails batch=4", "");
    assert_eq!(compiled(&sandbox), 1);
}

#[test]
fn a_source_that_changes_in_a_build_leaves_nothing_under_a_key_that_lies() {
    let sandbox = Sandbox::new();
    // The larger program is there before the change, the other one is at its compile.
    sandbox.append("model.py", "# fake: compile waits batch=1");
    let model = std::fs::read(sandbox.path("model.py")).unwrap();
    let mut build = sandbox.command(&["build", "-j", "1", "--format", "json"]);
    let child = build.stdout(Stdio::piped()).spawn().unwrap();
    wait_until("no compile", || sandbox.path("waiting").exists());
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 7.0");
    sandbox.write("go", "");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "eager answers for it");
    let last = Ran::new(output, &sandbox.path("")).last();
    assert_eq!(
        states(&last)[..2],
        ["affine batch=1: failed", "affine batch=4: built"]
    );
    let failed = &last["programs"][0];
    assert_eq!(
        failed["message"],
        "`model.py` changed while it was being compiled"
    );
    let log = sandbox.run(&["log", &failed["id"].as_str().unwrap()[..12]]);
    log.prints("`model.py` changed");
    // The new source was never built; the old one is in the store for the program that was published before the change.
    let plan = sandbox.json(&["plan"]);
    let reasons = [0, 1].map(|program: usize| &plan["programs"][program]["why"][0]["reason"]);
    assert_eq!(reasons, ["never-built", "source-changed"], "{plan}");
    assert_eq!(compiled(&sandbox), 2);
    sandbox.write("model.py", model);
    let last = sandbox.run(&["build", "--format", "json"]).last();
    assert_eq!(
        states(&last)[..2],
        ["affine batch=1: built", "affine batch=4: hit"]
    );
}

#[test]
fn artifacts_with_wrong_answers_are_not_published() {
    let sandbox = Sandbox::steered(&["answers wrong batch=1", "answers nan batch=4"]);
    assert_run!(brief sandbox, ["build", "-j", "1"], @"
    exit code 1, stderr
    plan: 3 of 3 programs are missing
    truth: affine batch=1 ([TIME])
    failed: affine batch=1: the artifact failed its gate: output `out` differs from eager in 3 of 3 elements (largest difference 1.000e0, rtol 1.0e-4, atol 2.4e-5, cosine [NUMBER]); it is 1.0e0 from float64, eager is 0.0e0 (RMS), and its worst element 1.0e0, eager's 0.0e0 (at most 2 times eager's)
    failed: affine batch=4: the artifact failed its gate: output `out` has NaN or infinity where eager has none
    failed affine batch=1: the artifact failed its gate: output `out` differs from eager in 3 of 3 elements (largest difference 1.000e0, rtol 1.0e-4, atol 2.4e-5, cosine [NUMBER]); it is 1.0e0 from float64, eager is 0.0e0 (RMS), and its worst element 1.0e0, eager's 0.0e0 (at most 2 times eager's)
           hint: if this error is harmless, widen `[module.gate]`; `enabled = false` leaves the module to eager
           `precast log [ID]` prints the whole log
    failed affine batch=4: the artifact failed its gate: output `out` has NaN or infinity where eager has none
           hint: if this error is harmless, widen `[module.gate]`; `enabled = false` leaves the module to eager
           `precast log [ID]` prints the whole log
    left out affine eager: the fake model has no dynamic dimensions
    built 0 programs, 2 artifacts compiled ([TIME]), 2 failed
    error: nothing answers `affine`: no release was published
    hint: the newest release stays what it was; fix what failed (`precast ls --state failed`), or publish one that has nothing for it: `precast build --without 'affine'`
    ");
}

#[test]
fn a_build_that_is_ended_keeps_finished_programs() {
    // By a signal, and by the end of its standard input where the caller asks for that.
    for args in [&[][..], &["--until-stdin-ends"]] {
        let sandbox = Sandbox::steered(&["compile hangs batch=1"]);
        let mut command = sandbox.command(&[args, &["build", "-q", "-j", "1"]].concat());
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        // The larger program is compiled and published before the other one hangs.
        wait_until("nothing was published", || {
            sandbox.run(&["ls"]).stdout.contains("batch=4")
        });
        if args.is_empty() {
            let kill = Command::new("kill")
                .args(["-INT", &child.id().to_string()])
                .status();
            assert!(kill.unwrap().success());
        } else {
            drop(child.stdin.take());
        }
        assert_eq!(child.wait().unwrap().code(), Some(130), "{args:?}");
        sandbox.edit("model.py", "# fake: compile hangs batch=1", "");
        assert_eq!(compiled(&sandbox), 1);
    }
}

#[test]
fn unanswered_sizes_are_reported() {
    let sandbox = Sandbox::steered(&["takes 2 to 40"]);
    sandbox.append("precast.toml", "\n[compile]\nhealthcheck = false\n");
    let mut build = sandbox.command(&["build", "-j", "1"]);
    let ran = sandbox.output(build.env("FAKE_EAGER", "{}"));
    ran.says("\nonly affine eager: batch 2 to 40\n");
    sandbox
        .run(&["plan"])
        .prints("\n           batch 2 to 40\n");
    let show = sandbox.run(&["show", "affine", "eager"]);
    show.prints("eager runs it: it answers sizes that no bucket covers, batch 2 to 40\n");

    // Neither a larger nor a smaller request has an answer where nothing is padded and eager is left out.
    let sandbox = Sandbox::steered(&["padding is refused"]);
    sandbox
        .run(&["build"])
        .says("; requests of other sizes than the buckets' are refused\n");
}
