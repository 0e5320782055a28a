//! The memory of a call, beyond the memory of its process before the call.
//!
//! On the CPU that is resident memory as the kernel counts it: the free pages of the heap are released, the kernel's
//! high-water mark is reset, and read again after the call. Memory of other threads counts too, so it is for processes
//! with no other work. On CUDA it is the memory of torch's allocator; the memory of a captured graph was allocated by
//! the capture.

use std::fs;

use precast_store::Device;

use super::{
    ffi::{self, cuda},
    host::device_memory,
};

/// Returns the result of `call` and its peak memory, in bytes; none if the system does not measure it.
pub fn peak<T>(device: Device, call: impl FnOnce() -> T) -> (T, Option<u64>) {
    let before = mark(device);
    let result = call();
    let max = before.and_then(|before| Some(highest(device)?.saturating_sub(before)));
    (result, max)
}

/// Sets the high-water mark to the present memory, and returns that.
fn mark(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => {
            ffi::give_back();
            // 5: the high-water mark of resident memory (man 5 proc_pid_clear_refs).
            fs::write("/proc/self/clear_refs", "5").ok()?;
            status("VmRSS:")
        }
        Device::Cuda(ordinal) => {
            cuda().and_then(|cuda| cuda.reset_peak(ordinal)).ok()?;
            Some(device_memory(device).ok()?.allocated)
        }
    }
}

fn highest(device: Device) -> Option<u64> {
    match device {
        Device::Cpu => status("VmHWM:"),
        Device::Cuda(_) => Some(device_memory(device).ok()?.peak),
    }
}

/// Returns a number of kilobytes from this process's status, in bytes.
fn status(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use precast_store::testing::in_own_process;

    #[test]
    fn a_peak_includes_memory_that_the_call_freed() {
        in_own_process(
            "peak::tests::a_peak_includes_memory_that_the_call_freed",
            measure,
        );
    }

    fn measure() {
        const MIB: u64 = 1 << 20;
        let hold = || vec![1_u8; usize::try_from(256 * MIB).unwrap()].len();
        // The kernel counts a thread's pages some at a time, so its numbers are off by a little.
        let held = |bytes: u64| (250..320).contains(&(bytes / MIB));
        let (_, Some(most)) = peak(Device::Cpu, hold) else {
            panic!("this kernel does not say")
        };
        assert!(held(most), "{most}");
        // Freed pages were given back, so that a second use is measured as well.
        let (_, again) = peak(Device::Cpu, hold);
        assert!(held(again.unwrap()), "{again:?}");
    }
}
