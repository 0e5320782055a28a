//! Real artifacts, where `cargo test --test numerics` has left its store: its small model, which compiles in seconds.

use std::{
    path::Path,
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use precast::{
    Device, Model, Runtime, Store,
    record::{Dtype, Input, Program},
    runtime::Outputs,
};
use tch::Tensor;

use crate::Random;

pub const MODEL: &str = "small";

/// Returns the store of the numerics tests, if it exists and this host can run its small model.
pub fn store() -> Option<Store> {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("numerics/store");
    let store = Store::open(&path).ok()?;
    Runtime::new(&store, Device::Cpu).ok()?.load(MODEL).ok()?;
    Some(store)
}

/// Returns the programs of one bucket each.
pub fn buckets(model: &Model) -> Vec<Program> {
    let modules = model.modules();
    let programs = modules.iter().flat_map(|module| model.programs(module));
    programs
        .filter(|program| program.dynamic.is_none())
        .cloned()
        .collect()
}

/// Makes an input of a program at `sizes`, in the program's order of dimensions.
pub fn input(input: &Input, program: &Program, sizes: &[i64], random: &mut Random) -> Tensor {
    let dims: Vec<&String> = program.sizes.keys().collect();
    let shape: Vec<i64> = std::iter::zip(&input.layout.shape, &input.dims)
        .map(|(&size, dim)| match dim {
            Some(dim) => sizes[dims.iter().position(|known| *known == dim).unwrap()],
            None => size,
        })
        .collect();
    let count = shape.iter().product::<i64>() as usize;
    match input.layout.dtype {
        Dtype::Float32 => {
            let values: Vec<f32> = (0..count)
                .map(|_| random.below(2001) as f32 / 1000.0 - 1.0)
                .collect();
            Tensor::from_slice(&values).view(shape.as_slice())
        }
        Dtype::Int64 => {
            let [from, to] = input.range.unwrap_or([0, 2]);
            let values: Vec<i64> = (0..count)
                .map(|_| from + random.below((to - from) as usize) as i64)
                .collect();
            Tensor::from_slice(&values).view(shape.as_slice())
        }
        other => panic!("the small model has no {other} inputs"),
    }
}

/// Makes all inputs of a program.
pub fn inputs(program: &Program, sizes: &[i64], random: &mut Random) -> Vec<Tensor> {
    let inputs = program.inputs.iter();
    inputs
        .map(|one| input(one, program, sizes, random))
        .collect()
}

/// Returns the bits of float outputs.
pub fn bits(outputs: &Outputs) -> Vec<Vec<u8>> {
    outputs
        .iter()
        .map(|tensor| tensor.to_bytes().unwrap())
        .collect()
}

/// Races the first runs of `containers` fresh containers. Returns their number and the failures.
pub fn race(store: &Store, containers: u64, steps: &AtomicU64) -> (u64, Vec<String>) {
    const THREADS: usize = 4;
    let runtime = Runtime::new(store, Device::Cpu).unwrap().instances(THREADS);
    let model = runtime.load(MODEL).unwrap();
    let programs = buckets(&model);
    let cases: Vec<_> = programs
        .iter()
        .map(|program| {
            let sizes: Vec<i64> = program.sizes.values().copied().collect();
            let given = inputs(program, &sizes, &mut Random(7));
            let answer = bits(&model.run(&program.module, &given).unwrap());
            (program, given, answer)
        })
        .collect();
    let (mut made, mut bad) = (0, Vec::new());
    while made < containers {
        let fresh = runtime.load(MODEL).unwrap();
        for (program, given, answer) in &cases {
            let barrier = Barrier::new(THREADS);
            std::thread::scope(|scope| {
                let callers: Vec<_> = (0..THREADS)
                    .map(|_| {
                        let given: Vec<Tensor> = given.iter().map(Tensor::shallow_clone).collect();
                        let (fresh, barrier) = (&fresh, &barrier);
                        scope.spawn(move || {
                            barrier.wait();
                            fresh.run(&program.module, &given).map(|out| bits(&out))
                        })
                    })
                    .collect();
                for caller in callers {
                    match caller.join().unwrap() {
                        Ok(got) if got == *answer => {}
                        other => bad.push(format!("{}: {other:?}", program.bucket())),
                    }
                }
            });
            made += THREADS as u64;
            steps.fetch_add(1, Relaxed);
        }
    }
    (made, bad)
}
