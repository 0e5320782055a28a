//! Kills, power cuts and failures at every write-class call, and the state that the next process finds.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use precast::{
    Digest, Store,
    store::{Defect, Needs},
};

use crate::{
    actor::{self, Act},
    report::Tally,
    scene, spread,
};

/// Checks a store after a crash: it opens, keeps its promises, holds nothing half, and the next build finishes.
///
/// With `lost` something was damaged before the crash, so that the release can't be whole before the build.
pub fn survives(root: &Path, acks: &str, lost: bool) -> Result<()> {
    let store = Store::create(root)?;
    for ack in acks.lines() {
        promised(&store, ack).with_context(|| format!("promised `{ack}`"))?;
    }
    let found = store.audit().verify()?;
    let harmless = |defect: &Defect| {
        let row = matches!(defect, Defect::Unindexed { .. } | Defect::Dangling { .. });
        let rebuild = lost && defect.needs() == Needs::Rebuild;
        defect.needs() == Needs::Sweep || row || rebuild
    };
    let bad = found.defects.iter().find(|defect| !harmless(defect));
    ensure!(bad.is_none(), "left {bad:?}");
    if !lost && store.releases().get("m", None)?.is_some() {
        scene::check(&store).context("a release that is not whole")?;
    }
    scene::build(&store, &mut |_| {})?;
    scene::check(&store).context("after building again")?;
    store.collector().recover()?;
    drop(store);
    let left = Store::open(root)?.audit().verify()?.defects;
    // Files that a kill left before they had a lease to belong to are kept for an hour.
    let stale = |defect: &Defect| matches!(defect, Defect::Stale { .. });
    ensure!(left.iter().all(stale), "after building again: {left:?}");
    Ok(())
}

fn promised(store: &Store, ack: &str) -> Result<()> {
    let (kind, name) = ack.split_once(' ').unwrap();
    let id = || name.parse::<Digest>();
    let there = match kind {
        "object" => store.objects().read(&id()?).map(|_| true)?,
        "artifact" => store.records().artifact(&id()?)?.is_some(),
        "program" => store.records().program(&id()?)?.is_some(),
        "failure" => store.records().failure(&id()?)?.is_some(),
        "release" => {
            let (model, _) = name.split_once(' ').unwrap();
            store.releases().get(model, None)?.is_some()
        }
        other => bail!("what is `{other}`"),
    };
    ensure!(there, "it is gone");
    Ok(())
}

/// Changes a byte of the first artifact's object, so that its status says it too.
pub fn damage_first(root: &Path) {
    let scene = scene::build(&Store::open(root).unwrap(), &mut |_| {}).unwrap();
    let path = scene::object(root, &scene.artifacts[0].object);
    scene::damage(&path, |bytes| bytes[20] ^= 1);
    let file = fs::File::open(&path).unwrap();
    file.set_modified(std::time::SystemTime::now()).unwrap();
}

/// Makes the store that an actor starts from.
pub fn prepare(name: &str, root: &Path) {
    match name {
        "build" => {}
        "gc" | "rollback" => {
            actor::run_well("build", root);
            let store = Store::open(root).unwrap();
            let scene = scene::build(&store, &mut |_| {}).unwrap();
            // Another release that needs one program less, and things that nothing needs.
            let release = scene::release("m", &[scene.programs[1].id], Some(scene.weights));
            store.releases().put(&release).unwrap();
            store.objects().put_bytes(b"loose").unwrap();
        }
        "repair" => {
            actor::run_well("build", root);
            damage_first(root);
            fs::write(root.join("index.sqlite"), "x".repeat(5000)).unwrap();
        }
        _ => unreachable!(),
    }
}

/// Returns a store that `name` can start from, and how many write-class calls it makes from there.
struct Start {
    dir: tempfile::TempDir,
    name: &'static str,
    calls: u64,
}

impl Start {
    fn new(name: &'static str) -> Self {
        let dir = scene::scratch();
        let from = dir.path().join("from");
        fs::create_dir(&from).unwrap();
        prepare(name, &from.join("store"));
        let again = dir.path().join("counted");
        scene::copy(&from, &again);
        let calls = actor::count(name, &again.join("store"));
        Self { dir, name, calls }
    }

    /// Makes a fresh copy.
    fn copy(&self) -> (tempfile::TempDir, PathBuf) {
        let dir = scene::scratch();
        let to = dir.path().join("run");
        scene::copy(&self.dir.path().join("from"), &to);
        let _ = fs::remove_file(to.join("store.ack"));
        (dir, to.join("store"))
    }

    /// Runs the actor with a kill or a failure at call `at`; returns the defect that is left.
    fn at(&self, mode: &str, at: u64, errno: i32) -> Result<()> {
        let (_dir, root) = self.copy();
        let shim = vec![
            ("MODE", mode.to_owned()),
            ("AT", at.to_string()),
            ("ERRNO", errno.to_string()),
        ];
        let output = Act::new(self.name, &root).under(shim).run();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let fails = mode == "fail" || mode == "ever";
        let right = match output.status.code() {
            // A call that writes nothing can't be cut.
            Some(0) => fails || mode == "short",
            Some(actor::TOLD) => fails && stderr.contains(&*root.display().to_string()),
            Some(_) => false,
            None => !fails && actor::killed(output.status),
        };
        ensure!(right, "ended with {}: {stderr}", output.status);
        let acks = fs::read_to_string(root.with_extension("ack")).unwrap_or_default();
        let collects = matches!(self.name, "gc" | "repair");
        if self.name == "repair" {
            // A repair that was cut off is finished by the next one.
            actor::well(&Act::new("repair", &root).run())?;
        }
        let acks = if collects { "" } else { &acks };
        survives(&root, acks, self.name == "repair")
    }

    /// Delays call `at` while another process builds or collects; returns the defect that is left.
    fn delayed(&self, at: u64, other: &str) -> Result<()> {
        let (_dir, root) = self.copy();
        let shim = vec![("MODE", "delay".to_owned()), ("AT", at.to_string())];
        let mut slow = Act::new(self.name, &root).under(shim).command();
        let slow = slow.stdout(Stdio::null()).stderr(Stdio::piped());
        let slow = slow.spawn().unwrap();
        // While there is no store yet, there is nothing to collect.
        while !root.join("index.sqlite").exists() {
            thread::sleep(Duration::from_millis(1));
        }
        let fast = Act::new(other, &root).run();
        for output in [slow.wait_with_output().unwrap(), fast] {
            actor::well(&output)?;
        }
        survives(&root, "", false)
    }
}

/// Does each mode at every `stride`-th call of each actor.
pub fn swept(
    names: &[&'static str],
    modes: &[(&str, i32)],
    stride: impl Fn(&str, u64) -> u64,
) -> Tally {
    let mut tried = Tally::of(["points", "states"]);
    for name in names {
        let start = Start::new(name);
        assert!(start.calls > 10, "{name}: {}", start.calls);
        for (mode, errno) in modes {
            let points = (1..=start.calls).step_by(stride(mode, start.calls) as usize);
            let points: Vec<u64> = points.collect();
            tried.add("points", points.len() as u64);
            tried.add("states", points.len() as u64);
            tried.bad.extend(spread::each(&points, |at| {
                let done = start.at(mode, *at, *errno);
                done.with_context(|| format!("{name} {mode} at {at} (errno {errno})"))
            }));
        }
    }
    tried
}

/// Delays every `stride`-th call of a build and of a collection, against both.
pub fn delays(stride: impl Fn(u64) -> u64) -> Tally {
    let mut tried = Tally::of(["points", "states"]);
    for name in ["build", "gc"] {
        let start = Start::new(name);
        let points = (1..=start.calls).step_by(stride(start.calls) as usize);
        let trials: Vec<(u64, &str)> = points.flat_map(|at| [(at, "build"), (at, "gc")]).collect();
        tried.add("points", trials.len() as u64);
        tried.bad.extend(spread::each(&trials, |(at, other)| {
            let done = start.delayed(*at, other);
            done.with_context(|| format!("{name} delayed at {at} against {other}"))
        }));
    }
    tried
}
