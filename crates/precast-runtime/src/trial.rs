//! The first load of a shared object on a host, tried in a separate process.
//!
//! Loading a shared object runs its initialisers. An initialiser that crashes or hangs ends or blocks the process: at
//! every start, and with the system's loader locked for all threads. So with a [`Trial`] an artifact or a shim that was
//! never loaded on this kind of host is loaded by a helper process first. An artifact that crashes the helper is set
//! aside like any artifact that does not load, and the ladder answers.
//!
//! The helper writes two lines to a pipe: `loading WORD` before it loads the object and `loaded WORD` after. The word
//! is random; the object can't find it without a search of the helper's memory. The result depends on the helper's end:
//!
//! | the helper | result |
//! |---|---|
//! | wrote `loaded` | it loads; remembered |
//! | ended by a fault signal after `loading`, or not in time | it does not load; remembered for a day |
//! | ended in any other way | none: the host may be short of memory or threads. The program rests and is tried again |
//! | can't be started, for a permanent reason | the object is loaded without a trial |
//!
//! Results are kept in a file with a line for each, by the digest of the host's target and of the object:
//!
//! ```text
//! 3f9c… 81aa… loads 1767225600
//! 3f9c… 07d2… it ended with signal 11 1767225611
//! ```
//!
//! The file is used only if no other user can have written it. Above [`LONGEST`] it is started again. The gate of a
//! build loads artifacts in a separate process, and writes the same lines.
//!
//! The helper's process group is killed after the result. Not promised: the end of processes in a separate session;
//! that a container can be created from an artifact, or that it runs. The gate checks these.

use std::{
    collections::{HashMap, hash_map::RandomState},
    ffi::OsString,
    fs::{File, Metadata, OpenOptions},
    hash::{BuildHasher, Hasher},
    io::{self, Read, Seek, Write},
    os::unix::{
        fs::{MetadataExt, OpenOptionsExt},
        process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use memchr::memmem;
use precast_store::{Device, Digest, Target, canon};
use rustix::{
    fs::{MemfdFlags, OFlags, fcntl_setfl, memfd_create},
    process::{Pid, Signal, WaitId, WaitIdOptions, geteuid, kill_process_group, waitid},
};
use serde::{Deserialize, Serialize};

use super::{
    RuntimeError, ending,
    ffi::{Libraries, Library, cuda, libtorch},
    host::now,
    source::{Source, SourceError, sealed},
};

/// The argument that starts `precast` as the helper.
pub const ARGUMENT: &str = "__trial";

/// Returns the file of a store that remembers loads.
pub fn memory(store: &Path) -> PathBuf {
    store.join("cache").join("loads")
}

/// Time for which a failure counts, in seconds.
const DAY: i64 = 86_400;

/// Maximum bytes of the file of results: some 6,000 lines.
const LONGEST: u64 = 1 << 20;

/// The trial of an artifact's first load: see [`Runtime::trial`](super::Runtime::trial).
#[derive(Clone, Debug)]
pub struct Trial {
    /// The helper; without one, loads are only remembered.
    program: Option<PathBuf>,
    memory: Option<PathBuf>,
    limit: Duration,
    stop: Arc<AtomicBool>,
}

impl Trial {
    /// Tries first loads in the program `helper`, which is `precast` of this version.
    pub fn with(helper: impl Into<PathBuf>) -> Self {
        Self {
            program: Some(helper.into()),
            memory: None,
            limit: Duration::from_secs(60),
            stop: Arc::default(),
        }
    }

    /// Tries nothing, and remembers the loads of this process, as the gate does.
    pub fn here() -> Self {
        Self {
            program: None,
            ..Self::with("")
        }
    }

    /// Sets the file that remembers verdicts beyond this process. None, unless set. Stores and hosts may share it. A
    /// file that another user owns or can write, or that is no plain file, is not used; then verdicts are forgotten.
    pub fn remember(mut self, file: impl Into<PathBuf>) -> Self {
        self.memory = Some(file.into());
        self
    }

    /// Sets the maximum time of a load. The default is a minute.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Ends a wait for the helper as soon as `stop` is set; the load fails with [`RuntimeError::Interrupted`]. The wait
    /// also ends with [`super::shut_down`].
    pub fn stop(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = stop;
        self
    }
}

/// The verdicts about first loads on one kind of host.
pub(super) struct Trials {
    trial: Trial,
    host: Digest,
    /// With the time of each verdict, in seconds since 1970.
    known: OnceLock<Mutex<HashMap<Digest, (Found, i64)>>>,
}

/// The reason that an object does not load; none if it loads.
type Found = Option<String>;

/// The helper's standard input, before the bytes of the objects.
#[derive(Serialize, Deserialize)]
struct TrialInput {
    cuda: bool,
    word: String,
    /// Digest and size of each. The last is tried; it needs the others.
    objects: Vec<(Digest, u64)>,
}

impl Trials {
    pub fn new(trial: Trial, host: &Target) -> Self {
        Self {
            trial,
            host: canon::digest(&canon::target(host)),
            known: OnceLock::new(),
        }
    }

    /// Fails if the last of `objects` is known not to load, or is tried and does not. The others are loaded before it.
    pub fn first(
        &self,
        source: &dyn Source,
        objects: &[Digest],
        device: Device,
    ) -> Result<(), RuntimeError> {
        let (Some(program), Some(&object)) = (&self.trial.program, objects.last()) else {
            return Ok(());
        };
        if Library::known(&object) {
            return Ok(());
        }
        let known = self.lock().get(&object).cloned();
        let found = match known {
            Some((found, time)) if counts(&found, time) => found,
            // No lock is held: other objects are loaded meanwhile.
            _ => {
                let Some(found) = self.try_in(program, source, objects, device)? else {
                    return Ok(());
                };
                self.note(object, found.clone());
                found
            }
        };
        found.map_or(Ok(()), |reason| {
            Err(RuntimeError::Crashes { object, reason })
        })
    }

    /// Remembers that this process has loaded an object.
    pub fn loaded(&self, object: Digest) {
        let known = || matches!(self.lock().get(&object), Some((None, _)));
        if self.trial.program.is_none() && !known() {
            self.note(object, None);
        }
    }

    /// Loads an object in the helper. Returns none if the helper can't be started.
    fn try_in(
        &self,
        program: &Path,
        source: &dyn Source,
        objects: &[Digest],
        device: Device,
    ) -> Result<Option<Found>, RuntimeError> {
        let object = objects[objects.len() - 1];
        let _span = tracing::info_span!("trial", object = %object.short()).entered();
        let word = format!("{:016x}", RandomState::new().build_hasher().finish());
        let unreadable = |source| RuntimeError::Unreadable { object, source };
        let input = request(source, objects, device, &word).map_err(unreadable)?;
        let seconds = self.trial.limit.as_secs().saturating_mul(2) + 5;
        let mut command = Command::new(program);
        if let Ok(open) = libtorch() {
            command.env("LIBTORCH", &open.folder);
        }
        let child = command
            .args([OsString::from(ARGUMENT), seconds.to_string().into()])
            .args([
                std::process::id().to_string().as_str(),
                "--untried-libtorch",
            ])
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let untried = |reason| RuntimeError::Untried { object, reason };
        let mut child = match child {
            Ok(child) => child,
            Err(error) if super::error::passes(&error) => {
                return Err(untried(format!("can't be started: {error}")));
            }
            Err(error) => {
                let program = program.display();
                tracing::warn!(%program, %error, "an object is loaded without a trial");
                return Ok(None);
            }
        };
        let (mut messages, end) = self.watch(&mut child, &word);
        // Before the child is reaped: until then no other group can have this number.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        let status = child.wait();
        let limit = self.trial.limit;
        match (end, status) {
            (End::Loaded, _) => Ok(Some(None)),
            (End::Stopped, _) => Err(RuntimeError::Interrupted { object }),
            (End::Late, _) if messages.loading => {
                Ok(Some(Some(format!("it did not end within {limit:?}"))))
            }
            (End::Late, _) => Err(untried(format!("loaded nothing within {limit:?}"))),
            (End::Ended, Ok(status)) if messages.loading && faulted(status) => {
                Ok(Some(Some(format!("it {}", describe(status)))))
            }
            (End::Ended, status) => {
                let status = status.map_or_else(|_| "ended".to_owned(), describe);
                Err(untried(format!("{status}{}", messages.error())))
            }
        }
    }

    /// Waits for the helper's verdict or its end.
    fn watch(&self, child: &mut Child, word: &str) -> (Messages, End) {
        let pid = Pid::from_child(child);
        let mut messages = Messages::new(child.stdout.take(), word);
        let mut begun = Instant::now();
        loop {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            // Before the pipe is read, which then has all messages.
            let ended = !matches!(waitid(WaitId::Pid(pid), options), Ok(None));
            let loading = messages.loading;
            messages.read();
            if messages.loading && !loading {
                begun = Instant::now();
            }
            if messages.loaded {
                return (messages, End::Loaded);
            }
            if ended {
                return (messages, End::Ended);
            }
            if self.trial.stop.load(Relaxed) || ending::ended() {
                return (messages, End::Stopped);
            }
            if begun.elapsed() > self.trial.limit {
                return (messages, End::Late);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn note(&self, object: Digest, found: Found) {
        let word = found.as_deref().unwrap_or("loads");
        let line = format!("{} {} {word} {}\n", self.host.hex(), object.hex(), now());
        self.lock().insert(object, (found, now()));
        let mut options = OpenOptions::new();
        if let Some(mut file) = self.open(options.append(true).create(true).mode(0o644)) {
            if file.metadata().is_ok_and(|meta| meta.len() > LONGEST) {
                let _ = file.set_len(0);
            }
            // In one write, so that lines of several processes do not mix.
            if let Err(error) = file.write_all(line.as_bytes()) {
                tracing::debug!(%error, "a trial is not remembered");
            }
        }
    }

    /// Opens the memory, if it is a plain file that no other user can have written.
    fn open(&self, options: &mut OpenOptions) -> Option<File> {
        let path = self.trial.memory.as_deref()?;
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let opened = options.custom_flags(flags).open(path).and_then(|file| {
            check_permissions(&file.metadata()?).map_err(io::Error::other)?;
            Ok(file)
        });
        match opened {
            Ok(file) => return Some(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let path = path.display();
                tracing::warn!(%path, %error, "the memory of first loads is not used");
            }
        }
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Digest, (Found, i64)>> {
        let known = self.known.get_or_init(|| Mutex::new(self.read()));
        known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the verdicts of earlier processes. A line of another form is ignored.
    fn read(&self) -> HashMap<Digest, (Found, i64)> {
        let mut bytes = Vec::new();
        let file = self.open(OpenOptions::new().read(true));
        // It exceeds its limit by at most one line of each process.
        let _ = file.map(|file| file.take(2 * LONGEST).read_to_end(&mut bytes));
        let host = self.host.hex();
        let line = |line: &str| {
            let rest = line.strip_prefix(&host)?.strip_prefix(' ')?;
            let (object, rest) = rest.split_once(' ')?;
            let (found, time) = rest.rsplit_once(' ')?;
            let found = Some(found.to_owned()).filter(|found| found != "loads");
            Some((object.parse().ok()?, (found, time.parse().ok()?)))
        };
        let text = String::from_utf8_lossy(&bytes);
        text.lines().filter_map(line).collect()
    }
}

/// Returns whether a verdict still holds.
fn counts(found: &Found, time: i64) -> bool {
    found.is_none() || (0..DAY).contains(&now().saturating_sub(time))
}

/// Fails if others than root and this user can have written a file, or if it is no plain file.
fn check_permissions(meta: &Metadata) -> Result<(), &'static str> {
    let group = meta.mode() & 0o020 != 0 && meta.gid() != meta.uid();
    if !meta.is_file() {
        return Err("it is not a plain file");
    }
    if ![0, geteuid().as_raw()].contains(&meta.uid()) {
        return Err("it belongs to another user");
    }
    if meta.mode() & 0o002 != 0 || group {
        return Err("other users can write it");
    }
    Ok(())
}

/// The end of a wait for the helper.
enum End {
    Loaded,
    Ended,
    Late,
    Stopped,
}

/// The helper's end of the conversation.
struct Messages {
    pipe: Option<ChildStdout>,
    words: [String; 2],
    /// The last bytes.
    text: Vec<u8>,
    loading: bool,
    loaded: bool,
}

impl Messages {
    fn new(pipe: Option<ChildStdout>, word: &str) -> Self {
        let pipe = pipe.filter(|pipe| fcntl_setfl(pipe, OFlags::NONBLOCK).is_ok());
        Self {
            pipe,
            words: ["loading", "loaded"].map(|what| line(what, word)),
            text: Vec::new(),
            loading: false,
            loaded: false,
        }
    }

    /// Reads the bytes in the pipe, without waiting for more.
    fn read(&mut self) {
        let mut bytes = [0; 4096];
        while let Some(Ok(count @ 1..)) = self.pipe.as_mut().map(|pipe| pipe.read(&mut bytes)) {
            let rest = self.text.len().saturating_sub(bytes.len());
            self.text.drain(..rest);
            self.text.extend(&bytes[..count]);
            let has = |word: &String| memmem::find(&self.text, word.as_bytes()).is_some();
            self.loading |= has(&self.words[0]);
            self.loaded |= has(&self.words[1]);
        }
    }

    /// Returns the helper's own error, which it can only report before it loads something.
    fn error(&mut self) -> String {
        match String::from_utf8_lossy(&self.text).trim() {
            text if self.loading || text.is_empty() => String::new(),
            text => format!(": {text}"),
        }
    }
}

fn line(what: &str, word: &str) -> String {
    format!("{what} {word}\n")
}

/// Returns the helper's input: a line of JSON, and the objects.
fn request(
    source: &dyn Source,
    objects: &[Digest],
    device: Device,
    word: &str,
) -> Result<File, SourceError> {
    let mut bytes = Vec::new();
    let objects = objects.iter().map(|object| {
        let mut file = source.memfd(object)?;
        file.rewind()?;
        Ok((*object, file.read_to_end(&mut bytes)? as u64))
    });
    let request = TrialInput {
        objects: objects.collect::<Result<_, SourceError>>()?,
        cuda: matches!(device, Device::Cuda(_)),
        word: word.to_owned(),
    };
    let mut file = File::from(memfd_create("trial", MemfdFlags::CLOEXEC)?);
    serde_json::to_writer(&mut file, &request)?;
    file.write_all(b"\n")?;
    file.write_all(&bytes)?;
    file.rewind()?;
    Ok(file)
}

/// Returns whether a process ended by a fault signal.
fn faulted(status: ExitStatus) -> bool {
    let faults = [
        libc::SIGABRT,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGSEGV,
        libc::SIGTRAP,
    ];
    status
        .signal()
        .is_some_and(|signal| faults.contains(&signal))
}

fn describe(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("ended with signal {signal}"),
        (None, code) => format!("ended with exit code {}", code.unwrap_or_default()),
    }
}

/// Runs the helper: loads the objects of `input`, and reports to `output`. The loader's refusal of an object is no
/// failure: the process that loads it next sees it too.
pub fn answer(mut input: File, mut output: File) -> io::Result<()> {
    let mut all = Vec::new();
    input.read_to_end(&mut all)?;
    // The object must not find the word there.
    input.set_len(0)?;
    drop(input);
    let end = all
        .iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or(all.len());
    let request: TrialInput = serde_json::from_slice(&all[..end])?;
    if request.cuda {
        cuda().map_err(io::Error::other)?;
    }
    let mut report = |what| output.write_all(line(what, &request.word).as_bytes());
    report("loading")?;
    let mut rest = all.get(end + 1..).unwrap_or_default();
    let count = request.objects.len();
    for (i, (object, size)) in request.objects.into_iter().enumerate() {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let Some((bytes, after)) = rest.split_at_checked(size) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        rest = after;
        let file = sealed("trial", bytes)?;
        let loaded = if i + 1 == count {
            Library::load(&object, "", || Ok(file)).map(drop)
        } else {
            Libraries::begin().load(&object, file)
        };
        match loaded {
            Err(error) if error.is_transient() => return Err(io::Error::other(error)),
            Err(_) => break,
            Ok(()) => {}
        }
    }
    report("loaded")
}

#[cfg(test)]
mod tests;
