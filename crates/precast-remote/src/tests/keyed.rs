//! What is found by its key, without a release, and who makes it.

use std::{
    io::Cursor,
    thread,
    time::{Duration, Instant},
};

use precast_store::{ListedPart, transfer::Leased};

use super::*;
use crate::lease::Times;

const QUICK: Times = Times {
    beat: Duration::from_millis(50),
    lost: Duration::from_millis(500),
    look: Duration::from_millis(10),
    most: Duration::from_secs(20),
};

#[test]
fn programs_are_offered_and_fetched_by_key_without_a_release() {
    let (_from, from, release) = source("a");
    let store = Arc::new(InMemory::new());
    let there = remote(memory(&store));
    let [one, two] = release.programs[..] else {
        panic!("two programs");
    };
    there
        .offer(&from, PartKind::Program, &[two], &tell())
        .unwrap();
    assert!(there.numbers().unwrap().is_empty());
    let (_to, to) = testing::store();
    let asked = [one, two, Digest::of(b"nothing")];
    let has = there.fetch(&to, PartKind::Program, &asked, &tell());
    assert_eq!(has.unwrap(), [two]);
    assert!(to.records().has_program(&two).unwrap());
    is_sound(&to);
    // An artifact by itself, and an object.
    let artifact = from.records().program(&one).unwrap().unwrap().steps[0].artifact;
    let (_other, other) = testing::store();
    let has = there.fetch(&other, PartKind::Artifact, &[artifact], &tell());
    assert_eq!(has.unwrap(), [artifact]);
    assert!(other.records().keep_artifact(&artifact).unwrap());
    let weights = release.weights.unwrap();
    there
        .offer(&from, PartKind::Object, &[weights], &tell())
        .unwrap();
    let has = there.fetch(&other, PartKind::Object, &[weights], &tell());
    assert_eq!(has.unwrap(), [weights]);
    // A program that the remote has in part is not there.
    let object = from.records().artifact(&artifact).unwrap().unwrap().object;
    let object = ListedPart::of(PartKind::Object, object).path();
    there.carrier.delete(&object).unwrap();
    let (_third, third) = testing::store();
    let has = there.fetch(&third, PartKind::Program, &[two], &tell());
    assert_eq!(has.unwrap(), []);
    // The next offer mends it.
    there
        .offer(&from, PartKind::Program, &[two], &tell())
        .unwrap();
    let has = there.fetch(&third, PartKind::Program, &[two], &tell());
    assert_eq!(has.unwrap(), [two]);
    // Releases say what they were made from.
    push(&there, &from, &release).unwrap();
    let found = there.releases("m", 8).unwrap();
    assert_eq!(found[0].programs, release.programs);
    assert_eq!(there.programs(&release.programs).unwrap().len(), 2);
    assert!(there.releases("n", 8).unwrap().is_empty());
}

#[test]
fn of_many_holders_one_works_and_a_lost_one_is_followed() {
    let store = Arc::new(InMemory::new());
    let there = remote(memory(&store));
    let id = Digest::of(b"artifact");
    let part = ListedPart::of(PartKind::Artifact, id);
    let (made, waited) = (AtomicU64::new(0), AtomicU64::new(0));
    // The one that holds it makes the thing; the others find it.
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let stop = AtomicBool::new(false);
                let held = |leased| match leased {
                    Leased::Held => {
                        thread::sleep(Duration::from_millis(200));
                        made.fetch_add(1, Ordering::Relaxed);
                        let mut text = Cursor::new(b"record");
                        there
                            .carrier
                            .create(&part.path(), &mut text, 6, How::New)
                            .unwrap();
                        stop.store(true, Ordering::Relaxed);
                    }
                    Leased::There => _ = waited.fetch_add(1, Ordering::Relaxed),
                    Leased::Taken => panic!("nobody waits that long"),
                };
                let kind = PartKind::Artifact;
                there.lease(kind, id, true, QUICK, &stop, &held).unwrap();
            });
        }
    });
    assert_eq!(
        (made.into_inner(), waited.into_inner()),
        (1, 7),
        "made, found"
    );
    assert!(there.carrier.list("leases").unwrap().unwrap().is_empty());
    // A holder that is gone: its file stays, and no longer changes.
    there.carrier.delete(&part.path()).unwrap();
    let name = format!("leases/{}", part.path());
    let mut text = Cursor::new(b"holder 1 beat 7\n");
    there
        .carrier
        .create(&name, &mut text, 16, How::New)
        .unwrap();
    let stop = AtomicBool::new(false);
    let state = Mutex::new(Vec::new());
    let held = |leased| {
        state.lock().unwrap().push(leased);
        stop.store(true, Ordering::Relaxed);
    };
    let lease = |wait| there.lease(PartKind::Artifact, id, wait, QUICK, &stop, &held);
    lease(false).unwrap();
    stop.store(false, Ordering::Relaxed);
    let begun = Instant::now();
    lease(true).unwrap();
    assert!(begun.elapsed() >= QUICK.lost);
    assert_eq!(*state.lock().unwrap(), [Leased::Taken, Leased::Held]);
}
