//! `examples/tch.rs` on the shared store.

#[path = "../../examples/tch.rs"]
mod tch;

use crate::lab::{MINILM, lab};

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
