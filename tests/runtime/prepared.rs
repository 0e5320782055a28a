//! Prepacked weights: the results of recipes, sharing between programs, and errors.

use precast::{
    Model, Runtime, Value,
    record::{Dtype, Operand, Prepared, Recipe},
    runtime::{RuntimeError, Tensor, counters::Rung},
};

use crate::{
    fake::{self, Fake, Memory},
    without_ids,
};

pub fn recipe<const N: usize>(operator: &str, arguments: [(&str, Operand); N]) -> Recipe {
    let arguments = arguments.map(|(name, operand)| (name.to_owned(), operand));
    Recipe {
        operator: operator.to_owned(),
        arguments: arguments.into(),
    }
}

pub fn constant(name: &str) -> Operand {
    Operand::Constant(name.to_owned())
}

/// `scale` times itself, plus a number.
fn square(plus: i64) -> Recipe {
    let product = recipe(
        "aten::mul.Tensor",
        [("self", constant("scale")), ("other", constant("scale"))],
    );
    recipe(
        "aten::add.Scalar",
        [
            ("self", Operand::Call(product)),
            ("other", Operand::Int(plus)),
            ("alpha", Operand::Int(1)),
        ],
    )
}

/// Has artifacts take the result of `call` in the place of `scale`.
pub fn prepacked(memory: Memory, call: &Recipe) -> Memory {
    memory.each_artifact(|artifact| {
        artifact.prepared = vec![Prepared {
            name: "scale".to_owned(),
            dtype: Dtype::Float32,
            shape: vec![1],
            stride: Some(vec![1]),
            call: call.clone(),
        }];
    })
}

/// A weight set with `scale` = 3, and artifacts that take the result of `call` in its place.
fn memory(fakes: &[Fake], call: &Recipe) -> Memory {
    let mut memory = prepacked(Memory::with(fakes), call);
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[3.0])])));
    memory
}

fn load(memory: Memory) -> Result<(Runtime, Model), RuntimeError> {
    let runtime = memory.runtime();
    let model = runtime.load("fake")?;
    Ok((runtime, model))
}

fn answer(model: &Model, rows: usize) -> f64 {
    let x = Value::new(&vec![1.0_f32; rows * 2], &[rows, 2]).unwrap();
    let out = model.run("f", &[x]).unwrap();
    out.array::<f32>(0).unwrap().data()[0].into()
}

#[test]
fn a_recipe_is_followed_for_every_weight_set() {
    let mut memory = memory(&[Fake::sized(2, 2)], &square(1));
    let other = memory.put(fake::weights(&[("scale", &[5.0])]));
    let first = memory.weights;
    let (runtime, model) = load(memory).unwrap();
    assert_eq!(answer(&model, 2), 10.0);
    let set = runtime.weights(Some(other)).unwrap();
    assert_eq!(set.prepared_bytes(), 0);
    model.swap(&set).unwrap();
    assert_eq!(set.prepared_bytes(), 4, "a call would have to make it");
    assert_eq!(answer(&model, 2), 26.0);
    assert_eq!(set.prepared_bytes(), 4);
    model.swap(&runtime.weights(first).unwrap()).unwrap();
    assert_eq!(answer(&model, 2), 10.0);
}

#[test]
fn buckets_that_want_the_same_share_it() {
    let (runtime, model) =
        load(memory(&[Fake::sized(2, 2), Fake::sized(4, 2)], &square(1))).unwrap();
    assert_eq!((answer(&model, 2), answer(&model, 4)), (10.0, 10.0));
    assert_eq!(runtime.weights_of("fake").unwrap().prepared_bytes(), 4);
    // Another number is another recipe.
    let mut memory = memory(&[Fake::sized(2, 2), Fake::sized(4, 2)], &square(1));
    let mut all = memory.artifacts.values_mut();
    let largest = all.find(|artifact| artifact.inputs[0].shape == [4, 2]);
    largest.unwrap().prepared[0].call = square(2);
    let (runtime, model) = load(memory).unwrap();
    assert_eq!((answer(&model, 2), answer(&model, 4)), (10.0, 11.0));
    assert_eq!(runtime.weights_of("fake").unwrap().prepared_bytes(), 8);
}

#[test]
fn a_result_of_a_recipe_is_the_callers_alone() {
    let fake = Fake::sized(1, 1).behaving("RETURNS_WEIGHT");
    let (_runtime, model) = load(memory(&[fake], &square(1))).unwrap();
    let run = || {
        let x = Value::new(&[1.0_f32], &[1, 1]).unwrap();
        model.run("f", &[x]).unwrap()[0].share()
    };
    let mut first = run();
    assert_eq!(first.to_vec::<f32>().unwrap(), [10.0]);
    let seven = Tensor::from_slice(&[7.0_f32], &[1]).unwrap();
    first.copy_from(&seven).unwrap();
    assert_eq!(run().to_vec::<f32>().unwrap(), [10.0]);
}

#[test]
fn a_view_takes_no_memory_of_its_own() {
    let view = recipe("aten::t", [("self", constant("scale"))]);
    let (runtime, model) = load(memory(&[Fake::sized(2, 2)], &view)).unwrap();
    assert_eq!(answer(&model, 2), 3.0);
    assert_eq!(runtime.weights_of("fake").unwrap().prepared_bytes(), 0);
}

#[test]
fn a_constant_that_can_not_be_made_is_an_error_with_its_reason() {
    let message = |call: &Recipe| {
        let error = load(memory(&[Fake::sized(2, 2)], call)).err();
        without_ids(&error.unwrap().to_string())
    };
    let scale = ("self", constant("scale"));
    insta::assert_snapshot!(message(&recipe("aten::pack", [scale.clone()])), @"constant `scale` of artifact `[id]` can't be made of its weights: operator `aten::pack`: no loaded library registers it");
    insta::assert_snapshot!(message(&recipe("lab::pack", [scale.clone()])), @"constant `scale` of artifact `[id]` can't be made of its weights: operator `lab::pack`: a recipe calls only torch's own");
    insta::assert_snapshot!(message(&recipe("aten::zero_", [scale.clone()])), @"constant `scale` of artifact `[id]` can't be made of its weights: operator `aten::zero_`: it writes into what it is given");
    insta::assert_snapshot!(message(&recipe("aten::t", [("self", constant("filter"))])), @"constant `scale` of artifact `[id]` can't be made of its weights: `filter`: the artifact's record does not have it");
    insta::assert_snapshot!(message(&recipe("aten::unsqueeze", [scale.clone(), ("dim", Operand::Int(7))])), @"constant `scale` of artifact `[id]` can't be made of its weights: operator `aten::unsqueeze`: Dimension out of range (expected to be in range of [-2, 1], but got 7)");
    // The artifact was compiled for another layout.
    insta::assert_snapshot!(message(&recipe("aten::unsqueeze", [scale, ("dim", Operand::Int(0))])), @"constant `scale` of artifact `[id]` can't be made of its weights: its recipe does not give float32 [1] in the order it was compiled for");
}

#[test]
fn the_ladder_answers_where_the_host_can_not_make_a_constant() {
    // As oneDNN fails where a process may not make machine code.
    let call = recipe(
        "aten::unsqueeze",
        [("self", constant("scale")), ("dim", Operand::Int(7))],
    );
    let fake = Fake::sized(4, 4).outputs(2);
    let mut memory = memory(std::slice::from_ref(&fake), &call);
    let mut program = memory.programs.values().next().unwrap().clone();
    memory.export(&mut program, &fake);
    memory.programs.insert(program.id, program);
    let (_, model) = load(memory).unwrap();
    let x = Tensor::from_slice(&[1.0_f32; 16], &[4, 4]).unwrap();
    assert_eq!(model.run("f", &[x]).unwrap().served().rung(), Rung::Eager);
    let lost = &model.quarantined()[0].error;
    assert_eq!(lost.name(), "Unprepared", "{lost}");
    assert!(lost.hint().contains("PR_SET_MDWE"), "{}", lost.hint());
}
