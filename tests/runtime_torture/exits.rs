//! Processes that end while their threads are in the middle of calls, loads and swaps: they call `shut_down` first.

use std::{
    os::unix::process::ExitStatusExt,
    process::exit,
    sync::Arc,
    time::{Duration, Instant},
};

use precast::RuntimeError;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::{
    Random, act,
    fake::{self, Fake, Memory},
    real,
    report::Tally,
    runtime, x,
};

const CODES: [i32; 7] = [0, 1, 3, 42, 101, 130, 255];

/// Starts `count` processes, `parallel` at a time. Each ends with a code in mid-work, some with real artifacts running,
/// and some kept alive for a while after libtorch's destructors.
pub fn run(count: u64, parallel: u64, seed: u64) -> Tally {
    let mut outcome = Tally::of(["exits", "real", "late"]);
    let mut random = Random(seed);
    // It keeps a process alive after libtorch's destructors have run.
    let late = fake::compiled("tests/runtime_torture/late.c", &[]);
    while outcome.count("exits") < count {
        let children: Vec<_> = (0..parallel.min(count - outcome.count("exits")))
            .map(|_| {
                let code = *random.of(&CODES);
                let with = json!({
                    "code": code, "seed": random.draw() >> 1, "micros": random.below(30_000),
                    "from_worker": random.below(2) == 0, "real": random.below(4) == 0,
                    "preload": (random.below(2) == 0).then_some(&late),
                });
                (code, act::start("exits", &with), with)
            })
            .collect();
        for (code, child, with) in children {
            let done = act::finish(child, Duration::from_secs(600));
            outcome.add("exits", 1);
            outcome.add("late", with["preload"].is_string().into());
            outcome.add("real", done.printed.contains("real artifacts").into());
            let started = done.printed.contains("at work") && !done.printed.contains("met ");
            if done.status.code() != Some(code) || done.status.signal().is_some() || !started {
                outcome.fail(format!("{with}: {}: {}", done.status, done.printed));
            }
        }
    }
    outcome
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}

/// Returns an answer. A thread that gets the error of an ending process stops; anything else is a call that
/// met libtorch's destructors.
fn right<T>(answer: Result<T, RuntimeError>) -> T {
    match answer {
        Ok(answer) => answer,
        Err(RuntimeError::Unready { reason, .. }) if reason == "the process is ending" => park(),
        Err(error) => {
            println!("met {error}");
            park()
        }
    }
}

pub fn child(with: &Value) -> Value {
    let code = i32::try_from(with["code"].as_i64().unwrap()).unwrap();
    let after = Duration::from_micros(with["micros"].as_u64().unwrap());
    let mut memory = Memory::with(&[Fake::sized(64, 64).outputs(2), Fake::of("FAILS_BELOW")]);
    let tuned = memory.put(fake::weights(&[("scale", &[5.0])]));
    let runtime = Arc::new(runtime(memory.source()).instances(2));
    let model = Arc::new(runtime.load("fake").unwrap());
    // Made before: a caller's own use of tch while the process ends is no call of the runtime.
    let negative = x(8, 4) - 2;
    for thread in 0..3u64 {
        let (model, runtime) = (model.clone(), runtime.clone());
        let negative = negative.shallow_clone();
        let mut random = Random(with["seed"].as_u64().unwrap() ^ thread);
        let ones = |rows| Tensor::ones([rows, 64], (Kind::Float, tch::Device::Cpu));
        let ones: Vec<Tensor> = (1..=64).map(ones).collect();
        std::thread::spawn(move || {
            loop {
                match random.below(8) {
                    0 => drop(right(runtime.load("fake"))),
                    1 => match model.run("f", &[&negative]) {
                        Err(RuntimeError::Failed { message, .. })
                            if message.to_string() == "negative" => {}
                        other => drop(right(other)),
                    },
                    2 => {
                        let weights = right(runtime.weights(Some(tuned)));
                        right(model.swap(&weights));
                    }
                    _ => drop(right(model.run("f", &[&ones[random.below(64)]]))),
                }
            }
        });
    }
    if let (true, Some(store)) = (with["real"] == json!(true), real::store()) {
        println!("real artifacts");
        let runtime = precast::Runtime::new(&store, precast::Device::Cpu).unwrap();
        let buckets = real::buckets(&runtime.load(real::MODEL).unwrap());
        let given = buckets
            .into_iter()
            .map(|one| (one.module.clone(), real::own_inputs(&one)));
        let given: Vec<(String, Vec<Tensor>)> = given.collect();
        std::thread::spawn(move || {
            loop {
                let model = right(runtime.load(real::MODEL));
                for (module, given) in &given {
                    (0..50).for_each(|_| drop(right(model.run(module, given))));
                }
            }
        });
    }
    println!("at work");
    let begin = Instant::now();
    let end = move || -> ! {
        std::thread::sleep(after.saturating_sub(begin.elapsed()));
        precast::runtime::shut_down();
        exit(code)
    };
    if with["from_worker"] == json!(true) {
        std::thread::spawn(move || end());
        park();
    }
    end()
}
