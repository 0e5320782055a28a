//! The library with plain arrays as inputs and outputs.

use precast::{RuntimeError, Value, runtime::Tensor};

use crate::{fake::Fake, ok};

fn x(rows: usize, cols: usize) -> Value {
    let data: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
    Value::new(&data, &[rows, cols]).unwrap()
}

#[test]
fn plain_arrays_go_in_and_come_out() {
    let model = ok(&[Fake::sized(2, 4).inputs(2).outputs(2)]);
    let ids = Value::new(&[1_i64, 2, 3, 4, 5, 6], &[2, 3]).unwrap();
    // An output that was cut out of a larger one has its elements in order all the same.
    let out = model.run("f", &[&x(2, 3), &ids]).unwrap();
    let y = out.array::<f32>(0).unwrap();
    assert_eq!(y.shape(), [2, 3]);
    assert_eq!(y.data(), [1.0, 4.0, 7.0, 10.0, 13.0, 16.0]);
    assert_eq!(out.array_named::<f32>("y").unwrap(), y);
    assert_eq!(out.array_named::<f32>("sum").unwrap().shape(), [2]);
    let named = model.run_named("f", &[("ids.0", &ids), ("x", &x(2, 3))]);
    assert_eq!(named.unwrap().array::<f32>(0).unwrap(), y);

    let report = |error: RuntimeError| format!("{error}; {}", error.hint());
    insta::assert_snapshot!(report(out.array::<f32>(2).unwrap_err()), @"module `f` has no output 2; it has y, sum");
    insta::assert_snapshot!(report(out.array_named::<f32>("z").unwrap_err()), @"module `f` has no output `z`; it has y, sum");
    insta::assert_snapshot!(report(out.array::<bool>(1).unwrap_err()), @"output `sum` of module `f` is float32, not bool; ask for elements of float32");
    insta::assert_snapshot!(report(Value::new(&[1.0_f32], &[2, 0]).unwrap_err()), @"an array of shape [2, 0] has 0 elements, got 1; a shape's sizes multiplied are the number of elements");
    // They are checked as tensors are.
    insta::assert_snapshot!(report(model.run("f", &[&ids, &ids]).unwrap_err()), @"module `f`, input `x`: expected dtype float32, got int64; convert it to float32");
    insta::assert_snapshot!(report(model.run("f", &[x(2, 3)]).unwrap_err()), @"module `f` takes 2 inputs (x, ids.0), got 1; pass x, ids.0 in this order");
}

#[test]
fn a_tensor_that_a_call_took_is_copied_for_the_answer_if_somebody_has_it() {
    let model = ok(&[Fake::sized(2, 2).behaving("RETURNS_INPUT")]);
    let made = || Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let same_memory = |given: Tensor| {
        let address = given.address();
        let out = model.run_taking("f", vec![given]).unwrap();
        assert_eq!(out.array::<f32>(0).unwrap().data(), [1.0, 2.0, 3.0, 4.0]);
        out[0].address() == address
    };
    assert!(same_memory(made()));
    let (shared, viewed) = (made(), made());
    let (_handle, _view) = (shared.share(), viewed.narrow(0, 1, 1).unwrap());
    assert!(!same_memory(shared));
    assert!(!same_memory(viewed));
    let error = model.run_taking("f", vec![made(), made()]).unwrap_err();
    insta::assert_snapshot!(error, @"module `f` takes 1 inputs (x), got 2");
}

#[cfg(feature = "ndarray")]
#[test]
fn ndarrays_go_in_and_come_out() {
    use ndarray::{Array2, ArrayD, s};

    let model = ok(&[Fake::sized(2, 3)]);
    let array = Array2::from_shape_fn((3, 2), |(i, j)| (i * 2 + j) as f32);
    for given in [
        Value::try_from(&array.t()),
        Value::try_from(&array.t().as_standard_layout()),
        Value::try_from(&array.slice(s![.., ..]).reversed_axes()),
    ] {
        let out = model.run("f", &[given.unwrap()]).unwrap();
        let y: ArrayD<f32> = out.array::<f32>(0).unwrap().into();
        assert_eq!(y, (&array.t() * 2.0).into_dyn());
    }
}
