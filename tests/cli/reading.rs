//! The commands that read a store, on the real binary.

use std::{fs, process::Command};

use precast::Store;
use serde_json::Value;

use crate::{
    sample::{self, Sample, sample},
    sandbox::{Ran, count},
};

/// Runs precast over the sample's store.
fn precast(sample: &Sample, args: &[&str]) -> Ran {
    run(sample, args, &[])
}

/// Runs precast with these variables alone.
fn run(sample: &Sample, args: &[&str], variables: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_precast"));
    command
        .args(args)
        .env_clear()
        .env("PRECAST_STORE", &sample.path);
    let output = command.envs(variables.iter().copied()).output();
    Ran::new(output.unwrap(), sample.dir.path())
}

/// Runs a line of words that must succeed, and returns its output.
fn printed(sample: &Sample, line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    precast(sample, &words).exits(0).stdout
}

fn json(sample: &Sample, line: &str) -> Value {
    let words: Vec<&str> = line.split(' ').chain(["--format", "json"]).collect();
    precast(sample, &words).exits(0).json()
}

/// Runs a line of words that must be refused with this exit code and message.
fn refused(sample: &Sample, line: &str, code: i32, says: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let ran = precast(sample, &words).exits(code);
    ran.says(says);
    ran.says("hint:");
}

#[test]
fn ls_fits_a_narrow_terminal() {
    let sample = sample();
    let narrow = run(&sample, &["ls", "--sort", "bucket-"], &[("COLUMNS", "60")]).stdout;
    let fits = narrow.lines().all(|line| line.chars().count() <= 60);
    assert!(fits && narrow.lines().count() > 6, "{narrow}");
}

#[test]
fn ls_filters_by_every_column() {
    let sample = sample();
    for (filter, found) in [
        ("", 6),
        (" enc*", 6),
        (" dec*", 0),
        (" --state live", 3),
        (" --state old", 2),
        (" --state failed", 1),
        (" --model minilm --device cpu", 5),
        (" --older 300d", 6),
        (" --newer 300d", 0),
    ] {
        let ids = printed(&sample, &format!("ls --ids{filter}"));
        assert_eq!(ids.lines().count(), found, "{filter}");
    }
    let bucket = precast(&sample, &["ls", "--ids", "--bucket", "batch=8 *"]);
    assert_eq!(bucket.stdout.lines().count(), 3);
    let unsorted = precast(&sample, &["ls", "--sort", "colour"]).exits(2);
    unsorted.says("expected one of id, model");
    precast(&sample, &["ls", "--older", "soon"])
        .exits(2)
        .says("`30d`");
    refused(&sample, "ls [", 2, "");
}

#[test]
fn du_adds_up_by_release() {
    let by_release = printed(&sample(), "du --by release");
    insta::assert_snapshot!("du-release", by_release);
}

#[test]
fn du_and_the_report_give_one_number_with_the_unpacked_copies() {
    let sample = sample();
    let store = Store::open(&sample.path).unwrap();
    let object = store.objects().put_bytes(&[7; 300_000]).unwrap();
    drop(store.objects().map(&object).unwrap());
    drop(store);
    let du = printed(&sample, "du");
    let column = |row: &str, number: usize| {
        let line = du.lines().find(|line| line.starts_with(row)).unwrap();
        let columns = line.split("  ").map(str::trim);
        columns.filter(|text| !text.is_empty()).nth(number).unwrap()
    };
    let page = sample.dir.path().join("report.html");
    precast(&sample, &["report", "-o", page.to_str().unwrap()]).exits(0);
    let page = fs::read_to_string(page).unwrap();
    for sentence in [
        format!("On disk the store takes {} for ", column("total", 4)),
        format!(", of which {} are unpacked copies", column("(unpacked)", 1)),
    ] {
        assert!(
            page.contains(&sentence),
            "`{sentence}` is not in the report\n{du}"
        );
    }
}

#[test]
fn show_lists_the_weights_of_each_step_on_request() {
    let sample = sample();
    let bound = precast(&sample, &["show", "-v", &sample.program.short()]);
    bound.prints("weight = layers.3.weight  float32[8, 8]");
}

#[test]
fn why_and_diff_name_changes() {
    let sample = sample();
    let (before, program) = (sample.before.short(), sample.program.short());
    let store = sample.path.display();
    assert!(printed(&sample, &format!("why {program}")).contains("`model.py` changed"));
    let of_module = printed(&sample, "why encode");
    assert_eq!(of_module.matches("encode batch=").count(), 3, "{of_module}");
    let keys = printed(&sample, &format!("diff {before} {program}"));
    assert!(keys.contains("model.py"), "{keys}");
    insta::assert_snapshot!("diff-releases", printed(&sample, "diff minilm@1 minilm"));
    let stores = printed(&sample, &format!("diff {store} {store}"));
    assert!(
        stores.contains("3 programs the same, 0 changed"),
        "{stores}"
    );
    refused(&sample, &format!("diff minilm {program}"), 2, "");
    refused(&sample, "why nothing", 3, "");
}

#[test]
fn logs_reach_the_terminal_without_their_escapes() {
    let sample = sample();
    let log =
        |id: &precast::Digest| printed(&sample, &format!("log {} --color always", id.short()));
    assert_eq!(
        log(&sample.artifact),
        "compiling blocks 1 32\n\\u{1b}[31mnote\\u{1b}[0m: autotuning skipped\n"
    );
    assert_eq!(log(&sample.program).matches("==> artifact ").count(), 2);
    assert_eq!(log(&sample.failure), "Traceback: no kernel\n");
    refused(&sample, "log feedfeed", 3, "");
}

#[test]
fn looking_changes_nothing() {
    let sample = sample();
    let state = || {
        let entries = walkdir::WalkDir::new(&sample.path).sort_by_file_name();
        let entries = entries.into_iter().map(Result::unwrap);
        let files = entries.filter(|entry| entry.file_type().is_file());
        let content = files.map(|file| (fs::read(file.path()).unwrap(), file.into_path()));
        content.collect::<Vec<_>>()
    };
    let before = state();
    let (id, artifact) = (sample.program.short(), sample.artifact.short());
    let out = sample.dir.path().join("r.html");
    for line in [
        "ls",
        "ls --artifacts",
        "du",
        &format!("show {id}"),
        &format!("show {artifact}"),
        &format!("log {id}"),
        "why encode",
        "diff minilm@1 minilm@2",
        &format!("report -o {}", out.display()),
    ] {
        printed(&sample, line);
    }
    assert!(
        before == state(),
        "a command that only looks wrote to the store"
    );
}

#[test]
fn stats_add_up_counts_of_services() {
    let sample = sample();
    let counts = sample::counts(sample.dir.path()).display().to_string();
    insta::assert_snapshot!(
        "stats",
        printed(&sample, &format!("stats {counts} {counts}"))
    );
    refused(&sample, "stats Cargo.toml", 2, "not a file of counts");
}

#[test]
fn a_damaged_index_is_an_error_and_the_records_are_listed() {
    let sample = sample();
    fs::write(
        sample.path.join("index.sqlite"),
        b"this is no database at all",
    )
    .unwrap();
    let first = |folder| {
        fs::read_dir(folder)
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .path()
    };
    let record = first(first(sample.path.join("programs")));
    let mut text = fs::read(&record).unwrap();
    text[20] ^= 1;
    fs::remove_file(&record).unwrap();
    fs::write(&record, text).unwrap();
    let ran = precast(&sample, &["ls", "--ids"]).exits(1);
    assert_eq!(ran.stdout.lines().count(), 5, "{}", ran.text());
    for part in [
        "index",
        &*record.file_name().unwrap().to_string_lossy(),
        "hint:",
    ] {
        ran.says(part);
    }
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let sample = sample();
    let precast = env!("CARGO_BIN_EXE_precast");
    for args in [
        "ls",
        "ls --format json",
        "show minilm",
        "--help",
        "completions bash",
    ] {
        let script = format!("'{precast}' {args} 2>err | true; cat err");
        let mut command = Command::new("bash");
        command
            .args(["-o", "pipefail", "-c", &script])
            .env("PRECAST_STORE", &sample.path);
        let output = command.current_dir(sample.dir.path()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stdout).into_owned();
        let quiet = !errors.contains("panicked") && !errors.contains("Broken pipe");
        assert!(quiet, "{args}: {errors}");
    }
}

#[test]
fn help_is_grouped_and_completions_and_pages_are_made() {
    let sample = sample();
    let help = printed(&sample, "--help");
    for heading in [
        "Building, at deploy time:",
        "Looking, at what is there and why:",
        "Keeping house:",
        "Options:",
    ] {
        assert!(help.contains(heading), "{help}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let script = printed(&sample, &format!("completions {shell}"));
        assert!(
            script.contains("precast") && script.contains("inspect"),
            "{shell}"
        );
    }
    let pages = sample.dir.path().join("man");
    printed(&sample, &format!("man {}", pages.display()));
    let page = fs::read_to_string(pages.join("precast-ls.1")).unwrap();
    assert!(
        page.contains(".TH precast") && page.contains("older"),
        "{page}"
    );
    assert!(!pages.join("precast-help.1").exists());
}

#[test]
fn a_store_that_is_not_there_is_an_error_with_a_hint() {
    let sample = sample();
    for line in ["ls", "du", "show abcd", "log abcd", "why x", "report"] {
        refused(&sample, &format!("{line} --store nowhere"), 2, "");
    }
}

#[test]
fn programs_go_by_their_names() {
    let sample = sample();
    // A program of the newest release comes before others of its name.
    let mut live = json(&sample, "ls --state live")["programs"].take();
    live.as_array_mut()
        .unwrap()
        .retain(|row| row["bucket"] == "batch=1 seq=32");
    assert_eq!(count(&live), 1, "{live}");
    let id = &live[0]["id"];
    for name in ["encode batch=1 seq=32", "minilm encode batch=1 seq=32"] {
        assert_eq!(json(&sample, &format!("show {name}"))["id"], *id);
    }
    assert_eq!(
        json(&sample, "why encode batch=1 seq=32")["why"][0]["id"],
        *id
    );
    let log = json(&sample, "log encode batch=8 seq=128");
    assert!(
        log["logs"][0]["of"]
            .as_str()
            .unwrap()
            .starts_with("failure"),
        "{log}"
    );
    let nowhere = "no program and no ID `ffffffffffff` is in the store";
    refused(&sample, "show ffffffffffff", 3, nowhere);
    refused(&sample, "show encode", 2, "names 3 programs");
    refused(&sample, "show encode", 2, "`encode batch=1 seq=128` is ");
    refused(&sample, "show encode batch=2", 3, "no ID `encode batch=2`");
    precast(
        &sample,
        &["diff", "encode batch=1 seq=32", "encode batch=8 seq=32"],
    )
    .exits(0);
}
