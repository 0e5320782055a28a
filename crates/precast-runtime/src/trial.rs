//! The first load of an artifact on a host, tried in a process of its own.
//!
//! Loading a shared object runs its initialisers, and what crashes or hangs there takes the process with it: at every start,
//! and with the system's loader locked for everybody. So with a [`Trial`] an artifact that was never loaded on this kind of
//! host is loaded by a helper process first. What that does not survive is set aside like any artifact that does not load,
//! and the ladder answers.
//!
//! It costs a process once: what was found is a line of a file, by the digest of the object and of the host's target, as
//!
//! ```text
//! 3f9c… 81aa… loads 1767225600
//! 3f9c… 07d2… it ended with signal 11 1767225611
//! ```
//!
//! The gate of a build loads artifacts in a process of its own anyway, and writes the same lines. A failure is tried again
//! after a day: the host may have been at fault. Where the helper can't be started, the artifact is loaded without.
//!
//! It does not promise that a container can be made of it, or that it runs: the gate looks at that.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::{fs::OpenOptionsExt, process::CommandExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use precast_store::{Digest, Target, canon, record::Artifact, target::DeviceKind};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::{
    RuntimeError,
    ffi::{Library, Loading, cuda, libtorch},
    host::now,
    source::{Source, SourceError, sealed},
};

/// The argument that makes `precast` the helper.
pub const ARGUMENT: &str = "__trial";

/// What the helper exits with when it has tried: an initialiser that ends its process has other codes.
pub const TRIED: u8 = 77;

/// Returns the file of a store that remembers loads.
pub fn memory(store: &Path) -> PathBuf {
    store.join("cache").join("loads")
}

/// How long a failure counts, in seconds.
const DAY: i64 = 86_400;

/// How the first load of an artifact is tried: see [`Runtime::trial`](super::Runtime::trial).
#[derive(Clone, Debug)]
pub struct Trial {
    /// None where loads are remembered only.
    program: Option<PathBuf>,
    memory: Option<PathBuf>,
    limit: Duration,
}

impl Trial {
    /// Tries first loads in the program `helper`, which is `precast` of this version.
    pub fn with(helper: impl Into<PathBuf>) -> Self {
        Self {
            program: Some(helper.into()),
            memory: None,
            limit: Duration::from_secs(60),
        }
    }

    /// Tries nothing, and remembers what this process loaded: it is one that may crash.
    pub fn here() -> Self {
        Self {
            program: None,
            ..Self::with("")
        }
    }

    /// Sets the file that remembers what was found, beyond this process. None, unless set. It may be shared by stores and by
    /// hosts; where it can't be written, what was found is forgotten.
    pub fn remember(mut self, file: impl Into<PathBuf>) -> Self {
        self.memory = Some(file.into());
        self
    }

    /// Sets how long a load may take. A minute, unless set.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

/// What is known about first loads on one kind of host.
pub(super) struct Trials {
    trial: Trial,
    host: Digest,
    known: OnceLock<Mutex<HashMap<Digest, Found>>>,
}

/// None where it loads; else why not.
type Found = Option<String>;

/// What the helper reads on its standard input, before the bytes of the objects.
#[derive(Serialize, Deserialize)]
struct Request {
    cuda: bool,
    /// Digest and size of each; the last is the artifact, what is before it are operators' libraries.
    objects: Vec<(Digest, u64)>,
}

impl Trials {
    pub fn new(trial: Trial, host: &Target) -> Self {
        Self {
            trial,
            host: canon::digest(host),
            known: OnceLock::new(),
        }
    }

    /// Fails where an artifact is known not to load, or is tried and does not.
    pub fn first(&self, source: &dyn Source, artifact: &Artifact) -> Result<(), RuntimeError> {
        let object = artifact.object;
        let Some(program) = &self.trial.program else {
            return Ok(());
        };
        if Library::known(&object) {
            return Ok(());
        }
        let found = self.lock().get(&object).cloned();
        let found = match found {
            Some(found) => found,
            // No lock is held: other artifacts are loaded meanwhile.
            None => match self.try_in(program, source, artifact)? {
                Some(found) => {
                    self.note(object, found.clone());
                    found
                }
                None => None,
            },
        };
        found.map_or(Ok(()), |reason| {
            Err(RuntimeError::Crashes { object, reason })
        })
    }

    /// Remembers that this process has loaded an artifact.
    pub fn loaded(&self, object: Digest) {
        if self.trial.program.is_none() && self.lock().get(&object) != Some(&None) {
            self.note(object, None);
        }
    }

    /// Loads an artifact in the helper; none where that can't be done.
    fn try_in(
        &self,
        program: &Path,
        source: &dyn Source,
        artifact: &Artifact,
    ) -> Result<Option<Found>, RuntimeError> {
        let object = artifact.object;
        let _span = tracing::info_span!("trial", object = %object.short()).entered();
        let unreadable = |source| RuntimeError::Unreadable { object, source };
        let input = request(source, artifact).map_err(unreadable)?;
        let seconds = self.trial.limit.as_secs() + 5;
        let mut command = Command::new(program);
        if let Ok(open) = libtorch() {
            command.env("LIBTORCH", &open.folder);
        }
        let child = command
            .args([OsString::from(ARGUMENT), seconds.to_string().into()])
            .stdin(input)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let status = child.and_then(|child| wait(child, self.trial.limit));
        let found = match status {
            Ok(Some(status)) if status.code() == Some(i32::from(TRIED)) => None,
            Ok(Some(status)) => Some(told(status)),
            Ok(None) => Some(format!("it did not end within {:?}", self.trial.limit)),
            Err(error) => {
                let program = program.display();
                tracing::warn!(%program, %error, "an artifact is loaded without a trial");
                return Ok(None);
            }
        };
        Ok(Some(found))
    }

    fn note(&self, object: Digest, found: Found) {
        let word = found.as_deref().unwrap_or("loads");
        let line = format!("{} {} {word} {}\n", self.host.hex(), object.hex(), now());
        self.lock().insert(object, found);
        if let Some(path) = &self.trial.memory {
            let mut options = OpenOptions::new();
            let file = options.append(true).create(true).mode(0o644).open(path);
            // In one write, so that lines of several processes do not mix.
            if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
                tracing::debug!(path = %path.display(), %error, "a trial is not remembered");
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Digest, Found>> {
        let known = self.known.get_or_init(|| Mutex::new(self.read()));
        known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what earlier processes found. What is no line of this file is passed over.
    fn read(&self) -> HashMap<Digest, Found> {
        let path = self.trial.memory.as_deref();
        let text = path.and_then(|path| fs::read_to_string(path).ok());
        let host = self.host.hex();
        let line = |line: &str| {
            let rest = line.strip_prefix(&host)?.strip_prefix(' ')?;
            let (object, rest) = rest.split_once(' ')?;
            let (found, time) = rest.rsplit_once(' ')?;
            let found = Some(found).filter(|found| *found != "loads");
            let recent = now() - time.parse::<i64>().ok()? < DAY;
            (found.is_none() || recent).then_some((object.parse().ok()?, found.map(str::to_owned)))
        };
        text.iter()
            .flat_map(|text| text.lines())
            .filter_map(line)
            .collect()
    }
}

/// Returns what the helper reads: a line of JSON, and the objects.
fn request(source: &dyn Source, artifact: &Artifact) -> Result<File, SourceError> {
    let objects = artifact.libraries.iter().chain([&artifact.object]);
    let mut bytes = Vec::new();
    let objects = objects.map(|object| {
        let mut file = source.memfd(object)?;
        file.rewind()?;
        Ok((*object, file.read_to_end(&mut bytes)? as u64))
    });
    let objects = objects.collect::<Result<_, SourceError>>()?;
    let cuda = artifact.target.device == DeviceKind::Cuda;
    let mut file = File::from(memfd_create("trial", MemfdFlags::CLOEXEC)?);
    serde_json::to_writer(&mut file, &Request { cuda, objects })?;
    file.write_all(b"\n")?;
    file.write_all(&bytes)?;
    file.rewind()?;
    Ok(file)
}

/// Waits for a process; none when it did not end in time, and was ended.
fn wait(mut child: Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn told(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("it ended with signal {signal}"),
        (None, code) => format!("it ended with exit code {}", code.unwrap_or_default()),
    }
}

/// The helper: loads what it reads. Whether the loader takes it is not asked: the process that wants it sees that itself.
pub fn answer(mut input: impl Read) -> io::Result<()> {
    let mut all = Vec::new();
    input.read_to_end(&mut all)?;
    let end = all
        .iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or(all.len());
    let request: Request = serde_json::from_slice(&all[..end])?;
    if request.cuda && cuda().is_err() {
        return Ok(());
    }
    let mut rest = all.get(end + 1..).unwrap_or_default();
    let count = request.objects.len();
    for (i, (object, size)) in request.objects.into_iter().enumerate() {
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let Some((bytes, after)) = rest.split_at_checked(size) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        rest = after;
        let file = sealed("trial", bytes)?;
        let loaded = match i + 1 == count {
            true => Library::load(&object, "", || Ok(file)).map(drop),
            false => Loading::begin().load(&object, file),
        };
        if loaded.is_err() {
            break;
        }
    }
    Ok(())
}
