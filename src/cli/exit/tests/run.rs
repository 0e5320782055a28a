//! Errors of the runtime.

use super::{super::*, io};

pub(super) fn runtime_errors() -> Vec<Error> {
    use std::sync::Arc;

    use crate::{
        Device,
        record::{Dtype, Sizes},
        runtime::{
            RuntimeError as E,
            errors::{NoFit, NoRelease, Problem, Quarantined, TorchError},
        },
        target::Mismatch,
    };
    let id = Digest::of(b"x");
    let text = || "it says no".to_owned();
    let module: Arc<str> = "encode".into();
    let sizes = || Sizes::from([("batch".to_owned(), 8)]);
    let problems = [
        Problem::Undefined,
        Problem::NotDense,
        Problem::Lazy,
        Problem::Device {
            expected: Device::Cpu,
            got: "cuda:0".into(),
        },
        Problem::Dtype {
            expected: Dtype::Int64,
            got: "int32".into(),
        },
        Problem::Rank {
            expected: 2,
            got: 1,
        },
        Problem::Size {
            axis: 0,
            expected: 2,
            got: 1,
        },
        Problem::Empty {
            axis: 0,
            dim: "batch".into(),
        },
        Problem::Disagrees {
            axis: 0,
            dim: "batch".into(),
            size: 1,
            other: 2,
        },
        Problem::Strides {
            expected: vec![1],
            got: vec![2],
        },
        Problem::Alignment {
            needed: 16,
            address: 8,
        },
        Problem::Storage { needed: 8, got: 4 },
        Problem::Value {
            position: Some(vec![0, 17]),
            value: Some(30522),
            bounds: [0, 30522],
        },
        Problem::Value {
            position: None,
            value: None,
            bounds: [0, 30522],
        },
        Problem::Full {
            dim: "context".into(),
            size: 512,
            position: 512,
        },
    ];
    let bad_input = |problem| E::BadInput {
        module: module.clone(),
        input: "ids".into(),
        problem,
    };
    let no_bucket = |nearest, why| E::NoBucket {
        module: module.clone(),
        request: sizes(),
        known: [sizes()].into(),
        free: Box::default(),
        nearest,
        why,
    };
    let no_module = |module: &str, known: &[String]| E::NoModule {
        model: "m".into(),
        module: module.into(),
        known: known.into(),
    };
    let unreadable = |source| E::Store {
        what: "release 1".into(),
        source,
    };
    let missing = |release: Option<&str>, partial, known: &[&str]| {
        E::NoRelease(NoRelease {
            model: "m".into(),
            release: release.map(Into::into),
            partial,
            known: known.iter().map(ToString::to_string).collect(),
        })
    };
    let mut all =
        vec![
        unreadable(StoreError::Unknown("abcd".into()).into()),
        unreadable("no".into()),
        missing(Some("9"), None, &["m"]),
        missing(None, Some(2), &["m"]),
        missing(None, None, &["encoder"]),
        missing(None, None, &[]),
        E::NoDevice {
            device: Device::Cpu,
            reason: text().into(),
        },
        E::NoDevice {
            device: Device::Cuda(0),
            reason: text().into(),
        },
        E::Libtorch { reason: text().into() },
        E::UnknownHost { reason: text() },
        E::Devices,
        E::WrongTarget {
            program: id,
            module: "encode".into(),
            bucket: "batch=8".into(),
            device: Device::Cpu,
            mismatches: vec![Mismatch {
                field: "os",
                artifact: "plan9".into(),
                host: "linux".into(),
            }],
        },
        E::WrongArtifact {
            artifact: id,
            device: Device::Cpu,
            mismatches: vec![Mismatch {
                field: "torch",
                artifact: "2.11.0".into(),
                host: "2.12.0".into(),
            }],
        },
        E::WrongRecord {
            what: "program",
            id,
            reason: text(),
        },
        E::Crashes {
            object: id,
            reason: "it ended with signal 11".into(),
        },
        E::Busy {
            module: module.clone(),
            bucket: "batch=8".into(),
            slots: 4,
        },
        E::NeedsSession {
            module: module.clone(),
        },
        E::SessionLimit {
            model: "decoder".into(),
            bytes: 10240,
            limit: 4096,
        },
        E::SessionsBusy {
            model: "chat".into(),
            sessions: 16,
        },
        E::SessionFailed {
            cause: "module `decode` at batch=1, step `main`: no memory".into(),
        },
        E::State {
            state: "cache.k".into(),
            problem: "the model has no state of this name".into(),
        },
        E::NoStep {
            module: "encode".into(),
            known: vec![],
        },
        E::NoStep {
            module: "encode".into(),
            known: vec!["train".into()],
        },
        E::SessionFile {
            path: "chat.safetensors".into(),
            problem: "it is of model `bert`, not of `gpt`".into(),
        },
        E::Checkpoint {
            path: "run/step-0000000100.safetensors".into(),
            problem: "it lacks the state `head.weight`".into(),
        },
        E::CheckpointFile {
            path: "run/step-0000000100.safetensors".into(),
            source: io(ErrorKind::StorageFull),
        },
        E::SeveralDevices {
            module: "train".into(),
            devices: 2,
            problem: "input `ids` has 7 rows".into(),
        },
        E::WrongSum {
            module: "train".into(),
            state: "optimizer.gradient.head.weight".into(),
            devices: 2,
            distance: 0.25,
        },
        E::Nccl {
            devices: 2,
            function: "ncclReduce",
            message: text(),
        },
        E::NoThreads {
            wanted: 8,
            found: 3,
            source: io(ErrorKind::WouldBlock),
        },
        E::MemoryFile {
            object: id,
            source: io(ErrorKind::OutOfMemory),
        },
        E::WrongBytes {
            object: id,
            found: id,
        },
        E::NotLoadable {
            object: id,
            reason: text().into(),
        },
        E::Unreadable {
            object: id,
            source: "no".into(),
        },
        E::Operators {
            artifact: id,
            reason: text().into(),
        },
        E::Operators {
            artifact: id,
            reason: TorchError::Registered("another library".into()),
        },
        E::NotLoadable {
            object: id,
            reason: TorchError::Loader("libtorch_python".into()),
        },
        E::NothingLeft {
            module: module.clone(),
            request: sizes(),
            cause: Arc::new(Quarantined {
                program: id,
                module: "f".into(),
                bucket: sizes(),
                device: Device::Cpu,
                error: E::Untried {
                    object: id,
                    reason: text(),
                },
            }),
        },
        E::Untried {
            object: id,
            reason: "ended with signal 9".into(),
        },
        E::Interrupted { object: id },
        E::Unprepared {
            artifact: id,
            constant: "w".into(),
            reason: text().into(),
        },
        E::MissingSymbol {
            object: id,
            name: "Run".into(),
        },
        E::LackingLibtorch {
            object: id,
            functions: vec!["aoti_torch_new".into()],
            built_with: "2.15.0".into(),
            torch: "2.11.0".into(),
        },
        E::NoShim {
            torch: "2.13.0+cu130".into(),
            known: vec!["2.11.0+cu130".into(), "2.12.1+cu130".into()],
            outdated: false,
        },
        E::NoShim {
            torch: "2.11.0+cu130".into(),
            known: vec!["2.11.0+cu130".into()],
            outdated: true,
        },
        E::NoContainer {
            artifact: id,
            reason: text().into(),
        },
        E::WrongCount {
            artifact: id,
            what: "inputs",
            expected: 1,
            got: 2,
        },
        E::Malformed {
            program: id,
            reason: text(),
        },
        E::BadWeights {
            weights: id,
            reason: text(),
        },
        E::Unbound {
            artifact: id,
            constant: "w".into(),
            reason: text().into(),
        },
        E::ComputedFromWeights {
            artifact: id,
            constant: "w".into(),
        },
        E::NotAWeight {
            name: "w".into(),
            reason: text().into(),
        },
        E::Upload {
            device: Device::Cpu,
            reason: text().into(),
        },
        E::Unready {
            device: Device::Cpu,
            reason: text(),
        },
        no_module("f", &["encode".into()]),
        no_module("encoder", &["encode".into()]),
        no_module("f", &[]),
        E::InputCount {
            module: module.clone(),
            expected: 1,
            got: 2,
            names: ["ids".to_owned()].into(),
        },
        E::InputNames {
            module: module.clone(),
            given: vec!["x".into()],
            variants: vec![["ids".to_owned()].into()],
        },
        no_bucket(Some(sizes()), NoFit::TooLarge),
        no_bucket(Some(sizes()), NoFit::PaddingRefused),
        no_bucket(None, NoFit::TooLarge),
        E::Failed {
            module: module.clone(),
            bucket: "batch=8".into(),
            step: "main".into(),
            message: text().into(),
        },
        E::Failed {
            module: module.clone(),
            bucket: "batch=8".into(),
            step: "main".into(),
            message: TorchError::Memory("CUDA driver error: out of memory".into()),
        },
        E::Failed {
            module: module.clone(),
            bucket: "batch=8".into(),
            step: "eager".into(),
            message: TorchError::NoCode("`aten::conv2d`: could not create a primitive".into()),
        },
        E::Failed {
            module: module.clone(),
            bucket: "eager".into(),
            step: "eager".into(),
            message:
                "aten::add.Tensor: the size of tensor a (300) must match the size of tensor b (256)"
                    .into(),
        },
        E::CheckFailed {
            module: module.clone(),
            bucket: "batch=8".into(),
            check: "index in 0..30522 of aten.embedding (model.py:12)".into(),
        },
        E::EarlierCall {
            number: 17,
            error: Box::new(E::CheckFailed {
                module: module.clone(),
                bucket: "batch=8".into(),
                check: "index in 0..30522 of aten.embedding (model.py:12)".into(),
            }),
        },
        E::BadOutput {
            module: module.clone(),
            bucket: "batch=8".into(),
            output: 0,
            expected: text(),
            got: text(),
        },
        E::Tensor {
            module: module.clone(),
            message: text().into(),
        },
        E::Shape {
            shape: vec![2, 3],
            needed: Some(6),
            got: 5,
        },
        E::NoOutput {
            module: module.clone(),
            output: "`z`".into(),
            known: vec!["y".into()],
        },
        E::OutputDtype {
            module: module.clone(),
            output: "y".into(),
            asked: Dtype::Int64,
            got: Dtype::Float32,
        },
        E::Array { reason: text().into() },
    ];
    all.extend(problems.map(bad_input));
    let mut all: Vec<Error> = all.into_iter().map(Into::into).collect();
    all.extend([
        TensorFileError::Format(safetensors::SafeTensorError::HeaderTooSmall).into(),
        TensorFileError::Read(io(ErrorKind::IsADirectory)).into(),
        TensorFileError::Write(io(ErrorKind::StorageFull)).into(),
        TensorFileError::Write(io(ErrorKind::NotFound)).into(),
        TensorFileError::Write(io(ErrorKind::PermissionDenied)).into(),
        TensorFileError::Dtype {
            name: "x".into(),
            dtype: "F4".into(),
        }
        .into(),
        TensorFileError::Torch {
            name: "x".into(),
            reason: text().into(),
        }
        .into(),
    ]);
    all
}
