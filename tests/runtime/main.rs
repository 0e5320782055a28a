//! The runtime against fake artifacts: what loads, what is refused, what a call answers.
#![cfg(feature = "tch")]
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod calls;
#[path = "../fake/mod.rs"]
mod fake;
mod hooked;
mod ladder;
mod load;
mod passing;
mod swap;
mod threads;
mod trial;
mod waits;

use fake::{Fake, Memory};
use precast::{
    Device, Model, Runtime,
    runtime::{RuntimeError, TensorRef},
};
use tch::{Kind, Tensor};

fn load(memory: Memory) -> Result<Model, RuntimeError> {
    Runtime::over(memory.source(), Device::Cpu)?.load("fake")
}

fn ok(fakes: &[Fake]) -> Model {
    load(Memory::with(fakes)).unwrap()
}

fn x(rows: i64, cols: i64) -> Tensor {
    Tensor::arange(rows * cols, (Kind::Float, tch::Device::Cpu)).reshape([rows, cols])
}

fn flat<'a>(tensor: impl Into<TensorRef<'a>>) -> Vec<f32> {
    let tensor = Tensor::from(tensor.into());
    Vec::<f32>::try_from(tensor.contiguous().view(-1)).unwrap()
}
