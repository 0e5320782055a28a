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
    record::{Dtype, Input, Program, Release},
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

/// Loads some programs of a release.
pub fn alone(runtime: &Runtime, release: &Release, programs: Vec<Program>) -> Model {
    let (weights, aliases) = (release.weights, release.aliases.clone());
    let model = runtime.load_programs(&release.model, programs, &release.shims, weights, aliases);
    model.unwrap()
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
            let mut value = |_| random.below(2001) as f32 / 1000.0 - 1.0;
            let values: Vec<f32> = (0..count).map(&mut value).collect();
            Tensor::from_slice(&values).view(shape.as_slice())
        }
        Dtype::Int64 => {
            let [from, to] = input.range.unwrap_or([0, 2]);
            let mut value = |_| from + random.below((to - from) as usize) as i64;
            let values: Vec<i64> = (0..count).map(&mut value).collect();
            Tensor::from_slice(&values).view(shape.as_slice())
        }
        other => panic!("the small model has no {other} inputs"),
    }
}

/// Makes all inputs of a program.
pub fn inputs(program: &Program, sizes: &[i64], random: &mut Random) -> Vec<Tensor> {
    let inputs = program.inputs.iter();
    let made = inputs.map(|one| input(one, program, sizes, random));
    made.collect()
}

/// Makes all inputs of a program at its own sizes, always the same.
pub fn own_inputs(program: &Program) -> Vec<Tensor> {
    let sizes: Vec<i64> = program.sizes.values().copied().collect();
    inputs(program, &sizes, &mut Random(7))
}

/// Returns the bits of float outputs.
pub fn bits(outputs: &Outputs) -> Vec<Vec<u8>> {
    let bytes = outputs.iter().map(|tensor| tensor.to_bytes().unwrap());
    bytes.collect()
}

/// Races the first runs of `containers` fresh containers. Returns their number and the failures.
pub fn race(store: &Store, containers: u64, steps: &AtomicU64) -> (u64, Vec<String>) {
    const THREADS: usize = 4;
    let runtime = Runtime::new(store, Device::Cpu).unwrap().instances(THREADS);
    let model = runtime.load(MODEL).unwrap();
    let programs = buckets(&model);
    let cases = programs.iter().map(|program| {
        let answer = model.run(&program.module, &own_inputs(program)).unwrap();
        (program, bits(&answer))
    });
    let cases: Vec<_> = cases.collect();
    let (mut made, mut bad) = (0, Vec::new());
    while made < containers {
        let fresh = runtime.load(MODEL).unwrap();
        for (program, answer) in &cases {
            let barrier = Barrier::new(THREADS);
            let answers = crate::threads(THREADS, |_| {
                let given = own_inputs(program);
                barrier.wait();
                fresh.run(&program.module, &given).map(|out| bits(&out))
            });
            for got in answers {
                if got.as_ref().ok() != Some(answer) {
                    bad.push(format!("{}: {got:?}", program.bucket()));
                }
            }
            made += THREADS as u64;
            steps.fetch_add(1, Relaxed);
        }
    }
    (made, bad)
}
