//! Every command that the README and the guide show is run twice: what works once and not again is found here.
//!
//! The commands of `precast` are run with the fake worker, page by page: all of a page, and all of it again. Those that
//! take minutes are targets of the Makefile, which `make twice` runs. Others have a test of their own.

use std::{collections::BTreeMap, fs, os::unix::fs::symlink, path::Path};

use safetensors::{Dtype, tensor::TensorView};

use crate::{
    page::{CHECKOUT, blocks, built, page},
    sandbox::{Ran, Sandbox},
};

const README: &str = "README.md";

/// Commands that change nothing of Precast, or that another test runs: how they begin, and which.
const ELSEWHERE: [(&str, &str); 23] = [
    ("cargo install", "a checkout is compiled by `make`"),
    ("python3 -m venv", "no command of Precast"),
    (".venv/bin/pip install torch", "no command of Precast"),
    ("pip install target/wheels", "`make test-python`"),
    (".venv/bin/python -c", "no command of Precast"),
    ("export ", "of the shell"),
    ("cc ", "crates/precast-c"),
    ("LD_LIBRARY_PATH=target/c/lib ./double", "crates/precast-c"),
    ("docker ", "container.rs"),
    ("rsync ", "machines.rs"),
    ("ssh ", "machines.rs"),
    ("hf ", "no command of Precast"),
    ("pip install 'precast[ray]'", "no command of Precast"),
    ("precast build --on ray", "`make test-ray`"),
    ("precast push minilm hf://", "crates/precast-remote: hub.rs"),
    ("precast pull hf://", "crates/precast-remote: hub.rs"),
    ("skopeo ", "crates/precast-remote: servers.rs"),
    (
        "precast push minilm oci://",
        "crates/precast-remote: servers.rs",
    ),
    ("precast pull oci://", "crates/precast-remote: servers.rs"),
    ("precast inspect encoder.pt2", "reading_json.rs"),
    ("precast init my:load", "numerics: generation.rs"),
    ("precast report --training", "reading_json.rs"),
    ("precast train ", "numerics: training.rs"),
];

/// The second run of these says that what it would make is there.
const REFUSED_AGAIN: [(&str, &str); 2] = [("init", "is there already"), ("export", "is not empty")];

/// Returns the pages, README first.
fn pages() -> Vec<String> {
    let guide = Path::new(CHECKOUT).join("docs/src/guide");
    let names = fs::read_dir(guide).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = names.filter(|name| name.ends_with(".md"));
    let mut names: Vec<_> = names.map(|name| format!("docs/src/guide/{name}")).collect();
    names.sort();
    names.insert(0, README.to_owned());
    names
}

/// Returns the commands of a page, without their comments.
fn commands(page: &str) -> Vec<String> {
    let text = blocks(page, "console").concat().replace("\\\n", "");
    let lines = text.lines().filter_map(|line| line.strip_prefix("$ "));
    let lines = lines.map(|line| line.split(" #").next().unwrap().trim().to_owned());
    lines.collect()
}

/// Returns the arguments of a command of `precast`, whatever stands in front of it.
fn arguments(command: &str) -> Option<Vec<String>> {
    let is_elsewhere = ELSEWHERE
        .iter()
        .any(|(start, _)| command.starts_with(start));
    let words = command.split_whitespace();
    let mut words = words.skip_while(|word| word.contains('='));
    let program = words.next()?.rsplit('/').next()?;
    let is_ours = program == "precast" && !is_elsewhere;
    is_ours.then(|| shell_words(command.split_once("precast ").unwrap().1))
}

/// Splits at spaces outside of single quotes.
fn shell_words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for letter in text.chars() {
        match letter {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            other => words.last_mut().unwrap().push(other),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Returns the sandbox in which the commands of a page find what they need, by its name.
fn scene(page: &str) -> &'static str {
    match page.rsplit('/').next().unwrap() {
        "own-repository.md" => "new",
        "before.md" => "tokens",
        "first-model.md" | "container.md" => "double",
        _ => "minilm",
    }
}

fn prepared(scene: &str) -> Sandbox {
    match scene {
        "double" => {
            let sandbox = built("docs/src/guide/first-model.md");
            sandbox.tensors("inputs.safetensors", &[("x", &[5, 8], &[0.5; 40])]);
            sandbox
        }
        "minilm" => minilm(),
        _ => {
            let sandbox = Sandbox::new();
            fs::remove_file(sandbox.path("precast.toml")).unwrap();
            sandbox.write("lengths.json", r#"{"seq": [32, 128]}"#);
            sandbox
        }
    }
}

/// Returns a sandbox with the README's model and seven releases of it.
fn minilm() -> Sandbox {
    let sandbox = built(README);
    for seq in 2..=7 {
        let offset = |seq| format!("OFFSET = {seq}.0");
        sandbox.edit("model.py", &offset(seq - 1), &offset(seq));
        sandbox.ok(&["build", "-q"]);
    }
    symlink(".", sandbox.path("minilm")).unwrap();
    symlink(".", sandbox.path("examples")).unwrap();
    let tokens: Vec<u8> = [1_i64; 60].iter().flat_map(|it| it.to_le_bytes()).collect();
    let view = || TensorView::new(Dtype::I64, vec![3, 20], &tokens).unwrap();
    let inputs = [("input_ids", view()), ("attention_mask", view())];
    let file = safetensors::serialize(inputs, None).unwrap();
    sandbox.write("inputs.safetensors", &file);
    sandbox.write("three.safetensors", &file);
    sandbox
}

/// Runs a command, with the newest program in place of an ID of the page's store.
fn run(sandbox: &Sandbox, mut words: Vec<String>) -> Ran {
    let is_id =
        |word: &&mut String| word.len() == 12 && word.chars().all(|it| it.is_ascii_hexdigit());
    // A mount of the page.
    for word in &mut words {
        if let Some(inside) = word.strip_prefix("file:///mnt/") {
            *word = format!("file://{}", sandbox.path(inside).display());
        }
    }
    if let Some(id) = words.iter_mut().find(is_id) {
        let listed = sandbox.json(&["release", "ls"]);
        let newest = listed["releases"][0]["programs"][0].as_str();
        *id = newest.unwrap().to_owned();
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut command = sandbox.command(&words);
    sandbox.output(command.env("XDG_CONFIG_HOME", sandbox.path("config")))
}

#[test]
fn every_command_of_precast_in_the_readme_and_the_guide_runs_twice() {
    let mut sandboxes = BTreeMap::new();
    let mut count = 0;
    for page in pages() {
        let commands = commands(&page);
        let ours = || {
            commands
                .iter()
                .filter_map(|line| Some((line, arguments(line)?)))
        };
        if ours().next().is_none() {
            continue;
        }
        let scene = scene(&page);
        let sandbox = sandboxes.entry(scene).or_insert_with(|| prepared(scene));
        for (line, words) in ours() {
            eprintln!("{page}: {line}");
            run(sandbox, words).exits(0);
            count += 1;
        }
        for (line, words) in ours() {
            let mut refused = REFUSED_AGAIN.iter();
            let refused = refused.find(|(command, _)| words[0] == *command);
            eprintln!("{page}, again: {line}");
            let ran = run(sandbox, words);
            match refused {
                None => drop(ran.exits(0)),
                Some((_, why)) => ran.exits(2).says(why),
            }
        }
    }
    assert!(count > 25, "{count}");
}

#[test]
fn every_other_command_is_run_by_another_test_or_by_make_twice() {
    let makefile = page("Makefile");
    let (_, list) = makefile.split_once("\nTWICE := ").unwrap();
    let twice: Vec<_> = list.lines().next().unwrap().split(' ').collect();
    for page in pages() {
        for line in commands(&page) {
            let Some(target) = line.strip_prefix("make") else {
                let is_elsewhere = ELSEWHERE.iter().any(|(start, _)| line.starts_with(start));
                assert!(is_elsewhere || arguments(&line).is_some(), "{page}: {line}");
                continue;
            };
            let target = target.trim();
            let target = if target.is_empty() { "build" } else { target };
            assert!(twice.contains(&target), "{page}: make {target}");
        }
        // Examples that the text names.
        for target in self::page(&page).split("`make ").skip(1) {
            let target = target.split(['`', ' ']).next().unwrap();
            let is_own = target.starts_with("bench") || ["test", "test-long"].contains(&target);
            assert!(is_own || twice.contains(&target), "{page}: make {target}");
        }
    }
}
