//! Whether a storage refuses to create a file twice.
//!
//! Some servers ignore the condition of a create, and some honour it only for requests that come one after another. So
//! several creates of one name race, and exactly one may win.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
    carrier::{Carrier, How},
    error::RemoteError,
};

const RACERS: usize = 8;
const ROUNDS: usize = 3;

/// Races creates of one name, a few times. Returns whether one won each time, and the next one was refused too.
pub fn refuses_twice(carrier: &dyn Carrier) -> Result<bool, RemoteError> {
    if !carrier.keeps_names() {
        return Ok(false);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let stamp = now.map_or(0, |now| now.as_nanos());
    for round in 0..ROUNDS {
        let name = format!("tmp/race-{stamp}-{}-{round}", std::process::id());
        let (won, start) = (AtomicUsize::new(0), Barrier::new(RACERS));
        let create = |racer: usize| {
            let text = racer.to_string();
            carrier.create(&name, &mut text.as_bytes(), text.len() as u64, How::New)
        };
        let race = |racer| -> Result<(), RemoteError> {
            start.wait();
            if create(racer)? {
                won.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let racers = thread::scope(|scope| {
            let race = &race;
            let all: Vec<_> = (0..RACERS)
                .map(|racer| scope.spawn(move || race(racer)))
                .collect();
            let ended = all.into_iter().map(|one| one.join().unwrap_or(Ok(())));
            ended.collect::<Result<(), RemoteError>>()
        });
        let again = racers.and_then(|()| create(RACERS));
        let deleted = carrier.delete(&name);
        let again = again?;
        deleted?;
        if again || won.load(Ordering::Relaxed) != 1 {
            return Ok(false);
        }
    }
    Ok(true)
}
