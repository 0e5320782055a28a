//! Artifacts that crash or hang when they are loaded: a process of its own meets them first.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use precast::{
    Model,
    runtime::{RuntimeError, Trial, counters::Rung, errors::Quarantined},
};
use tempfile::TempDir;

use crate::{
    fake::{Fake, Memory},
    flat, twice, until, x,
};

const HELPER: &str = env!("CARGO_BIN_EXE_precast");

/// Loads a small bucket that behaves so, and a larger one that is right. The first load with a `salt` is the first of
/// the larger one in this process.
fn load(behaviour: &'static str, salt: u32, trial: Trial) -> Result<Model, RuntimeError> {
    let right = Fake::sized(4, 4).salted(salt);
    let mut memory = Memory::with(&[right]);
    memory.add("f", &Fake::sized(2, 2).behaving(behaviour));
    memory.runtime().trial(trial).load("fake")
}

/// Returns the error of the program that is set aside, while the ladder answers.
fn lost(model: &Model) -> Arc<Quarantined> {
    let mut lost = model.quarantined();
    assert_eq!((lost.len(), rung(model)), (1, Rung::Padded));
    lost.remove(0)
}

fn rung(model: &Model) -> Rung {
    let out = model.run("f", &[x(2, 2)]).unwrap();
    assert_eq!(flat(&out[0]), flat(&twice(&x(2, 2))));
    out.served().rung()
}

fn reason(model: &Model) -> String {
    match &lost(model).error {
        RuntimeError::Crashes { reason, .. } => reason.clone(),
        other => panic!("{other}"),
    }
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).unwrap().lines().count()
}

/// A file that remembers first loads, with the shim open: it is tried too.
fn memory() -> (TempDir, PathBuf) {
    drop(crate::ok(&[Fake::default()]));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("loads");
    (folder, path)
}

#[test]
fn objects_that_crash_or_hang_at_load_are_set_aside_and_remembered() {
    let (_folder, memory) = memory();
    let trial = || Trial::with(HELPER).remember(&memory);
    let crashes = load("INIT_CRASHES", 55, trial()).unwrap();
    assert_eq!(reason(&crashes), "it ended with signal 6");
    assert_eq!(lines(&memory), 2, "the one that loads, too");
    let hangs = load("INIT_HANGS", 55, trial().limit(Duration::from_secs(3))).unwrap();
    assert_eq!(reason(&hangs), "it did not end within 3s");
    let known = lines(&memory);
    assert_eq!(known, 3);

    // The next start tries nothing: there is no helper that could.
    let trial = || Trial::with("/nowhere").remember(&memory);
    let again = load("INIT_CRASHES", 55, trial()).unwrap();
    assert_eq!(reason(&again), "it ended with signal 6");
    let again = load("INIT_HANGS", 55, trial()).unwrap();
    assert_eq!(reason(&again), "it did not end within 3s");
    assert_eq!(lines(&memory), known);

    // A day later a failure is tried again.
    let old = fs::read_to_string(&memory).unwrap();
    let old = old.lines().map(|line| {
        let (line, _) = line.rsplit_once(' ').unwrap();
        format!("{line} 1\nno line of this file\n")
    });
    fs::write(&memory, old.collect::<String>()).unwrap();
    let again = load("INIT_CRASHES", 55, Trial::with(HELPER).remember(&memory)).unwrap();
    assert_eq!(reason(&again), "it ended with signal 6");
    assert_eq!(lines(&memory), 2 * known + 1);
}

#[test]
fn an_initialiser_that_ends_the_helper_as_if_all_were_well_forges_no_verdict() {
    let (_folder, memory) = memory();
    let model = load("INIT_EXITS", 56, Trial::with(HELPER).remember(&memory)).unwrap();
    let lost = lost(&model);
    let RuntimeError::Untried { reason, .. } = &lost.error else {
        panic!("{}", lost.error);
    };
    assert_eq!(reason, "ended with exit code 77");
    assert_eq!(lines(&memory), 1, "of the artifact that loads");
}

#[test]
fn whatever_else_ends_the_helper_is_tried_again_and_written_nowhere() {
    // Loaded once, it is not tried: the ladder answers with it.
    drop(crate::ok(&[Fake::sized(4, 4)]));
    let (folder, memory) = memory();
    let (script, enough) = (folder.path().join("helper"), folder.path().join("enough"));
    let small = Fake::sized(2, 2).salted(78);
    let load = |ending: &str| {
        let enough = enough.display();
        let text =
            format!("#!/bin/sh\nif [ -e {enough} ]; then exec {HELPER} \"$@\"; fi\n{ending}\n");
        fs::write(&script, text).unwrap();
        fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        let runtime = Memory::with(&[Fake::sized(4, 4), small.clone()]).runtime();
        let trial = Trial::with(&script).remember(&memory);
        runtime.trial(trial).load("fake").unwrap()
    };
    let run = format!("exec {HELPER} \"$@\"");
    let mut last = None;
    for (ending, reason) in [
        ("exit 1", "ended with exit code 1"),
        ("exit 77", "ended with exit code 77"),
        ("kill -KILL $$", "ended with signal 9"),
        ("kill -TERM $$", "ended with signal 15"),
        // A failure before the load is no fault of the object.
        ("kill -SEGV $$", "ended with signal 11"),
        ("echo loading; echo loaded; kill -ABRT $$", "signal 6"),
        (
            &format!("LIBTORCH=/nowhere {run}"),
            "exit code 2: libtorch can't be used",
        ),
        (&format!("ulimit -n 4; {run}"), "ended with exit code"),
        (&format!("ulimit -v 200000; {run}"), "ended with "),
    ] {
        let model = load(ending);
        let lost = lost(&model);
        let text = lost.error.to_string();
        assert_eq!(lost.error.name(), "Untried", "{ending}: {text}");
        assert!(text.contains(reason), "{ending}: {text}");
        assert!(lost.error.is_transient());
        assert!(!memory.exists() || lines(&memory) == 0, "{ending}");
        last = Some(model);
    }
    // The limit is lifted.
    fs::write(&enough, "").unwrap();
    let model = last.unwrap();
    until("the artifact answers", || rung(&model) == Rung::Exact);
    assert!(model.quarantined().is_empty());
    assert_eq!(lines(&memory), 1);
}

#[test]
fn a_wait_for_the_helper_ends_when_it_is_told_to() {
    let (_folder, memory) = memory();
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    let hour = Duration::from_secs(3600);
    let trial = Trial::with(HELPER).remember(&memory).limit(hour).stop(stop);
    let has_child = || {
        let mut threads = fs::read_dir("/proc/self/task").unwrap().flatten();
        let children = |thread: fs::DirEntry| fs::read(thread.path().join("children"));
        threads.any(|thread| children(thread).is_ok_and(|pids| !pids.is_empty()))
    };
    let teller = std::thread::spawn(move || {
        until("no helper starts", has_child);
        told.store(true, Ordering::Relaxed);
    });
    let error = load("INIT_HANGS", 57, trial).unwrap_err();
    assert_eq!(error.name(), "Interrupted", "{error}");
    teller.join().unwrap();
    assert!(!memory.exists() || !fs::read_to_string(&memory).unwrap().contains("did not end"));
}

#[test]
fn a_helper_that_can_not_be_started_keeps_nothing_from_loading() {
    let salted = Fake::sized(2, 2).salted(77);
    let runtime = Memory::with(&[salted]).runtime();
    let model = runtime.trial(Trial::with("/nowhere")).load("fake").unwrap();
    assert!(model.quarantined().is_empty());
    assert!(model.run("f", &[x(2, 2)]).is_ok());
}
