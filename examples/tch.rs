//! Puts tensors of tch into a model, and works on with its answer, both without a copy.
//!
//! ```console
//! $ precast build -f examples/minilm/precast.toml
//! $ cargo run --release --features tch --example tch -- artifacts
//! ```
//!
//! A program with tch has the libtorch that tch links, and the runtime uses that one.
#![allow(clippy::print_stdout, reason = "a program that prints its answer")]

use std::path::Path;

use anyhow::Result;
use precast::{Device, Runtime, Store};
use tch::{Kind, Tensor};

/// The token ids of three sentences, each with the tokens for its beginning and its end.
const IDS: [[i64; 4]; 3] = [
    [101, 7592, 2088, 102], // hello world
    [101, 7592, 2045, 102], // hello there
    [101, 2814, 2733, 102], // friday week
];

/// Returns the cosine of each sentence to each other one, float32 `[3, 3]`.
pub fn similarities(store: &Path) -> Result<Tensor> {
    let model = Runtime::new(&Store::open(store)?, Device::Cpu)?.load("minilm")?;
    let ids = Tensor::from_slice2(&IDS);
    let answer = model.run("encode", &[&ids, &ids.ones_like()])?;

    // The runtime's tensor, and tch's of the same memory.
    let output = &answer[0];
    let tokens = Tensor::from(output);
    assert_eq!(tokens.data_ptr() as usize, output.address());

    // From here on it is a tensor as any other: the mean over the tokens, at unit length.
    let mean = tokens.mean_dim(1, false, Kind::Float);
    let length = mean.square().sum_dim_intlist(1, true, Kind::Float).sqrt();
    let unit = mean / length;
    Ok(unit.matmul(&unit.transpose(0, 1)))
}

#[allow(dead_code, reason = "a test has this file as a module")]
fn main() -> Result<()> {
    let store = std::env::args_os().nth(1);
    let store = store.unwrap_or_else(|| "artifacts".into());
    similarities(store.as_ref())?.print();
    Ok(())
}
