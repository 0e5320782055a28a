//! Tests that measure their process: each runs in a process of its own, where no other test allocates or frees memory.

use std::{env, process::Command};

const ALONE: &str = "PRECAST_TEST_ALONE";

/// Does `measure` in a process of its own: starts this one's program again, for the test `name` alone.
pub fn alone(name: &str, measure: impl FnOnce()) {
    if env::var_os(ALONE).is_some() {
        return measure();
    }
    let test = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let [output, errors] = [&test.stdout, &test.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(
        test.status.success() && output.contains("1 passed"),
        "{output}{errors}"
    );
}
