//! No thread to be had: OpenMP would end the process.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use precast::runtime::{RuntimeError, Tensor};

use crate::{
    fake::{self, Fake},
    flat, ok, x,
};

const SCARCE: &str = "PRECAST_TEST_SCARCE";

/// So many elements that libtorch fills and copies them in parallel.
const LARGE: i64 = 400;

#[test]
fn a_call_that_finds_no_threads_is_an_error_and_the_next_one_is_answered() {
    match env::var_os(SCARCE) {
        Some(path) => without_threads(&PathBuf::from(path)),
        None => in_a_process_of_its_own(),
    }
}

fn in_a_process_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let library = fake::compiled("tests/fake/threads.c", &["-ldl".to_owned()]);
    let name = "threads::a_call_that_finds_no_threads_is_an_error_and_the_next_one_is_answered";
    let run = Command::new(env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("LD_PRELOAD", &library)
        .env(SCARCE, folder.path().join("scarce"))
        .env("OMP_NUM_THREADS", "4")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&run.stdout).into_owned();
    let told = told + &String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && told.contains("1 passed"), "{told}");
}

fn without_threads(scarce: &Path) {
    let model = ok(&[Fake::sized(LARGE, LARGE)]);
    // Each calling thread has a team of its own: this one makes its own here.
    let input = x(LARGE - 1, LARGE - 1);
    let clone = input.share();
    let call = |input: &Tensor| model.run("f", std::slice::from_ref(input));
    thread::scope(|scope| {
        let caller = scope.spawn(move || {
            fs::write(scarce, "").unwrap();
            for _ in 0..2 {
                let error = call(&clone).unwrap_err();
                let RuntimeError::NoThreads { wanted, found, .. } = error else {
                    panic!("{error}");
                };
                assert!(wanted > 1 && found == 1, "{wanted} {found}");
            }
            fs::remove_file(scarce).unwrap();
            let out = call(&clone).unwrap();
            // Its team is there: it needs no other.
            fs::write(scarce, "").unwrap();
            assert_eq!(flat(&call(&clone).unwrap()[0]), flat(&out[0]));
            assert_eq!(flat(&out[0])[..3], [0.0, 2.0, 4.0]);
        });
        caller.join().unwrap();
    });
    call(&input).unwrap();
}
