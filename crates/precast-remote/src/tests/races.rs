//! Pushers and pullers at once: each push has a number of its own, and a pull gets one of the releases, whole.
//!
//! A gc of the remote would be one more racer: [`round`] starts all of them.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use object_store::memory::InMemory;
use precast_store::{Digest, Store, record::Release, testing};
use tempfile::TempDir;

use super::{http::s3, is_sound, memory, pull, push, remote, server::Server, source};
use crate::remote::Remote;

const PULLERS: usize = 2;
/// A push that meets another's record in the making is told so, and tries again.
const TRIES: usize = 8;

/// What stores push in all rounds: builds of their own, of the same keys.
struct Pushed {
    sources: Vec<(TempDir, Store, Release)>,
    weights: BTreeSet<Option<Digest>>,
}

fn pushed(pushers: usize) -> Pushed {
    let sources: Vec<_> = (0..pushers)
        .map(|n| source(&format!("build {n}")))
        .collect();
    let weights = sources
        .iter()
        .map(|(_, _, release)| release.weights)
        .collect();
    Pushed { sources, weights }
}

/// Races all pushers and some pullers over one place, to which `open` opens a remote. Returns how many pulls came to
/// their end.
fn round(all: &Pushed, open: &(dyn Fn() -> Remote + Sync)) -> u64 {
    let start = Barrier::new(all.sources.len() + PULLERS);
    let (over, pulls) = (AtomicBool::new(false), AtomicU64::new(0));
    let pusher = |(_, from, release): &(TempDir, Store, Release)| {
        let there = open();
        start.wait();
        let tries = (0..TRIES).map(|_| push(&there, from, release));
        let moved = tries.filter_map(Result::ok).next();
        let moved = moved.expect("a push ends well at last");
        (moved.to.unwrap(), release.weights)
    };
    let puller = || {
        let (there, (_to, to)) = (open(), testing::store());
        start.wait();
        loop {
            let last = over.load(Ordering::Relaxed);
            match pull(&there, &to, None) {
                Ok(moved) => {
                    pulls.fetch_add(1, Ordering::Relaxed);
                    let got = to.releases().at("m", moved.to.unwrap()).unwrap().unwrap();
                    assert!(all.weights.contains(&got.weights));
                }
                // There may be nothing yet.
                Err(error) => assert!(!last, "{error}"),
            }
            if last {
                break;
            }
        }
        is_sound(&to);
    };
    let numbers: Vec<(u64, Option<Digest>)> = thread::scope(|scope| {
        let pushers: Vec<_> = all
            .sources
            .iter()
            .map(|one| scope.spawn(|| pusher(one)))
            .collect();
        let pullers: Vec<_> = (0..PULLERS).map(|_| scope.spawn(puller)).collect();
        let numbers: Vec<_> = pushers.into_iter().map(|one| one.join()).collect();
        over.store(true, Ordering::Relaxed);
        for puller in pullers {
            puller.join().unwrap();
        }
        numbers.into_iter().map(Result::unwrap).collect()
    });
    let distinct: BTreeSet<_> = numbers.iter().map(|(seq, _)| seq).collect();
    assert_eq!(distinct.len(), numbers.len(), "{numbers:?}");
    let there = open();
    let (_to, to) = testing::store();
    for (seq, weights) in &numbers {
        pull(&there, &to, Some(&seq.to_string())).unwrap();
        assert_eq!(
            to.releases().at("m", *seq).unwrap().unwrap().weights,
            *weights
        );
    }
    is_sound(&to);
    pulls.load(Ordering::Relaxed)
}

fn in_memory(all: &Pushed) -> u64 {
    let store = Arc::new(InMemory::new());
    round(all, &|| remote(memory(&store)))
}

fn in_a_folder(all: &Pushed) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", folder.path().display());
    round(all, &|| Remote::open_to_write(&url).unwrap())
}

#[test]
fn pushers_and_pullers_at_once_never_mix() {
    let all = pushed(3);
    let pulls: u64 = (0..4).map(|_| in_memory(&all) + in_a_folder(&all)).sum();
    assert!(pulls >= 8 * PULLERS as u64);
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn a_thousand_rounds_of_pushers_and_pullers_at_once() {
    let server = Server::weed();
    let all = pushed(3);
    let mut pulls = 0;
    for at in 0..1000u64 {
        pulls += match at % 5 {
            0 => round(&all, &|| {
                remote(s3(
                    server.port,
                    &format!("race-{at}"),
                    std::time::Duration::from_secs(60),
                    3,
                ))
            }),
            1 | 2 => in_memory(&all),
            _ => in_a_folder(&all),
        };
    }
    println!("1000 rounds, {pulls} pulls");
}
