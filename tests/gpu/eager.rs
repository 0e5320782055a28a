//! Eager on a device, with the store of `eager.toml`.

use precast::{Device, Runtime, runtime::cuda::Stream};
use tch::{Kind, Tensor};

use super::store_with;

#[test]
fn padded_calls_of_two_streams_do_not_meet() {
    let Some((store, _)) = store_with("eager-block") else {
        return;
    };
    let model = (Runtime::new(&store, Device::Cuda(0)).unwrap())
        .load("eager-block")
        .unwrap();
    let cuda = tch::Device::Cuda(0);
    let run = |input: &Tensor| Tensor::from(&model.run("forward", &[input]).unwrap()[0]);
    let inputs: Vec<Tensor> = (0..8)
        .map(|at| Tensor::randn([1, 40 + at, 1024], (Kind::BFloat16, cuda)))
        .collect();
    let wanted: Vec<Tensor> = inputs.iter().map(run).collect();
    tch::Cuda::synchronize(0);
    let (late, soon) = (Stream::new(0).unwrap(), Stream::new(0).unwrap());
    let big = Tensor::rand([8192, 8192], (Kind::Float, cuda));
    tch::Cuda::synchronize(0);
    let mut answers = Vec::new();
    for round in 0..50 {
        let (one, other) = (round % 8, (round + 3) % 8);
        {
            // Later work on this stream is not done yet when the other stream's calls are.
            let _scope = late.enter().unwrap();
            drop(big.matmul(&big));
            answers.push((one, run(&inputs[one])));
        }
        let _scope = soon.enter().unwrap();
        answers.push((other, run(&inputs[other])));
    }
    tch::Cuda::synchronize(0);
    for (round, (at, answer)) in answers.iter().enumerate() {
        assert!(answer.equal(&wanted[*at]), "call {round}, input {at}");
    }
}
