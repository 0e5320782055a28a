//! Values that the model refuses: a typed error where eager raises, and the next call right. `tests/runtime_torture`
//! tries thousands of them on the store that this leaves.

use precast::{
    Store,
    runtime::{Outputs, RuntimeError, Tensor},
};

use crate::lab::{VALUES, lab, runtime};

/// Returns zeros of `rows` times 64, with another value in one place.
fn with(rows: usize, [row, column]: [usize; 2], value: f32) -> Tensor {
    let mut data = vec![0.0_f32; rows * 64];
    data[row * 64 + column] = value;
    Tensor::from_slice(&data, &[rows as i64, 64]).unwrap()
}

/// Returns the bytes of outputs.
fn bytes(outputs: &Outputs) -> Vec<Vec<u8>> {
    let bytes = outputs.iter().map(|tensor| tensor.to_bytes().unwrap());
    bytes.collect()
}

#[test]
fn a_check_of_what_is_computed_is_an_error_and_the_next_call_right() {
    let store = Store::open(&lab(VALUES).store).unwrap();
    let model = runtime(&store).load("values").unwrap();
    for batch in [4, 3, 9] {
        let good = with(batch, [0, 0], 0.0);
        let answer = model.run("computed", &[&good]).unwrap();
        // Rows 78 and -3 of 50.
        for wrong in [20.0, -7.0, f32::NAN, f32::INFINITY] {
            let x = with(batch, [batch - 1, 40], wrong);
            let refused = model.run("computed", &[&x]).unwrap_err();
            match &refused {
                RuntimeError::CheckFailed { check, .. } => {
                    assert!(check.contains("index in "), "{check}");
                    assert!(check.contains("50"), "{check}");
                }
                // Beyond the bucket the artifact for every size answers, or eager where that was faster.
                RuntimeError::Failed { step, .. } if step == "eager" => {}
                other => panic!("{wrong} at batch {batch}: {other:?}"),
            }
            let again = model.run("computed", &[&good]).unwrap();
            assert!(bytes(&again) == bytes(&answer));
        }
    }
}
