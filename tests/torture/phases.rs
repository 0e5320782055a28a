//! Two processes at once, one of them stopped at each of its phases. Needs the feature `sync-points`.

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

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

fn ended(child: Child, what: &str, bad: &mut Vec<String>) {
    let ended = actor::well(&child.wait_with_output().unwrap());
    bad.extend(ended.err().map(|why| format!("{what}: {why}")));
}

/// Stops `first` at `point`, lets `second` run against it, then lets both end; returns the failures. With `damaged` an
/// object is damaged before.
fn against(first: &str, point: &str, second: &str, damaged: bool) -> Vec<String> {
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
            let stderr = one.wait_with_output().unwrap().stderr;
            let stderr = String::from_utf8_lossy(&stderr);
            return vec![format!("{first} never came to {point}: {stderr}")];
        }
        thread::sleep(Duration::from_millis(1));
    }
    let mut bad = Vec::new();
    let what = format!("{second} while {first} stands at {point}");
    if second == "reader" {
        thread::scope(|scope| {
            let reading = scope.spawn(|| read(&root));
            thread::sleep(GRACE);
            fs::write(sync.join(format!("{point}.go")), "").unwrap();
            bad.extend(
                reading
                    .join()
                    .unwrap()
                    .err()
                    .map(|why| format!("{what}: {why}")),
            );
        });
    } else {
        let mut two = spawn(second, &root, &sync);
        let begun = Instant::now();
        while two.try_wait().unwrap().is_none() && begun.elapsed() < GRACE {
            thread::sleep(Duration::from_millis(1));
        }
        fs::write(sync.join(format!("{point}.go")), "").unwrap();
        ended(two, &what, &mut bad);
    }
    ended(one, &format!("{first} with {second} at {point}"), &mut bad);
    // Rebuilt parts stay.
    let built = second == "build";
    bad.extend(
        crash::survives(&root, "", damaged && !built)
            .err()
            .map(|why| format!("{what}: {why}")),
    );
    bad
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
        let first = if point.starts_with("claim") {
            "builder"
        } else {
            "build"
        };
        for second in ["reader", "build", "builder", "gc", "repair", "verify"] {
            trials.push((first, point, second, false));
        }
    }
    // Half of a trial is waiting.
    let tried = |&(first, point, second, damaged): &(&str, &str, &str, bool)| {
        let bad = against(first, point, second, damaged);
        match bad.is_empty() {
            true => Ok(()),
            false => Err(bad.join("\n")),
        }
    };
    spread::over(spread::jobs().max(3), &trials, tried)
}

/// A reader never loses held objects; it may get an error at once when one is gone.
fn read(root: &Path) -> Result<(), String> {
    let message = |e: StoreError| scene::chain(&e);
    let store = Store::open(root).map_err(message)?;
    for release in store.releases().all("m").map_err(message)? {
        let hold = match store.releases().hold(&release) {
            Ok(hold) => hold,
            Err(StoreError::Dangling { .. }) => continue,
            Err(e) => return Err(message(e)),
        };
        for _ in 0..100 {
            for id in &release.programs {
                let program = store
                    .records()
                    .program(id)
                    .map_err(message)?
                    .ok_or("a held program is gone")?;
                for step in &program.steps {
                    let artifact = store.records().artifact(&step.artifact).map_err(message)?;
                    store
                        .objects()
                        .read(&artifact.ok_or("a held artifact is gone")?.object)
                        .map_err(message)?;
                }
            }
            thread::sleep(Duration::from_millis(3));
        }
        drop(hold);
    }
    // The newest release is never half there.
    scene_is_whole(&store)
}

fn scene_is_whole(store: &Store) -> Result<(), String> {
    match store
        .releases()
        .get("m", None)
        .map_err(|e| scene::chain(&e))?
    {
        None => Ok(()),
        Some(release) => store
            .releases()
            .hold(&release)
            .map(drop)
            .map_err(|e| scene::chain(&e)),
    }
}
