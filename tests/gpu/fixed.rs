//! Calls of graphs, and sessions, which hold graphs of their own: with `one-block`, whose input is of floats, and `minilm`, whose
//! inputs are integers.

use precast::{
    Model, Store,
    record::Sizes,
    runtime::cuda::{Fixed, Graphs, Stream},
};
use tch::{Kind, Tensor};

use super::{encode, inputs, minilm, runtime, store_with};

/// The store, where it has `one-block`, and that model without graphs and with them.
fn block() -> Option<(Store, Model, Model)> {
    let (store, _) = store_with("one-block")?;
    let load = |graphs| runtime(&store, graphs).load("one-block").unwrap();
    let (plain, graphs) = (load(Graphs::Never), load(Graphs::Always));
    Some((store, plain, graphs))
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

/// Runs a fixed on an input, and returns a copy of its output.
fn answer(fixed: &mut Fixed<'_>, input: &Tensor) -> Tensor {
    fixed.inputs()[0].write(input).unwrap();
    fixed.run().unwrap();
    Tensor::from(fixed.outputs()[0].copied().unwrap())
}

fn addresses(fixed: &mut Fixed<'_>) -> Vec<usize> {
    let mut all: Vec<usize> = fixed.inputs().iter().map(|own| own.address()).collect();
    all.extend(fixed.outputs().iter().map(|own| own.address()));
    all
}

#[test]
fn a_session_works_on_static_tensors() {
    let Some((store, plain, graphs)) = block() else {
        return;
    };
    for (batch, seq) in [(1, 64), (8, 512)] {
        let mut fixed = graphs.fixed("forward", &sizes(batch, seq)).unwrap();
        assert!(fixed.is_graph());
        let before = addresses(&mut fixed);
        for round in 0..4 {
            let input = random(batch, seq);
            let wanted = run(&plain, &input);
            let got = answer(&mut fixed, &input);
            assert!(got.equal(&wanted), "batch={batch} seq={seq} round {round}");
            // A call between two runs has a slot of its own.
            let other = random(batch, seq);
            assert!(run(&graphs, &other).equal(&run(&plain, &other)));
            let kept = Tensor::from(fixed.outputs()[0].copied().unwrap());
            assert!(kept.equal(&wanted), "batch={batch} seq={seq} round {round}");
            assert_eq!(addresses(&mut fixed), before);
        }
    }
    let model = minilm(&store, Graphs::Always);
    let (ids, mask) = inputs(1, 32);
    let wanted = encode(&model, &ids, &mask);
    let mut fixed = model.fixed("encode", &sizes(1, 32)).unwrap();
    for (to, from) in fixed.inputs().iter_mut().zip([&ids, &mask]) {
        to.write(from).unwrap();
    }
    fixed.run().unwrap();
    let got = Tensor::from(fixed.outputs()[0].copied().unwrap());
    assert!(got.equal(&wanted));
}

#[test]
fn two_sessions_of_one_bucket_hold_two_graphs() {
    let Some((_, plain, graphs)) = block() else {
        return;
    };
    for (batch, seq) in [(1, 64), (8, 512)] {
        let open = || graphs.fixed("forward", &sizes(batch, seq)).unwrap();
        let mut both = [open(), open()];
        let [first, second] = both.each_mut().map(addresses);
        assert!(first.iter().all(|address| !second.contains(address)));
        let inputs = [random(batch, seq), random(batch, seq)];
        let wanted = inputs.each_ref().map(|input| run(&plain, input));
        for _ in 0..4 {
            // Both run before the first is read.
            for (fixed, input) in both.iter_mut().zip(&inputs) {
                fixed.inputs()[0].write(input).unwrap();
                fixed.run().unwrap();
            }
            for (fixed, wanted) in both.iter().zip(&wanted) {
                let got = Tensor::from(fixed.outputs()[0].copied().unwrap());
                assert!(got.equal(wanted), "batch={batch} seq={seq}");
            }
        }
        // On threads and streams of their own.
        std::thread::scope(|scope| {
            let pairs = inputs.iter().zip(&wanted);
            let pairs = pairs.map(|(x, y)| (x.shallow_clone(), y.shallow_clone()));
            for (fixed, (input, wanted)) in both.iter_mut().zip(pairs) {
                scope.spawn(move || {
                    let stream = Stream::new(0).unwrap();
                    let _scope = stream.enter().unwrap();
                    for round in 0..64 {
                        let got = answer(fixed, &input);
                        stream.synchronize().unwrap();
                        assert!(got.equal(&wanted), "batch={batch} seq={seq} round {round}");
                    }
                });
            }
        });
    }
}

#[test]
fn a_session_keeps_its_weights_over_a_swap() {
    let Some((store, plain, graphs)) = block() else {
        return;
    };
    let input = random(1, 64);
    let wanted = run(&plain, &input);
    let mut fixed = graphs.fixed("forward", &sizes(1, 64)).unwrap();
    // Elsewhere on the device; the old ones are freed with the fixed's graph.
    let other = runtime(&store, Graphs::AsBuilt).weights_of("one-block");
    graphs.swap(&other.unwrap()).unwrap();
    for _ in 0..4 {
        assert!(run(&graphs, &input).equal(&wanted));
        assert!(answer(&mut fixed, &input).equal(&wanted));
    }
    drop(fixed);
    let mut fixed = graphs.fixed("forward", &sizes(1, 64)).unwrap();
    assert!(answer(&mut fixed, &input).equal(&wanted));
}

#[test]
fn a_graph_answers_for_inputs_wherever_they_are() {
    let Some((_, plain, graphs)) = block() else {
        return;
    };
    for (batch, seq) in [(1, 64), (8, 512)] {
        // One stays alive, so that the others are elsewhere.
        let inputs: Vec<Tensor> = (0..8).map(|_| random(batch, seq)).collect();
        let wanted: Vec<Tensor> = inputs.iter().map(|input| run(&plain, input)).collect();
        let fixed = |input: &Tensor| {
            let mut fixed = graphs.fixed("forward", &sizes(batch, seq)).unwrap();
            answer(&mut fixed, input)
        };
        // Answers are kept, so outputs are elsewhere each time.
        let mut answers = Vec::new();
        for (at, input) in inputs.iter().chain(&inputs).enumerate() {
            answers.push(run(&graphs, input));
            if at % 3 == 0 {
                assert!(fixed(input).equal(&wanted[at % 8]), "fixed {at}");
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
    let Some((_, plain, graphs)) = block() else {
        return;
    };
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
