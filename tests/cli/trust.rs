//! Stores and Python environments of other users: refused until they are trusted by name.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, lchown},
};

use crate::sandbox::{RUN, Sandbox};

const STRANGER: u32 = 12_345;

#[test]
fn another_users_store_is_run_once_it_is_named_in_a_list_of_ones_own() {
    let sandbox = Sandbox::built();
    let store = sandbox.path("artifacts");
    for entry in walkdir::WalkDir::new(&store) {
        if lchown(entry.unwrap().path(), Some(STRANGER), None).is_err() {
            eprintln!("skipped: this user can't give a file to another user");
            return;
        }
    }
    let config = sandbox.path("config");
    let list = config.join("precast/trusted-stores");
    let ran = |args: &[&str]| {
        let mut command = sandbox.command(args);
        sandbox.output(command.env("XDG_CONFIG_HOME", &config))
    };
    for args in [&["ls"][..], &["build"], &["verify"], &["du"], &["gc", "-n"]] {
        let ran = ran(args);
        assert_ne!(ran.code, 0, "{args:?}");
        for part in ["belongs to user 12345", "add the line", "trusted-stores"] {
            ran.shows(part);
        }
    }
    fs::create_dir_all(list.parent().unwrap()).unwrap();
    fs::write(&list, format!("# mine\n{}\n", store.display())).unwrap();
    ran(&["ls"]).exits(0);
    ran(&["verify"]).exits(0);
    // A list that others could have written names nothing.
    fs::set_permissions(&list, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(ran(&["ls"]).text().contains("is not read"));
    fs::set_permissions(&list, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(ran(&["ls"]).code, 0);
    lchown(&list, Some(STRANGER), None).unwrap();
    assert_ne!(ran(&["ls"]).code, 0);
    // Nor does one of other stores.
    lchown(&list, Some(0), None).unwrap();
    fs::write(&list, "/\nartifacts\n*\n").unwrap();
    assert_ne!(ran(&["ls"]).code, 0);
}

#[test]
fn a_store_that_is_made_and_used_under_any_umask_refuses_nothing() {
    for umask in ["000", "002", "077"] {
        let sandbox = Sandbox::new();
        let store = sandbox.path("artifacts");
        let ran = |args: &[&str]| {
            let mut precast = sandbox.command(args);
            precast.env("HOME", sandbox.path("home"));
            sandbox
                .run_after(&format!("umask {umask}"), precast)
                .exits(0);
        };
        sandbox.rows(3);
        ran(&["build", "-q"]);
        ran(&RUN);
        sandbox.edit("model.py", "2.0", "3.0");
        for args in [
            &["build", "-q"][..],
            &RUN,
            &["verify"],
            &["ls"],
            &["du"],
            &["gc"],
            &["release", "ls"],
        ] {
            ran(args);
        }
        for entry in walkdir::WalkDir::new(&store) {
            let entry = entry.unwrap();
            let mode = entry.metadata().unwrap().permissions().mode();
            let path = entry.path().display();
            assert_eq!(mode & 0o022, 0, "umask {umask}: {path} has mode {mode:o}");
        }
    }
}

/// Writes an environment whose interpreter notes that it ran.
fn environment(sandbox: &Sandbox, folder: &str) {
    let libraries = format!("{folder}/lib/python3.12/site-packages/torch/lib");
    fs::create_dir_all(sandbox.path(&libraries)).unwrap();
    fs::create_dir_all(sandbox.path(&format!("{folder}/bin"))).unwrap();
    sandbox.write(&format!("{libraries}/libtorch_cpu.so"), "no library");
    let ran = sandbox.path("ran");
    let body = format!("echo '{folder}' >> {}; exit 1", ran.display());
    sandbox.script(&format!("{folder}/bin/python"), &body);
}

/// Runs a command that finds its Python and libtorch itself. Returns the environments of the interpreters that ran, and
/// the output.
fn searching(sandbox: &Sandbox, args: &[&str], named: Option<&str>) -> (Vec<String>, String) {
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", sandbox.path("on-path/bin").display());
    let mut command = sandbox.command(args);
    command
        .env_remove("PRECAST_WORKER")
        .env_remove("LIBTORCH")
        .env("PATH", path);
    if let Some(named) = named {
        let (name, value) = named.split_once('=').unwrap();
        command.env(name, value);
    }
    let text = sandbox.output(&mut command).text();
    let ran = fs::read_to_string(sandbox.path("ran")).unwrap_or_default();
    let _ = fs::remove_file(sandbox.path("ran"));
    let mut ran: Vec<String> = ran.lines().map(str::to_owned).collect();
    ran.dedup();
    (ran, text)
}

#[test]
fn an_environment_of_others_is_not_used_by_any_command() {
    let sandbox = Sandbox::built();
    sandbox.tensors("in.safetensors", &[("x", &[1, 3], &[1.0, 2.0, 3.0])]);
    environment(&sandbox, ".venv");
    environment(&sandbox, "on-path");
    sandbox.script("on-path/bin/python3", "exec \"${0%3}\" \"$@\"");
    let venv = sandbox.path(".venv");
    let open = |mode| fs::set_permissions(&venv, fs::Permissions::from_mode(mode)).unwrap();
    let commands: [&[&str]; 11] = [
        &[
            "run",
            "affine",
            "--inputs",
            "in.safetensors",
            "--outputs",
            "y",
        ],
        &["bench", "affine"],
        &["deps"],
        &["export", "copy"],
        &["verify", "--host"],
        &["doctor"],
        &["--version", "-v"],
        &["plan", "--set", "dynamic=true"],
        &["build", "--set", "dynamic=true"],
        &["check"],
        &["init", "model:load", "-f", "new.toml"],
    ];
    let mut hint = String::new();
    for args in commands {
        // As itself it is used: its interpreter runs, or the error is about its libtorch.
        let (ran, text) = searching(&sandbox, args, None);
        let used = ran == [".venv"] || text.contains(".venv/lib/python3.12");
        assert!(used || args[0] == "plan", "{args:?} {ran:?}\n{text}");
        assert!(!text.contains("is not used"), "{args:?}\n{text}");
        let refused = |why: &str| {
            let (ran, text) = searching(&sandbox, args, None);
            let used = ran.contains(&".venv".to_owned()) || text.contains(".venv/lib");
            assert!(!used, "{args:?} {ran:?}\n{text}");
            let said = format!(".venv` is not used: `[ROOT]/.venv` is not safe: {why}");
            assert_eq!(text.matches(&said).count(), 1, "{args:?}\n{text}");
            text
        };
        open(0o777);
        hint = refused("everybody can write it");
        open(0o755);
        if lchown(&venv, Some(STRANGER), None).is_ok() {
            refused("it belongs to user 12345");
            lchown(&venv, Some(0), None).unwrap();
        }
    }
    // The hint says how it is used all the same.
    open(0o777);
    let mut words = hint.split('`');
    let named = words.find(|word| word.starts_with("PRECAST_PYTHON="));
    for args in [&["doctor"][..], &["check"]] {
        let (ran, text) = searching(&sandbox, args, named);
        assert_eq!(ran, [".venv"], "{args:?}\n{text}");
        assert!(!text.contains("is not used"), "{args:?}\n{text}");
    }
}

#[test]
fn the_search_goes_on_after_an_environment_of_others() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("spec")).unwrap();
    for file in ["precast.toml", "model.py"] {
        fs::rename(sandbox.path(file), sandbox.path("spec").join(file)).unwrap();
    }
    for folder in ["spec/.venv", ".venv", "on-path"] {
        environment(&sandbox, folder);
    }
    sandbox.script("on-path/bin/python3", "exec \"${0%3}\" \"$@\"");
    let build = || searching(&sandbox, &["build", "-f", "spec/precast.toml"], None).0;
    let open = |folder: &str| {
        let mode = fs::Permissions::from_mode(0o777);
        fs::set_permissions(sandbox.path(folder), mode).unwrap();
    };
    assert_eq!(build(), ["spec/.venv"]);
    open("spec/.venv/bin");
    assert_eq!(build(), [".venv"]);
    open(".venv/lib/python3.12/site-packages");
    assert_eq!(build(), ["on-path"]);
}

#[test]
fn nothing_is_imported_from_the_current_folder_to_find_torch() {
    let sandbox = Sandbox::built();
    let ran = sandbox.path("ran");
    let note = format!("open({ran:?}, 'a').write('torch')\n");
    for module in ["contextlib.py", "importlib.py", "torch.py", "warnings.py"] {
        sandbox.write(module, &note);
    }
    fs::create_dir_all(sandbox.path("torch/lib")).unwrap();
    sandbox.write("torch/__init__.py", &note);
    sandbox.write("torch/lib/libtorch_cpu.so", "no library");
    for args in [&["deps"][..], &["doctor"], &["--version", "-v"]] {
        let (ran, text) = searching(&sandbox, args, None);
        assert!(ran.is_empty(), "{args:?}\n{text}");
        assert!(!text.contains("[ROOT]/torch"), "{args:?}\n{text}");
    }
}
