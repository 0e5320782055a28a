//! The thread that loads the remaining programs while the model answers.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use precast_store::{Digest, record};

use super::{ending, replica::Replica};

/// The longest wait of a model's end for the program that is being loaded.
const LONGEST: Duration = Duration::from_secs(5);

/// The thread that loads the remaining programs of a model. It ends with the model, after the program that it is
/// loading.
pub(super) struct Background {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A load may hang. The thread owns everything that it uses, so it can outlive the model.
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

impl Background {
    /// Starts the thread. It loads programs of a higher priority first.
    ///
    /// At the end it sets `complete` to the time since `started`. Returns none if no thread can be started.
    pub fn start(
        replicas: &Arc<Vec<Replica>>,
        complete: &Arc<OnceLock<Duration>>,
        started: Instant,
        priority: &dyn Fn(&record::Program) -> i64,
    ) -> Option<Self> {
        let mut order: Vec<(usize, Digest, i64)> = Vec::new();
        for (replica, on) in replicas.iter().enumerate() {
            let rest = on.programs().filter(|program| !program.settled());
            let records = rest.map(|program| &program.record);
            order.extend(records.map(|record| (replica, record.id, priority(record))));
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
                for variant in on.modules.values().flatten() {
                    let mut programs = variant.programs.iter();
                    let Some(program) = programs.find(|program| program.record.id == id) else {
                        continue;
                    };
                    if let Err(error) = program.load(&on.loader) {
                        // The call that needs it tries again, and its caller has the error.
                        tracing::warn!(program = %id.short(), %error, "a program was not loaded");
                    }
                    variant.reroute();
                }
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
