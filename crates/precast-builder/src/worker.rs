//! One Python worker: a child process that answers one request at a time and stays alive between them.
//!
//! The worker is not trusted. It runs in a separate process group, which ends with it, and its files are in a private
//! folder. A timeout, too much memory, a cancelled build and a worker that dies are errors of the request, with the end
//! of the worker's log. Before the build ends a worker, the worker writes its Python stack to its log.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin},
    sync::{
        Arc,
        atomic::AtomicBool,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use precast_store::target::Torch;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    BuildError, Launcher, launcher,
    lifeline::Lifeline,
    limits::{Limits, Stop, Watch, ask_for_stack, end_family},
    names::Names,
    protocol::{Hello, Line, PROTOCOL, Request},
    scratch::{BUILD, Scratch, sweep},
};

/// Maximum time for the import of torch.
const HELLO_LIMIT: Duration = Duration::from_secs(600);

/// A live worker.
pub struct Worker {
    child: Child,
    _lifeline: Lifeline,
    stdin: ChildStdin,
    lines: Receiver<std::io::Result<Vec<u8>>>,
    /// Its private folder, and the file of its log there.
    private: PathBuf,
    log: PathBuf,
    next: u64,
    /// Its memory, and the limit.
    watch: Watch,
    /// Cancels its current request.
    pub stop: Stop,
    ended: bool,
    /// Its program, and whether its torch may be newer than the tried versions.
    program: PathBuf,
    untried: bool,
    /// Whether it holds the same model as the first worker.
    pub opened: bool,
}

/// Runs `work` with a single worker, whose folder under `scratch` is removed with it.
pub fn with_single_worker<T>(
    launcher: &Launcher,
    scratch: &Path,
    name: &str,
    spec: Names<'_>,
    cancel: &Arc<AtomicBool>,
    work: impl FnOnce(&mut Worker) -> Result<T, BuildError>,
) -> Result<T, BuildError> {
    sweep(scratch, BUILD, false);
    let folder = Scratch::new(scratch, BUILD)?;
    let (limits, stop) = (Limits::new(None), Stop::new(cancel));
    let mut worker = Worker::spawn(launcher, folder.path(), name, &limits, &stop)?;
    worker.hello(spec)?;
    work(&mut worker)
}

impl Worker {
    /// Returns its private folder.
    pub fn private(&self) -> &Path {
        &self.private
    }

    /// Starts a worker with its private files under `scratch`. Does not wait.
    pub fn spawn(
        launcher: &Launcher,
        scratch: &Path,
        name: &str,
        limits: &Limits,
        stop: &Stop,
    ) -> Result<Self, BuildError> {
        let private = scratch.join(name);
        let (mut child, lifeline) = launcher.spawn(&private)?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both were asked for as pipes");
        };
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n') {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            watch: limits.watch(child.id()),
            child,
            _lifeline: lifeline,
            stdin,
            lines,
            log: launcher::log(&private),
            private,
            next: 0,
            stop: stop.clone(),
            ended: false,
            program: launcher.program.clone(),
            untried: launcher.untried,
            opened: false,
        })
    }

    /// Requests its versions, and refuses names that the project can't have.
    pub fn hello(&mut self, Names { root, names }: Names<'_>) -> Result<Hello, BuildError> {
        let root = root.to_owned();
        let request = Request::Hello { root, names };
        let hello: Hello = self.call(&request, HELLO_LIMIT, &mut |_| {})?;
        if hello.protocol != PROTOCOL {
            let other = hello.protocol;
            return Err(BuildError::Protocol {
                message: format!("worker speaks version {other}, this binary {PROTOCOL}"),
            });
        }
        match Torch::fit(&hello.torch, self.untried) {
            Ok(()) => Ok(hello),
            Err(why) => Err(BuildError::WrongTorch {
                program: self.program.clone(),
                found: hello.torch,
                why,
            }),
        }
    }

    /// Sends one request and waits for its answer. Calls `on_phase` with the name of each phase that begins.
    pub fn call<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        limit: Duration,
        on_phase: &mut dyn FnMut(&str),
    ) -> Result<T, BuildError> {
        self.next += 1;
        let id = self.next;
        let mut line = json!({ "id": id });
        let body = serde_json::to_value(request).map_err(|e| BuildError::Protocol {
            message: e.to_string(),
        })?;
        if let (Some(line), Value::Object(body)) = (line.as_object_mut(), body) {
            line.extend(body);
        }
        let started = Instant::now();
        if writeln!(self.stdin, "{line}")
            .and_then(|()| self.stdin.flush())
            .is_err()
        {
            return Err(self.died());
        }
        loop {
            if let Err(error) = self.check(started, limit) {
                self.end();
                return Err(error);
            }
            let text = match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(Ok(line)) => String::from_utf8_lossy(&line).into_owned(),
                Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => return Err(self.died()),
                Err(RecvTimeoutError::Timeout) => continue,
            };
            let line: Line = match serde_json::from_str(&text) {
                Ok(line) => line,
                Err(error) => return Err(self.unreadable(&text, &error)),
            };
            match line {
                Line::Forked => {
                    let what = "it forked, and the copy of the worker went on".to_owned();
                    return Err(self.disturbed(what));
                }
                Line::Event { id: of, phase } if of == id => on_phase(&phase),
                Line::Result { id: of, value } if of == id => {
                    return answer(value);
                }
                Line::Error { id: of, error } if of == id => {
                    return Err(BuildError::Worker(Box::new(error)));
                }
                _ => {
                    return Err(BuildError::Protocol {
                        message: "answer to another request".to_owned(),
                    });
                }
            }
        }
    }

    fn check(&mut self, started: Instant, limit: Duration) -> Result<(), BuildError> {
        if self.stop.is_set() {
            return Err(BuildError::Interrupted);
        }
        if started.elapsed() > limit {
            return Err(BuildError::WorkerHung {
                seconds: limit.as_secs(),
                log: self.last_words(),
            });
        }
        match self.watch.check() {
            Some(what) => Err(BuildError::WorkerGreedy {
                what,
                log: self.last_words(),
            }),
            None => Ok(()),
        }
    }

    /// Returns the text of the worker's log from `start` on.
    pub fn log_since(&self, start: u64) -> Vec<u8> {
        let mut text = Vec::new();
        if let Ok(mut file) = File::open(&self.log) {
            let _ = file
                .seek(SeekFrom::Start(start))
                .and_then(|_| file.read_to_end(&mut text));
        }
        text
    }

    /// Returns the length of the log in bytes.
    pub fn log_len(&self) -> u64 {
        std::fs::metadata(&self.log)
            .map(|meta| meta.len())
            .unwrap_or(0)
    }

    /// Requests the worker's stack, and returns the end of its log with it.
    fn last_words(&mut self) -> String {
        const ANSWERED: Duration = Duration::from_millis(200);
        const PATIENCE: Duration = Duration::from_secs(5);
        let (asked, asked_at) = (Instant::now(), self.log_len());
        let mut before = asked_at;
        ask_for_stack(self.child.id());
        // The stack is written in one piece. A worker that the signal ended writes none.
        while asked.elapsed() < PATIENCE {
            thread::sleep(ANSWERED);
            let now = self.log_len();
            if now != before {
                before = now;
            } else if before != asked_at || !matches!(self.child.try_wait(), Ok(None)) {
                break;
            }
        }
        self.log_tail()
    }

    fn log_tail(&self) -> String {
        const BYTES: u64 = 64 << 10;
        let log = self.log_since(self.log_len().saturating_sub(BYTES));
        String::from_utf8_lossy(&log).trim().to_owned()
    }

    fn died(&mut self) -> BuildError {
        let status = self.end().unwrap_or_default();
        BuildError::WorkerDied {
            status,
            log: self.log_tail(),
        }
    }

    /// Returns the error of a line that is no message. The worker writes JSON only, so another text is the model's.
    fn unreadable(&mut self, text: &str, error: &serde_json::Error) -> BuildError {
        let start: String = text.chars().take(200).collect();
        if error.is_data() {
            let message = format!("{error} in `{start}`");
            return BuildError::Protocol { message };
        }
        let start = start.escape_debug();
        self.disturbed(format!(
            "it wrote to a descriptor that it did not open: an answer begins with `{start}`"
        ))
    }

    fn disturbed(&mut self, what: String) -> BuildError {
        self.end();
        let log = self.log_tail();
        BuildError::Disturbed { what, log }
    }

    /// Ends the worker and everything that it started; returns its status the first time.
    fn end(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        end_family(self.child.id());
        let status = self.child.wait();
        Some(status.map(|status| status.to_string()).unwrap_or_default())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// Reads an answer. An error names the wrong field.
fn answer<T: DeserializeOwned>(value: Value) -> Result<T, BuildError> {
    serde_path_to_error::deserialize(value).map_err(|error| BuildError::Protocol {
        message: format!("field `{}` of its answer: {}", error.path(), error.inner()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Captured, Compiled};

    #[test]
    fn an_answer_of_another_type_is_an_error_that_names_the_field() {
        let message = |error: BuildError| error.to_string();
        let compiled = json!({"library": "a.so", "metadata": null, "seconds": {"cpp": "long"}});
        insta::assert_snapshot!(message(answer::<Compiled>(compiled).unwrap_err()), @r#"the worker and this binary don't understand each other: field `seconds.cpp` of its answer: invalid type: string "long", expected f64"#);
        let captured = |receipt: Value| {
            answer::<Captured>(json!({
                "segments": [], "steps": [], "inputs": [], "outputs": [], "results": [], "values": 0,
                "call_spec": null, "samples": "samples", "seconds": 1.5, "receipt": receipt,
            }))
        };
        insta::assert_snapshot!(message(captured(json!({"eager_us": "fast"})).unwrap_err()), @r#"the worker and this binary don't understand each other: field `receipt.eager_us` of its answer: invalid type: string "fast", expected f64"#);
        let odd = json!({"padding": {"points": 3, "max_abs": 0.0, "sensitive": false}});
        insta::assert_snapshot!(message(captured(odd).unwrap_err()), @r#"the worker and this binary don't understand each other: field `receipt.padding.points` of its answer: invalid type: integer `3`, expected a sequence"#);
        let receipt = captured(json!({"eager_us": 44.5, "eager_runs": 20, "threads": 2}));
        let receipt = json!(receipt.unwrap().receipt.receipt(1.5));
        assert_eq!(
            receipt,
            json!({"seconds": {"capture": 1.5}, "eager_us": 44.5, "eager_runs": 20, "threads": 2})
        );
    }
}
