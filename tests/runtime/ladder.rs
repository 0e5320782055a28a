//! The rungs of the ladder: a bucket, the dynamic program, eager; and their counts.

use precast::{
    Device, Runtime,
    runtime::{RuntimeError, counters::Rung},
};

use crate::{
    fake::{self, Fake, Memory},
    fill, flat, load, map, ok, sums, twice, x,
};

#[test]
fn an_artifact_that_does_not_load_is_set_aside_and_other_buckets_answer() {
    let mut memory = Memory::with(&[Fake::sized(4, 4)]);
    memory.add("f", &Fake::sized(2, 2).behaving("NO_SYMBOL"));
    let model = load(memory).unwrap();
    let [lost] = &model.quarantined()[..] else {
        panic!("{:?}", model.quarantined())
    };
    assert!(matches!(lost.error, RuntimeError::MissingSymbol { .. }));
    let out = model.run("f", &[x(2, 2)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Padded);
    assert_eq!(flat(&out[0]), flat(&twice(&x(2, 2))));
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
        program.receipt =
            serde_json::from_value(serde_json::json!({ "gate": { "artifact_us": micros } }))
                .unwrap();
    }
    let model = load(memory).unwrap();
    assert_eq!(
        model
            .run("f", &[x(1, 2)])
            .unwrap()
            .served()
            .bucket()
            .unwrap()["batch"],
        2
    );
}

#[test]
fn the_exported_graph_answers_for_an_artifact_that_does_not_load() {
    let fake = Fake::sized(4, 4).outputs(2).behaving("NO_SYMBOL");
    let mut memory = Memory::default();
    memory.add_with_graph(&fake);
    let tuned = memory.put(fake::weights(&[("scale", &[3.0])]));
    let source = memory.source();
    let runtime = Runtime::over(source.clone(), Device::Cpu).unwrap();
    let model = runtime.load("fake").unwrap();
    assert_eq!(model.quarantined().len(), 1);
    for rows in [4, 2] {
        let input = x(rows, 4);
        let out = model.run("f", &[input.share()]).unwrap();
        assert_eq!(out.served().rung(), Rung::Eager);
        assert_eq!(out[0].shape(), [rows, 4]);
        let wanted = softmax(&flat(&twice(&input)), 4);
        for (got, want) in std::iter::zip(flat(&out[0]), wanted) {
            assert!((f64::from(got) - want).abs() <= 1e-7 + 1e-6 * want, "{got}");
        }
        assert_eq!(flat(&out[1]), sums(&twice(&input)));
        // It is the caller's: it may be written to.
        fill(&out[0], 7.0);
    }
    model.swap(&runtime.weights(Some(tuned)).unwrap()).unwrap();
    let out = model.run("f", &[x(4, 4)]).unwrap();
    assert_eq!(flat(&out[1]), sums(&map(&x(4, 4), |value| value * 3.0)));
    let strict = Runtime::over(source, Device::Cpu)
        .unwrap()
        .eager_fallback(false)
        .load("fake");
    assert!(matches!(strict, Err(RuntimeError::MissingSymbol { .. })));
}

/// Returns the softmax of each row of `cols` numbers.
fn softmax(numbers: &[f32], cols: usize) -> Vec<f64> {
    let row = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        let exp = row.iter().map(|&value| f64::from(value - max).exp());
        let exp: Vec<f64> = exp.collect();
        let sum: f64 = exp.iter().sum();
        exp.into_iter().map(|value| value / sum).collect()
    };
    numbers.chunks_exact(cols).flat_map(row).collect()
}

#[test]
fn a_program_that_was_never_compiled_runs_as_its_exported_graph() {
    let fake = Fake::sized(4, 4).outputs(2);
    let mut memory = Memory::default();
    memory.add_with_graph(&fake);
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
                    assert_eq!(flat(&out[1]), sums(&twice(&x(4, 4))));
                }
            });
        }
    });
    assert_eq!(model.stats()[0].buckets[0].runner, "eager");
}

#[test]
fn programs_for_every_size_answer_without_bucket_and_padding() {
    let mut memory = Memory::with(&[]);
    for (salt, steps) in [(190, true), (191, false)] {
        let fake = Fake::sized(3, 5)
            .outputs(2)
            .behaving("DYNAMIC")
            .salted(salt);
        let mut program = memory.add("f", &fake);
        memory.export(&mut program, &fake);
        let (min, max) = (if steps { 2 } else { 1 }, 64);
        let bounds = precast::record::Bounds { min, max };
        program.dynamic = Some(["batch", "seq"].map(|dim| (dim.to_owned(), bounds)).into());
        if !steps {
            program.steps.clear();
        }
        memory.programs.insert(program.id, program);
    }
    let model = load(memory).unwrap();
    for (rows, cols, rung) in [
        (9, 7, Rung::Dynamic),
        (1, 7, Rung::Eager),
        (1, 2, Rung::Eager),
    ] {
        let out = model.run("f", &[x(rows, cols)]).unwrap();
        assert_eq!((out.served().rung(), out.served().bucket()), (rung, None));
        let told = format!("{:?}", out.served());
        assert!(told.len() < 400 && told.contains("Served"), "{told}");
    }
    let counts = model.counts();
    let eager = counts.calls.iter().filter(|calls| calls.rung == "eager");
    assert!(eager.clone().all(|calls| calls.bucket.is_none()));
    assert_eq!(eager.count(), 2);
    let stats = &precast::inspect::stats::stats(&[counts])[0];
    assert_eq!(stats.waste, Some(0.0));
    assert!(
        stats
            .misses
            .iter()
            .all(|miss| miss.waste.unwrap_or(0.0) == 0.0)
    );
}

#[test]
fn a_dynamic_program_answers_what_no_bucket_covers() {
    let mut memory = Memory::with(&[Fake::sized(4, 4)]);
    let dynamic = memory.add("f", &Fake::sized(3, 5).outputs(2).behaving("DYNAMIC"));
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
        assert_eq!(flat(&out[0]), flat(&twice(&x(rows, cols))));
    }
    let error = model.run("f", &[x(1, 5)]).unwrap_err();
    insta::assert_snapshot!(error, @"module `f` has no bucket for batch=1 seq=5; it has batch=4 seq=4; dynamic for batch 2 to 64, seq 1 to 100");
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
