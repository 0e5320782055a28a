//! Tests of a CUDA device. `tests/gpu/run.sh` builds the example's store there and starts this with
//! `PRECAST_STORE`; anywhere else it says that it was skipped, and why.
#![cfg(feature = "tch")]
#![allow(
    clippy::exit,
    clippy::print_stdout,
    clippy::unwrap_used,
    unsafe_code,
    reason = "tests panic, print, and call C"
)]

use std::{env, io::Write, path::PathBuf};

use precast::{
    Device, Model, Runtime, Store,
    record::{Prepared, Release},
    runtime::cuda::Graphs,
};
use tch::Tensor;

mod convolutions;
mod eager;
mod faults;
mod fixed;
mod graphs;
mod live;
mod memory;
#[path = "../sample/random.rs"]
mod random;
mod replicas;
mod state;
mod tensors;
#[path = "../traced/mod.rs"]
mod traced;
mod upload;
mod values;

/// Says that the test of this thread is skipped. Written past libtest's capture: a skip is never silent.
fn skipped(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    let _ = writeln!(std::io::stderr(), "{test}: skipped: {why}");
}

/// Returns the store of the tests, with CUDA ready in the process, or prints the missing part.
fn store() -> Option<Store> {
    let missing = match env::var_os("PRECAST_STORE") {
        _ if !PathBuf::from("/dev/nvidiactl").exists() => "no CUDA device",
        None => "no PRECAST_STORE with the example built for CUDA; see tests/gpu/run.sh",
        Some(path) => {
            let store = Store::open(PathBuf::from(path)).unwrap();
            // It loads libtorch's CUDA half: before that torch counts no device and has no tensor on one.
            drop(Runtime::new(&store, Device::Cuda(0)).unwrap());
            return Some(store);
        }
    };
    skipped(missing);
    None
}

/// As [`store`], and the release of a model that only some stores have.
fn store_with(model: &str) -> Option<(Store, Release)> {
    let store = store()?;
    if let Some(release) = store.releases().get(model, None).unwrap() {
        return Some((store, release));
    }
    skipped(&format!("the store has no `{model}`"));
    None
}

fn runtime(store: &Store, graphs: Graphs) -> Runtime {
    Runtime::new(store, Device::Cuda(0)).unwrap().graphs(graphs)
}

fn minilm(store: &Store, graphs: Graphs) -> Model {
    runtime(store, graphs).load("minilm").unwrap()
}

/// Token ids and mask on the device: `[batch, seq]` int64 each.
fn inputs(batch: i64, seq: i64) -> (Tensor, Tensor) {
    let cuda = tch::Device::Cuda(0);
    let ids: Vec<i64> = (0..batch * seq).map(|i| i * 37 % 30_000 + 100).collect();
    let ids = Tensor::from_slice(&ids).view([batch, seq]).to_device(cuda);
    let mask = ids.ones_like();
    (ids, mask)
}

fn encode(model: &Model, ids: &Tensor, mask: &Tensor) -> Tensor {
    let answer = model.run_named("encode", &[("input_ids", ids), ("attention_mask", mask)]);
    Tensor::from(&answer.unwrap()[0])
}

/// Bytes of device memory in use, by everyone.
fn used() -> i64 {
    tch::Cuda::synchronize(0);
    let (mut free, mut total) = (0_usize, 0_usize);
    // SAFETY: the CUDA runtime is in the process already, so this runs no initialiser; the signature is that of
    // `cudaMemGetInfo` in cuda_runtime_api.h, which writes both numbers.
    unsafe {
        let cudart = libloading::Library::new("libcudart.so.13").unwrap();
        let info: libloading::Symbol<'_, unsafe extern "C" fn(*mut usize, *mut usize) -> i32> =
            cudart.get(b"cudaMemGetInfo\0").unwrap();
        assert_eq!(info(&mut free, &mut total), 0);
    }
    (total - free) as i64
}

/// Prints a figure for the report of a run.
fn figure(figure: serde_json::Value) {
    println!("{figure}");
}

const MIB: f64 = 1024.0 * 1024.0;

#[test]
fn joined_matrices_take_no_memory_of_their_own() {
    let Some(store) = store() else { return };
    let runtime = Runtime::new(&store, Device::Cuda(0)).unwrap();
    let _model = runtime.load("minilm").unwrap();
    // Of each layer, a query, a key and a value are one matrix, and lie so.
    let (_, release) = store_with("minilm").unwrap();
    let records = store.records();
    let programs = release
        .programs
        .iter()
        .map(|id| records.program(id).unwrap());
    let steps = programs.flat_map(|program| program.unwrap().steps);
    let mut artifacts = steps.map(|step| records.artifact(&step.artifact).unwrap().unwrap());
    let joined = |made: &Prepared| made.call.joined().is_some();
    assert!(artifacts.any(|artifact| artifact.prepared.iter().any(joined)));
    assert_eq!(runtime.weights_of("minilm").unwrap().prepared_bytes(), 0);
}

#[test]
fn an_answer_does_not_depend_on_its_bucket() {
    let Some(store) = store() else { return };
    let model = minilm(&store, Graphs::AsBuilt);
    let (ids, mask) = inputs(8, 20);
    let together = encode(&model, &ids, &mask);
    for row in 0..8 {
        let alone = encode(&model, &ids.narrow(0, row, 1), &mask.narrow(0, row, 1));
        let error = f64::try_from((&alone - together.narrow(0, row, 1)).abs().max()).unwrap();
        assert!(error < 2e-2, "row {row} differs by {error}");
    }
}

#[test]
fn a_tensor_on_the_wrong_device_is_refused() {
    let Some(store) = store() else { return };
    let model = minilm(&store, Graphs::AsBuilt);
    let (ids, mask) = inputs(1, 32);
    let here = ids.to_device(tch::Device::Cpu);
    let refused = model.run_named("encode", &[("input_ids", &here), ("attention_mask", &mask)]);
    let message = refused.unwrap_err().to_string();
    assert!(message.contains("input_ids"), "{message}");
}
