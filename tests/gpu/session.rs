//! Calls of graphs, which copy, and sessions, which work on the static tensors: with `one-block`, whose input is of
//! floats, and `minilm`, whose inputs are integers.

use std::io::Write;

use precast::{
    Device, Model, Runtime, Store,
    record::Sizes,
    runtime::cuda::{Graphs, Stream},
};
use tch::{Kind, Tensor};

use super::{encode, inputs, store};

fn load(store: &Store, model: &str, graphs: Graphs) -> Model {
    Runtime::new(store, Device::Cuda(0))
        .unwrap()
        .graphs(graphs)
        .load(model)
        .unwrap()
}

/// The store, where it has `one-block`.
fn block(test: &str) -> Option<Store> {
    let store = store(test)?;
    if let Ok(Some(_)) = store.releases().get("one-block", None) {
        return Some(store);
    }
    let _ = writeln!(
        std::io::stderr(),
        "{test}: skipped: the store has no `one-block`"
    );
    None
}

fn sizes(batch: i64, seq: i64) -> Sizes {
    Sizes::from([("batch".to_owned(), batch), ("seq".to_owned(), seq)])
}

fn random(batch: i64, seq: i64) -> Tensor {
    Tensor::randn([batch, seq, 1024], (Kind::BFloat16, tch::Device::Cuda(0)))
}

fn run(model: &Model, input: &Tensor) -> Tensor {
    Tensor::from(&model.run("forward", &[input]).unwrap()[0])
}

#[test]
fn a_session_copies_nothing() {
    let Some(store) = block("a_session_copies_nothing") else {
        return;
    };
    let plain = load(&store, "one-block", Graphs::Never);
    let graphs = load(&store, "one-block", Graphs::Always);
    for (batch, seq) in [(1, 64), (8, 512)] {
        let addresses = || {
            let session = graphs.session("forward", &sizes(batch, seq)).unwrap();
            let (inputs, outputs) = (session.inputs(), session.outputs());
            let all = inputs.iter().chain(&outputs);
            all.map(|tensor| tensor.address()).collect::<Vec<_>>()
        };
        let before = addresses();
        for round in 0..4 {
            let wanted;
            {
                let mut session = graphs.session("forward", &sizes(batch, seq)).unwrap();
                let input = Tensor::from(session.inputs().remove(0));
                // The operator that makes the input writes it where the graph reads it.
                let made = random(batch, seq);
                let _ = made.f_mul_out(&input, &made.ones_like()).unwrap();
                wanted = run(&plain, &made);
                session.replay().unwrap();
                let answer = Tensor::from(session.outputs().remove(0));
                assert!(
                    answer.equal(&wanted),
                    "batch={batch} seq={seq} round {round}"
                );
            }
            // Calls between sessions copy to the static tensors, and leave them where they are.
            let other = random(batch, seq);
            assert!(run(&graphs, &other).equal(&run(&plain, &other)));
            assert_eq!(addresses(), before, "batch={batch} seq={seq}");
        }
    }
    let model = load(&store, "minilm", Graphs::Always);
    let (ids, mask) = inputs(1, 32);
    let wanted = encode(&model, &ids, &mask);
    let mut session = model.session("encode", &sizes(1, 32)).unwrap();
    for (to, from) in session.inputs().into_iter().zip([&ids, &mask]) {
        Tensor::from(to).copy_(from);
    }
    session.replay().unwrap();
    assert!(Tensor::from(&session.outputs()[0]).equal(&wanted));
}

#[test]
fn a_graph_answers_for_inputs_wherever_they_are() {
    let Some(store) = block("a_graph_answers_for_inputs_wherever_they_are") else {
        return;
    };
    let plain = load(&store, "one-block", Graphs::Never);
    let graphs = load(&store, "one-block", Graphs::Always);
    for (batch, seq) in [(1, 64), (8, 512)] {
        // One stays alive, so that the others are elsewhere.
        let inputs: Vec<Tensor> = (0..8).map(|_| random(batch, seq)).collect();
        let wanted: Vec<Tensor> = inputs.iter().map(|input| run(&plain, input)).collect();
        let session = |input: &Tensor| {
            let mut session = graphs.session("forward", &sizes(batch, seq)).unwrap();
            Tensor::from(&session.inputs()[0]).copy_(input);
            session.replay().unwrap();
            Tensor::from(&session.outputs()[0]).copy()
        };
        // Answers are kept, so outputs are elsewhere each time; a session between them works on the static tensors.
        let mut answers = Vec::new();
        for (at, input) in inputs.iter().chain(&inputs).enumerate() {
            answers.push(run(&graphs, input));
            if at % 3 == 0 {
                assert!(session(input).equal(&wanted[at % 8]), "session {at}");
            }
        }
        for (at, answer) in answers.iter().enumerate() {
            assert!(answer.equal(&wanted[at % 8]), "batch={batch} call {at}");
        }
        // Not aligned as torch aligns memory: the same.
        let numbers = batch * seq * 1024;
        let shifted = Tensor::zeros([numbers + 8], (Kind::BFloat16, tch::Device::Cuda(0)))
            .narrow(0, 8, numbers)
            .view([batch, seq, 1024]);
        shifted.shallow_clone().copy_(&inputs[0]);
        assert!(run(&graphs, &shifted).equal(&wanted[0]), "shifted");
        // Padded ones leave nothing behind for the next.
        let small = inputs[1].narrow(1, 0, seq - 7).contiguous();
        let answer = run(&graphs, &small);
        assert_eq!(answer.size(), [batch, seq - 7, 1024]);
        assert!(answer.equal(&run(&plain, &small)), "padded");
        assert!(run(&graphs, &inputs[2]).equal(&wanted[2]), "after padding");
    }
}

#[test]
fn inputs_may_be_dropped_while_a_graph_reads_them() {
    let Some(store) = block("inputs_may_be_dropped_while_a_graph_reads_them") else {
        return;
    };
    let plain = load(&store, "one-block", Graphs::Never);
    let graphs = load(&store, "one-block", Graphs::Always);
    let kept: Vec<Tensor> = (0..4).map(|_| random(8, 512)).collect();
    let wanted: Vec<Tensor> = kept.iter().map(|input| run(&plain, input)).collect();
    let stream = Stream::new(0).unwrap();
    for own in [false, true] {
        stream.wait_for(&Stream::current(0).unwrap()).unwrap();
        let scope = own.then(|| stream.enter().unwrap());
        // Queued: each call's input is dropped, and its memory given to the next, before the device has come to it.
        let answers: Vec<Tensor> = (0..64)
            .map(|at| run(&graphs, &kept[at % 4].copy()))
            .collect();
        stream.synchronize().unwrap();
        tch::Cuda::synchronize(0);
        drop(scope);
        for (at, answer) in answers.iter().enumerate() {
            assert!(answer.equal(&wanted[at % 4]), "own stream {own}, call {at}");
        }
    }
}

#[test]
fn an_output_of_a_session_may_be_an_input() {
    let Some(store) = block("an_output_of_a_session_may_be_an_input") else {
        return;
    };
    let graphs = load(&store, "one-block", Graphs::Always);
    for (batch, seq) in [(1, 64), (8, 512), (8, 64)] {
        let given = {
            let mut session = graphs.session("forward", &sizes(batch, seq)).unwrap();
            Tensor::from(&session.inputs()[0]).copy_(&random(batch, seq));
            session.replay().unwrap();
            Tensor::from(session.outputs().remove(0))
        };
        // It is copied in before the replay writes over it.
        let kept = given.copy();
        let answer = run(&graphs, &given);
        assert!(
            answer.equal(&run(&graphs, &kept)),
            "batch={batch} seq={seq}"
        );
    }
}
