//! The C++ shim and fake artifacts under AddressSanitizer, its leak checker and UndefinedBehaviorSanitizer.
//!
//! `driver.cpp` and `operators.cpp` call the shim as `runtime/ffi` does, with the shim's own sources compiled in. Three
//! controls show that a leak, a use after free and a read past an end would be seen.
//!
//! `uploads.cpp` uploads with the CUDA half's own source to a device that is a thread, also under ThreadSanitizer. Its
//! controls are a race with the device and a write past the end of a block.
//!
//! `graphs.cpp` calls the whole CUDA half, with torch's headers too, and has each call of torch and CUDA fail once. Its
//! control is an allocator that asks a graph which is gone.

use std::{
    env, fs,
    os::unix::process::CommandExt,
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

/// Uploads `rounds` times on each of several threads, under each sanitizer.
pub fn uploads(rounds: u64) -> Tally {
    let mut outcome = Tally::default();
    for (sanitizer, name, what, defect) in [
        ("thread", "seeded_race_seen", "early", "data race"),
        (
            "address,undefined",
            "seeded_overflow_seen",
            "overflow",
            "heap-buffer-overflow",
        ),
    ] {
        let driver = match build_uploads(sanitizer) {
            Ok(driver) => driver,
            Err(why) => {
                outcome.fail(why);
                continue;
            }
        };
        let start = |what: &str, rounds: u64| {
            let mut command = Command::new(&driver);
            in_its_place(&mut command);
            ended(command.args([what, &rounds.to_string()]))
        };
        match start("all", rounds).calls() {
            Ok(calls) => outcome.add("calls", calls),
            Err(why) => outcome.fail(format!("{sanitizer}: {why}")),
        }
        // A race shows only where the two threads meet: on two cores ten rounds missed it every other time.
        let seen = (0..30).any(|_| start(what, 100).shows(defect));
        see(&mut outcome, name, seen);
    }
    outcome
}

/// Has a program lie where it always does, where the machine allows that: kernels that choose among more places choose
/// some that ThreadSanitizer can't do with.
fn in_its_place(command: &mut Command) {
    let fixed = || {
        // SAFETY: it takes no pointer, and may be called between fork and exec.
        unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) };
        Ok(())
    };
    // SAFETY: the closure allocates nothing and takes no lock.
    unsafe { command.pre_exec(fixed) };
}

/// Compiles the uploads with one sanitizer, once for their sources.
fn build_uploads(sanitizer: &str) -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let ffi = root.join("crates/precast-shim/cpp");
    let cudart = root.join("tests/runtime_torture/cudart");
    let driver = root.join("tests/runtime_torture/uploads.cpp");
    let headers = [
        ffi.join("upload.h"),
        cudart.join("cuda_runtime_api.h"),
        root.join("tests/runtime_torture/must.h"),
        driver.clone(),
    ];
    let name = format!("uploads-{}-{sanitizer}", digest(&headers).short());
    once(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), |made| {
        compile(
            Command::new("g++")
                .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-g1"])
                .arg(format!("-fsanitize={sanitizer}"))
                .args(["-fno-sanitize-recover=all", "-fno-omit-frame-pointer"])
                .arg("-I")
                .arg(&ffi)
                .arg("-I")
                .arg(&cudart)
                .arg(&driver)
                .args(["-lpthread", "-o"])
                .arg(made),
        )
    })
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

/// Returns where CUDA's headers are, if they are there.
fn cuda_headers() -> Option<Vec<PathBuf>> {
    let torch = libtorch().canonicalize().ok()?;
    let site = torch.parent()?;
    let headers = [
        site.join("nvidia/cu13/include"),
        site.join("triton/backends/nvidia/include"),
    ];
    let there = headers[0].join("cuda_runtime_api.h").exists();
    there.then(|| headers.into())
}

/// Makes, uses and drops graphs and streams as `runtime/ffi` does, with every call that can fail failing once. How
/// often one was called, or the failure; none without CUDA's headers.
pub fn graphs() -> Option<Result<u64, String>> {
    let headers = cuda_headers()?;
    Some(build_graphs(&headers).and_then(|driver| {
        let start = |what: &str| ended(Command::new(&driver).arg(what));
        match start("dangles").shows("heap-use-after-free") {
            true => start("all").calls(),
            false => Err("a seeded use after free is not seen".to_owned()),
        }
    }))
}

/// Returns the digest of the files' contents in order.
fn digest(files: &[PathBuf]) -> Digest {
    let texts: Vec<u8> = (files.iter())
        .flat_map(|path| fs::read(path).unwrap())
        .collect();
    Digest::of(&texts)
}

/// Compiles the CUDA half with its driver, once for their sources.
fn build_graphs(headers: &[PathBuf]) -> Result<PathBuf, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let ffi = root.join("crates/precast-shim/cpp");
    let sources = [
        root.join("tests/runtime_torture/graphs.cpp"),
        ffi.join("shim_cuda.cpp"),
        ffi.join("upload.h"),
        root.join("tests/runtime_torture/must.h"),
    ];
    let name = format!("graphs-{}", digest(&sources).short());
    once(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), |made| {
        let torch = libtorch();
        let include = [torch.join("include")];
        let include = include.iter().chain(headers);
        compile(
            linked(Command::new("g++"), &torch)
                .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"])
                .args(SANITIZE)
                .args(include.flat_map(|dir| ["-isystem".into(), dir.clone()]))
                .arg("-I")
                .arg(&ffi)
                .args(&sources[..2])
                .args(LIBRARIES)
                .arg("-o")
                .arg(made),
        )
    })
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
