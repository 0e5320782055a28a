//! `init`, `build` and `run` of six architectures agree with eager at one, between buckets and above the largest, without an edit of the spec. Needs `.venv` (`make`).
//! tests/sweep/sweep.py has more, for a Python with torchvision and timm.

use std::{path::Path, process::Command};

#[test]
fn six_architectures_from_init_to_run() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(checkout.join(".venv/bin/python"))
        .arg(checkout.join("tests/sweep/sweep.py"))
        .args(["--precast", env!("CARGO_BIN_EXE_precast")])
        .args(["bert", "gpt2", "llama", "t5", "vit", "strides"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert_eq!(text.lines().count(), 6, "{text}");
}
