//! Tests that measure their process: each runs in a separate process, where no other test allocates or frees memory.

use std::{env, process::Command};

const CHILD: &str = "PRECAST_TEST_OWN_PROCESS";

/// Runs `measure` in a separate process: starts the test program again, for the test `name` only.
pub fn in_own_process(name: &str, measure: impl FnOnce()) {
    if env::var_os(CHILD).is_some() {
        return measure();
    }
    let test = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let [output, errors] = [&test.stdout, &test.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(
        test.status.success() && output.contains("1 passed"),
        "{output}{errors}"
    );
}
