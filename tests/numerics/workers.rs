//! Modules that end their worker. This module's tests come last: its build waits two minutes for a module that hangs.

use std::sync::OnceLock;

use crate::broken::{Built, line};

/// Builds everything once, in as many workers as modules end, one after the other.
pub fn built() -> &'static Built {
    static BUILT: OnceLock<Built> = OnceLock::new();
    // Long enough for a compile on a busy machine: the module that hangs waits for all of it.
    let limits = ["--timeout", "120", "--memory", "3GiB"];
    BUILT.get_or_init(|| Built::build("worker", &limits))
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_module_that_ends_its_worker_fails_at_its_line_and_the_next_one_is_built() {
    for (module, message, mark) in [
        (
            "dies",
            "ended in the middle of a request (signal: 11",
            "crash",
        ),
        ("hangs", "did not answer within 120 s", "hang"),
        ("eats", "took too much memory", "eat"),
    ] {
        let message = format!("the worker {message}");
        let (location, log) = built().failed(module, &message);
        let place = line("worker", mark);
        assert_eq!(location, Some(&*place), "{log}");
        let (file, number) = place.split_once(':').unwrap();
        let frame = format!("/{file}\", line {number} in ");
        assert!(log.contains(&frame), "{log}");
    }
    built().program("good", "built");
    assert_eq!(built().code, Some(1), "nothing answers for failed modules");
}
