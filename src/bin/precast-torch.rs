//! The half of `precast` that runs artifacts: `precast` starts it for `run`, `bench` and the gate of a build.
//!
//! Loading libtorch takes a process a fifth of a second. It is a program of its own so that nothing else pays for it: a
//! build with nothing to do, a listing, a plan.

fn main() {
    precast::cli::main_with_torch()
}
