//! `kill -9` of `precast build` itself, with a fake worker, at any moment: the next build continues and finishes.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    process::{Command, Stdio},
};

use anyhow::{Result, ensure};

use crate::{actor, report::Tally, sandbox::Sandbox, scene::Random, spread};

/// Returns `precast build` under the shim. Its gate runs without: that unpacks weights into the store, and a gate that
/// is killed fails its program, not the build.
fn build(sandbox: &Sandbox, mode: &str, at: u64) -> Command {
    let mut command = sandbox.command(&["build", "-q"]);
    command
        .env("LD_PRELOAD", actor::shim())
        .env("SHIM_ROOT", sandbox.path("artifacts"))
        .env("SHIM_MODE", mode)
        .env("SHIM_ALONE", "1")
        .env("SHIM_AT", at.to_string())
        .stderr(Stdio::null());
    command
}

/// Counts the write-class calls of one build.
pub fn calls() -> u64 {
    let sandbox = Sandbox::new();
    let mut count = build(&sandbox, "count", 0);
    count.env("SHIM_OUT", sandbox.path("count"));
    assert!(count.status().unwrap().success());
    let text = fs::read_to_string(sandbox.path("count")).unwrap();
    text.trim().parse().unwrap()
}

/// Kills a build before its call `at` (`kill`) or in the middle of it (`short`); returns the failure of a later
/// command.
fn killed(mode: &str, at: u64) -> Result<bool> {
    let sandbox = Sandbox::new();
    let status = build(&sandbox, mode, at).status().unwrap();
    let killed = status.signal() == Some(9);
    let what = format!("precast build, {mode} at {at}");
    ensure!(killed || status.success(), "{what}: {status}");
    for (args, wanted) in [
        (&["build", "-q"][..], ""),
        (&["verify"], ""),
        (&["plan"], "0 of 2 programs"),
    ] {
        let ran = sandbox.run(args);
        let well = ran.code == 0 && ran.stdout.contains(wanted);
        ensure!(well, "{what}, then {args:?}: {}", ran.text());
    }
    Ok(killed)
}

/// Kills a build, which makes `calls` calls, at `points` seeded moments each way; counts those that died of it.
pub fn kills(calls: u64, points: u64, seed: u64) -> Tally {
    let mut random = Random(seed);
    // One in each of as many equal parts, so that no part of a build is left out.
    let trials: Vec<(&str, u64)> = (0..points)
        .map(|n| (calls * n / points, calls * (n + 1) / points))
        .map(|(from, to)| 1 + from + random.below((to - from) as usize) as u64)
        .flat_map(|at| [("kill", at), ("short", at)])
        .collect();
    let mut tried = spread::sum(&trials, |(mode, at)| {
        let mut tried = Tally::of(["killed"]);
        match killed(mode, *at) {
            Ok(killed) => tried.add("killed", killed.into()),
            Err(why) => tried.fail(why.to_string()),
        }
        tried
    });
    for count in ["points", "states"] {
        tried.set(count, trials.len() as u64);
    }
    tried
}
