//! Prompts: several calls of a session, of which none is made if one would be refused. And files of such sessions.

use std::fs;

use precast::{
    Model,
    record::{Dtype, First, State},
    runtime::{Session, Value},
};

use crate::fake::{Fake, Memory, layout, weights};

/// `seen[at] = ids; ids + extra`, as an exported graph.
const GRAPH: &str = r#"{"format": 1, "inputs": 4, "outputs": [6], "calls": [
    {"op": "aten::reshape", "args": {"self": {"value": 0}, "shape": [-1]}, "results": [4]},
    {"op": "aten::index_copy_",
     "args": {"self": {"value": 3}, "dim": 0, "index": {"value": 1}, "source": {"value": 4}}, "results": [5]},
    {"op": "aten::add.Tensor", "args": {"self": {"value": 0}, "other": {"value": 2}}, "results": [6]}]}"#;

/// The same, and then a call that fails.
const FAILS: &str = r#"{"format": 1, "inputs": 4, "outputs": [6], "calls": [
    {"op": "aten::reshape", "args": {"self": {"value": 0}, "shape": [-1]}, "results": [4]},
    {"op": "aten::index_copy_",
     "args": {"self": {"value": 3}, "dim": 0, "index": {"value": 1}, "source": {"value": 4}}, "results": [5]},
    {"op": "aten::reshape", "args": {"self": {"value": 0}, "shape": [3, 5]}, "results": [6]}]}"#;

/// Tokens from 0 to 49.
const TOKENS: [i64; 2] = [0, 50];
/// The sizes of the context.
const CONTEXTS: [i64; 2] = [8, 32];

/// Adds a module with a bucket of so many tokens in each context. `extra` is its number of other inputs.
fn add(memory: &mut Memory, module: &str, tokens: i64, extra: usize, graph: &str, first: &First) {
    for context in CONTEXTS {
        let mut program = memory.add_graph(module, context, tokens, graph);
        program.inputs[0].bounds = Some(TOKENS);
        program.inputs[1].bounds = Some([0, context]);
        let other = program.inputs[2].clone();
        program.inputs.resize(2 + extra, other);
        program.states = vec![State {
            name: "seen".to_owned(),
            layout: layout(Dtype::Int64, &[context]),
            dims: vec![Some("context".to_owned())],
            first: first.clone(),
        }];
        program.sizes.insert("context".to_owned(), context);
        memory.programs.insert(program.id, program);
    }
}

/// Returns a model whose prompts go through buckets of 4 and 2 tokens and through `decode`, with its graph and other
/// inputs.
fn model(decode: &str, extra: usize) -> Model {
    let mut memory = Memory::default();
    for tokens in [4, 2] {
        add(&mut memory, "prefill", tokens, 1, GRAPH, &First::Zeros);
    }
    add(&mut memory, "decode", 1, extra, decode, &First::Zeros);
    memory.load()
}

fn extra() -> [Value; 1] {
    [Value::new(&[100_i64], &[1]).unwrap()]
}

/// Returns the position and the tokens of a session.
fn seen(session: &mut Session<'_>) -> (usize, Vec<i64>) {
    let seen = session.state("seen").unwrap().to_vec().unwrap();
    (session.position(), seen)
}

#[test]
fn a_refused_prompt_changes_nothing_wherever_the_bad_token_is() {
    let model = model(GRAPH, 1);
    for begun in [0, 3] {
        let mut session = model.session().unwrap();
        if begun > 0 {
            session.prefill(&[40, 41, 42], &extra()).unwrap();
        }
        let before = seen(&mut session);
        assert_eq!(before.0, begun);
        let prompt = [1, 2, 3, 4, 5, 6, 7];
        for at in 0..prompt.len() {
            for bad in [-1, 50, i64::MIN, i64::MAX] {
                let mut prompt = prompt;
                prompt[at] = bad;
                let error = session.prefill(&prompt, &extra()).unwrap_err();
                assert_eq!(error.name(), "BadInput", "{error}");
                assert_eq!(seen(&mut session), before, "token {at}: {bad}");
            }
        }
        // Its calls are of 4, 2 and 1 tokens.
        let out = session.prefill(&prompt, &extra()).unwrap();
        assert_eq!(out.array::<i64>(0).unwrap().data(), [107]);
        let (position, tokens) = seen(&mut session);
        assert_eq!(position, begun + 7);
        assert_eq!(tokens[begun..begun + 7], prompt);
        assert_eq!(tokens[..begun], [40, 41, 42][..begun]);
    }
}

#[test]
fn a_prompt_that_outgrows_the_context_changes_nothing() {
    let model = model(GRAPH, 1);
    let mut session = model.session().unwrap();
    session.prefill(&[1; 5], &extra()).unwrap();
    let before = seen(&mut session);
    assert_eq!(before.1.len(), 8);
    for tokens in [28, 29, 31, 100] {
        let error = session.prefill(&vec![2; tokens], &extra()).unwrap_err();
        assert_eq!(error.name(), "BadInput", "{error}");
        assert_eq!(seen(&mut session), before, "{tokens} tokens");
    }
    // To its last position, over both sizes of the context.
    session.prefill(&[2; 27], &extra()).unwrap();
    assert_eq!(session.position(), 32);
    let full = seen(&mut session);
    assert_eq!(full.1, [vec![1; 5], vec![2; 27]].concat());
    session.decode(3, &extra()).unwrap_err();
    session.prefill(&[3], &extra()).unwrap_err();
    assert_eq!(seen(&mut session), full);
}

#[test]
fn a_prompt_whose_later_calls_take_other_inputs_changes_nothing() {
    let model = model(GRAPH, 2);
    let mut session = model.session().unwrap();
    session.prefill(&[1, 2], &extra()).unwrap();
    let before = seen(&mut session);
    for _ in 0..2 {
        // `decode` takes two.
        let error = session.prefill(&[3, 4, 5], &extra()).unwrap_err();
        assert_eq!(error.name(), "InputCount", "{error}");
        assert_eq!(seen(&mut session), before);
    }
    session.prefill(&[3, 4], &extra()).unwrap();
    assert_eq!(session.position(), 4);
}

#[test]
fn a_prompt_whose_later_calls_read_a_state_without_a_value_changes_nothing() {
    let mut memory = Memory::default();
    add(&mut memory, "prefill", 2, 1, GRAPH, &First::Zeros);
    let start = First::Output {
        module: "start".to_owned(),
        index: 0,
    };
    add(&mut memory, "decode", 1, 1, GRAPH, &start);
    // Its own state, beside that of `prefill`.
    let decode = memory
        .programs
        .values_mut()
        .filter(|program| program.module == "decode");
    decode.for_each(|program| program.states[0].name = "mood".to_owned());
    memory.add("start", &Fake::sized(1, 2).constants(0).salted(3));
    let model = memory.load();
    let mut session = model.session().unwrap();
    let error = session.prefill(&[1, 2, 3], &extra()).unwrap_err();
    assert!(error.to_string().contains("no value yet"), "{error}");
    assert_eq!(session.position(), 0);
    assert_eq!(session.bytes(), 0);
    let mood = session.state("mood").unwrap();
    session.set_state("mood", &mood).unwrap();
    session.prefill(&[1, 2, 3], &extra()).unwrap();
    assert_eq!(seen(&mut session).0, 3);
}

#[test]
fn a_prompt_that_fails_in_a_later_call_ends_the_session() {
    let model = model(FAILS, 1);
    let mut session = model.session().unwrap();
    let error = session.prefill(&[1, 2, 3], &extra()).unwrap_err();
    assert_eq!(error.name(), "Failed", "{error}");
    let error = session.prefill(&[1, 2], &extra()).unwrap_err();
    assert_eq!(error.name(), "SessionFailed");
    session.reset();
    session.prefill(&[1, 2], &extra()).unwrap();
    assert_eq!(session.position(), 2);
}

#[test]
fn a_request_is_counted_once() {
    let model = model(GRAPH, 1);
    let mut session = model.session().unwrap();
    session.prefill(&[1; 7], &extra()).unwrap();
    session.prefill(&[1, 2, 3, 50], &extra()).unwrap_err();
    let counts = model.counts().calls;
    let total: u64 = counts.iter().map(|calls| calls.count).sum();
    let refused = counts.iter().filter(|calls| calls.rung == "refused");
    assert_eq!((total, refused.count()), (4, 0), "{counts:?}");
}

/// Returns a session's model with other values of a weight that nothing reads.
fn tuned(scale: f32) -> Memory {
    let mut memory = Memory::default();
    add(&mut memory, "prefill", 2, 1, GRAPH, &First::Zeros);
    add(&mut memory, "decode", 1, 1, GRAPH, &First::Zeros);
    memory.weights = Some(memory.put(weights(&[("scale", &[scale])])));
    memory
}

#[test]
fn a_session_file_is_read_whole_with_its_own_weights_and_within_the_context() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.safetensors");
    let (model, other) = (tuned(1.0).load(), tuned(2.0).load());
    let mut session = model.session().unwrap();
    session.prefill(&[5, 6, 7], &extra()).unwrap();
    session.save(&path).unwrap();
    let saved = seen(&mut session);
    session.decode(8, &extra()).unwrap();
    let later = seen(&mut session);

    let refused = |session: &mut Session<'_>, why: &str| {
        let error = session.load(&path).unwrap_err();
        assert_eq!(error.name(), "SessionFile");
        assert!(error.to_string().contains(why), "{error}");
    };
    // One bit of each byte.
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1 << (at % 8);
        fs::write(&path, changed).unwrap();
        refused(&mut session, "");
        assert_eq!(seen(&mut session), later, "byte {at}");
    }
    fs::write(&path, &whole).unwrap();
    // Another fine-tune, and another model.
    let mut tuned_ = other.session().unwrap();
    tuned_.prefill(&[1, 2], &extra()).unwrap();
    let before = seen(&mut tuned_);
    refused(&mut tuned_, "it was written with the weights `");
    assert_eq!(seen(&mut tuned_), before);
    let named = tuned(1.0).runtime().load("else").unwrap();
    let mut of_another = named.session().unwrap();
    refused(&mut of_another, "of model `fake`, not of `else`");
    session.load(&path).unwrap();
    assert_eq!(seen(&mut session), saved);
    session.decode(8, &extra()).unwrap();
    assert_eq!(seen(&mut session), later);
    // To the last position of the larger context, and no further.
    session.prefill(&[1; 28], &extra()).unwrap();
    assert_eq!(session.position(), 32);
    session.save(&path).unwrap();
    session.reset();
    session.load(&path).unwrap();
    assert_eq!(session.position(), 32);
    assert!(session.decode(1, &extra()).is_err());
}
