//! Push and pull against real servers of S3, which `make test-remotes` installs and names.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use precast_store::{
    Store, testing,
    transfer::{Event, Moved, Request},
};
use tempfile::TempDir;

/// An S3 server of this machine with a bucket `models`.
struct Server {
    child: Child,
    port: u16,
    _folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts the program that a variable names, with these arguments; `PORT` and `FOLDER` in them are replaced.
    fn start(variable: &str, arguments: &[&str]) -> Self {
        let hint = "`make test-remotes` names it";
        let program = std::env::var(variable).unwrap_or_else(|_| panic!("{variable}: {hint}"));
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().display().to_string();
        let arguments = arguments.iter().map(|argument| {
            argument
                .replace("PORT", &port.to_string())
                .replace("FOLDER", &place)
        });
        let child = Command::new(program)
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self {
            child,
            port,
            _folder: folder,
        };
        let begun = Instant::now();
        while server
            .request("PUT /models HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
            .is_none()
        {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "{variable} does not answer"
            );
            thread::sleep(Duration::from_millis(200));
        }
        server
    }

    /// Returns the answer to a request, if it is a good one.
    fn request(&self, text: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.write_all(text.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.split(' ').nth(1)?.starts_with('2').then_some(answer)
    }

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
    // The storage says how old files are, and what three old releases alone need goes.
    let remote = || "s3://models/precast".to_owned();
    let gc = server.ask(&Request::Gc {
        remote: remote(),
        grace: 0,
        keep: Some(1),
        apply: true,
    });
    let [Event::Collected(gc), Event::Done] = &gc[..] else {
        panic!("{gc:?}");
    };
    assert!(gc.applied && gc.releases.len() == 3, "{gc:?}");
    assert!(gc.bytes > 3 * (20 << 20) && gc.before > gc.bytes, "{gc:?}");
    let verified = server.ask(&Request::Verify { remote: remote() });
    let found = verified.iter().find_map(|event| match event {
        Event::Verified(found) => Some((found.releases, found.flaws.len())),
        _ => None,
    });
    assert_eq!(found, Some((1, 0)), "{verified:?}");
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
    let arguments = [
        "server",
        "-s3",
        "-dir=FOLDER",
        "-ip=127.0.0.1",
        "-s3.port=PORT",
        "-volume.max=5",
    ];
    serves(&Server::start("PRECAST_WEED", &arguments));
}
