//! `precast gc`, `verify` and `release` on the real binary.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use precast::Store;
use serde_json::Value;

use crate::{sandbox::Ran, scene};

fn precast(store: &Path, args: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command.arg("--store").arg(store).args(args);
    Ran::new(command.output().unwrap(), store)
}

fn json(ran: &Ran) -> Value {
    serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.text()))
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
    let held = precast(&path, &args);
    held.prints("would delete 1 release, 0 programs");
    drop(store);
    let dry = precast(&path, &args);
    assert_eq!(dry.code, 0);
    dry.prints("would delete 1 release, 1 program, 1 artifact");
    dry.prints("m encode batch=0  not in any release");
    dry.prints(&loose.short());
    let plan = json(&precast(
        &path,
        &[
            "--format", "json", args[0], args[1], args[2], args[3], args[4],
        ],
    ));
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
    assert_eq!(
        precast(&path, &["gc", "--max-size", "1", "--dry-run"]).code,
        1
    );
    assert_eq!(precast(&path, &["gc", "--max-size", "big"]).code, 2);
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
    assert_eq!(precast(&path, &["verify"]).code, 1);
    assert_eq!(precast(&path, &["verify", "--repair"]).code, 0);
    assert_eq!(precast(&path, &["verify"]).code, 0);
    // A lost object has to be built again: 3.
    let object = scene.artifacts[0].object.hex();
    scene::damage(
        &path.join(format!("objects/{}/{object}.zst", &object[..2])),
        |b| b[20] ^= 1,
    );
    let found = json(&precast(&path, &["verify", "--format", "json"]));
    assert_eq!(found["defects"][0]["kind"], "object");
    assert_eq!(found["defects"][0]["needs"], "rebuild");
    let repaired = precast(&path, &["verify", "--repair"]);
    assert_eq!(repaired.code, 3, "{}", repaired.stdout);
    repaired.says("precast build");
    scene::build(&Store::open(&path).unwrap(), &mut |_| {}).unwrap();
    assert_eq!(precast(&path, &["verify"]).code, 0);
    // An index that is not one stops nobody from fixing it.
    fs::write(path.join("index.sqlite"), "x".repeat(5000)).unwrap();
    let output = precast(&path, &["release", "rollback", "m"]);
    assert_eq!(output.code, 1);
    output.says("--reindex");
    assert_eq!(precast(&path, &["verify", "--reindex"]).code, 0);
    assert_eq!(precast(&path, &["verify"]).code, 0);
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
    let usage = json(&precast(&path, &["du", "--format", "json"]));
    let of = |field: &str| usage[field].as_u64().unwrap();
    assert!(of("prepacked") >= 5000 && of("unpacked") > 0, "{usage}");
    let plan = json(&precast(&path, &["gc", "--dry-run", "--format", "json"]));
    let all = of("prepacked") + of("unpacked") + usage["total"]["stored"].as_u64().unwrap();
    assert_eq!(plan["plan"]["before"], all);
    precast(&path, &["du"]).prints("(prepacked)");
    let page = dir.path().join("page.html");
    let page = page.to_str().unwrap();
    assert_eq!(precast(&path, &["report", "-o", page]).code, 0);
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
        let listed = json(&precast(
            &path,
            &["ls", "--older", "39d", "--format", "json"],
        ));
        let rows = listed["programs"].as_array().unwrap().iter();
        rows.map(|row| row["created"].as_i64().unwrap()).collect()
    };
    assert_eq!(ages(), [then]);
    fs::remove_file(path.join("index.sqlite")).unwrap();
    assert_eq!(precast(&path, &["verify", "--reindex"]).code, 0);
    assert_eq!(ages(), [then]);
    let plan = precast(&path, &["gc", "--keep-days", "39", "--dry-run"]);
    plan.prints(&program.id.short());
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
    let object = scene.artifacts[0].object.hex();
    scene::damage(
        &path.join(format!("objects/{}/{object}.zst", &object[..2])),
        |b| b[20] ^= 1,
    );
    let found = precast(&path, &["verify"]);
    assert_eq!(found.code, 1);
    let lines: Vec<&str> = found.stdout.lines().collect();
    assert!(
        lines[0].starts_with("rebuild") && lines[0].contains(&object),
        "{}",
        found.stdout
    );
    assert!(lines.len() < 16, "{}", found.stdout);
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
    let found = precast(&path, &["verify"]);
    assert_eq!(found.code, 0, "{}", found.stdout);
    let repaired = precast(&path, &["verify", "--repair"]);
    assert_eq!(repaired.code, 0, "{}{}", repaired.stdout, repaired.stderr);
    assert!(precast(&path, &["verify"]).stdout.contains("sound"));
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
        let mut gc = Command::new(env!("CARGO_BIN_EXE_precast"))
            .arg("--store")
            .arg(&path)
            .args(["gc", "--unreleased", "--keep-releases", "1"])
            .env("PRECAST_SYNC", dir.path())
            .spawn()
            .unwrap();
        while !at("here").exists() {
            assert!(gc.try_wait().unwrap().is_none(), "{point} never came");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        gc.kill().unwrap();
        gc.wait().unwrap();
        let found = precast(&path, &["verify"]);
        assert_eq!(found.code, 0, "{point}: {}", found.stdout);
        assert!(!found.stdout.contains("which is not there") || point == "gc:release-removed");
        let repaired = precast(&path, &["verify", "--repair"]);
        assert_eq!(repaired.code, 0, "{point}: {}", repaired.stdout);
        assert!(
            repaired.stdout.contains(" 0 files set aside"),
            "{point}: {}",
            repaired.stdout
        );
        assert!(
            precast(&path, &["verify"]).stdout.contains("sound"),
            "{point}"
        );
    }
}
