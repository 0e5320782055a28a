//! The C library through its header: programs in C and Go against fake artifacts.
//!
//! `make lib` installs the library, from the profile `dev` and without the features of the tests.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that fails panics, and a test that is skipped says so"
)]

#[path = "../../../../tests/fake/mod.rs"]
mod fake;

use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use fake::{Fake, Memory, weights};
use precast_store::Store;

/// The exported graph `ids + at + extra`.
const SUM: &str = r#"{"format": 1, "inputs": 3, "outputs": [4], "calls": [
    {"op": "aten::add.Tensor", "args": {"self": {"value": 0}, "other": {"value": 1}}, "results": [3]},
    {"op": "aten::add.Tensor", "args": {"self": {"value": 3}, "other": {"value": 2}}, "results": [4]}]}"#;

const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

fn checkout() -> &'static Path {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.nth(2).unwrap()
}

fn temporary(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn libtorch() -> PathBuf {
    PathBuf::from(std::env::var_os("LIBTORCH").expect("LIBTORCH is set by .cargo/config.toml"))
}

/// Returns the standard output of a command that succeeds.
fn output(command: &mut Command) -> String {
    let done = command.output().unwrap();
    let [out, err] = [done.stdout, done.stderr].map(|text| String::from_utf8(text).unwrap());
    let status = done.status;
    assert!(status.success(), "{command:?}: {status}\n{out}{err}");
    out
}

/// Returns whether a program is installed. Says so if it is not.
fn installed(program: &str, argument: &str) -> bool {
    let found = Command::new(program).arg(argument).output().is_ok();
    if !found {
        println!("skipped: no `{program}`");
    }
    found
}

/// Returns the folder with the library, the header and the file for pkg-config.
fn library() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = temporary("c");
        let mut make = Command::new("make");
        make.current_dir(checkout()).env_remove("MAKEFLAGS");
        make.args(["--no-print-directory", "lib", "LIB_PROFILE=dev"]);
        make.arg(format!("LIB={}", folder.display()));
        if let Some(cargo) = std::env::var_os("CARGO") {
            make.arg(format!("CARGO={}", cargo.display()));
        }
        output(&mut make);
        folder
    })
}

fn pkg_config(arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", library().join("lib/pkgconfig"));
    let words = output(command.args(arguments).arg("precast"));
    words.split_whitespace().map(str::to_owned).collect()
}

/// Returns the program of C files, with `name` for its binary.
fn compiled(name: &str, sources: &[PathBuf]) -> PathBuf {
    let program = temporary(name);
    let mut cc = Command::new("gcc");
    cc.args(["-std=c99", "-g", "-pthread"]).args(STRICT);
    cc.args(sources).args(pkg_config(&["--cflags", "--libs"]));
    output(cc.arg("-o").arg(&program));
    program
}

/// Returns a command that finds the library.
fn run(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", library().join("lib"));
    command
}

/// Returns the arguments of every program of these tests: libtorch and the store.
fn arguments() -> [PathBuf; 2] {
    [libtorch(), store().to_owned()]
}

/// Returns a store with four models. `double` has the module `forward`, which doubles `x` and adds up its rows;
/// `triple` is the same with another weight, `other` with a weight of another name. `chat` has `total`, which adds up its inputs in a session, `fails`, which fails for numbers below 0, and `prefill` and
/// `decode`, which add a position and a number to each token, and `same`, which returns its first input.
fn store() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = temporary("c-store");
        let _ = fs::remove_dir_all(&folder);
        let store = Store::create(&folder).unwrap();
        let mut double = Memory::default();
        for rows in [1, 16] {
            double.add("forward", &Fake::sized(rows, 8).outputs(2));
        }
        double.weights = Some(double.put(weights(&[("scale", &[2.0])])));
        portable(&mut double).publish(&store, "double");
        double.weights = Some(double.put(weights(&[("scale", &[3.0])])));
        double.publish(&store, "triple");
        double.weights = Some(double.put(weights(&[("factor", &[3.0])])));
        double.publish(&store, "other");

        let mut chat = Memory::default();
        let total = Fake::sized(1, 2).constants(0);
        chat.add("total", &total.clone().stateful());
        chat.add("fails", &total.behaving("FAILS_BELOW"));
        for (module, tokens) in [("prefill", 4), ("prefill", 2), ("decode", 1)] {
            chat.add_graph(module, 1, tokens, SUM);
        }
        let same = r#"{"format": 1, "inputs": 3, "outputs": [0], "calls": []}"#;
        chat.add_graph("same", 1, 3, same);
        chat.weights = Some(chat.put(weights(&[("scale", &[2.0])])));
        portable(&mut chat).publish(&store, "chat");
        folder
    })
}

/// Lets valgrind run everything: its CPU lacks features of this machine's.
fn portable(memory: &mut Memory) -> &mut Memory {
    let programs = memory.programs.values_mut().map(|one| &mut one.target);
    let artifacts = memory.artifacts.values_mut().map(|one| &mut one.target);
    let targets = programs.chain(artifacts);
    targets.for_each(|target| target.features.clear());
    memory
}

#[test]
fn the_header_needs_no_other_and_stands_beside_dlpacks_own() {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let dlpack = libtorch().join("include");
    let orders = [
        "#include <precast.h>\n",
        "#include <ATen/dlpack.h>\n#include <precast.h>\n",
        "#include <precast.h>\n#include <ATen/dlpack.h>\n",
    ];
    let used = "DLManagedTensorVersioned *used(DLTensor x);\n\
                DLManagedTensorVersioned *used(DLTensor x) {\n\
                  x.device.device_type = kDLCPU; x.dtype.code = kDLFloat; (void)x; (void)DLPACK_MAJOR_VERSION;\n\
                  return NULL;\n}\n";
    let compilers = [
        ("gcc", "c", "c99"),
        ("gcc", "c", "c17"),
        ("g++", "c++", "c++11"),
        ("g++", "c++", "c++20"),
    ];
    for (compiler, language, standard) in compilers {
        for order in orders {
            let source = temporary(&format!("header-{standard}.{language}"));
            fs::write(&source, format!("{order}{used}")).unwrap();
            let mut command = Command::new(compiler);
            command.args(STRICT).arg(format!("-std={standard}"));
            command.args(["-fsyntax-only", "-x", language]);
            command.arg("-I").arg(&include).arg("-isystem").arg(&dlpack);
            output(command.arg(&source));
        }
    }
}

#[test]
fn the_library_has_a_soname_and_its_own_symbols_only() {
    let lib = library().join("lib");
    let so = lib.join("libprecast.so");
    let version = env!("CARGO_PKG_VERSION");
    let real = so.canonicalize().unwrap();
    let versioned = lib.join(format!("libprecast.so.{version}"));
    assert_eq!(real, versioned.canonicalize().unwrap());
    let dynamic = output(Command::new("readelf").arg("-d").arg(&so));
    let soname = dynamic.split_once("soname: [").unwrap().1;
    let soname = soname.split_once(']').unwrap().0;
    let (minor, _) = version.rsplit_once('.').unwrap();
    assert_eq!(soname, format!("libprecast.so.{minor}"));
    assert_eq!(lib.join(soname).canonicalize().unwrap(), real);
    assert!(!dynamic.contains("torch"), "{dynamic}");
    assert!(dynamic.contains("NODELETE"), "{dynamic}");

    let symbols = output(Command::new("nm").args(["-D", "--defined-only"]).arg(&so));
    let exported = symbols.lines().map(|line| line.rsplit(' ').next().unwrap());
    let mut exported: Vec<&str> = exported.collect();
    exported.sort_unstable();
    let header = fs::read_to_string(library().join("include/precast.h")).unwrap();
    let declared = header.lines().filter(|line| !line.starts_with("//"));
    let declared = declared.filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next());
    let declared = declared.filter(|name| name.starts_with("precast_"));
    let mut declared: Vec<&str> = declared.collect();
    declared.sort_unstable();
    assert_eq!(exported, declared);
    assert_eq!(pkg_config(&["--modversion"]), [version]);
}

const DOUBLE: &str = "\
forward: x [batch, seq] -> y [batch, seq] sum [batch]
  bucket: batch from 1 to 1 seq from 1 to 8
  bucket: batch from 1 to 16 seq from 1 to 8
y: [5, 8] 0.0000 0.0500 0.1000 0.1500
refused: module `forward`, input `x`: expected 2 dimensions, got 3
{\"model\":\"double\",\"ready\":true,";

#[test]
fn the_example_in_c_prints_what_the_model_answers() {
    let program = compiled("c-double", &[checkout().join("examples/c/double.c")]);
    let printed = output(run(&program).args(arguments()));
    assert!(printed.starts_with(DOUBLE), "{printed}");
    let arguments = [libtorch(), PathBuf::from("/nowhere")];
    let wrong = run(&program).args(arguments).output().unwrap();
    let told = String::from_utf8_lossy(&wrong.stderr);
    assert_eq!(wrong.status.code(), Some(1), "{told}");
    assert!(told.contains("error: `/nowhere` is not a store"), "{told}");
}

#[test]
fn the_program_of_the_guide_runs() {
    let page = fs::read_to_string(checkout().join("docs/src/guide/c.md")).unwrap();
    let program = page.split("```c\n").nth(1).unwrap();
    let source = temporary("guide.c");
    fs::write(&source, program.split("```").next().unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join(".venv")).unwrap();
    symlink(libtorch(), folder.path().join(".venv/libtorch")).unwrap();
    // A store is opened by its own name only.
    let text = fs::read_to_string(&source).unwrap();
    let named = text.replace("\"artifacts\"", &format!("{:?}", store()));
    assert_ne!(named, text);
    fs::write(&source, named).unwrap();
    let printed = output(run(compiled("c-guide", &[source])).current_dir(folder.path()));
    assert_eq!(printed, "[5, 8] 1.0000\n");
}

#[test]
fn a_program_can_have_the_library_in_itself() {
    let mut cc = Command::new("gcc");
    let program = temporary("c-static");
    let lib = library().join("lib");
    let flags = pkg_config(&["--static", "--libs"]);
    let flags = flags.iter().filter(|flag| *flag != "-lprecast");
    cc.arg("-std=c99")
        .arg(checkout().join("examples/c/double.c"));
    cc.args(pkg_config(&["--cflags"]));
    cc.arg(lib.join("libprecast.a")).args(flags);
    // Artifacts take no symbol from the program.
    output(cc.arg("-o").arg(&program));
    let printed = output(run(&program).args(arguments()));
    assert!(printed.starts_with(DOUBLE), "{printed}");
}

#[test]
fn the_example_in_go_calls_from_goroutines() {
    if !installed("go", "version") {
        return;
    }
    let program = temporary("go-double");
    let mut go = Command::new("go");
    go.current_dir(checkout().join("examples/go"));
    go.env("PKG_CONFIG_PATH", library().join("lib/pkgconfig"));
    output(go.args(["build", "-o"]).arg(&program));
    let printed = output(run(&program).args(arguments()));
    let wanted = "modules: [forward]\n8 callers: [0.0000 0.0500 0.1000 0.1500]\n\
                  refused: module `forward` has no bucket";
    assert!(printed.starts_with(wanted), "{printed}");
}

/// Returns the program of `main.c`.
fn checks() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled("c-checks", &["main.c", "session.c", "hostile.c"].map(ours)))
}

fn ours(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
    folder.join(name)
}

#[test]
fn sessions_keep_states_and_mistakes_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = run(checks());
    let printed = output(program.current_dir(&folder).args(arguments()));
    assert_eq!(printed, "done\n");
}

/// No access outside of memory, and no memory of ours that is lost.
#[test]
fn valgrind_finds_nothing() {
    if !installed("valgrind", "--version") {
        return;
    }
    let mut valgrind = run("valgrind");
    let leaks = "--leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite";
    valgrind
        .args(["--quiet", "--error-exitcode=9"])
        .args(leaks.split(' '));
    let known = ours("valgrind.supp");
    valgrind.arg(format!("--suppressions={}", known.display()));
    let folder = tempfile::tempdir().unwrap();
    valgrind.arg(checks()).args(arguments());
    assert_eq!(output(valgrind.current_dir(&folder)), "done\n");
}
