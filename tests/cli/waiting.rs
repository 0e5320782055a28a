//! Waits for other processes: each has a limit, and a signal ends it.

use std::{
    fs::File,
    os::unix::process::CommandExt,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::Sandbox;

const SOON: Duration = Duration::from_secs(30);

#[test]
fn one_signal_ends_a_process_that_waits() {
    let sandbox = Sandbox::built();
    let lock = File::open(sandbox.path("artifacts/locks/use")).unwrap();
    lock.lock_shared().unwrap();
    let mut waiting = sandbox
        .command(&["gc"])
        .process_group(0)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = std::io::BufReader::new(waiting.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut stderr, &mut line).unwrap();
    assert!(line.starts_with("waiting for pid "), "{line}");
    kill_process(Pid::from_child(&waiting), Signal::TERM).unwrap();
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = waiting.try_wait().unwrap() {
            break status;
        }
        assert!(begin.elapsed() < SOON, "it still waits");
        thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(130));
    drop(lock);
    sandbox.ok(&["gc"]);
}
