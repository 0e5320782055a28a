//! The process of a gate: it reads a [`Question`](super::Question) as JSON on stdin and writes a [`Verdict`] to stdout.

use std::{
    io::{Read, Write},
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use precast_store::record::receipt::Gate;
use serde::Serialize;

use super::Verdict;
use crate::{
    BuildError, GateCommand,
    launcher::WAIT_POLICY,
    lifeline::{self, Lifeline},
    limits::{Limits, Stop, end_family},
};

/// Maximum time of a candidate's run.
pub(crate) const LIMIT: Duration = Duration::from_secs(900);

/// The start and the limits of a gate's process.
pub(crate) struct GateProcess<'a> {
    pub command: &'a GateCommand,
    pub limits: &'a Limits,
    pub limit: Duration,
    pub stop: &'a Stop,
}

impl GateProcess<'_> {
    /// Sends a request to a gate's process, and returns the report for a candidate's receipt.
    pub fn ask(&self, request: &impl Serialize) -> Result<Gate, BuildError> {
        let request = serde_json::to_vec(request).map_err(|e| BuildError::Protocol {
            message: e.to_string(),
        })?;
        let (mut child, _lifeline) = self.start()?;
        if let Some(mut stdin) = child.stdin.take() {
            // In a thread: a child that is loading libtorch does not read yet. The exit status shows that a child ended
            // early.
            thread::spawn(move || stdin.write_all(&request));
        }
        let out = collect(child.stdout.take());
        let log = collect(child.stderr.take());
        let status = self.wait(&mut child)?;
        verdict(
            status,
            &out.join().unwrap_or_default(),
            &log.join().unwrap_or_default(),
        )
    }

    fn start(&self) -> Result<(Child, Lifeline), BuildError> {
        let mut command = Command::new(&self.command.program);
        command
            .args(&self.command.args)
            .env("OMP_WAIT_POLICY", WAIT_POLICY)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        lifeline::spawn(&mut command).map_err(|source| BuildError::NoGate {
            program: self.command.program.clone(),
            source,
        })
    }

    /// Waits for the end of a child, and ends it when it exceeds a limit or the build is over.
    fn wait(&self, child: &mut Child) -> Result<ExitStatus, BuildError> {
        let started = Instant::now();
        let mut watch = self.limits.watch(child.id());
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                return Ok(status);
            }
            let error = if self.stop.is_set() {
                Some(BuildError::Interrupted)
            } else if started.elapsed() > self.limit {
                let seconds = self.limit.as_secs();
                Some(failed(format!("it did not end within {seconds} s"), ""))
            } else {
                let excess = watch.check();
                excess.map(|what| failed(format!("it took too much memory: {what}"), ""))
            };
            if let Some(error) = error {
                end_family(child.id());
                let _ = child.wait();
                return Err(error);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn failed(message: String, log: &str) -> BuildError {
    BuildError::Gate {
        message,
        log: log.to_owned(),
        far: false,
    }
}

/// Reads a pipe to its end, in a thread.
fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut text = Vec::new();
        pipe.map(|mut pipe| pipe.read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    })
}

fn verdict(status: ExitStatus, out: &str, log: &str) -> Result<Gate, BuildError> {
    if let Some(signal) = status.signal() {
        let message = format!("it ended its process with signal {signal}");
        return Err(failed(message, log));
    }
    match serde_json::from_str(out) {
        Ok(Verdict::Passed { report }) => Ok(*report),
        Ok(Verdict::Differs { message }) => Err(BuildError::Gate {
            message,
            log: log.to_owned(),
            far: true,
        }),
        Ok(Verdict::Failed { message }) => Err(failed(message, log)),
        Err(_) => {
            let message = format!("the process that checks it ended with {status}");
            Err(failed(message, log))
        }
    }
}
