//! What is loaded behind a model that answers already, and how long it all took.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use precast_store::{Digest, record::Program};

use super::{Model, RuntimeError, ending, program::Ready, variant::Variant};

/// How long it took from the beginning of a load until a model was of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timings {
    /// Until the model was handed out.
    pub loaded: Duration,
    /// Until the first call was answered. On CUDA an answer is handed out when its work is in the stream.
    pub first_answer: Option<Duration>,
    /// Until every program was loaded or set aside, where they are loaded without being asked for.
    pub complete: Option<Duration>,
}

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

impl Model {
    /// Starts the thread that loads what is not loaded yet, what has the highest priority first.
    pub(super) fn load_behind(mut self, priority: &dyn Fn(&Program) -> i64) -> Self {
        let mut order: Vec<(usize, Digest, i64)> = Vec::new();
        for (replica, on) in self.replicas.iter().enumerate() {
            let rest = on.slots().filter(|slot| !slot.settled());
            order.extend(rest.map(|slot| (replica, slot.program.id, priority(&slot.program))));
        }
        order.sort_by_key(|(replica, _, priority)| (std::cmp::Reverse(*priority), *replica));
        let (replicas, complete) = (self.replicas.clone(), self.complete.clone());
        let (stop, started) = (Arc::new(AtomicBool::new(false)), self.started);
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
                variant.refine();
            }
            let _ = complete.set(started.elapsed());
        };
        let thread = thread::Builder::new()
            .name("precast-load".to_owned())
            .spawn(work);
        match thread {
            Ok(thread) => {
                let thread = Some(thread);
                self.behind = Some(Behind { stop, thread });
            }
            // Each is loaded by the first call that needs it.
            Err(error) => tracing::warn!(%error, "no thread to load programs with"),
        }
        self
    }

    /// Returns how long it took to be of use.
    pub fn timings(&self) -> Timings {
        Timings {
            loaded: self.loaded,
            first_answer: self.first_answer.get().copied(),
            complete: self.complete.get().copied(),
        }
    }

    /// Loads every program that is not loaded yet, and runs each once on padding, so that no request pays for what is
    /// done only once.
    pub fn warm_up(&self) -> Result<(), RuntimeError> {
        for replica in &*self.replicas {
            let _work = ending::work().ok_or_else(|| RuntimeError::ending(replica.device))?;
            let mut slots = replica.slots();
            slots.try_for_each(|slot| slot.load(&replica.loader))?;
            replica.modules.values().flatten().for_each(Variant::refine);
            replica.programs().try_for_each(Ready::warm_up)?;
        }
        let _ = self.complete.set(self.started.elapsed());
        Ok(())
    }
}
