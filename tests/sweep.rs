//! `init`, `build` and `run` of two architectures agree with eager at one, between buckets and above the largest,
//! without an edit of the spec. Needs `.venv` (`make`). `make sweep` has more.

use std::{path::Path, process::Command};

#[test]
#[ignore = "long: `make test-long`"]
fn two_architectures_from_init_to_run() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(checkout.join(".venv/bin/python"))
        .arg(checkout.join("tests/sweep/sweep.py"))
        .args(["--precast", env!("CARGO_BIN_EXE_precast")])
        .args(["llama", "strides"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert_eq!(text.lines().count(), 2, "{text}");
}
