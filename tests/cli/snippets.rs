//! The Rust programs of the README and of the book: compiled in a crate outside of the workspace, and run.

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
    sandbox::{Sandbox, wait_until},
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

/// Returns the folder with the programs, compiled once.
///
/// The crate shares the checkout's target folder and profiles. A second run compiles changed programs only.
fn compiled() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let shared = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let root = shared.join("snippets");
        let sources = root.join("src/bin");
        let _ = fs::remove_dir_all(&sources);
        fs::create_dir_all(&sources).unwrap();
        for (name, program) in programs() {
            fs::write(sources.join(format!("{name}.rs")), program).unwrap();
        }
        let dependencies = blocks(LIBRARY, "toml").remove(0);
        let here = dependencies.replace("\"precast/", &format!("\"{CHECKOUT}/"));
        assert_ne!(here, dependencies, "no dependency is one by path");
        let workspace = page("Cargo.toml");
        let profiles = workspace.split_once("[profile.dev]").unwrap().1;
        let manifest = format!(
            "[package]\nname = \"snippets\"\nedition = \"2024\"\n\n{here}\n[workspace]\n\n[profile.dev]{profiles}"
        );
        fs::write(root.join("Cargo.toml"), manifest).unwrap();
        fs::write(root.join("Cargo.lock"), page("Cargo.lock")).unwrap();
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args(["build", "--offline", "--target-dir"])
            .arg(shared.parent().unwrap())
            .current_dir(&root)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        shared.parent().unwrap().join("debug")
    })
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
