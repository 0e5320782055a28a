//! Values that the model refuses: a typed error where eager raises, and the next call right. `tests/runtime_torture`
//! tries thousands of them on what this leaves in the store.

use precast::{
    Device, Model, Runtime, Store,
    runtime::{Outputs, Problem, RuntimeError},
};
use tch::{Kind, Tensor};

use crate::lab::{Lab, lab};

const CPU: tch::Device = tch::Device::Cpu;

/// Returns what is in outputs, bit for bit.
fn bytes(outputs: &Outputs) -> Vec<Vec<u8>> {
    outputs
        .iter()
        .map(|tensor| tensor.to_bytes().unwrap())
        .collect()
}

fn load(lab: &Lab, model: &str) -> Model {
    let store = Store::open(&lab.store).unwrap();
    Runtime::new(&store, Device::Cpu)
        .unwrap()
        .load(model)
        .unwrap()
}

#[test]
fn an_id_beyond_the_vocabulary_is_an_error_that_names_it() {
    let model = load(lab(), "minilm");
    // Exact, and padded.
    for (batch, seq) in [(1, 32), (8, 128), (1, 20), (3, 77)] {
        let mask = Tensor::ones([batch, seq], (Kind::Int64, CPU));
        let good = Tensor::full([batch, seq], 7, (Kind::Int64, CPU));
        let answer = model.run("encode", &[&good, &mask]).unwrap();
        for wrong in [30_522, -5, i64::MIN, i64::MAX] {
            let ids = good.copy();
            let _ = ids.get(batch - 1).get(17).fill_(wrong);
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
    let model = load(lab(), "values");
    for batch in [4, 3, 9] {
        let good = Tensor::zeros([batch, 64], (Kind::Float, CPU));
        let answer = model.run("computed", &[&good]).unwrap();
        // Rows 78 and -3 of 50.
        for wrong in [20.0, -7.0, f64::NAN, f64::INFINITY] {
            let x = good.copy();
            let _ = x.get(batch - 1).get(40).fill_(wrong);
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
    let model = load(lab(), "values");
    let a = Tensor::full([150, 40], 17, (Kind::Int64, CPU));
    let b = Tensor::full([150, 40], 8, (Kind::Int64, CPU));
    let zero = b.copy();
    let _ = zero.get(149).get(39).fill_(5);
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
