//! Releases that move between stores, through carriers that fail, lie and race.

#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod answers;
mod faults;
mod hostile;
mod http;
mod keeping;
mod oci;
mod races;
#[path = "../tests/server/mod.rs"]
mod server;

use std::{
    io::{self, Read},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use object_store::{ObjectStore, memory::InMemory, path::Path};
use precast_store::{
    Digest, PartKind, Store,
    record::Release,
    testing::{self, put_artifact, put_program},
    transfer::Moved,
};
use tempfile::TempDir;

use crate::{
    RemoteError, Tell,
    carrier::{Body, Carrier, How, Source, small},
    oci::Oci,
    probe,
    remote::{Remote, Wanted},
    storage::Storage,
};

mod keyed;

static GO_ON: AtomicBool = AtomicBool::new(false);

fn tell() -> Tell<'static> {
    Tell {
        plan: &|_| {},
        moved: &|_| {},
        stop: &GO_ON,
    }
}

/// A store with a release of the model `m`: two programs over one artifact of its own, and weights.
fn source(build: &str) -> (TempDir, Store, Release) {
    let (dir, store) = testing::store();
    let artifact = put_artifact(&store, "block");
    let own = put_artifact(&store, build);
    let programs = [
        put_program(&store, "m", 1, &[artifact.id]).id,
        put_program(&store, "m", 2, &[artifact.id, own.id]).id,
    ];
    let mut release = testing::release("m", None, &programs);
    let weights = format!("weights of {build}").repeat(1000);
    release.weights = Some(store.objects().put_bytes(weights.as_bytes()).unwrap());
    let release = store.releases().put(&release).unwrap().0;
    (dir, store, release)
}

fn remote(carrier: impl Carrier + 'static) -> Remote {
    Remote {
        url: "test".to_owned(),
        carrier: Box::new(carrier),
    }
}

fn memory(store: &Arc<InMemory>) -> Storage {
    let store: Arc<dyn ObjectStore> = store.clone();
    Storage::new(store, Path::from("models"), true).unwrap()
}

fn push(remote: &Remote, store: &Store, release: &Release) -> Result<Moved, RemoteError> {
    remote.push_release(store, release, false, &tell())
}

fn pull(remote: &Remote, store: &Store, which: Option<&str>) -> Result<Moved, RemoteError> {
    let listing = remote.find("m", which, &Wanted::Any)?;
    remote.pull_release(store, &listing, false, &tell())
}

fn is_sound(store: &Store) {
    assert_eq!(store.audit().verify().unwrap().defects, []);
}

#[test]
fn a_release_goes_to_a_folder_and_comes_back_from_it_and_from_a_web_server() {
    let (_from, from, release) = source("a");
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/models", folder.path().display());
    assert!(matches!(Remote::open(&url), Err(RemoteError::Url { .. })));
    let there = Remote::open_to_write(&url).unwrap();
    let planned = there.push_release(&from, &release, true, &tell()).unwrap();
    assert!(planned.to.is_none() && there.numbers().unwrap().is_empty());
    let pushed = push(&there, &from, &release).unwrap();
    assert_eq!(
        (pushed.to, pushed.published, pushed.refuses_twice),
        (Some(1), true, Some(true))
    );
    assert_eq!(
        (pushed.plan.there, pushed.plan.moves),
        (0, planned.plan.moves)
    );
    // Again: nothing moves.
    let again = push(&there, &from, &release).unwrap();
    assert_eq!(
        (again.to, again.published, again.plan.moves),
        (Some(1), false, 0)
    );
    // Its files are those of the store: any copy of one can be unpacked and hashed.
    for part in from.releases().listing(&release).unwrap().parts {
        let [own, copied] = [from.path(), &folder.path().join("models")]
            .map(|root| std::fs::read(root.join(part.path())).unwrap());
        assert_eq!(own, copied, "{}", part.path());
    }
    let server = Server::of(folder.path());
    for url in [url, format!("{}/models", server.url)] {
        let there = Remote::open(&url).unwrap();
        let (_to, to) = testing::store();
        let pulled = pull(&there, &to, None).unwrap();
        assert_eq!(
            (pulled.from, pulled.to, pulled.published),
            (1, Some(1), true),
            "{url}"
        );
        assert_eq!(
            (pulled.identity, pulled.identity_there),
            (pushed.identity, pushed.identity)
        );
        assert_eq!(
            to.releases().get("m", None).unwrap().unwrap().weights,
            release.weights
        );
        is_sound(&to);
        let again = pull(&there, &to, Some("1")).unwrap();
        assert_eq!((again.published, again.plan.moves), (false, 0));
        assert!(matches!(
            push(&there, &to, &release),
            Ok(Moved {
                published: false,
                ..
            })
        ));
        let none = pull(&there, &to, Some("7")).unwrap_err();
        assert_eq!(
            none.to_string(),
            format!("`{url}` has no release `7` of `m`")
        );
    }
    let nothing = Remote::open(&format!("{}/elsewhere", server.url));
    assert!(matches!(nothing, Err(RemoteError::NotARemote { .. })));
    let (_other, other, release) = source("b");
    let refused = push(
        &Remote::open(&format!("{}/models", server.url)).unwrap(),
        &other,
        &release,
    );
    assert!(matches!(refused, Err(RemoteError::ReadOnly { .. })));
}

#[test]
fn a_name_with_other_letters_is_the_same_everywhere() {
    const MODEL: &str = "org/modèle 1";
    let (_from, from) = testing::store();
    let artifact = put_artifact(&from, "block");
    let program = put_program(&from, MODEL, 1, &[artifact.id]);
    let release = testing::release(MODEL, None, &[program.id]);
    let release = from.releases().put(&release).unwrap().0;
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    let server = Server::of(folder.path());
    push(&Remote::open_to_write(&url).unwrap(), &from, &release).unwrap();
    let path = precast_store::release_path(MODEL, 1).unwrap();
    assert!(folder.path().join(path).is_file());
    for url in [&url, &server.url, &format!("{}/", server.url)] {
        let there = Remote::open(url).unwrap();
        assert_eq!(there.numbers().unwrap().keys().collect::<Vec<_>>(), [MODEL]);
        let (_to, to) = testing::store();
        let listing = there.find(MODEL, None, &Wanted::Any).unwrap();
        there.pull_release(&to, &listing, false, &tell()).unwrap();
        is_sound(&to);
    }
    let again = push(&Remote::open_to_write(&url).unwrap(), &from, &release).unwrap();
    assert!(!again.published);
}

#[test]
fn a_rollback_of_the_remote_arrives_as_the_newest_release() {
    let store = Arc::new(InMemory::new());
    let there = remote(memory(&store));
    let (_from, from, first) = source("a");
    let mut second = first.clone();
    second.weights = Some(from.objects().put_bytes(b"others").unwrap());
    let (second, _) = from.releases().put(&second).unwrap();
    let (_to, to) = testing::store();
    for release in [&first, &second] {
        push(&there, &from, release).unwrap();
        pull(&there, &to, None).unwrap();
    }
    let (back, _) = from.releases().rollback("m", Some(1)).unwrap();
    assert_eq!(push(&there, &from, &back).unwrap().to, Some(3));
    let pulled = pull(&there, &to, None).unwrap();
    assert_eq!(
        (pulled.to, pulled.published, pulled.plan.moves),
        (Some(3), true, 0)
    );
    assert_eq!(
        to.releases().get("m", None).unwrap().unwrap().weights,
        first.weights
    );
    // A store that built it has it under its own number.
    assert_eq!(pull(&there, &from, None).unwrap().to, Some(3));
}

#[test]
fn what_was_lost_on_either_side_comes_back_with_the_next_transfer() {
    let store = Arc::new(InMemory::new());
    let (carrier, there) = (memory(&store), remote(memory(&store)));
    let (_from, from, release) = source("a");
    push(&there, &from, &release).unwrap();
    let (_to, to) = testing::store();
    pull(&there, &to, None).unwrap();
    let listing = from.releases().listing(&release).unwrap();
    let objects = listing
        .parts
        .iter()
        .filter(|part| part.kind == PartKind::Object);
    for part in objects {
        carrier.delete(&part.path()).unwrap();
        let (_new, new) = testing::store();
        let missing = pull(&there, &new, None).unwrap_err();
        assert_eq!(
            missing.to_string(),
            format!("`{}` of the remote is damaged: it is missing", part.path())
        );
        let pushed = push(&there, &from, &release).unwrap();
        assert_eq!((pushed.published, pushed.plan.moves), (false, 1));
        pull(&there, &new, None).unwrap();
        is_sound(&new);
        // In a store that has the record.
        std::fs::remove_file(to.path().join(part.path())).unwrap();
        pull(&there, &to, None).unwrap();
        is_sound(&to);
    }
}

#[test]
fn builders_of_one_key_push_two_releases_and_the_first_record_stays() {
    let store = Arc::new(InMemory::new());
    let there = remote(memory(&store));
    let (_a, a, first) = source("a");
    let (_b, b, second) = source("b");
    assert_eq!(push(&there, &a, &first).unwrap().to, Some(1));
    let pushed = push(&there, &b, &second).unwrap();
    assert_eq!((pushed.to, pushed.published), (Some(2), true));
    // `b` has its own weights; the programs have the same keys, and other bytes.
    assert_ne!(pushed.identity, pushed.identity_there);
    let (_to, to) = testing::store();
    for which in ["2", "1"] {
        pull(&there, &to, Some(which)).unwrap();
    }
    is_sound(&to);
    let got = to.releases().get("m", None).unwrap().unwrap();
    assert_eq!((got.seq, got.weights), (2, second.weights));
    // A build of a store stays, and a pull again changes nothing.
    let (_own, own, _) = source("c");
    let own_first = own.releases().get("m", None).unwrap().unwrap();
    assert_eq!(own_first.seq, 1);
    let pulled = pull(&there, &own, Some("2")).unwrap();
    assert!(pulled.published && pulled.identity != pulled.identity_there);
    assert!(!pull(&there, &own, Some("2")).unwrap().published);
    is_sound(&own);
    // The other builder has another release 1.
    let refused = pull(&there, &b, Some("1")).unwrap_err();
    assert_eq!(refused.to_string(), "`m` has another release 1 already");
    is_sound(&b);
}

#[test]
fn pushes_at_once_get_numbers_of_their_own() {
    const PUSHERS: usize = 6;
    let store = Arc::new(InMemory::new());
    let sources: Vec<_> = (0..PUSHERS)
        .map(|n| source(&format!("build {n}")))
        .collect();
    let numbers: Vec<u64> = std::thread::scope(|scope| {
        let pushers = sources.iter().map(|(_, from, release)| {
            let there = remote(memory(&store));
            scope.spawn(move || {
                // One that meets another's record in the making is told so, and tries again.
                let tries = (0..PUSHERS).map(|_| push(&there, from, release));
                tries.filter_map(Result::ok).next().unwrap().to.unwrap()
            })
        });
        let pushers: Vec<_> = pushers.collect();
        pushers.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let distinct: std::collections::BTreeSet<_> = numbers.iter().copied().collect();
    assert_eq!(distinct.len(), PUSHERS, "{numbers:?}");
    let there = remote(memory(&store));
    let (_to, to) = testing::store();
    for ((_, _, release), number) in sources.iter().zip(&numbers) {
        pull(&there, &to, Some(&number.to_string())).unwrap();
        let got = to.releases().at("m", *number).unwrap().unwrap();
        assert_eq!(got.weights, release.weights);
    }
    is_sound(&to);
}

/// What goes wrong with a call, by its number.
struct Faulty<C> {
    inner: C,
    /// The call that fails; none for one after the other with these odds.
    at: Option<u64>,
    calls: Arc<AtomicU64>,
    random: Mutex<u64>,
    odds: u64,
}

impl<C> Faulty<C> {
    fn draw(&self, below: u64) -> u64 {
        let mut random = self.random.lock().unwrap();
        *random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*random >> 33) % below
    }

    fn fails(&self) -> bool {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match self.at {
            Some(at) => call >= at,
            None => self.draw(self.odds) == 0,
        }
    }

    fn broken<T>(&self) -> Result<T, RemoteError> {
        Err(RemoteError::Storage {
            what: "reach",
            name: "anything".to_owned(),
            why: "the connection was cut".to_owned(),
        })
    }
}

impl<C: Carrier> Carrier for Faulty<C> {
    fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
        if self.fails() {
            return self.broken();
        }
        self.inner.head(name)
    }

    fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
        let fails = self.fails();
        let found = self.inner.get(name)?;
        let Some(body) = found.filter(|_| self.at.is_none() || !fails) else {
            return if fails { self.broken() } else { Ok(None) };
        };
        if !fails {
            return Ok(Some(body));
        }
        let mut bytes = Vec::new();
        let (size, mut read) = (body.bytes, body.read);
        read.read_to_end(&mut bytes).unwrap();
        let at = self.draw(bytes.len() as u64) as usize;
        let read: Box<dyn Read + Send> = match self.draw(4) {
            0 => return self.broken(),
            1 => Box::new(io::Cursor::new(bytes[..at].to_vec())),
            2 => {
                bytes[at] ^= 1 << self.draw(8);
                Box::new(io::Cursor::new(bytes))
            }
            _ => {
                let start = io::Cursor::new(bytes[..at].to_vec());
                Box::new(start.chain(Cut))
            }
        };
        Ok(Some(Body { bytes: size, read }))
    }

    fn create(
        &self,
        name: &str,
        from: &mut dyn Source,
        bytes: u64,
        how: How,
    ) -> Result<bool, RemoteError> {
        if !self.fails() {
            return self.inner.create(name, from, bytes, how);
        }
        if self.draw(2) == 0 {
            // It arrived, and the answer was lost.
            self.inner.create(name, from, bytes, how)?;
        }
        self.broken()
    }

    fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
        if self.fails() {
            return self.broken();
        }
        self.inner.list(folder)
    }

    fn delete(&self, name: &str) -> Result<(), RemoteError> {
        if self.fails() {
            return self.broken();
        }
        self.inner.delete(name)
    }
}

/// A connection that ends with an error.
struct Cut;

impl Read for Cut {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::new(io::ErrorKind::ConnectionReset, "cut"))
    }
}

fn faulty<C>(inner: C, at: Option<u64>, seed: u64) -> Faulty<C> {
    Faulty {
        inner,
        at,
        calls: Arc::default(),
        random: Mutex::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
        odds: 8,
    }
}

#[test]
fn a_push_that_ends_at_any_call_shows_nothing_and_the_next_one_completes_it() {
    let (_from, from, release) = source("a");
    let mut ended = false;
    for at in 0..200 {
        let store = Arc::new(InMemory::new());
        let first = push(
            &remote(faulty(memory(&store), Some(at), at)),
            &from,
            &release,
        );
        let there = remote(memory(&store));
        let numbers = there.numbers().unwrap();
        if numbers.is_empty() {
            assert!(first.is_err());
        } else {
            // What is visible is whole.
            let (_to, to) = testing::store();
            pull(&there, &to, None).unwrap();
            is_sound(&to);
        }
        push(&there, &from, &release).unwrap();
        let (_to, to) = testing::store();
        pull(&there, &to, None).unwrap();
        is_sound(&to);
        if first.is_ok() {
            ended = true;
            break;
        }
    }
    assert!(ended, "no push came to its end");
}

#[test]
fn faults_of_every_kind_leave_nothing_half_visible_and_nothing_wrong() {
    let (_from, from, release) = source("a");
    let store = Arc::new(InMemory::new());
    push(&remote(memory(&store)), &from, &release).unwrap();
    let (_to, to) = testing::store();
    let (mut failed, mut done) = (0, 0);
    for seed in 0..400 {
        let there = remote(faulty(memory(&store), None, seed));
        match pull(&there, &to, None) {
            Ok(_) => done += 1,
            Err(_) => failed += 1,
        }
        if done > 0 {
            is_sound(&to);
            assert_eq!(to.releases().get("m", None).unwrap().unwrap(), release);
        } else {
            assert!(to.releases().get("m", None).unwrap().is_none());
        }
    }
    assert!(failed > 20 && done > 20, "{failed} failed, {done} done");
}

#[test]
fn a_listing_can_not_ask_for_more_than_it_says_nor_for_files_elsewhere() {
    let (_from, from, release) = source("a");
    let store = Arc::new(InMemory::new());
    push(&remote(memory(&store)), &from, &release).unwrap();
    let carrier = memory(&store);
    // An object that goes on for ever.
    struct Endless<C>(C);
    impl<C: Carrier> Carrier for Endless<C> {
        fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
            self.0.head(name)
        }
        fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
            let body = self.0.get(name)?;
            Ok(body.map(|body| Body {
                bytes: u64::MAX,
                read: Box::new(body.read.chain(io::repeat(7))),
            }))
        }
        fn create(&self, _: &str, _: &mut dyn Source, _: u64, _: How) -> Result<bool, RemoteError> {
            Ok(false)
        }
        fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
            self.0.list(folder)
        }
        fn delete(&self, _: &str) -> Result<(), RemoteError> {
            Ok(())
        }
    }
    let name = "cache/listings/m/00000001.json";
    let good = small(&carrier, name, 1 << 20).unwrap().unwrap();
    let (_to, to) = testing::store();
    let listing = remote(memory(&store))
        .find("m", None, &Wanted::Any)
        .unwrap();
    let endless = remote(Endless(memory(&store))).pull_release(&to, &listing, false, &tell());
    assert!(
        matches!(endless, Err(RemoteError::Damaged { .. })),
        "{endless:?}"
    );
    // A listing names kinds and digests: a path has no place in it.
    let text = String::from_utf8(good.clone()).unwrap();
    for (from, into) in [
        ("\"kind\":\"object\"", "\"kind\":\"../../etc\""),
        ("\"bytes\":", "\"path\":\"/etc/passwd\",\"bytes\":"),
        ("\"model\":\"m\"", "\"model\":\"../m\""),
        ("\"schema\":1", "\"schema\":99"),
        ("\"bytes\":", "\"bytes\":18446744073709551615,\"was\":"),
    ] {
        let bad = text.replacen(from, into, 1);
        assert_ne!(bad, text, "{from}");
        carrier
            .create(name, &mut io::Cursor::new(&bad), bad.len() as u64, How::Any)
            .unwrap();
        assert!(pull(&remote(memory(&store)), &to, None).is_err(), "{into}");
    }
    assert!(to.releases().get("m", None).unwrap().is_none());
    is_sound(&to);
}

/// `benches/remote.py` computes dollars from these.
#[test]
fn requests_grow_with_the_files_of_a_release_alone() {
    let store = Arc::new(InMemory::new());
    let (_from, from, release) = source("a");
    let (_other, other, second) = source("b");
    let counted = || {
        let mut carrier = faulty(memory(&store), None, 1);
        carrier.odds = u64::MAX;
        (carrier.calls.clone(), remote(carrier))
    };
    push(&remote(memory(&store)), &from, &release).unwrap();
    let (calls, there) = counted();
    let pushed = push(&there, &other, &second).unwrap();
    let (files, new) = (
        pushed.plan.moves + pushed.plan.there,
        pushed.plan.moves as u64,
    );
    assert_eq!(calls.load(Ordering::Relaxed), files as u64 + new + 12);
    let (_to, to) = testing::store();
    let (calls, there) = counted();
    pull(&there, &to, None).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), files as u64 + 3);
}

#[test]
fn a_release_for_another_host_is_refused_before_anything_moves() {
    let (_from, from, release) = source("a");
    let store = Arc::new(InMemory::new());
    let there = remote(memory(&store));
    push(&there, &from, &release).unwrap();
    let own = testing::target();
    let mut other = own.clone();
    other.arch = "aarch64".into();
    let found = there.find("m", None, &Wanted::Hosts(vec![other.clone(), own.clone()]));
    assert_eq!(found.unwrap().release.seq, 1);
    let unfit = there
        .find("m", None, &Wanted::Hosts(vec![other]))
        .unwrap_err();
    let text = unfit.to_string();
    assert!(
        text.starts_with("no release of `m` fits this host: release 1 is for"),
        "{text}"
    );
    assert!(there.find("m", None, &Wanted::Target(own.name())).is_ok());
    let named = there.find("m", None, &Wanted::Target("mars".into()));
    assert!(matches!(named, Err(RemoteError::Unfit { .. })));
}

#[test]
fn a_storage_that_creates_a_file_twice_is_recognised() {
    /// Takes the last of racing creates, as a server without conditions, or right only one after another.
    struct Lax {
        inner: Storage,
        checks: bool,
    }
    impl Carrier for Lax {
        fn head(&self, name: &str) -> Result<Option<u64>, RemoteError> {
            self.inner.head(name)
        }
        fn get(&self, name: &str) -> Result<Option<Body>, RemoteError> {
            self.inner.get(name)
        }
        fn create(
            &self,
            name: &str,
            from: &mut dyn Source,
            bytes: u64,
            how: How,
        ) -> Result<bool, RemoteError> {
            if self.checks && how == How::New {
                if self.head(name)?.is_some() {
                    return Ok(false);
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            self.inner.create(name, from, bytes, How::Any)
        }
        fn list(&self, folder: &str) -> Result<Option<Vec<String>>, RemoteError> {
            self.inner.list(folder)
        }
        fn delete(&self, name: &str) -> Result<(), RemoteError> {
            self.inner.delete(name)
        }
    }
    let store = Arc::new(InMemory::new());
    assert!(probe::refuses_twice(&memory(&store)).unwrap());
    for checks in [false, true] {
        let inner = memory(&store);
        assert!(
            !probe::refuses_twice(&Lax { inner, checks }).unwrap(),
            "{checks}"
        );
    }
    assert_eq!(memory(&store).list("tmp").unwrap().unwrap(), [""; 0]);
}

#[test]
fn what_is_large_moves_in_parts() {
    let store = Arc::new(InMemory::new());
    let carrier = memory(&store);
    let bytes: Vec<u8> = (0..20u32 << 20)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let digest = Digest::of(&bytes);
    let size = bytes.len() as u64;
    assert!(
        carrier
            .create("large", &mut io::Cursor::new(&bytes), size, How::Any)
            .unwrap()
    );
    assert!(
        !carrier
            .create("large", &mut io::Cursor::new(&bytes), size, How::New)
            .unwrap()
    );
    let mut body = carrier.get("large").unwrap().unwrap();
    assert_eq!(body.bytes, size);
    assert_eq!(Digest::of_reader(&mut body.read).unwrap(), (digest, size));
    // A source that ends early leaves nothing.
    let short = carrier.create(
        "short",
        &mut io::Cursor::new(&bytes[..9 << 20]),
        size,
        How::Any,
    );
    assert!(short.is_err());
    assert_eq!(carrier.head("short").unwrap(), None);
}

/// A server in Python, which prints its port.
struct Server {
    child: Child,
    /// `127.0.0.1:PORT`.
    host: String,
    url: String,
}

impl Server {
    /// `python3 -m http.server`, which serves a folder as plain files.
    fn of(folder: &std::path::Path) -> Self {
        let code = "import functools, http.server, sys\n\
                    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])\n\
                    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)\n\
                    print(server.server_address[1], flush=True)\n\
                    server.serve_forever()";
        Self::start(code, folder)
    }

    fn start(code: &str, folder: &std::path::Path) -> Self {
        crate::use_ring();
        let mut child = Command::new("python3")
            .args(["-c", code])
            .arg(folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut port = String::new();
        let output = child.stdout.take().unwrap();
        io::BufRead::read_line(&mut io::BufReader::new(output), &mut port).unwrap();
        let host = format!("127.0.0.1:{}", port.trim());
        Self {
            child,
            url: format!("http://{host}"),
            host,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
