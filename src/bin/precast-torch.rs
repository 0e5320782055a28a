//! The half of `precast` that runs artifacts: `precast` starts it for `run`, `bench` and the gate of a build.
//!
//! Loading libtorch takes a process a fifth of a second. It is a program of its own so that nothing else pays for it: a
//! build with nothing to do, a listing, a plan.

use std::ffi::{c_char, c_int};

/// A function of the loader's, with the arguments of `main`.
type Before = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);

/// Runs before the initialisers of libtorch, so that a CUDA context is made beside them. Only an executable can have it:
/// hence not in `runtime/ffi`, where the function is.
// SAFETY: the loader calls what is in this section with the arguments of `main`, which is what the function asks for.
#[used]
#[unsafe(link_section = ".preinit_array")]
static BEFORE: Before = precast::cli::before_main;

fn main() -> std::process::ExitCode {
    precast::cli::main_with_torch()
}
