//! The runtime against fake artifacts: what loads, what is refused, what a call answers.
#![cfg(feature = "torch")]

mod fake;

use std::sync::Arc;

use fake::{Fake, Memory};
use precast::{
    Device, Model, Runtime,
    record::Padding,
    runtime::{Inputs, NoFit, Problem, Rung, RuntimeError},
};
use tch::{Kind, Tensor};

fn load(memory: Memory) -> Result<Model, RuntimeError> {
    Runtime::over(memory.source(), Device::Cpu)?.load("fake")
}

fn ok(fakes: &[Fake]) -> Model {
    load(Memory::with(fakes)).unwrap()
}

fn x(rows: i64, cols: i64) -> Tensor {
    Tensor::arange(rows * cols, (Kind::Float, tch::Device::Cpu)).reshape([rows, cols])
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    Vec::<f32>::try_from(tensor.contiguous().view(-1)).unwrap()
}

#[test]
fn an_exact_bucket_answers_with_the_weights_applied() {
    let model = ok(&[Fake {
        constants: 3,
        outputs: 2,
        ..Fake::sized(2, 3)
    }]);
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
        Fake {
            outputs: 2,
            ..Fake::sized(4, 8)
        },
        Fake::sized(1, 4),
    ]);
    for (rows, cols) in [(3, 3), (1, 1), (8, 2), (2, 8), (1, 4), (8, 4)] {
        let input = x(rows, cols);
        let Ok(out) = model.run("f", &[input.shallow_clone()]) else {
            panic!("{rows}x{cols}")
        };
        assert_eq!(out[0].size(), [rows, cols]);
        assert_eq!(flat(&out[0]), flat(&(input * 2)), "{rows}x{cols}");
    }
    let out = model.run("f", &[x(3, 3)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Padded);
    assert_eq!(
        out.served().request(),
        [("batch".to_owned(), 3), ("seq".to_owned(), 3)].into()
    );
}

#[test]
fn nothing_of_an_earlier_call_is_left_in_a_padding_buffer() {
    let model = ok(&[Fake {
        outputs: 2,
        ..Fake::sized(4, 4)
    }]);
    let poison = Tensor::full([3, 3], f64::NAN, (Kind::Float, tch::Device::Cpu));
    for (rows, cols) in [(1, 1), (2, 3), (3, 1)] {
        model.run("f", &[poison.shallow_clone()]).unwrap();
        let out = model.run("f", &[x(rows, cols)]).unwrap();
        // The row sums see the padded columns, so a NaN left there would show.
        assert!(
            flat(&out[1]).iter().all(|sum| sum.is_finite()),
            "{rows}x{cols}"
        );
    }
}

#[test]
fn several_inputs_by_name_in_any_order() {
    let model = ok(&[Fake {
        inputs: 3,
        ..Fake::sized(2, 2)
    }]);
    let ids = Tensor::from_slice(&[10i64, 20, 30, 40]).view((2, 2));
    let more = Tensor::ones_like(&ids);
    let out = model
        .run_named("f", &[("ids.1", &more), ("x", &x(2, 2)), ("ids.0", &ids)])
        .unwrap();
    assert_eq!(flat(&out[0]), [11.0, 23.0, 35.0, 47.0]);
    let error = model
        .run_named("f", &[("x", &x(2, 2)), ("ids.0", &ids), ("mask", &more)])
        .unwrap_err();
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
    insta::assert_snapshot!(told(Tensor::new()), @"module `f`, input `x`: expected a tensor, got an undefined one");
    insta::assert_snapshot!(told(x(8, 4).to_kind(Kind::Double)), @"module `f`, input `x`: expected dtype float32, got float64");
    insta::assert_snapshot!(told(x(8, 4).to_kind(Kind::ComplexFloat)), @"module `f`, input `x`: expected dtype float32, got a dtype no artifact takes (torch's number 9)");
    insta::assert_snapshot!(told(x(8, 4).reshape([8, 2, 2])), @"module `f`, input `x`: expected 2 dimensions, got 3");
    insta::assert_snapshot!(told(x(4, 8).transpose(0, 1)), @"module `f`, input `x`: expected strides [4, 1], got [1, 8]");
    insta::assert_snapshot!(told(Tensor::zeros([0, 4], (Kind::Float, tch::Device::Cpu))), @"module `f`, input `x`: axis 0 (`batch`) has size 0");
    insta::assert_snapshot!(told(x(8, 4).to_sparse_sparse_dim(2)), @"module `f`, input `x`: expected a dense tensor, got a sparse, quantised, nested or wrapped one");
    insta::assert_snapshot!(told(x(9, 5)), @"module `f` has no bucket for batch=9 seq=5; it has batch=8 seq=4");
    insta::assert_snapshot!(told(x(1, 4).expand([8, 4], false)), @"module `f`, input `x`: expected strides [4, 1], got [0, 1]");
    insta::assert_snapshot!(told(Tensor::zeros([8, 4], (Kind::ComplexFloat, tch::Device::Cpu)).conj().imag()), @"module `f`, input `x`: expected plain memory, got a tensor with a pending negation or conjugation");
    let error = model.run("g", &[x(8, 4)]).unwrap_err();
    insta::assert_snapshot!(format!("{error}; {}", error.hint()), @"model `fake` has no module `g`; did you mean `f`?");
}

#[test]
fn inputs_must_agree_on_a_dimension() {
    let model = ok(&[Fake {
        inputs: 2,
        ..Fake::sized(4, 4)
    }]);
    let error = model
        .run(
            "f",
            &[
                x(2, 3),
                Tensor::zeros([2, 4], (Kind::Int64, tch::Device::Cpu)),
            ],
        )
        .unwrap_err();
    insta::assert_snapshot!(error.to_string(), @"module `f`, input `ids.0`: axis 1 says `seq` is 4, an earlier one says 3");
}

#[test]
fn copies_are_made_only_where_they_are_allowed() {
    let source = || Memory::with(&[Fake::sized(2, 3)]).source();
    let turned = x(3, 2).transpose(0, 1);
    let strict = Runtime::over(source(), Device::Cpu)
        .unwrap()
        .load("fake")
        .unwrap();
    let error = strict.run("f", &[turned.shallow_clone()]).unwrap_err();
    assert!(matches!(
        error,
        RuntimeError::BadInput {
            problem: Problem::Strides { .. },
            ..
        }
    ));
    let lenient = Runtime::over(source(), Device::Cpu)
        .unwrap()
        .inputs(Inputs::MayCopy)
        .load("fake")
        .unwrap();
    // A view of three numbers that says it is larger than any memory: it is not copied to be refused.
    let huge = x(1, 3).expand([1 << 50, 3], false);
    let error = lenient.run("f", &[huge]).unwrap_err();
    assert!(matches!(error, RuntimeError::NoBucket { .. }), "{error}");
    assert_eq!(
        flat(&lenient.run("f", &[turned.shallow_clone()]).unwrap()[0]),
        flat(&(turned * 2))
    );
}

#[test]
fn padding_that_is_refused_is_an_error_that_says_so() {
    let mut memory = Memory::with(&[Fake::sized(4, 4)]);
    for program in memory.programs.values_mut() {
        program.padding = Padding::Refused {
            why: "row 0 changes".into(),
        };
    }
    let model = load(memory).unwrap();
    assert_eq!(
        model.run("f", &[x(4, 4)]).unwrap().served().rung(),
        Rung::Exact
    );
    let error = model.run("f", &[x(3, 4)]).unwrap_err();
    assert!(matches!(
        error,
        RuntimeError::NoBucket {
            why: NoFit::PaddingRefused,
            ..
        }
    ));
    insta::assert_snapshot!(error.hint(), @"batch=4 seq=4 covers it, and its record says why it can't be padded into");
}

#[test]
fn what_goes_wrong_in_an_artifact_is_an_error_with_its_own_words() {
    let told = |behaviour| {
        ok(&[Fake::of(behaviour)])
            .run("f", &[x(8, 4)])
            .unwrap_err()
            .to_string()
    };
    insta::assert_snapshot!(told("THROWS"), @"module `f` at batch=8 seq=4, step `whole`: thrown through the C ABI");
    insta::assert_snapshot!(told("FAILS"), @"module `f` at batch=8 seq=4, step `whole`: refused by the fake");
    insta::assert_snapshot!(told("FAILS_HALF"), @"module `f` at batch=8 seq=4, step `whole`: gave up half way");
    insta::assert_snapshot!(told("NO_OUTPUT"), @"module `f` at batch=8 seq=4, step `whole`: output 0 was not written");
    insta::assert_snapshot!(told("BAD_SHAPE"), @"module `f` at batch=8 seq=4: output 0 is float32 [8, 5], its record says float32 [8, 4]");
    insta::assert_snapshot!(told("BAD_DTYPE"), @"module `f` at batch=8 seq=4: output 0 is int64 [8, 4], its record says float32 [8, 4]");
}

#[test]
fn what_does_not_load_is_an_error_with_its_name() {
    let told = |memory: Memory| {
        let text = load(memory).unwrap_err().to_string();
        regex_lite(&text)
    };
    insta::assert_snapshot!(told(Memory::with(&[Fake::of("NO_SYMBOL")])), @"object `[id]` lacks the function `AOTInductorModelContainerGetNumInputs`");
    insta::assert_snapshot!(told(Memory::with(&[Fake::of("NO_CONTAINER")])), @"artifact `[id]` gives no container: the fake has no container");

    let mut memory = Memory::with(&[Fake {
        salt: 1,
        ..Fake::default()
    }]);
    let program = memory.programs.values().next().unwrap().clone();
    let object = memory.artifacts[&program.steps[0].artifact].object;
    memory.objects.get_mut(&object).unwrap()[5000] ^= 1;
    insta::assert_snapshot!(told(memory), @"object `[id]` has other bytes: they hash to `[id]`");

    let mut memory = Memory::default();
    memory.add("f", &Fake::default());
    let text = memory.put(b"not a shared object".to_vec());
    memory
        .artifacts
        .values_mut()
        .for_each(|artifact| artifact.object = text);
    insta::assert_snapshot!(told(memory), @"object `[id]` is not loadable: it is no shared object: Invalid ELF header size or alignment");

    let mut memory = Memory::with(&[Fake {
        constants: 2,
        ..Fake::default()
    }]);
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[2.0])])));
    insta::assert_snapshot!(told(memory), @"constant `shift.0` of artifact `[id]` is not bound: the weight set has no tensor `shift.0`");

    let mut memory = Memory::with(&[Fake::default()]);
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[2.0, 3.0])])));
    insta::assert_snapshot!(told(memory), @"constant `scale` of artifact `[id]` is not bound: it is float32 [1], and `scale` in the weight set is float32 [2]");

    let mut memory = Memory::with(&[Fake::default()]);
    memory
        .programs
        .values_mut()
        .for_each(|program| program.steps[0].binding.clear());
    insta::assert_snapshot!(told(memory), @"constant `scale` of artifact `[id]` is not bound: the program's binding does not name it");

    let mut memory = Memory::with(&[Fake::default()]);
    memory.artifacts.values_mut().for_each(|artifact| {
        artifact
            .outputs
            .push(fake::layout(precast::record::Dtype::Float32, &[1]))
    });
    insta::assert_snapshot!(told(memory), @"program `[id]` is malformed: step `whole` has other numbers of inputs or outputs than its artifact");

    let mut memory = Memory::with(&[Fake::default()]);
    memory
        .programs
        .values_mut()
        .for_each(|program| program.results = vec![7]);
    insta::assert_snapshot!(told(memory), @"program `[id]` is malformed: result 7 is never written");
}

/// Replaces 12-digit ids.
fn regex_lite(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').collect();
    let id = |part: &&str| part.len() == 12 && part.bytes().all(|b| b.is_ascii_hexdigit());
    parts
        .iter()
        .map(|part| if id(part) { "[id]" } else { part })
        .collect::<Vec<_>>()
        .join("`")
}

#[test]
fn another_device_kind_is_refused_before_the_object_is_read() {
    let mut memory = Memory::with(&[Fake::default()]);
    memory.objects.clear();
    memory.weights = None;
    memory
        .programs
        .values_mut()
        .for_each(|program| program.target.device = precast::target::DeviceKind::Cuda);
    let error = load(memory).unwrap_err();
    assert!(matches!(error, RuntimeError::WrongTarget { .. }), "{error}");
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    for device in [Device::Cuda(99), Device::Cuda(usize::MAX)] {
        let error = Runtime::over(Memory::default().source(), device)
            .err()
            .unwrap();
        assert!(matches!(error, RuntimeError::NoDevice { .. }), "{error}");
    }
    assert!(matches!(
        Runtime::over(Memory::default().source(), vec![]),
        Err(RuntimeError::Devices)
    ));
    // Before a device is looked for.
    let twice = [Device::Cuda(0), Device::Cpu, Device::Cuda(0)];
    let twice = Runtime::over(Memory::default().source(), twice);
    assert!(matches!(twice, Err(RuntimeError::Devices)));
}

#[test]
fn outputs_are_the_callers_alone() {
    for fake in [
        Fake::of("RETURNS_INPUT"),
        Fake {
            rows: 1,
            cols: 1,
            ..Fake::of("RETURNS_WEIGHT")
        },
    ] {
        let model = ok(std::slice::from_ref(&fake));
        let input = x(fake.rows, fake.cols) + 1;
        let first = model.run("f", &[input.shallow_clone()]).unwrap();
        let before = flat(&first[0]);
        let _ = first[0].shallow_clone().fill_(7);
        let second = model.run("f", &[input.shallow_clone()]).unwrap();
        assert_eq!(flat(&second[0]), before, "{}", fake.behaviour);
        assert!(
            flat(&input)
                .iter()
                .all(|&value| value != 7.0 || before.contains(&7.0))
        );
    }
}

#[test]
fn steps_pass_values_and_aliases_find_tied_weights() {
    let mut memory = Memory::default();
    let fake = Fake::sized(2, 2);
    let mut program = memory.add("f", &fake);
    memory.programs.clear();
    // (x * a) * b, where `b` is tied to `a` under another name; and the first value again as an output.
    let mut step = program.steps[0].clone();
    program.steps[0].binding.insert("scale".into(), "a".into());
    step.binding.insert("scale".into(), "b".into());
    (step.inputs, step.outputs) = (vec![1], vec![2]);
    program.steps.push(step);
    (program.values, program.results) = (3, vec![2, 1, 2]);
    program.outputs = vec![program.outputs[0].clone(); 3];
    memory.programs.insert(program.id, program);
    memory.weights = Some(memory.put(fake::weights(&[("a", &[3.0])])));
    memory.aliases.insert("b".into(), "a".into());
    let model = load(memory).unwrap();
    let out = model.run("f", &[x(2, 2)]).unwrap();
    assert_eq!(flat(&out[0]), [0.0, 9.0, 18.0, 27.0]);
    assert_eq!(flat(&out[1]), [0.0, 3.0, 6.0, 9.0]);
    assert_eq!(flat(&out[2]), flat(&out[0]));
}

#[test]
fn a_failing_caller_never_harms_another() {
    let source = Memory::with(&[Fake {
        constants: 1,
        ..Fake::of("FAILS_BELOW")
    }])
    .source();
    let model = Arc::new(
        Runtime::over(source, Device::Cpu)
            .unwrap()
            .instances(2)
            .load("fake")
            .unwrap(),
    );
    let threads: Vec<_> = (0..8)
        .map(|thread| {
            let model = model.clone();
            std::thread::spawn(move || {
                let good = x(8, 4);
                let wanted = flat(&(&good * 2));
                let bad = &good - 1;
                for round in 0..500 {
                    match (thread + round) % 2 {
                        0 => assert_eq!(
                            flat(&model.run("f", &[good.shallow_clone()]).unwrap()[0]),
                            wanted
                        ),
                        _ => {
                            let error = model.run("f", &[bad.shallow_clone()]).unwrap_err();
                            assert!(error.to_string().ends_with("negative"), "{error}");
                        }
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn an_artifact_that_does_not_load_is_set_aside_and_other_buckets_answer() {
    let mut memory = Memory::with(&[Fake::sized(4, 4)]);
    memory.add(
        "f",
        &Fake {
            behaviour: "NO_SYMBOL",
            ..Fake::sized(2, 2)
        },
    );
    let model = load(memory).unwrap();
    let [lost] = &model.quarantined()[..] else {
        panic!("{:?}", model.quarantined())
    };
    assert!(matches!(lost.error, RuntimeError::MissingSymbol { .. }));
    let out = model.run("f", &[x(2, 2)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Padded);
    assert_eq!(flat(&out[0]), flat(&(x(2, 2) * 2)));
}

#[test]
fn calls_are_counted_and_misses_are_kept() {
    let model = ok(&[Fake::sized(4, 4), Fake::sized(2, 2)]);
    model.warm_up().unwrap();
    for (rows, cols) in [(4, 4), (3, 4), (3, 4), (1, 2), (9, 1), (9, 1)] {
        let _ = model.run("f", &[x(rows, cols)]);
    }
    let stats = &model.stats()[0];
    let counts: Vec<_> = stats
        .buckets
        .iter()
        .map(|b| (b.bucket["batch"], b.exact, b.padded, b.failed))
        .collect();
    assert!(
        counts.contains(&(4, 1, 2, 0)) && counts.contains(&(2, 0, 1, 0)),
        "{counts:?}"
    );
    let large = stats
        .buckets
        .iter()
        .find(|b| b.bucket["batch"] == 4)
        .unwrap();
    assert_eq!(large.padding_waste, Some(0.25));
    let counts = serde_json::to_value(&model.counts().calls).unwrap();
    let lines: Vec<String> = counts
        .as_array()
        .unwrap()
        .iter()
        .map(ToString::to_string)
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    {"module":"f","sizes":{"batch":1,"seq":2},"bucket":{"batch":2,"seq":2},"rung":"padded","count":1}
    {"module":"f","sizes":{"batch":3,"seq":4},"bucket":{"batch":4,"seq":4},"rung":"padded","count":2}
    {"module":"f","sizes":{"batch":4,"seq":4},"bucket":{"batch":4,"seq":4},"rung":"exact","count":1}
    {"module":"f","sizes":{"batch":9,"seq":1},"rung":"refused","count":2}
    "#);
}

#[test]
fn a_receipt_sends_a_request_to_the_faster_of_two_that_cover_it() {
    let mut memory = Memory::with(&[Fake::sized(8, 2), Fake::sized(2, 9)]);
    for program in memory.programs.values_mut() {
        // The larger one is the faster one.
        let micros = if program.sizes["batch"] == 8 {
            2000.0
        } else {
            1000.0
        };
        program.receipt = serde_json::json!({ "gate": { "artifact_us": micros } });
    }
    let model = load(memory).unwrap();
    assert_eq!(
        model.run("f", &[x(1, 2)]).unwrap().served().bucket()["batch"],
        2
    );
}

fn swapping(memory: &mut Memory, count: usize) -> Vec<precast::Digest> {
    (0..count)
        .map(|i| memory.put(fake::weights(&[("scale", &[i as f32 + 1.0])])))
        .collect()
}

#[test]
fn a_swap_under_load_fails_nothing_and_mixes_nothing() {
    let mut memory = Memory::default();
    let fake = Fake {
        outputs: 2,
        ..Fake::sized(4, 4)
    };
    // Two steps with the same weight: a call that saw two sets would answer a product of two different numbers.
    let mut program = memory.add("f", &fake);
    memory.programs.clear();
    let mut second = program.steps[0].clone();
    second.inputs = vec![1];
    second.outputs = vec![3, 4];
    program.steps.push(second);
    (program.values, program.results) = (5, vec![3, 4]);
    memory.programs.insert(program.id, program);
    let sets = swapping(&mut memory, 8);
    memory.weights = Some(sets[0]);
    let runtime = Runtime::over(memory.source(), Device::Cpu)
        .unwrap()
        .instances(3);
    let model = runtime.load("fake").unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let swaps = 1000;
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let ones = Tensor::ones([4, 4], (Kind::Float, tch::Device::Cpu));
                    let squares: Vec<f32> = (1..=8).map(|i| (i * i) as f32).collect();
                    let mut answers = 0;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let out = model.run("f", std::slice::from_ref(&ones)).unwrap();
                        let values = flat(&out[0]);
                        assert!(
                            squares.contains(&values[0]) && values.iter().all(|v| *v == values[0]),
                            "{values:?}"
                        );
                        answers += 1;
                    }
                    answers
                })
            })
            .collect();
        for i in 0..swaps {
            let set = runtime.weights(Some(sets[i % sets.len()])).unwrap();
            model.swap(&set).unwrap();
            assert_eq!(model.weights(), Some(sets[i % sets.len()]));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let answered: usize = callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .sum();
        assert!(answered > 0);
    });
    // After a swap has returned, every call sees the new set.
    let last = runtime.weights(Some(sets[4])).unwrap();
    model.swap(&last).unwrap();
    assert_eq!(
        flat(
            &model
                .run(
                    "f",
                    &[Tensor::ones([4, 4], (Kind::Float, tch::Device::Cpu))]
                )
                .unwrap()[0]
        )[0],
        25.0
    );
}

#[test]
fn a_weight_set_that_does_not_fit_changes_nothing() {
    let mut memory = Memory::with(&[Fake::sized(2, 2)]);
    let other = memory.put(fake::weights(&[("scale", &[1.0, 2.0])]));
    let runtime = Runtime::over(memory.source(), Device::Cpu).unwrap();
    let model = runtime.load("fake").unwrap();
    let error = model
        .swap(&runtime.weights(Some(other)).unwrap())
        .unwrap_err();
    assert!(matches!(error, RuntimeError::Unbound { .. }), "{error}");
    assert_eq!(
        flat(&model.run("f", &[x(2, 2)]).unwrap()[0]),
        [0.0, 2.0, 4.0, 6.0]
    );
}

#[test]
fn one_weight_set_serves_several_models_and_is_freed_with_the_last() {
    let mut memory = Memory::with(&[Fake::sized(2, 2)]);
    let tuned = memory.put(fake::weights(&[("scale", &[5.0])]));
    let runtime = Runtime::over(memory.source(), Device::Cpu).unwrap();
    let base = runtime.load("fake").unwrap();
    let fine = runtime
        .load_on("fake", &runtime.weights(Some(tuned)).unwrap())
        .unwrap();
    assert_eq!(
        flat(&base.run("f", &[x(2, 2)]).unwrap()[0]),
        [0.0, 2.0, 4.0, 6.0]
    );
    assert_eq!(
        flat(&fine.run("f", &[x(2, 2)]).unwrap()[0]),
        [0.0, 5.0, 10.0, 15.0]
    );
    drop(runtime);
    drop(fine);
    assert_eq!(
        flat(&base.run("f", &[x(2, 2)]).unwrap()[0]),
        [0.0, 2.0, 4.0, 6.0]
    );
}

#[test]
fn the_exported_graph_answers_for_an_artifact_that_does_not_load() {
    let fake = Fake {
        outputs: 2,
        behaviour: "NO_SYMBOL",
        ..Fake::sized(4, 4)
    };
    let mut memory = Memory::default();
    memory.add_with_archive(&fake);
    let tuned = memory.put(fake::weights(&[("scale", &[3.0])]));
    let source = memory.source();
    let runtime = Runtime::over(source.clone(), Device::Cpu).unwrap();
    let model = runtime.load("fake").unwrap();
    assert_eq!(model.quarantined().len(), 1);
    for rows in [4, 2] {
        let input = x(rows, 4);
        let out = model.run("f", &[input.shallow_clone()]).unwrap();
        assert_eq!(out.served().rung(), Rung::Eager);
        assert_eq!(out[0].size(), [rows, 4]);
        assert!(out[0].allclose(&(&input * 2).softmax(-1, Kind::Float), 1e-6, 1e-7, false));
        assert_eq!(
            flat(&out[1]),
            flat(&(&input * 2).sum_dim_intlist(-1, false, Kind::Float))
        );
        // It is the caller's: it may be written to.
        let _ = out[0].shallow_clone().fill_(7);
    }
    model.swap(&runtime.weights(Some(tuned)).unwrap()).unwrap();
    let out = model.run("f", &[x(4, 4)]).unwrap();
    assert_eq!(
        flat(&out[1]),
        flat(&(x(4, 4) * 3).sum_dim_intlist(-1, false, Kind::Float))
    );
    let strict = Runtime::over(source, Device::Cpu)
        .unwrap()
        .eager_fallback(false)
        .load("fake");
    assert!(matches!(strict, Err(RuntimeError::MissingSymbol { .. })));
}

#[test]
fn a_program_that_was_never_compiled_runs_as_its_exported_graph() {
    let fake = Fake {
        outputs: 2,
        ..Fake::sized(4, 4)
    };
    let mut memory = Memory::default();
    memory.add_with_archive(&fake);
    for program in memory.programs.values_mut() {
        program.steps.clear();
    }
    let model = load(memory).unwrap();
    let model = &model;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                for _ in 0..50 {
                    let out = model.run("f", &[x(4, 4)]).unwrap();
                    assert_eq!(
                        flat(&out[1]),
                        flat(&(x(4, 4) * 2).sum_dim_intlist(-1, false, Kind::Float))
                    );
                }
            });
        }
    });
    assert_eq!(model.stats()[0].buckets[0].runner, "eager");
}

#[test]
fn a_dynamic_program_answers_what_no_bucket_covers() {
    let mut memory = Memory::with(&[Fake::sized(4, 4)]);
    let dynamic = memory.add(
        "f",
        &Fake {
            outputs: 2,
            behaviour: "DYNAMIC",
            ..Fake::sized(3, 5)
        },
    );
    let bounds = |min, max| precast::record::Bounds { min, max };
    let program = memory.programs.get_mut(&dynamic.id).unwrap();
    program.dynamic = Some(
        [
            ("batch".to_owned(), bounds(2, 64)),
            ("seq".to_owned(), bounds(1, 100)),
        ]
        .into(),
    );
    let model = load(memory).unwrap();
    for (rows, cols, rung) in [
        (4, 4, Rung::Exact),
        (3, 3, Rung::Padded),
        (3, 5, Rung::Dynamic),
        (64, 7, Rung::Dynamic),
    ] {
        let out = model.run("f", &[x(rows, cols)]).unwrap();
        assert_eq!(out.served().rung(), rung, "{rows}x{cols}");
        assert_eq!(flat(&out[0]), flat(&(x(rows, cols) * 2)));
    }
    for (rows, cols) in [(65, 1), (1, 5), (2, 101)] {
        assert!(
            matches!(
                model.run("f", &[x(rows, cols)]),
                Err(RuntimeError::NoBucket { .. })
            ),
            "{rows}x{cols}"
        );
    }
}

#[test]
fn tensors_that_the_code_makes_are_bound_beside_the_weights() {
    let mut memory = Memory::default();
    let fake = Fake {
        constants: 2,
        ..Fake::sized(2, 2)
    };
    let program = memory.add("f", &fake);
    memory.weights = Some(memory.put(fake::weights(&[("scale", &[2.0])])));
    let object = memory.put(fake::weights(&[("shift.0", &[10.0])]));
    let mut extras = fake.artifact(object);
    (extras.id, extras.kind) = (
        precast::Digest::of(b"extras"),
        precast::record::ArtifactKind::Constants,
    );
    memory.programs.get_mut(&program.id).unwrap().constants = Some(extras.id);
    memory.artifacts.insert(extras.id, extras);
    assert_eq!(
        flat(&load(memory).unwrap().run("f", &[x(2, 2)]).unwrap()[0]),
        [10.0, 12.0, 14.0, 16.0]
    );
}
