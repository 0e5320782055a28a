//! Faults of a device: out of memory, a sticky error, another device chosen by the caller.

use std::{env, process::Command, time::Duration};

use precast::{
    Device, Model, Runtime,
    runtime::cuda::{DeviceMemory, Graphs, device_memory},
};
use tch::{Kind, Tensor};

use super::{encode, inputs, minilm, store};

fn memory() -> DeviceMemory {
    tch::Cuda::synchronize(0);
    device_memory(Device::Cuda(0)).unwrap()
}

/// Takes all memory of the device, also the cache of torch's allocator.
fn take_all() -> Vec<Tensor> {
    let mut held = Vec::new();
    let mut size = 8_i64 << 30;
    while size >= 512 {
        match Tensor::f_empty([size], (Kind::Uint8, tch::Device::Cuda(0))) {
            Ok(taken) => held.push(taken),
            Err(_) => size /= 2,
        }
    }
    held
}

#[test]
fn out_of_memory_is_an_error_and_memory_returns() {
    let Some(store) = store() else { return };
    let model = minilm(&store, Graphs::Never);
    let (ids, mask) = inputs(8, 128);
    let wanted = encode(&model, &ids, &mask);
    let runtime = Runtime::new(&store, Device::Cuda(0)).unwrap();
    let digest = model.weights();
    for round in 0..3 {
        let before = memory();
        let all = take_all();
        let names = [("input_ids", &ids), ("attention_mask", &mask)];
        let called = model.run_named("encode", &names).unwrap_err();
        let uploaded = runtime.weights(digest).err().unwrap();
        assert_eq!(uploaded.name(), "Upload");
        for error in [called, uploaded] {
            assert!(error.is_out_of_memory(), "round {round}: {error}");
            assert!(
                error.to_string().contains("out of memory"),
                "round {round}: {error}"
            );
        }
        assert!(runtime.load("minilm").is_err());
        // It is no error that stays.
        assert!(model.is_ready());
        drop(all);
        assert_eq!(memory().allocated, before.allocated, "round {round}");
        // The allocator holds the whole card, so that a load of code finds no room.
        let held = memory();
        assert!(
            held.free < 1 << 30,
            "round {round}: nothing was taken: {held:?}"
        );
        runtime.release_cached_memory().unwrap();
        let (after, some) = (memory(), 1 << 30);
        let given_back = after.reserved <= before.reserved.max(after.allocated + some);
        let free = after.free + some > before.free;
        assert!(
            given_back && free,
            "round {round}: {after:?}, before {before:?}"
        );
        assert!(encode(&model, &ids, &mask).equal(&wanted), "round {round}");
    }
}

#[test]
fn a_graph_is_captured_where_the_allocator_keeps_the_whole_card() {
    let Some(store) = store() else { return };
    let (ids, mask) = inputs(8, 128);
    let wanted = encode(&minilm(&store, Graphs::Always), &ids, &mask);
    drop(take_all());
    assert!(memory().free < 1 << 30, "nothing was taken: {:?}", memory());
    // Weights fit into the allocator's cache; code and graphs do not: their memory comes from the driver.
    let model = minilm(&store, Graphs::Always);
    for (program, reason) in model.without_graph() {
        assert!(program.dynamic.is_some(), "{}: {reason}", program.bucket());
    }
    println!("free after the load: {} MiB", memory().free >> 20);
    assert!(encode(&model, &ids, &mask).equal(&wanted));
}

/// Not a test: the child of the next one, where the device is broken for good.
#[test]
fn a_child_with_a_sticky_error() {
    if env::var_os("PRECAST_TEST_STICKY").is_none() {
        return;
    }
    let store = store().unwrap();
    let models = [
        minilm(&store, Graphs::Never),
        minilm(&store, Graphs::Always),
    ];
    let (ids, mask) = inputs(1, 32);
    for model in &models {
        drop(encode(model, &ids, &mask));
    }
    assert!(models.iter().all(Model::is_ready));
    // An index out of range: the kernel asserts, and the context is lost.
    let table = Tensor::zeros([4, 4], (Kind::Float, tch::Device::Cuda(0)));
    let index = Tensor::full([1], 1_000_000, (Kind::Int64, tch::Device::Cuda(0)));
    let _ = table.f_index_select(0, &index);
    // Any read from the device reports it; no call was made yet.
    assert!(table.f_to(tch::Device::Cpu).is_err());
    for model in &models {
        let call = || model.run_named("encode", &[("input_ids", &ids), ("attention_mask", &mask)]);
        let first = call().expect_err("a broken device answered");
        assert!(!model.is_ready(), "{first}");
        for _ in 0..100 {
            let error = call().expect_err("a broken device answered later");
            assert_eq!(error.name(), "Unready", "{error}");
        }
        println!("first: {first}; then: {}", call().unwrap_err());
    }
    drop(models);
    // Tensors of tch can't be freed any more.
    std::process::exit(17);
}

#[test]
fn a_sticky_error_makes_the_runtime_unready_at_once() {
    if store().is_none() {
        return;
    }
    let test = "faults::a_child_with_a_sticky_error";
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]);
    let mut child = child.env("PRECAST_TEST_STICKY", "1").spawn().unwrap();
    for _ in 0..600 {
        if let Some(status) = child.try_wait().unwrap() {
            assert_eq!(status.code(), Some(17), "{status}");
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    child.kill().unwrap();
    panic!("the child hangs");
}

/// Returns or sets the device CUDA has as current on this thread.
pub fn current_device(set: Option<i32>) -> i32 {
    let mut now = -1;
    // SAFETY: the CUDA runtime is in the process already, so this runs no initialiser; the signatures are those of
    // `cudaGetDevice` and `cudaSetDevice` in cuda_runtime_api.h.
    unsafe {
        let cudart = libloading::Library::new("libcudart.so.13").unwrap();
        if let Some(device) = set {
            let choose: libloading::Symbol<'_, unsafe extern "C" fn(i32) -> i32> =
                cudart.get(b"cudaSetDevice\0").unwrap();
            assert_eq!(choose(device), 0);
        }
        let ask: libloading::Symbol<'_, unsafe extern "C" fn(*mut i32) -> i32> =
            cudart.get(b"cudaGetDevice\0").unwrap();
        assert_eq!(ask(&mut now), 0);
    }
    now
}

#[test]
fn the_callers_device_is_left_as_it_was() {
    let Some(store) = store() else { return };
    let devices = tch::Cuda::device_count();
    for graphs in [Graphs::Never, Graphs::Always] {
        for runs_on in 0..devices {
            for chosen in 0..devices {
                let chosen = i32::try_from(chosen).unwrap();
                assert_eq!(current_device(Some(chosen)), chosen);
                let place = usize::try_from(runs_on).unwrap();
                let runtime = Runtime::new(&store, Device::Cuda(place)).unwrap();
                let runtime = runtime.graphs(graphs);
                let model = runtime.load("minilm").unwrap();
                assert_eq!(current_device(None), chosen, "after a load");
                let (ids, mask) = inputs(1, 20);
                let [ids, mask] = [ids, mask].map(|x| x.to_device(tch::Device::Cuda(place)));
                drop(encode(&model, &ids, &mask));
                assert_eq!(current_device(None), chosen, "after a call");
                model.swap(&runtime.weights_of("minilm").unwrap()).unwrap();
                drop(model);
                assert_eq!(current_device(None), chosen, "after a swap and a drop");
            }
        }
    }
    current_device(Some(0));
    if devices < 2 {
        println!("the_callers_device_is_left_as_it_was: one device: nothing else could be chosen");
    }
}

#[test]
fn a_device_that_is_not_there_is_refused_by_name() {
    let Some(store) = store() else { return };
    let missing = Runtime::new(&store, Device::Cuda(99)).err().unwrap();
    assert!(missing.to_string().contains("cuda:99"), "{missing}");
}
