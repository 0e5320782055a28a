//! Releases from the command line: whole or not at all, loaded by name, and back in one command.

use crate::sandbox::Sandbox;
#[cfg(feature = "torch")]
use crate::sandbox::{assert_run, wait_until};

#[test]
fn a_named_release_is_whole_or_not_there() {
    let sandbox = Sandbox::new();
    sandbox.append("model.py", "# fake: compile fails batch=4");
    let failed = sandbox.run(&["build", "-q", "-j", "1", "--release", "v1"]);
    assert_eq!(failed.code, 1, "{}", failed.text());
    assert!(
        failed
            .stderr
            .contains("release `v1` would lack 1 of 3 programs"),
        "{}",
        failed.text()
    );
    assert_eq!(
        sandbox.json(&["release", "ls"])["releases"],
        serde_json::json!([])
    );
    // What was finished is kept, but a part of it is no release either.
    let sandbox = Sandbox::new();
    let part = sandbox.run(&["build", "-q", "--only", "affine batch=1", "--release", "v1"]);
    assert_eq!(part.code, 1, "{}", part.text());
    assert!(part.stderr.contains("would lack 1 of"), "{}", part.text());
    assert_eq!(
        sandbox.json(&["release", "ls"])["releases"],
        serde_json::json!([])
    );
    let rest = sandbox.run(&["build", "-q", "--only", "affine batch=4", "--release", "v1"]);
    assert_eq!(rest.code, 0, "{}", rest.text());
    let all = sandbox.json(&["release", "ls"]);
    assert_eq!(all["releases"][0]["name"], "v1");
    assert_eq!(all["releases"][0]["programs"].as_array().unwrap().len(), 2);
}

#[cfg(feature = "torch")]
#[test]
fn an_earlier_release_is_loaded_by_name_and_rolled_back_to() {
    let sandbox = Sandbox::new();
    sandbox.tensors("x.safetensors", &[("x", &[1, 3], &[0.0, 1.0, 2.0])]);
    let answers = |model: &[&str]| {
        let args = [
            "run",
            "affine",
            "--inputs",
            "x.safetensors",
            "--outputs",
            "y.safetensors",
            "-q",
        ];
        let ran = sandbox.run(&[&args, model].concat());
        assert_eq!(ran.code, 0, "{}", ran.text());
        sandbox.tensor("y.safetensors").1
    };
    assert_eq!(sandbox.run(&["build", "-q", "--release", "v1"]).code, 0);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_eq!(sandbox.run(&["build", "-q", "--release", "v2"]).code, 0);
    assert_eq!(answers(&[]), [3.0, 5.0, 7.0]);
    assert_eq!(answers(&["--model", "fake@v1"]), [1.0, 3.0, 5.0]);
    assert_run!(sandbox, ["release", "rollback", "fake"], @"
    exit code 0
    ----- stdout
    release 3 of fake is the newest now: 2 programs, `v1`
    ");
    assert_eq!(answers(&[]), [1.0, 3.0, 5.0]);
    // The releases that stay keep all they need.
    let gc = sandbox.run(&["gc", "--unreleased", "--keep-releases", "1"]);
    assert!(
        gc.stdout
            .contains("deleted 2 releases, 2 programs, 2 artifacts"),
        "{}",
        gc.text()
    );
    assert_eq!(answers(&[]), [1.0, 3.0, 5.0]);
}

#[cfg(feature = "torch")]
#[test]
fn gc_keeps_what_a_loaded_model_came_from_and_what_a_build_found() {
    use precast::{Device, Runtime, Store};
    let sandbox = Sandbox::built();
    let model = {
        let store = Store::open(sandbox.path("artifacts")).unwrap();
        let runtime = Runtime::new(&store, Device::Cpu).unwrap();
        runtime.load("fake").unwrap()
    };
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_eq!(sandbox.run(&["build", "-q"]).code, 0);
    let gc = ["gc", "--unreleased", "--keep-releases", "1"];
    let held = sandbox.run(&gc);
    assert!(
        held.stdout
            .contains("deleted 1 release, 0 programs, 0 artifacts"),
        "{}",
        held.text()
    );
    drop(model);
    let free = sandbox.run(&gc);
    assert!(
        free.stdout
            .contains("deleted 0 releases, 2 programs, 2 artifacts"),
        "{}",
        free.text()
    );
    // A build that takes long has found a program that no release has: its own has it at the end.
    let sandbox = Sandbox::new();
    sandbox.append("model.py", "# fake: compile waits batch=4");
    let part = ["build", "-q", "--release", "v1", "--only", "affine batch=1"];
    assert_eq!(sandbox.run(&part).code, 1);
    let build = sandbox.command(&part[..4]).spawn().unwrap();
    wait_until("no compile", || sandbox.path("waiting").exists());
    let held = sandbox.run(&gc);
    assert!(
        held.stdout.contains("0 programs, 0 artifacts"),
        "{}",
        held.text()
    );
    sandbox.write("go", "");
    let built = build.wait_with_output().unwrap();
    assert!(built.status.success());
    assert_eq!(sandbox.run(&["verify"]).code, 0);
}

#[test]
fn an_index_of_an_older_version_is_made_again_by_whatever_opens_it() {
    let sandbox = Sandbox::built();
    let index = sandbox.path("artifacts/index.sqlite");
    for (version, args) in [
        (0, &["verify", "--reindex"][..]),
        (0, &["verify"]),
        (0, &["build", "-q"]),
        // Other tables under the version of today are no older index: they are refused, but for mending.
        (1, &["verify", "--reindex"]),
        (1, &["verify", "--repair"]),
    ] {
        std::fs::remove_file(&index).unwrap();
        let old = rusqlite::Connection::open(&index).unwrap();
        let sql =
            format!("CREATE TABLE objects (digest TEXT, note); PRAGMA user_version={version}");
        old.execute_batch(&sql).unwrap();
        drop(old);
        let ran = sandbox.run(&["ls"]);
        assert!(
            ran.stdout.contains("batch=4") && ran.stderr.contains("--reindex"),
            "{}",
            ran.text()
        );
        let ran = sandbox.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.text());
        let ran = sandbox.run(&["verify"]);
        assert_eq!(ran.code, 0, "after {args:?}: {}", ran.text());
        assert!(
            ran.stdout.contains("sound"),
            "after {args:?}: {}",
            ran.text()
        );
    }
}
