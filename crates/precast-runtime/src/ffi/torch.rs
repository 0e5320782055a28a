//! Calls of libtorch's C ABI with the reason of a failure.
//!
//! Its functions return 0 or print the reason on `std::cerr`: [`call`] takes it from there, with the shim.

use super::{
    libtorch::{self, torch_get_num_threads},
    shim::{self, precast_capture_begin, precast_capture_end},
};
use crate::TorchError;

/// Makes one call of libtorch's C ABI and returns the reason when it fails.
pub fn call(f: impl FnOnce() -> i32) -> Result<(), TorchError> {
    libtorch::get()?;
    if !shim::is_open() {
        return match f() {
            0 => Ok(()),
            code => Err(TorchError::libtorch(format!(
                "libtorch says why on stderr (code {code})"
            ))),
        };
    }
    shim::capture_messages();
    // SAFETY: both set a thread-local of the shim; `f` only calls libtorch, which returns.
    let code = unsafe {
        let before = precast_capture_begin();
        let code = f();
        precast_capture_end(before, code);
        code
    };
    match code {
        0 => Ok(()),
        _ => Err(TorchError::libtorch(reason(&shim::last_error()))),
    }
}

/// Returns the reason in a message of libtorch, as `[E1123 20:21:32.000 f.cpp:1] Exception in aoti_torch: reason`. The
/// lines after the first are the frames of its C++ stack.
fn reason(printed: &str) -> &str {
    const BEFORE: &str = "Exception in aoti_torch: ";
    let from = printed.find(BEFORE).map_or(0, |at| at + BEFORE.len());
    let line = printed[from..].lines().next().unwrap_or_default();
    line.trim_end()
}

/// Returns the number of threads of libtorch's parallel loops.
pub fn threads() -> usize {
    let mut threads = 1;
    // SAFETY: a valid out pointer.
    let asked = call(|| unsafe { torch_get_num_threads(&mut threads) });
    asked.map_or(1, |()| threads as usize)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_reason_is_taken_from_what_was_printed() {
        let printed = "[E1123 20:21:32.123456 shim_common.cpp:9] Exception in aoti_torch: no memory \nException raised from x";
        assert_eq!(super::reason(printed), "no memory");
        assert_eq!(super::reason("another text\n"), "another text");
    }
}
