//! Forks of the process: objects of the parent are refused in the child.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use pyo3::prelude::*;

use crate::errors;

/// The number of forks between the first process and this one.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Counts a fork, in the child. Python calls it, through `os.register_at_fork`.
#[pyfunction]
pub fn forked() {
    FORKS.fetch_add(1, Relaxed);
}

/// The process in which an object was made.
#[derive(Clone, Copy)]
pub struct Process(u64);

impl Process {
    pub fn this() -> Self {
        Self(FORKS.load(Relaxed))
    }

    /// Returns whether it is this process, and not a parent.
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Relaxed)
    }

    /// Refuses the use of an object of a parent.
    pub fn check(self, what: impl FnOnce() -> String) -> PyResult<()> {
        if self.is_this() {
            return Ok(());
        }
        Err(errors::unready(
            format!(
                "{} was loaded before a fork: its threads and its device are the parent's",
                what()
            ),
            "load it in the child, or start the child with the method `spawn`",
        ))
    }
}
