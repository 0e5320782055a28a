//! Many callers at once: half of them failing, on fresh containers, while weights change, and their kept outputs.

use std::sync::{
    Barrier,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};
use std::time::{Duration, Instant};

use precast::{Digest, Model, runtime::RuntimeError};
use tch::{Kind, Tensor};

use crate::{
    Random,
    fake::{self, Fake, Memory},
    flat, load, real,
    report::Tally,
    runtime, threads, wrong, x,
};

/// Runs `work`, which counts its steps; when the count stands still for so long, the process ends: that is a hang.
pub fn watched<T>(name: &str, work: impl FnOnce(&AtomicU64) -> T) -> T {
    const STILL: Duration = Duration::from_secs(300);
    let (steps, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut last, mut since) = (0, Instant::now());
            while !done.load(Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                let now = steps.load(Relaxed);
                if now != last {
                    (last, since) = (now, Instant::now());
                } else if since.elapsed() > STILL {
                    eprintln!("{name}: no call was answered for {STILL:?}, after {now} steps");
                    std::process::abort();
                }
            }
        });
        let result = work(&steps);
        done.store(true, Relaxed);
        result
    })
}

/// Makes `calls` calls, shared out over each number of threads in turn: good ones, ones that are refused before anything
/// runs, and ones that fail in the artifact.
pub fn mixed(counts: &[usize], calls: u64, seed: u64) -> Tally {
    let fakes = [
        Fake::of("FAILS_BELOW").outputs(2),
        Fake::sized(2, 3).behaving("FAILS_BELOW").outputs(2),
    ];
    let source = Memory::with(&fakes).source();
    let mut outcome = Tally::default();
    outcome.set("threads", counts);
    for (i, &count) in counts.iter().enumerate() {
        // More callers than lanes, so that they wait for each other.
        let runtime = runtime(source.clone()).instances(2 + i);
        let model = runtime.load("fake").unwrap();
        let share = calls / counts.len() as u64 / count as u64;
        let parts: Vec<Tally> = watched("mixed calls", |steps| {
            threads(count, |thread| {
                let random = Random(seed ^ ((i as u64) << 32) ^ ((thread as u64) << 8));
                caller(&model, share, random, steps)
            })
        });
        parts.into_iter().for_each(|part| outcome.merge(part));
    }
    outcome
}

fn caller(model: &Model, calls: u64, mut random: Random, steps: &AtomicU64) -> Tally {
    const SIZES: [(i64, i64); 6] = [(8, 4), (2, 3), (7, 4), (1, 1), (2, 2), (5, 3)];
    // Made once; the answers are compared bit for bit.
    let good = SIZES.map(|(rows, cols)| {
        let input = x(rows, cols);
        let doubled = &input * 2;
        // Sums of small whole numbers are exact in any order.
        let sums = doubled.sum_dim_intlist(1, false, Kind::Float);
        (input, flat(&doubled), flat(&sums))
    });
    let negative = x(8, 4) - 2;
    let wrong = wrong();
    let mut outcome = Tally::of(["calls", "good", "refused", "failed"]);
    for _ in 0..calls {
        outcome.add("calls", 1);
        match random.below(4) {
            0 | 1 => {
                let (input, doubled, sums) = random.of(&good);
                match model.run("f", std::slice::from_ref(input)) {
                    Ok(out) if flat(&out[0]) == *doubled && flat(&out[1]) == *sums => {
                        outcome.add("good", 1)
                    }
                    Ok(out) => outcome.fail(format!("{:?}: {:?}", input.size(), flat(&out[0]))),
                    Err(error) => outcome.fail(error.to_string()),
                }
            }
            2 => match model.run("f", std::slice::from_ref(&negative)) {
                Err(RuntimeError::Failed { message, .. }) if message.to_string() == "negative" => {
                    outcome.add("failed", 1)
                }
                other => outcome.fail(format!("a failing run: {other:?}")),
            },
            _ => match model.run("f", std::slice::from_ref(random.of(&wrong))) {
                Err(RuntimeError::BadInput { .. } | RuntimeError::NoBucket { .. }) => {
                    outcome.add("refused", 1)
                }
                other => outcome.fail(format!("a bad input: {other:?}")),
            },
        }
        steps.fetch_add(1, Relaxed);
    }
    outcome
}

/// Makes `containers` containers and races the first runs of each, with and without a failing one among them. A tenth as
/// many are of real artifacts, where there is a store with some.
pub fn fresh(containers: u64, seed: u64) -> Tally {
    let mut outcome = Tally::of(["containers", "rounds", "real"]);
    let mut random = Random(seed);
    let source = Memory::with(&[Fake::of("FAILS_BELOW")]).source();
    let wanted = flat(&(x(8, 4) * 2));
    watched("fresh containers", |steps| {
        while outcome.count("containers") < containers {
            let count = *random.of(&[2, 4, 8]);
            let runtime = runtime(source.clone()).instances(count);
            let model = runtime.load("fake").unwrap();
            let failing = random.below(2) == 0;
            let barrier = Barrier::new(count);
            let wrong = threads(count, |thread| {
                let fails = failing && thread % 2 == 0;
                let input = if fails { x(8, 4) - 2 } else { x(8, 4) };
                barrier.wait();
                match model.run("f", &[input]) {
                    Ok(out) => fails || flat(&out[0]) != wanted,
                    Err(_) => !fails,
                }
            });
            if wrong.contains(&true) {
                let round = outcome.count("rounds");
                outcome.fail(format!("round {round} of {count} threads"));
            }
            outcome.add("containers", count as u64);
            outcome.add("rounds", 1);
            steps.fetch_add(1, Relaxed);
        }
        if let Some(store) = real::store() {
            let (made, bad) = real::race(&store, containers / 10, steps);
            outcome.set("real", made);
            outcome.bad.extend(bad);
        }
    });
    outcome
}

/// Writes over inputs and outputs of earlier calls and runs again: no answer that was given changes, and no later one
/// is touched by it.
pub fn outputs(calls: u64, seed: u64) -> Tally {
    let models = [
        load(&[Fake::sized(4, 4).outputs(2)]),
        load(&[Fake::of("RETURNS_INPUT")]),
        load(&[Fake::sized(1, 1).behaving("RETURNS_WEIGHT")]),
    ];
    let mut outcome = Tally::of(["calls", "kept"]);
    let mut random = Random(seed);
    let mut held: Vec<(Tensor, Vec<f32>)> = Vec::new();
    for call in 0..calls {
        let which = random.below(models.len());
        let (rows, cols) = match which {
            0 => (1 + random.below(4) as i64, 1 + random.below(4) as i64),
            1 => (8, 4),
            _ => (1, 1),
        };
        let input = x(rows, cols) * (1 + random.below(100) as i64);
        let expected = match which {
            0 => flat(&(&input * 2)),
            1 => flat(&input),
            _ => vec![2.0],
        };
        let out = models[which].run("f", &[input.shallow_clone()]).unwrap();
        outcome.add("calls", 1);
        if flat(&out[0]) != expected {
            let answer = flat(&out[0]);
            outcome.fail(format!("call {call}: model {which} answers {answer:?}"));
        }
        match random.below(3) {
            // The caller goes on using its input and its output.
            0 => drop(input.shallow_clone().fill_(f64::NAN)),
            1 => drop(Tensor::from(&out[0]).fill_(f64::NAN)),
            _ => held.push((Tensor::from(&out[0]), expected)),
        }
        if held.len() > 64 {
            outcome.add("kept", 1);
            let (tensor, was) = held.swap_remove(random.below(held.len()));
            if flat(&tensor) != was {
                let now = flat(&tensor);
                let changed = format!("by call {call}: an answer changed from {was:?} to {now:?}");
                outcome.fail(changed);
            }
        }
    }
    outcome
}

/// Swaps weights `count` times under callers. The program has two steps with one weight: a call that saw two sets would
/// answer the product of two different numbers.
pub fn swaps(count: u64, callers: usize) -> Tally {
    let mut memory = Memory::default();
    let mut program = memory.add("f", &Fake::sized(4, 4).outputs(2));
    memory.programs.clear();
    let mut second = program.steps[0].clone();
    (second.inputs, second.outputs) = (vec![1], vec![3, 4]);
    program.steps.push(second);
    (program.values, program.results) = (5, vec![3, 4]);
    memory.programs.insert(program.id, program);
    const SETS: u64 = 8;
    let sets: Vec<Digest> = (1..=SETS)
        .map(|i| memory.put(fake::weights(&[("scale", &[i as f32])])))
        .collect();
    memory.weights = Some(sets[0]);
    let runtime = runtime(memory.source()).instances(2);
    let model = runtime.load("fake").unwrap();
    let mut outcome = Tally::of(["swaps", "answers"]);
    outcome.set("threads", callers);
    let ones = |rows| Tensor::ones([rows, 4], (Kind::Float, tch::Device::Cpu));
    watched("swaps", |steps| {
        let (stop, begun) = (AtomicBool::new(false), Barrier::new(callers + 1));
        let call = |thread: usize| {
            begun.wait();
            let ones = ones(4 - (thread % 2) as i64);
            let mut calls = Tally::default();
            while calls.count("answers") == 0 && calls.bad.is_empty() || !stop.load(Relaxed) {
                match model.run("f", std::slice::from_ref(&ones)) {
                    Ok(out) => {
                        calls.add("answers", 1);
                        let values = flat(&out[0]);
                        let square = (1..=SETS).any(|i| values[0] == (i * i) as f32);
                        if !square || values.iter().any(|value| *value != values[0]) {
                            calls.fail(format!("mixed: {values:?}"));
                        }
                    }
                    Err(error) => calls.fail(error.to_string()),
                }
            }
            calls
        };
        std::thread::scope(|scope| {
            let calls = scope.spawn(|| threads(callers, call));
            begun.wait();
            for i in 0..count {
                let set = sets[(i % SETS) as usize];
                let swapped = runtime.weights(Some(set)).and_then(|set| model.swap(&set));
                let after = model.run("f", &[ones(4)]).map(|out| flat(&out[0])[0]);
                let wanted = ((i % SETS + 1) * (i % SETS + 1)) as f32;
                // A call that begins after a swap has returned sees the new set.
                if swapped.is_err() || after.as_ref().ok() != Some(&wanted) {
                    outcome.fail(format!("swap {i}: {swapped:?}, then {after:?}"));
                }
                outcome.add("swaps", 1);
                steps.fetch_add(1, Relaxed);
            }
            stop.store(true, Relaxed);
            let parts = calls.join().unwrap();
            parts.into_iter().for_each(|part| outcome.merge(part));
        });
    });
    outcome
}
