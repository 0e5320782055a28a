//! Processes that end while their threads are in the middle of calls, loads and swaps.

use std::{
    os::unix::process::ExitStatusExt,
    process::exit,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::Serialize;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::{
    Random, act,
    fake::{self, Fake, Memory},
    real, runtime, x,
};

#[derive(Debug, Default, Serialize)]
pub struct Told {
    pub exits: u64,
    /// Of these, with real artifacts running.
    pub real: u64,
    #[serde(skip)]
    pub bad: Vec<String>,
}

const CODES: [i32; 7] = [0, 1, 3, 42, 101, 130, 255];

/// Starts `count` processes, `parallel` at a time, each of which ends with a code in mid-work.
pub fn run(count: u64, parallel: u64, seed: u64) -> Told {
    let mut told = Told::default();
    let mut random = Random(seed);
    while told.exits < count {
        let children: Vec<_> = (0..parallel.min(count - told.exits))
            .map(|_| {
                let code = *random.of(&CODES);
                let with = json!({
                    "code": code, "seed": random.draw() >> 1, "micros": random.below(30_000),
                    "from_worker": random.below(2) == 0, "real": random.below(4) == 0,
                });
                (code, act::start("exits", &with), with)
            })
            .collect();
        for (code, child, with) in children {
            let done = act::finish(child, Duration::from_secs(60));
            told.exits += 1;
            told.real += u64::from(done.printed.contains("real artifacts"));
            let started = done.printed.contains("at work");
            if done.status.code() != Some(code) || done.status.signal().is_some() || !started {
                told.bad
                    .push(format!("{with}: {}: {}", done.status, done.printed));
            }
        }
    }
    told
}

pub fn child(with: &Value) -> Value {
    let code = i32::try_from(with["code"].as_i64().unwrap()).unwrap();
    let after = Duration::from_micros(with["micros"].as_u64().unwrap());
    let mut memory = Memory::with(&[
        Fake {
            outputs: 2,
            ..Fake::sized(64, 64)
        },
        Fake::of("FAILS_BELOW"),
    ]);
    let tuned = memory.put(fake::weights(&[("scale", &[5.0])]));
    let runtime = Arc::new(runtime(memory.source()).instances(2));
    let model = Arc::new(runtime.load("fake").unwrap());
    let negative = || x(8, 4) - 2;
    for thread in 0..3u64 {
        let (model, runtime) = (model.clone(), runtime.clone());
        let mut random = Random(with["seed"].as_u64().unwrap() ^ thread);
        std::thread::spawn(move || {
            loop {
                match random.below(8) {
                    0 => drop(runtime.load("fake").unwrap()),
                    1 => drop(model.run("f", &[negative()]).unwrap_err()),
                    2 => model.swap(&runtime.weights(Some(tuned)).unwrap()).unwrap(),
                    _ => {
                        let rows = 1 + random.below(64) as i64;
                        let ones = Tensor::ones([rows, 64], (Kind::Float, tch::Device::Cpu));
                        drop(model.run("f", &[ones]).unwrap());
                    }
                }
            }
        });
    }
    if let (true, Some(store)) = (with["real"] == json!(true), real::store()) {
        println!("real artifacts");
        std::thread::spawn(move || {
            let runtime = precast::Runtime::new(&store, precast::Device::Cpu).unwrap();
            loop {
                let model = runtime.load(real::MODEL).unwrap();
                for program in real::buckets(&model) {
                    let sizes: Vec<i64> = program.sizes.values().copied().collect();
                    let given = real::inputs(&program, &sizes, &mut Random(1));
                    (0..50).for_each(|_| drop(model.run(&program.module, &given).unwrap()));
                }
            }
        });
    }
    println!("at work");
    let begin = Instant::now();
    let end = move || -> ! {
        std::thread::sleep(after.saturating_sub(begin.elapsed()));
        exit(code)
    };
    if with["from_worker"] == json!(true) {
        std::thread::spawn(move || end());
        loop {
            std::thread::park();
        }
    }
    end()
}
