//! CUDA graphs, streams, uploads and swaps on a device, with the example's store.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use precast::runtime::cuda::{Graphs, Stream};
use tch::{Kind, Tensor};

use super::{encode, inputs, minilm, runtime, store};

const BUCKETS: [(i64, i64); 4] = [(1, 32), (1, 128), (8, 32), (8, 128)];

fn wait() {
    tch::Cuda::synchronize(0);
}

fn largest_error(a: &Tensor, b: &Tensor) -> f64 {
    f64::try_from((a - b).abs().max().to_kind(Kind::Double)).unwrap()
}

#[test]
fn a_graph_answers_what_the_artifact_answers() {
    let Some(store) = store() else { return };
    let (plain, graphs) = (
        minilm(&store, Graphs::Never),
        minilm(&store, Graphs::Always),
    );
    // Beside the buckets there may be a program for every size, which can't be captured and says so.
    for (program, reason) in graphs.without_graph() {
        assert!(program.dynamic.is_some(), "{}: {reason}", program.bucket());
    }
    for (batch, seq) in [(1, 32), (1, 20), (3, 100), (8, 128), (8, 32), (1, 128)] {
        let (ids, mask) = inputs(batch, seq);
        let answer = graphs.run("encode", &[&ids, &mask]).unwrap();
        assert!(answer.served().graph(), "batch={batch} seq={seq}");
        let error = largest_error(&Tensor::from(&answer[0]), &encode(&plain, &ids, &mask));
        assert!(error < 2e-3, "batch={batch} seq={seq} differs by {error}");
    }
}

#[test]
fn a_graphs_outputs_are_the_callers() {
    let Some(store) = store() else { return };
    let model = minilm(&store, Graphs::Always);
    let (ids, mask) = inputs(1, 32);
    let first = encode(&model, &ids, &mask);
    let kept = first.copy();
    // The same bucket again, and others of the same pool.
    for (batch, seq) in BUCKETS {
        let (other, mask) = inputs(batch, seq);
        drop(encode(&model, &(other + 7), &mask));
    }
    wait();
    assert!(first.equal(&kept), "a later replay wrote over it");
}

#[test]
fn threads_and_streams_share_a_graph() {
    let Some(store) = store() else { return };
    let model = minilm(&store, Graphs::Always);
    let wanted = BUCKETS.map(|(batch, seq)| {
        let (ids, mask) = inputs(batch, seq);
        encode(&model, &ids, &mask)
    });
    wait();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let wanted = wanted.each_ref().map(Tensor::shallow_clone);
            let model = &model;
            scope.spawn(move || {
                let stream = Stream::new(0).unwrap();
                // Half of them work on a stream of their own.
                let _scope = (thread % 2 == 0).then(|| stream.enter().unwrap());
                for round in 0..100 {
                    let at = (thread + round) % BUCKETS.len();
                    let (ids, mask) = inputs(BUCKETS[at].0, BUCKETS[at].1);
                    let same = encode(model, &ids, &mask).equal(&wanted[at]);
                    assert!(same, "thread {thread} round {round}");
                }
            });
        }
    });
}

#[test]
fn producer_and_consumer_may_use_different_streams() {
    let Some(store) = store() else { return };
    for graphs in [Graphs::Never, Graphs::Always] {
        let model = minilm(&store, graphs);
        let (ids, mask) = inputs(8, 128);
        let wanted = encode(&model, &ids, &mask);
        wait();
        let (producer, consumer) = (Stream::new(0).unwrap(), Stream::new(0).unwrap());
        for _ in 0..50 {
            let made = {
                let _scope = producer.enter().unwrap();
                // Long enough that a consumer without a wait would read unwritten memory.
                let big = Tensor::rand([4096, 4096], (Kind::Float, tch::Device::Cuda(0)));
                let none = big.matmul(&big).sum(Kind::Float).isnan();
                &ids + none.to_kind(Kind::Int64)
            };
            consumer.wait_for(&producer).unwrap();
            let answer = {
                let _scope = consumer.enter().unwrap();
                consumer.uses(&made).unwrap();
                encode(&model, &made, &mask)
            };
            Stream::current(0).unwrap().wait_for(&consumer).unwrap();
            assert!(answer.equal(&wanted), "{graphs:?}");
        }
    }
}

#[test]
fn a_swap_under_load_mixes_nothing_in_graphs() {
    let Some(store) = store() else { return };
    let model = minilm(&store, Graphs::Always);
    let (ids, mask) = inputs(1, 32);
    let wanted = encode(&model, &ids, &mask);
    wait();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..3)
            .map(|_| {
                let [ids, mask, wanted] = [&ids, &mask, &wanted].map(Tensor::shallow_clone);
                let (model, stop) = (&model, &stop);
                scope.spawn(move || {
                    let mut answers = 0;
                    while !stop.load(Relaxed) {
                        // The sets are equal in value, at other addresses: a mixed or freed one would answer otherwise.
                        assert!(encode(model, &ids, &mask).equal(&wanted));
                        answers += 1;
                    }
                    answers
                })
            })
            .collect();
        for _ in 0..20 {
            let set = runtime(&store, Graphs::AsBuilt).weights_of("minilm");
            model.swap(&set.unwrap()).unwrap();
        }
        stop.store(true, Relaxed);
        let answers = callers.into_iter().map(|caller| caller.join().unwrap());
        assert!(answers.sum::<usize>() > 0);
    });
}
