//! Requests to the program, as `precast` sends them, and what it says.
#![allow(dead_code, reason = "each test target uses a part of it")]

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
};

use precast_store::{
    Store,
    transfer::{Event, Moved, Request},
};

/// Returns the program's command.
pub fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_precast-remote"))
}

/// Starts the program with a line. It works until it is done, or its input ends.
pub fn begin(command: &mut Command, line: &str) -> Child {
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = pipes.spawn().unwrap();
    writeln!(child.stdin.as_mut().unwrap(), "{line}").unwrap();
    child
}

/// Returns what the program says until its end, and whether it ended well. The end of its input would stop it.
pub fn said(mut child: Child) -> (Vec<Event>, bool) {
    let output = BufReader::new(child.stdout.take().unwrap()).lines();
    let events = output.map(|line| serde_json::from_str(&line.unwrap()).unwrap());
    let events = events.collect();
    (events, child.wait().unwrap().success())
}

/// Returns a request as a line.
pub fn line(request: &Request) -> String {
    serde_json::to_string(request).unwrap()
}

/// Pushes the newest release of the model `m`.
pub fn push(from: &Store, remote: &str) -> Request {
    Request::Push {
        store: from.path().to_owned(),
        remote: remote.to_owned(),
        model: "m".to_owned(),
        which: None,
        dry_run: false,
        shared: false,
        trusted: false,
    }
}

/// Pulls a release of the model `m`, the newest one without `which`.
pub fn pull(remote: &str, which: Option<&str>, to: &Path) -> Request {
    Request::Pull {
        store: to.to_owned(),
        remote: remote.to_owned(),
        models: vec!["m".to_owned()],
        which: which.map(str::to_owned),
        hosts: vec![],
        target: None,
        all: false,
        dry_run: false,
        shared: false,
        trusted: false,
    }
}

/// Returns the release that has moved.
pub fn moved(events: &[Event]) -> Moved {
    let found = events.iter().find_map(|event| match event {
        Event::Moved(moved) => Some(moved.clone()),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("{events:?}"))
}
