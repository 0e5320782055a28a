//! A build restores lost files: each file of a store is deleted or damaged, and `build` alone makes the store serve
//! again.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

use crate::sandbox::{Ran, Sandbox, assert_ran, assert_run};

/// The folders of what a build publishes.
const KINDS: [&str; 6] = [
    "objects",
    "artifacts",
    "programs",
    "releases",
    "failures",
    "ready",
];

/// A sandbox whose model is built at one bucket. Its eager program has failed.
fn built() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.edit("precast.toml", "batch = [1, 4]", "batch = [4]");
    sandbox.ok(&["build", "-q"]);
    sandbox.rows(4);
    answers(&sandbox);
    sandbox
}

fn answers(sandbox: &Sandbox) {
    let expected: Vec<f32> = (0..12).map(|i| 2.0 * i as f32 + 1.0).collect();
    assert_eq!(sandbox.answer(&[]), expected);
}

/// Returns every file of the store that a build publishes, relative to it.
fn files(sandbox: &Sandbox) -> Vec<PathBuf> {
    let all = KINDS.map(|folder| sandbox.files(&format!("artifacts/{folder}")));
    let store = sandbox.path("artifacts");
    let inside = |path: PathBuf| path.strip_prefix(&store).unwrap().to_owned();
    let mut files: Vec<PathBuf> = all.into_iter().flatten().map(inside).collect();
    files.push("index.sqlite".into());
    files
}

/// Replaces the store by a copy of another one.
fn copy(from: &Path, to: &Sandbox) {
    let target = to.path("artifacts");
    let _ = fs::remove_dir_all(&target);
    let copied = Command::new("cp").arg("-a").arg(from).arg(&target).status();
    assert!(copied.unwrap().success());
}

fn damage(path: &Path, how: &str) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    match how {
        "deleted" => return fs::remove_file(path).unwrap(),
        "cut" => bytes.truncate(middle),
        _ => bytes[middle] ^= 0x55,
    }
    let sound = fs::metadata(path).unwrap().permissions();
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, sound).unwrap();
}

#[test]
fn a_build_makes_good_the_loss_of_any_one_file() {
    let sound = built();
    let store = sound.path("artifacts");
    let all = files(&sound);
    for kind in KINDS {
        let is_there = all.iter().any(|path| path.starts_with(kind));
        assert!(is_there, "{kind}: {all:?}");
    }
    // Each file is deleted; every other one is cut too, the rest changed.
    let damages = all.iter().zip(["cut", "changed"].iter().cycle());
    let trials = damages.flat_map(|(path, damage)| ["deleted", damage].map(|how| (path, how)));
    let trials = Mutex::new(trials);
    let next = || trials.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let sandbox = Sandbox::new();
                for name in ["precast.toml", "x.safetensors"] {
                    fs::copy(sound.path(name), sandbox.path(name)).unwrap();
                }
                while let Some((path, how)) = next() {
                    eprintln!("{} {how}", path.display());
                    copy(&store, &sandbox);
                    damage(&sandbox.path("artifacts").join(path), how);
                    sandbox.ok(&["build"]);
                    answers(&sandbox);
                    sandbox.ok(&["verify"]).prints("sound");
                }
            });
        }
    });
}

/// Returns the weight set of the newest release: its object and its unpacked file.
fn weights(sandbox: &Sandbox) -> [PathBuf; 2] {
    let releases = sandbox.json(&["release", "ls"]);
    let hex = releases["releases"][0]["weights"].as_str().unwrap();
    let store = sandbox.path("artifacts");
    let object = store.join(format!("objects/{}/{hex}.zst", &hex[..2]));
    [object, store.join(format!("ready/{}/{hex}", &hex[..2]))]
}

#[test]
fn lost_weights_come_back_without_python_where_they_are_somewhere() {
    // From the unpacked file, by a build and by a repair.
    let sandbox = built();
    sandbox.script("worker", "exit 1");
    let [object, ready] = weights(&sandbox);
    for how in ["deleted", "changed"] {
        damage(&object, how);
        sandbox.ok(&["build", "-q"]);
        sandbox.ok(&["verify"]);
        damage(&object, how);
        sandbox
            .ok(&["verify", "--repair"])
            .prints("1 object made again from `ready/`");
        assert!(ready.exists());
        answers(&sandbox);
    }
    // From the file that the spec names.
    let sandbox = Sandbox::new();
    sandbox.edit("precast.toml", "batch = [1, 4]", "batch = [4]");
    sandbox.weights_file();
    sandbox.tensors("w.safetensors", &[("scale", &[1], &[2.0])]);
    sandbox.ok(&["build", "-q"]);
    sandbox.script("worker", "exit 1");
    for path in weights(&sandbox) {
        fs::remove_file(path).unwrap();
    }
    sandbox.ok(&["build"]);
    sandbox.ok(&["verify"]);
}

#[test]
fn parts_that_a_repair_set_aside_are_rebuilt() {
    let sandbox = built();
    for path in weights(&sandbox) {
        fs::remove_file(path).unwrap();
    }
    let repaired = sandbox.run(&["verify", "--repair"]).exits(3);
    repaired.says("`precast build` makes what was lost again");
    sandbox.ok(&["build", "-q"]);
    answers(&sandbox);
    sandbox.ok(&["verify"]);
}

#[test]
fn a_lost_file_is_named_and_not_called_there() {
    let sandbox = built();
    for path in files(&sandbox) {
        if path.starts_with("artifacts") {
            fs::remove_file(sandbox.path("artifacts").join(path)).unwrap();
        }
    }
    assert_run!(sandbox, ["plan"], @"
    build  affine batch=4  artifact `[ID]` is missing or damaged
    skip  affine eager  the fake model has no dynamic dimensions
    1 of 1 programs would be built
    ");
    let locked = sandbox.run(&["build", "--locked"]).exits(1);
    locked.says("1 of 1 programs are missing");
    // Its gate runs again: the new artifact may have other bytes.
    sandbox.run(&["build"]).says("gate: affine batch=4");
    assert_eq!(sandbox.releases(), 1);
}

/// Runs a command where the store is on a read-only mount, or without the right to write it.
fn read_only(sandbox: &Sandbox, args: &[&str]) -> Ran {
    let mode = |mode| {
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(sandbox.path("artifacts"), permissions).unwrap();
    };
    let mut command = sandbox.command(args);
    let ran = if rustix::process::geteuid().is_root() {
        let own = command;
        command = Command::new("unshare");
        command.args(["--mount", "sh", "-c"]);
        command.arg("mount --bind artifacts artifacts && mount -o remount,ro,bind artifacts && exec \"$0\" \"$@\"");
        command
            .arg(own.get_program())
            .args(own.get_args())
            .env_clear();
        let set = own.get_envs();
        command.envs(set.filter_map(|(name, value)| Some((name, value?))));
        sandbox.output(command.current_dir(sandbox.path("")))
    } else {
        mode(0o555);
        sandbox.output(&mut command)
    };
    mode(0o755);
    ran
}

#[test]
fn a_store_that_is_read_only_is_noticed_before_a_worker_starts() {
    let sandbox = built();
    // A build that changes nothing writes nothing.
    read_only(&sandbox, &["build", "-q"]).exits(0);
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 3.0");
    assert_ran!(read_only(&sandbox, &["build"]), @"
    exit code 1, stderr
    plan: 2 of 2 programs are missing
    error: can't build: the store `artifacts` is read-only
    hint: mount it writable, or name another store with `--store`
    ");
}
