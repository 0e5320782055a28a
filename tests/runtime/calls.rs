//! Answers of calls, and refusals.

use precast::{
    record::{Check, Dtype, Padding},
    runtime::{
        Inputs, RuntimeError, Tensor,
        counters::Rung,
        errors::{NoFit, Problem},
    },
};

use crate::{
    fake::{Fake, Memory},
    flat, full, load, map, ok, tensor, twice, x,
};

#[test]
fn an_exact_bucket_answers_with_the_weights_applied() {
    let model = ok(&[Fake::sized(2, 3).constants(3).outputs(2)]);
    let out = model.run("f", &[x(2, 3)]).unwrap();
    // x * 2 + (1 + 2)
    assert_eq!(flat(&out[0]), [3.0, 5.0, 7.0, 9.0, 11.0, 13.0]);
    assert_eq!(flat(&out[1]), [15.0, 33.0]);
    assert_eq!(out.served().rung(), Rung::Exact);
    let names: Vec<&str> = out.named().map(|(name, _)| name).collect();
    assert_eq!(names, ["y", "sum"]);
}

#[test]
fn a_smaller_request_is_padded_and_cut_back() {
    let model = ok(&[
        Fake::sized(8, 4),
        Fake::sized(4, 8).outputs(2),
        Fake::sized(1, 4),
    ]);
    for (rows, cols) in [(3, 3), (1, 1), (8, 2), (2, 8), (1, 4), (8, 4)] {
        let input = x(rows, cols);
        let out = model.run("f", &[input.share()]).unwrap();
        assert_eq!(out[0].shape(), [rows, cols]);
        assert_eq!(flat(&out[0]), flat(&twice(&input)), "{rows}x{cols}");
    }
    let out = model.run("f", &[x(3, 3)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Padded);
    let request = [("batch".to_owned(), 3), ("seq".to_owned(), 3)].into();
    assert_eq!(out.served().request(), request);
}

#[test]
fn several_inputs_by_name_in_any_order() {
    let model = ok(&[Fake::sized(2, 2).inputs(3)]);
    let ids = tensor(&[10_i64, 20, 30, 40], [2, 2]);
    let more = full([2, 2], 1_i64);
    let out = model.run_named("f", &[("ids.1", &more), ("x", &x(2, 2)), ("ids.0", &ids)]);
    assert_eq!(flat(&out.unwrap()[0]), [11.0, 23.0, 35.0, 47.0]);
    let out = model.run_named("f", &[("x", &x(2, 2)), ("ids.0", &ids), ("mask", &more)]);
    let error = out.unwrap_err();
    insta::assert_snapshot!(error.to_string(), @"module `f` has no variant with the inputs `x`, `ids.0`, `mask`");
    insta::assert_snapshot!(error.hint(), @"it takes x, ids.0, ids.1");
    let error = model.run("f", &[x(2, 2)]).unwrap_err();
    insta::assert_snapshot!(error.to_string(), @"module `f` takes 3 inputs (x, ids.0, ids.1), got 1");
}

#[test]
fn a_bad_input_is_refused_by_name_before_anything_runs() {
    // It would throw if it ran.
    let model = ok(&[Fake::of("THROWS")]);
    let told = |input: Tensor| model.run("f", &[input]).unwrap_err().to_string();
    insta::assert_snapshot!(told(x(4, 8).transpose(0, 1).unwrap()), @"module `f`, input `x`: expected strides [4, 1], got [1, 8]");
    // A list without elements has the dtype that its library gives such a list.
    let none = full([8, 0], 0.0_f32).to_dtype(Dtype::Float64).unwrap();
    insta::assert_snapshot!(told(none), @"module `f`, input `x`: axis 1 (`seq`) has size 0");
    let flat = x(1, 4).view(&[0], &[1], 0).unwrap();
    let flat = flat.to_dtype(Dtype::Float64).unwrap();
    insta::assert_snapshot!(told(flat), @"module `f`, input `x`: expected 2 dimensions, got 1");
    insta::assert_snapshot!(told(x(9, 5)), @"module `f` has no bucket for batch=9 seq=5; it has batch=8 seq=4");
    let error = model.run("g", &[x(8, 4)]).unwrap_err();
    insta::assert_snapshot!(format!("{error}; {}", error.hint()), @"model `fake` has no module `g`; did you mean `f`?");
}

#[test]
fn copies_are_made_only_where_they_are_allowed() {
    let memory = || Memory::with(&[Fake::sized(2, 3)]);
    let turned = x(3, 2).transpose(0, 1).unwrap();
    let error = memory().load().run("f", &[turned.share()]).unwrap_err();
    let RuntimeError::BadInput { problem, .. } = error else {
        panic!("{error}");
    };
    assert!(matches!(problem, Problem::Strides { .. }));
    let lenient = memory().runtime().inputs(Inputs::MayCopy);
    let lenient = lenient.load("fake").unwrap();
    // A view of three numbers that says it is larger than any memory: it is not copied to be refused.
    let huge = x(1, 3).view(&[1 << 50, 3], &[0, 1], 0).unwrap();
    let error = lenient.run("f", &[huge]).unwrap_err();
    assert_eq!(error.name(), "NoBucket", "{error}");
    let out = lenient.run("f", &[turned.share()]).unwrap();
    assert_eq!(flat(&out[0]), flat(&twice(&turned)));
}

#[test]
fn padding_that_is_refused_is_an_error_that_says_so() {
    let memory = Memory::with(&[Fake::sized(4, 4)]).each_program(|program| {
        program.padding = Padding::Refused {
            padded: vec![],
            why: "row 0 changes".into(),
        };
    });
    let model = memory.load();
    let out = model.run("f", &[x(4, 4)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Exact);
    let error = model.run("f", &[x(3, 4)]).unwrap_err();
    let RuntimeError::NoBucket { why, .. } = &error else {
        panic!("{error}");
    };
    assert!(matches!(why, NoFit::PaddingRefused));
    insta::assert_snapshot!(error.hint(), @"batch=4 seq=4 covers it, and its record says why it can't be padded into");
}

#[test]
fn a_failure_in_an_artifact_is_an_error_with_its_message() {
    let told = |behaviour| {
        let failed = ok(&[Fake::of(behaviour)]).run("f", &[x(8, 4)]);
        failed.unwrap_err().to_string()
    };
    insta::assert_snapshot!(told("THROWS"), @"module `f` at batch=8 seq=4, step `whole`: thrown through the C ABI");
    insta::assert_snapshot!(told("FAILS"), @"module `f` at batch=8 seq=4, step `whole`: refused by the fake");
    insta::assert_snapshot!(told("FAILS_HALF"), @"module `f` at batch=8 seq=4, step `whole`: gave up half way");
    insta::assert_snapshot!(told("NO_OUTPUT"), @"module `f` at batch=8 seq=4, step `whole`: output 0 was not written");
    insta::assert_snapshot!(told("BAD_SHAPE"), @"module `f` at batch=8 seq=4: output 0 is float32 [8, 5], its record says float32 [8, 4]");
    insta::assert_snapshot!(told("BAD_DTYPE"), @"module `f` at batch=8 seq=4: output 0 is int64 [8, 4], its record says float32 [8, 4]");
}

/// A program whose second output, the sum of each row, is the outcome of a check: rows whose sum is not 0 fail it.
fn checked(fake: &Fake) -> Memory {
    Memory::with(std::slice::from_ref(fake)).each_program(|program| {
        program.outputs.truncate(1);
        program.checks.push(Check {
            value: program.results.split_off(1)[0],
            text: "every row comes to 0".to_owned(),
            location: Some("model.py:7".to_owned()),
            input: None,
        });
    })
}

#[test]
fn a_failed_check_is_an_error_of_its_call_alone() {
    let fake = Fake::sized(2, 3).outputs(2);
    let model = load(checked(&fake)).unwrap();
    for rows in [2, 1] {
        for _ in 0..3 {
            let out = model.run("f", &[full([rows, 3], 0.0_f32)]).unwrap();
            assert_eq!(out.len(), 1);
            out.check().unwrap();
            let error = model.run("f", &[full([rows, 3], 1.0_f32)]).unwrap_err();
            assert_eq!(error.name(), "CheckFailed");
            let said =
                "module `f` at batch=2 seq=3: the check `every row comes to 0 (model.py:7)` failed";
            assert_eq!(error.to_string(), said);
        }
    }
}

#[test]
fn an_outcome_that_no_step_writes_is_malformed() {
    let fake = Fake::sized(2, 3).outputs(2);
    let memory = checked(&fake).each_program(|program| program.checks[0].value = 7);
    let error = load(memory).unwrap_err();
    assert!(error.to_string().contains("7"), "{error}");
}

#[test]
fn a_value_out_of_bounds_is_refused_by_name_and_the_next_call_is_answered() {
    let memory = Memory::with(&[Fake::sized(4, 6).inputs(2)]);
    let memory = memory.each_program(|program| program.inputs[1].bounds = Some([0, 50]));
    let model = memory
        .runtime()
        .inputs(Inputs::MayCopy)
        .load("fake")
        .unwrap();
    for (rows, cols) in [(4, 6), (3, 5)] {
        for wrong in [50, -1, i64::MIN, i64::MAX] {
            let ids = full([rows, cols], 49_i64);
            let mut values: Vec<i64> = ids.to_vec().unwrap();
            values[((rows - 1) * cols + 2) as usize] = wrong;
            let plain = tensor(&values, [rows, cols]);
            // A kernel would get a copy of it; the check looks at the caller's tensor.
            let turn = |tensor: &Tensor| tensor.transpose(0, 1).unwrap();
            let turned = turn(&turn(&plain).contiguous().unwrap());
            for bad in [plain, turned] {
                let refused = model.run("f", &[x(rows, cols), bad]).unwrap_err();
                let RuntimeError::BadInput { input, problem, .. } = refused else {
                    panic!("{refused:?}");
                };
                let expected = Problem::Value {
                    position: Some(vec![rows - 1, 2]),
                    value: Some(wrong),
                    bounds: [0, 50],
                };
                assert_eq!((&*input, problem), ("ids.0", expected));
            }
            let out = model.run("f", &[x(rows, cols), ids]).unwrap();
            let wanted = map(&x(rows, cols), |value| value * 2.0 + 49.0);
            assert_eq!(flat(&out[0]), flat(&wanted));
        }
    }
}
