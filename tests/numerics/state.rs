//! States and sessions on real artifacts: a decoder answers as eager does, in sessions that never meet.

use std::{
    io::Write,
    process::{Command, Stdio},
    sync::Barrier,
    thread,
};

use precast::{
    build::gate::{ChainProgram, ChainRequest, Question, StoredWeights, Verdict},
    runtime::{Model, Outputs, RuntimeError, Session, Value},
};

use crate::lab::{built, checkout, json, lab, libtorch, precast, python, runtime};

const DECODER: &str = "tests/numerics/decoder/precast.toml";
const PROMPT: [i64; 8] = [5, 17, 3, 80, 41, 9, 62, 2];
const STEPS: usize = 33;

fn decoder() -> Model {
    let store = precast::store::Store::open(&lab(DECODER).store).unwrap();
    runtime(&store).sessions(64).load("decoder").unwrap()
}

/// Runs a module on tokens at consecutive positions.
fn call(
    session: &mut Session<'_>,
    module: &str,
    tokens: &[i64],
    from: usize,
) -> Result<Outputs, RuntimeError> {
    let at: Vec<i64> = (from..from + tokens.len()).map(|at| at as i64).collect();
    let ids = Value::new(tokens, &[1, tokens.len()])?;
    session.run(module, &[ids, Value::new(&at, &[at.len()])?])
}

/// Returns the logits of the last position.
fn last(out: &Outputs) -> Vec<f32> {
    let logits = out.array::<f32>(0).unwrap();
    let width = *logits.shape().last().unwrap();
    logits.data()[logits.data().len() - width..].to_vec()
}

fn greedy(logits: &[f32]) -> i64 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as i64
}

/// Generates tokens one by one. Returns them, and the logits of each.
fn generate(session: &mut Session<'_>, prompt: &[i64], steps: usize) -> (Vec<i64>, Vec<Vec<f32>>) {
    let mut logits = vec![last(&call(session, "prefill", prompt, 0).unwrap())];
    let mut tokens = vec![greedy(&logits[0])];
    while tokens.len() < steps {
        let at = prompt.len() + tokens.len() - 1;
        let out = call(session, "decode", &tokens[tokens.len() - 1..], at).unwrap();
        logits.push(last(&out));
        tokens.push(greedy(&logits[logits.len() - 1]));
    }
    (tokens, logits)
}

#[test]
fn a_session_generates_what_eager_does_token_by_token() {
    let model = decoder();
    let mut session = model.session().unwrap();
    let (tokens, logits) = generate(&mut session, &PROMPT, STEPS);

    let folder = checkout().join("tests/numerics/decoder");
    let mut script = Command::new(python());
    let script = script.current_dir(&folder).arg("generate.py");
    let script = script.args([format!("{PROMPT:?}"), STEPS.to_string()]);
    let eager = json(script);
    assert_eq!(serde_json::json!(tokens), eager["tokens"]);
    let wanted = eager["logits"].as_array().unwrap();
    for (step, (got, want)) in logits.iter().zip(wanted).enumerate() {
        for (got, want) in got.iter().zip(want.as_array().unwrap()) {
            let (got, want) = (f64::from(*got), want.as_f64().unwrap());
            let near = (got - want).abs() <= 1e-4 * want.abs() + 1e-4;
            assert!(near, "step {step}: {got} {want}");
        }
    }

    // The helpers count positions; a prompt goes through buckets of 8 and 4, and the rest one by one.
    let mut helped = model.session().unwrap();
    let prompt: Vec<i64> = PROMPT.iter().chain(&PROMPT[..5]).copied().collect();
    let chunked = last(&helped.prefill(&prompt, &[]).unwrap());
    assert_eq!(helped.position(), 13);
    session.reset();
    for (at, token) in prompt.iter().enumerate() {
        let one = call(&mut session, "decode", &[*token], at).unwrap();
        if at + 1 == prompt.len() {
            assert_eq!(greedy(&last(&one)), greedy(&chunked));
        }
    }
    // Back to the end of the first eight: what comes later is forgotten.
    helped.seek(8).unwrap();
    let again = helped.decode(tokens[0], &[]).unwrap();
    assert_eq!(greedy(&last(&again)), tokens[1]);
    let error = helped.seek(10).unwrap_err();
    insta::assert_snapshot!(error, @"state `position`: 10 lies beyond 9, the tokens of the session");
}

/// Has a gate's process compare 32 tokens of the decoder, with changed programs, with eager.
fn chain(change: impl Fn(&mut precast::record::Program)) -> Verdict {
    let store = precast::store::Store::open(&lab(DECODER).store).unwrap();
    let release = store.releases().get("decoder", None).unwrap().unwrap();
    let programs = release.programs.iter().map(|id| {
        let mut program = store.records().program(id).unwrap().unwrap();
        change(&mut program);
        ChainProgram {
            program,
            rtol: None,
            atol: None,
            compute_dtypes: vec![],
        }
    });
    let question = Question::Chain(Box::new(ChainRequest {
        store: store.path().to_owned(),
        chain: programs.collect(),
        shim: release.shims[0].clone(),
        weights: StoredWeights {
            object: release.weights,
            aliases: release.aliases,
        },
        tokens: 32,
    }));
    let mut gate = precast(store.path(), &["__gate", "--libtorch"]);
    let gate = gate.arg(libtorch()).stdin(Stdio::piped());
    let mut gate = gate.stdout(Stdio::piped()).spawn().unwrap();
    let asked = serde_json::to_vec(&question).unwrap();
    gate.stdin.take().unwrap().write_all(&asked).unwrap();
    let output = gate.wait_with_output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_release_is_compared_with_eager_from_call_to_call() {
    assert_eq!(built(DECODER)["generated"], 32);
    let Verdict::Passed { report } = chain(|_| {}) else {
        panic!("the programs of the release agree with eager");
    };
    assert_eq!(report.steps, Some(32));
    // Two weights are exchanged in the larger context, which the session enters at position 16.
    let verdict = chain(|program| {
        if program.module == "decode" && program.sizes["context"] == 64 {
            let binding = &mut program.steps[0].binding;
            let [first, second] = [0, 1].map(|block| format!("blocks.{block}.out.weight"));
            for name in binding.values_mut() {
                if *name == first {
                    name.clone_from(&second);
                } else if *name == second {
                    name.clone_from(&first);
                }
            }
        }
    });
    let Verdict::Failed { message } = verdict else {
        panic!("other weights pass");
    };
    let expected = "`decode`, token 13 of a session: output `output` differs from eager in ";
    assert!(message.starts_with(expected), "{message}");
    // An input of the size of the prompt that is no position: a session can't call it with tokens.
    let verdict = chain(|program| {
        let inputs = program.inputs.iter_mut();
        inputs.for_each(|input| input.within = None);
    });
    let Verdict::Passed { report } = verdict else {
        panic!("a module without positions is no chain");
    };
    assert_eq!(report.steps, None);
}

#[test]
#[ignore = "long: `make test-long`"]
fn a_host_compares_a_session_with_eager_too() {
    let gated = lab(DECODER).json(&["verify", "--host", "decoder"]);
    let release = &gated["releases"][0];
    assert_eq!(release["passed"], true, "{release:#}");
    let compared = serde_json::json!({"tokens": 32, "error": null, "not_compared": null});
    assert_eq!(release["chain"], compared);
}

#[test]
fn a_session_that_outgrows_its_context_moves_into_the_next() {
    let model = decoder();
    let mut session = model.session().unwrap();
    let bucket = |out: &Outputs| out.served().program().sizes["context"];
    let small = 6 * 16 * 32 * 4;
    assert_eq!(bucket(&session.prefill(&PROMPT, &[]).unwrap()), 16);
    assert_eq!(session.bytes(), small);
    // Position 15 is the last that fits.
    for at in 8..64 {
        let out = session.decode(PROMPT[at % 8], &[]).unwrap();
        assert_eq!(bucket(&out), if at < 16 { 16 } else { 64 }, "{at}");
    }
    assert_eq!(session.bytes(), 4 * small);
    assert_eq!(session.bytes(), model.session_bytes());
    // The largest is full: an error, and the states are as they were.
    let state = |session: &mut Session<'_>| {
        let state = session.state("blocks.2.v").unwrap();
        state.to_vec::<f32>().unwrap()
    };
    let before = state(&mut session);
    let error = session.decode(1, &[]).unwrap_err();
    insta::assert_snapshot!(error, @"module `decode`, input `at`: the context is full: `context` has positions 0 to 63, and the call has position 64");
    let hint = error.hint();
    for way in [
        "`seek` back or `reset`",
        "a larger size under [module.buckets]",
    ] {
        assert!(hint.contains(way), "{hint}");
    }
    assert_eq!(before, state(&mut session));
    // The same for a prompt.
    session.reset();
    let error = session.prefill(&[1; 70], &[]).unwrap_err();
    assert!(error.to_string().contains("the context is full"), "{error}");
    // The next session starts small again.
    drop(session);
    let mut later = model.session().unwrap();
    assert_eq!(bucket(&later.prefill(&PROMPT[..4], &[]).unwrap()), 16);
}

#[test]
fn sessions_never_see_each_other() {
    let model = decoder();
    let prompt = |number: usize| -> Vec<i64> {
        let token = |at: usize| ((number * 31 + at * 7) % 97) as i64;
        (0..8).map(token).collect()
    };
    let alone = |number| generate(&mut model.session().unwrap(), &prompt(number), 12).0;
    let alone: Vec<Vec<i64>> = (0..16).map(alone).collect();
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for worker in 0..4 {
            let (model, alone, start) = (&model, &alone, &start);
            scope.spawn(move || {
                let numbers: Vec<usize> = (0..16).filter(|number| number % 4 == worker).collect();
                let sessions = numbers.iter().map(|_| model.session().unwrap());
                let mut sessions: Vec<_> = sessions.collect();
                start.wait();
                let mut tokens: Vec<Vec<i64>> = vec![vec![]; numbers.len()];
                for step in 0..12 {
                    for (at, session) in sessions.iter_mut().enumerate() {
                        let out = match step {
                            0 => call(session, "prefill", &prompt(numbers[at]), 0),
                            _ => call(session, "decode", &tokens[at][step - 1..], 7 + step),
                        };
                        tokens[at].push(greedy(&last(&out.unwrap())));
                    }
                }
                for (at, number) in numbers.iter().enumerate() {
                    assert_eq!(tokens[at], alone[*number]);
                }
            });
        }
    });
}

#[test]
fn a_session_forks_is_saved_and_starts_anew() {
    let model = decoder();
    let mut session = model.session().unwrap();
    let (tokens, _) = generate(&mut session, &PROMPT, 4);
    assert_eq!(session.bytes(), 3 * 2 * 16 * 32 * 4);
    let next = |session: &mut Session<'_>, token: i64| {
        last(&call(session, "decode", &[token], PROMPT.len() + 3).unwrap())
    };

    // A fork has the states of its origin, and its own from then on.
    let mut fork = session.fork().unwrap();
    let wanted = next(&mut session, tokens[3]);
    next(&mut fork, 1);
    assert_eq!(next(&mut fork, tokens[3]), wanted);

    // A file of a session continues it.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session.safetensors");
    session.save(&file).unwrap();
    fork.reset();
    let empty = next(&mut fork, tokens[3]);
    assert_ne!(empty, wanted, "the prompt is gone");
    fork.load(&file).unwrap();
    assert_eq!(next(&mut fork, tokens[3]), wanted);

    // What is refused changes nothing.
    let state = |session: &mut Session<'_>| {
        let state = session.state("blocks.0.k").unwrap();
        state.to_vec::<f32>().unwrap()
    };
    let before = state(&mut session);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.truncate(bytes.len() - 100);
    std::fs::write(&file, bytes).unwrap();
    let error = session.load(&file).unwrap_err();
    assert!(error.to_string().contains("cut off"), "{error}");
    for (token, at) in [(97, 3), (1, 64)] {
        let error = call(&mut session, "decode", &[token], at).unwrap_err();
        assert_eq!(error.name(), "BadInput", "{error}");
    }
    assert_eq!(state(&mut session), before);

    // The next session starts with first values, whatever the last one left.
    drop(session);
    let mut later = model.session().unwrap();
    assert_eq!(next(&mut later, tokens[3]), empty);
}
