//! Artifacts that crash or hang when they are loaded: a process of its own meets them first.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use precast::{
    Device, Model, Runtime,
    runtime::{Rung, RuntimeError, Trial},
};

use crate::{
    fake::{Fake, Memory},
    flat, twice, x,
};

const HELPER: &str = env!("CARGO_BIN_EXE_precast");

/// Loads a small bucket that behaves so, and a larger one that is right.
fn load(behaviour: &'static str, trial: Trial) -> Result<Model, RuntimeError> {
    // Nobody else has loaded it in this process.
    let right = Fake {
        salt: 55,
        ..Fake::sized(4, 4)
    };
    let mut memory = Memory::with(&[right]);
    memory.add(
        "f",
        &Fake {
            behaviour,
            ..Fake::sized(2, 2)
        },
    );
    let runtime = Runtime::over(memory.source(), Device::Cpu)?;
    runtime.trial(trial).load("fake")
}

fn reason(model: &Model) -> String {
    let [lost] = &model.quarantined()[..] else {
        panic!("{:?}", model.quarantined());
    };
    let RuntimeError::Crashes { reason, .. } = &lost.error else {
        panic!("{}", lost.error);
    };
    // The ladder answers.
    let out = model.run("f", &[x(2, 2)]).unwrap();
    assert_eq!(out.served().rung(), Rung::Padded);
    assert_eq!(flat(&out[0]), flat(&twice(&x(2, 2))));
    reason.clone()
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).unwrap().lines().count()
}

#[test]
fn what_crashes_hangs_or_exits_when_it_is_loaded_is_set_aside_and_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let memory = folder.path().join("loads");
    let trial = || Trial::with(HELPER).remember(&memory);
    let crashes = load("INIT_CRASHES", trial()).unwrap();
    assert_eq!(reason(&crashes), "it ended with signal 6");
    assert_eq!(lines(&memory), 2, "the one that loads, too");
    let exits = load("INIT_EXITS", trial()).unwrap();
    assert_eq!(reason(&exits), "it ended with exit code 0");
    let begun = Instant::now();
    let hangs = load("INIT_HANGS", trial().limit(Duration::from_secs(3))).unwrap();
    assert_eq!(reason(&hangs), "it did not end within 3s");
    assert!(begun.elapsed() < Duration::from_secs(60));
    let known = lines(&memory);
    assert_eq!(known, 4);

    // The next start tries nothing: there is no helper that could.
    let trial = || Trial::with("/nowhere").remember(&memory);
    let again = load("INIT_CRASHES", trial()).unwrap();
    assert_eq!(reason(&again), "it ended with signal 6");
    assert_eq!(
        reason(&load("INIT_HANGS", trial()).unwrap()),
        "it did not end within 3s"
    );
    assert_eq!(lines(&memory), known);

    // A day later a failure is tried again, here with nothing that could.
    let old = fs::read_to_string(&memory).unwrap();
    let old = old.lines().map(|line| {
        let (line, _) = line.rsplit_once(' ').unwrap();
        format!("{line} 1\nno line of this file\n")
    });
    fs::write(&memory, old.collect::<String>()).unwrap();
    let again = load("INIT_EXITS", Trial::with("/bin/false").remember(&memory)).unwrap();
    assert_eq!(reason(&again), "it ended with exit code 1");
    assert_eq!(lines(&memory), 2 * known + 1);
}

#[test]
fn a_helper_that_can_not_be_started_keeps_nothing_from_loading() {
    let salted = Fake {
        salt: 77,
        ..Fake::sized(2, 2)
    };
    let runtime = Runtime::over(Memory::with(&[salted]).source(), Device::Cpu).unwrap();
    let model = runtime.trial(Trial::with("/nowhere")).load("fake").unwrap();
    assert!(model.quarantined().is_empty());
    assert!(model.run("f", &[x(2, 2)]).is_ok());
}
