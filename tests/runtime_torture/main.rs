//! Tries to break the runtime: `make torture-runtime` runs it at full size, `cargo test` a small seeded sample.
//!
//! | file | PROMISES |
//! |---|---|
//! | `bad_calls`, `values` | 15: no input crashes or gives silently wrong numbers |
//! | `crowds` | 16, 21, 25: callers never harm each other, outputs stay, weights are swapped under load |
//! | `padding` | 17: padding and earlier calls never reach an answer |
//! | `loading` | 18, 20: wrong hosts, artifacts that don't load |
//! | `races` | 19: only verified bytes execute |
//! | `memory` | 22, 23, 24: weights once, no memory is an error, nothing leaks |
//! | `exits` | 24: a process may end in mid-work |
//! | `shim` | the C++ shim under AddressSanitizer |
//!
//! Tests that may end the process, or that measure a whole process, run in children: this binary starts itself (`act`).
//! Real artifacts join in where `cargo test --test numerics` has left its store.
#![cfg(feature = "tch")]
#![allow(
    clippy::exit,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::unwrap_used,
    unsafe_code,
    reason = "tests panic, print, and call C"
)]

#[path = "../fake/mod.rs"]
mod fake;
#[path = "../sample/random.rs"]
mod random;

mod act;
mod bad_calls;
mod crowds;
mod exits;
mod full;
mod guard;
mod loading;
mod memory;
mod padding;
mod races;
mod real;
#[path = "../torture/report.rs"]
mod report;
mod sessions;
mod shim;
mod values;

use std::{io::Write, sync::Arc};

use fake::{Fake, Memory};
use precast::{
    Device, Model, Runtime,
    runtime::{cuda::TensorRef, sources::Source},
};
use random::Random;
use tch::{Kind, Tensor};

/// Where every generator of a sample begins.
const SEED: u64 = 20_261_121;

fn runtime(source: Arc<dyn Source>) -> Runtime {
    Runtime::over(source, Device::Cpu).unwrap()
}

fn load(fakes: &[Fake]) -> Model {
    Memory::with(fakes).load()
}

/// Returns `rows` x `cols` float32 numbers from 1 on, which a fake with `scale` = 2 doubles exactly.
fn x(rows: i64, cols: i64) -> Tensor {
    (Tensor::arange(rows * cols, (Kind::Float, tch::Device::Cpu)) + 1).reshape([rows, cols])
}

/// Returns inputs that are refused before anything runs.
fn wrong() -> [Tensor; 4] {
    [
        x(8, 4).to_kind(Kind::Double),
        x(4, 8).transpose(0, 1),
        x(9, 5),
        Tensor::new(),
    ]
}

fn flat<'a>(tensor: impl Into<TensorRef<'a>>) -> Vec<f32> {
    let tensor = Tensor::from(tensor.into());
    Vec::<f32>::try_from(tensor.contiguous().view(-1)).unwrap()
}

/// Not a test: the entry of this binary's children.
#[test]
fn actor() {
    act::act();
}

/// Runs threads at once, and returns their results in order.
fn threads<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |number| scope.spawn(move || work(number));
        let all: Vec<_> = (0..count).map(start).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

#[test]
fn bad_calls_are_refused_by_name() {
    let outcome = bad_calls::run(SEED, 4_000);
    outcome.good(&[]);
    let kinds = outcome.figure("kinds").as_object().unwrap().len();
    assert!(kinds > 20, "{outcome:?}");
}

#[test]
fn hostile_values_are_refused_or_answered_as_eager_does() {
    let Some(store) = real::store().filter(values::there) else {
        // Written past libtest's capture: a skip is never silent.
        let why = "hostile values: skipped: no store of `cargo test --test numerics`";
        let _ = writeln!(std::io::stderr(), "{why}");
        return;
    };
    let kinds = ["out_of_bounds", "failed_checks", "answered"];
    let each = kinds.iter().chain(&values::RUNGS).map(|kind| (*kind, 100));
    values::run(&store, 3_000, SEED).good(&each.collect::<Vec<_>>());
}

#[test]
fn callers_that_fail_never_harm_others() {
    crowds::mixed(&[4, 16], 10_000, SEED).good(&[("refused", 1_000), ("failed", 1_000)]);
    crowds::fresh(200, SEED).good(&[]);
}

#[test]
fn sessions_never_see_each_other() {
    let outcome = sessions::mixed(10_000, SEED);
    outcome.good(&[("refused", 100), ("failed", 100), ("forked", 100)]);
    sessions::opened(1_000).good(&[]);
}

#[test]
fn outputs_stay_what_they_were() {
    crowds::outputs(3_000, SEED).good(&[]);
}

#[test]
fn weights_are_swapped_under_load() {
    crowds::swaps(100, 3).good(&[("answers", 0)]);
}

#[test]
fn padding_changes_no_answer() {
    let outcome = padding::fakes(&[(1, 1), (2, 3), (4, 4)]);
    outcome.good(&[]);
    assert_eq!(outcome.count("sizes"), 1 + 6 + 16, "{outcome:?}");
}

#[test]
fn wrong_hosts_are_refused_before_anything_is_loaded() {
    loading::hosts().good(&[("refused", 200)]);
}

#[test]
fn artifacts_that_do_not_load_are_set_aside_and_the_ladder_answers() {
    loading::broken(40, SEED).good(&[("set_aside", 20)]);
}

#[test]
fn only_verified_bytes_are_executed() {
    // The controls: the canary says when it is executed.
    let above = [("loaded", 50), ("refused", 50), ("controls", 0)];
    races::run(400, 1, SEED).good(&above);
}

#[test]
fn weights_are_held_once_and_nothing_leaks() {
    memory::sharing(4, 32 << 20).good(&[]);
    memory::leaks(40_000).good(&[]);
}

#[test]
fn no_memory_is_an_error_and_memory_returns() {
    memory::exhaustion(5).good(&[]);
}

#[test]
fn a_process_may_end_in_mid_work() {
    exits::run(8, 2, SEED).good(&[]);
}

#[test]
#[ignore = "long: `make test-long`"]
fn the_shim_is_clean_under_sanitizers() {
    shim::run(400).good(&[("calls", 10_000)]);
}

#[test]
#[ignore = "minutes: `make torture-runtime` runs it"]
fn full() {
    full::run();
}
