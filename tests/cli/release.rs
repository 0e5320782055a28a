//! Releases from the command line: whole or not at all, loaded by name, and back in one command.

use crate::sandbox::{LIBTORCH, RUN, Sandbox, assert_run, count, wait_until};

#[test]
fn a_named_release_is_whole_or_not_there() {
    let sandbox = Sandbox::steered(&["compile fails batch=4"]);
    let named = |more: &[&str]| {
        sandbox.run(&[&["build", "-q", "-j", "1", "--release", "v1"], more].concat())
    };
    named(&[])
        .exits(1)
        .says("release `v1` would lack 1 of 3 programs");
    assert_eq!(sandbox.releases(), 0);
    // Finished programs are kept, but a part of them makes no named release.
    sandbox.edit("model.py", "# fake: compile fails batch=4", "");
    named(&["--only", "affine batch=1"])
        .exits(1)
        .says("would lack 1 of");
    assert_eq!(sandbox.releases(), 0);
    named(&["--only", "affine batch=4"]).exits(0);
    let all = sandbox.json(&["release", "ls"]);
    assert_eq!(all["releases"][0]["name"], "v1");
    assert_eq!(count(&all["releases"][0]["programs"]), 2);
}

#[test]
fn an_earlier_release_is_loaded_by_name_and_rolled_back_to() {
    let sandbox = Sandbox::new();
    sandbox.rows(1);
    let answers = |model: &[&str]| sandbox.answer(model);
    sandbox.ok(&["build", "-q", "--release", "v1"]);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.ok(&["build", "-q", "--release", "v2"]);
    assert_eq!(answers(&[]), [3.0, 5.0, 7.0]);
    assert_eq!(answers(&["--model", "fake@v1"]), [1.0, 3.0, 5.0]);
    let back = sandbox.ok(&["release", "rollback", "fake"]);
    assert_eq!(
        back.stdout,
        "release 3 of fake is the newest now: 2 programs, `v1`\n"
    );
    assert_eq!(answers(&[]), [1.0, 3.0, 5.0]);
    // The releases that stay keep all they need.
    let gc = sandbox.run(&["gc", "--unreleased", "--keep-releases", "1"]);
    gc.prints("deleted 2 releases, 2 programs, 2 artifacts");
    assert_eq!(answers(&[]), [1.0, 3.0, 5.0]);
}

/// Returns the last line that `build` prints as JSON, and its exit code.
fn finished(sandbox: &Sandbox, args: &[&str]) -> (i32, serde_json::Value) {
    let ran = sandbox.run(&[&["build", "--format", "json"], args].concat());
    let last = ran.last();
    crate::schemas::check("build", &last);
    (ran.code, last)
}

#[test]
fn a_narrowed_build_after_a_change_makes_a_partial_release_that_is_nobodys_newest() {
    let sandbox = Sandbox::built();
    let newest = || count(&sandbox.json(&["ls", "--state", "live"])["programs"]);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_run!(brief sandbox, ["build", "-j", "1", "--only", "affine batch=4"], @"
    exit code 0, stderr
    plan: 1 of 1 programs are missing
    published: affine batch=4 [ID]
    built 1 program, 1 artifact compiled ([TIME])
    published fake release 2, a partial one
            it lacks affine batch=1: only `fake@2` loads it, release 1 stays the newest
    ");
    assert_eq!(newest(), 2, "the newest release is as it was");
    assert_run!(sandbox, ["release", "ls"], @"
    MODEL  SEQ  NAME  PROGRAMS  TORCH  WEIGHTS  AGE
    fake  2  1  partial: lacks 1  [TORCH]  [ID]  [TIME]
    fake  1  2  [TORCH]  [ID]  [TIME]
    ");
    let part = sandbox.json(&["ls", "--state", "partial"]);
    assert_eq!(count(&part["programs"]), 1, "{part}");
    assert_eq!(part["programs"][0]["bucket"], "batch=4");
    crate::schemas::check("ls", &sandbox.json(&["ls"]));
    crate::schemas::check("release", &sandbox.json(&["release", "ls"]));
    // The same once more, without Python.
    let worker = std::fs::read_to_string(sandbox.path("worker")).unwrap();
    sandbox.script("worker", "exit 1");
    let (code, again) = finished(&sandbox, &["--only", "affine batch=4"]);
    assert_eq!((code, &again["published"]), (0, &false.into()), "{again}");
    sandbox.script("worker", worker.trim_start_matches("#!/bin/sh\n"));
    // Nothing goes back to it, and gc does not count it.
    let back = sandbox.run(&["release", "rollback", "fake"]).exits(3);
    back.says("error: `fake` has no earlier release\n");
    let back = sandbox.run(&["release", "rollback", "fake@2"]).exits(1);
    back.says("is a partial one: it lacks 1 of the programs that the spec asked for\n");
    let gc = sandbox.run(&["gc", "--keep-days", "0", "--keep-releases", "1"]);
    gc.prints("deleted 0 releases, 0 programs");
    // The rest makes a whole release with the programs of the partial one.
    let (code, rest) = finished(&sandbox, &["--only", "affine batch=1"]);
    assert_eq!((code, &rest["release"]["seq"]), (0, &3.into()), "{rest}");
    assert_eq!(
        (count(&rest["release"]["lacks"]), count(&rest["lost"])),
        (0, 0)
    );
    assert_eq!(newest(), 2);
    let back = sandbox.json(&["release", "rollback", "fake"]);
    assert_eq!(
        (&back["release"]["seq"], &back["published"]),
        (&4.into(), &true.into())
    );
    assert_eq!(count(&back["release"]["programs"]), 2);
    sandbox.ok(&["verify"]);
}

#[test]
fn a_partial_release_is_loaded_by_its_number_alone() {
    let sandbox = Sandbox::new();
    sandbox.tensors("x.safetensors", &[("x", &[4, 3], &[0.0; 12])]);
    let part = ["build", "-q", "--only", "affine batch=4"];
    sandbox.ok(&part);
    assert_run!(sandbox, RUN, @"
    exit code 3, stderr
    error: `fake` has only partial releases
    hint: `precast build` makes the rest; `fake@1` names the last one
    ");
    sandbox.answer(&["--model", "fake@1"]);
    sandbox.ok(&["build", "-q"]);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.ok(&part);
    for (model, answer) in [
        (&[][..], 1.0),
        (&["--model", "fake@3"], 3.0),
        (&["--model", "fake@2"], 1.0),
    ] {
        assert_eq!(sandbox.answer(model)[0], answer, "{model:?}");
    }
}

#[test]
fn a_module_that_nothing_answers_is_an_error_and_no_release_is_without_it() {
    let sandbox = Sandbox::new();
    sandbox.append(
        "precast.toml",
        "\n[[module]]\nname = \"second\"\npath = \"encoder\"\n[module.inputs]\n\
        x = { dtype = \"float32\", shape = [\"rows\", 3] }\n[module.buckets]\nrows = [2]",
    );
    sandbox.ok(&["build", "-q"]);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.append("model.py", "# fake: capture fails rows=2");
    assert_run!(brief sandbox, ["build", "-j", "1"], @"
    exit code 1, stderr
    plan: 5 of 5 programs are missing
    failed: second rows=2: the fake model can't be captured
    published: affine batch=4 [ID]
    published: affine batch=1 [ID]
    failed second rows=2: model.py:1: the fake model can't be captured
           hint: make it simpler
           `precast log [ID]` prints the whole log
    left out affine eager, second eager: the fake model has no dynamic dimensions; requests that no other program covers are refused
    built 2 programs, 2 artifacts compiled ([TIME]), 1 failed
    error: nothing answers `second`: no release was published
    hint: the newest release stays what it was; fix what failed (`precast ls --state failed`), or publish one that has nothing for it: `precast build --without 'second'`
    ");
    let (code, document) = finished(&sandbox, &[]);
    let second = serde_json::json!(["second"]);
    assert_eq!((code, &document["unanswered"]), (1, &second), "{document}");
    assert_eq!(document["release"]["seq"], 1, "{document}");
    assert_eq!(sandbox.releases(), 1);
    // A narrowed build of another module publishes nothing either.
    let (code, document) = finished(&sandbox, &["--only", "affine*"]);
    assert_eq!((code, sandbox.releases()), (1, 1), "{document}");
    let other = sandbox.run(&["build", "--without", "other"]).exits(2);
    other.says("error: the spec has no module `other`\nhint: it has affine, second\n");
    let ran = sandbox.ok(&["build", "--without", "second"]);
    ran.says("\nbuilt 0 programs, 0 artifacts compiled, 2 programs there already (");
    ran.says("\nlost second rows=2: release 1 has it, the new one does not\nwithout second: nothing answers it\n");
    assert_eq!(sandbox.releases(), 2);
    let (code, document) = finished(&sandbox, &["--without", "second"]);
    assert_eq!((code, &document["without"]), (0, &second), "{document}");
}

#[test]
fn builders_of_one_change_publish_it_once() {
    let sandbox = Sandbox::built();
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.append("model.py", "# fake: compile waits");
    let mut build = sandbox.command(&["build", "-q", "-j", "1"]);
    let builders = [(); 4].map(|()| build.spawn().unwrap());
    wait_until("no compile", || sandbox.path("waiting").exists());
    sandbox.write("go", "");
    for mut builder in builders {
        assert!(builder.wait().unwrap().success());
    }
    assert_eq!(sandbox.releases(), 2);
    let gc = sandbox.run(&["gc", "--keep-days", "0"]);
    gc.prints("deleted 0 releases, 0 programs");
    // Back and forth in content, and the same once more.
    for seq in [3, 4] {
        let back = sandbox.json(&["release", "rollback", "fake"]);
        assert_eq!(
            (&back["release"]["seq"], &back["published"]),
            (&seq.into(), &true.into())
        );
    }
    let same = sandbox.ok(&["release", "rollback", "fake", "--to", "2"]);
    assert_eq!(
        same.stdout,
        "release 4 of fake is the newest already: 2 programs\n"
    );
}

#[test]
fn a_release_is_named_by_its_number_wherever_a_model_is() {
    let sandbox = Sandbox::new();
    sandbox.ok(&["build", "-q", "--release", "v1"]);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.ok(&["build", "-q"]);
    let id = |args: &[&str]| sandbox.json(args)["id"].as_str().unwrap().to_owned();
    let old = id(&["show", "fake@1", "affine", "batch=4"]);
    assert_eq!(old, id(&["show", "fake@v1 affine batch=4"]));
    let new = id(&["show", "affine", "batch=4"]);
    assert_eq!(new, id(&["show", "fake@2", "affine", "batch=4"]));
    assert_ne!(old, new);
    let listed = |model: &str| {
        let listed = sandbox.json(&["ls", "--model", model, "--bucket", "batch=4"]);
        listed["programs"][0]["id"].as_str().unwrap().to_owned()
    };
    assert_eq!([listed("fake@1"), listed("fake@2")], [old.clone(), new]);
    let why = sandbox.json(&["why", "affine", "--model", "fake@v1"]);
    assert_eq!(count(&why["why"]), 2, "{why}");
    assert_eq!(why["why"][1]["id"], old, "{why}");
    let report = sandbox.json(&["report", "--model", "fake@1"]);
    assert_eq!(report["models"][0]["release"], 1, "{report}");
    let all = sandbox.json(&["release", "ls", "fake@1"]);
    assert_eq!(count(&all["releases"]), 1);
    sandbox.ok(&["diff", "fake@1", "fake@2"]);
    sandbox.ok(&["log", "fake@1 affine batch=4"]);
    for (line, code, says) in [
        (
            "show fake@1",
            2,
            "error: `fake@1` is a release of many programs\n\
             hint: name one of them, as `fake@1 MODULE BUCKET`; `precast ls --model fake@1` lists them\n",
        ),
        (
            "ls --model fake@9",
            3,
            "error: there is no release `fake@9`\nhint: `precast release ls` lists models and releases\n",
        ),
        (
            "report --model fake@1 --release 2",
            2,
            "error: `fake@1` and `--release` both name a release\nhint: leave one of them out\n",
        ),
        (
            "build --release 7",
            2,
            "error: `7` can't name a release: releases have numbers already\nhint: put a letter in it, as `v7`\n",
        ),
        (
            "run affine --inputs x.safetensors --model fake@9",
            3,
            "error: there is no release `fake@9`\nhint: `precast release ls` lists models and releases\n",
        ),
    ] {
        sandbox.rows(1);
        let words: Vec<&str> = line.split(' ').collect();
        assert_eq!(sandbox.run(&words).exits(code).stderr, says, "{line}");
    }
    let back = sandbox.json(&["release", "rollback", "fake@1"]);
    assert_eq!(back["release"]["seq"], 3, "{back}");
    for (model, answer) in [("fake@1", 1.0), ("fake@2", 3.0), ("fake", 1.0)] {
        assert_eq!(sandbox.answer(&["--model", model])[0], answer, "{model}");
        sandbox.ok(&["bench", "affine", "--seconds", "0.01", "--model", model]);
    }
}

#[test]
fn gc_keeps_the_release_of_a_loaded_model_and_programs_of_a_running_build() {
    use precast::{Device, Runtime, Store};
    let sandbox = Sandbox::built();
    let model = {
        let store = Store::open(sandbox.path("artifacts")).unwrap();
        Runtime::libtorch(Some(LIBTORCH.as_ref()), false).unwrap();
        let runtime = Runtime::new(&store, Device::Cpu).unwrap();
        runtime.load("fake").unwrap()
    };
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    sandbox.ok(&["build", "-q"]);
    let gc = ["gc", "--unreleased", "--keep-releases", "1"];
    sandbox
        .run(&gc)
        .prints("deleted 1 release, 0 programs, 0 artifacts");
    drop(model);
    sandbox
        .run(&gc)
        .prints("deleted 0 releases, 2 programs, 2 artifacts");
    // A build that takes long has found a program that no release has: its own has it at the end.
    let sandbox = Sandbox::steered(&["compile waits batch=4"]);
    let part = ["build", "-q", "--release", "v1", "--only", "affine batch=1"];
    sandbox.run(&part).exits(1);
    let build = sandbox.command(&part[..4]).spawn().unwrap();
    wait_until("no compile", || sandbox.path("waiting").exists());
    sandbox.run(&gc).prints("0 programs, 0 artifacts");
    sandbox.write("go", "");
    assert!(build.wait_with_output().unwrap().status.success());
    sandbox.ok(&["verify"]);
}

#[test]
fn an_index_with_other_tables_is_made_again_by_a_build_or_a_repair() {
    let sandbox = Sandbox::built();
    let index = sandbox.path("artifacts/index.sqlite");
    for (version, args) in [
        (0, &["verify", "--reindex"][..]),
        (3, &["verify", "--repair"]),
        (3, &["build", "-q"]),
        (4, &["verify", "--reindex"]),
        (4, &["build", "-q"]),
    ] {
        std::fs::remove_file(&index).unwrap();
        let old = rusqlite::Connection::open(&index).unwrap();
        let sql =
            format!("CREATE TABLE objects (digest TEXT, note); PRAGMA user_version={version}");
        old.execute_batch(&sql).unwrap();
        drop(old);
        eprintln!("{version} {args:?}");
        let ran = sandbox.run(&["ls"]);
        ran.prints("batch=4");
        ran.says("--reindex");
        sandbox.ok(args);
        sandbox.ok(&["verify"]).prints("sound");
    }
}
