//! The program that has the network code, `precast-remote`: its start, one request, and its answers.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;

use super::super::{exit::Refusal, text::plain};
use crate::store::transfer::{Event, Kind, Request};

/// Its name.
const PROGRAM: &str = "precast-remote";

/// Sends a request to a program of its own, and hands out its events up to the last one.
pub(super) fn ask(
    request: &Request,
    cancel: &Arc<AtomicBool>,
    each: &mut dyn FnMut(Event),
) -> Result<()> {
    let mut program = Program::start(request, cancel)?;
    let ended = program.events(&mut |event| {
        each(event);
        true
    });
    // Whatever it said, it does not go on.
    let status = program.end();
    if ended? {
        return Ok(());
    }
    if cancel.load(Ordering::Relaxed) {
        let hint = "run it again; what has moved is kept";
        return Err(Refusal::interrupted("interrupted", hint).into());
    }
    let status = status.map_or_else(|e| e.to_string(), |status| status.to_string());
    let message = format!("`{PROGRAM}` ended without an answer: {status}");
    Err(Refusal::failed(message, "run it again; what has moved is kept").into())
}

/// The program at work. The end of its input stops it: after Ctrl-C, and when this process is killed.
pub(super) struct Program {
    child: Child,
    input: Arc<Mutex<Option<ChildStdin>>>,
    output: BufReader<ChildStdout>,
    over: Arc<AtomicBool>,
    watch: Option<JoinHandle<()>>,
}

impl Program {
    /// Starts it with a request: the one beside this program, else that of the path.
    pub fn start(request: &Request, cancel: &Arc<AtomicBool>) -> Result<Self> {
        let own = std::env::current_exe().ok();
        let beside = own.and_then(|own| Some(own.parent()?.join(PROGRAM)));
        let program = beside.filter(|path| path.is_file());
        let program = program.unwrap_or_else(|| PathBuf::from(PROGRAM));
        let mut command = Command::new(&program);
        // Ctrl-C is for this process, which ends the other one.
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let refused = |error: std::io::Error| {
            let message = format!(
                "can't start `{}`, which has the network code: {error}",
                program.display()
            );
            let hint = "`make remote` builds it beside `precast`; the wheel has it";
            Refusal::usage(message, hint)
        };
        let mut child = command.spawn().map_err(refused)?;
        let (mut input, output) = (child.stdin.take(), child.stdout.take());
        let Some(output) = output else {
            return Err(refused(std::io::ErrorKind::BrokenPipe.into()).into());
        };
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        if let Some(input) = &mut input {
            // A program that ended has said why.
            let _ = input
                .write_all(line.as_bytes())
                .and_then(|()| input.flush());
        }
        let input = Arc::new(Mutex::new(input));
        let over = Arc::new(AtomicBool::new(false));
        let (kept, cancel, ended) = (input.clone(), cancel.clone(), over.clone());
        let watch = thread::spawn(move || {
            while !cancel.load(Ordering::Relaxed) && !ended.load(Ordering::Relaxed) {
                thread::park_timeout(Duration::from_millis(50));
            }
            kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        });
        Ok(Self {
            child,
            input,
            output: BufReader::new(output),
            over,
            watch: Some(watch),
        })
    }

    /// Hands out its events until one is not followed by more, as `each` says, or until the end. Returns whether its work
    /// was done.
    pub fn events(&mut self, each: &mut dyn FnMut(Event) -> bool) -> Result<bool> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line)? == 0 {
                return Ok(false);
            }
            let event = serde_json::from_str(&line);
            let event = event.map_err(|e| {
                let message =
                    format!("`{PROGRAM}` says what this precast does not understand: {e}");
                Refusal::failed(message, "install both programs from one release of precast")
            })?;
            match event {
                Event::Done => return Ok(true),
                Event::Error {
                    message,
                    hint,
                    causes,
                    kind,
                } => {
                    // Names and messages of a server.
                    let message = plain(&[&[message][..], &causes].concat().join(": "));
                    let refusal = match kind {
                        Kind::Usage => Refusal::usage(message, hint),
                        Kind::Missing => Refusal::missing(message, hint),
                        Kind::Target => Refusal::target(message, hint),
                        Kind::Interrupted => Refusal::interrupted(message, hint),
                        Kind::Failed => Refusal::failed(message, hint),
                    };
                    return Err(refusal.into());
                }
                other => {
                    if !each(other) {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// As [`Self::events`], and ends its input when `stop` says so.
    pub fn events_until(
        &mut self,
        stop: &(dyn Fn() -> bool + Sync),
        each: &mut dyn FnMut(Event) -> bool,
    ) -> Result<bool> {
        let (input, over) = (self.input.clone(), AtomicBool::new(false));
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) && !stop() {
                    thread::park_timeout(Duration::from_millis(50));
                }
                if stop() {
                    input.lock().unwrap_or_else(PoisonError::into_inner).take();
                }
            });
            let listened = self.events(each);
            over.store(true, Ordering::Relaxed);
            watch.thread().unpark();
            listened
        })
    }

    /// Ends its input, and waits for its end.
    pub fn end(&mut self) -> std::io::Result<ExitStatus> {
        self.over.store(true, Ordering::Relaxed);
        self.input
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(watch) = self.watch.take() {
            watch.thread().unpark();
            let _ = watch.join();
        }
        self.child.wait()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Nobody is left to hear it.
        let _ = self.end();
    }
}
