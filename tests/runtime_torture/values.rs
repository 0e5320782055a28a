//! Inputs of the right shape with hostile values: indices at and beyond their bounds, divisors of zero, NaN,
//! infinities.
//!
//! Real artifacts, where `cargo test --test numerics` has left its model `values`, on every rung: the bucket's artifact
//! at its own size and padded, the artifact for every size, and eager. Eager decides: where it answers, an artifact
//! must give the same; where it raises, the artifact must give a typed error. After each refusal a right call must be
//! answered as ever, and callers with right inputs on other threads must never notice anything.
//!
//! It runs in a child, which a crash would end.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use precast::{
    Device, Model, Runtime, Store,
    record::{Input, Program},
    runtime::{Outputs, RuntimeError, errors::Problem},
};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::{Random, act, real, report::Tally};

pub const MODEL: &str = "values";

/// Returns whether the store of the numerics tests has the model.
pub fn there(store: &Store) -> bool {
    matches!(store.releases().get(MODEL, None), Ok(Some(_)))
}

/// So many calls are made by one child, which has a limit of time.
const BATCH: u64 = 5_000;

/// The rungs of a call, each of which is counted.
pub const RUNGS: [&str; 4] = ["exact", "padded", "dynamic", "eager"];

/// Makes `calls` calls: refused by the bounds of an input, by a check of a value that was computed, or answered with
/// eager's numbers.
pub fn run(store: &Store, calls: u64, seed: u64) -> Tally {
    let mut outcome = Tally::of(RUNGS);
    for (seed, first) in (seed..).zip((0..calls).step_by(BATCH as usize)) {
        let with =
            json!({ "store": store.path(), "calls": BATCH.min(calls - first), "seed": seed });
        match act::ask("values", &with) {
            Ok(answer) => outcome.merge(serde_json::from_value(answer).unwrap()),
            Err(why) => outcome.fail(why),
        }
    }
    outcome
}

/// One program, alone in a model, with good inputs and their answer.
struct Rung {
    name: &'static str,
    model: Model,
    program: Program,
    sizes: Vec<i64>,
    good: Vec<Tensor>,
    answer: Vec<Vec<u8>>,
}

pub fn child(with: &Value) -> Value {
    let store = Store::open(Path::new(with["store"].as_str().unwrap())).unwrap();
    let [calls, seed] = ["calls", "seed"].map(|name| with[name].as_u64().unwrap());
    let runtime = Runtime::new(&store, Device::Cpu).unwrap().instances(3);
    let release = store.releases().get(MODEL, None).unwrap().unwrap();
    let alone = |program: &Program| real::alone(&runtime, &release, vec![program.clone()]);
    let mut random = Random(seed);
    let (mut rungs, mut judges) = (Vec::new(), BTreeMap::new());
    for program in &release.programs {
        let program = store.records().program(program).unwrap().unwrap();
        let own: Vec<i64> = program.sizes.values().copied().collect();
        let less: Vec<i64> = own.iter().map(|&size| (size - 1).max(1)).collect();
        let forms = match (&program.dynamic, program.steps.is_empty()) {
            (None, _) => vec![("exact", own), ("padded", less)],
            (Some(_), false) => vec![("dynamic", own), ("dynamic", less)],
            (Some(_), true) => {
                judges.insert(program.module.clone(), alone(&program));
                vec![("eager", own)]
            }
        };
        for (name, sizes) in forms {
            let model = alone(&program);
            let good = inputs(&program, &sizes, &mut random);
            let answer = real::bits(&model.run(&program.module, &good).unwrap());
            rungs.push(Rung {
                name,
                model,
                program: program.clone(),
                sizes,
                good,
                answer,
            });
        }
    }
    let mut outcome = Tally::default();
    let (over, others) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // Also where this thread panics.
        let end = Over(&over);
        let neighbours: Vec<_> = (0..2)
            .map(|thread| {
                // A tensor may be sent, not shared.
                let given: Vec<Vec<Tensor>> = rungs
                    .iter()
                    .map(|rung| rung.good.iter().map(Tensor::shallow_clone).collect())
                    .collect();
                let models: Vec<(&Model, &str, &Vec<Vec<u8>>)> = rungs
                    .iter()
                    .map(|rung| (&rung.model, rung.program.module.as_str(), &rung.answer))
                    .collect();
                let (over, others) = (&over, &others);
                scope.spawn(move || {
                    let mut random = Random(thread);
                    let mut bad = Vec::new();
                    while !over.load(Relaxed) {
                        let at = random.below(models.len());
                        let (model, module, answer) = models[at];
                        others.fetch_add(1, Relaxed);
                        match model.run(module, &given[at]) {
                            Ok(out) if real::bits(&out) == *answer => {}
                            other => bad.push(format!("beside, {module}: {:?}", other.map(drop))),
                        }
                    }
                    bad
                })
            })
            .collect();
        for _ in 0..calls {
            let rung = &rungs[random.below(rungs.len())];
            let judge = &judges[&rung.program.module];
            hostile(rung, judge, &mut random, &mut outcome);
            if outcome.bad.len() > 20 {
                break;
            }
        }
        drop(end);
        for neighbour in neighbours {
            outcome.bad.extend(neighbour.join().unwrap());
        }
    });
    outcome.add("right_calls", others.load(Relaxed));
    serde_json::to_value(outcome).unwrap()
}

/// Ends the callers beside when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Makes one call with hostile values, compares it with eager, and makes a right call after a refusal.
fn hostile(rung: &Rung, judge: &Model, random: &mut Random, outcome: &mut Tally) {
    let program = &rung.program;
    let given = inputs(program, &rung.sizes, random);
    let mut outside = false;
    let mut what = String::new();
    for (tensor, input) in given.iter().zip(&program.inputs) {
        for _ in 0..1 + random.below(3) {
            let at = random.below(tensor.numel()) as i64;
            let flat = tensor.view(-1);
            if input.layout.dtype.is_float() {
                let value = *random.of(&FLOATS);
                let _ = flat.get(at).fill_(f64::from(value));
                what += &format!(" {}[{at}] = {value}", input.name);
            } else {
                let value = integer(input, random);
                let _ = flat.get(at).fill_(value);
                what += &format!(" {}[{at}] = {value}", input.name);
            }
        }
        if let Some([low, past]) = input.bounds {
            let values = Vec::<i64>::try_from(tensor.view(-1).to_kind(Kind::Int64)).unwrap();
            outside |= values.iter().any(|value| !(low..past).contains(value));
        }
    }
    outcome.add("calls", 1);
    outcome.add(rung.name, 1);
    let got = rung.model.run(&program.module, &given);
    let wanted = judge.run(&program.module, &given);
    let place = || format!("{} {} {:?}{what}", program.module, rung.name, rung.sizes);
    let refused = got.is_err();
    match (got, wanted) {
        (
            Err(RuntimeError::BadInput {
                input,
                problem:
                    Problem::Value {
                        position: Some(position),
                        value: Some(value),
                        bounds,
                    },
                ..
            }),
            Err(_),
        ) if outside => {
            outcome.add("out_of_bounds", 1);
            let named = program.inputs.iter().position(|one| *one.name == *input);
            let tensor = given[named.unwrap()].shallow_clone();
            let found = position.iter().fold(tensor, |tensor, &at| tensor.get(at));
            if found.int64_value(&[]) != value || (bounds[0]..bounds[1]).contains(&value) {
                outcome.fail(format!("{}: {value} at {position:?}", place()));
            }
        }
        (Err(RuntimeError::CheckFailed { .. }), Err(_)) if !outside && rung.name != "eager" => {
            outcome.add("failed_checks", 1);
        }
        // libtorch's own kernel adds rows, and refuses a number beyond them itself.
        (Err(RuntimeError::Failed { message, .. }), Err(_))
            if !outside
                && (rung.name == "eager"
                    || message.to_string().contains("aoti_torch_cpu_scatter")) =>
        {
            outcome.add("failed_checks", 1);
        }
        (Ok(got), Ok(wanted)) if !outside => {
            outcome.add("answered", 1);
            if !equal(&got, &wanted) {
                outcome.fail(format!("{}: differs from eager", place()));
            }
        }
        (got, wanted) => {
            let (got, wanted) = (got.map(drop), wanted.map(drop));
            outcome.fail(format!("{}: {got:?} where eager gives {wanted:?}", place()));
        }
    }
    if refused || random.below(16) == 0 {
        outcome.add("right_calls", 1);
        match rung.model.run(&program.module, &rung.good) {
            Ok(out) if real::bits(&out) == rung.answer => {}
            other => outcome.fail(format!("after {}: {:?}", place(), other.map(drop))),
        }
    }
}

const FLOATS: [f32; 16] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-40,
    -1e-45,
    -0.0,
    // Around the rows of the model's table, and around its assertion.
    -6.4,
    -6.2,
    10.6,
    10.7,
    -99.9,
    -100.0,
    -101.0,
];

fn integer(input: &Input, random: &mut Random) -> i64 {
    let (least, most) = match input.layout.dtype.size() {
        8 => (i64::MIN, i64::MAX),
        _ => (i32::MIN.into(), i32::MAX.into()),
    };
    let value = match input.bounds {
        Some([low, past]) => *random.of(&[
            low,
            past - 1,
            low - 1,
            past,
            past + 1,
            -1,
            0,
            least,
            most,
            1 << 31,
        ]),
        // Of `divided`, whose divisor is five less. The least integer divided by -1 ends a process in torch's own
        // kernel, so that eager gives no answer to compare with.
        None => *random.of(&[5, 6, 0, -1, 1 << 31, least + 6, most]),
    };
    value.clamp(least, most)
}

/// Returns legal inputs.
fn inputs(program: &Program, sizes: &[i64], random: &mut Random) -> Vec<Tensor> {
    let make = |input: &Input| {
        let mut plain = input.clone();
        plain.layout.dtype = match input.layout.dtype.is_float() {
            true => input.layout.dtype,
            false => precast::record::Dtype::Int64,
        };
        plain.range = input.bounds.or(input.range);
        let made = real::input(&plain, program, sizes, random);
        match input.layout.dtype.size() {
            4 if !input.layout.dtype.is_float() => made.to_kind(Kind::Int),
            _ => made,
        }
    };
    program.inputs.iter().map(make).collect()
}

fn equal(got: &Outputs, wanted: &Outputs) -> bool {
    std::iter::zip(got.iter(), wanted.iter()).all(|(got, wanted)| {
        let (got, wanted) = (Tensor::from(got), Tensor::from(wanted));
        got.size() == wanted.size()
            && match got.kind() {
                Kind::Float => got.allclose(&wanted, 1e-4, 1e-5, true),
                _ => got.equal(&wanted),
            }
    })
}
