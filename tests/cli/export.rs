//! `export`: the folder, its checks, and that it is there whole or not at all. The libraries are tiny ones.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::{
    sandbox::{Ran, Sandbox, assert_run, count, wait_until},
    schemas::check,
    wheels::{link, wheels},
};

fn export(sandbox: &Sandbox, args: &[&str]) -> Ran {
    let command = ["export", "--libtorch", "site-packages/torch"];
    sandbox.run(&[&command[..], args].concat())
}

/// Returns the names of the sandbox's own files and folders.
fn names(sandbox: &Sandbox) -> Vec<PathBuf> {
    let entries = fs::read_dir(sandbox.path("")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

/// Fails unless the sandbox has these files and folders and one more.
fn assert_added(sandbox: &Sandbox, mut before: Vec<PathBuf>, name: &str) {
    before.push(sandbox.path(name));
    before.sort();
    assert_eq!(names(sandbox), before);
}

#[test]
fn the_folder_has_the_program_the_store_and_the_libraries() {
    let sandbox = Sandbox::built();
    // A second release: only the newest one is copied, with its number.
    sandbox.edit("model.py", "SCALE = 2.0", "SCALE = 3.0");
    sandbox.ok(&["build", "-q"]);
    wheels(&sandbox);
    let before = names(&sandbox);
    let document = export(&sandbox, &["out/host", "fake", "--format", "json"])
        .exits(0)
        .json();
    check("export", &document);
    assert_eq!(document["written"], true);
    // Nothing else is left.
    assert_added(&sandbox, before, "out");
    assert_eq!(fs::read_dir(sandbox.path("out")).unwrap().count(), 1);
    let out = sandbox.path("out/host");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (mode(&out), mode(&out.join("bin/precast")) & 0o111),
        (0o755, 0o111)
    );
    let files = sandbox.files("out/host").into_iter();
    let files = files.map(|file| file.strip_prefix(&out).unwrap().display().to_string());
    let files: Vec<_> = files.filter(|file| !file.starts_with("store/")).collect();
    assert_eq!(
        files,
        [
            "bin/precast",
            "nvidia/cu13/lib/libcudart.so.13",
            "torch/lib/libc10.so",
            "torch/lib/libtorch_cpu.so",
            "torch/version.py"
        ]
    );

    let store = out.join("store");
    let store = store.to_str().unwrap();
    let verified = sandbox.json(&["verify", "--store", store]);
    assert_eq!(verified["defects"], serde_json::json!([]));
    let releases = sandbox.json(&["release", "ls", "--store", store]);
    let own = sandbox.json(&["release", "ls"]);
    assert_eq!(count(&releases["releases"]), 1);
    assert_eq!(releases["releases"][0], own["releases"][0]);
    assert_eq!(releases["releases"][0]["seq"], 2);

    // The copy needs nothing from outside.
    let there = sandbox.json(&[
        "deps",
        "-q",
        "--store",
        store,
        "--libtorch",
        "out/host/torch",
    ]);
    assert_eq!(there["missing"], serde_json::json!([]));
    for file in there["files"].as_array().unwrap() {
        let path = file["path"].as_str().unwrap();
        assert!(path.starts_with("[ROOT]/out/host/"), "{there:#}");
    }
}

#[test]
fn a_dry_run_prints_the_plan_and_writes_nothing() {
    let sandbox = Sandbox::built();
    wheels(&sandbox);
    let before = names(&sandbox);
    let dry = ["export", "out", "--libtorch", "site-packages/torch", "-n"];
    assert_run!(sandbox, dry, @"
    LIBRARY  SIZE  NEEDED BY  FOLDER
    libtorch_cpu.so  [SIZE]  precast  torch/lib
    libc10.so  [SIZE]  libtorch_cpu.so  torch/lib
    libcudart.so.13  [SIZE]  libtorch_cpu.so  nvidia/cu13/lib
    total  [SIZE]  3 files

    PART  SIZE
    bin/precast  [SIZE]  this program
    store  [SIZE]  fake@1: 8 objects
    libraries  [SIZE]  3 files
    total  [SIZE]
    ----- stderr
    [SIZE]; the Python environment of this torch has [SIZE]
    nothing was written: this is what `out` would get
    ");
    let document = export(&sandbox, &["out", "-n", "--format", "json"]).json();
    check("export", &document);
    assert_eq!(document["written"], false);
    assert_eq!(names(&sandbox), before);
}

#[test]
fn only_a_new_or_an_empty_folder_is_written() {
    let sandbox = Sandbox::built();
    wheels(&sandbox);
    fs::create_dir(sandbox.path("full")).unwrap();
    sandbox.write("full/mine", "text");
    sandbox.write("file", "text");
    std::os::unix::fs::symlink("nowhere", sandbox.path("link")).unwrap();
    let before = names(&sandbox);
    for (folder, why) in [
        ("full", "`full` is not empty"),
        ("file", "`file` is not a folder"),
        ("link", "`link` is a symbolic link to nothing"),
    ] {
        for args in [&[folder][..], &[folder, "-n"]] {
            export(&sandbox, args).exits(2).says(why);
        }
    }
    assert_eq!(names(&sandbox), before);
    assert_eq!(fs::read_dir(sandbox.path("full")).unwrap().count(), 1);
    fs::create_dir(sandbox.path("empty")).unwrap();
    export(&sandbox, &["empty"]).exits(0);
    assert!(sandbox.path("empty/bin/precast").exists());
}

#[test]
fn an_export_that_could_not_run_is_refused_and_leaves_nothing() {
    let sandbox = Sandbox::built();
    let torch = wheels(&sandbox);
    let before = names(&sandbox);
    // A search path of this machine alone.
    let other = sandbox.path("other");
    let rpath = format!("-rpath,{}:$ORIGIN", other.display());
    link(&torch.join("lib/libc10.so"), &["libown.so"], &[]);
    let missing = export(&sandbox, &["out", "fake"]).exits(2);
    missing.says("`libown.so` is missing, needed by libc10.so;");
    assert_eq!(names(&sandbox), before);

    // It is found by its absolute path here, and by `$ORIGIN` in the copy.
    let nowhere = ["-rpath,/nowhere"];
    link(&other.join("libown.so"), &["libfar.so"], &nowhere);
    link(&torch.join("lib/libc10.so"), &["libown.so"], &[&rpath]);
    link(&sandbox.path("far/libfar.so"), &[], &[]);
    let far = sandbox.path("far");
    let mut command = sandbox.command(&["export", "out", "--libtorch", "site-packages/torch"]);
    // In the copy nothing leads from it to the other one.
    let lost = sandbox.output(command.env("LD_LIBRARY_PATH", &far));
    lost.exits(2)
        .says("`libown.so` would not find `[ROOT]/far/libfar.so` in the folder");
    assert!(!sandbox.path("out").exists());
    link(&other.join("libown.so"), &[], &[]);
    export(&sandbox, &["out", "fake"]).exits(0);
    assert!(sandbox.path("out/torch/lib/libown.so").exists());

    let text = "__version__ = '2.99.0'\ncuda = None\ngit_version = 'abc'\n";
    fs::write(torch.join("version.py"), text).unwrap();
    let wrong = export(&sandbox, &["again"]).exits(2);
    wrong.says("torch 2.99.0 in");
    wrong.says("is not the one of the release");
}

#[test]
fn a_damaged_object_ends_it_and_nothing_is_left() {
    let sandbox = Sandbox::built();
    wheels(&sandbox);
    let before = names(&sandbox);
    let objects = sandbox.files("artifacts/objects").into_iter();
    let largest = objects
        .max_by_key(|file| fs::metadata(file).unwrap().len())
        .unwrap();
    crate::scene::damage(&largest, |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    });
    export(&sandbox, &["out"]).exits(1);
    assert_eq!(names(&sandbox), before);
}

#[cfg(feature = "sync-points")]
#[test]
fn a_killed_export_is_removed_by_the_next_one() {
    let sandbox = Sandbox::built();
    wheels(&sandbox);
    let before = names(&sandbox);
    let sync = tempfile::tempdir().unwrap();
    // In the copy: everything but the release is there.
    let point = "put:release-published";
    fs::write(sync.path().join(format!("{point}.stop")), "").unwrap();
    let args = ["export", "out", "--libtorch", "site-packages/torch"];
    let mut command = sandbox.command(&args);
    let mut killed = command.env("PRECAST_SYNC", sync.path()).spawn().unwrap();
    let here = sync.path().join(format!("{point}.here"));
    wait_until("the export copies", || here.exists());
    killed.kill().unwrap();
    killed.wait().unwrap();
    let with_a_part = names(&sandbox).len();
    assert_eq!(with_a_part, before.len() + 1);
    let ran = export(&sandbox, &["other"]).exits(0);
    ran.says("removed 1 folder of exports that were killed");
    assert_added(&sandbox, before, "other");
    assert!(!sandbox.path("other/owner").exists());
}
