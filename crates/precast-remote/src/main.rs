//! `precast-remote`: what `precast` starts to reach a remote. See `precast_store::transfer`.

use std::{
    io::{self, BufRead, BufReader},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

/// How long a transfer has to end once it is stopped: a request may be waiting for a server that says nothing.
const GRACE: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    precast_remote::use_ring();
    let mut input = BufReader::new(io::stdin());
    let mut line = String::new();
    // What can't be read is no request, which is the answer.
    let _ = input.read_line(&mut line);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    thread::spawn(move || {
        let _ = io::copy(&mut input, &mut io::sink());
        stopped.store(true, Ordering::Relaxed);
        thread::sleep(GRACE);
        std::process::exit(130);
    });
    if precast_remote::protocol::answer(&line, &stop, io::stdout()) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
