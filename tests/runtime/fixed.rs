//! Sessions: slots that are held from run to run.

use precast::{
    Model,
    record::Sizes,
    runtime::{RuntimeError, Tensor, cuda::Fixed},
};

use crate::{
    fake::{self, Fake, Memory},
    flat, full, x,
};

fn model(instances: usize) -> Model {
    let runtime = Memory::with(&[Fake::sized(2, 2)]).runtime();
    runtime.instances(instances).load("fake").unwrap()
}

fn sizes(batch: i64, seq: i64) -> Sizes {
    Sizes::from([("batch".to_owned(), batch), ("seq".to_owned(), seq)])
}

fn run(fixed: &mut Fixed<'_>, input: &Tensor) -> Vec<f32> {
    fixed.inputs()[0].write(input).unwrap();
    fixed.run().unwrap();
    read(fixed)
}

fn read(fixed: &Fixed<'_>) -> Vec<f32> {
    fixed.outputs()[0].to_vec().unwrap()
}

#[test]
fn two_sessions_and_calls_have_slots_of_their_own() {
    let model = model(2);
    let open = || model.fixed("f", &sizes(2, 2)).unwrap();
    let mut both = [open(), open()];
    let addresses = |fixed: &mut Fixed<'_>| {
        let mut all: Vec<usize> = fixed.inputs().iter().map(|own| own.address()).collect();
        all.extend(fixed.outputs().iter().map(|own| own.address()));
        all
    };
    let before = both.each_mut().map(addresses);
    assert!(before[0].iter().all(|address| !before[1].contains(address)));
    for round in 0..4 {
        let value = round as f32;
        for (fixed, factor) in both.iter_mut().zip([1.0, 10.0]) {
            fixed.inputs()[0]
                .write(&full([2, 2], value * factor))
                .unwrap();
            fixed.run().unwrap();
        }
        let called = model.run("f", &[full([2, 2], -1.0_f32)]).unwrap();
        assert_eq!(flat(&called[0]), [-2.0; 4]);
        assert_eq!(read(&both[0]), [value * 2.0; 4]);
        assert_eq!(read(&both[1]), [value * 20.0; 4]);
    }
    assert_eq!(both.each_mut().map(addresses), before);
}

#[test]
fn sessions_are_bounded_and_keep_no_call_waiting() {
    let model = model(2);
    let open = || model.fixed("f", &sizes(2, 2));
    let mut held = [open().unwrap(), open().unwrap()];
    let refused = open().err().unwrap();
    let busy = matches!(refused, RuntimeError::Busy { slots: 2, .. });
    assert!(busy, "{refused}");
    let out = model.try_run("f", &[x(2, 2)]).unwrap();
    assert_eq!(flat(&out[0]), [0.0, 2.0, 4.0, 6.0]);
    let address = held[0].inputs()[0].address();
    assert_eq!(run(&mut held[0], &x(2, 2)), [0.0, 2.0, 4.0, 6.0]);
    let [first, _second] = held;
    drop(first);
    let mut again = open().unwrap();
    // The slot of the first one, blank.
    assert_eq!(again.inputs()[0].address(), address);
    again.run().unwrap();
    assert_eq!(read(&again), [0.0; 4]);
}

#[test]
fn a_session_keeps_its_weights_over_a_swap() {
    let mut memory = Memory::with(&[Fake::sized(2, 2)]);
    let tuned = memory.put(fake::weights(&[("scale", &[5.0])]));
    let runtime = memory.runtime();
    let model = runtime.load("fake").unwrap();
    let mut fixed = model.fixed("f", &sizes(2, 2)).unwrap();
    model.swap(&runtime.weights(Some(tuned)).unwrap()).unwrap();
    assert_eq!(run(&mut fixed, &x(2, 2)), [0.0, 2.0, 4.0, 6.0]);
    drop(fixed);
    let mut fixed = model.fixed("f", &sizes(2, 2)).unwrap();
    assert_eq!(run(&mut fixed, &x(2, 2)), [0.0, 5.0, 10.0, 15.0]);
}

#[test]
fn a_static_tensor_takes_its_own_sizes_and_dtype_only() {
    let model = model(1);
    for (module, seq, name) in [("f", 3, "NoBucket"), ("g", 2, "NoModule")] {
        let error = model.fixed(module, &sizes(2, seq)).err().unwrap();
        assert_eq!(error.name(), name, "{error}");
    }
    let mut fixed = model.fixed("f", &sizes(2, 2)).unwrap();
    assert!(!fixed.is_graph());
    run(&mut fixed, &x(2, 2));
    for (given, is) in [
        (x(1, 2), "float32 [1, 2]"),
        (full([2, 2], 1_i64), "int64 [2, 2]"),
    ] {
        let error = fixed.inputs()[0].write(&given).unwrap_err().to_string();
        assert_eq!(error, format!("it is {is}, not float32 [2, 2]"));
    }
    fixed.run().unwrap();
    fixed.check().unwrap();
    assert_eq!(read(&fixed), [0.0, 2.0, 4.0, 6.0]);
}
