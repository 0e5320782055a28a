//! The thread that loads the rest of a model that answers already.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use precast_store::{Digest, record::Program};

use super::{ending, replica::Replica};

/// How long the end of a model waits for the program that is being loaded.
const LONGEST: Duration = Duration::from_secs(5);

/// The thread that loads behind a model; it ends with the model, after the program it is at.
pub(super) struct Behind {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // What it is at may hang: it has what it needs to itself, and is left behind then.
        let begun = Instant::now();
        if let Some(thread) = self.thread.take() {
            while !thread.is_finished() && begun.elapsed() < LONGEST {
                thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl Behind {
    /// Starts the thread that loads what is not loaded yet, what has the highest priority first.
    ///
    /// `complete` is set when it is through, to the time since `started`. None where there is no thread to be had.
    pub fn start(
        replicas: &Arc<Vec<Replica>>,
        complete: &Arc<OnceLock<Duration>>,
        started: Instant,
        priority: &dyn Fn(&Program) -> i64,
    ) -> Option<Self> {
        let mut order: Vec<(usize, Digest, i64)> = Vec::new();
        for (replica, on) in replicas.iter().enumerate() {
            let rest = on.slots().filter(|slot| !slot.settled());
            order.extend(rest.map(|slot| (replica, slot.program.id, priority(&slot.program))));
        }
        order.sort_by_key(|(replica, _, priority)| (std::cmp::Reverse(*priority), *replica));
        let (replicas, complete) = (replicas.clone(), complete.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let work = move || {
            for (replica, id, _) in order {
                let work = ending::work();
                if stopped.load(Ordering::Relaxed) || work.is_none() {
                    return;
                }
                let on = &replicas[replica];
                let mut variants = on.modules.values().flatten();
                let Some(variant) =
                    variants.find(|v| v.programs.iter().any(|s| s.program.id == id))
                else {
                    continue;
                };
                for slot in variant.programs.iter().filter(|s| s.program.id == id) {
                    if let Err(error) = slot.load(&on.loader) {
                        // The call that needs it tries again, and tells its caller.
                        tracing::warn!(program = %id.short(), %error, "a program was not loaded");
                    }
                }
                variant.reroute();
            }
            let _ = complete.set(started.elapsed());
        };
        let thread = thread::Builder::new()
            .name("precast-load".to_owned())
            .spawn(work);
        match thread {
            Ok(thread) => {
                let thread = Some(thread);
                Some(Self { stop, thread })
            }
            // Each is loaded by the first call that needs it.
            Err(error) => {
                tracing::warn!(%error, "no thread to load programs with");
                None
            }
        }
    }
}
