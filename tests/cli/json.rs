//! Errors with `--format json`: one document on stderr, with the same content as the text.

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use crate::{
    sandbox::{Ran, Sandbox},
    schemas::check,
};

/// Every kind of error, of every command.
const WRONG: &[&[&str]] = &[
    &["build", "-f", "elsewhere/precast.toml"],
    &["build", "-f", "mistakes.toml"],
    &["build", "-f", "binary.toml"],
    &["build", "-f", "no-entry.toml"],
    &["build", "-f", "no-module.toml"],
    &["build", "--set", "nonsense=1"],
    &["build", "--store", "new", "--python", "/no/such/python"],
    &["plan", "-f", "mistakes.toml"],
    &["plan", "--store", "photos"],
    &["init", "nowhere:load", "-f", "new.toml"],
    &["init", "model:load"],
    &["check", "elsewhere.toml"],
    &["check", "--sizes", "nowhere.json"],
    &["doctor", "--python"],
    &["ls", "--store", "photos"],
    &["show", "nothing"],
    &["show", "ffffffffffff"],
    &["du", "--store", "photos"],
    &["log", "nothing"],
    &["why", "nothing"],
    &["diff", "nothing@1", "nothing@2"],
    &["inspect", "nowhere.so"],
    &["inspect", "broken.so"],
    &["stats", "nowhere.json"],
    &["stats", "precast.toml"],
    &["report", "--store", "photos"],
    &["report", "--check", "precast.toml"],
    &["completions", "csh"],
    &["man", "precast.toml/man"],
    &["run", "affine"],
    &["run", "affine", "--inputs", "nowhere.safetensors"],
    &["run", "affine", "--inputs", "precast.toml"],
    &["run", "affine", "--inputs", "wrong.safetensors"],
    &["run", "nothing", "--inputs", "wrong.safetensors"],
    &["train", "affine", "--data", "x.safetensors"],
    &["train", "affine", "--data", "x.safetensors", "--steps", "1"],
    &["bench", "affine", "--seconds", "0"],
    &["bench", "affine", "--at", "seq=1"],
    &["deps", "nothing"],
    &["export", "photos", "fake"],
    &["push", "fake", "nowhere"],
    &["push", "nobody", "file:///tmp"],
    &["pull", "file:///no/such/folder"],
    &["pull", "file:///tmp", "fake@1", "--all"],
    &["ls", "ftp://host/models"],
    &["push", "fake", "prod"],
    &["pull", "prod"],
    &["pull", "--locked"],
    &["pull", "--locked", "file:///tmp", "fake"],
    &["remote", "add", "prod", "file:///no/such/folder"],
    &["remote", "add", "a/b", "file:///tmp"],
    &["remote", "rm", "nothing"],
    &["show", "nothing", "--store", "file:///no/such/folder"],
    &["build", "--store", "file:///tmp"],
    &["gc", "--store", "file:///tmp", "--unreleased"],
    &["gc", "--apply"],
    &["verify", "--store", "file:///tmp", "--repair"],
    &["release", "rollback", "nothing"],
    &["release"],
    &["verify", "--store", "photos"],
    &["gc", "--keep-days", "many"],
    &["nonsense"],
];

/// Returns the documents on stderr, checked against the schema.
fn documents(ran: &Ran) -> Vec<Value> {
    let parse = |line: &str| -> Value {
        let document = serde_json::from_str(line);
        let document = document.unwrap_or_else(|error| panic!("{error}: {line}\n{}", ran.text()));
        check("error", &document);
        document
    };
    ran.stderr.lines().map(parse).collect()
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Fails where the JSON document of an error lacks a part of its text, or has another.
fn compare(text: &Ran, json: &Ran) {
    assert_ne!(text.code, 0, "{}", text.text());
    assert_eq!(json.code, text.code, "{}", json.text());
    let last = documents(json)
        .pop()
        .unwrap_or_else(|| panic!("{}", json.text()));
    assert_eq!(last["code"], json.code, "{last:#}");
    let mistakes = last["mistakes"].as_array().unwrap();
    let mut said: Vec<&Value> = vec![&last["hint"]];
    said.extend(last["causes"].as_array().unwrap());
    said.extend(last["log"].as_array().unwrap());
    let parts = mistakes.iter();
    said.extend(parts.flat_map(|one| [&one["message"], &one["help"]]));
    if mistakes.is_empty() {
        said.push(&last["error"]);
    }
    let shown = words(&text.stderr);
    for said in said.into_iter().map(|said| said.as_str().unwrap()) {
        assert!(!said.is_empty(), "{last:#}");
        for part in said.split("; ") {
            let is_there = shown.contains(&words(part));
            assert!(is_there, "`{part}` is not in\n{}", text.text());
        }
    }
    let place = mistakes
        .iter()
        .map(|one| format!("{}:{}", one["line"], one["column"]));
    let place = place.chain(last["location"].as_str().map(str::to_owned));
    for place in place {
        assert!(shown.contains(&place), "{place}\n{}", text.text());
    }
}

#[test]
fn every_error_of_every_command_is_a_document() {
    let sandbox = Sandbox::built();
    let spec = fs::read_to_string(sandbox.path("precast.toml")).unwrap();
    let other = spec
        .replace("pad = 0 }", "padd = 0 }")
        .replace("[1, 4]", "[]");
    sandbox.write("mistakes.toml", other);
    sandbox.write("binary.toml", [0xff_u8, 0xfe]);
    sandbox.write("no-entry.toml", spec.replace("model:load", "model:lode"));
    sandbox.write("no-module.toml", spec.replace("model:load", "fails:load"));
    sandbox.write("fails.py", "def load():\n    return 1 / 0\n");
    sandbox.write("broken.so", b"\x7fELF and nothing else");
    fs::create_dir(sandbox.path("photos")).unwrap();
    sandbox.write("photos/cat.jpg", "meow");
    sandbox.tensors("wrong.safetensors", &[("y", &[1, 3], &[1.0, 2.0, 3.0])]);
    let help = sandbox.run(&["--help"]).stdout;
    let (help, _) = help.split_once("Questions").unwrap();
    let commands = help.lines().filter_map(|line| line.strip_prefix("  "));
    let commands: BTreeSet<_> = commands.filter_map(|line| line.split(' ').next()).collect();
    assert!(commands.len() > 20, "{commands:?}");
    let tried: BTreeSet<_> = WRONG.iter().map(|args| args[0]).collect();
    assert_eq!(commands.difference(&tried).count(), 0, "{commands:?}");

    let options = commands.iter().map(|command| vec![*command, "--nonsense"]);
    for args in options.chain(WRONG.iter().map(|args| args.to_vec())) {
        let run = |args: &[&str]| {
            let mut command = sandbox.command(args);
            // A Python that is named replaces the fake worker.
            if args.contains(&"--python") {
                command.env_remove("PRECAST_WORKER");
            }
            sandbox.output(&mut command)
        };
        let text = run(&[&args[..], &["--format=human"]].concat());
        let json = run(&[&args[..], &["--format=json"]].concat());
        compare(&text, &json);
        assert!(!json.stdout.contains("\"error\""), "{}", json.text());
    }
    // Wherever the option stands.
    let json = sandbox.run(&["--format", "json", "show", "nothing"]);
    compare(&sandbox.run(&["show", "nothing"]), &json);
}

#[test]
fn an_error_of_the_worker_has_its_place_and_its_log() {
    let dies = "import os; print(\"last words\", flush=True); os._exit(3)";
    for (line, has) in [
        ("raise ValueError(\"no weights\")", "location"),
        (dies, "log"),
    ] {
        let sandbox = Sandbox::new();
        sandbox.append("model.py", line);
        let json = sandbox.run(&["build", "--format", "json"]);
        compare(&sandbox.run(&["build"]), &json);
        let last = documents(&json).pop().unwrap();
        for part in ["location", "log"] {
            assert_eq!(last[part].to_string().len() > 4, part == has, "{last:#}");
        }
    }
}

#[test]
fn notes_and_warnings_are_documents_too() {
    let sandbox = Sandbox::built();
    let allowed = "[[check.allow]]\nfinding = \"print\"\nreason = \"it is mine\"";
    sandbox.append("precast.toml", allowed);
    let ran = sandbox.run(&["check", "--format", "json"]);
    let warnings = documents(&ran);
    assert_eq!(warnings.len(), 1, "{}", ran.text());
    let warning = warnings[0]["warning"].as_str().unwrap();
    assert!(
        warning.starts_with("nothing is found that `print`"),
        "{warning}"
    );
    fs::write(sandbox.path("artifacts/index.sqlite"), "no database").unwrap();
    let ran = sandbox.run(&["ls", "--format", "json"]);
    let warnings = documents(&ran);
    assert!(warnings[0]["hint"].is_string(), "{}", ran.text());
    assert!(!ran.stdout.is_empty());
}

#[test]
fn a_bench_prints_its_buckets() {
    let sandbox = Sandbox::built();
    let bench = ["bench", "affine", "--seconds", "0.02"];
    let said = [
        "loading `fake`",
        "measuring batch=1, 1 of 2, about 40 ms",
        "measuring batch=4, 2 of 2, about 40 ms",
    ];
    let ran = sandbox.run(&bench);
    assert_eq!(ran.stderr.lines().take(3).collect::<Vec<_>>(), said);
    assert_eq!(sandbox.run(&[&bench[..], &["-q"]].concat()).stderr, "");
    let json = sandbox.run(&[&bench[..], &["--format", "json"]].concat());
    let notes: Vec<Value> = documents(&json)
        .into_iter()
        .map(|mut line| line["note"].take())
        .collect();
    assert_eq!(notes[..3], said);
    crate::schemas::check("bench", &json.json());
}
