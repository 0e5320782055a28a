//! The runtime against fake artifacts: loads, refusals, answers.
#![allow(clippy::unwrap_used, reason = "a test that fails panics")]

mod api;
mod calls;
#[cfg(feature = "tch")]
mod conversions;
#[path = "../fake/mod.rs"]
mod fake;
mod fixed;
mod ladder;
mod live;
mod load;
mod loading;
mod operators;
mod passing;
mod prepared;
mod prompts;
mod replicas;
mod state;
mod swap;
#[cfg(feature = "tch")]
mod tch;
mod threads;
mod trial;
mod waits;

use std::{
    thread,
    time::{Duration, Instant},
};

use fake::{Fake, Memory};
use precast::{
    Model,
    runtime::{Element, RuntimeError, Tensor},
};

fn load(memory: Memory) -> Result<Model, RuntimeError> {
    memory.runtime().load("fake")
}

fn ok(fakes: &[Fake]) -> Model {
    Memory::with(fakes).load()
}

/// Returns a message with the 12 digits of each digest replaced.
fn without_ids(text: &str) -> String {
    let parts = text.split('`').map(|part| {
        let id = part.len() == 12 && part.bytes().all(|b| b.is_ascii_hexdigit());
        if id { "[id]" } else { part }
    });
    parts.collect::<Vec<_>>().join("`")
}

fn tensor<T: Element>(data: &[T], shape: [i64; 2]) -> Tensor {
    fake::libtorch();
    Tensor::from_slice(data, &shape).unwrap()
}

/// Returns float32 0, 1, 2, … of these sizes.
fn x(rows: i64, cols: i64) -> Tensor {
    let data: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
    tensor(&data, [rows, cols])
}

/// Returns a tensor of one value.
fn full<T: Element>(shape: [i64; 2], value: T) -> Tensor {
    tensor(&vec![value; (shape[0] * shape[1]) as usize], shape)
}

/// Returns the tensor with `f` applied to each element.
fn map(tensor: &Tensor, f: impl FnMut(f32) -> f32) -> Tensor {
    let data: Vec<f32> = flat(tensor).into_iter().map(f).collect();
    Tensor::from_slice(&data, &tensor.shape()).unwrap()
}

fn twice(tensor: &Tensor) -> Tensor {
    map(tensor, |value| value * 2.0)
}

/// Returns the sum of each row.
fn sums(tensor: &Tensor) -> Vec<f32> {
    let rows = flat(tensor);
    let rows = rows.chunks_exact(tensor.shape()[1] as usize);
    rows.map(|row| row.iter().sum()).collect()
}

/// Waits until something holds: for minutes, because a machine may be busy.
fn until(what: &str, is: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < Duration::from_secs(600), "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Writes a value into every element, through another handle of the same memory.
fn fill(tensor: &Tensor, value: f32) {
    let value = Tensor::from_slice(&[value], &[1]).unwrap();
    tensor.share().copy_from(&value).unwrap();
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.to_vec().unwrap()
}
