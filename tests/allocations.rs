//! In steady state the runtime makes no heap allocation for a call.
//!
//! A test binary of its own: it counts every allocation of the thread through Rust's allocator. Allocations of libtorch
//! and the artifact in C++ (tensor objects and their memory) are not counted; the raw C call makes the same ones.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "tests panic, print, and call C"
)]

mod fake;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use fake::{Fake, Memory};
use precast::runtime::Tensor;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: it passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The thread may be ending, when it has no counter any more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = COUNT.with(Cell::get);
    work();
    COUNT.with(Cell::get) - before
}

#[test]
fn a_call_allocates_nothing_in_steady_state() {
    assert!(allocations(|| drop(Box::new(1))) > 0, "the counter counts");
    let fakes = [
        Fake::sized(4, 4).inputs(8).outputs(2),
        Fake::sized(2, 2).inputs(8).outputs(2),
    ];
    let model = Memory::with(&fakes).runtime().load("fake").unwrap();
    for (rows, cols) in [(4, 4), (3, 2), (1, 1)] {
        let (shape, count) = ([rows, cols], (rows * cols) as usize);
        let mut inputs = vec![Tensor::from_slice(&vec![1.0_f32; count], &shape).unwrap()];
        inputs.resize_with(8, || {
            Tensor::from_slice(&vec![1_i64; count], &shape).unwrap()
        });
        let calls = || (0..100).for_each(|_| drop(model.run("f", &inputs).unwrap()));
        calls();
        assert_eq!(allocations(calls), 0, "{rows}x{cols}");
    }
}

#[test]
fn a_step_of_a_session_allocates_nothing_in_steady_state() {
    let fake = Fake::sized(1, 2).constants(0).stateful();
    let model = Memory::with(&[fake]).runtime().load("fake").unwrap();
    let mut session = model.session().unwrap();
    let inputs = [Tensor::from_slice(&[1.0_f32, 2.0], &[1, 2]).unwrap()];
    let mut steps = || (0..100).for_each(|_| drop(session.run("f", &inputs).unwrap()));
    steps();
    assert_eq!(allocations(steps), 0);
}
