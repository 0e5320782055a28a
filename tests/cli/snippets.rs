//! The Rust programs of the README and of the book: compiled outside of the workspace, and run.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use crate::{
    page::{CHECKOUT, blocks, built, page},
    sandbox::{LIBTORCH, Sandbox, wait_until},
};

const README: &str = "README.md";
const FIRST: &str = "docs/src/guide/first-model.md";
const LIBRARY: &str = "docs/src/reference/library.md";

/// Returns every program of every page, by a name for its binary.
fn programs() -> BTreeMap<String, String> {
    let book = walkdir::WalkDir::new(Path::new(CHECKOUT).join("docs/src"));
    let book = book.into_iter().map(|entry| entry.unwrap().into_path());
    let book = book.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let book = book.map(|path| path.strip_prefix(CHECKOUT).unwrap().display().to_string());
    let mut programs = BTreeMap::new();
    for page in book.chain([README.to_owned()]) {
        let name = page.rsplit('/').next().unwrap();
        let name = name.trim_end_matches(".md").to_lowercase();
        for (number, program) in blocks(&page, "rust").into_iter().enumerate() {
            programs.insert(format!("{name}-{number}"), program);
        }
    }
    programs
}

/// Writes the programs into a folder of the target folder, and returns it.
fn written() -> PathBuf {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("snippets");
    let sources = root.join("src/bin");
    let _ = fs::remove_dir_all(&sources);
    fs::create_dir_all(&sources).unwrap();
    for (name, program) in programs() {
        fs::write(sources.join(format!("{name}.rs")), program).unwrap();
    }
    root
}

fn cargo(arguments: &str, folder: &Path) -> String {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    let done = command
        .args(arguments.split(' '))
        .current_dir(folder)
        .output();
    let done = done.unwrap();
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    String::from_utf8(done.stdout).unwrap()
}

/// Returns the folder with the programs, compiled once, with the libraries that the tests link: a crate with the
/// features of a service would compile 70 dependencies again.
fn compiled() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let root = written();
        let makefile = page("Makefile");
        let features = makefile
            .lines()
            .find_map(|line| line.strip_prefix("FEATURES := "));
        let features = features.expect("the Makefile names the features of the tests");
        let listed = cargo(
            &format!("test --no-run --offline --message-format=json {features} --test cli"),
            Path::new(CHECKOUT),
        );
        // One of the features links libtorch.
        let rpath = format!("-Clink-arg=-Wl,-rpath,{LIBTORCH}/lib");
        let mut given = vec!["--edition=2024".to_owned(), rpath];
        for line in listed.lines() {
            let message: serde_json::Value = serde_json::from_str(line).unwrap();
            for path in message["linked_paths"].as_array().into_iter().flatten() {
                given.push(format!("-L{}", path.as_str().unwrap()));
            }
            let name = message["target"]["name"].as_str().unwrap_or_default();
            if let ("precast_runtime" | "serde_json", Some(file)) =
                (name, message["filenames"][0].as_str())
            {
                given.push(format!("--extern={name}={file}"));
                given.push(format!(
                    "-Ldependency={}",
                    Path::new(file).parent().unwrap().display()
                ));
            }
        }
        for name in programs().into_keys() {
            let source = root.join(format!("src/bin/{name}.rs"));
            let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
            let mut command = Command::new(rustc);
            let done = command
                .args(&given)
                .arg("-o")
                .arg(root.join(&name))
                .arg(source);
            let done = done.output().unwrap();
            assert!(
                done.status.success(),
                "{}",
                String::from_utf8_lossy(&done.stderr)
            );
        }
        root
    })
}

#[test]
#[ignore = "long: compiles 70 dependencies"]
fn the_dependency_of_the_page_is_all_that_the_programs_need() {
    let root = written();
    let dependencies = blocks(LIBRARY, "toml").remove(0);
    let here = dependencies.replace("\"precast/", &format!("\"{CHECKOUT}/"));
    assert_ne!(here, dependencies, "no dependency is one by path");
    let manifest =
        format!("[package]\nname = \"snippets\"\nedition = \"2024\"\n\n{here}\n[workspace]\n");
    fs::write(root.join("Cargo.toml"), manifest).unwrap();
    fs::write(root.join("Cargo.lock"), page("Cargo.lock")).unwrap();
    cargo("check --offline", &root);
}

/// Returns a program in the folder of a sandbox, with nothing of the caller's environment.
fn command(sandbox: &Sandbox, program: &str) -> Command {
    let mut command = Command::new(compiled().join(program));
    command.current_dir(sandbox.path("")).env_clear();
    command
}

fn answer(sandbox: &Sandbox, program: &str) -> String {
    sandbox
        .output(&mut command(sandbox, program))
        .exits(0)
        .stdout
}

#[test]
fn every_program_is_run_by_a_test() {
    let names: Vec<_> = programs().into_keys().collect();
    let known = ["first-model-0", "library-0", "library-1", "readme-0"];
    assert_eq!(names, known);
}

#[test]
fn the_readmes_program_answers() {
    // The fake model answers with the shape of its inputs.
    assert_eq!(answer(&built(README), "readme-0"), "[1, 3]\n");
}

#[test]
fn the_first_models_program_prints_the_output_of_its_page() {
    let printed = answer(&built(FIRST), "first-model-0");
    let sentence = format!("The program prints `{}`", printed.trim());
    assert!(page(FIRST).contains(&sentence), "{sentence}");
}

#[test]
fn weights_are_swapped_and_counts_written() {
    let sandbox = built(FIRST);
    sandbox.edit("model.py", "SCALE = 2.0", "SCALE = 3.0");
    sandbox.ok(&["build", "-q"]);
    // 3 * 0.5 + 1, and then 2 * 0.5 + 1.
    assert_eq!(answer(&sandbox, "library-0"), "2.5 2\n");
    let stats = sandbox.json(&["stats", "counts.json"]);
    assert_eq!(stats["modules"][0]["rungs"]["padded"], 2, "{stats:#}");
}

#[test]
fn a_running_service_takes_a_new_release() {
    let sandbox = built(FIRST);
    let mut service = command(&sandbox, "library-1");
    let mut service = service
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut requests = service.stdin.take().unwrap();
    let mut answers = BufReader::new(service.stdout.take().unwrap());
    let mut ask = |line: &str| {
        writeln!(requests, "{line}").unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        answer
    };
    let ones = "1 1 1 1 1 1 1 1";
    assert!(ask(ones).starts_with("[3.0, 3.0,"));
    assert!(
        ask("1 1 1").contains("expected"),
        "a wrong request has an error for its answer"
    );
    sandbox.edit("model.py", "OFFSET = 1.0", "OFFSET = 4.0");
    sandbox.ok(&["build", "-q"]);
    let ask = std::cell::RefCell::new(ask);
    wait_until("the new release answers", || {
        ask.borrow_mut()(ones).starts_with("[6.0, 6.0,")
    });
    drop(requests);
    assert!(service.wait().unwrap().success());
}
