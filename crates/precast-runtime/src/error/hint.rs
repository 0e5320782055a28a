//! The meaning of an error for the caller: its cause, whether it passes, and a remedy.

use std::{io, sync::Arc};

use precast_store::{
    Device, StoreError,
    record::{Sizes, bucket_name},
    target::{Mismatch, Torch},
};

use super::{NoFit, RuntimeError, TorchError, torch::PASSING};
use crate::source::NoRelease;

impl RuntimeError {
    /// Returns the error of a call that begins while the process is ending.
    pub(crate) fn ending(device: Device) -> Self {
        let reason = "the process is ending".to_owned();
        Self::Unready { device, reason }
    }

    /// Returns whether there was too little memory, on the device or on the host: the same may do when some is free.
    pub fn is_out_of_memory(&self) -> bool {
        let reason = match self {
            Self::NoContainer { reason, .. }
            | Self::Upload { reason, .. }
            | Self::Unbound { reason, .. }
            | Self::Unprepared { reason, .. }
            | Self::Array { reason }
            | Self::NotLoadable { reason, .. } => reason,
            Self::Failed { message, .. } | Self::Tensor { message, .. } => message,
            Self::MemoryFile { source, .. } => {
                return source.kind() == io::ErrorKind::OutOfMemory;
            }
            Self::NothingLeft { cause, .. } => return cause.error.is_out_of_memory(),
            _ => return false,
        };
        matches!(reason, TorchError::Memory(_))
    }

    /// Returns whether the host was at fault, and may not be for long: no file handle, no thread, no memory, a read
    /// that failed. The same may do later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreadable { source, .. } | Self::Store { source, .. } => {
                let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&**source);
                while let Some(error) = cause {
                    if error.downcast_ref().is_some_and(passes) {
                        return true;
                    }
                    cause = error.source();
                }
                false
            }
            Self::MemoryFile { source, .. } => passes(source),
            Self::NoThreads { .. } | Self::Untried { .. } => true,
            Self::NothingLeft { cause, .. } => cause.error.is_transient(),
            Self::NotLoadable {
                reason: TorchError::Busy(_),
                ..
            } => true,
            _ => self.is_out_of_memory(),
        }
    }

    /// Returns whether an artifact is the cause, so that another bucket may answer instead. An error of the host, the
    /// weights or a record concerns all buckets, and so does a lack of memory.
    pub fn is_artifacts(&self) -> bool {
        let its_own = matches!(
            self,
            Self::Unreadable { .. }
                | Self::WrongArtifact { .. }
                | Self::WrongRecord {
                    what: "artifact",
                    ..
                }
                | Self::WrongBytes { .. }
                | Self::NotLoadable { .. }
                | Self::Crashes { .. }
                | Self::MissingSymbol { .. }
                | Self::LackingLibtorch { .. }
                | Self::NoContainer { .. }
                | Self::WrongCount { .. }
                | Self::Operators { .. }
                | Self::Unprepared { .. }
        );
        its_own && !self.is_out_of_memory()
    }

    /// Returns a remedy for the caller.
    pub fn hint(&self) -> String {
        let text = match self {
            Self::Failed { .. } | Self::NoContainer { .. } | Self::NotLoadable { .. }
                if self.is_out_of_memory() =>
            {
                NO_MEMORY
            }
            Self::Unprepared { .. }
            | Self::Failed {
                message: TorchError::NoCode(_),
                ..
            } => NO_CODE,
            Self::Failed { step, .. } if step == "eager" => EAGER_FAILS,
            Self::Store { source, .. } => source.downcast_ref().map_or(
                "`precast verify` looks at every byte of the store",
                StoreError::hint,
            ),
            Self::NoRelease(missing) => return of_release(missing),
            Self::NoDevice { device, .. } if *device == Device::Cpu => "name another device",
            Self::NoDevice { .. } => "a model that was built for `cpu` runs on device `cpu`",
            Self::Libtorch { .. } => LIBTORCH,
            Self::NoShim { outdated: true, .. } => NEW_SHIM,
            Self::NoShim { known, .. } if known.is_empty() => NEW_SHIM,
            Self::NoShim { .. } => OTHER_SHIM,
            Self::UnknownHost { .. } => "run it with the libtorch that it was built with",
            Self::Devices => "name each device once",
            Self::WrongRecord { .. } => RECORDS,
            Self::WrongTarget { mismatches, .. } | Self::WrongArtifact { mismatches, .. } => {
                return of_target(mismatches);
            }
            Self::LackingLibtorch { built_with, .. } => {
                return format!(
                    "run it with torch {built_with} or a newer one, or build the model with this one"
                );
            }
            Self::MemoryFile { .. } => MEMORY_FILE,
            Self::NothingLeft { cause, .. } => return cause.error.hint(),
            Self::NotLoadable { reason, .. } if needs_python(reason) => NO_PYTHON,
            Self::Operators {
                reason: TorchError::Registered(_),
                ..
            } => REGISTERED,
            Self::Unreadable { .. } | Self::WrongBytes { .. } => OBJECTS,
            Self::NotLoadable { .. }
            | Self::Crashes { .. }
            | Self::Operators { .. }
            | Self::MissingSymbol { .. }
            | Self::NoContainer { .. }
            | Self::WrongCount { .. }
            | Self::Malformed { .. }
            | Self::Failed { .. }
            | Self::BadOutput { .. } => REBUILD,
            Self::Untried { .. } => UNTRIED,
            Self::Interrupted { .. } => "start it again: nothing is remembered of this load",
            Self::CheckFailed { .. } => CHECK_FAILED,
            Self::EarlierCall { .. } => EARLIER_CALL,
            Self::BadWeights { .. } | Self::Unbound { .. } => WEIGHTS,
            Self::ComputedFromWeights { .. } => NOT_FROZEN,
            Self::NotAWeight { .. } => NOT_A_WEIGHT,
            Self::Upload { .. } => "free memory on it, or load the model on another device",
            Self::Unready { .. } => "start the process again: an error of this kind stays with it",
            Self::NoThreads { .. } => NO_THREADS,
            Self::Busy { .. } => BUSY,
            Self::NeedsSession { .. } => NEEDS_SESSION,
            Self::SessionsBusy { .. } => SESSIONS_BUSY,
            Self::SessionLimit { .. } => SESSION_LIMIT,
            Self::SessionFailed { .. } => SESSION_FAILED,
            Self::State { .. } => "`precast show` lists the states of a program, with their shapes",
            Self::SessionFile { .. } => SESSION_FILE,
            Self::NoStep { known, .. } => return of_steps(known),
            Self::Checkpoint { .. } => CHECKPOINT,
            Self::SeveralDevices { .. } => SEVERAL_DEVICES,
            Self::WrongSum { .. } => WRONG_SUM,
            Self::Nccl { .. } => NCCL,
            Self::CheckpointFile { .. } => CHECKPOINT_FILE,
            Self::NoModule { module, known, .. } => return of_module(module, known),
            Self::BadInput { problem, .. } => return problem.hint(),
            Self::InputCount { names, .. } => {
                return format!("pass {} in this order", names.join(", "));
            }
            Self::InputNames { variants, .. } => return of_names(variants),
            Self::NoBucket { nearest, why, .. } => return of_bucket(nearest.as_ref(), why),
            Self::Shape { .. } => "a shape's sizes multiplied are the number of elements",
            Self::NoOutput { known, .. } => return format!("it has {}", known.join(", ")),
            Self::OutputDtype { got, .. } => return format!("ask for elements of {got}"),
            Self::Tensor { .. } | Self::Array { .. } => REFUSED,
        };
        text.to_owned()
    }
}

const NO_MEMORY: &str =
    "there was too little memory: free some, or have fewer calls at once, and try again";
const NO_CODE: &str = "oneDNN makes machine code at run time: run without systemd's `MemoryDenyWriteExecute` \
     (`PR_SET_MDWE`), which forbids that";
const EAGER_FAILS: &str = "the model fails at these sizes or values in eager mode too, as with more tokens than it has \
     positions: send what it takes";
const LIBTORCH: &str = "name the folder of the package `torch` that the model was built with: `--libtorch DIR` or \
     `LIBTORCH` for the command, the option `libtorch` in the library";
const NEW_SHIM: &str = "`precast build` makes a shim, and compiles nothing else";
const OTHER_SHIM: &str = "`precast verify --host MODEL` makes a shim for it and runs the gates here; or name the folder of \
     one of those torches: `--libtorch DIR` or `LIBTORCH`";
const MEMORY_FILE: &str =
    "it is held in memory: free some, or raise the number of open files with `ulimit -n`";
const NO_PYTHON: &str = "link the operators' library without libtorch_python (`is_python_module=False` in \
     torch.utils.cpp_extension.load), and build again";
const REGISTERED: &str =
    "a process can hold one version of an operator's library: load this model in another one";
const RECORDS: &str = "`precast verify` says whether the store's records are whole";
const OBJECTS: &str = "`precast verify` finds every damaged object";
const REBUILD: &str =
    "build the program again; `precast verify` says whether its objects are whole";
const UNTRIED: &str = "it is tried again; `ulimit -a`, and `pids.max` and `memory.max` of the container, say what may be \
     short";
const EARLIER_CALL: &str =
    "discard its outputs, and repeat this call; `check` waits for the device and tells at once";
const CHECK_FAILED: &str =
    "the model refuses these inputs in eager mode too: look at their values and sizes";
const WEIGHTS: &str = "a weight set has every constant of the artifacts, with their dtypes and shapes (and, of the caller's \
     own tensors, their strides): build the model again";
const NOT_FROZEN: &str = "build the model with `options = { freezing = false }` in `[compile]`: its artifacts read weights \
     as they are";
const NOT_A_WEIGHT: &str =
    "leave it out if the model does not use it, or pass a dense tensor on the device of the model";
const NO_THREADS: &str = "raise the number of threads (`ulimit -u`, or `pids.max` of the container), or lower \
     `OMP_NUM_THREADS`";
const BUSY: &str = "try again later, wait longer, or load the model with more `instances`";
const NEEDS_SESSION: &str = "open a session of the model, and run the module in it; `precast show` lists a program's states";
const SESSIONS_BUSY: &str = "drop a session, wait longer, or load the model with more `sessions`, and a higher `session_limit` if it has one";
const SESSION_LIMIT: &str =
    "raise `session_limit`, or build the model with fewer or smaller buckets of its states";
const SESSION_FILE: &str = "a session reads the whole file of a session with the same model and weights: load those, or begin a \
     new session";
const CHECKPOINT: &str =
    "name a checkpoint of this module, or remove the file to start from an earlier one";
const SEVERAL_DEVICES: &str = "the spec needs `accumulate = true` in [module.train], and a batch the same number of rows \
     for each device; or load the model on one device";
const WRONG_SUM: &str = "train on one device: one of these computes or sends wrong values, or the module's gradients \
     depend on what is no state of it";
const NCCL: &str = "`NCCL_DEBUG=WARN` lets it say more; `--no-nccl` of `precast train` adds gradients in the host's memory";
const CHECKPOINT_FILE: &str =
    "its folder must be there, with space left, and this user must be allowed to write there";
const SESSION_FAILED: &str = "`reset` starts it anew; a session that was saved can be loaded";
const REFUSED: &str = "libtorch refused it: there may be too little memory";

/// Returns the remedy for a release that is not there.
fn of_release(missing: &NoRelease) -> String {
    match (&missing.release, missing.partial, &*missing.known) {
        (None, Some(last), _) => format!("`{}@{last}` is the last one", missing.model),
        (_, _, []) => "`precast build` makes one".to_owned(),
        (None, _, known) => format!("the store has {}", known.join(", ")),
        (Some(_), ..) => {
            "`precast release ls` lists the releases; gc may have deleted this one".to_owned()
        }
    }
}

/// Returns the remedy for a host that differs from that of the build.
fn of_target(mismatches: &[Mismatch]) -> String {
    if !mismatches.iter().all(Mismatch::is_of_torch) {
        return "build the model on this kind of host, or name its target in `[target]`".to_owned();
    }
    let mut fields = mismatches.iter();
    let torch = fields.find(|mismatch| mismatch.field == "torch");
    let (built, here) = torch.map_or(("", ""), |torch| (&*torch.artifact, &*torch.host));
    let gate = if Torch::is_older(built, here) {
        "`precast verify --host` runs its gates under this torch; or "
    } else {
        "it runs under this torch or a newer one: "
    };
    format!(
        "{gate}name the folder of the package `torch` that it was built with, `--libtorch DIR` or `LIBTORCH`, or build it again"
    )
}

/// Returns whether a library does not load for want of libtorch_python.
fn needs_python(reason: &TorchError) -> bool {
    matches!(reason, TorchError::Loader(text) if text.starts_with("libtorch_python"))
}

fn of_steps(known: &[String]) -> String {
    match known {
        [] => "the model has none: a module of the spec with `kind = \"step\"` is one".to_owned(),
        known => format!("the model has {}", known.join(", ")),
    }
}

/// Returns the remedy for a module that is not there: the known one with the nearest name, or all of them.
fn of_module(given: &str, known: &[String]) -> String {
    let distance = |name: &&String| strsim::damerau_levenshtein(name, given);
    let nearest = known.iter().min_by_key(distance);
    match nearest.filter(|name| distance(name) <= 3) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None if known.is_empty() => "`precast ls` lists the modules".to_owned(),
        None => format!("it has {}", known.join(", ")),
    }
}

/// Returns the remedy for inputs with other names than any variant has.
fn of_names(variants: &[Arc<[String]>]) -> String {
    let variants: Vec<String> = variants.iter().map(|names| names.join(", ")).collect();
    format!("it takes {}", variants.join("; or "))
}

/// Returns the remedy for a request without a bucket.
fn of_bucket(nearest: Option<&Sizes>, why: &NoFit) -> String {
    match (nearest.map(bucket_name), why) {
        (Some(nearest), NoFit::PaddingRefused) => {
            format!("{nearest} covers it, and its record says why it can't be padded into")
        }
        (Some(nearest), NoFit::TooLarge) => format!("the nearest is {nearest}"),
        (None, _) => {
            "`precast ls` lists the buckets; the spec's `[module.buckets]` can have more".to_owned()
        }
    }
}

/// Keeps a lack of memory apart: the capture of a graph tries again then.
impl From<RuntimeError> for TorchError {
    fn from(error: RuntimeError) -> Self {
        let short = error.is_out_of_memory();
        let kind = if short { Self::Memory } else { Self::Refused };
        kind(error.to_string().into())
    }
}

/// Returns whether an error of the system may be temporary.
pub(crate) fn passes(error: &io::Error) -> bool {
    error
        .raw_os_error()
        .is_some_and(|number| PASSING.contains(&number))
}
