//! Sessions on a device, with and without CUDA graphs.

use std::time::Instant;

use precast::{
    Model,
    runtime::{Outputs, Session, cuda::Graphs},
};
use serde_json::json;

use super::{figure, random::Random, runtime, store_with, used};

const SESSIONS: usize = 64;
const CALLS: usize = 100_000;
/// Tokens of a conversation, so that it moves into the larger context on its way.
const LENGTH: usize = 40;

fn load(graphs: Graphs) -> Option<Model> {
    let (store, _) = store_with("decoder")?;
    let runtime = runtime(&store, graphs).sessions(SESSIONS + 1);
    Some(runtime.load("decoder").unwrap())
}

fn greedy(out: &Outputs) -> i64 {
    let logits = out.array::<f32>(0).unwrap();
    let last = &logits.data()[logits.data().len() - logits.shape()[2]..];
    let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
    best.unwrap() as i64
}

fn prompt(number: usize) -> Vec<i64> {
    let token = |at: usize| ((number * 31 + at * 7) % 97) as i64;
    (0..8).map(token).collect()
}

/// Generates a whole conversation. Returns its tokens.
fn alone(session: &mut Session<'_>, number: usize) -> Vec<i64> {
    let mut tokens = vec![greedy(&session.prefill(&prompt(number), &[]).unwrap())];
    while tokens.len() < LENGTH {
        let out = session.decode(tokens[tokens.len() - 1], &[]).unwrap();
        tokens.push(greedy(&out));
    }
    tokens
}

#[test]
fn sessions_with_graphs_never_see_each_other() {
    let (Some(plain), Some(graphs)) = (load(Graphs::Never), load(Graphs::Always)) else {
        return;
    };
    let mut expected = Vec::new();
    for number in 0..SESSIONS {
        let without = alone(&mut plain.session().unwrap(), number);
        let with = alone(&mut graphs.session().unwrap(), number);
        assert_eq!(with, without, "session {number}");
        expected.push(with);
    }
    let before = used();
    let mut sessions: Vec<Session<'_>> = (0..SESSIONS).map(|_| graphs.session().unwrap()).collect();
    let mut steps = vec![0; SESSIONS];
    let (mut random, mut graphed) = (Random(7), 0);
    let started = Instant::now();
    for _ in 0..CALLS {
        let at = random.below(SESSIONS);
        let session = &mut sessions[at];
        if steps[at] == LENGTH {
            session.reset();
            steps[at] = 0;
        }
        let out = match steps[at] {
            0 => session.prefill(&prompt(at), &[]),
            step => session.decode(expected[at][step - 1], &[]),
        };
        let out = out.unwrap();
        graphed += usize::from(out.served().graph());
        let step = steps[at];
        let wanted = expected[at][step];
        assert_eq!(greedy(&out), wanted, "session {at}, step {step}");
        steps[at] += 1;
    }
    assert_eq!(graphed, CALLS);
    figure(json!({
        "figure": "sessions with graphs",
        "sessions": SESSIONS,
        "calls": CALLS,
        "seconds": started.elapsed().as_secs_f64(),
        "device_mib": (used() - before) as f64 / super::MIB,
        "state_mib": (graphs.session_bytes() * SESSIONS as u64) as f64 / super::MIB,
    }));
}

#[test]
fn a_fork_and_a_later_session_have_graphs_of_their_own() {
    let Some(model) = load(Graphs::Always) else {
        return;
    };
    let mut first = model.session().unwrap();
    let tokens = alone(&mut first, 3);
    let mut fork = first.fork().unwrap();
    let (own, forked) = (first.decode(5, &[]).unwrap(), fork.decode(5, &[]).unwrap());
    assert_eq!(greedy(&own), greedy(&forked));
    fork.seek(8).unwrap();
    assert_eq!(greedy(&fork.decode(tokens[0], &[]).unwrap()), tokens[1]);
    assert_eq!(greedy(&first.decode(6, &[]).unwrap()), {
        let again = first.position();
        first.seek(again - 1).unwrap();
        greedy(&first.decode(6, &[]).unwrap())
    });
    drop((first, fork));
    // Tensors and graphs of the closed sessions; nothing of what they said.
    assert_eq!(alone(&mut model.session().unwrap(), 3), tokens);
    let before = used();
    for number in 0..200 {
        alone(&mut model.session().unwrap(), number);
    }
    assert!(used() - before < 1 << 20, "{} bytes", used() - before);
}
