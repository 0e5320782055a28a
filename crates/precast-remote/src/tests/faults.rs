//! A proxy that breaks what passes through it, between a remote and a server of S3.
//!
//! After each transfer through it: every release that is visible is whole, none is gone, and the transfer has ended in
//! time or said why not. Then a transfer without faults completes, and moves only what is missing.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use precast_store::{Store, record::Release, testing};
use tempfile::TempDir;

use super::{
    Faulty, faulty,
    http::{Asked, Http, s3, send},
    is_sound, memory, pull, push, remote,
    server::Server,
    source,
};
use crate::{RemoteError, remote::Remote};

/// What goes wrong.
const FAULTS: [&str; 13] = [
    "the request is cut",
    "the answer is lost",
    "the answer is cut",
    "the answer is slow",
    "no answer comes",
    "500",
    "503 with Retry-After",
    "a bit is flipped",
    "the answer is short",
    "a list has another order, or less",
    "403 ExpiredToken",
    "409",
    "404",
];
/// How long a transfer may take: far more than any needs, with all of its tries.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the client waits for a byte.
const SILENCE: Duration = Duration::from_millis(200);

/// How often each fault came.
type Counts = [AtomicU64; FAULTS.len()];

struct Proxy {
    upstream: u16,
    random: Faulty<()>,
    counts: Arc<Counts>,
}

impl Proxy {
    /// Starts a proxy that breaks one of `odds` requests.
    fn start(upstream: u16, seed: u64, odds: u64, counts: &Arc<Counts>) -> Http {
        let mut random = faulty((), None, seed);
        random.odds = odds;
        let proxy = Self {
            upstream,
            random,
            counts: counts.clone(),
        };
        Http::start(move |asked, stream| proxy.answer(&asked, stream))
    }

    fn answer(&self, asked: &Asked, stream: &mut TcpStream) {
        if !self.random.fails() {
            let (head, body) = self.forward(asked, asked.body.len());
            return pass(stream, &head, &body);
        }
        let at = |bytes: &[u8]| self.random.draw(bytes.len().max(1) as u64) as usize;
        let is_list = asked.target.contains("list-type=2");
        let is_get = asked.method == "GET";
        let fault = match self.random.draw(FAULTS.len() as u64) as usize {
            // What needs an answer with a body.
            2 | 7 | 8 if !is_get => 5,
            // It takes long: less often.
            4 if self.random.draw(4) > 0 => 3,
            9 if !is_list => 12,
            any => any,
        };
        self.counts[fault].fetch_add(1, Ordering::Relaxed);
        match fault {
            0 => {
                self.forward(asked, at(&asked.body));
            }
            1 => {
                self.forward(asked, asked.body.len());
            }
            2 => {
                let (head, body) = self.forward(asked, asked.body.len());
                let whole = format!("Content-Length: {}\r\n", body.len());
                let head = format!("{}{whole}Connection: close\r\n\r\n", lines(&head));
                let _ = stream.write_all(head.as_bytes());
                let _ = stream.write_all(&body[..at(&body)]);
            }
            3 => {
                let (head, body) = self.forward(asked, asked.body.len());
                thread::sleep(Duration::from_millis(self.random.draw(30)));
                pass(stream, &head, &body);
            }
            4 => thread::sleep(SILENCE * 2),
            5 => send(
                stream,
                "500 Internal Server Error",
                "",
                &xml("InternalError"),
            ),
            6 => send(
                stream,
                "503 Slow Down",
                "Retry-After: 1\r\n",
                &xml("SlowDown"),
            ),
            7 => {
                let (head, mut body) = self.forward(asked, 0);
                let at = at(&body);
                if let Some(byte) = body.get_mut(at) {
                    *byte ^= 1 << self.random.draw(8);
                }
                pass(stream, &head, &body);
            }
            8 => {
                let (head, body) = self.forward(asked, 0);
                pass(stream, &head, &body[..at(&body)]);
            }
            9 => {
                let (head, body) = self.forward(asked, 0);
                pass(stream, &head, &self.shuffled(&body));
            }
            10 => send(stream, "403 Forbidden", "", &xml("ExpiredToken")),
            11 => send(
                stream,
                "409 Conflict",
                "",
                &xml("ConditionalRequestConflict"),
            ),
            _ => send(stream, "404 Not Found", "", &xml("NoSuchKey")),
        }
    }

    /// Sends a request on, with the first `most` bytes of its body. Returns what comes back: head and body.
    fn forward(&self, asked: &Asked, most: usize) -> (String, Vec<u8>) {
        // Of HTTP/1.0: the answer ends with the connection.
        let head = asked.head.replacen(" HTTP/1.1\r\n", " HTTP/1.0\r\n", 1);
        let mut answer = Vec::new();
        if let Ok(mut to) = TcpStream::connect(("127.0.0.1", self.upstream)) {
            let _ = to.write_all(head.as_bytes());
            let _ = to.write_all(&asked.body[..most]);
            if most < asked.body.len() {
                return Default::default();
            }
            let _ = to.read_to_end(&mut answer);
        }
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
        let body = answer.split_off(end.map_or(answer.len(), |end| end + 4));
        (String::from_utf8_lossy(&answer).into_owned(), body)
    }

    /// Returns a list of S3 with its files in another order, or without some of them.
    fn shuffled(&self, body: &[u8]) -> Vec<u8> {
        let text = String::from_utf8_lossy(body).into_owned();
        let (Some(start), Some(end)) = (text.find("<Contents>"), text.rfind("</Contents>")) else {
            return body.to_vec();
        };
        let files = &text[start..end + "</Contents>".len()];
        let mut files: Vec<&str> = files.split_inclusive("</Contents>").collect();
        if self.random.draw(2) == 0 {
            files.reverse();
        } else {
            files.truncate(self.random.draw(files.len() as u64) as usize);
        }
        let rest = &text[end + "</Contents>".len()..];
        format!("{}{}{rest}", &text[..start], files.concat()).into_bytes()
    }
}

fn xml(code: &str) -> Vec<u8> {
    format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{code}</Message></Error>")
        .into_bytes()
}

/// Returns status and headers without those of the connection.
fn lines(head: &str) -> String {
    let kept = head.lines().filter(|line| {
        let name = line.split(':').next().unwrap_or_default().to_lowercase();
        !["", "content-length", "connection", "transfer-encoding"].contains(&&*name)
    });
    let kept: Vec<_> = kept.map(|line| format!("{line}\r\n")).collect();
    kept.concat().replacen("HTTP/1.0", "HTTP/1.1", 1)
}

/// Sends an answer of the server on.
fn pass(stream: &mut TcpStream, head: &str, body: &[u8]) {
    // That of a HEAD names the size of what it leaves out.
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-length").then_some(value)
    });
    let length = match length {
        Some(length) if body.is_empty() => length.to_owned(),
        _ => body.len().to_string(),
    };
    let head = format!(
        "{}Content-Length: {length}\r\nConnection: close\r\n\r\n",
        lines(head)
    );
    let _ = stream.write_all(head.as_bytes());
    let _ = stream.write_all(body);
}

/// Stores with a release each: two builds of the same keys, and one with weights that are sent in parts.
fn sources() -> Vec<(TempDir, Store, Release)> {
    let (dir, store, mut large) = source("large");
    let weights = testing::noise(9 << 20, 1);
    large.weights = Some(store.objects().put_bytes(&weights).unwrap());
    let large = store.releases().put(&large).unwrap().0;
    vec![source("a"), source("b"), (dir, store, large)]
}

/// A remote behind faults, and what is known of it.
struct Trial<'a> {
    /// The remote without faults.
    quiet: &'a Remote,
    /// Releases that were visible.
    seen: BTreeMap<u64, precast_store::Digest>,
}

impl Trial<'_> {
    fn names(&self) -> BTreeSet<String> {
        self.quiet
            .carrier
            .list("")
            .unwrap()
            .unwrap()
            .into_iter()
            .collect()
    }

    /// Nothing is half visible, and nothing is lost.
    fn check(&mut self) {
        let numbers = self
            .quiet
            .numbers()
            .unwrap()
            .remove("m")
            .unwrap_or_default();
        let names = self.names();
        for seq in &numbers {
            let listing = self.quiet.listing("m", *seq).unwrap().unwrap();
            for part in &listing.parts {
                assert!(
                    names.contains(&part.path()),
                    "release {seq} lacks {}",
                    part.path()
                );
            }
            let identity = listing.identity();
            assert_eq!(*self.seen.entry(*seq).or_insert(identity), identity);
        }
        assert!(
            self.seen.keys().all(|seq| numbers.contains(seq)),
            "{:?} {numbers:?}",
            self.seen
        );
    }
}

/// Ends in time, or says why.
fn ended<T>(transfer: impl FnOnce() -> Result<T, RemoteError>) -> bool {
    let begun = Instant::now();
    let result = transfer();
    assert!(begun.elapsed() < LIMIT, "it took {:?}", begun.elapsed());
    if let Err(error) = &result {
        assert!(!error.to_string().is_empty() && !error.hint().is_empty());
    }
    result.is_ok()
}

/// Pushes and pulls each source through `noisy`, a few times. Returns how many transfers ended well, and how many did not.
fn trial(sources: &[&(TempDir, Store, Release)], quiet: &Remote, noisy: &Remote) -> [u64; 2] {
    let mut ends = [0; 2];
    let mut trial = Trial {
        quiet,
        seen: BTreeMap::new(),
    };
    let (_to, to) = testing::store();
    for (_, from, release) in sources {
        for _ in 0..3 {
            let good = ended(|| push(noisy, from, release));
            ends[usize::from(!good)] += 1;
            trial.check();
        }
        let before = trial.names();
        let done = push(quiet, from, release).unwrap();
        trial.check();
        let after = trial.names();
        let new = after.difference(&before).filter(|name| {
            name.starts_with("objects/")
                || name.starts_with("artifacts/")
                || name.starts_with("programs/")
        });
        assert_eq!(done.plan.moves, new.count(), "only what is missing moves");
        for _ in 0..3 {
            let good = ended(|| pull(noisy, &to, None));
            ends[usize::from(!good)] += 1;
        }
        is_sound(&to);
        let here: u64 = files(&to, "objects") + files(&to, "artifacts") + files(&to, "programs");
        let done = pull(quiet, &to, None).unwrap();
        let now: u64 = files(&to, "objects") + files(&to, "artifacts") + files(&to, "programs");
        assert_eq!(
            done.plan.moves as u64,
            now - here,
            "only what is missing moves"
        );
    }
    is_sound(&to);
    // The list for storage without lists is that of the storage.
    assert_eq!(quiet.kept().unwrap(), quiet.numbers().unwrap());
    let (_whole, whole) = testing::store();
    for (seq, identity) in &trial.seen {
        pull(quiet, &whole, Some(&seq.to_string())).unwrap();
        assert_eq!(
            quiet.listing("m", *seq).unwrap().unwrap().identity(),
            *identity
        );
    }
    is_sound(&whole);
    ends
}

/// Returns the number of files in a folder of a store.
fn files(store: &Store, folder: &str) -> u64 {
    let shards = std::fs::read_dir(store.path().join(folder)).unwrap();
    let counts = shards.map(|shard| std::fs::read_dir(shard.unwrap().path()).unwrap().count());
    counts.sum::<usize>() as u64
}

#[test]
fn faults_at_random_calls_of_pushes_and_pulls_leave_nothing_half_visible() {
    let sources = [source("a"), source("b")];
    let mut ends = [0; 2];
    for seed in 0..12 {
        let store = Arc::new(object_store::memory::InMemory::new());
        let mut carrier = faulty(memory(&store), None, seed);
        carrier.odds = 20;
        let found = trial(
            &sources.each_ref(),
            &remote(memory(&store)),
            &remote(carrier),
        );
        ends = [ends[0] + found[0], ends[1] + found[1]];
    }
    assert!(ends[0] > 20 && ends[1] > 20, "{ends:?}");
}

/// Between a client and a server of S3 that runs: several trials at a time, for they wait.
fn through_a_proxy(server: &Server, all: u64) {
    const WIDTH: usize = 4;
    let counts: Arc<Counts> = Arc::new(Default::default());
    let sum = || -> u64 {
        counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    };
    let sources = sources();
    let (seeds, ends) = (AtomicU64::new(1), [AtomicU64::new(0), AtomicU64::new(0)]);
    let trials = || {
        while sum() < all {
            let seed = seeds.fetch_add(1, Ordering::Relaxed);
            let at = format!("trial-{seed}");
            let proxy = Proxy::start(server.port, seed, 3 + seed % 8, &counts);
            let quiet = remote(s3(server.port, &at, LIMIT, 3));
            let noisy = remote(s3(proxy.port, &at, SILENCE, 2));
            // The large one now and then.
            let some = if seed % 8 == 0 { 3 } else { 2 };
            let some: Vec<_> = sources.iter().take(some).collect();
            let found = trial(&some, &quiet, &noisy);
            for (count, found) in ends.iter().zip(found) {
                count.fetch_add(found, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..WIDTH {
            scope.spawn(trials);
        }
    });
    let [good, bad] = ends.map(AtomicU64::into_inner);
    println!("{good} transfers ended well, {bad} with an error");
    for (name, count) in FAULTS.iter().zip(counts.iter()) {
        let count = count.load(Ordering::Relaxed);
        println!("{count:6} {name}");
        assert!(count > 0, "{name}");
    }
    assert!(good > 0 && bad > 0);
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn ten_thousand_faults_before_seaweedfs() {
    through_a_proxy(&Server::weed(), 10_000);
}
