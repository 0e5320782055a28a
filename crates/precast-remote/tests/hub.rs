//! Push and pull against a Hub of this machine, `hub_server.py`. The tests with the Hub's own client are those that
//! `make test-remotes` runs: it installs the client.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod asked;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use precast_store::{
    Store, testing,
    transfer::{Event, Kind, Listed, Moved, Request},
};
use tempfile::TempDir;

use asked::{line, moved, pull as pulling, push as pushing, said};

const REPO: &str = "hf://org/models";

/// A Hub with an empty repository, and its own home of a user.
struct Server {
    child: Child,
    port: u16,
    folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start() -> Self {
        // Two ports in a row.
        let port = loop {
            let free = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = free.local_addr().unwrap().port();
            if port < u16::MAX && TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
                break port;
            }
        };
        let folder = tempfile::tempdir().unwrap();
        let child = Self::run(folder.path(), port);
        let server = Self {
            child,
            port,
            folder,
        };
        server.wait();
        server
    }

    fn run(folder: &Path, port: u16) -> Child {
        Command::new("python3")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hub_server.py"))
            .arg(folder.join("hub"))
            .arg(port.to_string())
            .spawn()
            .unwrap()
    }

    fn wait(&self) {
        until(|| self.request("GET", "log", "").is_some());
    }

    /// Kills the server, and starts it again with what it has on its disk.
    fn restart(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Self::run(self.folder.path(), self.port);
        self.wait();
    }

    fn request(&self, method: &str, path: &str, body: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let length = body.len();
        let head = format!("{method} /test/{path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all((head + body).as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (_, text) = answer.split_once("\r\n\r\n")?;
        Some(text.to_owned())
    }

    fn set(&self, setting: &str, value: u64) {
        self.request("PUT", setting, &value.to_string()).unwrap();
    }

    /// Returns how many requests of this kind there were.
    fn count(&self, method: &str, path: &str) -> usize {
        let log = self.request("GET", "log", "").unwrap();
        let lines = log.lines();
        let found = lines.filter(|line| line.starts_with(method) && line.contains(path));
        found.count()
    }

    fn commits(&self) -> usize {
        self.count("POST", "/commit/")
    }

    /// Has a program use this Hub.
    fn with_home<'a>(&self, command: &'a mut Command, token: &str) -> &'a mut Command {
        command
            .env("HF_ENDPOINT", format!("http://127.0.0.1:{}", self.port))
            .env("HF_HOME", self.folder.path().join("home"))
            .env_remove("HF_TOKEN_PATH")
            .env("HF_TOKEN", token)
    }

    /// Starts `precast-remote` with a request.
    fn begin(&self, request: &Request, token: &str) -> Child {
        let mut program = asked::program();
        asked::begin(self.with_home(&mut program, token), &line(request))
    }

    fn ask(&self, request: &Request, token: &str) -> Vec<Event> {
        said(self.begin(request, token)).0
    }

    fn push(&self, store: &Store) -> Moved {
        moved(&self.ask(&pushing(store, REPO), "secret"))
    }

    /// Pulls a release into a new store, and checks every byte there.
    fn pull(&self, from: &str, which: Option<&str>) -> (TempDir, Store, Moved) {
        let (dir, store) = testing::store();
        let moved = moved(&self.ask(&pulling(from, which, store.path()), "secret"));
        assert_eq!(store.audit().verify().unwrap().defects, []);
        (dir, store, moved)
    }

    fn list(&self) -> Vec<Listed> {
        let request = Request::List {
            remote: REPO.to_owned(),
        };
        let events = self.ask(&request, "secret").into_iter();
        let listed = events.filter_map(|event| match event {
            Event::Listed(listed) => Some(listed),
            _ => None,
        });
        listed.collect()
    }

    /// Runs the Hub's own client.
    fn client(&self, command: &str, folder: &Path) {
        let python = std::env::var("PRECAST_HUB_PYTHON");
        let python = python.expect("PRECAST_HUB_PYTHON: `make test-remotes` names it");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hub_client.py");
        let mut client = Command::new(python);
        let client = self.with_home(&mut client, "secret");
        let client = client.args([script, command]).arg(folder).output().unwrap();
        let said = String::from_utf8_lossy(&client.stderr);
        assert!(client.status.success(), "{said}");
    }
}

/// Waits for something.
fn until(is_there: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_there() {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "it does not come"
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the error at the end.
fn error(events: &[Event]) -> (Kind, String) {
    match events.last() {
        Some(Event::Error {
            kind,
            message,
            hint,
            ..
        }) => (*kind, format!("{message}; {hint}")),
        _ => panic!("{events:?}"),
    }
}

/// A store with a release: a program over an artifact of this name, and 3 MB of weights.
fn source(name: &str) -> (TempDir, Store) {
    let (dir, store) = testing::store();
    let artifact = testing::put_artifact(&store, name);
    let program = testing::put_program(&store, "m", 1, &[artifact.id]);
    let mut release = testing::release("m", None, &[program.id]);
    let weights = testing::noise(3 << 20, name.len() as u64);
    release.weights = Some(store.objects().put_bytes(&weights).unwrap());
    store.releases().put(&release).unwrap();
    (dir, store)
}

#[test]
fn a_push_is_one_commit_and_the_release_comes_back() {
    let server = Server::start();
    server.set("page", 2);
    let (_from, from) = source("first");
    let pushed = server.push(&from);
    assert_eq!(
        (pushed.to, pushed.published, pushed.refuses_twice),
        (Some(1), true, Some(true))
    );
    assert_eq!(server.commits(), 1);
    let puts = server.count("PUT", "");
    assert!(puts >= 2);
    let (_to, to, pulled) = server.pull(REPO, None);
    assert_eq!((pulled.from, pulled.identity), (1, pushed.identity));
    let [listed] = &server.list()[..] else {
        panic!("not one release");
    };
    assert_eq!(listed.identity, pushed.identity);
    // Again, from either side: nothing moves.
    for store in [&from, &to] {
        let again = server.push(store);
        assert_eq!((again.to, again.published), (Some(1), false));
        assert_eq!(again.plan.moves, 0);
    }
    assert_eq!((server.commits(), server.count("PUT", "")), (1, puts));
    // A release that lost a file gets it back, by a commit without a release.
    let lost = to
        .releases()
        .listing(&to.releases().get("m", None).unwrap().unwrap());
    let lost = lost.unwrap().parts.first().unwrap().path();
    server.set("page", 1000);
    let mut server = server;
    forget(server.folder.path(), &lost);
    server.restart();
    let restored = server.push(&from);
    assert_eq!((restored.published, restored.plan.moves), (false, 1));
    assert_eq!((server.commits(), server.count("PUT", "")), (1, 0));
    server.pull(REPO, None);
}

/// Takes a file out of the repository. The Hub still has its bytes.
fn forget(folder: &Path, name: &str) {
    let refs = fs::read(folder.join("hub/refs.json")).unwrap();
    let refs: BTreeMap<String, String> = serde_json::from_slice(&refs).unwrap();
    let commit = folder.join("hub/commits").join(&refs["main"]);
    let text = fs::read(&commit).unwrap();
    let mut document: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let files = document["files"].as_object_mut().unwrap();
    assert!(files.remove(name).is_some(), "{name}");
    fs::write(&commit, document.to_string()).unwrap();
}

#[test]
fn a_hub_that_is_busy_cuts_and_moves_on_changes_nothing() {
    let server = Server::start();
    let (_from, from) = source("first");
    server.set("part", 1 << 20);
    server.set("limit", 300);
    server.set("busy", 3);
    server.set("moved", 2);
    server.set("lost", 1);
    let pushed = server.push(&from);
    assert_eq!((pushed.to, pushed.published), (Some(1), true));
    // Twice behind the head, once without an answer, and once more to see that it is there.
    assert_eq!(server.commits(), 4);
    assert!(server.count("PUT", "/part/") >= 3);
    assert_eq!(server.list().len(), 1);
    server.set("cut", 3);
    let (_to, _, pulled) = server.pull(REPO, None);
    assert_eq!(pulled.identity, pushed.identity);
}

#[test]
fn pushers_at_once_get_numbers_of_their_own() {
    let server = Server::start();
    let (_from, from) = source("first");
    server.push(&from);
    let sources = ["second", "another", "the fourth", "the number five"].map(source);
    let numbers: BTreeSet<u64> = thread::scope(|scope| {
        let pushers = sources.each_ref();
        let pushers = pushers.map(|(_, from)| scope.spawn(|| server.push(from).to.unwrap()));
        pushers.map(|one| one.join().unwrap()).into_iter().collect()
    });
    assert_eq!(numbers, (2..=5).collect(), "{numbers:?}");
    for seq in 1..=5 {
        server.pull(REPO, Some(&seq.to_string()));
    }
}

#[test]
fn another_record_of_one_key_stays_and_the_slower_push_says_so() {
    let server = Server::start();
    // Their programs have one key, and other bytes.
    let [(_a, a), (_b, b)] = ["block", "another"].map(source);
    server.set("wait", 1);
    let slow = server.begin(&pushing(&a, REPO), "secret");
    until(|| server.commits() > 0);
    let quick = server.push(&b);
    assert_eq!((quick.to, quick.identity), (Some(1), quick.identity_there));
    let (_, message) = error(&said(slow).0);
    assert!(
        message.contains("another push has created it meanwhile"),
        "{message}"
    );
    assert_eq!(server.list().len(), 1);
    // The next try takes that record, and says so.
    let again = server.push(&a);
    assert_eq!(again.to, Some(2));
    assert_ne!(again.identity, again.identity_there);
    for which in ["1", "2"] {
        server.pull(REPO, Some(which));
    }
}

#[test]
fn a_push_that_died_shows_nothing_and_the_next_one_sends_what_is_missing() {
    let mut server = Server::start();
    let (_from, from) = source("first");
    server.set("puts", 1);
    let mut push = server.begin(&pushing(&from, REPO), "secret");
    let blobs = server.folder.path().join("hub/blobs");
    let there = || fs::read_dir(&blobs).unwrap().count();
    let before = there();
    until(|| server.count("PUT", "") >= 2 && there() > before);
    server.restart();
    push.kill().unwrap();
    push.wait().unwrap();
    let (kind, message) = error(&server.ask(
        &Request::List {
            remote: REPO.to_owned(),
        },
        "secret",
    ));
    assert_eq!(kind, Kind::Missing, "{message}");
    let objects = {
        let release = from.releases().get("m", None).unwrap().unwrap();
        let parts = from.releases().listing(&release).unwrap().parts.into_iter();
        parts
            .filter(|part| part.path().starts_with("objects/"))
            .count()
    };
    assert_eq!(server.push(&from).to, Some(1));
    assert_eq!(server.count("PUT", ""), objects - 1);
    server.pull(REPO, None);
    // A server that goes away and comes back is waited for.
    let (_other, other) = source("another");
    server.set("puts", 0);
    let push = server.begin(&pushing(&other, REPO), "secret");
    until(|| server.count("PUT", "") >= objects);
    server.restart();
    assert!(moved(&said(push).0).published);
    assert_eq!(server.list().len(), 2);
}

#[test]
fn what_is_refused_says_what_to_do() {
    let server = Server::start();
    let (_from, from) = source("first");
    server.push(&from);
    let at = |place: &str| format!("{REPO}{place}");
    let push = |remote: &str, token: &str| error(&server.ask(&pushing(&from, remote), token));
    let (_to, to) = testing::store();
    let pull =
        |remote: &str, token: &str| error(&server.ask(&pulling(remote, None, to.path()), token));
    for ((kind, message), expected, words) in [
        (
            push(REPO, "not-so-secret"),
            Kind::Failed,
            "refuses the token",
        ),
        (pull(REPO, "not-so-secret"), Kind::Failed, "hf auth login"),
        (
            push("hf://org/other", "secret"),
            Kind::Missing,
            "hf repos create",
        ),
        (
            pull("hf://org/other", ""),
            Kind::Missing,
            "no repository `org/other`",
        ),
        (push(&at("@v1"), "secret"), Kind::Usage, "name a branch"),
        (push(&at("@v9"), "secret"), Kind::Usage, "name a branch"),
        (
            pull(&at("@v9"), "secret"),
            Kind::Missing,
            "no such revision",
        ),
        (
            pull(&at("@v1"), "secret"),
            Kind::Missing,
            "precast-store.json",
        ),
        (pull("hf://org", "secret"), Kind::Usage, "hf://OWNER/REPO"),
    ] {
        assert_eq!(kind, expected, "{message}");
        assert!(message.contains(words), "{message}");
        assert!(!message.contains("not-so-secret"), "{message}");
    }
    // A push without a token is refused when it first writes; a pull needs none.
    let (_other, other) = source("another");
    let (_, message) = error(&server.ask(&pushing(&other, REPO), ""));
    assert!(message.contains("there is no token"), "{message}");
    moved(&server.ask(&pulling(REPO, None, to.path()), ""));
    assert_eq!((server.commits(), server.list().len()), (1, 1));
    // A commit is a revision that stays.
    let refs = fs::read(server.folder.path().join("hub/refs.json")).unwrap();
    let refs: BTreeMap<String, String> = serde_json::from_slice(&refs).unwrap();
    let commit = &refs["main"];
    assert_eq!(server.push(&other).to, Some(2));
    assert_eq!(server.pull(&at(&format!("@{commit}")), None).2.from, 1);
    assert_eq!(server.pull(&at("@main"), None).2.from, 2);
    // The token is where `hf auth login` puts it.
    let home = server.folder.path().join("home");
    fs::create_dir_all(&home).unwrap();
    fs::write(home.join("token"), "secret\n").unwrap();
    let (_third, third) = source("the third");
    assert_eq!(moved(&server.ask(&pushing(&third, REPO), "")).to, Some(3));
}

#[test]
#[ignore = "needs the Hub's client: `make test-remotes`"]
fn the_hubs_own_client_works_with_this_server() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    server.client("check", folder.path());
}

/// Returns the files below a folder, without those that only one kind of remote has.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(one) = folders.pop() {
        for entry in fs::read_dir(one).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap();
            let name = name.to_string_lossy().into_owned();
            if path.is_dir() && name != ".cache" {
                folders.push(path);
            } else if path.is_file() && name != ".gitattributes" && name != "cache/releases.json" {
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    files
}

#[test]
#[ignore = "needs the Hub's client: `make test-remotes`"]
fn a_repository_has_the_files_of_a_folder_for_the_hubs_own_client() {
    let server = Server::start();
    let (_from, from) = source("first");
    let place = tempfile::tempdir().unwrap();
    let (folder, copy) = (place.path().join("folder"), place.path().join("copy"));
    let url = format!("file://{}", folder.display());
    moved(&server.ask(&pushing(&from, &url), ""));
    server.push(&from);
    server.client("download", &copy);
    assert!(files(&copy).len() > 5);
    assert_eq!(files(&copy), files(&folder));
    // A copy is a remote too.
    let (_to, to) = testing::store();
    fs::copy(
        folder.join("cache/releases.json"),
        copy.join("cache/releases.json"),
    )
    .unwrap();
    let url = format!("file://{}", copy.display());
    moved(&server.ask(&pulling(&url, None, to.path()), ""));
    // And a repository that the other client made of a folder, whose list of releases then follows.
    let server = Server::start();
    server.client("upload", &folder);
    assert_eq!(server.pull(REPO, None).2.from, 1);
    let (_other, other) = source("another");
    assert_eq!(server.push(&other).to, Some(2));
    fs::remove_dir_all(&copy).unwrap();
    server.client("download", &copy);
    let list = fs::read_to_string(copy.join("cache/releases.json")).unwrap();
    assert!(list.contains("[1,2]"), "{list}");
}
