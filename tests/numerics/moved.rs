//! Releases of an older torch, under this one. `make test-newest` runs it, after the numerics with the torch of
//! `.venv`.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    ATOL, RTOL,
    lab::{Lab, MINILM, SMALL, STACK, checkout, lab, precast, said, well},
};

/// Returns a lab with a copy of the store that the pass with the torch of `.venv` has left.
fn older() -> Lab {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (from, root) = (tmp.join("numerics/store"), tmp.join("numerics-moved"));
    let there = from.exists();
    assert!(there, "run the numerics with the torch of .venv first");
    let _ = std::fs::remove_dir_all(&root);
    std::fs::create_dir_all(&root).unwrap();
    well(
        Command::new("cp")
            .arg("-r")
            .args([from, root.join("store")]),
    );
    Lab::at(&root)
}

#[test]
#[ignore = "it needs another torch: `make test-newest`"]
fn releases_of_an_older_torch_answer_like_eager_once_their_gates_passed() {
    let lab = older();
    let run = |libtorch: Option<PathBuf>, inputs: &Path| {
        let args = ["run", "encode", "--model", "minilm", "--inputs"];
        let mut command = precast(&lab.store, &args);
        command.arg(inputs);
        if let Some(libtorch) = libtorch {
            command.env("LIBTORCH", libtorch);
        }
        said(&mut command)
    };
    let inputs = lab.inputs(MINILM, "minilm", "encode", "batch=3,seq=20");
    let refused = run(None, &inputs);
    let message = refused.err;
    assert_eq!(refused.code, Some(4), "{message}");
    for says in ["torch: artifact has `2.11.0", "`precast verify --host`"] {
        assert!(message.contains(says), "{message}");
    }
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
    assert_eq!(before.code, Some(0), "{}", before.err);
    // Nothing is left to do the next time.
    let again = lab.json(&["verify", "--host", "small"]);
    let [own, first] = [&again["releases"][0], &gated["releases"][1]];
    assert_eq!(own["runs_as"], first["runs_as"]);
    assert_eq!(lab.json(&["verify"])["defects"], serde_json::json!([]));
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_stack_of_equal_blocks() {
    let lab = lab(STACK);
    lab.agrees(STACK, "blocks", "forward", "batch=1,seq=32", RTOL, ATOL);
    lab.agrees(STACK, "blocks", "forward", "batch=3,seq=100", RTOL, ATOL);
}
