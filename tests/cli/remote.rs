//! `precast push`, `precast pull` and `precast ls REMOTE`, with the program beside this one.

use std::{fs, path::Path};

use crate::sandbox::{Sandbox, states};

/// Returns the program beside `precast`, which `cargo test --workspace` builds.
fn beside() {
    let own = Path::new(env!("CARGO_BIN_EXE_precast"));
    let program = own.with_file_name("precast-remote");
    let hint =
        "build it: cargo build --bin precast-remote, with the features and packages of the tests";
    assert!(
        program.is_file(),
        "there is no `{}`: {hint}",
        program.display()
    );
}

#[test]
fn a_release_goes_from_one_store_to_another_by_a_folder() {
    beside();
    let sandbox = Sandbox::built();
    let url = format!("file://{}", sandbox.path("there").display());
    let none = sandbox.run(&["ls", &url]);
    none.says("is no remote: can't open");
    assert_eq!(none.code, 2);
    sandbox
        .run(&["push", "fake", &url, "-n"])
        .prints("would be the next number of file://");
    assert!(!sandbox.path("there").exists());
    let pushed = sandbox.run(&["push", "fake", &url]);
    pushed.prints("is now release 1 of file://");
    pushed.says("to move (");
    sandbox
        .run(&["push", "fake@1", &url])
        .prints("is already release 1 of file://");
    let missing = sandbox.run(&["push", "nothing", &url]);
    assert_eq!(missing.code, 3);
    missing.says("no release `nothing`");
    sandbox.run(&["ls", &url]).prints("fake");
    let listed = sandbox.json(&["ls", &url]);
    assert_eq!(listed["releases"][0]["seq"], 1);
    // Another store, then the one that has it.
    let pull = ["pull", &url, "fake", "--store", "other", "--all"];
    sandbox.run(&pull).prints("release 1 of fake");
    sandbox.run(&pull).prints("is here already; moved 0 files");
    sandbox.ok(&["verify", "--store", "other"]);
    // With the place in the environment.
    let mut command = sandbox.command(&["pull", "fake", "--store", "fourth", "--all"]);
    sandbox
        .output(command.env("PRECAST_REMOTE", &url))
        .prints("release 1 of fake");
    let mut command = sandbox.command(&["push", "fake"]);
    sandbox
        .output(command.env("PRECAST_REMOTE", &url))
        .prints("is already release 1 of file://");
    let elsewhere = sandbox.run(&["pull", &url, "--store", "third", "--for", "mars"]);
    assert_eq!(elsewhere.code, 4);
    elsewhere.says("no release of `fake` fits this host: release 1 is for");
    // Without the program.
    let alone = sandbox.path("precast");
    fs::copy(env!("CARGO_BIN_EXE_precast"), &alone).unwrap();
    let mut command = std::process::Command::new(&alone);
    let ended = command.args(["ls", &url]).env("PATH", "").output().unwrap();
    let text = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(
        text.contains("which has the network code") && text.contains("make remote"),
        "{text}"
    );
}

/// Returns what `build` printed in this store, with a remote.
fn build(sandbox: &Sandbox, store: &str, url: &str, more: &[&str]) -> crate::sandbox::Ran {
    let args = ["build", "--store", store, "--remote", url];
    let mut command = sandbox.command(&[&args[..], more].concat());
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    sandbox.output(command.env("PRECAST_PYTHON", python))
}

#[test]
fn a_build_takes_from_a_remote_what_another_machine_made() {
    beside();
    let sandbox = Sandbox::new();
    let url = format!("file://{}", sandbox.path("there").display());
    let first = build(&sandbox, "a", &url, &["--push"]).exits(0);
    first.says("has no release of `fake`");
    first.says("is now release 1 of file://");
    // Without a worker, on a machine that knows nothing of the model.
    let worker = fs::read(sandbox.path("worker")).unwrap();
    sandbox.script("worker", "exit 1");
    let second = build(&sandbox, "b", &url, &["--format", "json"]).exits(0);
    let last = second.last();
    assert_eq!(
        (&last["compiled"], &last["published"]),
        (&0.into(), &true.into())
    );
    let programs = last["programs"].as_array().unwrap();
    for program in &programs[..2] {
        assert_eq!(
            (&program["state"], &program["from"]),
            (&"hit".into(), &"file://[ROOT]/there".into())
        );
    }
    // What can't be built there can't be built here.
    assert_eq!(programs[2]["state"], "skipped");
    second.shows("release 1 of file://[ROOT]/there leaves it out");
    build(&sandbox, "c", &url, &[]).says("programs from file://");
    sandbox.ok(&["verify", "--store", "b"]);
    // A changed source: other programs of the same artifacts, and the reason.
    fs::write(sandbox.path("worker"), worker).unwrap();
    sandbox.append("model.py", "# another line");
    let third = build(&sandbox, "d", &url, &[]).exits(0);
    third.says("it is not in file://");
    third.says("since its release `model.py` changed");
    third.says("artifact");
    third.says(", 0 artifacts compiled");
    let artifacts = sandbox.files("there/artifacts").len();
    let last = build(&sandbox, "e", &url, &["--format", "json"]).last();
    assert_eq!(
        (&last["compiled"], &last["fetched"]),
        (&0.into(), &artifacts.into())
    );
    // One that does not answer costs the help, and a push after it is an error.
    let nowhere = "https://localhost:1/models";
    let alone = build(&sandbox, "f", nowhere, &[]).exits(0);
    alone.says("the build goes on without https://localhost:1/models: can't read");
    let unpushed = build(&sandbox, "g", nowhere, &["--push"]).exits(1);
    unpushed.says("release 1 of fake was not pushed to https://localhost:1/models");
    unpushed.says("`precast push fake@1 https://localhost:1/models` pushes it");
}

#[test]
fn builders_at_once_share_the_programs_and_compile_each_artifact_once() {
    beside();
    let sandbox = Sandbox::new();
    sandbox.buckets("1, 2, 3, 4, 5, 6, 7, 8");
    let url = format!("file://{}", sandbox.path("there").display());
    let stores: Vec<String> = (0..4).map(|number| format!("s{number}")).collect();
    let lasts: Vec<serde_json::Value> = std::thread::scope(|scope| {
        let builds: Vec<_> = (stores.iter())
            .map(|store| {
                scope.spawn(|| build(&sandbox, store, &url, &["--push", "--format", "json"]))
            })
            .collect();
        let ended = builds
            .into_iter()
            .map(|build| build.join().unwrap().exits(0).last());
        ended.collect()
    });
    let compiled: u64 = lasts
        .iter()
        .map(|last| last["compiled"].as_u64().unwrap())
        .sum();
    let artifacts = sandbox.files("there/artifacts").len();
    assert_eq!(compiled, artifacts as u64, "{lasts:?}");
    let all: Vec<String> = lasts.iter().flat_map(states).collect();
    let are = |end: &str| all.iter().filter(|state| state.ends_with(end)).count();
    assert_eq!((are(": built"), are(": hit")), (8, 3 * 8), "{all:?}");
    assert!(sandbox.files("there/leases").is_empty());
    sandbox.ok(&["pull", &url, "fake", "--store", "z", "--all"]);
    sandbox.ok(&["verify", "--store", "z"]);
}

#[test]
fn builders_on_a_cluster_need_a_remote_and_a_python_with_ray() {
    beside();
    let sandbox = Sandbox::new();
    let url = format!("file://{}", sandbox.path("there").display());
    let alone = sandbox.run(&["build", "--on", "ray"]).exits(2);
    alone.says("--remote <REMOTE>");
    let other = build(&sandbox, "a", &url, &["--on", "slurm"]).exits(2);
    other.says("it is `ray` or `ray://HOST:PORT`");
    let wrong = ["--on", "ray", "--ray-resource", "sm90"];
    build(&sandbox, "a", &url, &wrong)
        .exits(2)
        .says("as `sm90=1`");
    // The Python of the checkout has not the package.
    let without = build(&sandbox, "a", &url, &["--on", "ray"]).exits(2);
    without.says("can't start builders on Ray: it ended with");
    without.says("`pip install 'precast[ray]'` there");
    // Where nothing is missing, nothing is started.
    build(&sandbox, "b", &url, &["--push"]).exits(0);
    build(&sandbox, "c", &url, &["--on", "ray"]).exits(0);
}
