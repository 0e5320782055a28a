//! Trained weights as releases: of the model itself, which another thread serves, and of another model.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use precast::{
    Store,
    record::{Dtype, Release},
    runtime::{RuntimeError, Tensor, Value, command::tensors},
};

use serde_json::json;

use super::{batch, eager, loaded, step, store};
use crate::lab::runtime;

#[test]
fn a_serving_model_takes_published_weights_without_a_failed_call() {
    let store = store();
    let runtime = runtime(&store);
    let serving = loaded(&runtime);
    let model = loaded(&runtime);
    let rates = [1e-2; 6];
    let eager = eager("adamw", 1, &rates);
    let mut trainer = model.trainer("train").unwrap();
    trainer.set_lr(1e-2);
    let done = AtomicBool::new(false);
    let answer = || {
        let ids = Value::new(&batch(0).0, &[8, 2]).unwrap();
        let out = serving.run("forward", &[ids]).unwrap();
        out.array::<f32>(0).unwrap().data().to_vec()
    };
    let before = answer();
    thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let mut calls = 0;
            while !done.load(Ordering::Relaxed) {
                answer();
                calls += 1;
            }
            calls
        });
        for number in 0..6 {
            step(&mut trainer, number);
        }
        let release = trainer.publish(&store).unwrap();
        let weights = runtime.weights(release.weights).unwrap();
        serving.swap(&weights).unwrap();
        done.store(true, Ordering::Relaxed);
        assert!(caller.join().unwrap() > 0);
    });
    let after = answer();
    for (got, want) in after.iter().zip(eager["logits"].as_array().unwrap()) {
        let want = want.as_f64().unwrap();
        assert!((f64::from(*got) - want).abs() < 2e-3, "{got} {want}");
    }
    assert_ne!(before, after);

    // Parameters that are no numbers are not published.
    trainer.set_lr(f32::NAN);
    // The loss is of before the update.
    assert!(step(&mut trainer, 0).is_finite());
    let newest = store.releases().get("next", None).unwrap().unwrap();
    let error = trainer.publish(&store).unwrap_err().to_string();
    assert!(error.contains("NaN or infinity"), "{error}");
    assert_eq!(store.releases().get("next", None).unwrap().unwrap(), newest);
}

#[test]
fn a_release_of_another_model_gets_the_weights_that_it_shares_by_name() {
    let (store, folder) = (store(), tempfile::tempdir().unwrap());
    let runtime = runtime(&store);
    let model = loaded(&runtime);
    let mut trainer = model.trainer("train").unwrap();
    step(&mut trainer, 0);
    let saved = folder.path().join("step.safetensors");
    trainer.save(&saved).unwrap();
    let trained = tensors::read(std::fs::File::open(saved).unwrap()).unwrap();

    // One weight more than the training knows, which is no number, and stays as it is.
    let weights = |release: &Release| {
        let mapped = store.objects().map(&release.weights.unwrap()).unwrap();
        tensors::read(&mapped[..]).unwrap()
    };
    let first = store.releases().get("next", Some("1")).unwrap().unwrap();
    let mut more: Vec<_> = weights(&first).into_iter().collect();
    let infinite = Tensor::from_slice(&[f32::NEG_INFINITY, 2.0], &[2]).unwrap();
    more.push(("more".to_owned(), infinite));
    let before = put(&store, "answers", &more);
    let after = trainer.publish_to(&store, "answers").unwrap();
    assert_eq!((&*after.model, after.seq), ("answers", before.seq + 1));
    assert_eq!(after.programs, first.programs);
    let (before, after) = (weights(&before), weights(&after));
    assert_eq!(before.len(), after.len());
    let mut changed = 0;
    for (name, value) in &after {
        let own = trained.get(name).unwrap_or(&before[name]);
        assert_eq!(value.to_bytes().unwrap(), own.to_bytes().unwrap(), "{name}");
        changed += usize::from(trained.contains_key(name));
    }
    assert!(changed > 3 && changed < after.len(), "{changed}");
    runtime.load("answers").unwrap();

    // A weight less, or of another shape: named, before the training and after it.
    let without: Vec<_> = more.split_off(1);
    let lacking = more[0].0.clone();
    put(&store, "lacks", &without);
    for refused in [
        trainer.may_publish_to(&store, "lacks").unwrap_err(),
        trainer.publish_to(&store, "lacks").unwrap_err(),
    ] {
        let RuntimeError::State { state, problem } = refused else {
            panic!("{refused}");
        };
        assert_eq!(state, lacking);
        assert!(problem.contains("`lacks` has no weight"), "{problem}");
    }
    let nothing = trainer.may_publish_to(&store, "nothing").unwrap_err();
    assert_eq!(nothing.name(), "NoRelease");
}

#[test]
fn weights_of_a_file_that_is_not_aligned_are_published_in_one_that_is() {
    let store = store();
    let runtime = runtime(&store);
    let model = loaded(&runtime);
    let mut trainer = model.trainer("train").unwrap();
    step(&mut trainer, 0);
    let first = store.releases().get("next", Some("1")).unwrap().unwrap();
    let map = |release: &Release| store.objects().map(&release.weights.unwrap()).unwrap();
    let weights = tensors::read(&map(&first)[..]).unwrap();
    // Three bytes before the floats.
    let flags = Tensor::from_slice(&[true, false, true], &[3]).unwrap();
    let all = std::iter::once(("a".to_owned(), flags)).chain(weights);
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for (name, tensor) in all {
        let (begin, bytes) = (data.len(), tensor.to_bytes().unwrap());
        data.extend(bytes);
        let dtype = match tensor.dtype().unwrap() {
            Dtype::Bool => "BOOL",
            Dtype::Float32 => "F32",
            Dtype::Int64 => "I64",
            other => panic!("{other}"),
        };
        let offsets = [begin, data.len()];
        let entry = json!({"dtype": dtype, "shape": tensor.shape(), "data_offsets": offsets});
        header.insert(name, entry);
    }
    let header = json!(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    let file = [&length[..], header.as_bytes(), &data].concat();
    put_file(&store, "shifted", &file);

    let release = trainer.publish_to(&store, "shifted").unwrap();
    let written = map(&release);
    let read = safetensors::SafeTensors::deserialize(&written).unwrap();
    for (name, view) in read.iter() {
        let start = view.data().as_ptr() as usize - written.as_ptr() as usize;
        assert_eq!(start % (view.dtype().bitsize() / 8), 0, "{name}");
    }
    assert_eq!(read.tensor("a").unwrap().data(), [1, 0, 1]);
    runtime.load("shifted").unwrap();
}

/// Publishes the programs of the training's model with other weights, as a release of a model of this name.
pub fn put(store: &Store, name: &str, weights: &[(String, Tensor)]) -> Release {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    tensors::write(&file, weights).unwrap();
    put_file(store, name, &std::fs::read(file).unwrap())
}

fn put_file(store: &Store, name: &str, bytes: &[u8]) -> Release {
    let release = Release {
        model: name.to_owned(),
        weights: Some(store.objects().put_bytes(bytes).unwrap()),
        ..store.releases().get("next", Some("1")).unwrap().unwrap()
    };
    store.releases().put(&release).unwrap().0
}
