//! The end of the process: no thread may be inside libtorch when its destructors run.
//!
//! The library registers no handler for it. A process that exits while its threads are in calls first calls
//! [`shut_down`].

use std::{
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// Calls under way somewhere: each replica of a model has its own, so that they share no cache line.
pub type Count = AtomicUsize;

/// Work that has begun. It ends on drop.
pub struct Entered<'a>(&'a Count);

static ENDING: AtomicBool = AtomicBool::new(false);
static COUNTS: Mutex<Vec<Weak<Count>>> = Mutex::new(Vec::new());
/// Loads, swaps and copies.
static WORK: Count = Count::new(0);
/// Maximum time for which [`shut_down`] waits for calls.
const LONGEST: Duration = Duration::from_secs(5);

/// Returns a count that the end waits for.
pub fn count() -> Arc<Count> {
    let count = Arc::new(Count::new(0));
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    counts.retain(|known| known.strong_count() > 0);
    counts.push(Arc::downgrade(&count));
    count
}

/// Counts a call; none when the process is ending and no call may begin.
pub fn enter(count: &Count) -> Option<Entered<'_>> {
    // Either this sees the end, or the end sees this: both are sequentially consistent.
    count.fetch_add(1, SeqCst);
    let entered = Entered(count);
    (!ended()).then_some(entered)
}

/// Counts a load, a swap or a copy; none when the process is ending.
pub fn work() -> Option<Entered<'static>> {
    enter(&WORK)
}

/// Returns whether the process is ending.
pub fn ended() -> bool {
    ENDING.load(SeqCst)
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Prevents new calls, loads and swaps in this process, and waits up to five seconds for running ones. Returns whether
/// all of them ended.
///
/// `exit` runs libtorch's destructors while other threads still run, and a call can crash in them. A service whose
/// threads may be in calls at its exit must call this function first. Later calls are refused with
/// [`super::RuntimeError::Unready`].
///
/// ```no_run
/// # let code = 0;
/// precast_runtime::shut_down();
/// std::process::exit(code);
/// ```
pub fn shut_down() -> bool {
    ENDING.store(true, SeqCst);
    let begun = Instant::now();
    while !idle() {
        if begun.elapsed() > LONGEST {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

fn idle() -> bool {
    let counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut live = counts.iter().filter_map(Weak::upgrade);
    WORK.load(SeqCst) == 0 && live.all(|count| count.load(SeqCst) == 0)
}
