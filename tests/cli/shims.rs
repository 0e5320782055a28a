//! The shim of a release: compiled once, named by the release, and refused unless it is the named one.

use std::{fs, path::PathBuf};

use precast::{Store, record::Release};

use crate::{
    sandbox::{EAGER, RUN, Sandbox, alive, assert_run, wait_until},
    scene::damage,
};

fn built() -> Sandbox {
    let sandbox = Sandbox::built();
    sandbox.rows(1);
    sandbox
}

fn newest(sandbox: &Sandbox) -> Release {
    let store = Store::open(sandbox.path("artifacts")).unwrap();
    store.releases().get("fake", None).unwrap().unwrap()
}

/// Puts another release with other shims, and removes those before it.
fn with_shims(sandbox: &Sandbox, change: impl Fn(&Store, &mut Release)) {
    let store = Store::open(sandbox.path("artifacts")).unwrap();
    let mut release = newest(sandbox);
    change(&store, &mut release);
    release.name = Some("changed".to_owned());
    assert!(store.releases().put(&release).unwrap().1);
    drop(store);
    sandbox.ok(&["gc", "--keep-releases", "1"]);
}

/// Puts another release with these bytes for its shim.
fn with_shim(sandbox: &Sandbox, bytes: &[u8]) {
    with_shims(sandbox, |store, release| {
        release.shims[0].object = store.objects().put_bytes(bytes).unwrap();
    });
}

#[test]
fn a_store_without_a_shim_gets_one_and_compiles_nothing_else() {
    let sandbox = built();
    assert_eq!(newest(&sandbox).shims.len(), 1);
    // As an earlier version of Precast left it.
    with_shims(&sandbox, |_, release| release.shims.clear());
    let without = sandbox.run(&RUN).exits(4);
    without.says("error: the release has no shim: an earlier version of Precast built it\n");
    let locked = sandbox.run(&["build", "--locked"]).exits(1);
    locked.says("error: no release has the shim for torch 2.11.0");
    locked.says(", and `--locked` forbids compiling\n");
    let ran = sandbox.ok(&["build"]);
    ran.says("\nfresh 2 of 3 programs are in the store, nothing to compile (");
    ran.says("\npublished fake release 3\n");
    sandbox.ok(&RUN);
    // The next one finds it.
    assert!(!sandbox.run(&["build"]).stderr.contains("shim"));
    sandbox.ok(&["verify"]);
}

#[test]
fn a_shim_of_other_sources_is_not_loaded() {
    let sandbox = built();
    with_shims(&sandbox, |store, release| {
        release.shims[0].source = precast::Digest::of(b"an earlier version's");
        let object = store.objects().put_bytes(b"an earlier version's shim");
        release.shims[0].object = object.unwrap();
    });
    sandbox
        .run(&RUN)
        .exits(4)
        .says("is of another version of Precast");
    sandbox.run(&["build"]).says("shim: torch");
    assert_eq!(newest(&sandbox).shims.len(), 1);
    sandbox.ok(&RUN);
}

#[test]
fn a_release_for_another_torch_alone_is_refused_before_anything_is_loaded() {
    let sandbox = built();
    with_shims(&sandbox, |_, release| {
        release.shims[0].torch = "2.10.0".to_owned();
    });
    let named = [&RUN[..], &["--model", "fake@changed"]].concat();
    sandbox.run(&named).exits(4).says("it has those for 2.10.0");
}

/// Returns the file of the shim.
fn object(sandbox: &Sandbox) -> PathBuf {
    let object = newest(sandbox).shims[0].object.hex();
    let folder = sandbox.path("artifacts/objects").join(&object[..2]);
    let named = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().contains(&object[2..]);
    let mut entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    entries.find(named).unwrap().path()
}

#[test]
fn a_damaged_shim_is_refused_and_found() {
    for cut in [true, false] {
        let sandbox = built();
        let file = object(&sandbox);
        damage(&file, |bytes| {
            let middle = bytes.len() / 2;
            match cut {
                true => bytes.truncate(middle),
                false => bytes[middle] ^= 1,
            }
        });
        sandbox.run(&RUN).exits(1).says("shim `");
        sandbox.run(&["verify"]).exits(1);
        fs::remove_file(&file).unwrap();
        sandbox.run(&RUN).exits(1).says("shim `");
        // A build compiles it again; a repair can't.
        sandbox.run(&["verify", "--repair"]).exits(3);
        sandbox.ok(&["build"]);
        sandbox.ok(&RUN);
    }
}

#[test]
fn other_objects_are_refused_as_shims() {
    let sandbox = built();
    let store = Store::open(sandbox.path("artifacts")).unwrap();
    // An artifact is a shared object, but no shim.
    let (records, id) = (store.records(), newest(&sandbox).programs[0]);
    let program = records.program(&id).unwrap().unwrap();
    let artifact = records
        .artifact(&program.steps[0].artifact)
        .unwrap()
        .unwrap();
    let library = store.objects().read(&artifact.object).unwrap().to_vec();
    drop(store);
    for (other, message) in [
        (&library[..], "it has no function `precast_"),
        (b"no shared object", "it is no shared object"),
    ] {
        with_shim(&sandbox, other);
        sandbox.run(&RUN).exits(1).says(message);
    }
}

#[test]
fn a_host_runs_the_gates_of_a_release() {
    let built = |eager: &str| {
        let sandbox = Sandbox::new();
        let mut build = sandbox.command(&["build", "-q"]);
        sandbox.output(build.env("FAKE_EAGER", eager)).exits(0);
        sandbox
    };
    let sandbox = built(EAGER);
    assert_run!(sandbox, ["verify", "--host"], @"
    passed  affine batch=1, at most 0.0e0 from eager
    passed  affine batch=4, at most 0.0e0 from eager
    ");
    assert_eq!(newest(&sandbox).seq, 1, "it has that torch already");
    crate::schemas::check("verify", &sandbox.json(&["verify", "--host"]));
    // An artifact that answers something else than this eager.
    let sandbox = built(&EAGER.replace("1.0", "1.5"));
    with_shims(&sandbox, |_, release| release.shims.clear());
    assert_run!(sandbox, ["verify", "--host"], @"
    exit code 1, stdout
    failed  affine batch=1: output `out` differs from eager in 3 of 3 elements (largest difference 5.000e-1, rtol 1.0e-4, atol 1.9e-5, cosine [NUMBER])
    failed  affine batch=4: output `out` differs from eager in 12 of 12 elements (largest difference 5.000e-1, rtol 1.0e-4, atol 4.9e-5, cosine [NUMBER])
    ");
    assert_eq!(newest(&sandbox).shims, [], "it may not run here");
    sandbox.run(&["verify", "--host", "other"]).exits(3);
}

/// Returns a shared object with this body of an initialiser.
fn initialiser(sandbox: &Sandbox, body: &str) -> Vec<u8> {
    let text = format!(
        "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
         __attribute__((constructor)) static void loaded(void) {{ {body} }}\n"
    );
    sandbox.write("object.c", text);
    let (file, source) = (sandbox.path("object.so"), sandbox.path("object.c"));
    let mut command = std::process::Command::new("cc");
    command
        .args(["-shared", "-fPIC", "-o"])
        .args([&file, &source]);
    assert!(command.status().unwrap().success());
    fs::read(file).unwrap()
}

#[test]
fn a_shim_that_crashes_when_it_is_loaded_is_an_error_and_takes_nothing_with_it() {
    let sandbox = built();
    let pid = sandbox.path("pid");
    let body = format!(
        "int child = fork(); if (child == 0) {{ sleep(600); _exit(0); }}\
         FILE* f = fopen(\"{}\", \"w\"); fprintf(f, \"%d\", child); fclose(f); abort();",
        pid.display()
    );
    let crashing = initialiser(&sandbox, &body);
    with_shim(&sandbox, &crashing);
    // The second time the first is remembered.
    let first = sandbox.run(&RUN);
    assert_run!(sandbox, RUN, @"
    exit code 1, stderr
    error: object `[ID]` is not loaded: a process tried to, and it ended with signal 6
    hint: build the program again; `precast verify` says whether its objects are whole
    ");
    assert_eq!(first.text(), sandbox.run(&RUN).text());
    let forked = fs::read_to_string(&pid).unwrap();
    wait_until("what it forked is left", || !alive(&forked));
}

#[test]
fn a_run_that_is_ended_while_it_waits_for_the_helper_ends_at_once_with_all_of_it() {
    let sandbox = built();
    let pid = sandbox.path("pid");
    let body = format!(
        "int child = fork(); if (child == 0) {{ sleep(600); _exit(0); }}\
         FILE* f = fopen(\"{0}.new\", \"w\"); fprintf(f, \"%d\", child); fclose(f); \
         rename(\"{0}.new\", \"{0}\"); sleep(600);",
        pid.display()
    );
    let hanging = initialiser(&sandbox, &body);
    with_shim(&sandbox, &hanging);
    for (signal, code) in [("-TERM", Some(130)), ("-INT", Some(130)), ("-KILL", None)] {
        let _ = fs::remove_file(&pid);
        let mut child = sandbox.command(&RUN).spawn().unwrap();
        wait_until("the helper loaded nothing", || pid.exists());
        let grandchild = fs::read_to_string(&pid).unwrap();
        assert!(alive(&grandchild));
        let args = [signal, &child.id().to_string()];
        let sent = std::process::Command::new("kill").args(args).status();
        assert!(sent.unwrap().success());
        let begun = std::time::Instant::now();
        assert_eq!(child.wait().unwrap().code(), code, "{signal}");
        // The helper itself has a minute.
        assert!(begun.elapsed().as_secs() < 55, "{signal}");
        wait_until("it is left", || !alive(&grandchild));
    }
    let known = fs::read_to_string(sandbox.path("artifacts/cache/loads")).unwrap();
    assert!(!known.contains("it "), "{known}");
}
