//! Values that the model refuses: a typed error where eager raises, and the next call right. `tests/runtime_torture`
//! tries thousands of them on the store that this leaves.

use precast::{
    Model, Store,
    runtime::{Element, Outputs, RuntimeError, Tensor, errors::Problem},
};

use crate::lab::{Lab, MINILM, VALUES, lab, runtime};

/// Returns a tensor of these sizes, of one value.
fn full<T: Element>(shape: [i64; 2], value: T) -> Tensor {
    let data = vec![value; (shape[0] * shape[1]) as usize];
    Tensor::from_slice(&data, &shape).unwrap()
}

/// Returns a copy with another value in one place.
fn with<T: Element>(tensor: &Tensor, [row, column]: [i64; 2], value: T) -> Tensor {
    let (shape, mut data) = (tensor.shape(), tensor.to_vec::<T>().unwrap());
    data[(row * shape[1] + column) as usize] = value;
    Tensor::from_slice(&data, &shape).unwrap()
}

/// Returns the bytes of outputs.
fn bytes(outputs: &Outputs) -> Vec<Vec<u8>> {
    outputs
        .iter()
        .map(|tensor| tensor.to_bytes().unwrap())
        .collect()
}

fn load(lab: &Lab, model: &str) -> Model {
    let store = Store::open(&lab.store).unwrap();
    runtime(&store).load(model).unwrap()
}

#[test]
fn an_id_beyond_the_vocabulary_is_an_error_that_names_it() {
    let model = load(lab(MINILM), "minilm");
    // Exact, and padded.
    for (batch, seq) in [(1, 32), (8, 128), (1, 20), (3, 77)] {
        let (mask, good) = (full([batch, seq], 1_i64), full([batch, seq], 7_i64));
        let answer = model.run("encode", &[&good, &mask]).unwrap();
        for wrong in [30_522, -5, i64::MIN, i64::MAX] {
            let ids = with(&good, [batch - 1, 17], wrong);
            let refused = model.run("encode", &[&ids, &mask]).unwrap_err();
            let RuntimeError::BadInput { input, problem, .. } = &refused else {
                panic!("{refused:?}");
            };
            assert_eq!(&**input, "input_ids");
            assert_eq!(
                *problem,
                Problem::Value {
                    position: Some(vec![batch - 1, 17]),
                    value: Some(wrong),
                    bounds: [0, 30_522],
                }
            );
            let again = model.run("encode", &[&good, &mask]).unwrap();
            assert!(bytes(&again) == bytes(&answer));
        }
    }
}

#[test]
fn a_check_of_what_is_computed_is_an_error_and_the_next_call_right() {
    let model = load(lab(VALUES), "values");
    for batch in [4, 3, 9] {
        let good = full([batch, 64], 0.0_f32);
        let answer = model.run("computed", &[&good]).unwrap();
        // Rows 78 and -3 of 50.
        for wrong in [20.0, -7.0, f32::NAN, f32::INFINITY] {
            let x = with(&good, [batch - 1, 40], wrong);
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

#[test]
fn integers_are_divided_as_in_eager_or_not_at_all() {
    let model = load(lab(VALUES), "values");
    let (a, b) = (full([150, 40], 17_i64), full([150, 40], 8_i64));
    let zero = with(&b, [149, 39], 5_i64);
    let refused = model.run("divided", &[&a, &zero]).unwrap_err();
    assert!(
        refused.to_string().contains("divided by zero")
            || refused.to_string().contains("ZeroDivision"),
        "{refused}"
    );
    let out = model.run("divided", &[&a, &b]).unwrap();
    assert_eq!(
        (
            out.array(0).unwrap().data()[0],
            out.array(1).unwrap().data()[0]
        ),
        (5_i64, 2_i64)
    );
}
