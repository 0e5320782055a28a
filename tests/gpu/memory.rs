//! The memory of eight buckets in one pool and in pools of their own, with the store's `one-block` model.

use precast::{
    Device, Model,
    record::Program,
    runtime::cuda::{Graphs, device_memory},
};
use serde_json::json;
use tch::{Kind, Tensor};

use super::{figure, runtime, store_with};

/// The bytes of tensors, of torch's allocator, and the used bytes of the device.
fn memory() -> [i64; 3] {
    tch::Cuda::synchronize(0);
    let memory = device_memory(Device::Cuda(0)).unwrap();
    [
        memory.allocated as i64,
        memory.reserved as i64,
        (memory.total - memory.free) as i64,
    ]
}

fn since(before: [i64; 3]) -> [i64; 3] {
    let now = memory();
    [0, 1, 2].map(|i| now[i] - before[i])
}

fn run(model: &Model, program: &Program) {
    let shape = &program.inputs[0].layout.shape;
    let x = Tensor::ones(shape.as_slice(), (Kind::BFloat16, tch::Device::Cuda(0)));
    let answer = model.run("forward", &[x]).unwrap();
    assert!(answer.served().graph());
}

#[test]
fn figures_of_eight_buckets() {
    let Some((store, release)) = store_with("one-block") else {
        return;
    };
    let runtime = || runtime(&store, Graphs::Always);
    // The context, cuBLAS's workspaces and a first allocation are nobody's.
    let warm = Tensor::ones([1024, 1024], (Kind::BFloat16, tch::Device::Cuda(0)));
    let _warm = warm.matmul(&warm);
    let before = memory();
    let together = runtime();
    let model = together.load("one-block").unwrap();
    let programs = model.programs("forward").into_iter();
    let programs = programs.filter(|program| program.dynamic.is_none());
    let programs: Vec<Program> = programs.cloned().collect();
    assert_eq!(programs.len(), 8);
    programs.iter().for_each(|program| run(&model, program));
    let shared = since(before);
    let weights = together.weights_of("one-block").unwrap().bytes() as i64;
    drop((model, together));

    // Each by itself, as eight processes or eight `.pt2` packages would have it: own weights, own pool.
    let before = memory();
    let mut apart = Vec::new();
    for program in &programs {
        let alone = runtime();
        let (programs, aliases) = (vec![program.clone()], release.aliases.clone());
        let weights = release.weights;
        let model = alone.load_programs("one-block", programs, &release.shims, weights, aliases);
        let model = model.unwrap();
        run(&model, program);
        apart.push((alone, model));
    }
    let separate = since(before);
    let of = |[allocated, reserved, device]: [i64; 3]| json!({ "allocated": allocated, "reserved": reserved, "device": device });
    figure(json!({
        "figure": "eight buckets", "weights": weights, "together": of(shared), "apart": of(separate),
    }));
    // Beside the weights there are static tensors, and a workspace of cuBLAS for each of torch's streams that had none.
    let layouts = programs.iter().flat_map(|program| {
        let inputs = program.inputs.iter().map(|input| &input.layout);
        inputs.chain(program.outputs.iter().map(|output| &output.layout))
    });
    let bytes = layouts.map(|layout| 2 * layout.shape.iter().product::<i64>());
    let fixed: i64 = bytes.sum();
    let workspace = 36 << 20;
    assert!(separate[0] >= 8 * weights + fixed, "eight copies of them");
    assert!(shared[0] < weights + fixed + workspace, "one copy of them");
}
