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

/// Returns a value that its name and place say.
fn value<T: Given>(name: &'static str) -> T {
    T::given(name, 1)
}

fn unknown() -> StoreError {
    StoreError::Unknown("abcd".into())
}

pub(super) fn spec_errors() -> Vec<SpecError> {
    let mut all = samples!(SpecError { Read { path, source }, NotText { path, offset }, TooLarge { path, most } });
    let refused = [ErrorKind::PermissionDenied, ErrorKind::IsADirectory].map(io);
    all.extend(refused.map(|source| SpecError::Read {
        path: value("path"),
        source,
    }));
    all.push(wrong_spec());
    all
}

fn wrong_spec() -> SpecError {
    Spec::parse("schema = 2", "a/path".as_ref()).unwrap_err()
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
        WorkerDied { status, log },
        WorkerGreedy { what, log },
        WorkerHung { seconds, log },
        Disturbed { what, log },
        Protocol { message },
        Scratch { path, source },
        BadWeights { path, message },
        Weights { path, message },
        Chain { message },
        SourceChanged { path },
        UnsafeObject { of, what },
        Locked { missing, total },
        OtherTorch { program, found, wanted },
        LockedShim { torch },
        Incomplete { name, missing, total },
        Lost { programs },
        Unanswered { modules },
        Failed { failed, total },
        Interrupted,
    }));
    all.extend([
        BuildError::WrongTorch {
            program: value("program"),
            found: value("found"),
            why: Unfit::TooOld,
        },
        BuildError::Model {
            error: failure("entry_call"),
            log: value("log"),
        },
        BuildError::Gate {
            message: value("message"),
            log: value("log"),
            far: true,
        },
        BuildError::Spec(Box::new(wrong_spec())),
        BuildError::Lost {
            programs: (1..9).map(|n| format!("encode batch={n}")).collect(),
        },
        BuildError::Unanswered {
            modules: vec!["encode".into(), "decode(ids, image)".into()],
        },
        unknown().into(),
        PlanError::NothingMatches("x*".into()).into(),
    ]);
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
    let mut all = samples!(StoreError {
        NotAStore { path, why },
        NotEmpty { path, found },
        Newer { path, found, known },
        Unsafe { path, why },
        Stranger { path, uid },
        Busy { to, path, owner, seconds },
        Interrupted { to },
        ReadOnly { what, path },
        Missing { digest, path },
        Corrupt { digest, path, why },
        Record { path, why },
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
    all.push(StoreError::Unsafe {
        path: value("path"),
        why: "it is a link".into(),
    });
    let refused = [
        ErrorKind::StorageFull,
        ErrorKind::PermissionDenied,
        ErrorKind::ReadOnlyFilesystem,
    ];
    let raw = [libc::EMFILE, libc::EIO].map(io::Error::from_raw_os_error);
    all.extend(
        refused
            .map(io)
            .into_iter()
            .chain(raw)
            .map(|source| StoreError::Io {
                what: "write",
                path: value("path"),
                source,
            }),
    );
    let sqlite = [rusqlite::ffi::SQLITE_FULL, rusqlite::ffi::SQLITE_READONLY]
        .map(|code| rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None));
    let sqlite = sqlite.into_iter().chain([rusqlite::Error::InvalidQuery]);
    all.extend(sqlite.map(|source| StoreError::Index {
        path: value("path"),
        source,
    }));
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
    let mut all = samples!(Problem {
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
    });
    let known = [(Some(vec![0, 17]), Some(30522)), (None, None)];
    all.extend(known.map(|(position, value)| Problem::Value {
        position,
        value,
        bounds: [0, 30522],
    }));
    all
}

pub(super) fn tensor_file_errors() -> Vec<TensorFileError> {
    let mut all = samples!(TensorFileError { Dtype { name, dtype }, Torch { name, reason } });
    let header = safetensors::SafeTensorError::HeaderTooSmall;
    all.extend([
        TensorFileError::Format(header),
        TensorFileError::Read(io(ErrorKind::IsADirectory)),
    ]);
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
    let mut all = samples!(E {
        NoDevice { device, reason },
        Libtorch { reason },
        UnknownHost { reason },
        Devices,
        WrongRecord { what, id, reason },
        Crashes { object, reason },
        Busy { module, bucket, slots },
        NeedsSession { module },
        SessionLimit { model, bytes, limit },
        SessionsBusy { model, sessions },
        SessionFailed { cause },
        State { state, problem },
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
        Unreadable { object, source },
        Operators { artifact, reason },
        Untried { object, reason },
        Interrupted { object },
        Unprepared { artifact, constant, reason },
        MissingSymbol { object, name },
        LackingLibtorch { object, functions, built_with, torch },
        NoContainer { artifact, reason },
        WrongCount { artifact, what, expected, got },
        Malformed { program, reason },
        BadWeights { weights, reason },
        Unbound { artifact, constant, reason },
        ComputedFromWeights { artifact, constant },
        NotAWeight { name, reason },
        Upload { device, reason },
        Unready { device, reason },
        InputCount { module, expected, got, names },
        Failed { module, bucket, step, message },
        CheckFailed { module, bucket, check },
        BadOutput { module, bucket, output, expected, got },
        Tensor { module, message },
        Shape { shape, needed, got },
        NoOutput { module, output, known },
        OutputDtype { module, output, asked, got },
        Array { reason },
        Store { what, source },
        NoModule { model, module, known },
        NoStep { module, known },
        NoShim { torch, known, outdated },
    });
    all.extend(problems().into_iter().map(|problem| E::BadInput {
        module: value("module"),
        input: value("input"),
        problem,
    }));
    let earlier = samples!(E { CheckFailed { module, bucket, check } }).remove(0);
    all.extend([
        E::Store {
            what: value("what"),
            source: unknown().into(),
        },
        E::NoDevice {
            device: Device::Cpu,
            reason: value("reason"),
        },
        E::WrongTarget {
            program: value("program"),
            module: value("module"),
            bucket: value("bucket"),
            device: Device::Cpu,
            mismatches: vec![mismatch("os", "plan9", "linux")],
        },
        E::WrongArtifact {
            artifact: value("artifact"),
            device: Device::Cpu,
            mismatches: vec![mismatch("torch", "2.11.0", "2.12.0")],
        },
        E::NoStep {
            module: value("module"),
            known: vec![],
        },
        E::NotLoadable {
            object: value("object"),
            reason: TorchError::Loader("libtorch_python".into()),
        },
        E::Operators {
            artifact: value("artifact"),
            reason: TorchError::Registered("another library".into()),
        },
        E::NothingLeft {
            module: value("module"),
            request: value("request"),
            cause: Arc::new(Quarantined {
                program: value("program"),
                module: value("module"),
                bucket: value("bucket"),
                device: Device::Cpu,
                error: samples!(E { Untried { object, reason } }).remove(0),
            }),
        },
        E::NoShim {
            torch: value("torch"),
            known: value("known"),
            outdated: true,
        },
        E::InputNames {
            module: value("module"),
            given: vec!["x".into()],
            variants: vec![["ids".to_owned()].into()],
        },
        E::EarlierCall {
            number: 17,
            error: Box::new(earlier),
        },
    ]);
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
    for (module, known) in [("encoder", &["encode".to_owned()][..]), ("f", &[])] {
        all.push(E::NoModule {
            model: "m".into(),
            module: module.into(),
            known: known.into(),
        });
    }
    for (nearest, why) in [
        (Some(value("nearest")), NoFit::TooLarge),
        (Some(value("nearest")), NoFit::PaddingRefused),
        (None, NoFit::TooLarge),
    ] {
        all.push(E::NoBucket {
            module: value("module"),
            request: value("request"),
            known: [value::<Sizes>("known")].into(),
            free: Box::default(),
            nearest,
            why,
        });
    }
    for (step, message) in [
        ("main", TorchError::Memory("out of memory".into())),
        (
            "eager",
            TorchError::NoCode("could not create a primitive".into()),
        ),
        ("eager", TorchError::Libtorch("the sizes must match".into())),
    ] {
        all.push(E::Failed {
            module: value("module"),
            bucket: value("bucket"),
            step: step.into(),
            message,
        });
    }
    all
}

fn mismatch(field: &'static str, artifact: &str, host: &str) -> Mismatch {
    Mismatch {
        field,
        artifact: artifact.into(),
        host: host.into(),
    }
}
