//! Two processes at once, one of them stopped at each of its phases. Needs the feature `sync-points`.

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use precast::{Store, StoreError};

use crate::{
    actor::{self, Act},
    crash, scene, spread,
};

/// Where gc can be stopped.
const GC: [&str; 5] = [
    "gc:release-removed",
    "gc:before-batch",
    "gc:marked",
    "gc:bytes-deleted",
    "gc:rows-deleted",
];

/// Where a builder can be stopped.
const BUILD: [&str; 5] = [
    "lease:made",
    "put:object-published",
    "put:record-published",
    "put:release-published",
    "claim:locked",
];

/// Where a verification can be stopped.
const VERIFY: [&str; 2] = ["verify:looked", "verify:again"];

/// Where a repair can be stopped.
const REPAIR: [&str; 3] = ["repair:looked", "repair:found", "repair:set-aside"];

/// How long the other process gets while the first one stands still. It may have to wait: that is right as well.
const GRACE: Duration = Duration::from_millis(150);

fn spawn(name: &str, root: &Path, sync: &Path) -> Child {
    let mut command = Act::new(name, root).command();
    command
        .env("PRECAST_SYNC", sync)
        .env("PRECAST_ACTOR_SPECS", "2");
    if !sync.join("damaged").exists() {
        command.env("PRECAST_ACTOR_SOUND", "1");
    }
    command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn ended(child: Child) -> Result<()> {
    actor::well(&child.wait_with_output().unwrap())
}

/// Stops `first` at `point`, lets `second` run against it, then lets both end. With `damaged` an object is damaged
/// before.
fn against(first: &str, point: &str, second: &str, damaged: bool) -> Result<()> {
    let dir = scene::scratch();
    let root = dir.path().join("store");
    let sync = dir.path().join("sync");
    fs::create_dir(&sync).unwrap();
    crash::prepare("gc", &root);
    if first == "build" {
        // So that it has something to do.
        fs::remove_dir_all(&root).unwrap();
    }
    if first == "verify" {
        // A second look needs a suspicion.
        fs::write(root.join("tmp/litter"), "").unwrap();
    }
    if damaged {
        fs::write(sync.join("damaged"), "").unwrap();
        crash::damage_first(&root);
    }
    let _ = fs::create_dir(root.with_extension("compiles"));
    fs::write(sync.join(format!("{point}.stop")), "").unwrap();
    let mut one = spawn(first, &root, &sync);
    let start = Instant::now();
    while !sync.join(format!("{point}.here")).exists() {
        let over = one.try_wait().unwrap().is_some();
        if over || start.elapsed() > Duration::from_secs(600) {
            let _ = one.kill();
            ended(one)?;
            bail!("it never comes there");
        }
        thread::sleep(Duration::from_millis(1));
    }
    let go = || fs::write(sync.join(format!("{point}.go")), "").unwrap();
    let done = if second == "reader" {
        thread::scope(|scope| {
            let reading = scope.spawn(|| read(&root));
            thread::sleep(GRACE);
            go();
            reading.join().unwrap()
        })
    } else {
        let mut two = spawn(second, &root, &sync);
        let begun = Instant::now();
        while two.try_wait().unwrap().is_none() && begun.elapsed() < GRACE {
            thread::sleep(Duration::from_millis(1));
        }
        go();
        ended(two)
    };
    // Also where the other one failed.
    let first_done = ended(one);
    done.context("the second")?;
    first_done.context("the first")?;
    // Rebuilt parts stay.
    let built = second == "build";
    crash::survives(&root, "", damaged && !built)
}

/// Stops every process at every phase it has, against every other one; returns the failures.
pub fn everything() -> Vec<String> {
    let mut trials: Vec<(&str, &str, &str, bool)> = Vec::new();
    for (first, points) in [("gc", &GC[..]), ("verify", &VERIFY), ("repair", &REPAIR)] {
        for point in points {
            for second in ["reader", "build", "gc", "repair", "verify"] {
                trials.push((first, point, second, false));
            }
        }
    }
    for point in REPAIR {
        for second in ["build", "gc", "repair"] {
            trials.push(("repair", point, second, true));
        }
    }
    for point in BUILD {
        let first = match point.starts_with("claim") {
            true => "builder",
            false => "build",
        };
        for second in ["reader", "build", "builder", "gc", "repair", "verify"] {
            trials.push((first, point, second, false));
        }
    }
    // Half of a trial is waiting.
    let tried = |&(first, point, second, damaged): &(&str, &str, &str, bool)| {
        let done = against(first, point, second, damaged);
        done.with_context(|| format!("{second} while {first} stands at {point}"))
    };
    spread::over(spread::jobs().max(3), &trials, tried)
}

/// A reader never loses held objects; it may get an error at once when one is gone.
fn read(root: &Path) -> Result<()> {
    let store = Store::open(root)?;
    for release in store.releases().all("m")? {
        let hold = match store.releases().hold(&release) {
            Err(StoreError::Dangling { .. }) => continue,
            hold => hold?,
        };
        for _ in 0..100 {
            scene::read(&store, &release).context("of a held release")?;
            thread::sleep(Duration::from_millis(3));
        }
        drop(hold);
    }
    // The newest release is never half there.
    if let Some(newest) = store.releases().get("m", None)? {
        drop(store.releases().hold(&newest)?);
    }
    Ok(())
}
