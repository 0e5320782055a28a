//! Other weights on the same artifacts.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use precast::{Device, Runtime, runtime::RuntimeError};

use crate::{
    fake::{self, Fake, Memory},
    flat, full, x,
};

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
    let (stop, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    let swaps = 1000;
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let ones = full([4, 4], 1.0_f32);
                    let squares: Vec<f32> = (1..=8).map(|i| (i * i) as f32).collect();
                    while !stop.load(Relaxed) {
                        let out = model.run("f", std::slice::from_ref(&ones)).unwrap();
                        let values = flat(&out[0]);
                        assert!(
                            squares.contains(&values[0]) && values.iter().all(|v| *v == values[0]),
                            "{values:?}"
                        );
                        answers.fetch_add(1, Relaxed);
                    }
                })
            })
            .collect();
        let more = |before: u64| {
            while answers.load(Relaxed) == before && callers.iter().all(|c| !c.is_finished()) {
                std::thread::yield_now();
            }
        };
        for i in 0..swaps {
            // Every now and then somebody has to have answered.
            if i % 100 == 0 {
                more(answers.load(Relaxed));
            }
            let set = runtime.weights(Some(sets[i % sets.len()])).unwrap();
            model.swap(&set).unwrap();
            assert_eq!(model.weights(), Some(sets[i % sets.len()]));
        }
        stop.store(true, Relaxed);
        callers
            .into_iter()
            .for_each(|caller| caller.join().unwrap());
    });
    assert!(answers.into_inner() >= 10);
    // After a swap has returned, every call sees the new set.
    let last = runtime.weights(Some(sets[4])).unwrap();
    model.swap(&last).unwrap();
    assert_eq!(
        flat(&model.run("f", &[full([4, 4], 1.0_f32)]).unwrap()[0])[0],
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
