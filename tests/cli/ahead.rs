//! A CUDA context that is begun before libtorch is there, with a driver that says what it was asked.

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

    /// Runs a command where this is the driver; returns what the driver was asked, and what the command printed.
    fn asked(&self, command: &mut Command) -> (String, String) {
        let _ = fs::remove_file(&self.log);
        command
            .env("FAKE_DRIVER_LOG", &self.log)
            .env("LD_LIBRARY_PATH", self.sandbox.path(""));
        let ran = self.sandbox.output(command);
        (
            fs::read_to_string(&self.log).unwrap_or_default(),
            ran.text(),
        )
    }

    fn torch(&self, arguments: &[&str]) -> Command {
        let like = self.sandbox.command(arguments);
        let mut command = Command::new(env!("CARGO_BIN_EXE_precast-torch"));
        let values = like
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?)));
        command
            .env_clear()
            .envs(values)
            .args(like.get_args())
            .current_dir(like.get_current_dir().unwrap());
        command
    }
}

const RUN: [&str; 4] = ["run", "affine", "--inputs", "x.safetensors"];
const ONCE: &str = "init 0\ndevice 3\ncontext 103\n";

/// Returns a command that fails before it makes a runtime, which would make the context as well.
fn without_inputs(device: &str) -> [&str; 6] {
    let inputs = "missing.safetensors";
    ["run", "affine", "--inputs", inputs, "--device", device]
}

#[test]
fn a_command_says_which_device_it_will_run_on() {
    let driver = Driver::new();
    let (asked, text) = driver.asked(&mut driver.sandbox.command(&without_inputs("cuda:3")));
    assert_eq!(asked, ONCE, "{text}");
    assert!(text.contains("missing.safetensors"), "{text}");
    let mut bench =
        driver
            .sandbox
            .command(&["bench", "no such", "--device", "cuda:3", "--seconds", "0"]);
    let (asked, text) = driver.asked(&mut bench);
    assert_eq!(asked, ONCE, "{text}");
}

#[test]
fn what_runs_on_the_cpu_asks_no_driver() {
    let driver = Driver::new();
    for command in [&without_inputs("cpu")[..], &RUN] {
        // Whoever started this one had a device.
        let mut command = driver.sandbox.command(command);
        let (asked, text) = driver.asked(command.env("PRECAST_CUDA_AHEAD", "3"));
        assert_eq!(asked, "", "{text}");
    }
}

#[test]
fn a_context_is_made_once() {
    if Path::new("/dev/nvidiactl").exists() {
        let skipped = "a_context_is_made_once: skipped: libtorch would meet a driver that can do no more than this";
        let _ = writeln!(std::io::stderr(), "{skipped}");
        return;
    }
    let driver = Driver::new();
    let run = [&RUN[..], &["--device", "cuda:3"]].concat();
    let (asked, text) = driver.asked(&mut driver.sandbox.command(&run));
    assert_eq!(asked, ONCE, "{text}");
    assert!(
        text.contains("exit code 4") && text.contains("`cuda:3`"),
        "{text}"
    );
    // As in a service that makes a runtime, which nobody told the device ahead.
    let (asked, text) = driver.asked(&mut driver.torch(&run));
    assert_eq!(asked, ONCE, "{text}");
}

#[test]
fn the_context_is_begun_before_the_command_line_is_read() {
    let driver = Driver::new();
    // Some times: where the thread is before the main one, which has libc still to initialise.
    for _ in 0..25 {
        let mut nonsense = driver.torch(&["nonsense"]);
        let (asked, text) = driver.asked(nonsense.env("PRECAST_CUDA_AHEAD", "3"));
        assert_eq!(asked, ONCE, "{text}");
        assert!(text.contains("exit code 2"), "{text}");
    }
    // Whatever is loaded into a process to watch it sees an ordinary end.
    let mut watched = driver.torch(&["nonsense"]);
    watched.envs([("PRECAST_CUDA_AHEAD", "3"), ("LD_PRELOAD", "libm.so.6")]);
    let (asked, text) = driver.asked(&mut watched);
    assert_eq!(asked, format!("{ONCE}end 0\n"), "{text}");
    for wrong in ["", "x", "-1", "99999999999999999999"] {
        let mut version = driver.torch(&["--version"]);
        let (asked, text) = driver.asked(version.env("PRECAST_CUDA_AHEAD", wrong));
        assert_eq!(asked, "", "{wrong}: {text}");
    }
}
