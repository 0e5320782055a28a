//! Errors of a spec, of a plan and of a build.

use super::{super::*, io, path};
use crate::{build::protocol::WorkerError, spec::Spec};

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

fn worker(code: &str) -> BuildError {
    BuildError::Worker(failure(code))
}

pub(super) fn spec_errors() -> Vec<SpecError> {
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
    all.push(SpecError::TooLarge {
        path: path(),
        most: 1 << 20,
    });
    all.push(Spec::parse("schema = 2", &path()).unwrap_err());
    all
}

pub(super) fn plan_errors() -> Vec<PlanError> {
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

pub(super) fn build_errors() -> Vec<BuildError> {
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
        "out_of_memory",
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
        BuildError::NoGate {
            program: path(),
            source: io(ErrorKind::NotFound),
        },
        BuildError::WrongTorch {
            program: path(),
            found: "2.0.0".into(),
            why: crate::target::Unfit::TooOld,
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
        BuildError::Disturbed {
            what: "it forked".into(),
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
            far: true,
        },
        BuildError::Spec(Box::new(Spec::parse("schema = 2", &path()).unwrap_err())),
        BuildError::BadWeights {
            path: path(),
            message: "it is no safetensors file".into(),
        },
        BuildError::Weights {
            path: path(),
            message: "it has no tensor `w`".into(),
        },
        BuildError::Chain {
            message: "`decode`, token 3 of a session: output `y` differs from eager's".into(),
        },
        BuildError::SourceChanged {
            path: "model.py".into(),
        },
        BuildError::UnsafeObject {
            of: "artifact",
            what: "it asks for an executable stack".into(),
        },
        BuildError::Locked {
            missing: 1,
            total: 2,
        },
        BuildError::OtherTorch {
            program: path(),
            found: "2.15.0+cu130".into(),
            wanted: "2.13.0+cu130".into(),
        },
        BuildError::LockedShim {
            torch: "2.11.0+cu130".into(),
        },
        BuildError::Incomplete {
            name: "v1".into(),
            missing: 1,
            total: 2,
        },
        BuildError::Lost {
            programs: (1..9)
                .map(|batch| format!("encode batch={batch}"))
                .collect(),
        },
        BuildError::Unanswered {
            modules: vec!["encode".into(), "decode(ids, image)".into()],
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
