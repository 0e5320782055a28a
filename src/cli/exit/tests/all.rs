//! Every error: one of each variant, and more of those whose text, hint or exit code depends on a value.

use std::sync::Arc;

use super::{
    super::*,
    given::{Given, samples},
    io,
};
use crate::{
    Device,
    build::protocol::WorkerError,
    inspect::stats,
    record::Sizes,
    runtime::errors::{NoFit, NoRelease, Problem, Quarantined, TorchError},
    spec::Spec,
    target::{Mismatch, Unfit},
};

fn unknown() -> StoreError {
    StoreError::Unknown("abcd".into())
}

fn wrong_spec() -> SpecError {
    Spec::parse("schema = 2", "a/path".as_ref()).unwrap_err()
}

pub(super) fn spec_errors() -> Vec<SpecError> {
    let mut all = samples!(SpecError {
        Read { path, source },
        Read { path, source = io(ErrorKind::PermissionDenied) },
        Read { path, source = io(ErrorKind::IsADirectory) },
        NotText { path, offset },
        TooLarge { path, most },
    });
    all.push(wrong_spec());
    all
}

pub(super) fn plan_errors() -> Vec<PlanError> {
    let mut all =
        samples!(PlanError { Source { path, source }, Declared { path, method, message } });
    all.extend([PlanError::NothingMatches("x*".into()), unknown().into()]);
    all
}

fn failure(code: &str) -> Box<WorkerError> {
    Box::new(WorkerError {
        code: code.into(),
        message: "it failed".into(),
        location: None,
        hint: None,
        spec: None,
        trace: String::new(),
    })
}

pub(super) fn build_errors() -> Vec<BuildError> {
    let codes = "entry_import entry_call torch_missing no_device no_module no_method bad_input capture pass compile weights \
                 out_of_memory protocol internal";
    let codes = codes.split(' ').map(failure);
    let mut all: Vec<_> = codes.map(BuildError::Worker).collect();
    all.extend(samples!(BuildError {
        NoPython { program, source },
        NoGate { program, source },
        WrongTorch { program, found, why = Unfit::TooOld },
        Model { error = failure("entry_call"), log },
        WorkerDied { status, log },
        WorkerGreedy { what, log },
        WorkerHung { seconds, log },
        Disturbed { what, log },
        Protocol { message },
        Scratch { path, source },
        Gate { message, log, far },
        BadWeights { path, message },
        Weights { path, message },
        Chain { message },
        SourceChanged { path },
        UnsafeObject { of, what },
        Locked { missing, total },
        OtherTorch { program, found, wanted },
        LockedShim { torch },
        Incomplete { name, missing, total },
        Lost { programs = (1..9).map(|n| format!("encode batch={n}")).collect() },
        Unanswered { modules = vec!["encode".into(), "decode(ids, image)".into()] },
        Failed { failed, total },
        Interrupted,
    }));
    all.push(BuildError::Spec(Box::new(wrong_spec())));
    all.push(unknown().into());
    all.push(PlanError::NothingMatches("x*".into()).into());
    all
}

pub(super) fn external_errors() -> Vec<ExternalError> {
    samples!(ExternalError {
        Io { path, source },
        NotAFile { path },
        Unknown { path },
        Malformed { path, why },
        TooLarge { path, why },
    })
}

pub(super) fn library_errors() -> Vec<LibraryError> {
    let mut all = samples!(LibraryError { Io { path, source }, Malformed { name, why } });
    all.push(unknown().into());
    all
}

pub(super) fn counts_errors() -> Vec<CountsError> {
    let mut all = samples!(CountsError { Schema { found } });
    all.push(stats::parse(b"[]").unwrap_err());
    all
}

pub(super) fn store_errors() -> Vec<StoreError> {
    let raw = io::Error::from_raw_os_error;
    let sqlite = |code| rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None);
    let mut all = samples!(StoreError {
        NotAStore { path, why },
        NotEmpty { path, found },
        Newer { path, found, known },
        Unsafe { path, why },
        Unsafe { path, why = "it is a link".into() },
        Stranger { path, uid },
        Busy { to, path, owner, seconds },
        Interrupted { to },
        Io { what, path, source = io(ErrorKind::StorageFull) },
        Io { what, path, source = io(ErrorKind::PermissionDenied) },
        Io { what, path, source = io(ErrorKind::ReadOnlyFilesystem) },
        Io { what, path, source = raw(libc::EMFILE) },
        Io { what, path, source = raw(libc::EIO) },
        ReadOnly { what, path },
        Missing { digest, path },
        Corrupt { digest, path, why },
        Record { path, why },
        Index { path, source = rusqlite::Error::InvalidQuery },
        Index { path, source = sqlite(rusqlite::ffi::SQLITE_FULL) },
        Index { path, source = sqlite(rusqlite::ffi::SQLITE_READONLY) },
        Older { path, found, known },
        Schema { path },
        Row { path, table },
        OldSqlite { found, needed },
        Ambiguous { prefix, candidates },
        Dangling { what, kind, id },
        NoRelease { model, seq },
        TakenNumber { model, seq },
        Partial { model, seq, lacks },
        Changed { path },
    });
    let named = [
        StoreError::BadPrefix,
        StoreError::Unknown,
        StoreError::NumberName,
        StoreError::BadName,
    ];
    all.extend(named.map(|error| error("7\n".into())));
    all
}

pub(super) fn problems() -> Vec<Problem> {
    samples!(Problem {
        Undefined,
        NotDense,
        Lazy,
        Device { expected, got },
        Dtype { expected, got },
        Rank { expected, got },
        Size { axis, expected, got },
        Empty { axis, dim },
        Disagrees { axis, dim, size, other },
        Strides { expected, got },
        Alignment { needed, address },
        Storage { needed, got },
        Full { dim, size, position },
        Value { position = Some(vec![0, 17]), value = Some(30522), bounds = [0, 30522] },
        Value { position = None, value = None, bounds = [0, 30522] },
    })
}

pub(super) fn tensor_file_errors() -> Vec<TensorFileError> {
    let mut all = samples!(TensorFileError { Dtype { name, dtype }, Torch { name, reason } });
    let header = safetensors::SafeTensorError::HeaderTooSmall;
    all.push(TensorFileError::Format(header));
    all.push(TensorFileError::Read(io(ErrorKind::IsADirectory)));
    let refused = [
        ErrorKind::StorageFull,
        ErrorKind::NotFound,
        ErrorKind::PermissionDenied,
    ];
    all.extend(refused.map(|kind| TensorFileError::Write(io(kind))));
    all
}

pub(super) fn runtime_errors() -> Vec<RuntimeError> {
    use RuntimeError as E;
    let mismatch = |field, artifact: &str, host: &str| Mismatch {
        field,
        artifact: artifact.into(),
        host: host.into(),
    };
    let quarantined = Quarantined {
        program: Digest::of(b"program"),
        module: "module".into(),
        bucket: Sizes::given("bucket", 1),
        device: Device::Cpu,
        error: samples!(E { Untried { object, reason } }).remove(0),
    };
    let earlier = samples!(E { CheckFailed { module, bucket, check } }).remove(0);
    let nearest = || Some(Sizes::given("nearest", 1));
    let buckets = [Sizes::given("known", 1)];
    let mut all = samples!(E {
        Store { what, source },
        Store { what, source = unknown().into() },
        NoDevice { device = Device::Cpu, reason },
        NoDevice { device, reason },
        Libtorch { reason },
        UnknownHost { reason },
        Devices,
        WrongTarget { program, module, bucket, device, mismatches = vec![mismatch("os", "plan9", "linux")] },
        WrongArtifact { artifact, device, mismatches = vec![mismatch("torch", "2.11.0", "2.12.0")] },
        WrongRecord { what, id, reason },
        Crashes { object, reason },
        Busy { module, bucket, slots },
        NeedsSession { module },
        SessionLimit { model, bytes, limit },
        SessionsBusy { model, sessions },
        SessionFailed { cause },
        State { state, problem },
        NoStep { module, known = vec![] },
        NoStep { module, known },
        SessionFile { path, problem },
        Checkpoint { path, problem },
        CheckpointFile { path, source },
        SeveralDevices { module, devices, problem },
        WrongSum { module, state, devices, distance },
        Nccl { devices, function, message },
        NoThreads { wanted, found, source },
        MemoryFile { object, source },
        WrongBytes { object, found },
        NotLoadable { object, reason },
        NotLoadable { object, reason = TorchError::Loader("libtorch_python".into()) },
        Unreadable { object, source },
        Operators { artifact, reason },
        Operators { artifact, reason = TorchError::Registered("another library".into()) },
        NothingLeft { module, request, cause = Arc::new(quarantined) },
        Untried { object, reason },
        Interrupted { object },
        Unprepared { artifact, constant, reason },
        MissingSymbol { object, name },
        LackingLibtorch { object, functions, built_with, torch },
        NoShim { torch, known, outdated },
        NoShim { torch, known, outdated = true },
        NoContainer { artifact, reason },
        WrongCount { artifact, what, expected, got },
        Malformed { program, reason },
        BadWeights { weights, reason },
        Unbound { artifact, constant, reason },
        ComputedFromWeights { artifact, constant },
        NotAWeight { name, reason },
        Upload { device, reason },
        Unready { device, reason },
        NoModule { model, module, known },
        NoModule { model, module, known = ["modules".to_owned()].into() },
        NoModule { model, module, known = [].into() },
        InputCount { module, expected, got, names },
        InputNames { module, given = vec!["x".into()], variants = vec![["ids".to_owned()].into()] },
        NoBucket {
            module, request, known = buckets.clone().into(), free = Box::default(), nearest = nearest(), why = NoFit::TooLarge
        },
        NoBucket {
            module, request, known = buckets.clone().into(), free = Box::default(), nearest = nearest(),
            why = NoFit::PaddingRefused
        },
        NoBucket {
            module, request, known = buckets.into(), free = Box::default(), nearest = None, why = NoFit::TooLarge
        },
        Failed { module, bucket, step, message },
        Failed { module, bucket, step, message = TorchError::Memory("out of memory".into()) },
        Failed { module, bucket, step, message = TorchError::NoCode("could not create a primitive".into()) },
        Failed { module, bucket, step = "eager".into(), message },
        CheckFailed { module, bucket, check },
        EarlierCall { number, error = Box::new(earlier) },
        BadOutput { module, bucket, output, expected, got },
        Tensor { module, message },
        Shape { shape, needed, got },
        NoOutput { module, output, known },
        OutputDtype { module, output, asked, got },
        Array { reason },
    });
    for problem in problems() {
        all.extend(samples!(E { BadInput { module, input, problem = problem } }));
    }
    for (release, partial, known) in [
        (Some("9"), None, &["m"][..]),
        (None, Some(2), &["m"]),
        (None, None, &["encoder"]),
        (None, None, &[]),
    ] {
        all.push(E::NoRelease(NoRelease {
            model: "m".into(),
            release: release.map(Into::into),
            partial,
            known: known.iter().map(ToString::to_string).collect(),
        }));
    }
    all
}
