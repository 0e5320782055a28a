//! Lines of output, time and peak memory of one `precast` command.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// How one run went.
#[allow(dead_code, reason = "each test target uses a part of it")]
pub struct Ran {
    pub lines: u64,
    /// Until the first line was there.
    pub first: Duration,
    pub total: Duration,
    /// The most memory that it had, in bytes.
    pub peak: u64,
}

/// Runs `precast` over the store at `root` and reads all that it prints.
#[allow(clippy::zombie_processes, reason = "`wait4` waits for it")]
pub fn run(args: &[&str], root: &Path) -> Ran {
    let start = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_precast"))
        .args(args)
        .env("PRECAST_STORE", root)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let (mut lines, mut first, mut line) = (0, Duration::ZERO, Vec::new());
    while out.read_until(b'\n', &mut line).unwrap() > 0 {
        if lines == 0 {
            first = start.elapsed();
        }
        lines += 1;
        line.clear();
    }
    // Reaped here, so that the peak is of this child alone.
    let (mut status, pid) = (0, child.id() as libc::pid_t);
    // SAFETY: an all-zero `rusage` is a valid one; both pointers are to locals, and the child was not waited for
    // before.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::wait4(pid, &mut status, 0, &mut usage), pid);
        usage
    };
    assert_eq!(status, 0, "{args:?}");
    Ran {
        lines,
        first,
        total: start.elapsed(),
        peak: usage.ru_maxrss as u64 * 1024,
    }
}
