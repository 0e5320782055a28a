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
    process::{Command, Output},
    thread,
};

use precast::Digest;
use serde::Serialize;

#[derive(Debug, Default, Serialize)]
pub struct Outcome {
    /// Calls of the shim's functions.
    pub calls: u64,
    pub seeded_leak_seen: bool,
    pub seeded_use_after_free_seen: bool,
    pub seeded_overread_seen: bool,
    #[serde(skip)]
    pub bad: Vec<String>,
}

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

/// Runs `rounds` rounds of everything the shim does, on several threads.
pub fn run(rounds: u64) -> Outcome {
    let mut outcome = Outcome::default();
    let (driver, fakes) = match build() {
        Ok(built) => built,
        Err(why) => {
            outcome.bad.push(why);
            return outcome;
        }
    };
    let start = |what: &str, rounds: u64| -> Output {
        let options = "detect_leaks=1:exitcode=99:abort_on_error=0";
        Command::new(&driver)
            .arg(&fakes)
            .args([what, &rounds.to_string()])
            .env("ASAN_OPTIONS", options)
            .env("LSAN_OPTIONS", "exitcode=99")
            .output()
            .unwrap()
    };
    let whole = start("all", rounds);
    let printed = String::from_utf8_lossy(&whole.stdout).into_owned();
    outcome.calls = printed
        .lines()
        .find_map(|line| line.strip_prefix("calls: ")?.parse().ok())
        .unwrap_or(0);
    if !whole.status.success() || outcome.calls == 0 {
        let text = String::from_utf8_lossy(&whole.stderr).into_owned();
        let end: String = text.lines().take(60).collect::<Vec<_>>().join("\n");
        outcome
            .bad
            .push(format!("{}: {printed}{end}", whole.status));
    }
    let seen = |what: &str, word: &str| {
        let ended = start(what, 10);
        !ended.status.success() && String::from_utf8_lossy(&ended.stderr).contains(word)
    };
    outcome.seeded_leak_seen = seen("leak", "LeakSanitizer");
    outcome.seeded_use_after_free_seen = seen("use-after-free", "heap-use-after-free");
    outcome.seeded_overread_seen = seen("overread", "heap-buffer-overflow");
    if !outcome.seeded_leak_seen
        || !outcome.seeded_use_after_free_seen
        || !outcome.seeded_overread_seen
    {
        outcome.bad.push("a seeded defect is not seen".to_owned());
    }
    outcome
}

#[derive(Debug, Default, Serialize)]
pub struct Uploads {
    /// Uploads under both sanitizers.
    pub calls: u64,
    pub seeded_race_seen: bool,
    pub seeded_overflow_seen: bool,
    #[serde(skip)]
    pub bad: Vec<String>,
}

/// Uploads `rounds` times on each of several threads, under each sanitizer.
pub fn uploads(rounds: u64) -> Uploads {
    let mut outcome = Uploads::default();
    for sanitizer in ["thread", "address,undefined"] {
        let driver = match build_uploads(sanitizer) {
            Ok(driver) => driver,
            Err(why) => {
                outcome.bad.push(why);
                return outcome;
            }
        };
        let start = |what: &str, rounds: u64| -> Output {
            let rounds = rounds.to_string();
            let mut command = Command::new(&driver);
            in_its_place(&mut command);
            command.args([what, &rounds]).output().unwrap()
        };
        let whole = start("all", rounds);
        let printed = String::from_utf8_lossy(&whole.stdout).into_owned();
        let calls = printed
            .strip_prefix("calls: ")
            .and_then(|n| n.trim().parse().ok())
            .unwrap_or(0);
        outcome.calls += calls;
        if !whole.status.success() || calls == 0 {
            let text = String::from_utf8_lossy(&whole.stderr).into_owned();
            let end: String = text.lines().take(60).collect::<Vec<_>>().join("\n");
            let status = whole.status;
            outcome
                .bad
                .push(format!("{sanitizer}: {status}: {printed}{end}"));
        }
        let seen = |what: &str, word: &str| {
            // A race shows only where the two threads meet: on two cores ten rounds missed it every other time.
            (0..30).any(|_| {
                let ended = start(what, 100);
                !ended.status.success() && String::from_utf8_lossy(&ended.stderr).contains(word)
            })
        };
        match sanitizer {
            "thread" => outcome.seeded_race_seen = seen("early", "data race"),
            _ => outcome.seeded_overflow_seen = seen("overflow", "heap-buffer-overflow"),
        }
    }
    if !outcome.seeded_race_seen || !outcome.seeded_overflow_seen {
        outcome.bad.push("a seeded defect is not seen".to_owned());
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
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !made.exists() {
        let unfinished = made.with_extension("unfinished");
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
                .arg(&unfinished),
        )?;
        fs::rename(unfinished, &made).unwrap();
    }
    Ok(made)
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
        let start = |what: &str| -> Output {
            let options = "detect_leaks=1:exitcode=99:abort_on_error=0";
            let mut command = Command::new(&driver);
            command.arg(what).env("ASAN_OPTIONS", options);
            command.output().unwrap()
        };
        let control = start("dangles");
        if control.status.success()
            || !String::from_utf8_lossy(&control.stderr).contains("heap-use-after-free")
        {
            return Err("a seeded use after free is not seen".to_owned());
        }
        let whole = start("all");
        let printed = String::from_utf8_lossy(&whole.stdout).into_owned();
        let calls = printed
            .strip_prefix("calls: ")
            .and_then(|n| n.trim().parse().ok());
        match calls {
            Some(calls) if whole.status.success() => Ok(calls),
            _ => Err(format!(
                "{}: {printed}{}",
                whole.status,
                String::from_utf8_lossy(&whole.stderr)
            )),
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
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if !made.exists() {
        let torch = libtorch();
        let lib = torch.join("lib");
        let unfinished = made.with_extension("unfinished");
        let include = [torch.join("include")];
        let include = include.iter().chain(headers);
        compile(
            Command::new("g++")
                .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"])
                .args(SANITIZE)
                .args(include.flat_map(|dir| ["-isystem".into(), dir.clone()]))
                .arg("-I")
                .arg(&ffi)
                .args(&sources[..2])
                .arg("-L")
                .arg(&lib)
                .arg(format!("-Wl,-rpath,{}", lib.display()))
                .args(["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-lpthread"])
                .arg("-o")
                .arg(&unfinished),
        )?;
        fs::rename(unfinished, &made).unwrap();
    }
    Ok(made)
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
    let driver = folder.join("driver");
    if driver.exists() {
        return Ok((driver, folder));
    }
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
    let objects = thread::scope(|scope| {
        let first = scope.spawn(|| parts(&sources[..2]));
        let mut objects = parts(&sources[2..5])?;
        fakes()?;
        objects.extend(first.join().unwrap()?);
        Ok::<_, String>(objects)
    })?;
    let lib = torch.join("lib");
    let unfinished = folder.join("driver.unfinished");
    compile(
        Command::new("g++")
            .args(SANITIZE)
            .args(&objects)
            .arg("-L")
            .arg(&lib)
            .arg(format!("-Wl,-rpath,{}", lib.display()))
            .args([
                "-Wl,--no-as-needed",
                "-ltorch_cpu",
                "-lc10",
                "-ldl",
                "-lpthread",
                "-o",
            ])
            .arg(&unfinished),
    )?;
    fs::rename(unfinished, &driver).unwrap();
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
