//! `precast push`, `precast pull`, `precast remote`, and remotes in the place of a store, with the program beside this
//! one.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use serde_json::json;

use crate::{
    sandbox::{Ran, Sandbox, states},
    schemas::check,
};

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
fn build(sandbox: &Sandbox, store: &str, url: &str, more: &[&str]) -> Ran {
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
    build(&sandbox, "n", &url, &["--dry-run"]).says("a plan does not ask file://");
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
    build(&sandbox, "g", nowhere, &["--push"])
        .exits(2)
        .says("can't push to `https://localhost:1/models`");
    build(&sandbox, "g", "https://me:secret@localhost/models", &[])
        .exits(2)
        .says("has a name or a password in it");
    build(&sandbox, "g", "", &["--push"])
        .exits(2)
        .says("a push needs a remote");
    sandbox.write("no folder", "");
    let file = format!("file://{}", sandbox.path("no%20folder").display());
    let unpushed = build(&sandbox, "g", &file, &["--push"]).exits(1);
    unpushed.says("release 1 of fake was not pushed to file://");
    unpushed.says("`precast push fake@1 file://");
    // A build that publishes nothing pushes nothing: the newest release there stays.
    sandbox.append("model.py", "# fake: capture fails");
    let before = sandbox.json(&["ls", &url])["releases"].clone();
    build(&sandbox, "a", &url, &["--push"]).exits(1);
    assert_eq!(sandbox.json(&["ls", &url])["releases"], before);
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

/// Runs a command with a folder of settings in the sandbox.
fn run(sandbox: &Sandbox, args: &[&str]) -> Ran {
    let mut command = sandbox.command(args);
    sandbox.output(command.env("XDG_CONFIG_HOME", sandbox.path("config")))
}

#[test]
fn a_name_stands_for_a_place_and_allows_what_was_said() {
    beside();
    let sandbox = Sandbox::built();
    let run = |args: &[&str]| run(&sandbox, args);
    let url = format!("file://{}", sandbox.path("there").display());
    let none = run(&["remote", "add", "prod", &url]);
    assert_eq!(none.code, 3);
    none.says("has no release yet");
    none.says("`--write`");
    let added = run(&["remote", "add", "ci", &url, "--write"]).exits(0);
    added.prints("0 releases, pushes are allowed");
    added.says("several may push at once");
    run(&["push", "fake", "ci"]).prints("is now release 1 of file://");
    run(&["remote", "add", "prod", &url]).prints("1 release, read only");
    let refused = run(&["push", "fake", "prod"]);
    assert_eq!(refused.code, 2);
    refused.says("is read only");
    refused.says("`precast remote add prod file://[ROOT]/there --write`");
    let other = run(&["remote", "add", "prod", "file:///elsewhere"]);
    other.says("`precast remote rm prod` first");
    let listed = run(&["ls", "prod"]);
    listed.prints("fake");
    listed.says("`prod` is the remote file://");
    let named = run(&["remote", "ls", "--format", "json"]).json();
    check("remotes", &named);
    assert_eq!(named["remotes"][0]["name"], "ci");
    assert_eq!(named["remotes"][1]["write"], false);
    let mut pull = sandbox.command(&["pull", "fake@1", "--store", "other"]);
    pull.env("XDG_CONFIG_HOME", sandbox.path("config"));
    let pulled = sandbox.output(pull.env("PRECAST_REMOTE", "prod"));
    pulled.prints("release 1 of fake");
    let unknown = run(&["pull", "nowhere", "fake"]);
    assert_eq!(unknown.code, 2);
    unknown.says("there is no remote `nowhere`");
    unknown.says("known: ci, prod");
    run(&["remote", "rm", "ci"]).exits(0);
    assert_eq!(run(&["push", "fake", "ci"]).code, 2);

    // A file that is wrong, and one that others can write.
    let text = fs::read_to_string(sandbox.path("config/precast/remotes.toml")).unwrap();
    sandbox.write("config/precast/remotes.toml", text.replace("url", "place"));
    run(&["remote", "ls"]).says("remotes.toml` line 4: unknown field `place`");
    sandbox.write(
        "config/precast/remotes.toml",
        text.replace("schema = 1", "schema = 2"),
    );
    run(&["ls", "prod"]).says("line 1: it has version 2, this precast knows version 1");
    sandbox.write("config/precast/remotes.toml", &text);
    let path = sandbox.path("config/precast/remotes.toml");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    let unsafe_file = run(&["ls", "prod"]);
    assert_eq!(unsafe_file.code, 2);
    unsafe_file.says("let nobody else write it");
}

#[test]
fn a_lock_takes_exactly_what_it_names() {
    beside();
    let sandbox = Sandbox::built();
    let url = format!("file://{}", sandbox.path("there").display());
    sandbox.ok(&["push", "fake", &url]);
    let none = sandbox.run(&["pull", "--locked"]);
    assert_eq!(none.code, 3);
    none.says("there is no `precast.lock` here");
    sandbox.ok(&["pull", &url, "fake@1", "--lock", "-n", "--store", "other"]);
    assert!(!sandbox.path("precast.lock").exists());
    sandbox.ok(&["pull", &url, "fake@1", "--lock", "--store", "other"]);
    let text = fs::read_to_string(sandbox.path("precast.lock")).unwrap();
    let identity = &sandbox.json(&["ls", &url])["releases"][0]["identity"];
    let identity = identity.as_str().unwrap();
    for line in [
        format!("remote = \"{url}\""),
        format!("identity = \"{identity}\""),
        "[[model]]\nname = \"fake\"".to_owned(),
        "release = 1".to_owned(),
    ] {
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    let pull = ["pull", "--locked", "--store", "third"];
    sandbox.run(&pull).prints("release 1 of fake");
    sandbox
        .run(&[&pull[..], &["fake"]].concat())
        .prints("is here already");
    let missing = sandbox.run(&[&pull[..], &["other"]].concat());
    assert_eq!(missing.code, 3);
    missing.says("`precast.lock` has no model `other`");
    // Another release has this number now, or the file is wrong.
    let other = "0".repeat(64);
    sandbox.write("precast.lock", text.replace(identity, &other));
    let changed = sandbox.run(&["pull", "--locked", "--store", "fourth"]);
    assert_eq!(changed.code, 1);
    changed.says(&format!("is {identity}, and {other} is locked"));
    assert_eq!(
        sandbox.json(&["release", "ls", "--store", "fourth"])["releases"],
        json!([])
    );
    let table = text[text.find("[[").unwrap()..].to_owned();
    for (bad, says) in [
        (
            text.replace("schema = 1", "schema = 9"),
            "line 2: it has version 9",
        ),
        (
            text.replace("release = 1", "release = \"1\""),
            "line 7: invalid type",
        ),
        (text.replace(identity, "abc"), "line 8: "),
        (text.replace("file://", ""), "is no place of a remote"),
        (format!("{text}\n{table}"), "line 11: `fake` is there twice"),
        (format!("{text}x = ["), "`precast.lock` line "),
    ] {
        sandbox.write("precast.lock", bad);
        let ran = sandbox.run(&["pull", "--locked", "--store", "fourth"]);
        assert_eq!(ran.code, 2, "{}", ran.text());
        ran.says(says);
    }
}

#[test]
fn a_remote_is_looked_at_checked_and_collected_in_the_place_of_a_store() {
    beside();
    let sandbox = Sandbox::built();
    let there = sandbox.path("there");
    let url = format!("file://{}", there.display());
    sandbox.ok(&["push", "fake", &url]);
    let at = |args: &[&str]| sandbox.run(&[args, &["--store", &url][..]].concat());
    for args in [
        &["show", "affine", "batch=4"][..],
        &["show", "fake@1", "affine", "batch=1"],
        &["why", "affine", "-f", "none.toml"],
        &["release", "ls"],
        &["diff", "affine batch=1", "affine batch=4"],
    ] {
        let (own, theirs) = (sandbox.run(args), at(args));
        assert_eq!(own.stdout, theirs.stdout, "{args:?}");
        theirs.says("1 release, ");
        theirs.says("objects stay there");
    }
    at(&["ls"]).prints("affine");
    assert_eq!(
        at(&["ls", "--ids", "--state", "live"]).stdout,
        sandbox.run(&["ls", "--ids", "--state", "live"]).stdout
    );
    let bytes = |ran: Ran| ran.json()["groups"][0]["stored"].clone();
    let own = sandbox.run(&["du", "--by", "release", "--format", "json"]);
    assert_eq!(
        bytes(at(&["du", "--by", "release", "--format", "json"])),
        bytes(own)
    );
    for args in [
        &["build"][..],
        &["log", "affine"],
        &["bench", "affine"],
        &["release", "rollback", "fake"],
    ] {
        let refused = at(args);
        assert_eq!(refused.code, 2);
        refused.says("this command needs a store on this machine, and `file://");
        refused.says("`precast pull file://");
    }
    assert_eq!(fs::read_dir(sandbox.path("tmp")).unwrap().count(), 0);

    at(&["verify"]).exits(0).prints("sound");
    let stray = there.join("objects/ab/abcd.zst");
    fs::create_dir_all(stray.parent().unwrap()).unwrap();
    fs::write(&stray, "left by a push").unwrap();
    at(&["gc"]).says("1 file that no release needs stay");
    let month = std::time::SystemTime::now() - std::time::Duration::from_secs(30 * 86400);
    fs::File::options()
        .write(true)
        .open(&stray)
        .unwrap()
        .set_modified(month)
        .unwrap();
    let planned = at(&["gc"]).exits(0);
    planned.prints("objects/ab/abcd.zst\nwould delete 0 releases and 1 file: 14 B of");
    planned.says("`--apply` deletes them");
    assert!(stray.exists());
    let done = at(&["gc", "--apply", "--format", "json"]).exits(0).json();
    check("remote-gc", &done);
    assert_eq!(
        (&done["applied"], &done["files"]),
        (&json!(true), &json!(["objects/ab/abcd.zst"]))
    );
    assert!(!stray.exists());
    at(&["verify"]).exits(0);

    // A damaged file.
    let object = sandbox.files("there/objects").pop().unwrap();
    let mut content = fs::read(&object).unwrap();
    content[20] ^= 1;
    fs::remove_file(&object).unwrap();
    fs::write(&object, content).unwrap();
    let found = at(&["verify", "--format", "json"]);
    assert_eq!(found.code, 1);
    check("remote-verify", &found.json());
    let name = object.strip_prefix(&there).unwrap().display().to_string();
    assert_eq!(found.json()["flaws"][0]["name"], name);
    at(&["verify"]).prints(&format!("damaged  {name}: "));
    let record = sandbox.files("there/programs").pop().unwrap();
    fs::remove_file(record).unwrap();
    let left_out = at(&["ls"]);
    assert_eq!(left_out.code, 1);
    left_out.says("its releases are left out");
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
