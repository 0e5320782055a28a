//! Real artifacts, made by the real worker, against eager PyTorch. Needs `.venv` (`make`); takes minutes, not seconds.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "tests panic, print, and call C"
)]

mod broken;
mod entry;
#[cfg(feature = "tch")]
mod example;
mod generation;
mod lab;
mod memory;
mod moved;
mod operators;
mod prepared;
#[path = "../sample/random.rs"]
mod random;
mod receipts;
mod slower;
mod state;
mod training;
mod values;
mod vlm;
mod workers;

use std::{fs, os::unix::fs::PermissionsExt};

use lab::{MINILM, SMALL, checkout, json, lab, precast, shared, states};

/// The tolerance for float32 on the CPU.
const RTOL: f64 = 1e-4;
const ATOL: f64 = 1e-5;

#[test]
fn minilm_answers_at_an_exact_bucket_or_padded_into_the_smallest_that_covers() {
    for (case, bucket, rung) in [
        ("batch=1,seq=32", "batch=1 seq=32", "exact"),
        ("batch=8,seq=128", "batch=8 seq=128", "exact"),
        ("batch=1,seq=20", "batch=1 seq=32", "padded"),
        ("batch=3,seq=77", "batch=8 seq=128", "padded"),
    ] {
        let served = lab(MINILM).agrees(MINILM, "minilm", "encode", case, RTOL, ATOL);
        assert_eq!(served, (bucket.into(), rung.into()), "{case}");
    }
}

#[test]
fn tied_weights_buffers_and_several_outputs() {
    let lab = lab(SMALL);
    lab.agrees(SMALL, "small", "logits", "batch=2,seq=8", RTOL, ATOL);
    lab.agrees(SMALL, "small", "logits", "batch=1,seq=5", RTOL, ATOL);
}

#[test]
fn an_output_twice_as_long_as_its_input() {
    let lab = lab(SMALL);
    lab.agrees(SMALL, "small", "widen", "seq=4", RTOL, ATOL);
    let served = lab.agrees(SMALL, "small", "widen", "seq=5", RTOL, ATOL);
    assert_eq!(served, ("seq=8".into(), "padded".into()));
}

#[test]
fn a_second_build_compiles_nothing_and_starts_no_python() {
    let folder = tempfile::tempdir().unwrap();
    let (python, started) = (folder.path().join("python"), folder.path().join("started"));
    fs::write(&python, format!("#!/bin/sh\ntouch {started:?}\nexit 1\n")).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    for spec in [MINILM, SMALL] {
        let lab = lab(spec);
        let args = ["build", "-f", spec, "--format", "json"];
        let built = json(precast(&lab.store, &args).env("PRECAST_PYTHON", &python));
        assert!(!started.exists(), "{built}");
        assert_eq!(built["compiled"], 0, "{built}");
        let hits = states(&built).iter().all(|(_, state)| state == "hit");
        assert!(hits, "{built}");
        println!("{spec}: second build took {} s", built["seconds"]);
    }
}

#[test]
fn one_byte_of_the_models_source_compiles_again() {
    let root = tempfile::tempdir().unwrap();
    let small = checkout().join("tests/numerics/small");
    let write = |name: &str, from: &str, to: &str| {
        let text = fs::read_to_string(small.join(name)).unwrap();
        assert!(text.contains(from), "{text}");
        fs::write(root.path().join(name), text.replace(from, to)).unwrap();
    };
    write("precast.toml", "name = \"small\"", "name = \"changed\"");
    let spec = root.path().join("precast.toml");
    let only = ["--only", "widen seq=4", "-j1"];
    let args = [&["build", "-f", spec.to_str().unwrap()], &only[..]].concat();
    for scale in ["SCALE = 0.7", "SCALE = 0.6"] {
        write("model.py", "SCALE = 0.5", scale);
        let built = shared().json(&args);
        assert_eq!(built["compiled"], 1, "{built}");
        assert_eq!(states(&built)[0].1, "built", "{built}");
    }
}
