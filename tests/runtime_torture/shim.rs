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

const BEHAVIOURS: &str =
    "OK THROWS FAILS FAILS_HALF NO_OUTPUT RETURNS_INPUT RETURNS_WEIGHT NO_CONTAINER LEAKS";
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
    let options = "detect_leaks=1:exitcode=99:abort_on_error=0";
    command
        .env("ASAN_OPTIONS", options)
        .env("LSAN_OPTIONS", "exitcode=99");
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let mut lines = printed.lines();
    let calls = lines.find_map(|line| line.strip_prefix("calls: ")?.trim().parse().ok());
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
        let mut driver = Command::new(&driver);
        ended(driver.arg(&fakes).args([what, &rounds.to_string()]))
    };
    match start("all", rounds).calls() {
        Ok(calls) => outcome.add("calls", calls),
        Err(why) => outcome.fail(why),
    }
    for (name, what, defect) in [
        ("leak", "leak", "LeakSanitizer"),
        ("use_after_free", "use-after-free", "heap-use-after-free"),
        ("overread", "overread", "heap-buffer-overflow"),
    ] {
        let name = format!("seeded_{name}_seen");
        let seen = start(what, 10).shows(defect);
        outcome.set(&name, seen);
        if !seen {
            outcome.fail(format!("{name} is false"));
        }
    }
    outcome
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
    let texts = files.iter().flat_map(|path| fs::read(path).unwrap());
    Digest::of(&texts.collect::<Vec<u8>>())
}

const DEFINED: &str =
    "-DROWS=1 -DCOLS=1 -DINPUTS=1 -DSTATE=0 -DOUTPUTS=1 -DCONSTANTS=2 -DELEMENTS=1 -DSALT=0";

const LIBRARIES: &str = "-Wl,--no-as-needed -ltorch_cpu -lc10 -ldl -lpthread";

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
    let shim = |name| root.join("crates/precast-shim/cpp").join(name);
    let ours = |name| root.join("tests/runtime_torture").join(name);
    let mut sources = Vec::from(["shim.cpp", "operators.cpp", "eager.cpp"].map(shim));
    sources.extend(["driver.cpp", "operators.cpp"].map(ours));
    sources.push(root.join("tests/fake/misbehaving.cpp"));
    sources.extend(["handles.h", "must.h"].map(ours));
    sources.extend(["operators.h", "eager.h", "arguments.h", "numbers.h"].map(shim));
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("asan-{}", digest(&sources).short()));
    fs::create_dir_all(&folder).unwrap();
    let fakes = || {
        BEHAVIOURS.split(' ').try_for_each(|behaviour| {
            compile(
                Command::new("g++")
                    .args(["-std=c++17", "-O1", "-shared", "-fPIC"])
                    .args(SANITIZE)
                    .arg(format!("-DBEHAVIOUR={behaviour}"))
                    .args(DEFINED.split(' '))
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
                .args(LIBRARIES.split(' '))
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
        false => {
            let errors = String::from_utf8_lossy(&done.stderr);
            Err(format!("{command:?}: {errors}"))
        }
    }
}
