//! Other weights on the same artifacts.

use precast::Model;

use crate::{
    fake::{self, Fake, Memory},
    flat, x,
};

fn answer(model: &Model) -> Vec<f32> {
    flat(&model.run("f", &[x(2, 2)]).unwrap()[0])
}

#[test]
fn a_weight_set_that_does_not_fit_changes_nothing() {
    let mut memory = Memory::with(&[Fake::sized(2, 2)]);
    let other = memory.put(fake::weights(&[("scale", &[1.0, 2.0])]));
    let runtime = memory.runtime();
    let model = runtime.load("fake").unwrap();
    let other = runtime.weights(Some(other)).unwrap();
    assert_eq!(model.swap(&other).unwrap_err().name(), "Unbound");
    assert_eq!(answer(&model), [0.0, 2.0, 4.0, 6.0]);
}

#[test]
fn one_weight_set_serves_several_models_and_is_freed_with_the_last() {
    let mut memory = Memory::with(&[Fake::sized(2, 2)]);
    let tuned = memory.put(fake::weights(&[("scale", &[5.0])]));
    let runtime = memory.runtime();
    let base = runtime.load("fake").unwrap();
    let tuned = runtime.weights(Some(tuned)).unwrap();
    let fine = runtime.load_on("fake", &tuned).unwrap();
    assert_eq!(answer(&base), [0.0, 2.0, 4.0, 6.0]);
    assert_eq!(answer(&fine), [0.0, 5.0, 10.0, 15.0]);
    drop((runtime, tuned, fine));
    assert_eq!(answer(&base), [0.0, 2.0, 4.0, 6.0]);
}
