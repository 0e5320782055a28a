//! The C++ shim and fake artifacts under AddressSanitizer, its leak checker and UndefinedBehaviorSanitizer.
//!
//! `driver.cpp` and `operators.cpp` call the shim as `runtime/ffi` does, with the shim's own sources compiled in. Three
//! controls show that a leak, a use after free and a read past an end would be seen.
//!
//! The CUDA half runs in the tests of `tests/gpu`, on a device.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use precast::Digest;

use crate::report::Tally;

const BEHAVIOURS: [&str; 9] = [
    "OK",
    "THROWS",
    "FAILS",
    "FAILS_HALF",
    "NO_OUTPUT",
    "RETURNS_INPUT",
    "RETURNS_WEIGHT",
    "NO_CONTAINER",
    "LEAKS",
];
const SANITIZE: [&str; 4] = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    // Only the lines of the reports: descriptions of torch's types took a third of these compiles.
    "-g1",
];

/// Runs a driver, and returns how it ended: its status, and the calls that it printed, or its first lines.
struct Ended {
    failed: bool,
    calls: Option<u64>,
    text: String,
}

fn ended(command: &mut Command) -> Ended {
    let output = command
        .env(
            "ASAN_OPTIONS",
            "detect_leaks=1:exitcode=99:abort_on_error=0",
        )
        .env("LSAN_OPTIONS", "exitcode=99")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let calls = printed
        .lines()
        .find_map(|line| line.strip_prefix("calls: ")?.trim().parse().ok());
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().take(60).collect();
    Ended {
        failed: !output.status.success(),
        calls,
        text: format!("{}: {printed}{}", output.status, lines.join("\n")),
    }
}

impl Ended {
    /// Returns the number of calls of a run without a failure.
    fn calls(self) -> Result<u64, String> {
        self.calls
            .filter(|calls| !self.failed && *calls > 0)
            .ok_or(self.text)
    }

    /// Returns whether a sanitizer reported a seeded defect.
    fn shows(&self, defect: &str) -> bool {
        self.failed && self.text.contains(defect)
    }
}

/// Runs `rounds` rounds of everything the shim does, on several threads.
pub fn run(rounds: u64) -> Tally {
    let mut outcome = Tally::default();
    let (driver, fakes) = match build() {
        Ok(built) => built,
        Err(why) => {
            outcome.fail(why);
            return outcome;
        }
    };
    let start = |what: &str, rounds: u64| {
        ended(
            Command::new(&driver)
                .arg(&fakes)
                .args([what, &rounds.to_string()]),
        )
    };
    match start("all", rounds).calls() {
        Ok(calls) => outcome.add("calls", calls),
        Err(why) => outcome.fail(why),
    }
    for (name, what, defect) in [
        ("seeded_leak_seen", "leak", "LeakSanitizer"),
        (
            "seeded_use_after_free_seen",
            "use-after-free",
            "heap-use-after-free",
        ),
        ("seeded_overread_seen", "overread", "heap-buffer-overflow"),
    ] {
        see(&mut outcome, name, start(what, 10).shows(defect));
    }
    outcome
}

fn see(outcome: &mut Tally, name: &str, seen: bool) {
    outcome.set(name, seen);
    if !seen {
        outcome.fail(format!("{name} is false"));
    }
}

/// Makes a file where it is missing; returns its path.
fn once(path: PathBuf, make: impl FnOnce(&Path) -> Result<(), String>) -> Result<PathBuf, String> {
    if !path.exists() {
        let unfinished = path.with_extension("unfinished");
        make(&unfinished)?;
        fs::rename(unfinished, &path).unwrap();
    }
    Ok(path)
}

fn libtorch() -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/libtorch");
    env::var_os("LIBTORCH").map_or_else(beside, PathBuf::from)
}

/// Returns the digest of the files' contents in order.
fn digest(files: &[PathBuf]) -> Digest {
    let texts: Vec<u8> = (files.iter())
        .flat_map(|path| fs::read(path).unwrap())
        .collect();
    Digest::of(&texts)
}

const LIBRARIES: [&str; 5] = [
    "-Wl,--no-as-needed",
    "-ltorch_cpu",
    "-lc10",
    "-ldl",
    "-lpthread",
];

/// Adds the folder of torch's libraries to a linker's command.
fn linked(mut command: Command, torch: &Path) -> Command {
    let lib = torch.join("lib");
    let path = format!("-Wl,-rpath,{}", lib.display());
    command.arg("-L").arg(&lib).arg(path);
    command
}

/// Compiles the driver with the shim, and the fakes, once for their sources.
fn build() -> Result<(PathBuf, PathBuf), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = [
        root.join("crates/precast-shim/cpp/shim.cpp"),
        root.join("crates/precast-shim/cpp/operators.cpp"),
        root.join("crates/precast-shim/cpp/eager.cpp"),
        root.join("tests/runtime_torture/driver.cpp"),
        root.join("tests/runtime_torture/operators.cpp"),
        root.join("tests/fake/misbehaving.cpp"),
        root.join("tests/runtime_torture/handles.h"),
        root.join("tests/runtime_torture/must.h"),
        root.join("crates/precast-shim/cpp/operators.h"),
        root.join("crates/precast-shim/cpp/eager.h"),
        root.join("crates/precast-shim/cpp/arguments.h"),
        root.join("crates/precast-shim/cpp/numbers.h"),
    ];
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("asan-{}", digest(&sources).short()));
    fs::create_dir_all(&folder).unwrap();
    let fakes = || {
        BEHAVIOURS.iter().try_for_each(|behaviour| {
            compile(
                Command::new("g++")
                    .args(["-std=c++17", "-O1", "-shared", "-fPIC"])
                    .args(SANITIZE)
                    .args([
                        &format!("-DBEHAVIOUR={behaviour}"),
                        "-DROWS=1",
                        "-DCOLS=1",
                        "-DCONSTANTS=2",
                    ])
                    .arg("-o")
                    .arg(folder.join(format!("{behaviour}.so")))
                    .arg(&sources[5]),
            )
        })
    };
    let torch = libtorch();
    let part = |source: &Path| {
        let flat = source.strip_prefix(root).unwrap().display().to_string();
        let made = folder.join(flat.replace('/', "-")).with_extension("o");
        compile(
            Command::new("g++")
                .args(["-std=c++17", "-O1", "-w", "-c"])
                .args(SANITIZE)
                .arg("-I")
                .arg(torch.join("include"))
                .arg("-I")
                .arg(root.join("crates/precast-shim/cpp"))
                .arg(source)
                .arg("-o")
                .arg(&made),
        )
        .map(|()| made)
    };
    // Torch's headers take long: two compilers at a time.
    let parts = |sources: &[PathBuf]| -> Result<Vec<PathBuf>, String> {
        sources.iter().map(|source| part(source)).collect()
    };
    let driver = once(folder.join("driver"), |made| {
        let objects = thread::scope(|scope| {
            let first = scope.spawn(|| parts(&sources[..2]));
            let mut objects = parts(&sources[2..5])?;
            fakes()?;
            objects.extend(first.join().unwrap()?);
            Ok::<_, String>(objects)
        })?;
        compile(
            linked(Command::new("g++"), &torch)
                .args(SANITIZE)
                .args(&objects)
                .args(LIBRARIES)
                .arg("-o")
                .arg(made),
        )
    })?;
    Ok((driver, folder))
}

fn compile(command: &mut Command) -> Result<(), String> {
    let done = command.output().map_err(|error| error.to_string())?;
    match done.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{command:?}: {}",
            String::from_utf8_lossy(&done.stderr)
        )),
    }
}
