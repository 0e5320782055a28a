//! Every error of every stage, and what is said to do about it.

use std::{collections::BTreeSet, path::PathBuf};

use super::*;
use crate::{Digest, build::protocol::WorkerError, inspect::stats, spec::Spec};

fn io(kind: ErrorKind) -> io::Error {
    kind.into()
}

fn path() -> PathBuf {
    "a/path".into()
}

fn failure(code: &str) -> Box<WorkerError> {
    Box::new(WorkerError {
        code: code.into(),
        message: "it failed".into(),
        location: None,
        hint: None,
        trace: String::new(),
    })
}

fn worker(code: &str) -> BuildError {
    BuildError::Worker(failure(code))
}

fn spec_errors() -> Vec<SpecError> {
    let mut all: Vec<_> = [
        ErrorKind::NotFound,
        ErrorKind::PermissionDenied,
        ErrorKind::IsADirectory,
    ]
    .map(|kind| SpecError::Read {
        path: path(),
        source: io(kind),
    })
    .into();
    all.push(SpecError::NotText {
        path: path(),
        offset: 3,
    });
    all.push(Spec::parse("schema = 2", &path()).unwrap_err());
    all
}

fn plan_errors() -> Vec<PlanError> {
    vec![
        PlanError::Source {
            path: path(),
            source: io(ErrorKind::NotFound),
        },
        PlanError::Declared {
            path: "encoder".into(),
            method: "forward".into(),
            message: "no".into(),
        },
        PlanError::NothingMatches("x*".into()),
        PlanError::Store(StoreError::Unknown("abcd".into())),
    ]
}

fn build_errors() -> Vec<BuildError> {
    let codes = [
        "entry_import",
        "entry_call",
        "torch_missing",
        "no_device",
        "no_module",
        "no_method",
        "bad_input",
        "capture",
        "pass",
        "compile",
        "weights",
        "protocol",
        "internal",
    ];
    let mut all: Vec<_> = codes.into_iter().map(worker).collect();
    let (log, status) = (String::new(), "signal 9".to_owned());
    all.extend([
        BuildError::NoPython {
            program: path(),
            source: io(ErrorKind::NotFound),
        },
        BuildError::WrongTorch {
            program: path(),
            found: "2.0.0".into(),
            expected: "2.11.0",
        },
        BuildError::Model {
            error: failure("entry_call"),
            log: Digest::of(b"stack"),
        },
        BuildError::WorkerDied {
            status,
            log: log.clone(),
        },
        BuildError::WorkerGreedy {
            what: String::new(),
            log: String::new(),
        },
        BuildError::WorkerHung {
            seconds: 9,
            log: log.clone(),
        },
        BuildError::Protocol {
            message: "no".into(),
        },
        BuildError::Scratch {
            path: path(),
            source: io(ErrorKind::StorageFull),
        },
        BuildError::Gate {
            message: "output 0 differs".into(),
            log,
        },
        BuildError::Weights {
            path: path(),
            message: "it has no tensor `w`".into(),
        },
        BuildError::SourceChanged {
            path: "model.py".into(),
        },
        BuildError::Locked {
            missing: 1,
            total: 2,
        },
        BuildError::Incomplete {
            name: "v1".into(),
            missing: 1,
            total: 2,
        },
        BuildError::Failed {
            failed: 1,
            total: 2,
        },
        BuildError::Interrupted,
        BuildError::Store(StoreError::Unknown("abcd".into())),
        BuildError::Plan(PlanError::NothingMatches("x*".into())),
    ]);
    all
}

fn store_errors() -> Vec<StoreError> {
    let (digest, why) = (Digest::of(b"x"), "it is too short".to_owned());
    let raw = io::Error::from_raw_os_error;
    let refused = |source| StoreError::Io {
        what: "write",
        path: path(),
        source,
    };
    vec![
        StoreError::NotAStore {
            path: path(),
            why: "it is a file",
        },
        StoreError::NotEmpty {
            path: path(),
            found: "x".into(),
        },
        StoreError::Newer {
            path: path(),
            found: 9,
            known: 1,
        },
        StoreError::Unsafe {
            path: path(),
            why: "anybody can write it".into(),
        },
        StoreError::Unsafe {
            path: path(),
            why: "it is a link".into(),
        },
        refused(io(ErrorKind::StorageFull)),
        refused(io(ErrorKind::PermissionDenied)),
        refused(io(ErrorKind::ReadOnlyFilesystem)),
        refused(raw(libc::EMFILE)),
        refused(raw(libc::EIO)),
        StoreError::ReadOnly {
            what: "publish",
            path: path(),
        },
        StoreError::Missing {
            digest,
            path: path(),
        },
        StoreError::Corrupt {
            digest,
            path: path(),
            why: why.clone(),
        },
        StoreError::Record { path: path(), why },
        StoreError::Index {
            path: path(),
            source: rusqlite::Error::InvalidQuery,
        },
        StoreError::Older {
            path: path(),
            found: 0,
            known: 1,
        },
        StoreError::Schema { path: path() },
        StoreError::Row {
            path: path(),
            table: "objects",
        },
        StoreError::OldSqlite {
            found: "3.0.0".into(),
            needed: "3.51.3",
        },
        StoreError::BadPrefix("xyz".into()),
        StoreError::Unknown("abcd".into()),
        StoreError::Ambiguous {
            prefix: "abcd".into(),
            candidates: vec!["program abcde".into()],
        },
        StoreError::Dangling {
            what: "a program".into(),
            kind: "artifact",
            id: digest,
        },
        StoreError::NoRelease {
            model: "m".into(),
            seq: 3,
        },
        StoreError::BadName("\n".into()),
        StoreError::Changed { path: path() },
    ]
}

fn inspect_errors() -> Vec<Error> {
    let why = || "it ends too early".to_owned();
    vec![
        ForeignError::Io {
            path: path(),
            source: io(ErrorKind::NotFound),
        }
        .into(),
        ForeignError::NotAFile { path: path() }.into(),
        ForeignError::Unknown { path: path() }.into(),
        ForeignError::Malformed {
            path: path(),
            why: why(),
        }
        .into(),
        ForeignError::TooLarge {
            path: path(),
            why: why(),
        }
        .into(),
        stats::parse(b"[]").unwrap_err().into(),
        CountsError::Schema { found: 9 }.into(),
    ]
}

#[cfg(feature = "torch")]
fn runtime_errors() -> Vec<Error> {
    use std::sync::Arc;

    use crate::{
        Device,
        record::{Dtype, Sizes},
        runtime::{NoFit, Problem, RuntimeError as E},
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
    let mut all = vec![
        unreadable(StoreError::Unknown("abcd".into()).into()),
        unreadable("no".into()),
        E::NoDevice {
            device: Device::Cpu,
            reason: text(),
        },
        E::NoDevice {
            device: Device::Cuda(0),
            reason: text(),
        },
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
            reason: text(),
        },
        E::Unreadable {
            object: id,
            source: "no".into(),
        },
        E::Operators {
            artifact: id,
            reason: text(),
        },
        E::Operators {
            artifact: id,
            reason: "another library".into(),
        },
        E::NotLoadable {
            object: id,
            reason: "libtorch_python".into(),
        },
        E::NothingLeft {
            module: module.clone(),
            reason: text(),
        },
        E::MissingSymbol {
            object: id,
            name: "Run".into(),
        },
        E::NoContainer {
            artifact: id,
            reason: text(),
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
            reason: text(),
        },
        E::Upload {
            device: Device::Cpu,
            reason: text(),
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
            message: text(),
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
            message: text(),
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
        E::Array { reason: text() },
    ];
    all.extend(problems.map(bad_input));
    let mut all: Vec<Error> = all.into_iter().map(Into::into).collect();
    all.extend([
        TensorFileError::Format(safetensors::SafeTensorError::HeaderTooSmall).into(),
        TensorFileError::Dtype {
            name: "x".into(),
            dtype: "F4".into(),
        }
        .into(),
        TensorFileError::Torch {
            name: "x".into(),
            reason: text(),
        }
        .into(),
    ]);
    all
}

/// Returns the names of the variants of an error enum, as its source has them.
fn variants(source: &str, of: &str) -> BTreeSet<String> {
    let start = source.find(&format!("pub enum {of} {{")).unwrap();
    let body = &source[start..];
    let body = &body[..body.find("\n}").unwrap()];
    let names = body.lines().filter_map(|line| {
        let name = line.strip_prefix("    ")?;
        let end = name
            .find(|c: char| !c.is_ascii_alphanumeric())
            .unwrap_or(name.len());
        name.starts_with(|c: char| c.is_ascii_uppercase())
            .then(|| name[..end].to_owned())
    });
    names.collect()
}

/// Returns the name of the variant that a value is.
fn variant(error: &dyn std::fmt::Debug) -> String {
    let text = format!("{error:?}");
    let end = text
        .find(|c: char| !c.is_ascii_alphanumeric())
        .unwrap_or(text.len());
    text[..end].to_owned()
}

/// Holds that no variant of the enum was forgotten, and returns the samples as the command line gets them.
fn whole<E: std::error::Error + Send + Sync + 'static>(
    samples: Vec<E>,
    source: &str,
    name: &str,
) -> Vec<Error> {
    let sampled: BTreeSet<String> = samples.iter().map(|error| variant(error)).collect();
    assert_eq!(
        sampled,
        variants(source, name),
        "{name}: samples on the left, variants on the right"
    );
    samples.into_iter().map(Error::new).collect()
}

fn told(errors: Vec<Error>) -> String {
    let mut lines = String::new();
    for error in errors {
        let (code, hint) = judge(&error);
        assert!(
            !hint.is_empty() && !hint.ends_with('.') && !hint.contains('\n'),
            "{error}: {hint}"
        );
        lines += &format!("{code} {error}\n    {hint}\n");
    }
    lines
}

#[test]
fn every_error_of_the_build_says_what_to_do() {
    let plan = whole(
        plan_errors(),
        include_str!("../../plan/mod.rs"),
        "PlanError",
    );
    let build = whole(
        build_errors(),
        include_str!("../../build/error.rs"),
        "BuildError",
    );
    insta::assert_snapshot!("plan", told(plan));
    insta::assert_snapshot!("build", told(build));
}

#[test]
fn every_error_of_the_store_says_what_to_do() {
    let store = whole(
        store_errors(),
        include_str!("../../store/error.rs"),
        "StoreError",
    );
    insta::assert_snapshot!("store", told(store));
}

#[test]
fn every_error_of_a_look_says_what_to_do() {
    insta::assert_snapshot!("inspect", told(inspect_errors()));
    let sampled: BTreeSet<String> = inspect_errors().iter().map(|e| variant(&**e)).collect();
    let foreign = variants(include_str!("../../inspect/foreign/mod.rs"), "ForeignError");
    let counts = variants(include_str!("../../inspect/stats.rs"), "CountsError");
    assert_eq!(sampled, foreign.union(&counts).cloned().collect());
}

#[cfg(feature = "torch")]
#[test]
fn every_error_of_a_run_says_what_to_do() {
    insta::assert_snapshot!("runtime", told(runtime_errors()));
    let sampled: BTreeSet<String> = runtime_errors().iter().map(|e| variant(&**e)).collect();
    let runtime = variants(include_str!("../../runtime/error.rs"), "RuntimeError");
    let tensors = variants(include_str!("../../runtime/tensors.rs"), "TensorFileError");
    assert_eq!(sampled, runtime.union(&tensors).cloned().collect());
    let inputs = variants(include_str!("../../runtime/error.rs"), "Problem");
    let sampled = runtime_errors()
        .into_iter()
        .filter_map(|error| match error.downcast() {
            Ok(RuntimeError::BadInput { problem, .. }) => Some(variant(&problem)),
            _ => None,
        });
    assert_eq!(sampled.collect::<BTreeSet<_>>(), inputs);
}

#[test]
fn every_error_of_a_spec_says_what_to_do() {
    for error in whole(
        spec_errors(),
        include_str!("../../spec/error.rs"),
        "SpecError",
    ) {
        let error = error.downcast::<SpecError>().unwrap();
        assert!(error.render().contains("= help: "), "{}", error.render());
    }
}

#[test]
fn what_the_operating_system_refuses_says_what_to_do() {
    use anyhow::Context as _;
    for kind in [
        ErrorKind::NotFound,
        ErrorKind::PermissionDenied,
        ErrorKind::Other,
    ] {
        let error = Err::<(), _>(io(kind))
            .context("can't read `x`")
            .unwrap_err();
        let (code, hint) = judge(&error);
        assert_eq!(code, USAGE);
        assert!(!hint.is_empty());
    }
    assert_eq!(judge(&Error::msg("no such thing")).0, BUG);
}
