//! Tensors of another user of libtorch that are resized.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use precast::runtime::RuntimeError;
use tch::{Kind, Tensor};

use crate::{fake::Fake, flat, ok};

#[test]
fn a_clone_that_is_resized_meanwhile_changes_no_call() {
    let model = ok(&[Fake::sized(8, 4)]);
    // There is memory for both sizes, so that nothing is moved.
    let input = Tensor::ones([8, 4], (Kind::Float, tch::Device::Cpu));
    let mut clone = input.shallow_clone();
    let over = Arc::new(AtomicBool::new(false));
    let stop = over.clone();
    let meddler = thread::spawn(move || {
        while !stop.load(Ordering::Relaxed) {
            let _ = clone.resize_([3, 3]);
            let _ = clone.resize_([8, 4]);
        }
    });
    for _ in 0..20_000 {
        match model.run("f", std::slice::from_ref(&input)) {
            Ok(out) => {
                let size = out[0].shape();
                let known = (3..=8).contains(&size[0]) && (3..=4).contains(&size[1]);
                assert!(known, "{size:?}");
                assert!(flat(&out[0]).iter().all(|&y| y == 2.0), "{size:?}");
            }
            // Half of the sizes are those before a resize, half those after it.
            Err(RuntimeError::BadInput { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    over.store(true, Ordering::Relaxed);
    meddler.join().unwrap();
}
