//! Kills, power cuts and failures at every write-class call, and the state that the next process finds.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::Duration,
};

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
pub fn survives(root: &Path, acks: &str, lost: bool) -> Result<(), String> {
    let message = |e: precast::StoreError| scene::chain(&e);
    let store = Store::create(root).map_err(message)?;
    for ack in acks.lines() {
        promised(&store, ack).map_err(|why| format!("promised `{ack}`: {why}"))?;
    }
    let found = store.audit().verify().map_err(message)?;
    let harmless = |defect: &Defect| {
        let row = matches!(defect, Defect::Unindexed { .. } | Defect::Dangling { .. });
        let rebuild = lost && defect.needs() == Needs::Rebuild;
        defect.needs() == Needs::Sweep || row || rebuild
    };
    if let Some(bad) = found.defects.iter().find(|defect| !harmless(defect)) {
        return Err(format!("left {bad:?}"));
    }
    if !lost && store.releases().get("m", None).map_err(message)?.is_some() {
        scene::check(&store).map_err(|why| format!("a release that is not whole: {why}"))?;
    }
    scene::build(&store, &mut |_| {}).map_err(message)?;
    scene::check(&store).map_err(|why| format!("after building again: {why}"))?;
    store.collector().recover().map_err(message)?;
    drop(store);
    let store = Store::open(root).map_err(message)?;
    let left = store.audit().verify().map_err(message)?.defects;
    // Files that a kill left before they had a lease to belong to are kept for an hour.
    match left
        .iter()
        .find(|defect| !matches!(defect, Defect::Stale { .. }))
    {
        None => Ok(()),
        Some(bad) => Err(format!("after building again: {bad:?}")),
    }
}

fn promised(store: &Store, ack: &str) -> Result<(), String> {
    let message = |e: precast::StoreError| scene::chain(&e);
    let words: Vec<&str> = ack.split(' ').collect();
    let id = || words[1].parse::<Digest>().map_err(|e| e.to_string());
    let there = match words[0] {
        "object" => store.objects().read(&id()?).map(|_| true),
        "artifact" => store
            .records()
            .artifact(&id()?)
            .map(|found| found.is_some()),
        "program" => store.records().program(&id()?).map(|found| found.is_some()),
        "failure" => store.records().failure(&id()?).map(|found| found.is_some()),
        "release" => store
            .releases()
            .get(words[1], None)
            .map(|found| found.is_some()),
        other => return Err(format!("what is `{other}`")),
    };
    match there.map_err(message)? {
        true => Ok(()),
        false => Err("it is gone".into()),
    }
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
            store
                .releases()
                .put(&scene::release(
                    "m",
                    &[scene.programs[1].id],
                    Some(scene.weights),
                ))
                .unwrap();
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
pub struct Start {
    dir: tempfile::TempDir,
    name: &'static str,
    pub calls: u64,
}

impl Start {
    pub fn new(name: &'static str) -> Self {
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
    pub fn at(&self, mode: &str, at: u64, errno: i32) -> Result<(), String> {
        let (_dir, root) = self.copy();
        let shim = vec![
            ("MODE", mode.to_owned()),
            ("AT", at.to_string()),
            ("ERRNO", errno.to_string()),
        ];
        let output = Act::new(self.name, &root).under(shim).run();
        let what = format!("{} {mode} at {at} (errno {errno})", self.name);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let fails = mode == "fail" || mode == "ever";
        let right = match output.status.code() {
            // A call that writes nothing can't be cut.
            Some(0) => fails || mode == "short",
            Some(actor::TOLD) => fails && stderr.contains(&*root.display().to_string()),
            Some(_) => false,
            None => !fails && actor::killed(output.status),
        };
        if !right {
            return Err(format!("{what}: ended with {}: {stderr}", output.status));
        }
        let acks = fs::read_to_string(root.with_extension("ack")).unwrap_or_default();
        let acks = if matches!(self.name, "gc" | "repair") {
            ""
        } else {
            &acks
        };
        if self.name == "repair" {
            // A repair that was cut off is finished by the next one.
            let output = Act::new("repair", &root).run();
            actor::well(&output).map_err(|why| format!("{what}: {why}"))?;
        }
        survives(&root, acks, self.name == "repair").map_err(|why| format!("{what}: {why}"))
    }

    /// Delays call `at` while another process builds or collects; returns the defect that is left.
    pub fn delayed(&self, at: u64, other: &str) -> Result<(), String> {
        let (_dir, root) = self.copy();
        let what = format!("{} delayed at {at} against {other}", self.name);
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
            actor::well(&output).map_err(|why| format!("{what}: {why}"))?;
        }
        survives(&root, "", false).map_err(|why| format!("{what}: {why}"))
    }

    /// Delays every `stride`-th call against each of `others`.
    pub fn sweep_delayed(&self, others: &[&'static str], stride: u64, tried: &mut Tally) {
        let trials: Vec<(u64, &str)> = (1..=self.calls)
            .step_by(stride as usize)
            .flat_map(|at| others.iter().map(move |other| (at, *other)))
            .collect();
        tried.add("points", trials.len() as u64);
        tried.bad.extend(spread::each(&trials, |(at, other)| {
            self.delayed(*at, other)
        }));
    }

    /// Does `mode` at every `stride`-th call.
    pub fn sweep(&self, mode: &str, errno: i32, stride: u64, tried: &mut Tally) {
        let points: Vec<u64> = (1..=self.calls).step_by(stride as usize).collect();
        tried.add("points", points.len() as u64);
        tried.add("states", points.len() as u64);
        tried
            .bad
            .extend(spread::each(&points, |at| self.at(mode, *at, errno)));
    }
}
