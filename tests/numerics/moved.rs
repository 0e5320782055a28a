//! Releases of an older torch, under this one. `make test-newest` runs it, after the numerics with the torch of
//! `.venv`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    ATOL, RTOL,
    lab::{Lab, MINILM, SMALL, STACK, checkout, json, lab, precast},
};

/// Returns a lab with a copy of the store that the pass with the torch of `.venv` has left.
fn older() -> Lab {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (from, root) = (tmp.join("numerics/store"), tmp.join("numerics-moved"));
    assert!(
        from.exists(),
        "run the numerics with the torch of .venv first"
    );
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root).unwrap();
    let copied = Command::new("cp")
        .arg("-r")
        .arg(from)
        .arg(root.join("store"))
        .status();
    assert!(copied.unwrap().success());
    Lab::at(&root)
}

#[test]
#[ignore = "it needs another torch: `make test-newest`"]
fn releases_of_an_older_torch_answer_like_eager_once_their_gates_passed() {
    let lab = older();
    let run = |libtorch: Option<PathBuf>, inputs: &Path| {
        let mut command = precast(
            &lab.store,
            &["run", "encode", "--model", "minilm", "--inputs"],
        );
        command.arg(inputs);
        if let Some(libtorch) = libtorch {
            command.env("LIBTORCH", libtorch);
        }
        command.output().unwrap()
    };
    let inputs = lab.inputs(MINILM, "minilm", "encode", "batch=3,seq=20");
    let refused = run(None, &inputs);
    let message = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(4), "{message}");
    assert!(
        message.contains("torch: artifact has `2.11.0")
            && message.contains("`precast verify --host`"),
        "{message}"
    );
    let models = ["minilm", "small"];
    let gated = lab.json(&[&["verify", "--host"], &models[..]].concat());
    for release in gated["releases"].as_array().unwrap() {
        assert_eq!(release["passed"], true, "{release:#}");
        assert!(!release["programs"].as_array().unwrap().is_empty());
    }
    for case in ["batch=1,seq=32", "batch=8,seq=128", "batch=3,seq=77"] {
        lab.agrees(MINILM, "minilm", "encode", case, RTOL, ATOL);
    }
    lab.agrees(SMALL, "small", "logits", "batch=1,seq=5", RTOL, ATOL);
    // Under the torch that built it, it runs as before.
    let before = run(Some(checkout().join(".venv/libtorch")), &inputs);
    let message = String::from_utf8_lossy(&before.stderr);
    assert!(before.status.success(), "{message}");
    // Nothing is left to do the next time.
    let again = json(&mut precast(
        &lab.store,
        &["verify", "--host", "small", "--format", "json"],
    ));
    assert_eq!(
        again["releases"][0]["runs_as"],
        gated["releases"][1]["runs_as"]
    );
    assert_eq!(lab.json(&["verify"])["defects"], serde_json::json!([]));
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_stack_of_equal_blocks() {
    let lab = lab(STACK);
    lab.agrees(STACK, "blocks", "forward", "batch=1,seq=32", RTOL, ATOL);
    lab.agrees(STACK, "blocks", "forward", "batch=3,seq=100", RTOL, ATOL);
}
