//! Convolutions that add and rectify in their own kernel, with the stores of `residual/`.

use precast::runtime::cuda::Graphs;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::{runtime, store_with};

#[test]
fn convolutions_with_what_stands_behind_them_answer_as_eager_does() {
    let (Some((store, release)), Some(_)) = (store_with("residual"), store_with("residual-eager"))
    else {
        return;
    };
    // In both buckets all but the convolution added to another, and the last, whose kernel hides a NaN. Eager has the
    // sizes between them.
    for id in &release.programs {
        let program = store.records().program(id).unwrap().unwrap();
        if program.dynamic.is_some() {
            continue;
        }
        let [step] = program.steps.as_slice() else {
            panic!("one artifact a program: {program:?}");
        };
        let artifact = store.records().artifact(&step.artifact).unwrap().unwrap();
        let calls = store
            .objects()
            .map(&artifact.proxy.expect("calls by name"))
            .unwrap();
        let calls: Value = serde_json::from_slice(&calls).unwrap();
        let count = |operator: &str| {
            let nodes = calls["nodes"].as_array().unwrap().iter();
            let targets = nodes.map(|node| node["node"]["target"].as_str().unwrap());
            let is = |target: &&str| target.split(['.', ':']).any(|part| part == operator);
            targets.filter(is).count()
        };
        assert_eq!(count("cudnn_convolution_relu"), 3, "{calls}");
        assert_eq!(count("cudnn_convolution_add_relu"), 3, "{calls}");
    }
    let load = |model: &str, graphs| runtime(&store, graphs).load(model).unwrap();
    let eager = load("residual-eager", Graphs::Never);
    let ways = [Graphs::Never, Graphs::Always].map(|graphs| load("residual", graphs));
    let run = |model: &precast::Model, x: &Tensor| {
        let answer = Tensor::from(&model.run("forward", &[x]).unwrap()[0]);
        answer.to_kind(Kind::Float).to_device(tch::Device::Cpu)
    };
    tch::manual_seed(0);
    for batch in [1, 4, 3, 2, 1] {
        let x = Tensor::randn([batch, 3, 33, 47], (Kind::Half, tch::Device::Cuda(0)));
        let want = run(&eager, &x);
        let largest = f64::try_from(want.max()).unwrap();
        assert!(largest > 0.1, "nothing to compare");
        // A NaN of an image stays one, and stays in its image.
        let broken = x.copy();
        let _ = broken.get(0).get(1).get(16).fill_(f64::NAN);
        let wanted_nans = run(&eager, &broken).isnan();
        assert!(bool::try_from(wanted_nans.any()).unwrap());
        for model in &ways {
            let got = run(model, &x);
            let (near, error) = (
                got.allclose(&want, 1e-2, 1e-2, false),
                (&got - &want).abs().max(),
            );
            assert!(near, "batch {batch}: {error}");
            let nans = run(model, &broken).isnan();
            assert!(nans.equal(&wanted_nans), "batch {batch}");
            assert!(run(model, &x).equal(&got), "batch {batch}: another answer");
        }
    }
}
