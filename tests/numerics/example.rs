//! `examples/tch.rs` and `examples/train` on the shared store.

#[path = "../../examples/tch.rs"]
mod tch;
#[path = "../../examples/train/src/main.rs"]
#[allow(dead_code, reason = "its `main`")]
mod train;

use std::process::Command;

use clap::Parser as _;
use precast::Store;

use crate::lab::{MINILM, checkout, lab, libtorch, python};

#[test]
fn the_example_finds_the_nearest_sentence_with_tensors_of_tch() {
    let cosines = tch::similarities(&lab(MINILM).store).unwrap();
    assert_eq!(cosines.size(), [3, 3]);
    let cosine = |a: i64, b: i64| cosines.double_value(&[a, b]);
    for i in 0..3 {
        assert!((cosine(i, i) - 1.0).abs() < 1e-5, "{cosines:?}");
    }
    assert!(cosine(0, 1) > cosine(0, 2) + 0.1, "{cosines:?}");
}

/// A second run trains from the same weights as the first, whose trained ones the answering model has by then. So it
/// publishes the same ones: no other release.
#[test]
#[ignore = "long: `make test-long`"]
fn the_example_of_a_training_can_be_run_twice() {
    let store = lab("examples/train/precast.toml").store.clone();
    lab("examples/train/train.toml");
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new(python())
        .arg(checkout().join("examples/train/eager.py"))
        .args([folder.path().to_str().unwrap(), "40", "0.003"])
        .status();
    assert!(made.unwrap().success());
    let path = |name: &str| folder.path().join(name).display().to_string();
    let [store_, libtorch_] = [&store, &libtorch()].map(|path| path.display().to_string());
    let args = [
        "train",
        "--rows",
        &path("rows.bin"),
        "--eager",
        &path("eager.json"),
        "--steps",
        "40",
        "--below",
        "4",
        "--store",
        &store_,
        "--libtorch",
        &libtorch_,
    ];
    let store = Store::open(&store).unwrap();
    let newest = |model: &str| store.releases().get(model, None).unwrap().unwrap().seq;
    let before = (newest("gpt"), newest("gpt-train"));
    for _ in 0..2 {
        train::run(&train::Args::parse_from(args)).unwrap();
    }
    let after = (newest("gpt"), newest("gpt-train"));
    assert_eq!(after, (before.0 + 1, before.1));
}
