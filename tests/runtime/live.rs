//! Weight sets of the caller's own tensors: seen where they are, never copied.

use std::collections::BTreeMap;

use precast::{
    Device, Model, Runtime,
    record::{Dtype, First, Operand},
    runtime::{RuntimeError, Tensor, WeightSet, counters::Rung},
};

use crate::{
    fake::{self, Fake, Memory},
    fill, flat, full,
    prepared::{constant, prepacked, recipe},
    without_ids, x,
};

fn of(tensors: &[(&str, &Tensor)]) -> Result<WeightSet, RuntimeError> {
    let named = tensors
        .iter()
        .map(|(name, tensor)| ((*name).to_owned(), tensor.share()));
    WeightSet::of(named.collect(), Device::Cpu)
}

fn one(value: f32) -> Tensor {
    fake::libtorch();
    Tensor::from_slice(&[value], &[1]).unwrap()
}

fn load(memory: Memory, set: &WeightSet) -> Result<Model, RuntimeError> {
    memory.runtime().load_on("fake", set)
}

fn answer(model: &Model) -> Vec<f32> {
    flat(&model.run("f", &[x(1, 2)]).unwrap()[0])
}

fn message<T>(result: Result<T, RuntimeError>) -> String {
    without_ids(&result.err().unwrap().to_string())
}

#[test]
fn a_change_in_place_is_seen_by_the_next_call() {
    let (scale, shift) = (one(3.0), one(0.5));
    let set = of(&[("scale", &scale), ("shift.0", &shift)]).unwrap();
    let fake = Fake::sized(1, 2).constants(2);
    let model = load(Memory::with(&[fake]), &set).unwrap();
    assert_eq!(answer(&model), [0.5, 3.5]);
    fill(&scale, 4.0);
    fill(&shift, 1.0);
    assert_eq!(answer(&model), [1.0, 5.0]);
    assert_eq!((set.digest(), set.bytes()), (None, 8));
    assert_eq!(set.read("scale").unwrap().to_vec::<f32>().unwrap(), [4.0]);
    // The set keeps the memory, not the caller's handle.
    drop((scale, shift));
    assert_eq!(answer(&model), [1.0, 5.0]);
}

#[test]
fn eager_sees_it_too() {
    let fake = Fake::sized(4, 4).outputs(2);
    let mut memory = Memory::default();
    memory.add_with_graph(&fake);
    let memory = memory.each_program(|program| program.steps.clear());
    let scale = one(1.0);
    let model = load(memory, &of(&[("scale", &scale)]).unwrap()).unwrap();
    let sums = || {
        let answer = model.run("f", &[full([4, 4], 1.0_f32)]).unwrap();
        assert_eq!(answer.served().rung(), Rung::Eager);
        flat(&answer[1])
    };
    assert_eq!(sums(), [4.0; 4]);
    fill(&scale, 2.0);
    assert_eq!(sums(), [8.0; 4]);
}

#[test]
fn a_part_of_a_larger_tensor_is_read_where_it_is() {
    fake::libtorch();
    let flat = Tensor::from_slice(&[1.0_f32, 2.0, 3.0], &[3]).unwrap();
    let set = of(&[("scale", &flat.narrow(0, 1, 1).unwrap())]).unwrap();
    let model = load(Memory::with(&[Fake::sized(1, 2)]), &set).unwrap();
    assert_eq!(answer(&model), [0.0, 2.0]);
    fill(&flat, 5.0);
    assert_eq!(answer(&model), [0.0, 5.0]);
    assert_eq!(set.bytes(), 12);
}

#[test]
fn an_output_in_the_memory_of_a_tensor_is_copied() {
    let fake = Fake::sized(1, 1).behaving("RETURNS_WEIGHT");
    // Storages on both sides of it, and one that two tensors share.
    let table = Tensor::from_slice(&[7.0_f32; 64], &[64]).unwrap();
    let others: Vec<Tensor> = (0..8).map(|_| one(0.0)).collect();
    let names: Vec<String> = (0..8).map(|i| format!("other.{i}")).collect();
    let [first, last] = [0, 63].map(|at| table.narrow(0, at, 1).unwrap());
    let mut tensors: Vec<(&str, &Tensor)> = names.iter().map(String::as_str).zip(&others).collect();
    tensors.extend([("first", &first), ("scale", &last)]);
    let model = load(Memory::with(&[fake]), &of(&tensors).unwrap()).unwrap();
    let out = model.run("f", &[x(1, 1)]).unwrap()[0].share();
    fill(&out, 0.0);
    assert_eq!(flat(&table), [7.0; 64]);
}

#[test]
fn a_tied_tensor_is_found_under_each_of_its_names() {
    for name in ["scale", "head", "tail"] {
        let mut memory = Memory::with(&[Fake::sized(1, 2)]);
        let pair = |alias: &str| (alias.to_owned(), "scale".to_owned());
        memory.aliases = BTreeMap::from([pair("head"), pair("tail")]);
        let model = load(memory, &of(&[(name, &one(3.0))]).unwrap()).unwrap();
        assert_eq!(answer(&model), [0.0, 3.0], "{name}");
    }
}

#[test]
fn the_first_value_of_a_state_is_read_when_a_session_begins() {
    let memory = Memory::with(&[Fake::sized(1, 2).stateful()]);
    let memory =
        memory.each_program(|program| program.states[0].first = First::Tensor("total".to_owned()));
    let total = x(1, 2);
    let tensors = [("scale", &one(1.0)), ("total", &total)];
    let model = load(memory, &of(&tensors).unwrap()).unwrap();
    let first = |session: &mut precast::runtime::Session<'_>| {
        flat(&session.run("f", &[full([1, 2], 0.0_f32)]).unwrap()[0])
    };
    let mut session = model.session().unwrap();
    assert_eq!(first(&mut session), [0.0, 1.0]);
    fill(&total, 9.0);
    assert_eq!(first(&mut session), [0.0, 1.0]);
    session.reset();
    assert_eq!(first(&mut session), [9.0, 9.0]);
}

#[test]
fn a_swap_goes_to_another_set_and_back() {
    let mut memory = Memory::with(&[Fake::sized(1, 2)]);
    let stored = memory.weights;
    let tuned = memory.put(fake::weights(&[("scale", &[5.0])]));
    let runtime = memory.runtime();
    let (first, second) = (one(3.0), one(4.0));
    let set = of(&[("scale", &first)]).unwrap();
    let model = runtime.load_on("fake", &set).unwrap();
    assert_eq!(answer(&model), [0.0, 3.0]);
    model.swap(&of(&[("scale", &second)]).unwrap()).unwrap();
    fill(&first, 0.0);
    assert_eq!(answer(&model), [0.0, 4.0]);
    model.swap(&runtime.weights(Some(tuned)).unwrap()).unwrap();
    let state = || (answer(&model), model.weights());
    assert_eq!(state(), (vec![0.0, 5.0], Some(tuned)));
    model.swap(&set).unwrap();
    assert_eq!(state(), (vec![0.0, 0.0], None));
    model.swap(&runtime.weights(stored).unwrap()).unwrap();
    assert_eq!(answer(&model), [0.0, 2.0]);
}

#[test]
fn a_prepacked_constant_is_refused_by_name() {
    let scale = Operand::Tensors(vec![constant("scale")]);
    let call = recipe("aten::cat", [("tensors", scale), ("dim", Operand::Int(0))]);
    let fake = Fake::sized(4, 4).outputs(2);
    let mut memory = Memory::default();
    // Eager, which could answer, does not hide it.
    memory.add_with_graph(&fake);
    let runtime = prepacked(memory, &call).runtime();
    let stored = runtime.load("fake").unwrap();
    let set = of(&[("scale", &one(3.0))]).unwrap();
    for result in [runtime.load_on("fake", &set).map(drop), stored.swap(&set)] {
        let hint = result.as_ref().unwrap_err().hint();
        assert!(hint.contains("freezing = false"), "{hint}");
        insta::allow_duplicates! {
            insta::assert_snapshot!(message(result), @"constant `scale` of artifact `[id]` is computed from weights, and would not follow the caller's tensors");
        }
    }
    assert_eq!(set.prepared_bytes(), 0);
    let ones = full([4, 4], 1.0_f32);
    assert_eq!(flat(&stored.run("f", &[ones]).unwrap()[1]), [8.0; 4]);
}

#[test]
fn a_tensor_that_an_artifact_can_not_read_as_it_is_is_refused_by_name() {
    fake::libtorch();
    let elements = |n: i64| Memory::with(&[Fake::sized(1, 2).elements(n)]);
    let table = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let refused = |memory: Memory, tensors: &[(&str, &Tensor)]| {
        message(of(tensors).and_then(|set| load(memory, &set)))
    };
    insta::assert_snapshot!(refused(elements(1), &[("scales", &one(1.0))]), @"constant `scale` of artifact `[id]` is not bound: the weight set has no tensor `scale`");
    insta::assert_snapshot!(refused(elements(1), &[("scale", &one(1.0).to_dtype(Dtype::Float64).unwrap())]), @"constant `scale` of artifact `[id]` is not bound: it is float32 [1], and `scale` in the weight set is float64 [1]");
    insta::assert_snapshot!(refused(elements(2), &[("scale", &one(1.0))]), @"constant `scale` of artifact `[id]` is not bound: it is float32 [2], and `scale` in the weight set is float32 [1]");
    let column = table.view(&[2], &[2], 0).unwrap();
    insta::assert_snapshot!(refused(elements(2), &[("scale", &column)]), @"constant `scale` of artifact `[id]` is not bound: it has strides [1], and the caller's `scale` has [2]");
    let row = table.view(&[2], &[1], 2).unwrap();
    let model = load(elements(2), &of(&[("scale", &row)]).unwrap()).unwrap();
    assert_eq!(answer(&model), [0.0, 3.0]);
}

#[test]
fn a_set_is_on_the_device_of_its_tensors() {
    let scale = one(1.0);
    let tensors = || BTreeMap::from([("scale".to_owned(), scale.share())]);
    let on_gpu = WeightSet::of(tensors(), Device::Cuda(0));
    insta::assert_snapshot!(message(on_gpu), @"tensor `scale` can't be bound as a weight: it is on `cpu`, and the weight set on `cuda:0`");
    let empty = WeightSet::of(BTreeMap::new(), Device::Cuda(0)).unwrap();
    insta::assert_snapshot!(message(load(Memory::with(&[Fake::sized(1, 2)]), &empty)), @"device `cpu` is not usable: the weight set has no tensors on it");
    // A model without constants needs none.
    let none = WeightSet::of(BTreeMap::new(), Device::Cpu).unwrap();
    let model = load(Memory::with(&[Fake::sized(1, 2).constants(0)]), &none).unwrap();
    assert_eq!(answer(&model), [0.0, 1.0]);
    // All replicas of one device read it.
    let memory = Memory::with(&[Fake::sized(1, 2)]);
    let runtime = Runtime::over(memory.source(), [Device::Cpu, Device::Cpu]).unwrap();
    let set = WeightSet::of(tensors(), Device::Cpu).unwrap();
    let model = runtime.load_on("fake", &set).unwrap();
    fill(&scale, 6.0);
    assert_eq!([answer(&model), answer(&model)], [[0.0, 6.0]; 2]);
}
