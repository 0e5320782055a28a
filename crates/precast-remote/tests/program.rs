//! The program, as `precast` starts it.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
};

use precast_store::{
    Store, testing,
    transfer::{Event, Kind, Request},
};

/// Sends a line to the program; returns what it says and whether it ended well.
fn asked(line: &str) -> (Vec<Event>, bool) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_precast-remote"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    writeln!(input, "{line}").unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    let events = output
        .lines()
        .map(|line| serde_json::from_str(&line.unwrap()).unwrap());
    let events = events.collect();
    drop(input);
    (events, child.wait().unwrap().success())
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
