//! Remotes whose content somebody else wrote.
//!
//! A pull from one is refused, or what it gets is what was pushed. Nothing panics, nothing is written outside the store, and
//! memory has a bound. Records are also changed together with their checksums and the listing, which makes another
//! release: it may arrive, whole, or be refused.

use std::{
    collections::BTreeMap,
    fs, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

use object_store::memory::InMemory;
use precast_store::{Digest, ListedPart, PartKind, Store, record::Release, testing};
use serde_json::{Value, json};

use super::{Faulty, faulty, is_sound, memory, pull, push, remote, source};
use crate::{
    carrier::{Carrier, How, small},
    remote::Remote,
    storage::Storage,
};

const LISTING: &str = "cache/listings/m/00000001.json";
const RELEASE: &str = "releases/m/00000001.json";
/// Bytes of memory that a process may have at most, whatever it reads.
const MEMORY: u64 = 2 << 30;

/// A good remote, changed for a while.
struct Hostile {
    carrier: Storage,
    remote: Remote,
    good: BTreeMap<String, Vec<u8>>,
    release: Release,
    identity: Digest,
    bomb: Vec<u8>,
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Refused,
    /// The pull did not read it, or it has no effect.
    Same,
    /// Another release, which is whole.
    Other,
}

fn hostile() -> Hostile {
    let (_from, from, release) = source("a");
    let store = Arc::new(InMemory::new());
    push(&remote(memory(&store)), &from, &release).unwrap();
    let carrier = memory(&store);
    let names = carrier.list("").unwrap().unwrap();
    let read = |name: String| {
        let text = small(&carrier, &name, 1 << 20).unwrap().unwrap();
        (name, text)
    };
    let good = names.into_iter().map(read).collect();
    // A file of some kilobytes with a gigabyte of zeros in it.
    let (_dir, zeros) = testing::store();
    let write = &mut |file: &mut fs::File| file.set_len(1 << 30);
    let (digest, _) = (zeros.objects())
        .put_unpacked(std::path::Path::new("zeros"), write)
        .unwrap();
    let bomb = zeros
        .path()
        .join(ListedPart::of(PartKind::Object, digest).path());
    Hostile {
        remote: remote(memory(&store)),
        carrier,
        good,
        identity: from.releases().listing(&release).unwrap().identity(),
        release,
        bomb: fs::read(bomb).unwrap(),
    }
}

type Random = Faulty<()>;

fn pick<'a, T>(random: &Random, all: &'a [T]) -> &'a T {
    &all[random.draw(all.len() as u64) as usize]
}

/// Changes some bytes.
fn bytes(random: &Random, text: &mut Vec<u8>) {
    let at = random.draw(text.len().max(1) as u64) as usize;
    match random.draw(4) {
        0 => text[at] ^= 1 << random.draw(8),
        1 => text.truncate(at),
        2 => text.extend_from_within(at..),
        _ => {
            let digits: Vec<usize> = (0..text.len())
                .filter(|at| text[*at].is_ascii_digit())
                .collect();
            if let Some(at) = digits.get(at % digits.len().max(1)) {
                text[*at] = b'9' - (text[*at] - b'0');
            }
        }
    }
}

/// Returns a value that nobody expects: of any type, or of the type that it was.
fn strange(random: &Random, was: &Value) -> Value {
    const DEEP: usize = 200;
    const TEXTS: [&str; 10] = [
        "../../../../etc/passwd",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/../b",
        "a\0b",
        "%2e%2e%2f",
        "\u{1b}[2J",
        "0000000000000000000000000000000000000000000000000000000000000000",
    ];
    const NUMBERS: [u64; 7] = [
        0,
        1,
        2,
        1 << 31,
        u32::MAX as u64,
        10_000_000_000_000,
        u64::MAX,
    ];
    let kind = match was {
        Value::Number(_) if random.draw(2) == 0 => 0,
        Value::String(_) if random.draw(2) == 0 => 3,
        Value::Array(all) if random.draw(2) == 0 && !all.is_empty() => 8,
        _ => random.draw(11),
    };
    match kind {
        0 => json!(pick(random, &NUMBERS)),
        1 => json!(i64::MIN),
        2 => json!(1e300),
        3 => json!(pick(random, &TEXTS)),
        4 => json!("x".repeat(100_000)),
        5 => (0..DEEP).fold(was.clone(), |inner, _| json!([inner])),
        6 => (0..DEEP).fold(was.clone(), |inner, _| json!({"a": inner})),
        // A few megabytes at most, so that the memory is what the pull takes.
        7 => {
            let most = (4 << 20) / was.to_string().len() as u64;
            json!(vec![
                was.clone();
                1 + random.draw(most.clamp(1, 2000)) as usize
            ])
        }
        8 => match was.as_array().filter(|all| !all.is_empty()) {
            Some(all) if random.draw(2) == 0 => json!(all[1..]),
            Some(all) => json!([&all[..], &all[..1]].concat()),
            None => json!([]),
        },
        9 => json!({}),
        _ => Value::Null,
    }
}

/// Replaces a random value somewhere in a document.
fn value(random: &Random, at: &mut Value) {
    let deeper = random.draw(5) > 0;
    match at {
        Value::Object(fields) if deeper && !fields.is_empty() => {
            let which = random.draw(fields.len() as u64) as usize;
            if let Some(inner) = fields.values_mut().nth(which) {
                value(random, inner);
            }
        }
        Value::Array(all) if deeper && !all.is_empty() => {
            let which = random.draw(all.len() as u64) as usize;
            value(random, &mut all[which]);
        }
        _ => *at = strange(random, at),
    }
}

/// Returns the document in a file: its first line.
fn document(text: &[u8]) -> Value {
    let line = text.split(|byte| *byte == b'\n').next().unwrap();
    serde_json::from_slice(line).unwrap()
}

/// Returns a record's file with its checksum, and that checksum.
fn signed(record: &Value) -> (Vec<u8>, Digest) {
    let mut text = serde_json::to_vec(record).unwrap();
    text.push(b'\n');
    let digest = Digest::of(&text);
    text.extend(format!("{{\"sha256\":\"{digest}\"}}\n").into_bytes());
    (text, digest)
}

impl Hostile {
    /// Returns changed files, and whether they make another release, which may arrive.
    fn change(&self, random: &Random) -> (Vec<(String, Vec<u8>)>, bool) {
        let names: Vec<&String> = self.good.keys().collect();
        let mut name = (*pick(random, &names)).clone();
        if random.draw(3) == 0 {
            name = LISTING.to_owned();
        }
        let good = &self.good[&name];
        let is_record = ["artifacts/", "programs/", "releases/"]
            .iter()
            .any(|folder| name.starts_with(folder));
        let mut text = good.clone();
        match random.draw(8) {
            // Another file of the remote in its place: a pointer to itself, for one.
            0 => text.clone_from(&self.good[*pick(random, &names)]),
            1 if name.starts_with("objects/") => text.clone_from(&self.bomb),
            1 => {
                let most = 1 << random.draw(18);
                text = pick(random, &["[", "{\"a\":", "\0", "PK\u{3}\u{4}", "9"])
                    .repeat(most)
                    .into_bytes();
            }
            2..=4 if !name.starts_with("objects/") => {
                let mut changed = document(good);
                value(random, &mut changed);
                text = serde_json::to_vec(&changed).unwrap();
                text.push(b'\n');
                if is_record {
                    text = signed(&changed).0;
                }
            }
            5 | 6 if is_record => return (self.consistent(random, &name), true),
            _ => bytes(random, &mut text),
        }
        (vec![(name, text)], false)
    }

    /// Changes a record with its checksum, and the listing with it.
    fn consistent(&self, random: &Random, name: &str) -> Vec<(String, Vec<u8>)> {
        let mut record = document(&self.good[name]);
        match random.draw(4) {
            // Other parts in the place of its own: itself, for one.
            0 => {
                let listing = document(&self.good[LISTING]);
                let ids: Vec<String> = (listing["parts"].as_array().unwrap().iter())
                    .map(|part| part["id"].as_str().unwrap().to_owned())
                    .collect();
                let text = record.to_string();
                let (from, into): (&String, &String) = (pick(random, &ids), pick(random, &ids));
                let text = text.replace(from.as_str(), into);
                record = serde_json::from_str(&text).unwrap();
            }
            more => (0..more).for_each(|_| value(random, &mut record)),
        }
        let (text, digest) = signed(&record);
        let mut listing = document(&self.good[LISTING]);
        if name == RELEASE {
            listing["release"] = record;
        } else {
            for part in listing["parts"].as_array_mut().unwrap() {
                let id = part["id"].as_str().unwrap().to_owned();
                if name.contains(&id) {
                    part["digest"] = json!(digest);
                    part["bytes"] = json!(text.len());
                }
            }
        }
        let listing = [serde_json::to_vec(&listing).unwrap(), b"\n".to_vec()].concat();
        vec![(name.to_owned(), text), (LISTING.to_owned(), listing)]
    }

    fn write(&self, name: &str, text: &[u8]) {
        let size = text.len() as u64;
        self.carrier
            .create(name, &mut io::Cursor::new(&text), size, How::Any)
            .unwrap();
    }

    /// Pulls from a remote with these files in place of its own.
    fn attempt(&self, files: &[(String, Vec<u8>)], is_other: bool, to: &Store) -> End {
        for (name, text) in files {
            self.write(name, text);
        }
        let pulled = catch_unwind(AssertUnwindSafe(|| pull(&self.remote, to, Some("1"))));
        // The lists of all releases, too.
        let _ = self.remote.kept();
        for (name, _) in files {
            self.write(name, &self.good[name]);
        }
        let what = || -> Vec<_> {
            let start =
                |text: &[u8]| String::from_utf8_lossy(&text[..text.len().min(3000)]).into_owned();
            files
                .iter()
                .map(|(name, text)| (name, start(text)))
                .collect()
        };
        let Ok(pulled) = pulled else {
            panic!("it panics: {:?}", what());
        };
        match pulled {
            Err(error) => {
                let text = error.to_string();
                assert!(!text.is_empty() && text.len() < 5000, "{:?}", what());
                assert!(!text.contains(char::is_control), "{text:?}");
                assert!(
                    to.releases().get("m", None).unwrap().is_none(),
                    "{:?}",
                    what()
                );
                End::Refused
            }
            Ok(_) => {
                let got = to.releases().at("m", 1).unwrap().unwrap();
                let identity = to.releases().listing(&got).unwrap().identity();
                if got == self.release && identity == self.identity {
                    End::Same
                } else {
                    assert!(is_other, "another release was taken: {:?}", what());
                    End::Other
                }
            }
        }
    }

    /// Tries many changes. Returns how they ended.
    fn attempts(&self, count: u64, seed: u64) -> BTreeMap<End, u64> {
        let mut random = faulty((), None, seed);
        random.odds = 2;
        let mut ends = BTreeMap::new();
        let (mut dir, mut to) = testing::store();
        let is_clean = |to: &Store| {
            let objects = fs::read_dir(to.path().join("objects")).unwrap();
            objects.count() == 0 && fs::read_dir(to.path().join("artifacts")).unwrap().count() == 0
        };
        for _ in 0..count {
            let (files, is_other) = self.change(&random);
            let end = self.attempt(&files, is_other, &to);
            *ends.entry(end).or_insert(0) += 1;
            // A new store, unless the pull was refused before anything moved.
            if end != End::Refused || !is_clean(&to) {
                is_sound(&to);
                let here = fs::read_dir(dir.path()).unwrap().count();
                assert_eq!(here, 1, "something was written beside the store");
                (dir, to) = testing::store();
            }
        }
        ends
    }
}

/// Returns the most memory that this process has had.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM"))
        .unwrap();
    let kilobytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes << 10
}

fn mutations(count: u64, threads: u64) {
    let found: Vec<BTreeMap<End, u64>> = thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|seed| scope.spawn(move || hostile().attempts(count / threads, seed)))
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let sum = |end| found.iter().filter_map(|ends| ends.get(&end)).sum::<u64>();
    let [refused, same, other] = [End::Refused, End::Same, End::Other].map(sum);
    let peak = peak();
    println!(
        "{count} changes: {refused} refused, {same} without effect, {other} other releases; {} MiB",
        peak >> 20
    );
    assert!(refused > count / 2);
    assert!(peak < MEMORY, "{peak}");
}

#[test]
fn hostile_content_is_refused_or_changes_nothing() {
    mutations(600, 1);
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn a_hundred_thousand_changes_of_a_remote() {
    mutations(100_000, 2);
}

/// A listing with a million entries, and a list of a million releases.
#[test]
#[ignore = "long: `make test-remotes`"]
fn a_million_entries_take_bounded_memory() {
    let good = hostile();
    let listing = String::from_utf8(good.good[LISTING].clone()).unwrap();
    let (start, end) = listing.split_once("\"parts\":[").unwrap();
    let mut listing = format!("{start}\"parts\":[");
    for at in 0..1_000_000u32 {
        let (id, most) = (Digest::of(&at.to_le_bytes()), u64::MAX);
        let part = format!(r#"{{"kind":"object","id":"{id}","digest":"{id}","bytes":{most}}},"#);
        listing.push_str(&part);
    }
    let listing = (listing + end).into_bytes();
    let (_to, to) = testing::store();
    good.attempt(&[(LISTING.to_owned(), listing)], false, &to);
    is_sound(&to);
    let numbers: Vec<u64> = (1..1_000_000).collect();
    let numbers = json!({"schema": 1, "models": {"m": numbers}});
    good.write(
        "cache/releases.json",
        &serde_json::to_vec(&numbers).unwrap(),
    );
    assert_eq!(good.remote.kept().unwrap()["m"].len(), 999_999);
    println!("a million entries: {} MiB", peak() >> 20);
    assert!(peak() < MEMORY, "{}", peak());
}
