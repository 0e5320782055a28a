//! The rungs of the ladder: a bucket, the dynamic program, eager; and their counts.

use precast::runtime::counters::Rung;
use serde_json::json;

use crate::{
    fake::{self, Fake, Memory},
    fill, flat, map, ok, sums, twice, x,
};

#[test]
fn calls_are_counted_and_misses_are_kept() {
    let model = ok(&[Fake::sized(4, 4), Fake::sized(2, 2)]);
    model.warm_up().unwrap();
    for (rows, cols) in [(4, 4), (3, 4), (3, 4), (1, 2), (9, 1), (9, 1)] {
        let _ = model.run("f", &[x(rows, cols)]);
    }
    let mut buckets = model.stats().remove(0).buckets;
    buckets.sort_by_key(|b| b.bucket["batch"]);
    let counts = buckets
        .iter()
        .map(|b| (b.bucket["batch"], b.exact, b.padded, b.failed));
    assert_eq!(counts.collect::<Vec<_>>(), [(2, 0, 1, 0), (4, 1, 2, 0)]);
    assert_eq!(buckets[1].padding_waste, Some(0.25));
    let size = |batch: i64, seq: i64| json!({ "batch": batch, "seq": seq });
    let row = |sizes, bucket, rung, count| json!({"module": "f", "sizes": sizes, "bucket": bucket, "rung": rung, "count": count});
    let expected = json!([
        row(size(1, 2), size(2, 2), "padded", 1),
        row(size(3, 4), size(4, 4), "padded", 2),
        row(size(4, 4), size(4, 4), "exact", 1),
        { "module": "f", "sizes": size(9, 1), "rung": "refused", "count": 2 },
    ]);
    assert_eq!(json!(model.counts().calls), expected);
}

#[test]
fn the_exported_graph_answers_for_an_artifact_that_does_not_load() {
    let fake = Fake::sized(4, 4).outputs(2).behaving("NO_SYMBOL");
    let mut memory = Memory::default();
    memory.add_with_graph(&fake);
    let tuned = memory.put(fake::weights(&[("scale", &[3.0])]));
    let runtime = memory.runtime();
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
    let strict = runtime.eager_fallback(false).load("fake");
    assert_eq!(strict.unwrap_err().name(), "MissingSymbol");
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
    let model = memory.each_program(|program| program.steps.clear()).load();
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
        let fake = Fake::sized(3, 5).outputs(2);
        let fake = fake.behaving("DYNAMIC").salted(salt);
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
    let model = memory.load();
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
    let mut waste = stats.misses.iter().filter_map(|miss| miss.waste);
    assert!(waste.all(|waste| waste == 0.0));
}

#[test]
fn a_dynamic_program_answers_what_no_bucket_covers() {
    let mut memory = Memory::with(&[Fake::sized(4, 4)]);
    let dynamic = memory.add("f", &Fake::sized(3, 5).outputs(2).behaving("DYNAMIC"));
    let bounds = |dim: &str, min, max| (dim.to_owned(), precast::record::Bounds { min, max });
    let program = memory.programs.get_mut(&dynamic.id).unwrap();
    program.dynamic = Some([bounds("batch", 2, 64), bounds("seq", 1, 100)].into());
    let model = memory.load();
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
        let error = model.run("f", &[x(rows, cols)]).unwrap_err();
        assert_eq!(error.name(), "NoBucket", "{rows}x{cols}");
    }
}
