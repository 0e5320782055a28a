//! The memory of a process: weights held once, out of memory as an error, no leak.

use precast::{Runtime, runtime::RuntimeError};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::{
    act,
    fake::{self, Fake, Memory},
    flat, load,
    report::Tally,
    wrong, x,
};

const MIB: f64 = 1024.0 * 1024.0;

/// Returns a field of `/proc/self/status`, in bytes.
fn status(field: &str) -> i64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let number = line.unwrap().trim_matches([':', ' ', '\t', 'k', 'B']);
    number.parse::<i64>().unwrap() << 10
}

/// Resident bytes, after the C allocator's unused memory was given back.
pub fn resident() -> i64 {
    // SAFETY: it only gives free memory back.
    unsafe { libc::malloc_trim(0) };
    status("VmRSS")
}

/// Loads one bucket, then `buckets` of them, on one weight set. Each bucket after the first adds less than a hundredth of
/// the weights.
pub fn sharing(buckets: u64, bytes: u64) -> Tally {
    let mut outcome = Tally::default();
    let weights = bytes as f64 / MIB;
    outcome.set("buckets", buckets);
    outcome.set("weights_mib", weights);
    let answer = match act::ask("sharing", &json!({ "buckets": buckets, "bytes": bytes })) {
        Ok(answer) => answer,
        Err(why) => {
            outcome.fail(why);
            return outcome;
        }
    };
    let added = answer["added"].as_f64().unwrap() / MIB;
    outcome.set("added_mib", added);
    outcome.set("share", added / weights);
    if added / weights >= 0.01 {
        let added = format!("{buckets} buckets added {answer} to {bytes} bytes of weights");
        outcome.fail(added);
    }
    // Loading them touched the weights: a copy of them is seen.
    if answer["copy"].as_f64().unwrap() < 0.9 * bytes as f64 {
        outcome.fail(format!("a copy of the weights does not show: {answer}"));
    }
    outcome
}

pub fn sharing_child(with: &Value) -> Value {
    let [buckets, bytes] = ["buckets", "bytes"].map(|name| with[name].as_i64().unwrap());
    let elements = bytes / 4;
    let fakes = (1..=buckets).map(|rows| Fake::sized(rows, 2).elements(elements));
    let fakes: Vec<Fake> = fakes.collect();
    let runtime = |fakes: &[Fake]| {
        let mut memory = Memory::with(fakes);
        let weights = fake::weights(&[("scale", &vec![2.0; elements as usize])]);
        memory.weights = Some(memory.put(weights));
        memory.runtime()
    };
    let (one, all) = (runtime(&fakes[..1]), runtime(&fakes));
    // Both sources hold the bytes; each runtime maps them once more, as a store's file is mapped.
    let answers = |model: &precast::Model, fakes: &[Fake]| {
        for fake in fakes {
            let out = model.run("f", &[x(fake.rows, fake.cols)]).unwrap();
            assert_eq!(flat(&out[0]), flat(&(x(fake.rows, fake.cols) * 2)));
        }
    };
    let touch = |runtime: &Runtime| {
        let weights = runtime.weights_of("fake").unwrap();
        drop(weights.read("scale").unwrap());
    };
    // The first of each kind pays for libtorch's own start.
    let first = one.load("fake").unwrap();
    answers(&first, &fakes[..1]);
    touch(&one);
    let begin = resident();
    let kept = all.load("fake").unwrap();
    touch(&all);
    answers(&kept, &fakes);
    let with_weights = resident() - begin;
    // The growth without the weights themselves.
    let added = with_weights - bytes;
    let copy = {
        let begin = resident();
        let copy = all.weights_of("fake").unwrap().read("scale").unwrap();
        let grown = resident() - begin;
        drop(copy);
        grown
    };
    json!({ "added": added, "copy": copy })
}

/// Makes `calls` good and as many refused calls; then a tenth as many of an artifact that forgets one tensor a call.
pub fn leaks(calls: u64) -> Tally {
    let mut outcome = Tally::default();
    outcome.set("good_calls", calls);
    outcome.set("refused_calls", calls);
    // A tensor of 128 bytes and its objects: at least 256 bytes a call.
    let leaked = calls as f64 / 10.0 * 256.0 / MIB;
    let flat = f64::NEG_INFINITY..=1.0;
    let seeded = leaked..=f64::INFINITY;
    for (name, kind, calls, expected) in [
        ("good_growth_mib", "good", calls, flat.clone()),
        ("refused_growth_mib", "refused", calls, flat),
        ("seeded_growth_mib", "leaking", calls / 10, seeded),
    ] {
        let answer = act::ask("leaks", &json!({ "kind": kind, "calls": calls }));
        match answer.as_ref().map(|answer| answer["grown"].as_f64()) {
            Ok(Some(bytes)) => {
                let mib = bytes / MIB;
                outcome.set(name, mib);
                if !expected.contains(&mib) {
                    outcome.fail(format!("{name}: {mib:.2} MiB, not {expected:?}"));
                }
            }
            _ => outcome.fail(format!("{name}: {answer:?}")),
        }
    }
    outcome
}

pub fn leaks_child(with: &Value) -> Value {
    let calls = with["calls"].as_u64().unwrap();
    let kind = with["kind"].as_str().unwrap();
    let behaviour = match kind {
        "leaking" => "LEAKS",
        _ => "FAILS_BELOW",
    };
    let model = load(&[Fake::of(behaviour).outputs(2)]);
    let (whole, small, negative) = (x(8, 4), x(3, 2), x(8, 4) - 2);
    let wrong = wrong();
    let run = |input: &Tensor| model.run("f", std::slice::from_ref(input));
    let call = |i: u64| match (kind, i % 4) {
        ("refused", 3) => drop(run(&negative).unwrap_err()),
        ("refused", _) => drop(run(&wrong[(i % 5 % 4) as usize]).unwrap_err()),
        (_, 0) => drop(run(&small).unwrap()),
        _ => drop(run(&whole).unwrap()),
    };
    (0..calls.min(20_000)).for_each(call);
    let before = resident();
    (0..calls).for_each(call);
    json!({ "grown": resident() - before })
}

/// Calls a bucket whose output and padding buffer exceed the process's limit, `rounds` times. Each is refused for want of memory.
pub fn exhaustion(rounds: u64) -> Tally {
    let mut outcome = Tally::default();
    outcome.set("rounds", rounds);
    match act::ask("exhaustion", &json!({ "rounds": rounds })) {
        Ok(answer) => outcome.merge(serde_json::from_value(answer).unwrap()),
        Err(why) => outcome.fail(why),
    }
    outcome
}

pub fn exhaustion_child(with: &Value) -> Value {
    // 100 MiB: more than the C allocator's arena of a thread.
    const SIDE: i64 = 5120;
    let model = load(&[Fake::sized(SIDE, SIDE)]);
    let small = load(&[Fake::sized(2, 3)]);
    let whole = Tensor::ones([SIDE, SIDE], (Kind::Float, tch::Device::Cpu));
    let corner = x(5, 7);
    let (mut refused, mut bad) = (0, Vec::new());
    drop(model.run("f", std::slice::from_ref(&whole)).unwrap());
    let mut begin = 0;
    let rounds = with["rounds"].as_u64().unwrap();
    for round in 0..rounds {
        // A model of its own: its padding buffer is not there yet.
        let fresh = load(&[Fake::sized(SIDE, SIDE)]);
        if round == 1 {
            begin = resident();
        }
        limit(Some(status("VmSize") + (12 << 20)));
        let results = [
            model.run("f", std::slice::from_ref(&whole)),
            fresh.run("f", std::slice::from_ref(&corner)),
        ];
        let answer = small.run("f", &[x(2, 3)]).map(|out| flat(&out[0]));
        limit(None);
        for result in results {
            match result {
                Err(error @ (RuntimeError::Failed { .. } | RuntimeError::Tensor { .. }))
                    if error.to_string().contains("memory") =>
                {
                    refused += 1;
                }
                other => {
                    let shape = other.map(|out| out[0].shape());
                    bad.push(format!("round {round}: {shape:?}"));
                }
            }
        }
        if answer.as_ref().ok() != Some(&flat(&(x(2, 3) * 2))) {
            bad.push(format!("round {round}: a small call: {answer:?}"));
        }
        // With memory it answers, whole and padded.
        let out = fresh.run("f", std::slice::from_ref(&corner));
        let out = out.map(|out| flat(&out[0]));
        if out.as_ref().ok() != Some(&flat(&(&corner * 2))) {
            bad.push(format!("round {round}: afterwards: {out:?}"));
        }
    }
    let growth = (resident() - begin) as f64 / MIB;
    if refused != 2 * rounds || growth > 8.0 {
        let grown = format!("{refused} calls were refused, and {growth:.2} MiB grew");
        bad.push(grown);
    }
    json!({ "refused": refused, "growth_mib": growth, "bad": bad })
}

/// Sets how much address space the process may have.
fn limit(bytes: Option<i64>) {
    let all = libc::RLIM_INFINITY;
    let limit = libc::rlimit {
        rlim_cur: bytes.map_or(all, |bytes| bytes as libc::rlim_t),
        rlim_max: all,
    };
    // SAFETY: a valid pointer to the struct the call is declared with.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}
