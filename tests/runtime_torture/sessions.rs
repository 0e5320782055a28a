//! Sessions under mixed calls: each has its own total, whatever others do, and closed ones leave nothing.

use precast::{
    Model,
    runtime::{RuntimeError, Session},
};
use serde_json::{Value, json};
use tch::Tensor;

use crate::{
    Random, act,
    fake::{Fake, Memory},
    flat, load,
    memory::resident,
    report::Tally,
    threads, x,
};

const SESSIONS: usize = 64;

/// Returns a model that answers `x` and the sum of all `x` of the session, and fails below 0.
fn totals(sessions: usize) -> Model {
    let fake = Fake::sized(1, 2)
        .constants(0)
        .stateful()
        .behaving("FAILS_BELOW");
    let runtime = Memory::with(&[fake]).runtime().sessions(sessions);
    runtime.load("fake").unwrap()
}

/// Makes `calls` calls in 64 sessions, shared out over four threads. A call that fails half way is `failed`: its session
/// answers nothing until it is reset.
pub fn mixed(calls: u64, seed: u64) -> Tally {
    let model = totals(SESSIONS);
    let parts = threads(4, |thread| {
        one_thread(&model, calls / 4, seed + thread as u64)
    });
    let mut all = Tally::default();
    parts.into_iter().for_each(|part| all.merge(part));
    all.set("calls", calls);
    all
}

fn one_thread(model: &Model, calls: u64, seed: u64) -> Tally {
    let mut random = Random(seed);
    let mut outcome = Tally::of(["answered", "refused", "failed", "forked"]);
    // A session and its total; none after a failed call.
    let open = || (model.session().unwrap(), Some(0.0_f32));
    let mut sessions: Vec<(Session<'_>, Option<f32>)> = (0..SESSIONS / 4).map(|_| open()).collect();
    for call in 0..calls {
        let at = random.below(sessions.len());
        let value = 1.0 + random.below(7) as f32;
        match random.below(20) {
            0 => {
                let (session, total) = &mut sessions[at];
                session.reset();
                *total = Some(0.0);
            }
            1 => {
                // A closed one makes room for a copy of another.
                let other = random.below(sessions.len());
                if other != at && sessions[other].1.is_some() {
                    let total = sessions[other].1;
                    drop(sessions.swap_remove(at));
                    let other = if other == sessions.len() { at } else { other };
                    let fork = sessions[other].0.fork().unwrap();
                    sessions.push((fork, total));
                    outcome.add("forked", 1);
                }
            }
            2 => {
                let (session, total) = &mut sessions[at];
                let error = session.run("f", &[x(1, 3)]).unwrap_err();
                let expected = if total.is_some() {
                    "NoBucket"
                } else {
                    "SessionFailed"
                };
                if error.name() != expected {
                    outcome.fail(format!("call {call}: {error}"));
                }
                outcome.add("refused", 1);
            }
            3 => {
                let (session, total) = &mut sessions[at];
                session.run("f", &[-x(1, 2)]).unwrap_err();
                *total = None;
                outcome.add("failed", 1);
            }
            _ => answer(&mut sessions[at], value, call, &mut outcome),
        }
    }
    outcome
}

fn answer(
    (session, total): &mut (Session<'_>, Option<f32>),
    value: f32,
    call: u64,
    outcome: &mut Tally,
) {
    let given = Tensor::from_slice(&[value, 0.0]).reshape([1, 2]);
    match (session.run("f", &[given]), &mut *total) {
        (Ok(out), Some(total)) => {
            *total += value;
            let (got, wanted) = (flat(&out[0])[0], value + *total);
            if got != wanted {
                outcome.fail(format!("call {call}: {got}, not {wanted}"));
            }
            outcome.add("answered", 1);
        }
        (Err(RuntimeError::SessionFailed { .. }), None) => outcome.add("refused", 1),
        (Ok(_), None) => outcome.fail(format!("call {call}: a failed session answers")),
        (Err(error), _) => outcome.fail(format!("call {call}: {error}")),
    }
}

/// Opens and closes sessions one after the other, in a process of its own.
pub fn opened(sessions: u64) -> Tally {
    let mut outcome = Tally::default();
    outcome.set("sessions", sessions);
    match act::ask("sessions", &json!({ "sessions": sessions })) {
        Ok(answer) => {
            let grown = answer["grown"].as_f64().unwrap_or(f64::NAN) / f64::from(1 << 20);
            outcome.set("growth_mib", grown);
            if answer["wrong"] != 0 {
                outcome.fail(format!("sessions saw what another left: {answer}"));
            }
            if grown.is_nan() || grown > 1.0 {
                outcome.fail(format!("{grown:.2} MiB more"));
            }
        }
        Err(why) => outcome.fail(why),
    }
    outcome
}

pub fn opened_child(with: &Value) -> Value {
    let model = load(&[Fake::sized(64, 64).constants(0).stateful()]);
    let one = || {
        let mut session = model.session().unwrap();
        session.run("f", &[x(64, 64)]).unwrap();
        // x starts at 1: it and its sum over two calls.
        flat(&session.run("f", &[x(64, 64)]).unwrap()[0])[0] == 3.0
    };
    let wrong = |count: u64| (0..count).filter(|_| !one()).count();
    let first = wrong(500);
    let before = resident();
    let later = wrong(with["sessions"].as_u64().unwrap());
    json!({ "grown": resident() - before, "wrong": first + later })
}
