//! Everything that can go wrong between a store and an answer.

use std::{io, path::PathBuf, sync::Arc};

use precast_store::{
    Device, Digest,
    record::{Dtype, Sizes, bucket_name},
    target::Mismatch,
};

use super::{
    problem::Problem,
    source::{NoRelease, SourceError},
};

mod hint;
mod kind;
mod torch;

pub(super) use hint::passes;
pub use kind::{ErrorKind, whole};
pub use torch::TorchError;

/// The error of a load or of a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// A record or an object is not in the store, or can't be read from it.
    #[error("{what} can't be read from the store")]
    Store {
        /// The record or object, in words.
        what: String,
        /// The store's own error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// There is no model or no release of this name.
    #[error(transparent)]
    NoRelease(NoRelease),

    // Devices and hosts.
    /// The device is not there, or libtorch can't use it.
    #[error("device `{device}` is not usable: {reason}")]
    NoDevice {
        /// The requested device.
        device: Device,
        /// The message of CUDA or libtorch.
        reason: TorchError,
    },
    /// The host of this process can't be determined, so no artifact can be compared with it.
    #[error("the torch of this process can't be told: {reason}")]
    UnknownHost {
        /// The file that is missing or can't be read.
        reason: String,
    },
    /// There is no libtorch, an unsupported one, or two. No code of a refused libtorch has run, unless the process had
    /// loaded it before.
    #[error("libtorch can't be used: {reason}")]
    Libtorch {
        /// The libtorch that was found, or the folders of the search.
        reason: TorchError,
    },
    /// A release has no shim for the torch of this process. Nothing of it was loaded.
    #[error("{}", no_shim(torch, known, *outdated))]
    NoShim {
        /// Full version of the torch of this process.
        torch: String,
        /// Full versions of the torches for which it has shims.
        known: Vec<String>,
        /// Whether it has a shim for this torch, from other sources than those of this version of Precast.
        outdated: bool,
    },
    /// No device was named, or a CUDA device twice.
    #[error("a runtime needs at least one device, and each CUDA device only once")]
    Devices,
    /// A program was built for another kind of host. Nothing of it was loaded.
    #[error("program `{}` ({module} {bucket}) was built for another target than `{device}` of this host: {}",
        program.short(), list(mismatches))]
    WrongTarget {
        /// Request key of the program.
        program: Digest,
        /// Name of its module.
        module: String,
        /// As `batch=8 seq=128`, `dynamic` or `eager`.
        bucket: String,
        /// The device that it was to run on.
        device: Device,
        /// Every field of the target that differs.
        mismatches: Vec<Mismatch>,
    },

    /// An artifact was built for another kind of host than its program. Nothing of it was loaded.
    #[error("artifact `{}` was built for another target than `{device}` of this host: {}",
        artifact.short(), list(mismatches))]
    WrongArtifact {
        /// Key of the artifact.
        artifact: Digest,
        /// The device that it was to run on.
        device: Device,
        /// Every field of the target that differs.
        mismatches: Vec<Mismatch>,
    },
    /// A record does not match its name.
    #[error("the record of {what} `{}` is refused: {reason}", id.short())]
    WrongRecord {
        /// Kind of the record: `program` or `artifact`.
        what: &'static str,
        /// The requested key.
        id: Digest,
        /// The difference from its name.
        reason: String,
    },

    // Loading an artifact.
    /// An object of an artifact is missing, damaged or not readable.
    #[error("object `{}` can't be read from the store", object.short())]
    Unreadable {
        /// Digest of the object.
        object: Digest,
        /// The error of the store or the operating system.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no memory or no file handle for the bytes that are to be executed.
    #[error("the memory file for object `{}` can't be made", object.short())]
    MemoryFile {
        /// Digest of the object.
        object: Digest,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The bytes of an object do not hash to the digest in the record. Nothing of it was loaded.
    #[error("object `{}` has other bytes: they hash to `{}`", object.short(), found.short())]
    WrongBytes {
        /// Digest in the artifact's record.
        object: Digest,
        /// Digest of the found bytes.
        found: Digest,
    },
    /// It is no shared object of this machine, or needs a symbol that nothing has.
    #[error("object `{}` is not loadable: {reason}", object.short())]
    NotLoadable {
        /// Digest of the object.
        object: Digest,
        /// The message of the loader.
        reason: TorchError,
    },
    /// A process that loaded it first did not survive that. Nothing of it was loaded here: see `Runtime::trial`.
    #[error("object `{}` is not loaded: a process tried to, and {reason}", object.short())]
    Crashes {
        /// Digest of the object.
        object: Digest,
        /// The end of that process, in words.
        reason: String,
    },
    /// The process that first loads the object ended without a result. This process did not load it. The load is tried
    /// again: the host may be short of memory or threads for a short time.
    #[error("object `{}` is not loaded yet: the process that tries it first {reason}", object.short())]
    Untried {
        /// Digest of the object.
        object: Digest,
        /// The end of that process, in words.
        reason: String,
    },
    /// The process is to end, and waited for the first load of an object.
    #[error("the first load of object `{}` was interrupted", object.short())]
    Interrupted {
        /// Digest of the object.
        object: Digest,
    },
    /// It is not an artifact: a function of the C ABI is missing.
    #[error("object `{}` lacks the function `{name}`", object.short())]
    MissingSymbol {
        /// Digest of the object.
        object: Digest,
        /// Name of the function.
        name: String,
    },
    /// It imports functions that this libtorch does not have. Nothing of it was loaded.
    #[error("object `{}`, built with torch {built_with}, imports {}, which torch {torch} of this process lacks",
        object.short(), some(functions))]
    LackingLibtorch {
        /// Digest of the object.
        object: Digest,
        /// Names of the functions, sorted.
        functions: Vec<String>,
        /// Full version of the torch that the artifact was built with.
        built_with: String,
        /// Version of the libtorch of this process.
        torch: String,
    },
    /// The artifact's own code refused to start, or to take its weights.
    #[error("artifact `{}` gives no container: {reason}", artifact.short())]
    NoContainer {
        /// Key of the artifact.
        artifact: Digest,
        /// The message of the artifact's code.
        reason: TorchError,
    },
    /// The artifact has other numbers of inputs or outputs than its record.
    #[error("artifact `{}` has {got} {what}, its record says {expected}", artifact.short())]
    WrongCount {
        /// Key of the artifact.
        artifact: Digest,
        /// `inputs` or `outputs`.
        what: &'static str,
        /// The number in the record.
        expected: usize,
        /// The number in the artifact.
        got: usize,
    },
    /// A custom operator that the artifact calls can't be loaded or called.
    #[error("artifact `{}` calls operators that can't be called: {reason}", artifact.short())]
    Operators {
        /// Key of the artifact.
        artifact: Digest,
        /// The library or the operator, and its error.
        reason: TorchError,
    },
    /// A record contradicts itself.
    #[error("program `{}` is malformed: {reason}", program.short())]
    Malformed {
        /// Request key of the program.
        program: Digest,
        /// The contradiction, as a fragment of a sentence.
        reason: String,
    },

    // Weights.
    /// A weight set is not a safetensors object, or has a dtype that no module takes.
    #[error("weight set `{}` is not a safetensors object: {reason}", weights.short())]
    BadWeights {
        /// Digest of the weight set.
        weights: Digest,
        /// The part that can't be read.
        reason: String,
    },
    /// A constant of an artifact has no tensor of its dtype and shape in the weight set.
    #[error("constant `{constant}` of artifact `{}` is not bound: {reason}", artifact.short())]
    Unbound {
        /// Key of the artifact.
        artifact: Digest,
        /// Name of the constant in the artifact.
        constant: String,
        /// The tensor that was found for it, or that none was.
        reason: TorchError,
    },
    /// A prepacked constant of an artifact, such as a matrix in oneDNN's order, can't be computed.
    #[error("constant `{constant}` of artifact `{}` can't be made of its weights: {reason}", artifact.short())]
    Unprepared {
        /// Key of the artifact.
        artifact: Digest,
        /// Name of the constant in the artifact.
        constant: String,
        /// The operator that failed, and its message.
        reason: TorchError,
    },
    /// A prepacked constant of an artifact is computed from weights once, and the weight set is of the caller's own
    /// tensors, which change.
    #[error(
        "constant `{constant}` of artifact `{}` is computed from weights, and would not follow the caller's tensors",
        artifact.short()
    )]
    ComputedFromWeights {
        /// Key of the artifact.
        artifact: Digest,
        /// Name of the constant in the artifact.
        constant: String,
    },
    /// A tensor of the caller can't be in a weight set.
    #[error("tensor `{name}` can't be bound as a weight: {reason}")]
    NotAWeight {
        /// Name of the tensor.
        name: String,
        /// The difference from a weight.
        reason: TorchError,
    },
    /// Weights do not fit the device, or did not get there.
    #[error("weights can't be brought to `{device}`: {reason}")]
    Upload {
        /// The device that was to have the weights.
        device: Device,
        /// The message of CUDA or libtorch.
        reason: TorchError,
    },

    // Calls.
    /// The device has a persistent error: an illegal access, a failed assertion. Every later call fails with this
    /// error, and so does a call that begins when the process is ending.
    #[error("device `{device}` answers no more calls in this process: {reason}")]
    Unready {
        /// The device of the call.
        device: Device,
        /// The first error of the device, or that the process ends.
        reason: String,
    },
    /// The model has no module of this name.
    #[error("model `{model}` has no module `{module}`")]
    NoModule {
        /// Name of the model.
        model: String,
        /// The requested name.
        module: String,
        /// The names of its modules. They are shared, so that a refused call costs little.
        known: Arc<[String]>,
    },
    /// The module does not take an input. It was refused before any call of an artifact.
    #[error("module `{module}`, input `{input}`: {problem}")]
    BadInput {
        /// Name of the module.
        module: Arc<str>,
        /// Name of the input.
        input: Arc<str>,
        /// The difference from the module's input.
        problem: Problem,
    },
    /// The module takes another number of inputs.
    #[error("module `{module}` takes {expected} inputs ({}), got {got}", names.join(", "))]
    InputCount {
        /// Name of the module.
        module: Arc<str>,
        /// Inputs that it takes.
        expected: usize,
        /// Inputs of the call.
        got: usize,
        /// Names of the inputs that it takes, in order.
        names: Arc<[String]>,
    },
    /// The module has no variant with inputs of these names.
    #[error("module `{module}` has no variant with the inputs {}", quoted(given))]
    InputNames {
        /// Name of the module.
        module: Arc<str>,
        /// The names in the call.
        given: Vec<Box<str>>,
        /// For each variant the names of its inputs.
        variants: Vec<Arc<[String]>>,
    },
    /// No rung of the ladder answers requests of these sizes.
    #[error(
        "module `{module}` has no bucket for {}; it has {}{}",
        bucket_name(request),
        buckets(known),
        free.iter().map(|one| format!("; {one}")).collect::<String>()
    )]
    NoBucket {
        /// Name of the module.
        module: Arc<str>,
        /// Sizes of the call.
        request: Sizes,
        /// Every bucket of the module.
        known: Arc<[Sizes]>,
        /// The sizes that its programs for many sizes answer, as `eager for batch from 1, seq 1 to 512`.
        free: Box<[String]>,
        /// The bucket that differs least, if there is one.
        nearest: Option<Sizes>,
        /// The reason why nothing answers.
        why: NoFit,
    },
    /// A call's parallel loops need more threads than can be made. Nothing ran: OpenMP would have ended the process.
    #[error("parallel loops need {wanted} threads, and {found} can be had")]
    NoThreads {
        /// Threads that the loops of one call use.
        wanted: usize,
        /// Threads that could be started.
        found: usize,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// Every slot that could answer was in use for longer than the caller waits. Nothing ran.
    #[error(
        "module `{module}` at {bucket}: all {slots} slots are in use, and the call was to wait no longer"
    )]
    Busy {
        /// Name of the module.
        module: Arc<str>,
        /// The bucket that was to answer.
        bucket: String,
        /// Slots of the program.
        slots: usize,
    },
    /// The module keeps states from call to call, and was called without a session. Nothing ran.
    #[error("module `{module}` keeps states from call to call, and was called without a session")]
    NeedsSession {
        /// Name of the module.
        module: Arc<str>,
    },
    /// As many sessions were open as there may be, for longer than the caller waits.
    #[error("model `{model}`: all {sessions} sessions are in use")]
    SessionsBusy {
        /// Name of the model.
        model: String,
        /// Sessions that can be open at once on the device.
        sessions: usize,
    },
    /// The states of one session take more bytes than those of all sessions may.
    #[error(
        "a session of model `{model}` takes up to {bytes} bytes, and all sessions may take {limit}"
    )]
    SessionLimit {
        /// Name of the model.
        model: String,
        /// The maximum bytes of a session, with every bucket that it can grow into.
        bytes: u64,
        /// The limit of the runtime.
        limit: u64,
    },
    /// An earlier call of the session failed while it ran: its states may be half written.
    #[error("the session is unusable, because a call in it failed: {cause}")]
    SessionFailed {
        /// The error of that call.
        cause: Arc<str>,
    },
    /// A state does not match the program or the caller. Nothing was changed.
    #[error("state `{state}`: {problem}")]
    State {
        /// Name of the state.
        state: String,
        /// The difference.
        problem: String,
    },
    /// A file with the states of a session can't be read or written, is damaged, or is of another model or of other
    /// weights. Nothing was changed.
    #[error("session file `{}`: {problem}", path.display())]
    SessionFile {
        /// Path of the file.
        path: PathBuf,
        /// The difference, or what the operating system says.
        problem: String,
    },
    /// A module that is to be trained is no training step.
    #[error("module `{module}` is no training step")]
    NoStep {
        /// Name of the module.
        module: String,
        /// The modules that are.
        known: Vec<String>,
    },
    /// A checkpoint is damaged, or of another training. Nothing was changed.
    #[error("checkpoint `{}`: {problem}", path.display())]
    Checkpoint {
        /// Path of the file.
        path: PathBuf,
        /// The difference.
        problem: String,
    },
    /// A checkpoint can't be read or written. An earlier one of that name is as it was.
    #[error("checkpoint `{}`", path.display())]
    CheckpointFile {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Several devices can't train a module, or a batch of it, together. Nothing was changed.
    #[error("module `{module}` can't be trained on {devices} devices: {problem}")]
    SeveralDevices {
        /// Name of the module.
        module: String,
        /// Number of the model's devices.
        devices: usize,
        /// The reason.
        problem: String,
    },
    /// The devices' sum of gradients is not that of one device. Nothing was changed.
    #[error(
        "state `{state}` of module `{module}`: the sum of {devices} devices differs from that of one by {:.2} %",
        distance * 100.0
    )]
    WrongSum {
        /// Name of the module.
        module: String,
        /// Name of the sum.
        state: String,
        /// Number of the model's devices.
        devices: usize,
        /// Norm of the difference, relative to that of the sum of one device.
        distance: f64,
    },
    /// NCCL failed between the devices of a training. Values of the training are lost since the last checkpoint.
    /// [`Trainer::without_nccl`](crate::Trainer::without_nccl) trains without it.
    #[error("NCCL on {devices} devices: `{function}` failed: {message}")]
    Nccl {
        /// Number of the model's devices.
        devices: usize,
        /// The function of NCCL.
        function: &'static str,
        /// The message of the library.
        message: String,
    },
    /// A step failed or threw; the message is its own. The inputs are untouched, and the model can still be called.
    #[error("module `{module}` at {bucket}, step `{step}`: {message}")]
    Failed {
        /// Name of the module.
        module: Arc<str>,
        /// The bucket that was to answer.
        bucket: String,
        /// Name of the step.
        step: String,
        /// The error of the artifact or of libtorch.
        message: TorchError,
    },
    /// A value that the program computed failed a check of the model, such as an index beyond a table. The answer is
    /// dropped, the inputs are untouched, and the model can still be called.
    #[error("module `{module}` at {bucket}: the check `{check}` failed")]
    CheckFailed {
        /// Name of the module.
        module: Arc<str>,
        /// The bucket that was to answer.
        bucket: String,
        /// The condition in words, and its line in the model, as far as that is known.
        check: String,
    },
    /// An earlier call had a value out of bounds, and its outputs were given up before anybody read its notes: floats
    /// that follow from the value are NaN there. This call was not made; it can be repeated.
    #[error("an earlier call, number {number}: {error}")]
    EarlierCall {
        /// The number of the call, among those of the model that have notes, from 1.
        number: u64,
        /// What was out of bounds.
        error: Box<RuntimeError>,
    },
    /// An output of an artifact has another shape, dtype or device than its record. The answer is dropped.
    #[error("module `{module}` at {bucket}: output {output} is {got}, its record says {expected}")]
    BadOutput {
        /// Name of the module.
        module: Arc<str>,
        /// The bucket that answered.
        bucket: String,
        /// Position among the outputs, from 0.
        output: usize,
        /// Dtype, shape and device in the record.
        expected: String,
        /// Dtype, shape and device of the answer.
        got: String,
    },
    /// The programs that answer requests of these sizes were set aside, for a while or for the life of the model.
    #[error(
        "the programs of module `{module}` for {} can't be loaded",
        bucket_name(request)
    )]
    NothingLeft {
        /// Name of the module.
        module: Arc<str>,
        /// Sizes of the call.
        request: Sizes,
        /// One of the programs, and its error.
        #[source]
        cause: Arc<Quarantined>,
    },
    /// libtorch refused a copy: as a rule there is no memory.
    #[error("module `{module}`: {message}")]
    Tensor {
        /// Name of the module.
        module: Arc<str>,
        /// The message of libtorch.
        message: TorchError,
    },

    // Plain memory in and out.
    /// The number of elements of an array does not match its shape.
    #[error("an array of shape {shape:?} has {}, got {got}", elements(*needed))]
    Shape {
        /// The shape of the call.
        shape: Vec<usize>,
        /// Elements of the shape; none beyond any memory.
        needed: Option<usize>,
        /// Elements that the array has.
        got: usize,
    },
    /// The module has no output of this name or number.
    #[error("module `{module}` has no output {output}")]
    NoOutput {
        /// Name of the module.
        module: Arc<str>,
        /// The requested name or number.
        output: String,
        /// Names of its outputs, in order.
        known: Vec<String>,
    },
    /// An output was requested with another dtype than its own.
    #[error("output `{output}` of module `{module}` is {got}, not {asked}")]
    OutputDtype {
        /// Name of the module.
        module: Arc<str>,
        /// Name of the output.
        output: String,
        /// The requested dtype.
        asked: Dtype,
        /// The output's own dtype.
        got: Dtype,
    },
    /// libtorch refused to copy an array: as a rule there is no memory.
    #[error("an array can't be copied: {reason}")]
    Array {
        /// The message of libtorch.
        reason: TorchError,
    },
}

/// A program that could not be loaded. Requests go to the model's other buckets.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Quarantined {
    /// Its request key.
    pub program: Digest,
    /// The module it is of, by its name in the spec.
    pub module: String,
    /// The sizes it is for.
    pub bucket: Sizes,
    /// The device of the program.
    pub device: Device,
    /// The error of the load.
    #[source]
    pub error: RuntimeError,
}

/// The reason why no bucket answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoFit {
    /// Larger than every bucket.
    TooLarge,
    /// A bucket covers it, and may not be padded into.
    PaddingRefused,
}

/// Returns the error for a record or an object that could not be read.
pub(super) fn in_store(what: String) -> impl FnOnce(SourceError) -> RuntimeError {
    move |source| RuntimeError::Store { what, source }
}

fn no_shim(torch: &str, known: &[String], outdated: bool) -> String {
    match known {
        _ if outdated => {
            format!("the release's shim for torch {torch} is of another version of Precast")
        }
        [] => "the release has no shim: an earlier version of Precast built it".to_owned(),
        known => format!(
            "the release has no shim for torch {torch}: it has those for {}",
            known.join(", ")
        ),
    }
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

/// Names the first functions of a list, and counts the others.
fn some(functions: &[String]) -> String {
    const SOME: usize = 3;
    let named: Vec<String> = functions
        .iter()
        .take(SOME)
        .map(|name| format!("`{name}`"))
        .collect();
    let (named, rest) = (named.join(", "), functions.len().saturating_sub(SOME));
    match (functions.len(), rest) {
        (1, _) => format!("the function {named}"),
        (_, 0) => format!("the functions {named}"),
        _ => format!("the functions {named} and {rest} more"),
    }
}

fn quoted(names: &[Box<str>]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

fn buckets(known: &[Sizes]) -> String {
    let mut known: Vec<&Sizes> = known.iter().collect();
    known.sort();
    if known.is_empty() {
        return "none".to_owned();
    }
    let names: Vec<String> = known.into_iter().map(bucket_name).collect();
    names.join(", ")
}
