//! The meaning of an error for the caller: its cause, whether it passes, and a remedy.

use std::io;

use precast_store::{
    Device, StoreError,
    record::bucket_name,
    target::{Mismatch, Torch},
};

use super::{NoFit, RuntimeError, TorchError};

/// Returns the remedy for a torch that differs from that of the build.
fn of_torch(mismatches: &[Mismatch]) -> String {
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
        const REBUILD: &str =
            "build the program again; `precast verify` says whether its objects are whole";
        const NO_CODE: &str = "oneDNN makes machine code at run time: run without systemd's `MemoryDenyWriteExecute` \
             (`PR_SET_MDWE`), which forbids that";
        let text = match self {
            Self::Failed { .. } | Self::NoContainer { .. } | Self::NotLoadable { .. }
                if self.is_out_of_memory() =>
            {
                "there was too little memory: free some, or have fewer calls at once, and try again"
            }
            Self::Unprepared { .. } => NO_CODE,
            Self::Failed {
                message: TorchError::NoCode(_),
                ..
            } => NO_CODE,
            Self::Store { source, .. } => match source.downcast_ref::<StoreError>() {
                Some(error) => error.hint(),
                None => "`precast verify` looks at every byte of the store",
            },
            Self::NoRelease(missing) => {
                return match (&missing.release, missing.partial, &*missing.known) {
                    (None, Some(last), _) => {
                        format!("`{}@{last}` is the last one", missing.model)
                    }
                    (_, _, []) => "`precast build` makes one".to_owned(),
                    (None, _, known) => format!("the store has {}", known.join(", ")),
                    (Some(_), ..) => {
                        "`precast release ls` lists the releases; gc may have deleted this one"
                            .to_owned()
                    }
                };
            }
            Self::NoDevice {
                device: Device::Cuda(_),
                ..
            } => "`Device::Cpu` runs programs built for `cpu`",
            Self::NoDevice { .. } => "name another device",
            Self::Libtorch { .. } => {
                "name the folder of the package `torch` that the model was built with: `--libtorch DIR` or `LIBTORCH` for \
                 the command, `Runtime::libtorch` in the library"
            }
            Self::NoShim {
                known, outdated, ..
            } if *outdated || known.is_empty() => {
                "`precast build` makes a shim, and compiles nothing else"
            }
            Self::NoShim { .. } => {
                "`precast verify --host MODEL` makes a shim for it and runs the gates here; or name the folder of one of those \
                 torches: `--libtorch DIR` or `LIBTORCH`"
            }
            Self::UnknownHost { .. } => "run it with the libtorch that it was built with",
            Self::Devices => "name each device once",
            Self::WrongRecord { .. } => {
                "`precast verify` says whether the store's records are whole"
            }
            Self::WrongTarget { mismatches, .. } | Self::WrongArtifact { mismatches, .. }
                if mismatches.iter().all(Mismatch::is_of_torch) =>
            {
                return of_torch(mismatches);
            }
            Self::WrongTarget { .. } | Self::WrongArtifact { .. } => {
                "build the model on this kind of host, or name its target in `[target]`"
            }
            Self::LackingLibtorch { built_with, .. } => {
                return format!(
                    "run it with torch {built_with} or a newer one, or build the model with this one"
                );
            }
            Self::MemoryFile { .. } => {
                "it is held in memory: free some, or raise the number of open files with `ulimit -n`"
            }
            Self::NothingLeft { cause, .. } => return cause.error.hint(),
            Self::NotLoadable {
                reason: TorchError::Loader(text),
                ..
            } if text.starts_with("libtorch_python") => {
                "link the operators' library without libtorch_python (`is_python_module=False` in \
                 torch.utils.cpp_extension.load), and build again"
            }
            Self::Operators {
                reason: TorchError::Registered(_),
                ..
            } => {
                "a process can hold one version of an operator's library: load this model in another one"
            }
            Self::Unreadable { .. } | Self::WrongBytes { .. } => {
                "`precast verify` finds every damaged object"
            }
            Self::Failed { step, .. } if step == "eager" => {
                "the model fails at these sizes or values in eager mode too, as with more tokens than it has positions: send \
                 what it takes"
            }
            Self::NotLoadable { .. }
            | Self::Crashes { .. }
            | Self::Operators { .. }
            | Self::MissingSymbol { .. }
            | Self::NoContainer { .. }
            | Self::WrongCount { .. }
            | Self::Malformed { .. }
            | Self::Failed { .. }
            | Self::BadOutput { .. } => REBUILD,
            Self::Untried { .. } => {
                "it is tried again; `ulimit -a`, and `pids.max` and `memory.max` of the container, say what may be short"
            }
            Self::Interrupted { .. } => "start it again: nothing is remembered of this load",
            Self::CheckFailed { .. } => {
                "the model refuses these inputs in eager mode too: look at their values and sizes"
            }
            Self::BadWeights { .. } | Self::Unbound { .. } => {
                "a weight set has every constant of the artifacts, with their dtypes and shapes: build the model again"
            }
            Self::Upload { .. } => "free memory on it, or load the model on another device",
            Self::Unready { .. } => "start the process again: an error of this kind stays with it",
            Self::NoModule { module, known, .. } => match nearest(module, known) {
                Some(nearest) => return format!("did you mean `{nearest}`?"),
                None if known.is_empty() => "`precast ls` lists the modules",
                None => return format!("it has {}", known.join(", ")),
            },
            Self::NoThreads { .. } => {
                "raise the number of threads (`ulimit -u`, or `pids.max` of the container), or lower `OMP_NUM_THREADS`"
            }
            Self::Busy { .. } => {
                "try again later, wait longer, or load the model with more `Runtime::instances`"
            }
            Self::NeedsSession { .. } => {
                "open one with `Model::session`, and call `run` on it; `precast show` lists a program's states"
            }
            Self::SessionsBusy { .. } => {
                "drop a session, wait longer, or load the model with more `Runtime::sessions`"
            }
            Self::SessionFailed { .. } => {
                "`Session::reset` starts it anew; a session that was saved can be loaded"
            }
            Self::State { .. } => "`precast show` lists the states of a program, with their shapes",
            Self::BadInput { problem, .. } => return problem.hint(),
            Self::InputCount { names, .. } => {
                return format!("pass {} in this order", names.join(", "));
            }
            Self::InputNames { variants, .. } => {
                let variants: Vec<String> = variants.iter().map(|names| names.join(", ")).collect();
                return format!("it takes {}", variants.join("; or "));
            }
            Self::NoBucket {
                nearest: Some(nearest),
                why: NoFit::PaddingRefused,
                ..
            } => {
                return format!(
                    "{} covers it, and its record says why it can't be padded into",
                    bucket_name(nearest)
                );
            }
            Self::NoBucket {
                nearest: Some(nearest),
                ..
            } => return format!("the nearest is {}", bucket_name(nearest)),
            Self::NoBucket { .. } => {
                "`precast ls` lists the buckets; the spec's `[module.buckets]` can have more"
            }
            Self::Shape { .. } => "a shape's sizes multiplied are the number of elements",
            Self::NoOutput { known, .. } => return format!("it has {}", known.join(", ")),
            Self::OutputDtype { got, .. } => {
                return format!("ask for the Rust type of {got}");
            }
            Self::Tensor { .. } | Self::Array { .. } => {
                "libtorch refused it: there may be too little memory"
            }
        };
        text.to_owned()
    }
}

/// Errors of the system that may pass: a short resource, a failed read.
pub(super) const PASSING: [i32; 7] = [
    libc::EMFILE,
    libc::ENFILE,
    libc::ENOMEM,
    libc::EIO,
    libc::EAGAIN,
    libc::EINTR,
    libc::EBUSY,
];

/// Returns whether an error of the system may be temporary.
pub(crate) fn passes(error: &io::Error) -> bool {
    error
        .raw_os_error()
        .is_some_and(|number| PASSING.contains(&number))
}

/// Returns the most similar known name, if one is similar enough.
fn nearest<'a>(given: &str, known: &'a [String]) -> Option<&'a String> {
    let distance = |name: &String| strsim::damerau_levenshtein(name, given);
    let nearest = known.iter().min_by_key(|name| distance(name));
    nearest.filter(|name| distance(name) <= 3)
}
