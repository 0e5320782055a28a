//! `precast doctor`: every check, passing and failing. Interpreters and compilers are scripts.

use std::{fs, os::unix::fs::PermissionsExt, process::Command};

use serde_json::{Value, json};

use crate::{
    sandbox::{LIBTORCH, Ran, Sandbox},
    schemas::check,
};

/// A torch that was tried.
const TORCH: &str = "2.13.0+cpu";

/// Returns the command, with a scripted interpreter that has a torch of this version.
fn doctor(sandbox: &Sandbox, version: &str) -> Command {
    let site = sandbox.path("site");
    fs::create_dir_all(site.join("torch")).unwrap();
    let text = format!("__version__ = '{version}'\ncuda = None\ngit_version = 'abc'\n");
    fs::write(site.join("torch/version.py"), text).unwrap();
    let origin = site.join("torch/__init__.py");
    let said = json!({"version": [3, 12, 1], "executable": "/opt/python", "torch": origin});
    sandbox.script("python", &format!("echo '{said}'"));
    sandbox.script(
        "compiler",
        "[ \"$1\" = --version ] && echo 'compiler 1.2'; exit 0",
    );
    let mut command = sandbox.command(&["doctor", "--format", "json", "--python"]);
    command
        .arg(sandbox.path("python"))
        .env_remove("PRECAST_WORKER")
        .env("CXX", sandbox.path("compiler"));
    command
}

fn document(ran: &Ran) -> Value {
    let document = ran.json();
    check("doctor", &document);
    document
}

/// Returns state and finding of one check.
fn found(document: &Value, name: &str) -> (String, String) {
    let mut all = document["checks"].as_array().unwrap().iter();
    let check = all.find(|check| check["name"] == name);
    let check = check.unwrap_or_else(|| panic!("no `{name}` in {document}"));
    let text = |field: &str| check[field].as_str().unwrap().to_owned();
    assert_eq!(check["hint"].is_null(), text("state") == "ok", "{check}");
    (text("state"), text("found"))
}

#[test]
fn a_machine_that_has_all_can_build() {
    let sandbox = Sandbox::new();
    let ran = sandbox.output(&mut doctor(&sandbox, TORCH));
    let document = document(&ran);
    assert_eq!(document["can_build"], true, "{document}");
    let python = found(&document, "Python");
    assert_eq!(python, ("ok".to_owned(), "3.12.1, /opt/python".to_owned()));
    let compiler = found(&document, "C++ compiler").1;
    assert_eq!(compiler, "compiler 1.2, `[ROOT]/compiler`");
    let store = found(&document, "store");
    assert_eq!(
        store,
        ("note".to_owned(), "`artifacts` is not there".to_owned())
    );
}

#[test]
fn the_libtorch_of_a_named_python_is_found() {
    let sandbox = Sandbox::new();
    let site = "env/lib/python3.12/site-packages";
    fs::create_dir_all(sandbox.path(site)).unwrap();
    fs::create_dir(sandbox.path("env/bin")).unwrap();
    let torch = sandbox.path(site).join("torch");
    std::os::unix::fs::symlink(LIBTORCH, &torch).unwrap();
    sandbox.script("env/bin/python", "exit 1");
    let mut command = sandbox.command(&["doctor", "--format", "json", "--python"]);
    command.arg(sandbox.path("env/bin/python"));
    command.env_remove("PRECAST_WORKER").env_remove("LIBTORCH");
    let (state, text) = found(&document(&sandbox.output(&mut command)), "libtorch");
    assert_eq!(state, "ok", "{text}");
    assert!(text.contains(site), "{text}");
    // A named libtorch is the one that `run` opens.
    command.env("LIBTORCH", LIBTORCH);
    let (_, text) = found(&document(&sandbox.output(&mut command)), "libtorch");
    assert!(!text.contains(site), "{text}");
}

#[test]
fn a_torch_without_bytecode_is_noted_with_the_command_that_makes_it() {
    let python = std::env::current_dir().unwrap().join(".venv/bin/python");
    let sandbox = Sandbox::new();
    let package = sandbox.path("site/torch");
    fs::create_dir_all(&package).unwrap();
    fs::write(package.join("__init__.py"), "").unwrap();
    let version = format!("__version__ = '{TORCH}'\ncuda = None\ngit_version = 'abc'\n");
    fs::write(package.join("version.py"), version).unwrap();
    let look = || {
        let mut command = sandbox.command(&["doctor", "--format", "json", "--python"]);
        command.arg(&python).env_remove("PRECAST_WORKER");
        command.env("PYTHONPATH", sandbox.path("site"));
        let document = document(&sandbox.output(&mut command));
        let mut checks = document["checks"].as_array().unwrap().iter();
        checks.find(|check| check["name"] == "bytecode").cloned()
    };
    let note = look().unwrap();
    assert_eq!(note["state"], "note");
    // The command of the hint is run as it stands.
    let root = sandbox.path("").display().to_string();
    let hint = note["hint"].as_str().unwrap().trim_matches('`');
    let command = &hint.replace("[ROOT]", root.trim_end_matches('/'));
    let done = Command::new("sh").args(["-c", command]).status();
    assert!(done.unwrap().success());
    assert_eq!(look(), None);
}

#[test]
fn the_cpp_library_of_the_compilers_objects_is_named() {
    let sandbox = Sandbox::new();
    let checked = |cxx: Option<&str>| {
        let mut command = doctor(&sandbox, TORCH);
        command.env_remove("CXX");
        if let Some(cxx) = cxx {
            command.env("CXX", sandbox.path(cxx));
        }
        let document = document(&sandbox.output(&mut command));
        ["C++ compiler", "C++ library"].map(|name| {
            let (state, text) = found(&document, name);
            assert_eq!(state, "ok", "{text}");
            text
        })
    };
    let [compiler, library] = checked(None);
    assert!(compiler.ends_with("/g++`"), "{compiler}");
    assert_eq!(library, "libstdc++.so.6, shared");
    sandbox.script("static-g++", "exec g++ -static-libstdc++ \"$@\"");
    let [compiler, library] = checked(Some("static-g++"));
    assert!(compiler.ends_with("/static-g++`"), "{compiler}");
    let inside = "static in this compiler's objects; artifacts and shims use the library of torch";
    assert_eq!(library, inside);
}

#[test]
fn missing_requirements_of_a_build_are_named() {
    let says = |version: [u8; 3]| {
        let said = json!({"version": version, "executable": "/opt/python", "torch": null});
        format!("echo '{said}'")
    };
    let lacks_openmp = "[ \"$1\" = --version ] && echo 'compiler 1.2' && exit; echo 'omp.h: not there' >&2; exit 1";
    for (torch, script, body, check, text) in [
        ("1.13.0", "other", String::new(), "torch", "1.13.0, "),
        (
            TORCH,
            "python",
            says([3, 12, 1]),
            "torch",
            "`/opt/python` has none",
        ),
        (TORCH, "python", says([3, 8, 0]), "Python", "3.8.0"),
        (
            TORCH,
            "python",
            "echo 'no such module' >&2; exit 1".to_owned(),
            "Python",
            "no such module",
        ),
        (
            TORCH,
            "compiler",
            lacks_openmp.to_owned(),
            "C++ compiler",
            "omp.h: not there",
        ),
    ] {
        let sandbox = Sandbox::new();
        let mut command = doctor(&sandbox, torch);
        sandbox.script(script, &body);
        let document = document(&sandbox.output(&mut command).exits(1));
        assert_eq!(document["can_build"], false);
        let (state, found) = found(&document, check);
        assert!(
            state == "missing" && found.contains(text),
            "{check}: {found}"
        );
    }
    let sandbox = Sandbox::new();
    let mut gone = doctor(&sandbox, TORCH);
    gone.env("CXX", "no-such-compiler");
    let document = document(&sandbox.output(&mut gone));
    assert_eq!(found(&document, "C++ compiler").0, "missing");
}

#[test]
fn a_store_is_opened_and_not_changed() {
    let sandbox = Sandbox::built();
    let look = || document(&sandbox.output(&mut doctor(&sandbox, TORCH)));
    let before = sandbox.files("artifacts");
    let whole = look();
    let store = found(&whole, "store");
    assert_eq!(store, ("ok".to_owned(), "`artifacts`, 1 model".to_owned()));
    assert_eq!(found(&whole, "permission").0, "ok");
    assert_eq!(sandbox.files("artifacts"), before);
    // A stranger could have written it.
    fs::set_permissions(sandbox.path("artifacts"), fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(found(&look(), "store").0, "missing");
    fs::remove_dir_all(sandbox.path("artifacts")).unwrap();
    fs::create_dir(sandbox.path("artifacts")).unwrap();
    assert_eq!(found(&look(), "store").0, "note");
}

#[test]
fn text_output_has_a_hint_under_each_problem() {
    let sandbox = Sandbox::new();
    let command = doctor(&sandbox, "1.13.0");
    let args = command
        .get_args()
        .filter(|arg| *arg != "--format" && *arg != "json");
    let mut plain = sandbox.command(&[]);
    plain.args(args).env_remove("PRECAST_WORKER");
    let ran = sandbox.output(plain.env("CXX", sandbox.path("compiler")));
    let hint = "`/opt/python -m pip install 'torch>=2.11,<2.16'`";
    let mut lines = ran
        .stdout
        .lines()
        .skip_while(|line| !line.starts_with("  missing torch"));
    let below = lines.nth(1).unwrap();
    assert!(below.trim().starts_with(hint), "{}", ran.text());
    ran.says("can't build");
}
