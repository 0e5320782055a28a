//! The CUDA context is made while libtorch's CUDA half is loaded. A fake driver records its calls.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

use crate::sandbox::Sandbox;

struct Driver {
    sandbox: Sandbox,
    log: PathBuf,
}

impl Driver {
    fn new() -> Self {
        let sandbox = Sandbox::built();
        sandbox.tensors("x.safetensors", &[("x", &[4, 3], &[0.0; 12])]);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake/driver.c");
        let library = sandbox.path("libcuda.so.1");
        let built = (Command::new("g++").args(["-x", "c", "-shared", "-fPIC", "-o"]))
            .args([&library, &source])
            .status()
            .expect("g++ is installed");
        assert!(built.success(), "g++ compiles the fake driver");
        let log = sandbox.path("driver.log");
        Self { sandbox, log }
    }

    /// Runs a command with this driver; returns the driver's calls and the command's output.
    fn asked(&self, command: &mut Command) -> (String, String) {
        let _ = fs::remove_file(&self.log);
        command.env("FAKE_DRIVER_LOG", &self.log);
        command.env("LD_LIBRARY_PATH", self.sandbox.path(""));
        let ran = self.sandbox.output(command);
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        (log, ran.text())
    }
}

const RUN: [&str; 4] = ["run", "affine", "--inputs", "x.safetensors"];
const ONCE: &str = "init 0\ndevice 3\ncontext 103\n";

#[test]
fn two_cudas_in_one_process_are_refused() {
    let sandbox = Sandbox::built();
    sandbox.tensors("x.safetensors", &[("x", &[1, 3], &[0.0; 3])]);
    sandbox.write("empty.c", "");
    let other = sandbox.path("libcudart.so.1");
    let mut build = Command::new("g++");
    build
        .args(["-shared", "-o"])
        .args([&other, &sandbox.path("empty.c")]);
    assert!(build.status().unwrap().success());
    let run = [&RUN[..], &["--device", "cuda:0"]].concat();
    let ran = sandbox.output(sandbox.command(&run).env("LD_PRELOAD", &other));
    ran.exits(4)
        .says("the process has `[ROOT]/libcudart.so.1`, and torch 2.11.0");
}

#[test]
fn a_context_is_made_once_and_not_for_a_run_on_the_cpu() {
    let driver = Driver::new();
    let (asked, text) = driver.asked(&mut driver.sandbox.command(&RUN));
    assert_eq!(asked, "", "{text}");
    if Path::new("/dev/nvidiactl").exists() {
        let skipped = "a context is made once: skipped: libtorch would meet a driver that can do no more than this";
        let _ = writeln!(std::io::stderr(), "{skipped}");
        return;
    }
    let run = [&RUN[..], &["--device", "cuda:3"]].concat();
    let (asked, text) = driver.asked(&mut driver.sandbox.command(&run));
    assert_eq!(asked, ONCE, "{text}");
    assert!(
        text.contains("exit code 4") && text.contains("`cuda:3`"),
        "{text}"
    );
}
