//! Push and pull against real servers of S3, which `make test-remotes` installs and names.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod server;

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    thread,
};

use precast_store::{
    Store, testing,
    transfer::{Event, Moved, Request},
};
use server::Server;
use tempfile::TempDir;

impl Server {
    /// Starts `precast-remote` with the credentials of the server, and returns what it says.
    fn ask(&self, request: &Request) -> Vec<Event> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_precast-remote"))
            .env(
                "AWS_ENDPOINT_URL",
                format!("http://127.0.0.1:{}", self.port),
            )
            .env("AWS_ACCESS_KEY_ID", "test")
            .env("AWS_SECRET_ACCESS_KEY", "testtest")
            .env("AWS_REGION", "us-east-1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        writeln!(input, "{}", serde_json::to_string(request).unwrap()).unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let events = output
            .lines()
            .map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        let events = events.collect();
        drop(input);
        child.wait().unwrap();
        events
    }

    fn push(&self, store: &Store) -> Moved {
        let events = self.ask(&Request::Push {
            store: store.path().to_owned(),
            remote: "s3://models/precast".to_owned(),
            model: "m".to_owned(),
            which: None,
            dry_run: false,
            shared: false,
            trusted: false,
        });
        moved(&events)
    }

    fn pull(&self, to: &Path) -> Moved {
        let events = self.ask(&Request::Pull {
            store: to.to_owned(),
            remote: "s3://models/precast".to_owned(),
            models: vec!["m".to_owned()],
            which: None,
            hosts: vec![],
            target: None,
            all: false,
            dry_run: false,
            shared: false,
            trusted: false,
        });
        moved(&events)
    }
}

fn moved(events: &[Event]) -> Moved {
    let found = events.iter().find_map(|event| match event {
        Event::Moved(moved) => Some(moved.clone()),
        _ => None,
    });
    found.unwrap_or_else(|| panic!("{events:?}"))
}

/// A store with a release whose weights are larger than a part of an upload.
fn source(name: &str) -> (TempDir, Store) {
    let (dir, store) = testing::store();
    let artifact = testing::put_artifact(&store, name);
    let program = testing::put_program(&store, "m", 1, &[artifact.id]);
    let mut release = testing::release("m", None, &[program.id]);
    let mut random = 1u64;
    let weights: Vec<u8> = (0..20 << 17)
        .flat_map(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005) + name.len() as u64;
            random.to_be_bytes()
        })
        .collect();
    release.weights = Some(store.objects().put_bytes(&weights).unwrap());
    store.releases().put(&release).unwrap();
    (dir, store)
}

/// A release goes there and comes back; pushers at once get numbers of their own.
fn serves(server: &Server) {
    let (_from, from) = source("first");
    let pushed = server.push(&from);
    assert_eq!(
        (pushed.to, pushed.published, pushed.refuses_twice),
        (Some(1), true, Some(true))
    );
    assert!(!server.push(&from).published);
    let (_to, to) = testing::store();
    let pulled = server.pull(to.path());
    assert_eq!((pulled.from, pulled.identity), (1, pushed.identity));
    assert_eq!(to.audit().verify().unwrap().defects, []);
    let sources = ["second", "another", "the fourth"].map(source);
    let numbers: std::collections::BTreeSet<u64> = thread::scope(|scope| {
        let pushers = sources
            .each_ref()
            .map(|(_, from)| scope.spawn(|| server.push(from).to.unwrap()));
        pushers.map(|one| one.join().unwrap()).into_iter().collect()
    });
    assert_eq!(numbers.len(), 3, "{numbers:?}");
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn moto() {
    serves(&Server::start(
        "PRECAST_MOTO",
        &["-H", "127.0.0.1", "-p", "PORT"],
    ));
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn seaweedfs() {
    serves(&Server::weed());
}
