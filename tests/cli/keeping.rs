//! `precast gc`, `verify` and `release` on the real binary.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use precast::Store;

use crate::{sandbox::Ran, scene};

fn precast(store: &Path, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command.arg("--store").arg(store).args(args);
    Ran::new(command.output().unwrap(), store)
}

/// Damages an object of the scene, and returns its digest.
fn damaged(path: &Path, scene: &scene::Scene) -> String {
    let object = scene.artifacts[0].object.hex();
    let file = path.join(format!("objects/{}/{object}.zst", &object[..2]));
    scene::damage(&file, |bytes| bytes[20] ^= 1);
    object
}

fn store() -> (tempfile::TempDir, Store, scene::Scene) {
    let dir = scene::scratch();
    let store = Store::create(dir.path().join("store")).unwrap();
    let scene = scene::build(&store, &mut |_| {}).unwrap();
    (dir, store, scene)
}

#[test]
fn gc_prints_its_plan_and_then_does_it() {
    let (_dir, store, scene) = store();
    let path = store.path().to_owned();
    let one = scene::release("m", &[scene.programs[1].id], None);
    store.releases().put(&one).unwrap();
    let loose = store.objects().put_bytes(b"loose").unwrap();
    // Objects that this process put are leased while the store is open.
    let args = ["gc", "--unreleased", "--keep-releases", "1", "--dry-run"];
    precast(&path, &args).prints("would delete 1 release, 0 programs");
    drop(store);
    let dry = precast(&path, &args).exits(0);
    dry.prints("would delete 1 release, 1 program, 1 artifact");
    dry.prints("m encode batch=0  not in any release");
    dry.prints(&loose.short());
    let plan = precast(&path, &[&["--format", "json"], &args[..]].concat()).json();
    assert_eq!(
        plan["plan"]["programs"][0]["reason"]["kind"],
        "not_released"
    );
    let numbers = |output: &Ran| {
        let (_, numbers) = output.stdout.trim_end().rsplit_once("delete").unwrap();
        numbers.trim_start_matches('d').to_owned()
    };
    let done = precast(&path, &args[..4]);
    assert_eq!(numbers(&done), numbers(&dry).lines().last().unwrap());
    done.prints("deleted 1 release, 1 program, 1 artifact");
    let again = precast(&path, &args);
    again.prints("would delete 0 releases, 0 programs, 0 artifacts, 0 objects");
    precast(&path, &["gc", "--max-size", "1", "--dry-run"]).exits(1);
    precast(&path, &["gc", "--max-size", "big"]).exits(2);
}

#[test]
fn verify_names_defects_and_its_code_the_remaining_ones() {
    let (_dir, store, scene) = store();
    let path = store.path().to_owned();
    drop(store);
    let sound = precast(&path, &["verify"]);
    assert_eq!((sound.code, sound.stderr.as_str()), (0, ""));
    sound.prints("sound");
    // A repair that loses nothing: 0.
    fs::remove_file(path.join("CACHEDIR.TAG")).unwrap();
    precast(&path, &["verify"]).exits(1);
    precast(&path, &["verify", "--repair"]).exits(0);
    precast(&path, &["verify"]).exits(0);
    // A lost object has to be built again: 3.
    damaged(&path, &scene);
    let found = precast(&path, &["verify", "--format", "json"]).json();
    assert_eq!(found["defects"][0]["kind"], "object");
    assert_eq!(found["defects"][0]["needs"], "rebuild");
    precast(&path, &["verify", "--repair"])
        .exits(3)
        .says("precast build");
    scene::build(&Store::open(&path).unwrap(), &mut |_| {}).unwrap();
    precast(&path, &["verify"]).exits(0);
    // An index that is not one stops nobody from fixing it.
    fs::write(path.join("index.sqlite"), "x".repeat(5000)).unwrap();
    precast(&path, &["release", "rollback", "m"])
        .exits(1)
        .says("--reindex");
    precast(&path, &["verify", "--reindex"]).exits(0);
    precast(&path, &["verify"]).exits(0);
}

#[test]
fn du_and_the_report_count_what_gc_counts() {
    let (dir, store, scene) = store();
    store.objects().put_bytes(b"unpacked").unwrap();
    let weights = scene.artifacts[0].object;
    let key = precast::Digest::of(b"a computation");
    let kept = store.prepacked().put(&weights, &key, &[&[7; 5000]]);
    drop(kept.unwrap().unwrap());
    drop(store.objects().map(&weights).unwrap());
    let path = store.path().to_owned();
    drop(store);
    let usage = precast(&path, &["du", "--format", "json"]).json();
    let of = |field: &str| usage[field].as_u64().unwrap();
    assert!(of("prepacked") >= 5000 && of("unpacked") > 0, "{usage}");
    let plan = precast(&path, &["gc", "--dry-run", "--format", "json"]).json();
    let all = of("prepacked") + of("unpacked") + usage["total"]["stored"].as_u64().unwrap();
    assert_eq!(plan["plan"]["before"], all);
    precast(&path, &["du"]).prints("(prepacked)");
    let page = dir.path().join("page.html");
    let page = page.to_str().unwrap();
    precast(&path, &["report", "-o", page]).exits(0);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains(" are prepacked weights"));
}

#[test]
fn the_age_of_a_copy_is_that_of_its_records() {
    let (_dir, store, scene) = store();
    let path = store.path().to_owned();
    drop(store);
    let long_ago = SystemTime::now() - Duration::from_secs(40 * 24 * 3600);
    let then = long_ago.duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    // A record of a build 40 days ago, whose file is new: as `cp -r` leaves it, without the index.
    let id = scene.programs[0].id;
    let store = Store::open(&path).unwrap();
    let mut program = store.records().program(&id).unwrap().unwrap();
    program.id = precast::Digest::of(b"older");
    program.provenance.created = Some(then);
    store.records().put_program(&program).unwrap();
    drop(store);
    let ages = || -> Vec<i64> {
        let listed = precast(&path, &["ls", "--older", "39d", "--format", "json"]).json();
        let rows = listed["programs"].as_array().unwrap().iter();
        rows.map(|row| row["created"].as_i64().unwrap()).collect()
    };
    assert_eq!(ages(), [then]);
    fs::remove_file(path.join("index.sqlite")).unwrap();
    precast(&path, &["verify", "--reindex"]).exits(0);
    assert_eq!(ages(), [then]);
    precast(&path, &["gc", "--keep-days", "39", "--dry-run"]).prints(&program.id.short());
}

#[test]
fn of_many_defects_the_gravest_come_first_and_of_one_kind_a_few() {
    let (_dir, store, scene) = store();
    let path = store.path().to_owned();
    drop(store);
    for at in 0..60 {
        fs::write(path.join(format!("tmp/left-{at}")), "x").unwrap();
        fs::write(path.join(format!("objects/odd-{at}")), "x").unwrap();
    }
    let object = damaged(&path, &scene);
    let found = precast(&path, &["verify"]).exits(1);
    let lines: Vec<&str> = found.stdout.lines().collect();
    let first = lines[0].starts_with("rebuild") && lines[0].contains(&object);
    assert!(first && lines.len() < 16, "{}", found.stdout);
    found.prints("repair  … and 57 more of this kind");
    found.says("`-v` lists every defect");
    let all = precast(&path, &["verify", "-v"]);
    assert!(all.stdout.lines().count() > 120, "{}", all.stdout);
}

#[test]
fn leftovers_of_killed_processes_are_no_failure() {
    let (_dir, store, _) = store();
    let path = store.path().to_owned();
    drop(store);
    fs::create_dir(path.join("tmp/1-dead")).unwrap();
    fs::write(path.join("tmp/1-dead/half"), "x").unwrap();
    fs::write(path.join("tmp/left"), "x").unwrap();
    fs::write(path.join("leases/1-dead.lease"), "").unwrap();
    precast(&path, &["verify"]).exits(0);
    precast(&path, &["verify", "--repair"]).exits(0);
    precast(&path, &["verify"]).prints("sound");
}

/// A gc that was killed at any of its steps leaves nothing that `verify` calls a defect.
#[cfg(feature = "sync-points")]
#[test]
fn a_killed_gc_leaves_litter_alone() {
    for point in [
        "gc:release-removed",
        "gc:marked",
        "gc:bytes-deleted",
        "gc:rows-deleted",
    ] {
        let (dir, store, scene) = store();
        let one = scene::release("m", &[scene.programs[1].id], None);
        store.releases().put(&one).unwrap();
        store.objects().put_bytes(b"loose").unwrap();
        let path = store.path().to_owned();
        drop(store);
        let at = |end: &str| dir.path().join(format!("{point}.{end}"));
        fs::write(at("stop"), "").unwrap();
        let mut gc = Command::new(env!("CARGO_BIN_EXE_precast"));
        gc.arg("--store").arg(&path).env("PRECAST_SYNC", dir.path());
        gc.args(["gc", "--unreleased", "--keep-releases", "1"]);
        let mut gc = gc.spawn().unwrap();
        while !at("here").exists() {
            assert!(gc.try_wait().unwrap().is_none(), "{point} never came");
            std::thread::sleep(Duration::from_millis(2));
        }
        gc.kill().unwrap();
        gc.wait().unwrap();
        eprintln!("{point}");
        let found = precast(&path, &["verify"]).exits(0);
        assert!(!found.stdout.contains("which is not there") || point == "gc:release-removed");
        precast(&path, &["verify", "--repair"])
            .exits(0)
            .prints(" 0 files set aside");
        precast(&path, &["verify"]).prints("sound");
    }
}
