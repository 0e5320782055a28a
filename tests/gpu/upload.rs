//! Weights on their way to a device: how fast, beside a plain copy of pinned memory, and how slow when asked to.

use std::time::Instant;

use precast::{
    Device, Digest, Runtime, Store,
    runtime::{WeightSet, cuda::Graphs},
};
use serde_json::json;
use tch::{Kind, Tensor};

use super::{figure, minilm, random::Random, store, traced::spans};

fn wait() {
    tch::Cuda::synchronize(0);
}

/// Puts a weight set of `count` uint8 tensors of `bytes` each into a store of its own.
fn random_set(count: usize, bytes: usize) -> (tempfile::TempDir, Store, Digest) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create(dir.path().join("store")).unwrap();
    // No two tensors are alike, and nothing about them compresses.
    let mut random = Random(7);
    let mut tensor = || -> Vec<u8> {
        let words = (0..bytes / 8).map(|_| random.draw().to_le_bytes());
        words.flatten().collect()
    };
    let tensors: Vec<Vec<u8>> = (0..count).map(|_| tensor()).collect();
    let views = tensors.iter().enumerate().map(|(i, bytes)| {
        let dtype = safetensors::Dtype::U8;
        let view = safetensors::tensor::TensorView::new(dtype, vec![bytes.len()], bytes).unwrap();
        (format!("layer.{i:03}"), view)
    });
    let file = safetensors::serialize(views, None).unwrap();
    let digest = store.objects().put_bytes(&file).unwrap();
    (dir, store, digest)
}

/// Prints the speed of an upload of one weight set, alone and with its check in `Runtime::weights`, beside a pinned copy.
fn speed(store: &Store, digest: Digest) {
    let runtime = Runtime::new(store, Device::Cuda(0)).unwrap();
    let begin = Instant::now();
    let first = runtime.weights(Some(digest)).unwrap();
    let (whole_first, first_upload) = (begin.elapsed(), first.upload_time().unwrap());
    let bytes = first.bytes();
    drop(first);
    // The same bytes in one copy from memory that was pinned before.
    let length = i64::try_from(bytes).unwrap();
    let pinned = Tensor::randint(256, [length], (Kind::Uint8, tch::Device::Cpu))
        .pin_memory(tch::Device::Cuda(0));
    let mut place = Tensor::zeros([length], (Kind::Uint8, tch::Device::Cuda(0)));
    let (mut plain, mut ours, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    // In turns, so that whatever else the machine does meets all of them.
    for _ in 0..15 {
        wait();
        let begin = Instant::now();
        place.copy_(&pinned);
        wait();
        plain.push(begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        let set = runtime.weights(Some(digest)).unwrap();
        whole.push(begin.elapsed().as_secs_f64());
        ours.push(set.upload_time().unwrap().as_secs_f64());
    }
    let median = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    let (plain, ours, whole) = (median(plain), median(ours), median(whole));
    figure(json!({
        "figure": "upload", "bytes": bytes, "pinned_gb_s": rate(plain), "upload_gb_s": rate(ours),
        "share": plain / ours, "verified_gb_s": rate(whole), "verified_share": plain / whole,
        "first_in_process": { "upload_seconds": first_upload.as_secs_f64(), "call_seconds": whole_first.as_secs_f64() },
    }));
}

#[test]
fn figures_of_an_upload() {
    let Some(store) = store() else { return };
    let runtime = Runtime::new(&store, Device::Cuda(0)).unwrap();
    let model = runtime.load("minilm").unwrap();
    let digest = model.weights().unwrap();
    // Freed first: a set that somebody holds is shared and not uploaded.
    drop((model, runtime));
    speed(&store, digest);
    // As large as the 24 blocks.
    let (_dir, store, digest) = random_set(144, 1 << 22);
    speed(&store, digest);
}

#[test]
fn an_upload_is_exact_and_as_slow_as_it_is_asked_to_be() {
    if store().is_none() {
        return;
    }
    // Odd lengths: pieces that begin and end inside of slices and chunks.
    let (_dir, store, digest) = random_set(37, 1_000_008);
    let limit = 40_000_000;
    let quick = Runtime::new(&store, Device::Cuda(0)).unwrap();
    let slow = Runtime::new(&store, Device::Cuda(0)).unwrap();
    let slow = slow.upload_limit(limit);
    let quick = quick.weights(Some(digest)).unwrap();
    let begin = Instant::now();
    let slow = slow.weights(Some(digest)).unwrap();
    let took = begin.elapsed().as_secs_f64();
    let least = slow.bytes() as f64 / limit as f64;
    figure(json!({
        "figure": "throttled upload", "bytes": slow.bytes(), "limit_gb_s": limit as f64 / 1e9,
        "upload_gb_s": slow.bytes() as f64 / took / 1e9,
        "without_limit_seconds": quick.upload_time().unwrap().as_secs_f64(),
    }));
    // The last slice is let go when all before it had their time.
    assert!(took > 0.98 * least, "{took} s, at least {least} s");
    // Both hold the bytes of the file.
    let file = store.objects().map(&digest).unwrap();
    for set in [&quick, &slow] {
        holds(set, &file);
    }
}

/// Holds a set to have the bytes of a file.
fn holds(set: &WeightSet, file: &[u8]) {
    let file = safetensors::SafeTensors::deserialize(file).unwrap();
    for (name, view) in file.tensors() {
        let there = set.read(&name).unwrap().to_vec::<u8>().unwrap();
        assert!(there == view.data(), "`{name}` is not what the file holds");
    }
}

#[test]
fn a_bit_that_changed_on_the_disk_is_on_no_device() {
    if store().is_none() {
        return;
    }
    let (_dir, store, digest) = random_set(9, 1_000_008);
    let sound = store.objects().map(&digest).unwrap().to_vec();
    let hex = digest.hex();
    let path = store.path().join("ready").join(&hex[..2]).join(&hex);
    for at in [sound.len() - 1, sound.len() / 2] {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[at] ^= 1;
        let new = path.with_extension("new");
        std::fs::write(&new, bytes).unwrap();
        std::fs::rename(new, &path).unwrap();
        let runtime = Runtime::new(&store, Device::Cuda(0)).unwrap();
        holds(&runtime.weights(Some(digest)).unwrap(), &sound);
    }
}

#[test]
fn loading_and_uploading_have_spans() {
    let Some(store) = store() else { return };
    let spans = spans(|| {
        drop(minilm(&store, Graphs::Always));
    });
    let made = spans.made.lock().unwrap();
    let at = |name: &str| made.iter().position(|span| span.starts_with(name));
    // Loaded libraries are not loaded again: `libtorch_cuda`, and an artifact that another test used.
    let order = "context weights map records upload load container bind graph warm_up";
    let order: Vec<_> = order.split(' ').map(at).collect();
    let there = order.iter().all(Option::is_some);
    assert!(there && order.is_sorted(), "{made:?}");
    // An upload is a part of `weights`.
    assert_eq!(order[4].unwrap(), order[1].unwrap() + 3, "{made:?}");
}
