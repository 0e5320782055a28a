//! The program, as `precast` starts it.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod asked;

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    process::{Child, Command, Stdio},
};

use asked::{begin, said};
use precast_store::{
    Store, testing,
    transfer::{Event, Kind, Request},
};

/// Sends a line to the program; returns what it says and whether it ended well.
fn asked(line: &str) -> (Vec<Event>, bool) {
    asked_with(line, &[])
}

/// As [`asked`], with these variables of the environment.
fn asked_with(line: &str, variables: &[(&str, &str)]) -> (Vec<Event>, bool) {
    let mut command = asked::program();
    said(begin(command.envs(variables.iter().copied()), line))
}

#[test]
fn a_request_that_is_none_is_an_error_of_the_caller() {
    for line in [
        "",
        "hello",
        "{}",
        "{\"do\":\"sing\"}",
        "{\"do\":\"list\",\"remote\":\"nowhere\"}",
    ] {
        let (events, good) = asked(line);
        assert!(!good);
        let [
            Event::Error {
                kind,
                message,
                hint,
                ..
            },
        ] = &events[..]
        else {
            panic!("{line}: {events:?}");
        };
        assert_eq!(*kind, Kind::Usage, "{line}");
        assert!(!message.is_empty() && !hint.is_empty());
    }
}

#[test]
fn a_push_and_a_pull_say_what_moves_and_what_has_moved() {
    let (dir, store) = testing::store();
    let artifact = testing::put_artifact(&store, "block");
    let program = testing::put_program(&store, "m", 1, &[artifact.id]);
    testing::put_release(&store, None, &[program.id]);
    let remote = format!("file://{}/there", dir.path().display());
    let ask = |request: &Request| asked(&serde_json::to_string(request).unwrap());
    let push = Request::Push {
        store: store.path().to_owned(),
        remote: remote.clone(),
        model: "m".to_owned(),
        which: None,
        dry_run: false,
        shared: false,
        trusted: false,
    };
    let (events, good) = ask(&push);
    assert!(good, "{events:?}");
    assert!(
        matches!(&events[0], Event::Plan(plan) if plan.moves == 3),
        "{events:?}"
    );
    assert!(matches!(events.last(), Some(Event::Done)));
    let to = dir.path().join("to");
    let pull = Request::Pull {
        store: to.clone(),
        remote: remote.clone(),
        models: vec![],
        which: None,
        hosts: vec![],
        target: None,
        all: true,
        dry_run: false,
        shared: false,
        trusted: false,
    };
    let (events, good) = ask(&pull);
    assert!(good, "{events:?}");
    let moved = events.iter().find_map(|event| match event {
        Event::Moved(moved) => Some(moved),
        _ => None,
    });
    assert_eq!(
        (moved.unwrap().to, moved.unwrap().published),
        (Some(1), true)
    );
    assert!(
        Store::open(to)
            .unwrap()
            .releases()
            .get("m", None)
            .unwrap()
            .is_some()
    );
    let (events, _) = ask(&Request::List { remote });
    assert!(matches!(&events[0], Event::Listed(one) if one.model == "m" && one.programs == 1));
}

#[test]
fn a_registry_gets_the_login_that_docker_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let registry = Command::new("python3")
        .args(["-c", include_str!("registry.py")])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut registry = Killed(registry.unwrap());
    let mut port = String::new();
    let mut output = BufReader::new(registry.0.stdout.take().unwrap());
    output.read_line(&mut port).unwrap();
    let host = format!("127.0.0.1:{}", port.trim());
    fs::write(dir.path().join("login"), "secret").unwrap();
    let (_store, store) = testing::store();
    let artifact = testing::put_artifact(&store, "block");
    let program = testing::put_program(&store, "m", 1, &[artifact.id]);
    testing::put_release(&store, None, &[program.id]);
    let push = Request::Push {
        store: store.path().to_owned(),
        remote: format!("oci://{host}/models"),
        model: "m".to_owned(),
        which: None,
        dry_run: false,
        shared: false,
        trusted: false,
    };
    let push = serde_json::to_string(&push).unwrap();
    // Programs that keep passwords.
    let answer = r#"{"ServerURL":"","Username":"me","Secret":"secret"}"#;
    for (name, script) in [
        ("test", format!("echo '{answer}'")),
        ("nobody", "echo credentials not found; exit 1".to_owned()),
    ] {
        let helper = dir.path().join(format!("docker-credential-{name}"));
        fs::write(&helper, format!("#!/bin/sh\ncat > /dev/null; {script}\n")).unwrap();
        fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!(
        "{}:{}",
        dir.path().display(),
        std::env::var("PATH").unwrap()
    );
    // `me:secret` and `me:wrong` in base64.
    for (config, refused) in [
        ("{\"auths\":{\"HOST\":{\"auth\":\"bWU6c2VjcmV0\"}}}", None),
        ("{\"credHelpers\":{\"HOST\":\"test\"}}", None),
        ("{\"auths\":{\"HOST\":{}},\"credsStore\":\"test\"}", None),
        (
            "{\"auths\":{\"HOST\":{\"auth\":\"bWU6d3Jvbmc=\"}}}",
            Some("who are you?"),
        ),
        ("{\"credsStore\":\"nobody\"}", Some("who are you?")),
        ("{}", Some("who are you?")),
        ("{", Some("config.json")),
        ("{\"credsStore\":\"missing\"}", Some("credential helper")),
    ] {
        fs::write(
            dir.path().join("config.json"),
            config.replace("HOST", &host),
        )
        .unwrap();
        let folder = dir.path().display().to_string();
        let (events, good) = asked_with(&push, &[("DOCKER_CONFIG", &folder), ("PATH", &path)]);
        assert_eq!(good, refused.is_none(), "{config}: {events:?}");
        if let (Some(why), Some(Event::Error { message, hint, .. })) = (refused, events.last()) {
            assert!(
                message.contains(why) && message.contains("no access"),
                "{message}"
            );
            assert!(
                hint.contains("docker login") && !message.contains("secret"),
                "{hint}"
            );
        }
    }
}

/// A program that ends with its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
