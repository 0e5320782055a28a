//! Leases: of several builders that lack the same thing, one makes it and the others wait.
//!
//! A lease is a file that its holder writes again every few seconds. Who waits for it looks whether the file changes: one
//! that has not changed for a minute has lost its holder, and is taken over. So no clock of one machine is compared with that of
//! another, nor with the server's. A lease saves work and nothing else: two holders of one lease make the same thing
//! twice, and the first one that is published stays. Storage that does not keep single files has none: there everybody holds
//! what he asks for.

use std::{
    io::Cursor,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use precast_store::{Digest, ListedPart, PartKind, transfer::Leased};

use crate::{
    carrier::{How, small},
    error::RemoteError,
    remote::Remote,
};

/// The times of leases.
#[derive(Clone, Copy)]
pub(crate) struct Times {
    /// How often the holder writes the file.
    pub beat: Duration,
    /// After how long without a change it is taken over.
    pub lost: Duration,
    /// How often who waits looks.
    pub look: Duration,
    /// How long anybody waits.
    pub most: Duration,
}

/// Those of real remotes: a minute is many beats, and longer than a request that is tried again.
pub(crate) const TIMES: Times = Times {
    beat: Duration::from_secs(10),
    lost: Duration::from_secs(60),
    look: Duration::from_secs(2),
    most: Duration::from_secs(3600),
};

impl Times {
    /// Returns times by which a lease is taken over after so many seconds.
    pub(crate) fn lost_after(seconds: u16) -> Self {
        let part = |of: Duration| of * u32::from(seconds) / 60;
        Self {
            beat: part(TIMES.beat),
            lost: part(TIMES.lost),
            look: part(TIMES.look),
            most: TIMES.most,
        }
    }
}

/// How long a sleep takes no notice of a stop.
const NAP: Duration = Duration::from_millis(20);

impl Remote {
    /// Takes the lease for what a key names, and calls `held` with what became of it. A lease that is held is kept until
    /// `stop` is set, and then given back. With `wait` it waits for another holder, but not for ever.
    pub(crate) fn lease(
        &self,
        kind: PartKind,
        id: Digest,
        wait: bool,
        times: Times,
        stop: &AtomicBool,
        held: &dyn Fn(Leased),
    ) -> Result<(), RemoteError> {
        let part = ListedPart::of(kind, id);
        let name = format!("leases/{}", part.path());
        if !self.carrier.is_folder() {
            held(Leased::Held);
            return Ok(());
        }
        let own = Own::new();
        let begun = Instant::now();
        let mut seen: Option<(Vec<u8>, Instant)> = None;
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(RemoteError::Interrupted);
            }
            if self.carrier.head(&part.path())?.is_some() {
                held(Leased::There);
                return Ok(());
            }
            if self.write(&name, &own.text(0), How::New)? {
                break;
            }
            match small(&*self.carrier, &name, 1 << 10)? {
                // Its holder has given it back.
                None => {}
                Some(text) if seen.as_ref().is_none_or(|(last, _)| *last != text) => {
                    seen = Some((text, Instant::now()));
                }
                Some(_) => {
                    let lost = seen
                        .as_ref()
                        .is_some_and(|(_, since)| since.elapsed() > times.lost);
                    if lost {
                        // Two may do so, and then one of them makes it in vain.
                        self.carrier.delete(&name)?;
                        seen = None;
                        continue;
                    }
                }
            }
            if !wait || begun.elapsed() > times.most {
                held(Leased::Taken);
                return Ok(());
            }
            nap(times.look, stop);
        }
        held(Leased::Held);
        let mut beats: u64 = 0;
        let mut is_own = true;
        while !stop.load(Ordering::Relaxed) {
            nap(times.beat, stop);
            beats += 1;
            // Where it was taken over, the work goes on without it. A storage that fails for a moment may be there again
            // at the next beat.
            is_own = is_own && self.is_own(&name, &own).unwrap_or(true);
            if is_own && !stop.load(Ordering::Relaxed) {
                let _ = self.write(&name, &own.text(beats), How::Any);
            }
        }
        if is_own && self.is_own(&name, &own)? {
            self.carrier.delete(&name)?;
        }
        Ok(())
    }

    fn is_own(&self, name: &str, own: &Own) -> Result<bool, RemoteError> {
        let text = small(&*self.carrier, name, 1 << 10)?;
        Ok(text.is_some_and(|text| text.starts_with(own.0.as_bytes())))
    }

    fn write(&self, name: &str, text: &str, how: How) -> Result<bool, RemoteError> {
        (self.carrier).create(name, &mut Cursor::new(text), text.len() as u64, how)
    }
}

/// The name of a holder: no two have the same.
struct Own(String);

impl Own {
    fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_nanos());
        // The address of a variable tells the threads of a process apart, and random layout those of two machines.
        let here = &raw const now as usize;
        Self(format!("holder {:x}-{now:x}-{here:x} ", std::process::id()))
    }

    fn text(&self, beats: u64) -> String {
        format!("{}beat {beats}\n", self.0)
    }
}

fn nap(time: Duration, stop: &AtomicBool) {
    let begun = Instant::now();
    while begun.elapsed() < time && !stop.load(Ordering::Relaxed) {
        thread::sleep(NAP.min(time));
    }
}
