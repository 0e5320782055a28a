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
    runtime(Memory::with(fakes).source()).load("fake").unwrap()
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

#[test]
fn bad_calls_are_refused_by_name() {
    let outcome = bad_calls::run(SEED, 4_000);
    assert_eq!(outcome.bad, [] as [String; 0]);
    assert!(
        outcome.figure("kinds").as_object().unwrap().len() > 20,
        "{outcome:?}"
    );
}

#[test]
fn hostile_values_are_refused_or_answered_as_eager_does() {
    match real::store().filter(values::there) {
        Some(store) => {
            let outcome = values::run(&store, 3_000, SEED);
            assert_eq!(outcome.bad, [] as [String; 0]);
            let kinds = ["out_of_bounds", "failed_checks", "answered"];
            let all = kinds.iter().chain(&values::RUNGS);
            assert!(
                all.clone().all(|kind| outcome.count(kind) > 100),
                "{outcome:?}"
            );
        }
        None => skip(
            "hostile_values_are_refused_or_answered_as_eager_does",
            "no store of `cargo test --test numerics`",
        ),
    }
}

#[test]
fn callers_that_fail_never_harm_others() {
    let outcome = crowds::mixed(&[4, 16], 10_000, SEED);
    assert_eq!(outcome.bad, [] as [String; 0]);
    let failed = ["refused", "failed"].map(|kind| outcome.count(kind) > 1_000);
    assert_eq!(failed, [true; 2], "{outcome:?}");
    let outcome = crowds::fresh(200, SEED);
    assert_eq!(outcome.bad, [] as [String; 0]);
}

#[test]
fn sessions_never_see_each_other() {
    let outcome = sessions::mixed(10_000, SEED);
    assert_eq!(outcome.bad, [] as [String; 0]);
    let kinds = ["refused", "failed", "forked"].map(|kind| outcome.count(kind) > 100);
    assert_eq!(kinds, [true; 3], "{outcome:?}");
    assert_eq!(sessions::opened(1_000).bad, [] as [String; 0]);
}

#[test]
fn outputs_stay_what_they_were() {
    assert_eq!(crowds::outputs(3_000, SEED).bad, [] as [String; 0]);
}

#[test]
fn weights_are_swapped_under_load() {
    let outcome = crowds::swaps(100, 3);
    assert_eq!(outcome.bad, [] as [String; 0]);
    assert!(outcome.count("answers") > 0);
}

#[test]
fn padding_changes_no_answer() {
    let outcome = padding::fakes(&[(1, 1), (2, 3), (4, 4)]);
    assert_eq!(outcome.bad, [] as [String; 0]);
    assert!(outcome.count("sizes") == 1 + 6 + 16, "{outcome:?}");
}

#[test]
fn wrong_hosts_are_refused_before_anything_is_loaded() {
    let outcome = loading::hosts();
    assert_eq!(outcome.bad, [] as [String; 0]);
    assert!(outcome.count("refused") > 200, "{outcome:?}");
}

#[test]
fn artifacts_that_do_not_load_are_set_aside_and_the_ladder_answers() {
    let outcome = loading::broken(40, SEED);
    assert_eq!(outcome.bad, [] as [String; 0]);
    assert!(outcome.count("set_aside") > 20, "{outcome:?}");
}

#[test]
fn only_verified_bytes_are_executed() {
    let outcome = races::run(400, 1, SEED);
    assert_eq!(outcome.bad, [] as [String; 0]);
    assert!(
        outcome.count("loaded") > 50 && outcome.count("refused") > 50,
        "{outcome:?}"
    );
    assert!(
        outcome.count("controls") > 0,
        "the canary says when it is executed"
    );
}

#[test]
fn weights_are_held_once_and_nothing_leaks() {
    let outcome = memory::sharing(4, 32 << 20);
    assert_eq!(outcome.bad, [] as [String; 0]);
    let outcome = memory::leaks(40_000);
    assert_eq!(outcome.bad, [] as [String; 0]);
}

#[test]
fn no_memory_is_an_error_and_memory_returns() {
    assert_eq!(memory::exhaustion(5).bad, [] as [String; 0]);
}

#[test]
fn a_process_may_end_in_mid_work() {
    let outcome = exits::run(8, 2, SEED);
    assert_eq!(outcome.bad, [] as [String; 0]);
}

#[test]
#[ignore = "long: `make test-long`"]
fn the_shim_is_clean_under_sanitizers() {
    let outcome = shim::run(400);
    assert_eq!(outcome.bad, [] as [String; 0]);
    assert!(outcome.count("calls") > 10_000, "{outcome:?}");
}

/// Written past libtest's capture: a skip is never silent.
fn skip(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "{test}: skipped: {why}");
}

#[test]
#[ignore = "minutes: `make torture-runtime` runs it"]
fn full() {
    full::run();
}
