//! One Python worker: a child process that answers one request at a time and stays alive between them.
//!
//! The worker is distrusted. It runs in a process group of its own, which ends with it; its files lie in a private
//! folder; a request that takes too long, a cancelled build or a worker that dies are errors of that request, with the
//! end of the worker's log in them.

use std::{
    ffi::OsString,
    fs::File,
    io::{BufRead, BufReader, Read, Seek, SeekFrom, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;
use serde_json::json;

use super::{
    BuildError,
    protocol::{Hello, Line, PROTOCOL, Request},
};

/// The worker's program, written out where Python can run it.
const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/worker.rs"));

/// How to start a worker.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The interpreter, or the whole worker program when `args` says so.
    pub program: PathBuf,
    /// Arguments before the worker's own path; none is the usual case.
    pub args: Vec<OsString>,
    /// Start `program` itself, instead of the embedded worker under it.
    pub replaces_worker: bool,
    /// A folder that outlives builds, for precompiled C++ headers; without one each build makes its own.
    pub headers: Option<PathBuf>,
}

impl Launcher {
    /// Runs the embedded worker with this interpreter.
    pub fn python(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: vec![],
            replaces_worker: false,
            headers: None,
        }
    }

    /// Runs `program` as the worker.
    pub fn program(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: vec![],
            replaces_worker: true,
            headers: None,
        }
    }

    fn command(&self, scratch: &Path) -> Result<Command, BuildError> {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        if let Some(headers) = &self.headers {
            command.env("PRECAST_HEADER_DIR", headers);
        }
        if !self.replaces_worker {
            command.args(["-P", "-u"]).arg(unpack(scratch)?);
        }
        Ok(command)
    }
}

/// Writes the embedded worker into `scratch` and returns its folder.
fn unpack(scratch: &Path) -> Result<PathBuf, BuildError> {
    let folder = scratch.join("precast_worker");
    let write = || {
        std::fs::create_dir_all(&folder)?;
        FILES
            .iter()
            .try_for_each(|(name, text)| std::fs::write(folder.join(name), text))
    };
    write().map_err(|source| BuildError::Scratch {
        path: folder.clone(),
        source,
    })?;
    Ok(folder)
}

/// A live worker.
pub struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<std::io::Result<String>>,
    log: PathBuf,
    next: u64,
    pub hello: Hello,
    /// Whether it holds the model.
    pub opened: bool,
}

impl Worker {
    /// Starts a worker whose private files lie in `scratch`, and asks it what it is.
    pub fn start(
        launcher: &Launcher,
        scratch: &Path,
        name: &str,
        cancel: &AtomicBool,
    ) -> Result<Self, BuildError> {
        let private = scratch.join(name);
        let cache = |folder: &str| private.join(folder);
        let scratch_error = |source| BuildError::Scratch {
            path: private.clone(),
            source,
        };
        for folder in ["inductor", "triton", "tmp"] {
            std::fs::create_dir_all(cache(folder)).map_err(scratch_error)?;
        }
        let log = private.join("log");
        let stderr = File::create(&log).map_err(scratch_error)?;
        let mut child = launcher
            .command(scratch)?
            .env("TORCHINDUCTOR_CACHE_DIR", cache("inductor"))
            .env("TRITON_CACHE_DIR", cache("triton"))
            .env("TMPDIR", cache("tmp"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .process_group(0)
            .spawn()
            .map_err(|source| BuildError::NoPython {
                program: launcher.program.clone(),
                source,
            })?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both were asked for as pipes");
        };
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let hello = Hello {
            protocol: 0,
            python: String::new(),
            site_packages: vec![],
            torch: String::new(),
            torch_git: String::new(),
            cuda: None,
            cxx11_abi: true,
            sm: vec![],
        };
        let mut worker = Self {
            child,
            stdin,
            lines,
            log,
            next: 0,
            hello,
            opened: false,
        };
        worker.hello = worker.call(
            &Request::Hello,
            Duration::from_secs(300),
            cancel,
            &mut |_| {},
        )?;
        if worker.hello.protocol != PROTOCOL {
            return Err(BuildError::Protocol {
                message: format!(
                    "worker speaks version {}, this binary {PROTOCOL}",
                    worker.hello.protocol
                ),
            });
        }
        Ok(worker)
    }

    /// Sends one request and waits for its answer. `phase` hears where the request is.
    pub fn call<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        limit: Duration,
        cancel: &AtomicBool,
        phase: &mut dyn FnMut(&str),
    ) -> Result<T, BuildError> {
        self.next += 1;
        let id = self.next;
        let mut line = json!({ "id": id });
        let body = serde_json::to_value(request).map_err(|e| BuildError::Protocol {
            message: e.to_string(),
        })?;
        if let (Some(line), serde_json::Value::Object(body)) = (line.as_object_mut(), body) {
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
            if cancel.load(Ordering::Relaxed) {
                self.kill();
                return Err(BuildError::Interrupted);
            }
            if started.elapsed() > limit {
                self.kill();
                return Err(BuildError::WorkerHung {
                    seconds: limit.as_secs(),
                    log: self.log_tail(),
                });
            }
            let text = match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(Ok(text)) => text,
                Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => return Err(self.died()),
                Err(RecvTimeoutError::Timeout) => continue,
            };
            let protocol = |error: serde_json::Error| BuildError::Protocol {
                message: format!(
                    "{error} in `{}`",
                    text.chars().take(200).collect::<String>()
                ),
            };
            match serde_json::from_str(&text).map_err(protocol)? {
                Line::Event {
                    id: of,
                    phase: name,
                } if of == id => phase(&name),
                Line::Result { id: of, value } if of == id => {
                    return serde_json::from_value(value).map_err(protocol);
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

    /// Returns what the worker has written to its log so far, from `start` on.
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

    fn log_tail(&self) -> String {
        let log = self.log_since(self.log_len().saturating_sub(4000));
        String::from_utf8_lossy(&log).trim().to_owned()
    }

    fn died(&mut self) -> BuildError {
        self.kill();
        let status = self
            .child
            .wait()
            .map(|status| status.to_string())
            .unwrap_or_default();
        BuildError::WorkerDied {
            status,
            log: self.log_tail(),
        }
    }

    /// Ends the worker's whole process group.
    fn kill(&mut self) {
        let group = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_worker_is_embedded() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/build/worker");
        let mut there: Vec<String> = walkdir::WalkDir::new(folder)
            .into_iter()
            .filter_map(|entry| entry.unwrap().file_name().to_str().map(str::to_owned))
            .filter(|name| name.ends_with(".py"))
            .collect();
        there.sort();
        let embedded: Vec<&str> = FILES.iter().map(|(name, _)| *name).collect();
        assert_eq!(there, embedded);
    }
}
