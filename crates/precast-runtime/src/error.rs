//! Everything that can go wrong between a store and an answer.

use std::{io, sync::Arc};

use precast_store::{
    Device, Digest, StoreError,
    out_of_memory::says_out_of_memory,
    record::{Dtype, Sizes, bucket_name},
    target::Mismatch,
};

use super::problem::Problem;

/// Why a model did not load or a call was not answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// A record or an object is not in the store, or can't be read from it.
    #[error("{what} can't be read from the store")]
    Store {
        what: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    // Devices and hosts.
    /// The device is not there, or libtorch can't use it.
    #[error("device `{device}` is not usable: {reason}")]
    NoDevice { device: Device, reason: String },
    /// What this process runs on can't be told, so no artifact can be compared with it.
    #[error("the torch of this process can't be told: {reason}")]
    UnknownHost { reason: String },
    /// No device was named, or a CUDA device twice.
    #[error("a runtime needs at least one device, and each CUDA device only once")]
    Devices,
    /// A program was built for another kind of host. Nothing of it was loaded.
    #[error("program `{}` ({module} {bucket}) was built for another target than `{device}` of this host: {}",
        program.short(), list(mismatches))]
    WrongTarget {
        program: Digest,
        module: String,
        bucket: String,
        device: Device,
        mismatches: Vec<Mismatch>,
    },

    /// An artifact was built for another kind of host, whatever its program says. Nothing of it was loaded.
    #[error("artifact `{}` was built for another target than `{device}` of this host: {}",
        artifact.short(), list(mismatches))]
    WrongArtifact {
        artifact: Digest,
        device: Device,
        mismatches: Vec<Mismatch>,
    },
    /// A record is not the one that its name says.
    #[error("the record of {what} `{}` is refused: {reason}", id.short())]
    WrongRecord {
        what: &'static str,
        id: Digest,
        reason: String,
    },

    // Loading an artifact.
    /// An object of an artifact is missing, damaged or not readable.
    #[error("object `{}` can't be read from the store", object.short())]
    Unreadable {
        object: Digest,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no memory or no file handle for the bytes that are to be executed.
    #[error("the memory file for object `{}` can't be made", object.short())]
    MemoryFile {
        object: Digest,
        #[source]
        source: io::Error,
    },
    /// What was to be executed does not hash to what the record says. Nothing of it was loaded.
    #[error("object `{}` has other bytes: they hash to `{}`", object.short(), found.short())]
    WrongBytes { object: Digest, found: Digest },
    /// It is no shared object of this machine, or needs a symbol that nothing has.
    #[error("object `{}` is not loadable: {reason}", object.short())]
    NotLoadable { object: Digest, reason: String },
    /// A process that loaded it first did not survive that. Nothing of it was loaded here: see `Runtime::trial`.
    #[error("object `{}` is not loaded: a process tried to, and {reason}", object.short())]
    Crashes { object: Digest, reason: String },
    /// It is not an artifact: a function of the C ABI is missing.
    #[error("object `{}` lacks the function `{name}`", object.short())]
    MissingSymbol { object: Digest, name: String },
    /// The artifact's own code refused to start, or to take its weights.
    #[error("artifact `{}` gives no container: {reason}", artifact.short())]
    NoContainer { artifact: Digest, reason: String },
    /// The artifact has other numbers of inputs or outputs than its record.
    #[error("artifact `{}` has {got} {what}, its record says {expected}", artifact.short())]
    WrongCount {
        artifact: Digest,
        what: &'static str,
        expected: usize,
        got: usize,
    },
    /// A custom operator that the artifact calls can't be loaded or called.
    #[error("artifact `{}` calls operators that can't be called: {reason}", artifact.short())]
    Operators { artifact: Digest, reason: String },
    /// A record contradicts itself.
    #[error("program `{}` is malformed: {reason}", program.short())]
    Malformed { program: Digest, reason: String },

    // Weights.
    /// A weight set is not a safetensors object, or has a dtype that no module takes.
    #[error("weight set `{}` is not a safetensors object: {reason}", weights.short())]
    BadWeights { weights: Digest, reason: String },
    /// A constant of an artifact has no tensor of its dtype and shape in the weight set.
    #[error("constant `{constant}` of artifact `{}` is not bound: {reason}", artifact.short())]
    Unbound {
        artifact: Digest,
        constant: String,
        reason: String,
    },
    /// Weights do not fit the device, or did not get there.
    #[error("weights can't be brought to `{device}`: {reason}")]
    Upload { device: Device, reason: String },

    // Calls.
    /// The device has an error that stays: an illegal access, a failed assertion. Every later call answers this.
    /// So do calls that begin when the process is ending.
    #[error("device `{device}` answers no more calls in this process: {reason}")]
    Unready { device: Device, reason: String },
    /// The model has no module of this name.
    #[error("model `{model}` has no module `{module}`")]
    NoModule {
        model: String,
        module: String,
        /// What it has. Not copied: a refused call costs little, whatever the model is made of.
        known: Arc<[String]>,
    },
    /// An input is not what the module takes. Nothing foreign has seen it.
    #[error("module `{module}`, input `{input}`: {problem}")]
    BadInput {
        module: Arc<str>,
        input: Arc<str>,
        problem: Problem,
    },
    /// The module takes another number of inputs.
    #[error("module `{module}` takes {expected} inputs ({}), got {got}", names.join(", "))]
    InputCount {
        module: Arc<str>,
        expected: usize,
        got: usize,
        names: Arc<[String]>,
    },
    /// The module has no variant with inputs of these names.
    #[error("module `{module}` has no variant with the inputs {}", quoted(given))]
    InputNames {
        module: Arc<str>,
        given: Vec<Box<str>>,
        variants: Vec<Arc<[String]>>,
    },
    /// No rung of the ladder answers requests of these sizes.
    #[error(
        "module `{module}` has no bucket for {}; it has {}",
        bucket_name(request),
        buckets(known)
    )]
    NoBucket {
        module: Arc<str>,
        request: Sizes,
        known: Arc<[Sizes]>,
        nearest: Option<Sizes>,
        why: NoFit,
    },
    /// A call's parallel loops need more threads than can be made. Nothing ran: OpenMP would have ended the process.
    #[error("parallel loops need {wanted} threads, and {found} can be had")]
    NoThreads {
        wanted: usize,
        found: usize,
        #[source]
        source: io::Error,
    },
    /// Every execution context that could answer was in use for longer than the call was to wait. Nothing ran.
    #[error(
        "module `{module}` at {bucket}: all {contexts} execution contexts are in use, and the call was to wait no longer"
    )]
    Busy {
        module: Arc<str>,
        bucket: String,
        contexts: usize,
    },
    /// A step failed or threw; the message is its own. The inputs are untouched and the model goes on answering.
    #[error("module `{module}` at {bucket}, step `{step}`: {message}")]
    Failed {
        module: Arc<str>,
        bucket: String,
        step: String,
        message: String,
    },
    /// A value that the program computed failed a check of the model's, as an index beyond a table. The answer is dropped,
    /// the inputs are untouched and the model goes on answering.
    #[error("module `{module}` at {bucket}: the check `{check}` failed")]
    CheckFailed {
        module: Arc<str>,
        bucket: String,
        /// The condition in words, and where the model asks for it, as far as that is known.
        check: String,
    },
    /// An artifact answered with another shape, dtype or device than its record says. The answer is dropped.
    #[error("module `{module}` at {bucket}: output {output} is {got}, its record says {expected}")]
    BadOutput {
        module: Arc<str>,
        bucket: String,
        output: usize,
        expected: String,
        got: String,
    },
    /// Everything that could answer was set aside when it was loaded: see `Model::quarantined`.
    #[error("nothing of module `{module}` can be loaded: {reason}")]
    NothingLeft { module: Arc<str>, reason: String },
    /// libtorch refused a copy: as a rule there is no memory.
    #[error("module `{module}`: {message}")]
    Tensor { module: Arc<str>, message: String },

    // Plain memory in and out.
    /// The elements of an array are more or fewer than its shape says.
    #[error("an array of shape {shape:?} has {}, got {got}", elements(*needed))]
    Shape {
        shape: Vec<usize>,
        /// None where it is beyond any memory.
        needed: Option<usize>,
        got: usize,
    },
    /// The module has no output of this name or number.
    #[error("module `{module}` has no output {output}")]
    NoOutput {
        module: Arc<str>,
        output: String,
        known: Vec<String>,
    },
    /// An output was asked for as another dtype than its own.
    #[error("output `{output}` of module `{module}` is {got}, not {asked}")]
    OutputDtype {
        module: Arc<str>,
        output: String,
        asked: Dtype,
        got: Dtype,
    },
    /// libtorch refused to copy an array: as a rule there is no memory.
    #[error("an array can't be copied: {reason}")]
    Array { reason: String },
}

/// Why no bucket answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoFit {
    /// Larger than every bucket.
    TooLarge,
    /// A bucket covers it, and may not be padded into.
    PaddingRefused,
}

impl RuntimeError {
    /// Returns what a call is answered that begins when the process is ending.
    pub(super) fn ending(device: Device) -> Self {
        let reason = "the process is ending".to_owned();
        Self::Unready { device, reason }
    }

    /// Returns whether there was too little memory, on the device or on the host: the same may do when some is free.
    ///
    /// By the words of torch, CUDA and the system, which have no code that reaches this far.
    pub fn is_out_of_memory(&self) -> bool {
        let text = match self {
            Self::NoContainer { reason, .. }
            | Self::Upload { reason, .. }
            | Self::Unbound { reason, .. }
            | Self::Array { reason }
            | Self::NotLoadable { reason, .. } => reason,
            Self::Failed { message, .. } | Self::Tensor { message, .. } => message,
            Self::MemoryFile { source, .. } => {
                return source.kind() == io::ErrorKind::OutOfMemory;
            }
            _ => return false,
        };
        says_out_of_memory(text)
    }

    /// Returns whether the host was at fault, and may not be for long: no file handle, no thread, no memory, a read that failed.
    /// The same may do later.
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
            Self::NoThreads { .. } => true,
            // By the system's words, at the end of the loader's.
            Self::NotLoadable { reason, .. } => {
                let said = |number: &i32| {
                    let text = io::Error::from_raw_os_error(*number).to_string();
                    text.split(" (os error")
                        .next()
                        .is_some_and(|words| reason.ends_with(words))
                };
                PASSING.iter().any(said) || self.is_out_of_memory()
            }
            _ => self.is_out_of_memory(),
        }
    }

    /// Returns whether an artifact is the cause, so that another bucket may do in its place. What is wrong with the
    /// host, the weights or a record is wrong with all of them, and so is a lack of memory.
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
                | Self::NoContainer { .. }
                | Self::WrongCount { .. }
                | Self::Operators { .. }
        );
        its_own && !self.is_out_of_memory()
    }

    /// Returns what the caller can do about it.
    pub fn hint(&self) -> String {
        const REBUILD: &str =
            "build the program again; `precast verify` says whether its objects are whole";
        let text = match self {
            Self::Failed { .. } | Self::NoContainer { .. } | Self::NotLoadable { .. }
                if self.is_out_of_memory() =>
            {
                "there was too little memory: free some, or have fewer calls at once, and try again"
            }
            Self::Store { source, .. } => match source.downcast_ref::<StoreError>() {
                Some(error) => error.hint(),
                None => "`precast verify` looks at every byte of the store",
            },
            Self::NoDevice {
                device: Device::Cuda(_),
                ..
            } => "`Device::Cpu` runs programs built for `cpu`",
            Self::NoDevice { .. } => "name another device",
            Self::UnknownHost { .. } => "run it with the libtorch that it was built with",
            Self::Devices => "name each device once",
            Self::WrongRecord { .. } => {
                "`precast verify` says whether the store's records are whole"
            }
            Self::WrongTarget { .. } | Self::WrongArtifact { .. } => {
                "build the model on this kind of host, or name its target in `[target]`"
            }
            Self::MemoryFile { .. } => {
                "it is held in memory: free some, or raise the number of open files with `ulimit -n`"
            }
            Self::NothingLeft { .. } => {
                "`precast verify` says whether its objects are whole; build it again otherwise"
            }
            Self::NotLoadable { reason, .. } if reason.starts_with("libtorch_python") => {
                "link the operators' library without libtorch_python (`is_python_module=False` in \
                 torch.utils.cpp_extension.load), and build again"
            }
            Self::Operators { reason, .. } if reason.contains("another library") => {
                "a process can hold one version of an operator's library: load this model in another one"
            }
            Self::Unreadable { .. } | Self::WrongBytes { .. } => {
                "`precast verify` finds every damaged object"
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
            Self::CheckFailed { .. } => {
                "the model refuses these inputs in eager mode too: look at the values they have"
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

/// What the system lacks for a moment, or reads wrong once.
const PASSING: [i32; 7] = [
    libc::EMFILE,
    libc::ENFILE,
    libc::ENOMEM,
    libc::EIO,
    libc::EAGAIN,
    libc::EINTR,
    libc::EBUSY,
];

fn passes(error: &io::Error) -> bool {
    error
        .raw_os_error()
        .is_some_and(|number| PASSING.contains(&number))
}

fn elements(needed: Option<usize>) -> String {
    match needed {
        Some(1) => "1 element".to_owned(),
        Some(n) => format!("{n} elements"),
        None => "too many elements for any memory".to_owned(),
    }
}

fn list(mismatches: &[Mismatch]) -> String {
    let told: Vec<String> = mismatches.iter().map(ToString::to_string).collect();
    told.join("; ")
}

/// Returns the name that was meant, if one is near enough.
fn nearest<'a>(given: &str, known: &'a [String]) -> Option<&'a String> {
    let distance = |name: &String| strsim::damerau_levenshtein(name, given);
    let nearest = known.iter().min_by_key(|name| distance(name));
    nearest.filter(|name| distance(name) <= 3)
}

fn quoted(names: &[Box<str>]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

fn buckets(known: &[Sizes]) -> String {
    let mut known: Vec<&Sizes> = known.iter().collect();
    known.sort();
    let names: Vec<String> = known.into_iter().map(bucket_name).collect();
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    }
}
