//! The end of the process: nobody may be inside libtorch when its destructors run.
//!
//! `exit` runs destructors while other threads go on. A call that meets those of libtorch fails with one of its internal
//! assertions, or crashes. So a handler that runs before them lets nothing begin any more and waits for what is under way.
//! The handler that was registered last runs first: it is registered again after first answers, because libtorch makes
//! some of what it destroys when it is first used.

use std::{
    env,
    io::{self, Write},
    ptr,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

/// Calls under way somewhere: each replica of a model has its own, so that they share no cache line.
pub type Count = AtomicUsize;

/// What began and has not ended; it ends on drop.
pub struct Entered<'a>(&'a Count);

static ENDING: AtomicBool = AtomicBool::new(false);
static COUNTS: Mutex<Vec<Weak<Count>>> = Mutex::new(Vec::new());
/// Loads, swaps and copies.
static WORK: Count = Count::new(0);
/// A call that takes longer meets the destructors: the process is to end.
const LONGEST: Duration = Duration::from_secs(5);

/// Returns a count that the end waits for.
pub fn count() -> Arc<Count> {
    let count = Arc::new(Count::new(0));
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    counts.retain(|known| known.strong_count() > 0);
    counts.push(Arc::downgrade(&count));
    count
}

/// Counts a call; none when the process is ending and it must not begin.
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

/// Registers the handler before everything that is registered until now. Called with each model and its first answer;
/// every power of two of these does it, so that it takes no memory in the long run.
pub fn watch() {
    static CALLED: AtomicUsize = AtomicUsize::new(0);
    if (CALLED.fetch_add(1, SeqCst) + 1).is_power_of_two() {
        // SAFETY: `end` is a function that lives as long as the process, and does not unwind. When there is no room for
        // one more handler, an earlier one does.
        let _ = unsafe { libc::atexit(end) };
    }
}

/// Ends the process without destructors: libtorch's take as long as its initialisers, to free what is about to be gone.
///
/// Returns where something may wait for an ordinary end to write what it saw: a profiler or a checker that the environment
/// had loaded into the process.
pub fn leave(code: u8) {
    let watches = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    const WATCHERS: [&str; 4] = [
        "LD_PRELOAD",
        "LD_AUDIT",
        "CUDA_INJECTION64_PATH",
        "NVTX_INJECTION64_PATH",
    ];
    if WATCHERS.into_iter().any(watches) {
        return;
    }
    let _ = io::stdout().flush();
    // SAFETY: null means all of C's own streams; nothing of this process runs after `_exit`, which frees nothing.
    unsafe {
        libc::fflush(ptr::null_mut());
        libc::_exit(code.into());
    }
}

extern "C" fn end() {
    if ENDING.swap(true, SeqCst) {
        return;
    }
    let begun = Instant::now();
    while !idle() && begun.elapsed() < LONGEST {
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn idle() -> bool {
    let counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut live = counts.iter().filter_map(Weak::upgrade);
    WORK.load(SeqCst) == 0 && live.all(|count| count.load(SeqCst) == 0)
}
