//! A CUDA context that is begun before libtorch is there, with a driver that says what it was asked.

use std::{
    fs,
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
const ON_THREE: [&str; 6] = [
    "run",
    "affine",
    "--inputs",
    "x.safetensors",
    "--device",
    "cuda:3",
];
const ONCE: &str = "init 0\ndevice 3\ncontext 103\n";

#[test]
fn a_command_that_runs_on_a_device_begins_with_its_context_once() {
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!(
            "skipped: libtorch has a driver here, and would meet one that can do no more than this"
        );
        return;
    }
    let driver = Driver::new();
    let (asked, text) = driver.asked(&mut driver.sandbox.command(&ON_THREE));
    assert_eq!(asked, ONCE, "{text}");
    assert!(
        text.contains("exit code 4") && text.contains("`cuda:3`"),
        "{text}"
    );
    // As a service that is given a runtime does, without the hint of `precast`.
    let (asked, text) = driver.asked(&mut driver.torch(&ON_THREE));
    assert_eq!(asked, ONCE, "{text}");
}

#[test]
fn what_runs_on_the_cpu_asks_no_driver() {
    let driver = Driver::new();
    let (asked, text) = driver.asked(&mut driver.sandbox.command(&RUN));
    assert_eq!(asked, "", "{text}");
    assert!(text.contains("exit code 0"), "{text}");
}

#[test]
fn the_context_is_begun_before_the_command_line_is_read() {
    let driver = Driver::new();
    let mut nonsense = driver.torch(&["nonsense"]);
    let (asked, text) = driver.asked(nonsense.env("PRECAST_CUDA_AHEAD", "3"));
    assert_eq!(asked, ONCE, "{text}");
    assert!(text.contains("exit code 2"), "{text}");
    for wrong in ["", "x", "-1", "99999999999999999999"] {
        let (asked, text) = driver.asked(
            driver
                .torch(&["--version"])
                .env("PRECAST_CUDA_AHEAD", wrong),
        );
        assert_eq!(asked, "", "{wrong}: {text}");
    }
}
