//! Pushes and pulls that are killed at any moment: what is visible is whole, and the next one completes.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod asked;

use std::{
    path::Path,
    process::Child,
    thread,
    time::{Duration, Instant},
};

use asked::{moved, push, said};
use precast_store::{
    Needs, Store, testing,
    transfer::{Event, Kind, Request},
};
use tempfile::TempDir;

fn start(request: &Request) -> Child {
    asked::begin(&mut asked::program(), &asked::line(request))
}

/// Runs a request to its end. Returns what it says, and how long it took.
fn done(request: &Request) -> (Vec<Event>, Duration) {
    let begun = Instant::now();
    let (events, good) = said(start(request));
    assert!(good, "{events:?}");
    (events, begun.elapsed())
}

/// Kills a request after a while. Returns whether it was still at work.
fn killed(request: &Request, after: Duration) -> bool {
    let mut child = start(request);
    thread::sleep(after);
    child.kill().unwrap();
    !child.wait().unwrap().success()
}

fn pull(remote: &str, to: &Path) -> Request {
    asked::pull(remote, None, to)
}

/// A store with a release of a dozen files, one of them of some megabytes.
fn source() -> (TempDir, Store) {
    let (dir, store) = testing::store();
    let programs: Vec<_> = (0..5)
        .map(|n| {
            let artifact = testing::put_artifact(&store, &format!("block {n}"));
            testing::put_program(&store, "m", n, &[artifact.id]).id
        })
        .collect();
    let mut release = testing::release("m", None, &programs);
    let weights = testing::noise(3 << 20, 1);
    release.weights = Some(store.objects().put_bytes(&weights).unwrap());
    store.releases().put(&release).unwrap();
    (dir, store)
}

/// Nothing is wrong with a store but leftovers of a process that died.
fn is_sound(store: &Path) {
    let store = Store::open(store).unwrap();
    let defects = store.audit().verify().unwrap().defects;
    let bad: Vec<_> = defects
        .iter()
        .filter(|one| one.needs() != Needs::Sweep)
        .collect();
    assert!(bad.is_empty(), "{bad:?}");
}

/// Returns how many of the processes were still at work.
fn kills(rounds: u32) -> u32 {
    let (dir, from) = source();
    let all = from
        .releases()
        .listing(&from.releases().get("m", None).unwrap().unwrap());
    let all = all.unwrap().parts.len();
    let place = |name: &str| format!("file://{}/{name}", dir.path().display());
    let took = |request: &Request| done(request).1;
    let push_takes = took(&push(&from, &place("first")));
    let pull_takes = took(&pull(&place("first"), &dir.path().join("copy")));
    let mut killed_at_work = 0;
    for round in 0..rounds {
        let remote = place(&format!("remote-{round}"));
        // Evenly over the whole of it, in no order.
        let part = f64::from(round * 7919 % rounds) / f64::from(rounds);
        killed_at_work += u32::from(killed(&push(&from, &remote), push_takes.mul_f64(part)));
        // What is visible is whole.
        let whole = dir.path().join("whole");
        let (events, good) = said(start(&pull(&remote, &whole)));
        if good {
            is_sound(&whole);
        } else {
            // Nothing was there: no marker, or no release.
            let Some(Event::Error { kind, message, .. }) = events.last() else {
                panic!("{events:?}");
            };
            assert!(
                *kind == Kind::Missing || message.contains("can't open"),
                "{events:?}"
            );
        }
        let (events, _) = done(&push(&from, &remote));
        assert_eq!(
            (
                moved(&events).to,
                moved(&events).plan.there + moved(&events).plan.moves
            ),
            (Some(1), all)
        );
        let to = dir.path().join("to");
        killed_at_work += u32::from(killed(&pull(&remote, &to), pull_takes.mul_f64(part)));
        if to.join("precast-store.json").exists() {
            is_sound(&to);
        }
        let (events, _) = done(&pull(&remote, &to));
        assert_eq!(moved(&events).to, Some(1));
        is_sound(&to);
        let (events, _) = done(&pull(&remote, &to));
        assert_eq!(moved(&events).plan.moves, 0);
        for folder in [whole, to, dir.path().join(format!("remote-{round}"))] {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
    killed_at_work
}

#[test]
fn a_killed_push_or_pull_completes_the_next_time() {
    assert!(kills(5) > 2);
}

#[test]
#[ignore = "long: `make test-remotes`"]
fn two_hundred_pushes_and_pulls_are_killed() {
    let killed_at_work = kills(200);
    println!("{killed_at_work} of 400 were at work");
    assert!(killed_at_work > 200);
}
