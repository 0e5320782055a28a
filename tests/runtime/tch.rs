//! Tensors of another user of libtorch: kinds that the runtime does not make, and resized ones.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use precast::runtime::RuntimeError;
use tch::{Kind, Tensor};

use crate::{fake::Fake, flat, ok, x};

#[test]
fn a_bad_input_of_tch_is_refused_by_name_before_anything_runs() {
    let model = ok(&[Fake::of("THROWS")]);
    let told = |input: Tensor| model.run("f", &[input]).unwrap_err().to_string();
    let x = || Tensor::from(x(8, 4));
    insta::assert_snapshot!(told(Tensor::new()), @"module `f`, input `x`: expected a tensor, got an undefined one");
    insta::assert_snapshot!(told(x().to_kind(Kind::ComplexFloat)), @"module `f`, input `x`: expected dtype float32, got a dtype no artifact takes (torch's number 9)");
    insta::assert_snapshot!(told(x().to_sparse_sparse_dim(2)), @"module `f`, input `x`: expected a dense tensor, got a sparse, quantised, nested or wrapped one");
    insta::assert_snapshot!(told(Tensor::zeros([8, 4], (Kind::ComplexFloat, tch::Device::Cpu)).conj().imag()), @"module `f`, input `x`: expected plain memory, got a tensor with a pending negation or conjugation");
}

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
