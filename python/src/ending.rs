//! The end of the process: no thread may be inside the extension when the interpreter goes.
//!
//! Until Python 3.13 the interpreter ends a daemon thread with `pthread_exit` when the thread wants the GIL back. That
//! unwinds the thread's stack, and a stack with frames of Rust aborts the process. PyO3 lets such a thread sleep for
//! ever where it takes the GIL back itself, but code of Python that is called from here takes it back too. So
//! [`shut_down`], which Python calls at its exit, waits until no thread is inside.
//!
//! A thread that has left drops its answer. torch gives up the GIL while it frees a tensor, and takes it back in a
//! destructor, which may not be unwound either: `terminate called without an active exception`. So [`shut_down`] also
//! waits for the threads that have ever been inside: until they end or come back, for a short time.
//!
//! | thread that comes later | result |
//! |---|---|
//! | the one that ends the process: exit handlers, destructors, generators | as always; the runtime refuses calls |
//! | another one | a sleep of [`LATE`], then an error |
//!
//! Most processes end during that sleep, and the thread runs no code of torch meanwhile. Where the interpreter is still
//! there, an exit handler may be waiting for the thread: a sleep without end would be one for the process too.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use pyo3::{prelude::*, sync::PyOnceLock};

use crate::errors;

/// Threads inside the extension.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// The thread that ends the process, once it does.
static ENDING: OnceLock<ThreadId> = OnceLock::new();
/// Whether the interpreter may be gone.
static ENDED: AtomicBool = AtomicBool::new(false);
/// Living threads that have been inside and have not been refused.
static CALLERS: AtomicUsize = AtomicUsize::new(0);
/// The error of a late thread. Made before it is needed, because making it runs code of Python.
static REFUSAL: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
/// Maximum time to wait for the threads inside, after the runtime has waited for its calls.
const LONGEST: Duration = Duration::from_secs(5);
/// Maximum time to wait for the threads that have left. A thread that waits for other work stays that long.
const LEAVING: Duration = Duration::from_millis(500);
/// The sleep of a late thread.
const LATE: Duration = Duration::from_secs(1);

/// Time between two looks at a count.
const TURN: Duration = Duration::from_micros(200);

thread_local! {
    static CALLER: Caller = Caller::new();
}

/// Counts its thread until the thread ends.
struct Caller;

impl Caller {
    fn new() -> Self {
        CALLERS.fetch_add(1, SeqCst);
        Self
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        CALLERS.fetch_sub(1, SeqCst);
    }
}

/// A thread inside the extension, until it is dropped.
pub struct Inside(());

impl Inside {
    /// Enters. While the process ends, only the thread that ends it does.
    pub fn enter(py: Python<'_>) -> PyResult<Self> {
        // A thread at its end has no such value any more, and is not counted.
        let counted = CALLER.try_with(|_| ()).is_ok();
        // Either this sees the end, or the end sees this: both are sequentially consistent.
        INSIDE.fetch_add(1, SeqCst);
        let inside = Self(());
        if is_ending() && !ends_the_process() {
            drop(inside);
            if counted {
                CALLERS.fetch_sub(1, SeqCst);
            }
            py.detach(|| thread::sleep(LATE));
            if counted {
                CALLERS.fetch_add(1, SeqCst);
            }
            return Err(refusal(py));
        }
        Ok(inside)
    }

    /// Does `work` without the GIL.
    pub fn detach<R, F>(&self, py: Python<'_>, work: F) -> R
    where
        F: FnOnce() -> R + Send,
        R: Send,
    {
        py.detach(|| {
            let done = work();
            if ENDED.load(SeqCst) && !ends_the_process() {
                thread::sleep(LATE);
            }
            done
        })
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.fetch_sub(1, SeqCst);
    }
}

pub fn is_ending() -> bool {
    ENDING.get().is_some()
}

/// Returns whether this is the thread that ends the process.
fn ends_the_process() -> bool {
    ENDING.get() == Some(&thread::current().id())
}

/// Returns the error of a late thread. Runs no code of Python.
fn refusal(py: Python<'_>) -> PyErr {
    match REFUSAL.get(py) {
        Some(error) => PyErr::from_value(error.bind(py).clone()),
        None => pyo3::exceptions::PyRuntimeError::new_err("the process is ending"),
    }
}

/// Prevents new calls and waits for running ones. Python calls it at its exit. Returns whether all of them ended.
#[pyfunction]
pub fn shut_down(py: Python<'_>) -> bool {
    REFUSAL.get_or_init(py, || {
        let hint = "stop the threads that use models before the main thread ends";
        let error = errors::unready("the process is ending", hint);
        error.into_value(py).into_any()
    });
    let _ = ENDING.set(thread::current().id());
    // This thread is counted from here on, also if it has made no call.
    let own = CALLER.try_with(|_| 1).unwrap_or(0);
    let ended = py.detach(|| {
        let calls = precast_runtime::shut_down();
        let begun = Instant::now();
        while INSIDE.load(SeqCst) > 0 && begun.elapsed() < LONGEST {
            thread::sleep(TURN);
        }
        let begun = Instant::now();
        while CALLERS.load(SeqCst) > own && begun.elapsed() < LEAVING {
            thread::sleep(TURN);
        }
        calls && INSIDE.load(SeqCst) == 0
    });
    ENDED.store(true, SeqCst);
    ended
}
